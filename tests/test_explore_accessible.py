"""The explorer's pages are accessible, hostile names do nothing in them, and a report needs no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import lazyckpt
import lazyckpt.demo as demo_files
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.fitting import key_of, plans
from lazyckpt.explore.server import asset
from lazyckpt.explore.subject import Subject

from .browser import Browser, chromium, running, until

pytestmark = pytest.mark.slow
AXE = Path(__file__).parents[1] / "lazyckpt" / "explore" / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
SHOWN = {  # page: what it has when it is complete
    "tree": "[role=treeitem]",
    "tensor": ".heatmap canvas",
    "architecture": ".treemap-leaf",
    "ranks": "[role=application]",
    "optimizer": "[role=application]",
    "experts": "[role=application]",
    "compare": ".compare [role=treeitem]",
    "run": ".run-panel svg.picture",
}
RUN = """
const [rules, done] = arguments;
axe.run(document, {resultTypes: ["violations"], ...rules}).then(
  found => done(found.violations.filter(v => ["serious", "critical"].includes(v.impact)).map(
    v => `${v.id}: ${v.help}: ` + v.nodes.slice(0, 4).map(n => n.html.slice(0, 200)).join("; "))),
  error => done([String(error)]));
"""
WIDER = """  // what makes the page wider than the window
if (document.documentElement.scrollWidth <= innerWidth) return [];
return [innerWidth, ...[...document.querySelectorAll("body *")].map(e => [e, e.getBoundingClientRect()])
  .filter(([e, r]) => r.width && r.right > innerWidth)
  .map(([e, r]) => `${e.tagName}.${e.className} ${r.left} to ${r.right}: ${e.textContent.slice(0, 40)}`).slice(0, 40)];
