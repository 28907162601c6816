"""The HTML in a real browser: nodes open, the search filters and restores, both themes can be read, names stay text."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.testing.contract import open_case

from .browser import Browser, running
from .test_html import NASTY, huge, made, one
from .writers import Case

pytestmark = pytest.mark.slow

THEMES = {
    # what decides -> (what the system prefers, attributes of the body, whether it is dark)
    "system-light": ("light", "", False),
    "system-dark": ("dark", "", True),
    "jupyter-light": ("dark", 'data-jp-theme-light="true"', False),
    "jupyter-dark": ("light", 'data-jp-theme-light="false"', True),
    "vscode-light": ("dark", 'class="vscode-light"', False),
    "vscode-dark": ("light", 'class="vscode-dark"', True),
    "marimo-light": ("dark", 'class="light-theme"', False),
    "marimo-dark": ("light", 'class="dark-theme"', True),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("browser"), tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lazyckpt.CheckpointView:
    """A checkpoint of three layers and twelve more, so that not everything is open at first."""
    state = {"embed.weight": torch.randn(50, 8)}
    for n in range(15):
        state |= {f"layers.{n}.mlp.{w}.weight": torch.randn(8, 8) for w in ("up", "down")}
        state |= {f"layers.{n}.norm.weight": torch.randn(8).bfloat16()}
    state["head.weight"] = state["embed.weight"]
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(state, path)
    return lazyckpt.open(path)


def seen(browser: Browser, within: str = "") -> list[str]:
    """The names of the rows that are seen."""
    return [e.text.split(" ")[0] for e in browser.all(f"{within} .tree .name") if e.is_displayed()]


def below(n: int) -> list[str]:
    return [str(n), "mlp", "down.weight", "up.weight", "norm.weight"]


def search(browser: Browser, text: str, number: int = 0) -> None:
    box = browser.all("input")[number]
    browser.js("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", box, text)


def test_nodes_open_and_close(browser: Browser, model: lazyckpt.CheckpointView) -> None:
    browser.show(model._repr_html_())
    before = seen(browser)
    assert {"embed.weight", "layers", "0", "14", "head.weight"} <= set(before)
    assert "norm.weight" not in before
    third = next(e for e in browser.all(".tree summary") if e.text.startswith("3"))
    third.click()
    assert seen(browser)[before.index("3") :][:3] == ["3", "mlp", "norm.weight"]
    third.click()
    assert seen(browser) == before
    assert browser.complaints() == []


def test_names_can_be_copied(browser: Browser, model: lazyckpt.CheckpointView) -> None:
    browser.show(model._repr_html_())
    browser.js("""
      window.copied = [];
      Object.defineProperty(navigator, "clipboard", {value: {writeText: async (text) => { copied.push(text); }}});
      for (const row of document.querySelectorAll(".tree .row")) {
        row.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
        row.querySelector("button.copy")?.click();
      }
    """)
    assert set(model) <= set(browser.js("return copied"))
    assert len(browser.all("button.copy")) == 1
    assert browser.js("return document.querySelector('button.copy').getAttribute('aria-label')").startswith(
        "copy the name"
    )
    assert browser.complaints() == []


def test_search_filters_and_restores(browser: Browser, model: lazyckpt.CheckpointView) -> None:
    browser.show(model._repr_html_())
    before = seen(browser)
    for text, want in (
        ("norm", ["layers", *(x for n in range(15) for x in (str(n), "norm.weight"))]),
        ("layers.3.mlp.up", ["layers", "3", "mlp", "up.weight"]),
        ("  EMBED  ", ["embed.weight"]),
        ("3.mlp", ["layers", "3", "mlp", "down.weight", "up.weight"]),
        ("ers.1", ["layers", *(x for n in (1, *range(10, 15)) for x in below(n))]),
        ("no such name", []),
    ):
        search(browser, text)
        assert seen(browser) == want, text
        rows = sum(name.endswith("weight") for name in want)
        assert browser.all(".note")[0].text == f"{rows} of 47 rows"
    search(browser, "")
    assert seen(browser) == before and not browser.all(".note")[0].is_displayed()
    browser.all("input")[0].send_keys("head")
    assert seen(browser) == ["head.weight"], "as one types it"
    assert browser.complaints() == []


def test_search_knows_the_layers_that_are_not_shown(browser: Browser) -> None:
    view = made(huge()["layers"])
    browser.show(view._repr_html_())
    for text, range_of_layers in (("layers.77.mlp.norm", "1,"), ("layers.76.mlp.norm", "0,"), ("layers.126", "")):
        search(browser, text)
        rows = seen(browser)
        assert (rows[1:2] == [range_of_layers]) if range_of_layers else rows == []
    search(browser, "77.mlp.experts.39.up.weight")
    assert seen(browser)[-1] == "up.weight" and browser.all(".note")[0].text.startswith("1 of ")
    browser.shot("huge")
    assert browser.complaints() == []


def test_outputs_do_not_disturb_each_other(browser: Browser, model: lazyckpt.CheckpointView) -> None:
    tensor = model["embed.weight"]._repr_html_()
    html = model._repr_html_()
    page = f"<p id='mine' class='row dim'>text</p><div id='a'>{html}</div><div id='b'>{html}</div>{tensor}"
    browser.show(page)
    assert len(browser.all("input")) == 2, "one for each tree, none for a tensor"
    before = seen(browser, "#b")
    search(browser, "norm", 0)
    assert len(seen(browser, "#a")) == 31 and seen(browser, "#b") == before
    search(browser, "embed", 1)
    assert len(seen(browser, "#a")) == 31 and seen(browser, "#b") == ["embed.weight"]
    style = browser.js("const s = getComputedStyle(document.getElementById('mine')); return [s.display, s.color]")
    assert style == ["block", "rgb(0, 0, 0)"], "the page around it stays as it is"
    assert browser.complaints() == []


def test_names_stay_text(browser: Browser) -> None:
    view = made({name: one(name, path=f"{name}.pt") for name in NASTY}, problems=tuple(NASTY))
    browser.show(view._repr_html_() + "".join(t._repr_html_() for t in view.values()))
    kinds = browser.js("return [...new Set([...document.body.querySelectorAll('*')].map(e => e.tagName))]")
    assert set(kinds) <= {
        "DIV",
        "SPAN",
        "UL",
        "LI",
        "DETAILS",
        "SUMMARY",
        "CODE",
        "B",
        "STYLE",
        "SCRIPT",
        "INPUT",
        "TABLE",
        "TBODY",
        "TR",
        "TD",
        "BUTTON",
    }
    assert browser.js("return document.querySelectorAll('script').length") == 1
    attributes = browser.js("return [...document.body.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
    assert len(attributes) > 20 and not any(name.startswith("on") for name in attributes)
    assert "<img src=x onerror=alert(1)>" in browser.js("return document.body.innerText")
    search(browser, "<img")
    assert any(name.startswith("<img") for name in seen(browser))
    browser.shot("nasty")
    assert browser.complaints() == []


# -- colours

CONTRAST = """
const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
const found = [];
for (const e of document.querySelectorAll(".lazyckpt *")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.dataset.l;
  if (!own || !e.checkVisibility() || /STYLE|SCRIPT/.test(e.tagName)) continue;
  const style = e.dataset.l ? getComputedStyle(e, "::before") : getComputedStyle(e);
  let back = ground(e);
  if (e.dataset.l) { const c = parse(style.backgroundColor); if (c.length < 4 || c[3] > 0) back = c; }
  const [a, b] = [light(parse(style.color)), light(back)].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), e.className + ": " + (e.dataset.l || e.textContent).slice(0, 60)]);
}
return found;
"""


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read(browser: Browser, zero_cases: dict[str, Case], tmp_path: Path, theme: str) -> None:
    system, body, dark = THEMES[theme]
    shutil.copytree(zero_cases["zero3_bf16_dp3"].path, tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("*/*pp_rank_1_*optim_states.pt")).unlink()
    view = lazyckpt.open(tmp_path / "ckpt")
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool)
    kinds = made({str(dtype): replace(one(str(dtype)), dtype=dtype) for dtype in dtypes})
    t = max(view.values(), key=lambda t: t.numel())
    parts = (view, kinds, t, view.states["step"]["embed.weight"].show(histogram=True), view.problems, view.meta)
    small = view.states["step"]
    parts += (
        view.stats(),
        small.by_layer(),
        small.by_layer("mean"),
        lazyckpt.diff(view, kinds),
        lazyckpt.diff(small, view),
    )
    browser.show("".join(part._repr_html_() for part in parts), system, body)
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    found = browser.js(CONTRAST)
    assert len(found) > 100
    assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == []
    back = browser.js("return getComputedStyle(document.querySelector('.lazyckpt')).backgroundColor")
    assert (int(re.findall(r"\d+", back)[0]) < 60) == dark
    browser.shot(f"zero3-lost-{theme}")
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [1000, 600, 380])
def test_nothing_is_cut_off(
    browser: Browser, megatron_cases: dict[str, Case], huggingface_cases: dict[str, Case], width: int
) -> None:
    """At any width the page scrolls nowhere sideways, and rows have one line where there is room."""
    for name, case in (("moe", megatron_cases["tp2_ep2_etp1"]), ("hf", huggingface_cases["llama_sharded"])):
        view = open_case(case)
        t = max(view.values(), key=lambda t: (len(t.fragments), t.numel()))
        for theme in ("light", "dark"):
            browser.show(view._repr_html_() + t._repr_html_(), theme, width=width)
            wide = "return [...document.querySelectorAll('.lazyckpt')].map(e => e.scrollWidth - e.clientWidth)"
            assert all(extra <= 0 for extra in browser.js(wide)), (name, width)
            if width == 1000:
                rows = "return Math.max(...[...document.querySelectorAll('.row')].map(e => e.offsetHeight))"
                assert browser.js(rows) < 30
            browser.shot(f"{name}-{theme}-{width}")
            assert browser.complaints() == []


def test_without_styles_and_scripts(browser: Browser, megatron_cases: dict[str, Case]) -> None:
    """As on GitHub: the lists are there, nodes open, and no search box that does nothing."""
    view = open_case(megatron_cases["tp2_ep2_etp1"])
    html = view._repr_html_() + next(iter(view.values()))._repr_html_()
    html = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.S)
    browser.show(re.sub(r' (style|class|data-[a-z]+)="[^"]*"', "", html))
    assert browser.all("input") == []
    names = [e for e in browser.all("li code") if e.is_displayed()]
    left = {e.location["x"] for e in names}
    assert len(names) > 5 and len(left) > 1, "what is deeper stands further in"
    fold = next(e for e in browser.all("li > details:not([open]) > summary") if e.is_displayed())
    fold.click()
    assert len([e for e in browser.all("li code") if e.is_displayed()]) > len(names)
    browser.shot("without-styles")
