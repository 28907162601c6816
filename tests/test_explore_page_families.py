"""Every page of the explorer on checkpoints of several families, in a real browser: it shows what Python finds."""

from __future__ import annotations

import json
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import torch

import lazyckpt
from lazyckpt.inspect.expert_likeness import expert_likeness

from .browser import Browser, chromium, running, until
from .recordings import GOLDEN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """It reaches this machine only."""
    chromium()
    apart = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with running(tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("profile"), apart) as found:
        found.driver.get("about:blank")
        yield found


EVERY_CONTROL = """
    const done = arguments[0];
    const drawn = () => new Promise((resolve) => setTimeout(resolve, 25));
    const all = (css) => [...document.querySelectorAll(css)].filter((one) => one.checkVisibility() && !one.disabled);
    const leads = (one) => /compare with/.test(one.closest('label')?.textContent); // to another page
    const use = (one) => {
        if (one.role === 'group') return one.querySelector('[aria-pressed=false], button:not([aria-pressed])')?.click();
        if (one.classList.contains('treemap-leaf')) return one.dispatchEvent(new Event('click', {bubbles: true}));
        if (one.tagName !== 'SELECT') return one.click();
        one.selectedIndex = [...one.options].findIndex((option) => !option.selected && !option.disabled);
        one.dispatchEvent(new Event('change', {bubbles: true}));
    };
    const ask = window.fetch;
    let waiting = 0;
    window.fetch = (...about) => {
        waiting += 1;
        return ask(...about).finally(() => { waiting -= 1; });
    };
    (async () => {
        for (const css of ['summary', 'select', '[role=group]', 'input[type=checkbox]', '.treemap-leaf',
            '[role=columnheader]:nth-child(2) button', '[aria-expanded=false]', '.ranks .table-click']) {
            const count = all('main ' + css).length;
            for (let n = 0; n < Math.min(count, 3); n += 1) {
                const one = all('main ' + css)[n];
                if (one && !leads(one)) use(one);
                await drawn();
            }
        }
        for (let quiet = 0; quiet < 8; quiet = waiting ? 0 : quiet + 1) await drawn();
        done();
    })();
"""
STATE = """() => {
    const all = (css) => [...document.querySelectorAll('main ' + css)];
    const text = document.querySelector('main')?.innerText ?? '…';
    return !/ing\\b.*…/.test(text) && [location.hash, text, ...all('select, input').map((one) => one.value),
        ...all('[type=checkbox], details').map((one) => one.checked ?? one.open),
        ...['pressed', 'expanded', 'sort', 'selected'].flatMap((name) =>
            all(`[aria-${name}]`).map((one) => one.getAttribute(`aria-${name}`)))];
}"""  # what is on the page, once nothing is loading


class Pages:
    """The pages of one subject. ``view``: what they show, of a run its last step."""

    def __init__(self, browser: Browser, server: Any, view: lazyckpt.CheckpointView) -> None:
        self.browser, self.js, self.view = browser, browser.js, view
        self.base = server.url.partition("?")[0]
        browser.complaints()
        browser.driver.get(server.url)
        self.until("document.querySelector('[role=treeitem]')")
        self.titles = self.js("return [...document.querySelectorAll('.top nav a')].map(a => a.textContent)")

    def until(self, code: str) -> Any:
        return until(self.browser, code)

    def go(self, page: str, **parameters: str) -> None:
        query = "&".join(f"{key}={quote(value, safe='')}" for key, value in parameters.items())
        self.js("location.hash = arguments[0]", f"#/{page}?{query}")
        self.until(f"document.querySelector('[aria-current=page]').hash.startsWith('#/{page}')")

    def asked(self, name: str) -> str:
        """A parameter of the link."""
        (found,) = parse_qs(urlsplit(self.js("return location.hash")[1:]).query)[name]
        return found

    def rows(self, caption: str) -> list[list[str]]:
        """The texts of a table's cells."""
        table = f"document.querySelector('[role=table][aria-label^=' + {json.dumps(json.dumps(caption))} + ']')"
        texts = "row => [...row.children].map(cell => cell.textContent)"
        code = f"[...({table}?.querySelectorAll('[role=row]') ?? [])].slice(1).map({texts})"
        return list(self.until(f"(rows => rows.length > 0 && rows)({code})"))

    def opened(self) -> None:
        """Open what is folded."""
        self.js("document.querySelectorAll('main details').forEach(one => one.open = true)")

    def comes_back(self) -> None:
        """Use every control of the page, and check that its link alone brings all of that back."""
        self.browser.driver.execute_async_script(EVERY_CONTROL)
        shown = self.until(f"({STATE})()")
        self.browser.driver.refresh()
        expected = json.dumps(shown, separators=(",", ":"), ensure_ascii=False)
        self.until(f"JSON.stringify(({STATE})()) === {json.dumps(expected)}")

    def pressed(self, group: str, text: str) -> None:
        self.js(
            "[...document.querySelectorAll(`[aria-label='${arguments[0]}'] button`)]"
            ".find(one => one.textContent === arguments[1]).click()",
            group,
            text,
        )