"""
HOSTILE = [
    "<img src=x onerror=alert(1)>.weight",
    "</script><script>alert(1)</script>",
    "javascript:alert(1)",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.weight\u2066",
    "line\nbreak\r\n\x00",
    "a" * 10_000,
    "x." * 3000 + "w",
    "lone\ud800.weight",
    "../../etc/passwd",
    "#/tensor?name=x&state=%00+%2e",
    "__proto__",
    "constructor.prototype",
    "layers.0.mlp.experts.0.<b>w",
    "layers.0.mlp.experts.1.<b>w",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """It reaches this machine only."""
    chromium()
    apart = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with running(tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("profile"), apart) as found:
        yield found


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    demo_files.write(folder)
    return folder / "zero3"


def pages(browser: Browser) -> list[str]:
    until(browser, "document.querySelector('[role=treeitem]')")
    return list(
        browser.js("return [...document.querySelectorAll('.top nav a')].map(a => a.hash.slice(2).split('?')[0])")
    )


def show(browser: Browser, page: str, name: str) -> None:
    browser.js("location.hash = arguments[0]", f"#/{page}?name={lone_too(name)}")
    until(browser, f"document.querySelector('[aria-current=page]').hash.startsWith('#/{page}')")
    until(browser, f"document.querySelector({'main ' + SHOWN[page]!r})")


def lone_too(name: str) -> str:
    from urllib.parse import quote

    return quote(name.encode("utf-8", "surrogatepass"), safe="")


def faults(browser: Browser, url: str, wanted: set[str], name: str, more: str = "") -> list[str]:
    """What axe-core finds on some pages of an explorer, in both themes. ``more``: JavaScript that opens more."""
    found = []
    browser.driver.get(url)
    shown = pages(browser)
    assert wanted <= set(shown)
    browser.js(AXE.read_text("utf-8"))
    for page in sorted(wanted):
        for theme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            media = [{"name": "prefers-color-scheme", "value": theme}]
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            if theme == "light":
                show(browser, page, name)
            if page == "tensor" and theme == "light" and more:
                until(browser, more)
            found += [f"{page}, {theme}: {one}" for one in browser.driver.execute_async_script(RUN, rules)]
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts, attention with heads, and an embedding with a tokenizer."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    weights = {f"model.layers.{n}.self_attn.q_proj.weight": torch.randn(16, 16) for n in range(2)}
    weights["model.embed_tokens.weight"] = torch.randn(20, 16).bfloat16()
    for n in range(8):
        weights[f"model.layers.{n % 2}.mlp.experts.{n // 2}.up_proj.weight"] = torch.randn(8, 16) * (n > 0)
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    words = {f"word{n}": n for n in range(20)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


NEAREST = """(() => {
    const form = document.querySelector("[aria-label='Nearest rows'] form");
    if (!form || form.dataset.sent) return !!document.querySelector("[aria-label='Nearest rows'] [role=row]");
    form.requestSubmit(); form.dataset.sent = "yes";
})()"""


@pytest.mark.parametrize("what", ["checkpoint", "report", "mixture", "run", "comparison"])
def test_axe_finds_no_serious_fault(browser: Browser, zero3: Path, mixture: Path, tmp_path: Path, what: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci in lazyckpt/explore/frontend")
    name, more = "model.embed_tokens.weight", ""
    wanted = {"tree", "tensor", "architecture", "ranks", "optimizer"}
    if what == "report":
        lazyckpt.open(zero3).report(tmp_path / "page.html")
        found = faults(browser, (tmp_path / "page.html").as_uri(), wanted, name)
    else:
        paths = [zero3]
        if what == "mixture":
            paths, more = [mixture], NEAREST
            wanted = {"tensor", "experts"}
        elif what == "run":
            paths = [trained(tmp_path / "run")]
            wanted = {"run"}
        elif what == "comparison":
            run = trained(tmp_path / "run")
            paths = [run / "step_1", run / "step_2"]
            wanted = {"compare"}
        with lazyckpt.serve(*paths) as server:
            found = faults(browser, server.url, wanted, name, more)
    assert not found, "\n".join(found)


def trained(folder: Path, names: Sequence[str] = ()) -> Path:
    """Write two steps of a small run."""
    torch.manual_seed(0)
    names = names or ["model.embed_tokens.weight", *(f"model.layers.{n}.up.weight" for n in range(3))]
    weights = {name: torch.nn.Parameter(torch.randn(6, 5)) for name in names}
    optimizer = torch.optim.AdamW(list(weights.items()), lr=0.1)
    for step in (1, 2):
        for one in weights.values():
            one.grad = torch.randn(6, 5)
        optimizer.step()
        (folder / f"step_{step}").mkdir(parents=True)
        whole = {"model": {name: one.detach().clone() for name, one in weights.items()}, "step": step}
        torch.save(whole | {"optimizer": optimizer.state_dict()}, folder / f"step_{step}" / "model.pt")
    return folder


@pytest.mark.parametrize("host", ["page", "report", "run", "comparison"])
def test_hostile_names_do_nothing(browser: Browser, tmp_path: Path, host: str) -> None:
    folder = trained(tmp_path / "run", HOSTILE)
    paths = [folder] if host == "run" else [folder / "step_1" / "model.pt"]
    if host == "comparison":
        paths.append(folder / "step_2" / "model.pt")
    if host == "report":
        lazyckpt.open(paths[0]).report(tmp_path / "out.html")
    with lazyckpt.serve(*paths) as server:
        browser.driver.get("about:blank")
        browser.driver.get_log("browser")
        browser.driver.get((tmp_path / "out.html").as_uri() if host == "report" else server.url)
        found = pages(browser)
        assert "experts" in found
        for name in HOSTILE if host in ("page", "report") else HOSTILE[:1]:
            show(browser, "tensor", name)
            until(
                browser,
                f"document.querySelector('main h2').textContent.startsWith({json.dumps(name[:2])}.slice(0, 1))"
                " || document.querySelector('main h2').textContent.startsWith('\\\\u')",
            )
            assert not browser.js("return document.querySelector('.failure')")
        for page in found:
            show(browser, page, HOSTILE[0])
            assert not browser.js("return document.querySelector('main :is(img, script, b)')")
            assert not browser.js(WIDER), page
        assert browser.driver.get_log("browser") == []  # also an alert would have stopped the driver


def test_a_report_needs_no_network(browser: Browser, zero3: Path, tmp_path: Path) -> None:
    lazyckpt.open(zero3).report(tmp_path / "page.html")
    browser.driver.get("about:blank")
    browser.complaints()
    browser.driver.get((tmp_path / "page.html").as_uri())
    for page in pages(browser):
        show(browser, page, "model.embed_tokens.weight")
    browser.js("[...document.querySelectorAll('.top button')].at(-1).click()")
    assert "This is a report" in until(browser, "document.querySelector('dialog[open]')?.textContent")
    assert [one for one in browser.complaints() if not one.startswith("requested data:")] == []


WIDGET = """
const [source, answers, done] = arguments;
let receive;
const model = {
  get: name => ({height: 500, route: ""})[name],
  set: () => {},
  save_changes: () => {},
  on: (event, callback) => { if (event === "msg:custom") receive = callback; },
  off: () => {},
  send: ({id, request}) => request && setTimeout(() => {
    const body = Uint8Array.from(atob(answers[request] ?? ""), c => c.charCodeAt(0));
    receive({id, status: request in answers ? 200 : 404}, [new DataView(body.buffer)]);
  }),
};
import(URL.createObjectURL(new Blob([source], {type: "text/javascript"}))).then(
  found => { found.default.render({model, el: document.getElementById("output")}); done(""); },
  error => done(String(error)));
"""


def test_a_widget_obeys_its_notebook(browser: Browser, zero3: Path) -> None:
    explorer = Explorer(Subject(lazyckpt.open(zero3)))
    answers = {
        key_of(one): base64.b64encode(explorer.answer(one.path, one.values).body).decode()
        for one in plans(explorer.subject)
        if not one.reads
    }
    style = f"<style>{asset('explorer.css').decode()}</style>"
    browser.show(f"{style}<p>a cell</p><div id='output'></div>", body="data-jp-theme-light='false'")
    assert browser.driver.execute_async_script(WIDGET, asset("explorer.js").decode(), answers) == ""
    until(browser, "document.querySelector('#output [role=treeitem]')")
    assert browser.js("return document.getElementById('output').clientHeight") == 500
    theme = "document.getElementById('output').dataset.theme"
    assert browser.js(f"return {theme}") == "dark"
    browser.js("document.body.dataset.jpThemeLight = 'true'")
    until(browser, f"{theme} === 'light'")
    browser.all("#output [role=treeitem]")[0].click()
    focused = until(browser, "document.activeElement.closest('#output') && document.activeElement")
    assert focused.get_attribute("data-lm-suppress-shortcuts")  # JupyterLab looks for it there
