"""The explorer's pages are accessible: axe-core finds no serious fault in them, in either theme."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lazyckpt
import lazyckpt.demo as demo_files

from .browser import Browser, chromium, running

pytestmark = pytest.mark.slow
AXE = Path(__file__).parents[1] / "lazyckpt" / "explore" / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {  # page: what it has when it is complete
    "tree": "[role=treeitem]",
    "tensor": ".heatmap canvas",
    "architecture": ".treemap-leaf",
    "ranks": "[role=grid], .grid svg, .grid",
    "optimizer": "main svg, main canvas",
    "experts": "main svg, main canvas",
}
RUN = """
const done = arguments[0];
axe.run(document, {resultTypes: ["violations"]}).then(
  found => done(found.violations.filter(v => ["serious", "critical"].includes(v.impact)).map(
    v => `${v.id}: ${v.help}: ` + v.nodes.slice(0, 4).map(n => n.html.slice(0, 200) + " " + n.failureSummary).join("; "))),
  error => done([String(error)]));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium()
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci in lazyckpt/explore/frontend")
    with running(tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("profile")) as found:
        yield found


def until(browser: Browser, code: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser.driver, 10, 0.05).until(lambda driver: driver.execute_script(f"return {code}"))


def test_axe_finds_no_serious_fault(browser: Browser, tmp_path: Path) -> None:
    demo_files.write(tmp_path)
    faults = []
    with lazyckpt.serve(tmp_path / "zero3") as server:
        browser.driver.get(server.url)
        name = until(browser, "document.querySelector('[role=treeitem]') && 1") and widest(tmp_path / "zero3")
        pages = browser.js("return [...document.querySelectorAll('.top nav a')].map(a => a.hash.slice(2).split('?')[0])")
        browser.js(AXE.read_text("utf-8"))
        for theme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": theme}]
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            for page in pages:
                browser.js(f"location.hash = '#/{page}?name={name}'")
                until(browser, f"document.querySelector('[aria-current=page]').hash.startsWith('#/{page}')")
                until(browser, f"document.querySelector({PAGES[page]!r})")
                faults += [f"{page}, {theme}: {one}" for one in browser.driver.execute_async_script(RUN)]
    assert not faults, "\n".join(faults)
    assert set(pages) >= {"tree", "tensor", "architecture", "ranks", "optimizer"}


def widest(path: Path) -> str:
    view = lazyckpt.open(path)
    return max((name for name in view if view[name].ndim == 2), key=lambda name: view[name].numel())