FAMILIES = {  # paths of recordings, a matrix that is shown, and the pages that not all checkpoints have
    "zero3": (["models/zero3/ckpt"], "model.layers.1.self_attn.q_proj.weight", "Ranks Optimizer"),
    "megatron": (["megatron/tp2_pp2_distopt_tied/legacy"], "embedding.word_embeddings.weight", "Ranks Optimizer"),
    "experts": (["huggingface/mixtral/ckpt"], "model.embed_tokens.weight", "Ranks Experts"),
    "steps": (["trainers/torchtitan/ckpt/checkpoint"], "layers.1.up.weight", "Run Ranks Optimizer"),
    "quantized": (["quantized_gptq/w4_v1_sharded_tied/ckpt"], "model.embed_tokens.weight", "Ranks"),
    "formats": (["models/zero3/ckpt", "models/dcp/ckpt"], "lm_head.weight", "Compare Ranks"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_page_shows_what_python_finds(browser: Browser, tmp_path: Path, family: str) -> None:
    recorded, name, more = FAMILIES[family]
    for one in recorded:
        group, case, *_ = one.split("/")
        with tarfile.open(GOLDEN / group / f"{case}.tar.xz") as archive:
            archive.extractall(tmp_path / group, filter="data")
    paths = [tmp_path / one for one in recorded]
    view = lazyckpt.open(paths[0] / "step-2" if family == "steps" else paths[0])
    words = [f"word{n}" for n in range(view[name].shape[0])]
    tokenizer = {"model": {"vocab": {word: n for n, word in enumerate(words)}}, "added_tokens": []}
    if family == "experts":
        (paths[0] / "tokenizer.json").write_text(json.dumps(tokenizer))
    with lazyckpt.serve(*paths) as server:
        pages = Pages(browser, server, view)
        assert {"Tensors", "Tensor", "Architecture", *more.split()} <= set(pages.titles)
        for title in pages.titles:
            CHECKS[title](pages, name, paths)
            assert not pages.js("return [...document.querySelectorAll('.failure')].map(one => one.textContent)")
            assert pages.js("return document.documentElement.scrollWidth <= innerWidth"), title
            if family == "steps":
                pages.comes_back()
        complaints = [one for one in browser.complaints() if not one.startswith(f"requested {pages.base}")]
        assert not [one for one in complaints if "chrome://" not in one and "requested blob:" not in one]


def close(text: str, value: float) -> bool:
    """Whether a number of the page is this one, in the digits that it has."""
    found = float(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))
    return math.isclose(found, value, rel_tol=6e-3, abs_tol=1e-12)


def the_tree(pages: Pages, name: str, paths: list[Path]) -> None:
    count = pages.js("return document.querySelector('.tree-tools').textContent")
    assert f"{len(pages.view)} names" in count
    pages.go("tree", q=name)
    (label,) = pages.until(
        "(all => all.length === 1 && all.map(e => e.textContent))"
        "([...document.querySelectorAll('[role=treeitem]:not([aria-expanded])')])"
    )
    assert str(list(pages.view[name].shape)) in label


def the_tensor(pages: Pages, name: str, paths: list[Path]) -> None:
    tensor = pages.view[name]
    values = tensor[...].double()
    pages.go("tensor", name=name)
    pages.until("document.querySelector('.heatmap canvas') && document.querySelector('.histogram-bars')")
    facts = dict(
        pages.js(
            "return [...document.querySelectorAll('.figure .tensor-facts dt')]"
            ".map(one => [one.textContent, one.nextSibling.textContent])"
        )
    )
    assert close(facts["L2 norm"], values.norm().item()) and close(facts["max"], values.max().item())
    index, largest = pages.rows("largest elements")[0]
    assert abs(float(largest)) == pytest.approx(values.abs().max().item(), rel=1e-6)
    assert abs(values[tuple(json.loads(index))].item()) == pytest.approx(abs(float(largest)), rel=1e-6)
    first = [[float(one) for one in row[1:]] for row in pages.rows("values")]
    shown = torch.tensor(first, dtype=torch.float64)
    assert torch.allclose(shown, values[: shown.shape[0], : shown.shape[1]], rtol=1e-3, atol=1e-9)

    pages.until("document.querySelector('[aria-label^=\"singular values\"]')")
    if tensor.dtype.itemsize <= 2:
        ones = dict(row[:2] for row in pages.rows("share of ones"))
        assert ones["sign"] == f"{100 * (values.sign() < 0).double().mean().item():.2f} %"
    else:
        assert not pages.js("return document.querySelector('[aria-label^=\"share of ones\"]')")

    pages.js("document.querySelector('.heatmap canvas').focus()")
    whole = pages.js("return location.hash")
    pages.js("document.querySelector('.heatmap [aria-label=\"zoom in\"], .heatmap button').click()")
    pages.until(f"location.hash !== {json.dumps(whole)}")
    assert pages.asked("view")
    pages.go("tensor", name=name)

    heads = "[...document.querySelectorAll('.tensor-tools label')].find(one => one.textContent.startsWith('attention'))"
    if pages.js(f"return !!{heads}"):
        first_row, last_row = pages.js(
            f"const select = {heads}.querySelector('select'); select.value = '1';"
            " select.dispatchEvent(new Event('change', {bubbles: true}));"
            " return select.options[2].textContent.match(/(\\d+).(\\d+)$/).slice(1)"
        )
        pages.until("location.hash.includes('view=')")
        window = [float(one) for one in pages.asked("view").split(",")]
        assert window[:2] == [int(first_row), int(last_row) + 1]
        pages.until(f"{heads}?.querySelector('select').value === '1'")
        pages.js(
            f"const select = {heads}.querySelector('select'); select.selectedIndex = 0;"
            " select.dispatchEvent(new Event('change', {bubbles: true}))"
        )
        pages.until("!location.hash.includes('view=')")
    elif "embed" in name or "head" in name:
        nearest(pages, values)
    states = pages.js("return [...document.querySelectorAll('[aria-label=state] button')].map(one => one.textContent)")
    if "exp_avg" in states:
        pages.go("tensor", name=name)
        pages.pressed("state", "exp_avg")
        pages.until("document.querySelector('[aria-label=state] [aria-pressed=true]')?.textContent === 'exp_avg'")
        moment = pages.view.states["exp_avg"][name][...].double()
        rows = pages.rows("largest elements")
        assert abs(float(rows[0][1])) == pytest.approx(moment.abs().max().item(), rel=1e-6)


def nearest(pages: Pages, rows: torch.Tensor) -> None:
    """The nearest rows of an embedding, by cosine, with tokens if a tokenizer lies beside."""
    pages.js("document.querySelector(\"[aria-label='Nearest rows'] form\").requestSubmit()")
    found = pages.rows("nearest rows")
    cosines = torch.nn.functional.cosine_similarity(rows[:1], rows)
    others = cosines[1:].sort(descending=True).values
    listed = [row for row in found if row[0] != "0"]
    assert [float(row[2]) for row in listed[:3]] == pytest.approx(others[:3].tolist(), abs=1e-4)
    if any(row[1] for row in found):
        assert all(row[1] == f"word{row[0]}" for row in found)


def the_architecture(pages: Pages, name: str, paths: list[Path]) -> None:
    pages.go("architecture")
    pages.until("document.querySelector('.treemap-leaf')")
    for kind, _, _, tensors, *_ in pages.rows("kinds")[:8]:
        pattern = re.escape(kind).replace(r"\*", r"\d+")
        assert int(tensors) == sum(re.fullmatch(pattern, one) is not None for one in pages.view)


def the_ranks(pages: Pages, name: str, paths: list[Path]) -> None:
    pages.go("ranks")
    pages.until("document.querySelector('.ranks [role=application]')")
    rows = pages.rows("files")
    assert {Path(row[0]).name for row in rows} <= {Path(one).name for one in pages.view.files}
    assert len(rows) > 1
    pages.go("ranks", states="weights")  # the state that is shown, whatever it is called
    pages.until("document.querySelector('.ranks .python')?.textContent.includes('own')")
    assert len(pages.rows("files")) > 1


def the_optimizer(pages: Pages, name: str, paths: list[Path]) -> None:
    pages.go("optimizer", state="exp_avg", of="no quantity")
    pages.until("document.querySelector('[aria-label^=\"Root mean square\"]')")
    pages.go("optimizer", state="exp_avg", of="norm")
    pages.until("document.querySelector('[aria-label=States] [role=application]')")
    pages.opened()
    kind, layer, norm, _ = pages.rows("L2 norm of exp_avg")[0]
    name = kind.replace("*", layer)
    assert close(norm, pages.view.states["exp_avg"][name][...].double().norm().item())


def the_experts(pages: Pages, name: str, paths: list[Path]) -> None:
    pages.go("experts", layer="1")
    pages.until("document.querySelectorAll('main [role=application]').length === 2")
    layers = pages.js("return [...document.querySelectorAll('main svg text.axis')].map(one => one.textContent)")
    assert layers[:2] == ["0", "1"]
    pages.opened()
    layer, expert, norm, _ = pages.rows("experts")[-1]
    of = [t for n, t in pages.view.items() if f"layers.{layer}." in n and f".experts.{expert}." in n]
    assert close(norm, math.sqrt(sum(t[...].double().square().sum().item() for t in of)))
    text = pages.js("return document.querySelectorAll('main [role=application]')[1].getAttribute('aria-label')")
    found = expert_likeness(pages.view, 1).cosines
    assert f"{len(found)} by {len(found)} cells" in text


def the_comparison(pages: Pages, name: str, paths: list[Path]) -> None:
    steps = [path / f"step-{n}" for path in paths for n in (1, 2)] if len(paths) == 1 else []  # of a run
    pages.go("compare", list="all", **({"step": "1", "with": "2"} if steps else {}))
    summary = pages.until(
        "(t => /have other values/.test(t) && t)(document.querySelector('.compare-summary')?.textContent)"
    )
    one, other = (lazyckpt.open(path) for path in steps or paths)
    both = [name for name in one if name in other]
    equal = [name for name in both if torch.equal(one[name][...], other[name][...])]
    assert f"{len(equal)} of {len(both)} tensors are equal" in summary
    for name, _, relative, *_ in pages.rows("differences")[:3]:
        a, b = one[name][...].double(), other[name][...].double()
        assert close(relative, ((a - b).norm() / a.norm()).item())
    pages.js("document.querySelectorAll('[aria-label=differences] .table-click')[0].click()")
    pages.until("document.querySelector('.compare .heatmap canvas')")


def the_run(pages: Pages, name: str, paths: list[Path]) -> None:
    pages.go("run", kind="layers.*.up.weight", quantity="norm", step="1")
    pages.until("document.querySelector('.run svg.picture')")
    name, now, _ = pages.rows("L2 norm at step 1")[1]
    first = lazyckpt.open(paths[0] / "step-1")
    assert close(now, first[f"layers.{name.split()[-1]}.up.weight"][...].double().norm().item())
    pages.js("location.hash = '#/run'")
    pages.until("document.querySelectorAll('.run-panel svg.picture').length > 1")


CHECKS = {
    "Tensors": the_tree,
    "Tensor": the_tensor,
    "Architecture": the_architecture,
    "Compare": the_comparison,
    "Run": the_run,
    "Ranks": the_ranks,
    "Optimizer": the_optimizer,
    "Experts": the_experts,
}
