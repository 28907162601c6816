"""The explorer's page of one tensor, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

import lazyckpt
from lazyckpt import demo

from .browser import Browser, chromium, running, until

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=alert(1)>.\x1b[31m\u202eweight"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium()
    with running(tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_a_tensor_from_the_whole_to_one_element(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    weight = torch.randn(700, 600)
    weight[3, 5], weight[650, 550] = float("nan"), 77.0
    torch.save({HOSTILE: weight, "": torch.tensor(1.5)}, tmp_path / "model.pt")
    with lazyckpt.serve(tmp_path / "model.pt") as server:
        browser.driver.get(server.url)
        browser.driver.get(f"http://127.0.0.1:{server.port}/#/tensor?name={quote(HOSTILE)}")
        until(browser, "document.querySelector('.heatmap canvas')")
        assert not browser.js("return document.querySelector('article img')")  # a name is no markup
        rows = until(
            browser, "(r => r.length > 2 && r)([...document.querySelectorAll('[aria-label=Outliers] [role=row]')])"
        )
        assert "[3, 5]" in rows[1].text
        assert "[650, 550]" in rows[2].text
        rows[2].click()
        until(browser, "location.hash.includes('view=')")
        codes = "[...document.querySelectorAll('.python code')].map(c => c.textContent)"
        python = until(browser, f"{codes}.find(p => p.includes('window=((64'))")
        names: dict[str, Any] = {}
        exec(python.replace("; lazyckpt.", "; found = lazyckpt.", 1), names)  # what the page shows has the element
        part = names["found"].images[0].get_array()
        assert (part == 77).any()
        assert part.size < 1000

        canvas = browser.all(".heatmap canvas")[0]
        before = browser.js("return location.hash")
        canvas.send_keys(Keys.ARROW_UP)
        until(browser, f"location.hash !== {before!r}")
        canvas.send_keys("0")
        until(browser, "!location.hash.includes('view=')")
        pixel = browser.js(
            "const c = document.querySelector('.heatmap canvas');"
            "const d = c.getContext('2d').getImageData(c.width / 2, c.height / 2, 9, 9).data; return new Set(d).size"
        )
        assert pixel > 3  # it is drawn
        (box,) = browser.all("[aria-label='Values as a table'] [role=table]")
        assert str(round(float(weight[0, 0]), 4)) in box.text
        assert not [line for line in browser.complaints() if "SEVERE" in line or "Uncaught" in line]
        browser.driver.get(f"http://127.0.0.1:{server.port}/#/tensor?name=")
        until(browser, "document.querySelector('.tensor-head h2')?.textContent.startsWith(\"''\")")
        until(browser, "document.querySelector('.heatmap canvas')")
        port, token = server.port, server.token
    browser.js("location.hash = '#/architecture'")
    until(browser, "document.querySelector('.silence')")  # nobody answers
    with lazyckpt.serve(tmp_path / "model.pt", port=port, token=token):
        until(browser, "document.querySelector('.treemap-leaf') && !document.querySelector('.silence')")


def test_colours_and_saved_pictures_say_what_they_are(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    weight = torch.randn(700, 600)
    torch.save({"w": weight * torch.linspace(0.1, 1, 700)[:, None]}, tmp_path / "model.pt")
    ends = "[...document.querySelectorAll('.heatmap + .colour-legend text')].map(e => Number(e.textContent))"
    line = "[...document.querySelectorAll('.python code')].map(c => c.textContent).find(p => p.includes('.heatmap('))"
    with lazyckpt.serve(tmp_path / "model.pt") as server:
        page = f"http://127.0.0.1:{server.port}/#/tensor?name=w&view="
        browser.driver.get(server.url)
        browser.driver.get("about:blank")
        browser.driver.get(page + "100,140,200,300")
        plots = [until(browser, f"(p => p?.includes('limits=') && p)({line})")]
        shown = [browser.js(f"return {ends}")]
        browser.js("document.querySelector('[title^=\"keep these colours\"] input').click()")
        until(browser, "location.hash.includes('limits=')")
        browser.all(".heatmap canvas")[0].send_keys("0")
        until(browser, "!location.hash.includes('view=')")
        plots.append(until(browser, f"(p => !p?.includes('window=') && p)({line})"))  # they are held
        shown.append(browser.js(f"return {ends}"))
        browser.js("document.querySelector('[title^=\"keep these colours\"] input').click()")
        plots.append(until(browser, f"(p => !p?.includes('limits=') && p)({line})"))
        shown.append(browser.js(f"return {ends}"))
        browser.all(".heatmap canvas")[0].send_keys(Keys.HOME)
        browser.js(
            "window.files = []; HTMLAnchorElement.prototype.click = () => {};"
            "URL.createObjectURL = (blob) => (blob.text().then((text) => files.push([blob.type, text])), 'blob:');"
            "for (const e of document.querySelectorAll('[aria-label^=\"save \"]')) e.click();"
        )
        files = until(
            browser, "files.length >= 4 && files.flatMap(([type, text]) => type === 'image/svg+xml' ? text : [])"
        )
    for plot, colours in zip(plots, shown, strict=True):
        names: dict[str, Any] = {}
        exec(plot.replace("; lazyckpt.", "; found = lazyckpt.", 1), names)
        low, high = names["found"].images[0].get_clim()
        assert [colours[0], colours[-1]] == pytest.approx([low, high], rel=1e-2)
    assert "limits=" not in plots[2]
    assert shown[0] == shown[1] != shown[2]
    for text in ("Values", ">w<", "model.pt", "mean of each cell", *(f">{end}<" for end in shown[2][:2])):
        assert any(text in picture for picture in files), text


def test_states_are_side_by_side_with_one_window(browser: Browser, tmp_path: Path) -> None:
    demo.write(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    with lazyckpt.serve(tmp_path / "zero3") as server:
        browser.driver.get(server.url)
        browser.driver.get(f"http://127.0.0.1:{server.port}/#/tensor?name={name}&beside=exp_avg")
        until(browser, "document.querySelectorAll('.tensor-beside canvas[tabindex]').length === 2")
        until(
            browser,
            "(b => b && (b.click(), true))([...document.querySelectorAll('[aria-label=\"side by side\"] button')]"
            ".find(e => e.textContent === '+ exp_avg_sq'))",
        )
        until(browser, "decodeURIComponent(location.hash).includes('beside=exp_avg,exp_avg_sq')")
        until(browser, "document.querySelectorAll('.tensor-beside canvas[tabindex]').length === 3")
        lines = (
            "[...document.querySelectorAll('.tensor-beside .python code')].map(e => e.textContent)"
            ".filter(e => e.includes('.plot.heatmap('))"
        )
        browser.all(".tensor-beside .heatmap canvas")[1].send_keys("+")
        until(browser, "location.hash.includes('view=')")
        tab = "[...document.querySelectorAll('.top nav a')].find(one => one.textContent === '{}')"
        for title in ("Ranks", "Tensor"):  # the page comes back as it was left
            browser.js(f"{tab.format(title)}.click()")
            until(browser, f"{tab.format(title)}.ariaCurrent === 'page'")
        there = "all => all.length === 3 && all.every(e => e.includes('window=((8, 24), (18, 54))')) && all"
        found = until(browser, f"({there})({lines})")
    plots = [eval(line.removeprefix("import lazyckpt; "), {"lazyckpt": lazyckpt}) for line in found]
    view = lazyckpt.open(tmp_path / "zero3")
    for plot, state in zip(plots, ("fp32", "exp_avg", "exp_avg_sq"), strict=True):
        drawn = torch.tensor(plot.images[0].get_array())
        assert torch.equal(drawn.float(), view.states[state][name][8:24, 18:54])


def test_the_lines_of_python_run(browser: Browser, tmp_path: Path) -> None:
    expert = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    torch.save({expert.format(n, e): torch.randn(6, 8).bfloat16() for n in (0, 1) for e in (0, 1)}, tmp_path / "moe.pt")
    name = expert.format(1, 0)
    routes = {f"tree?name={name}": 1, f"tensor?name={name}": 7, "architecture?unit=elements": 4, "experts?layer=1": 3}
    codes = "[...document.querySelectorAll('.python code')].map(c => c.textContent)"
    with lazyckpt.serve(tmp_path / "moe.pt") as server:
        browser.driver.get(server.url)
        lines = []
        for route, count in routes.items():
            browser.driver.get(f"http://127.0.0.1:{server.port}/#/{route}")
            page = route.partition("?")[0]
            lines += until(
                browser, f"location.hash.startsWith('#/{page}') && (c => c.length === {count} && c)({codes})"
            )
    for line in lines:
        exec(line, {})
    assert sum(name in line for line in lines) == 8


def test_a_report_shows_pictures(browser: Browser, tmp_path: Path) -> None:
    torch.save({"w": torch.randn(300, 200)}, tmp_path / "model.pt")
    lazyckpt.open(tmp_path / "model.pt").report(tmp_path / "out.html")
    browser.driver.get((tmp_path / "out.html").as_uri() + "#/tensor?name=w")
    until(browser, "document.querySelector('.heatmap canvas') && document.querySelector('.histogram-bars')")
    assert not browser.all(".failure")
