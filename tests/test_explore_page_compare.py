"""The explorer's pages of comparisons and runs, in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lazyckpt

from .browser import Browser, chromium, running
from .test_explore_page_structure import HOSTILE, Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium()
    with running(tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Callable[..., Page]]:
    servers = []

    def opened(*paths: Path) -> Page:
        servers.append(lazyckpt.serve(*paths))
        return Page(browser, servers[-1].url)

    yield opened
    for server in servers:
        server.close()


def model(change: float) -> dict[str, torch.Tensor]:
    found = {f"layers.{n}.{w}.weight": torch.full((4, 4), n + 1.0) for n in range(4) for w in ("up", "down")}
    found["layers.2.up.weight"] = found["layers.2.up.weight"] * (1 + change)
    found["layers.1.up.weight"] = found["layers.1.up.weight"] * (1 + change / 4)
    return found | {HOSTILE: torch.ones(2) + change}


def test_two_checkpoints_are_compared(page: Callable[..., Page], tmp_path: Path) -> None:
    torch.save(model(0), tmp_path / "a.pt")
    torch.save(model(0.5) | {"added": torch.ones(3)}, tmp_path / "b.pt")
    compare = page(tmp_path / "a.pt", tmp_path / "b.pt")
    compare.go("#/compare")
    text = compare.until(
        "document.querySelector('.compare-summary')?.textContent.includes('3 have') && document.body.innerText"
    )
    assert "6 of 10 tensors are equal" in text
    assert "1 only in B" in text
    tree = "[...document.querySelectorAll('.compare [role=treeitem]')]"
    first = compare.until(f"{tree}[0]?.textContent")
    assert "layers.*.up.weight" in first or HOSTILE[:4] in first
    assert not compare.browser.js("return document.querySelector('.compare img')")  # a name is no markup

    compare.browser.js(f"{tree}.find(e => e.textContent.includes('up')).click()")
    compare.until(f"{tree}.filter(e => e.ariaLevel === '2').length === 4")
    rows = compare.browser.js(f"return {tree}.filter(e => e.ariaLevel === '2').map(e => e.textContent)")
    assert "0.5000" in rows[2]
    assert "0.1250" in rows[1]
    compare.browser.js(f"{tree}.find(e => e.textContent.includes('layers.2.up')).click()")
    compare.until("document.querySelector('.compare canvas')")
    assert "name=layers.2.up.weight" in compare.browser.js("return location.hash")
    assert ".plot.difference(" in compare.browser.js("return document.querySelector('.compare').textContent")

    compare.go("#/compare?list=all&measure=angle")
    table = compare.until("document.querySelector('[aria-label=differences]')?.textContent")
    assert "layers.0.down.weight" in table
    assert compare.browser.js(
        "return document.querySelector('[aria-label=measure] [aria-pressed=true]').textContent"
    ) == ("1 \N{MINUS SIGN} cosine")


def test_a_run_has_its_courses(page: Callable[..., Page], tmp_path: Path) -> None:
    for step in (10, 20, 40):
        (tmp_path / f"step_{step}").mkdir()
        torch.save(model(step / 10), tmp_path / f"step_{step}" / "model.pt")
    run = page(tmp_path)
    run.go("#/run?quantity=drift")
    run.until("document.querySelectorAll('.run-panel').length === 3")
    run.until("document.querySelectorAll('.run-panel svg.picture').length >= 1")
    assert not run.browser.js("return document.querySelector('.run img')")
    run.browser.js("[...document.querySelectorAll('.run-name')].find(e => e.textContent === 'up').click()")
    run.until("document.querySelector('.run [role=table]')")
    assert "kind=layers.*.up.weight" in run.browser.js("return decodeURIComponent(location.hash)")

    run.go("#/run?kind=layers.*.up.weight&quantity=drift&step=20")
    rows = run.until(
        "document.querySelector('.run .virtual-rows [role=row]')"
        " && [...document.querySelectorAll('.run .virtual-rows [role=row]')].map(e => e.textContent)"
    )
    (row,) = (row for row in rows if row.startswith("layer 2"))
    assert "0.5" in row  # of 3 * 2 at step 10, 3 * 3 at step 20
    assert run.browser.js("return document.querySelector('.run-slider output').textContent") == "20"
    assert run.browser.js("return document.querySelectorAll('.chart-mark').length") == 1


def test_a_step_is_chosen_on_every_page_and_compared_with_another(page: Callable[..., Page], tmp_path: Path) -> None:
    for step in (10, 20, 40):
        (tmp_path / f"step_{step}").mkdir()
        torch.save(model(step / 10), tmp_path / f"step_{step}" / "model.pt")
    run = page(tmp_path)
    run.go("#/tensor?name=layers.2.up.weight&step=20")
    values = "document.querySelector('[aria-label=\"Values as a table\"] [role=table]')?.textContent"
    run.until(f"{values}?.includes('9.0')")  # 3 * (1 + 2)
    shown = "document.querySelector('select[aria-label=step]').value"
    assert run.browser.js(f"return {shown}") == "20"
    run.keys(".")
    run.until(f"location.hash.includes('step=40') && {shown} === '40' && {values}?.includes('15.0')")
    run.browser.js("document.querySelector('[aria-label=\"previous step\"]').click()")
    run.until(f"location.hash.includes('step=20') && {values}?.includes('9.0')")

    run.go("#/run?step=40")
    run.until("document.querySelector('.run-tools')")
    run.browser.js(
        "const s = [...document.querySelectorAll('.run-tools select')].find(e => e.textContent.includes('step 10'));"
        "s.value = '10'; s.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    run.until("location.hash.startsWith('#/compare?') && location.hash.includes('with=10')")
    text = run.until(
        "document.querySelector('.compare-summary')?.textContent.includes('3 have') && document.body.innerText"
    )
    assert ".at(40), " in text
    assert ".at(10))" in text
    run.go("#/compare?step=40&with=20&name=layers.2.up.weight&list=all")
    run.until("document.querySelector('.compare canvas')")
    row = run.until(
        "[...document.querySelectorAll('.compare [role=row]')].find(e => e.textContent.includes('2.up'))?.textContent"
    )
    assert "0.4000" in row  # of 3 * 5 at step 40, 3 * 3 at step 20

    hrefs = run.browser.js("return [...document.querySelectorAll('.top nav a')].map(e => e.getAttribute('href'))")
    assert all("step=40" in href and "with=20" in href for href in hrefs)  # also of a page in a new tab
    run.go("#/run?step=40&with=20")
    run.until("document.querySelector('.run-slider input')")
    run.browser.js(
        "const s = document.querySelector('.run-slider input');"
        "s.value = '1'; s.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    # nothing is compared with itself
    run.until("location.hash.includes('step=20') && !location.hash.includes('with=')")


def test_norms_of_a_step_are_not_shown_at_another(page: Callable[..., Page], tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"step_{step}").mkdir()
        torch.save(model(step / 10), tmp_path / f"step_{step}" / "model.pt")
    run = page(tmp_path)
    run.go("#/tree?name=layers.2.up.weight")
    button = "[...document.querySelectorAll('.tree-tools button')].find(one => one.textContent.startsWith('Norms'))"
    run.until(f"document.querySelector('select[aria-label=step]')?.value === '20' && {button}")
    run.browser.js(f"{button}.click()")
    run.until(f"!{button} && document.querySelector('[role=tree] .tree-norm')")
    run.keys(",")
    run.until(f"document.querySelector('select[aria-label=step]').value === '10' && {button}")
    assert not run.browser.js("return document.querySelector('[role=tree] .tree-norm')")
    run.browser.js(  # the point of a name that is typed is no key for the next step
        "for (const key of 'down.')"
        " document.querySelector('[role=tree]').dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }))"
    )
    assert "step=10" in run.until("location.hash.includes('down.weight') && location.hash")
