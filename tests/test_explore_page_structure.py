"""The explorer's frame and its pages of the tree, the architecture and the ranks, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
import lazyckpt.demo as demo_files

from .browser import Browser, chromium, running, until

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=alert(1)>.\x1b[31m\u202eweight"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium()
    folder = tmp_path_factory.mktemp("pages")
    with running(folder, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-3 checkpoint without the optimizer's file of rank 2."""
    folder = tmp_path_factory.mktemp("damaged")
    demo_files.write(folder)
    (gone,) = folder.glob("zero3/*/*rank_2_mp_rank_00_optim_states.pt")
    gone.unlink()
    return folder / "zero3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    tensors = {f"layers.{n}.{which}.weight": torch.full((4, 4), n + 1.0) for n in range(12) for which in ("up", "down")}
    tensors["layers.0.extra.bias"] = torch.ones(3, dtype=torch.bfloat16)
    tensors["layers.7.up.weight"][1, 2] = float("nan")
    torch.save(tensors | {HOSTILE: torch.ones(2), "emb.weight": torch.ones(8, 4)}, path)
    return path


class Page:
    """The explorer of a path, in the browser."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser, self.url = browser, url

    def go(self, route: str) -> None:
        """Load the page anew at a route, as a link does."""
        self.browser.driver.get("about:blank")
        self.browser.driver.get(f"{self.url}{route}")

    def until(self, code: str) -> Any:
        """What a JavaScript expression gives when it is true."""
        return until(self.browser, code)

    def rows(self) -> list[str]:
        return list(
            self.browser.js(
                "return [...document.querySelectorAll('[role=treeitem] .tree-label')].map(e => e.textContent)"
            )
        )

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser.driver).send_keys(*keys).perform()


@pytest.fixture
def page(browser: Browser) -> Iterator[Callable[[Path], Page]]:
    servers = []

    def opened(path: Path) -> Page:
        servers.append(lazyckpt.serve(path))
        return Page(browser, servers[-1].url)

    yield opened
    for server in servers:
        server.close()


def test_the_tree_folds_searches_and_links(page: Callable[[Path], Page], model: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    tree = page(model)
    tree.go("")
    tree.until("document.querySelector('[role=treeitem]')")
    rows = tree.rows()
    assert "1\N{EN DASH}11" in rows  # the alike layers are one row
    assert "0" in rows  # the one that differs stands alone
    assert "has extra.bias" in tree.browser.js("return document.querySelector('.tree-differs').textContent")
    assert not tree.browser.js("return document.querySelector('[role=tree] img')")  # a name is no markup

    field = tree.browser.all("input[type=search]")[0]
    field.send_keys("extra")
    tree.until("document.querySelector('.tree-tools [aria-live]').textContent.startsWith('1 of 27')")
    assert "q=extra" in tree.browser.js("return location.hash")
    field.send_keys(Keys.ESCAPE)
    tree.until("document.querySelector('.tree-tools [aria-live]').textContent === '27 names'")

    tree.go("#/tree?name=layers.7.up.weight")
    tree.until("document.querySelector('.card h2')?.textContent.startsWith('layers.7.up.weight')")
    selected = tree.until("document.querySelector('[role=treeitem][aria-selected=true]')?.textContent")
    assert "up" in selected


def test_the_keys_of_the_tree(page: Callable[[Path], Page], model: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    tree = page(model)
    tree.go("")
    tree.until("document.querySelector('[role=treeitem]')")
    tree.browser.js("document.querySelector('[role=tree]').focus()")
    active = "document.querySelector('[role=treeitem][aria-selected=true] .tree-label')?.textContent"
    tree.keys(Keys.HOME)
    first = tree.until(active)
    tree.keys(Keys.END)
    assert tree.until(f"{active} !== {json.dumps(first)} && {active}")
    tree.keys("lay")
    tree.until(f"{active} === 'layers'")
    expanded = "document.querySelector('[role=treeitem][aria-selected=true]').getAttribute('aria-expanded')"
    tree.keys(Keys.ARROW_LEFT)
    tree.until(f"{expanded} === 'false'")
    tree.keys(Keys.ARROW_RIGHT)
    tree.until(f"{expanded} === 'true'")
    tree.keys("?")
    tree.until("document.querySelector('dialog[open]')")


def test_norms_are_computed_on_demand(page: Callable[[Path], Page], model: Path) -> None:
    tree = page(model)
    tree.go("#/tree?name=emb.weight")
    tree.until("document.querySelector('[role=treeitem]')")
    tree.browser.js("[...document.querySelectorAll('button')].find(b => b.textContent.startsWith('Norms')).click()")
    assert "5.657" in tree.until(
        "document.querySelector('.card')?.textContent.includes('norm') && document.querySelector('.card').textContent"
    )
    assert tree.browser.js("return document.querySelectorAll('[role=tree] svg.spark').length") > 0
    marks = tree.browser.js("return [...document.querySelectorAll('.tree-mark')].map(e => e.textContent)")
    assert "NaN" in marks


def test_the_theme_is_kept(page: Callable[[Path], Page], model: Path) -> None:
    frame = page(model)
    frame.go("")
    frame.until("document.querySelector('.top button')")
    theme = "document.querySelector('#explorer').dataset.theme"
    frame.browser.js("[...document.querySelectorAll('.top button')].find(b => b.textContent.includes('auto')).click()")
    frame.until(f"{theme} === 'light'")
    frame.browser.js("[...document.querySelectorAll('.top button')].find(b => b.textContent.includes('light')).click()")
    frame.until(f"{theme} === 'dark'")
    frame.go("")
    frame.until(f"{theme} === 'dark'")
    frame.browser.js("localStorage.clear()")


def test_the_cost_of_a_mesh_is_in_the_link(page: Callable[[Path], Page], damaged: Path) -> None:
    architecture = page(damaged)
    architecture.go("#/architecture?tp=2&dp=4&zero=3")
    text = architecture.until("document.querySelector('.memory-sum')?.textContent")
    assert "each of 8 ranks" in text
    assert architecture.browser.js("return document.querySelectorAll('.treemap-leaf').length") > 3
    architecture.go("#/architecture?tp=7")
    assert "cannot be cut" in architecture.until("document.querySelector('.failure')?.textContent")


def test_a_lost_rank_is_shown(page: Callable[[Path], Page], damaged: Path) -> None:
    ranks = page(damaged)
    ranks.go("#/ranks")
    assert ranks.until("document.querySelector('.grid-mark')?.textContent") == "\N{MULTIPLICATION SIGN}"
    lost = ranks.until(
        "document.querySelector('[aria-label=lost] .virtual-rows [role=row]')"
        " && document.querySelector('.ranks').textContent"
    )
    assert "Copy it from the source" in lost
    ranks.browser.all("[aria-label=lost] .virtual-rows [role=row]")[0].click()
    ranks.until("[...document.querySelectorAll('.tree-mark')].some(e => e.textContent === 'lost')")
    problems = ranks.browser.all(".problem-count")[0]
    problems.click()
    assert "missing-file" in ranks.until("document.querySelector('dialog[open]')?.textContent")
