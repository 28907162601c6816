"""`lazyckpt browse`: driven by Textual's pilot, and what it draws."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli, demo
from lazyckpt.browse import detail as code
from lazyckpt.browse import fragments
from lazyckpt.browse import grid as sheet
from lazyckpt.browse import histogram as bars
from lazyckpt.browse.measures import Numbers, measured
from lazyckpt.browse.picture import drawn, picture
from lazyckpt.browse.rows import Look, Row, Rows
from lazyckpt.browse.search import Search
from lazyckpt.browse.subject import One, Pair, Run, Subject, run_of
from lazyckpt.explore import subject as explored
from lazyckpt.explore.api import Explorer
from lazyckpt.inspect.diff import Difference
from lazyckpt.show.differences import farness
from lazyckpt.show.layout import drawing
from lazyckpt.show.outline import Outline, outline
from lazyckpt.show.values import sample
from lazyckpt.testing.counting import opened

from . import processes
from .test_explore_tensor import packed

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import OptionList

from lazyckpt.browse.app import Browser

ROOT = Path(__file__).parents[1]
SIZES = ((80, 24), (120, 40))
Drive = Callable[[Browser, "Pilot[Any]"], Awaitable[None]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoints: model/, training.pt, bomb.pt."""
    folder = tmp_path_factory.mktemp("demo")
    demo.write(folder)
    return folder


def drive(path: Path | str, do: Drive, size: tuple[int, int] = (120, 40), **given: Any) -> Browser:
    """Open the browser and do something in it."""

    def subject() -> Subject:
        if "subject" in given:
            return given["subject"]()
        return Subject(one(path, given.get("view")))

    app = Browser(subject, str(path))

    async def go() -> None:
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await do(app, pilot)

    asyncio.run(go())
    return app


def one(path: Path | str, view: lazyckpt.CheckpointView | None = None) -> One:
    view = lazyckpt.open(path) if view is None else view
    return One(view, view, code.opening(str(path), {}))


async def settle(app: Browser, pilot: Pilot[Any]) -> None:
    """Until nothing is being read, and all is on the screen."""
    for _ in range(2):  # what has been read may ask for more
        await pilot.pause(0.05)
        while app.busy:
            await pilot.pause(0.01)
    await pilot.pause()


async def press(app: Browser, pilot: Pilot[Any], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
    await settle(app, pilot)


async def go_to(app: Browser, pilot: Pilot[Any], name: str) -> None:
    """Filter by a name, and look at the tensor; the filter goes again."""
    app.filter.value = name
    await settle(app, pilot)
    app.names.focus()
    while app.row is None or app.row.start != name:
        before = app.names.cursor
        await press(app, pilot, "right", "down")
        assert app.names.cursor != before, f"{name} is not in the tree"


def screen(app: Browser) -> list[str]:
    """The lines of the screen, as text."""
    svg = app.export_screenshot()
    width, height = app.size
    lines = [[" "] * width for _ in range(height)]
    advance = 12.2  # pixels of a character (rich/console.py `export_svg`)
    for x, line, text in re.findall(r'<text [^>]*x="([\d.]+)"[^>]*clip-path="url\(#[^"]*-line-(\d+)\)">([^<]*)<', svg):
        at = round(float(x) / advance)
        shown = html.unescape(text).replace("\xa0", " ")
        lines[int(line)][at : at + len(shown)] = shown
    return ["".join(line).rstrip() for line in lines]


def keep(app: Browser, name: str) -> None:
    """Keep a picture of the screen, if one is wanted."""
    folder = os.environ.get("LAZYCKPT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        app.save_screenshot(f"browse-{name}.svg", folder)
        (Path(folder) / f"browse-{name}.txt").write_text("\n".join(screen(app)) + "\n", "utf-8")


def shown(app: Browser, text: str) -> bool:
    return any(text in line for line in screen(app))


# -- the pure parts


def walk(rows: Rows, above: Row) -> list[Row]:
    """All tensors below a row, through folded layers, too."""
    return [leaf for row in rows.below(above) for leaf in ([row] if row.leaf else walk(rows, row))]


def test_levels_add_up(files: Path) -> None:
    view = lazyckpt.open(files / "model")
    rows = Rows(outline(view))
    assert (rows.whole.tensors, rows.whole.numel, rows.whole.nbytes) == (len(view), view.numel, view.nbytes)
    leaves = walk(rows, rows.whole)
    assert sorted(row.start for row in leaves) == sorted(view) == sorted(rows.whole.names())
    assert sum(row.nbytes for row in leaves) == view.nbytes  # a tied tensor is counted once
    for row in rows.visible:
        assert row.tensors == len(list(row.names())), row.start
        if not row.leaf:
            assert row.nbytes == sum(leaf.nbytes for leaf in walk(rows, row))


def test_equal_layers_are_one_row(files: Path) -> None:
    rows = Rows(outline(lazyckpt.open(files / "model")))
    (fold,) = [row for row in rows.visible if row.folded]
    assert (fold.label, fold.start, len(fold.nodes)) == ("0-3", "model.layers.0-3.", 4)
    n = rows.visible.index(fold)
    rows.open(n)
    assert [row.label for row in rows.visible[n + 1 : n + 5]] == ["0", "1", "2", "3"]
    rows.close(n)
    assert rows.reveal("model.layers.2.mlp.up_proj.weight") and not fold.node.spec
    rows = Rows(outline(lazyckpt.open(files / "model")), look=Look(fold=False))
    at = rows.reveal("model.layers.2.")
    assert rows.visible[at].label == "2" and not any(row.folded for row in rows.visible)


@pytest.mark.parametrize("text", ["", "mlp", "*.weight"])
def test_numbers_of_rows(files: Path, text: str) -> None:
    view = lazyckpt.open(files / "model")
    found = Search(outline(view)).found(text)
    for pair in (False, True):
        numbers = Numbers(outline(view))
        rows = Rows(found, numbers.farness if pair else numbers.norm)
        assert numbers.norm(rows.whole) is None and np.isnan(numbers.each(found)).all()
        for name, t in [*view.items()][::2]:
            far = Difference(name, "values", None, None, max_abs=len(name) % 5, relative=len(name) % 3 or None)
            numbers.put(name, far if pair else measured(t))
        for row in (rows.whole, *rows.visible, *walk(rows, rows.whole)):
            ones = [numbers.found[name] for name in row.names() if name in numbers.found]
            assert list(numbers.of(row)) == ones
            if pair:
                assert numbers.worst(row) is max(ones, key=farness, default=None)
            else:
                assert numbers.norm(row) == (pytest.approx(np.sqrt(sum(one.l2**2 for one in ones))) if ones else None)
        assert Numbers(found.part(np.arange(0))).norm(rows.whole) is None


def test_orders(files: Path) -> None:
    view = lazyckpt.open(files / "model")
    for order, key in (
        ("size", lambda row: -row.nbytes),
        ("dtype", lambda row: row.dtype),
        ("value", lambda row: -len(row.start)),
    ):
        look = Look(flat=True, order=order)
        rows = Rows(outline(view), look=look, each=lambda of: np.array([float(len(name)) for name in of.names]))
        listed = list(rows.visible)
        keys = [key(row) for row in listed if row.node.counted]
        assert len(listed) == len(view) and keys == sorted(keys), order
    rows = Rows(outline(view), look=Look(order="size"))
    sizes = [row.nbytes for row in rows.visible if row.depth == 0]
    assert sizes == sorted(sizes, reverse=True)
    rows = Rows(outline(view), look=Look(order="size", reverse=True))
    assert [row.nbytes for row in rows.visible if row.depth == 0] == sorted(sizes)


def test_levels_of_odd_names(tmp_path: Path) -> None:
    names = ["a", "a-b", "a.b", "a.10", "a.9", "a.9.x.y.z", "", ".", "..x", "b.c.d.e", "b.c.d.f", "<b>[red]x"]
    save_file({n: torch.ones(2) for n in names}, tmp_path / "odd.safetensors")
    rows = Rows(outline(lazyckpt.open(tmp_path / "odd.safetensors")))
    assert sorted(row.start for row in walk(rows, rows.whole)) == sorted(names)
    top = rows.below(rows.whole)
    (a,) = [row for row in top if row.label == "a" and not row.leaf]
    assert [(row.label, row.leaf) for row in rows.below(a)] == [
        ("9", True), ("9.x.y.z", True), ("10", True), ("b", True),
    ]  # fmt: skip
    assert all(row.nbytes == 8 * row.tensors for row in top)
    assert ("b.c.d", False) in [(row.label, row.leaf) for row in top]


@pytest.mark.parametrize("shape", [(), (7,), (1000,), (5, 9), (4, 1, 60), (6, 5, 3, 3)])
def test_the_picture_is_that_of_page_and_plot(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if whole.ndim:
        whole.view(-1)[3] = float("nan")
    save_file({"x": whole}, tmp_path / "x.safetensors")
    view, counts = opened(tmp_path / "x.safetensors")
    t = view["x"]
    explorer = Explorer(explored.Subject(view))
    about = json.loads(explorer.answer("tensor", {"name": "x"}).body)
    wrap = {"wrap": about["wrap"]} if about["wrap"] else {}
    _, arrays = packed(explorer, "tensor/tile", name="x", rows=6, cols=5, **wrap)
    counts.clear()
    found = picture(t, 6, 5, "mean", None, drawn(t))
    assert counts.bytes == found.nbytes == whole.nbytes
    assert np.array_equal(found.values.astype(np.float32), arrays["mean"], equal_nan=True)
    assert found.odd.sum() == (1 if whole.ndim else 0)
    plotted = pytest.importorskip("matplotlib.pyplot") and t.plot.heatmap(cells=8).images[0].get_array()
    again = picture(t, 8, 8, "mean", None, drawn(t)).values
    assert np.array_equal(np.ma.filled(plotted, np.nan), again, equal_nan=True)
    for n in range(2):  # the other dimensions, by index
        of = drawn(t, index=n)
        values = picture(t, 100, 100, "mean", None, of).values
        block = whole.reshape(-1, *shape[-2:])[n] if len(shape) > 2 else whole
        flat = np.full(values.size, np.nan, np.float32)
        flat[: block.numel()] = block.flatten()
        assert np.array_equal(values.flatten(), flat, equal_nan=True)


def test_search(files: Path) -> None:
    view = lazyckpt.open(files / "model")
    finder = Search(outline(view))
    for text in ("l", "layers.1", "layers.1.MLP", "norm", "model.*norm.weight", "nothing", ""):
        small = text.lower()
        want = {n for n in view if small in n.lower()} | (set(view.select(text)) if "*" in text else set())
        of = finder.found(text)
        assert list(of.names) == sorted(want), text
        assert of.root.nbytes == view.select(want.__contains__).nbytes


def test_a_tied_tensor_that_is_found_counts_once(tmp_path: Path) -> None:
    w = torch.ones(3, 2)
    torch.save({"a.w": w, "b.w": w, "c.w": w, "d": torch.ones(1)}, tmp_path / "tied.pt")
    view = lazyckpt.open(tmp_path / "tied.pt")
    finder = Search(outline(view))
    for text in ("w", "b", "c.w", "d", ""):
        of = finder.found(text)
        assert of.root.nbytes == view.select(set(of.names).__contains__).nbytes == sum(r.nbytes for r in walk_all(of))


def walk_all(of: Outline) -> list[Row]:
    rows = Rows(of)
    return walk(rows, rows.whole)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (100,), (3, 0), (5, 9), (4, 1, 6), (2, 3, 4), (2, 2, 3, 5)])
def test_windows_are_of_the_tensor_and_so_is_the_line(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    view, counts = opened(tmp_path / "x.safetensors")
    t = view["x"]
    rows, cols = sheet.extent(t, 4)
    for row, col, height in ((0, 0, 3), (1, 2, 2), (rows - 1, 0, 4)):
        if not (0 <= row < max(rows, 1) and 0 <= col < max(cols, 1)):
            continue
        counts.clear()
        got = sheet.window(t, row, col if t.ndim > 1 else 0, height, 4)
        values = [float(v) for line in got.cells for v in line]
        assert counts.bytes == 4 * len(values)
        assert len(got.labels) == len(got.cells) <= height
        index = code.of_window(None, shape if got.first else (), got.first, got.last)
        read = eval(f"t{index}", {"t": t})
        if t.ndim < 2:
            assert values == read.flatten().tolist()
        else:
            flat = whole.reshape(-1, shape[-1])[row : row + height, col : col + 4] if whole.numel() else whole
            assert values == flat.flatten().tolist()
            assert set(values) <= set(read.flatten().tolist())
            if len(shape) == 2:
                assert values == read.flatten().tolist()


def test_one_file_is_a_sentence(files: Path) -> None:
    drawn = fragments.drawn(drawing(lazyckpt.open(files / "model")["model.norm.weight"]), 30).plain
    assert drawn == "One file has all of it: model-00003-of-00003.safetensors, 1 block."


def test_bars_fit(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([0.0, 1.0, float("nan"), 2.0, 2.0])}, tmp_path / "x.safetensors")
    t = lazyckpt.open(tmp_path / "x.safetensors")["x"]
    for width in (10, 20, 60):
        lines = bars.of_sample(sample(t), width).plain.splitlines()
        assert "1 NaN" in lines and "highest column: 2 elements" in lines
        assert max(len(line) for line in lines if "█" in line) <= max(8, width)


# -- the browser


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_opens_and_moves_without_reading(files: Path, size: tuple[int, int]) -> None:
    view, counts = opened(files / "model")
    counts.clear()

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert shown(app, "huggingface | 1.2M elements, 2.2 MiB in 39 tensors")
        assert any("embed_tokens.weight" in line and "250.0 KiB" in line for line in screen(app))
        assert any("0-3" in line and "4 alike" in line for line in screen(app))
        await go_to(app, pilot, "model.layers.1.mlp.up_proj.weight")
        await press(app, pilot, "escape", "d")
        assert app.filter.value == "" and app.row is not None
        assert app.row.start == "model.layers.1.mlp.up_proj.weight"  # the cursor stays
        assert shown(app, "bf16 [512, 128]") and shown(app, "131,072 bytes (128.0 KiB)")
        await press(app, pilot, "f")
        assert shown(app, "One file has all of it")
        await press(app, pilot, "question_mark")
        await press(app, pilot, "escape", "x", "escape", "up", "down", "left")
        keep(app, f"map-{size[0]}x{size[1]}")
        assert counts.requests == 0

    drive(files / "model", do, size, view=view)


@pytest.mark.slow
def test_expanding_and_collapsing(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert app.rows is not None
        await press(app, pilot, "g")
        while app.row is None or app.row.start != "model.":
            await press(app, pilot, "j")
        lines = len(app.rows.visible)
        assert app.row is not None and app.row.start == "model."
        assert app.line == f'lazyckpt.open("{files / "model"}")["model"].to("cpu")'
        await press(app, pilot, "enter")
        assert len(app.rows.visible) < lines
        await press(app, pilot, "right", "right", "left")
        assert len(app.rows.visible) == lines and app.row.start == "model."
        await press(app, pilot, "G", "ctrl+u", "ctrl+d", "k", "h", "l")
        assert app.row is not None and not shown(app, "Traceback")

    drive(files / "model", do)


@pytest.mark.slow
def test_values_read_what_they_show(files: Path) -> None:
    view, counts = opened(files / "model")
    t = view["model.layers.1.mlp.up_proj.weight"]

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, t.name)
        counts.clear()
        await press(app, pilot, "v")
        height, width = app.panes.grid.room
        assert app.panes.grid.window is not None
        assert (len(app.panes.grid.window.cells), len(app.panes.grid.window.heads)) == (height, width)
        assert 0 < counts.bytes <= 2 * (height * 128) * 2  # rows lie apart: a gap may be read with them
        counts.clear()
        await press(app, pilot, "pagedown", "down", "greater_than_sign")
        line = app.line
        left = app.panes.grid.room[0]  # a long path may take another line of the terminal
        assert line.endswith(f"[{height + 1}:{height + 1 + left}, {width}:{2 * width}]")
        read = eval(line, {"lazyckpt": lazyckpt})
        cells = [[float(c) for c in row] for row in app.panes.grid.window.cells]
        assert torch.allclose(torch.tensor(cells), read.float(), rtol=1e-3)
        await press(app, pilot, "end")
        assert app.panes.grid.window.labels[-1] == "511"
        keep(app, "values")

        await press(app, pilot, "i", *"0:2", "comma", *"::64", "enter")
        assert shown(app, "bf16 [2, 2] of bf16 [512, 128]")
        assert app.line.endswith('["model.layers.1.mlp.up_proj.weight"][0:2,::64]')
        assert eval(app.line, {"lazyckpt": lazyckpt}).shape == (2, 2)

    drive(files / "model", do, view=view)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["999", "0:", "f()", "0,0,0", "]", "..., ..."])
def test_a_wrong_index_is_told_in_place(files: Path, index: str) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "model.norm.weight")
        await press(app, pilot, "i")
        app.panes.index.value = index
        await press(app, pilot, "enter")
        if index == "0:":
            assert not app.panes.told.has_class("wrong") and app.panes.grid.window is not None
        else:
            assert app.panes.told.has_class("wrong") and app.panes.grid.window is None
            app.panes.index.value = "0:4"
            await press(app, pilot, "enter")
            assert not app.panes.told.has_class("wrong") and app.panes.grid.window is not None

    drive(files / "model", do)


@pytest.mark.slow
def test_histograms(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "model.norm.weight")
        await press(app, pilot, "b")
        assert shown(app, "histogram of all of 128 elements (256 B read)") and shown(app, "█")
        await press(app, pilot, "a")
        assert shown(app, "histogram of all 128 elements (256 B)") and shown(app, "0 zeros, 0 NaN")
        keep(app, "histogram")

    drive(files / "model", do)


@pytest.mark.slow
def test_a_slow_read_blocks_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        asked.set()
        assert go_on.wait(60)
        raise OSError("the connection was lost")

    monkeypatch.setattr("lazyckpt.inspect.stats.stats_of", slow)
    monkeypatch.setattr("lazyckpt.browse.histogram.sample", slow)

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "model.norm.weight")
        app.filter.value = ""
        await settle(app, pilot)
        for _ in range(2):
            asked.clear()
            await pilot.press("a")
            while not asked.is_set():
                await pilot.pause(0.01)
            assert app.busy
            await pilot.pause(0.05)
            assert shown(app, "reading") and shown(app, "Esc stops")
            await pilot.press("escape")
            await pilot.pause()
            assert not app.busy and shown(app, "stopped")
        await pilot.press("b")
        await pilot.press("up")  # something else is looked at meanwhile
        await settle(app, pilot)
        assert app.row is not None and app.row.start != "model.norm.weight"
        await pilot.press("down")
        await pilot.press("b")
        go_on.set()
        await settle(app, pilot)
        assert shown(app, "cannot be read: the connection was lost")
        await press(app, pilot, "v")
        assert app.panes.grid.window is not None  # it goes on

    drive(files / "model", do)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_states(files: Path, size: tuple[int, int]) -> None:
    path = files / "training.pt"

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "0.weight")
        await press(app, pilot, "x")
        assert app.screen.query_one(OptionList).option_count == len(lazyckpt.open(path).states) + 1
        await press(app, pilot, "down", "enter")
        assert app.subject is not None and app.subject.view.state == "exp_avg"
        assert app.row is not None and app.row.start == "0.weight"
        await press(app, pilot, "v")
        assert app.line.startswith(f'lazyckpt.open("{path}").states["exp_avg"]["0.weight"]')
        read = eval(app.line, {"lazyckpt": lazyckpt})
        assert app.panes.grid.window is not None
        assert f"{read.flatten()[0].item():.4g}" == app.panes.grid.window.cells[0][0]
        assert screen(app)[1].startswith(" exp_avg | torch")
        app.filter.value = ""
        await press(app, pilot, "x", "end", "enter")
        assert app.subject.view.state == "stored" and app.row is not None
        eval(app.line, {"lazyckpt": lazyckpt})
        assert ".stored[" in app.line

    drive(path, do, size)


@pytest.mark.slow
def test_copying_the_line(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "model.norm.weight")
        await press(app, pilot, "c")
        assert app.clipboard == f'lazyckpt.open("{files / "model"}")["model.norm.weight"][...]' == app.line
        assert app.clipboard[:60] in "".join(screen(app))

    drive(files / "model", do)


@pytest.mark.slow
def test_names_are_printed_literally(tmp_path: Path) -> None:
    names = ["[red]x[/red]", "<b>bold</b>", "[/]", "esc\x1b[31m.a", "esc\x1b[31m.b", "line\nbreak", 'quo"te', "$text"]
    save_file({n: torch.arange(4.0) for n in names}, tmp_path / "odd.safetensors")

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        for text in ("[red]x[/red]", "<b>bold</b>", "[/]", "esc\\x1b[31m", "line\\nbreak", 'quo"te', "$text"):
            assert any(line.startswith(text) or f" {text}" in line for line in screen(app)), text
        for _ in range(len(names) + 1):
            await press(app, pilot, "m", "v")
            assert "\x1b" not in app.export_screenshot() and "\x1b" not in app.line
            entry = app.row
            assert entry is not None
            if entry.leaf:
                assert eval(app.line, {"lazyckpt": lazyckpt}).tolist() == [0, 1, 2, 3]
            await press(app, pilot, "escape", "down")
        keep(app, "odd-names")

    drive(tmp_path / "odd.safetensors", do)


@pytest.mark.slow
def test_a_file_that_is_one_tensor(tmp_path: Path) -> None:
    """Its name is the empty text."""
    torch.save(torch.arange(12.0).view(3, 4), tmp_path / "one.pt")

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        for key in ("d", "v"):
            await press(app, pilot, key)
            assert torch.equal(eval(app.line, {"lazyckpt": lazyckpt}), torch.arange(12.0).view(3, 4))

    drive(tmp_path / "one.pt", do)


@pytest.mark.slow
def test_many_names_open_at_once(tmp_path: Path) -> None:
    """Only what is on the screen is made of a list of 2,400."""
    save_file({f"layers.{n}.{w}": torch.ones(1) for n in range(1200) for w in "ab"}, tmp_path / "big.safetensors")

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert app.rows is not None
        assert shown(app, "2,400 tensors") and any(row.folded for row in app.rows.visible)
        await press(app, pilot, "G", "enter", "G")
        assert app.row is not None and app.row.start == "layers.1199."
        await press(app, pilot, "L", "G")
        assert len(app.rows.visible) == 2400 and app.row.start == "layers.1199.b"
        await press(app, pilot, "g", "slash", *"1150.b")
        assert app.row is not None and app.row.start == "layers.1150.b" and len(app.rows.visible) == 1
        await press(app, pilot, "enter", "escape")
        assert len(app.rows.visible) == 2400 and app.row.start == "layers.1150.b"
        await press(app, pilot, "L", "slash", *".a", "enter", "g")
        for name in ("0.a", "1.a", "10.a"):  # each in its level, which is opened
            await press(app, pilot, "n")
            assert app.row.start == f"layers.{name}"
        await press(app, pilot, "N", "N", "N")
        assert app.row.start == "layers.0.a"

    drive(tmp_path / "big.safetensors", do)


@pytest.mark.slow
def test_the_level_and_the_metadata(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await press(app, pilot, "g")
        while app.row is None or not app.row.folded:
            await press(app, pilot, "j")
        assert shown(app, "4 levels of") and shown(app, "bf16: 36 tensors") and shown(app, "mlp.up_proj.weight")
        await press(app, pilot, "y")
        assert app.clipboard == "model.layers.0-3"
        await press(app, pilot, "M")
        assert shown(app, "huggingface") and shown(app, "hidden_size")
        keep(app, "metadata")
        await press(app, pilot, "j", "G", "escape")
        assert app.screen is app.screen_stack[0]

    drive(files / "model", do)


@pytest.mark.slow
def test_orders_and_norms(files: Path) -> None:
    view = lazyckpt.open(files / "model")

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert app.rows is not None
        await press(app, pilot, "L", "s")
        sizes = [row.nbytes for row in app.rows.visible]
        assert sizes == sorted(sizes, reverse=True)
        await press(app, pilot, "R")
        await press(app, pilot, "s", "s", "g")
        norms = {name: float(view[name][...].double().norm()) for name in view}
        assert app.row is not None and norms[app.row.start] == max(norms.values())
        assert shown(app, f"{norms[app.row.start]:.4g}")
        await pilot.click("#titles", offset=(3, 0))
        await settle(app, pilot)
        assert app.look.order == "name"
        keep(app, "norms")

    drive(files / "model", do)


@pytest.mark.slow
def test_the_mouse(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert app.rows is not None
        n = next(n for n, row in enumerate(app.rows.visible) if row.folded)
        await pilot.click("#names", offset=(20, n))
        await settle(app, pilot)
        assert app.row is app.rows.visible[n]
        count = len(app.rows.visible)
        await pilot.click("#names", offset=(20, n), times=2)
        await settle(app, pilot)
        assert len(app.rows.visible) > count
        await press(app, pilot, "m")
        await go_to(app, pilot, "model.layers.1.mlp.up_proj.weight")
        heat = app.panes.heat
        assert heat.shown is not None and heat.box is None
        await pilot.click("#heat", offset=(20, 5), times=2)
        await settle(app, pilot)
        assert heat.box is not None
        await pilot.hover("#heat", offset=(20, 5))
        await settle(app, pilot)
        assert shown(app, "] mean ")

    drive(files / "model", do)


@pytest.mark.slow
def test_heat_maps(files: Path) -> None:
    view, counts = opened(files / "model")
    t = view["model.layers.1.mlp.up_proj.weight"]

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, t.name)
        counts.clear()
        await press(app, pilot, "m")
        heat = app.panes.heat
        assert heat.shown is not None and shown(app, "▀")
        assert counts.bytes == t.nbytes
        whole = t[...].float()
        assert heat.shown.box == (0, 512, 0, 128)
        heat.focus()
        await press(app, pilot, "plus", "plus", "plus", "plus", "plus")
        top, bottom, left, right = heat.shown.box
        assert (bottom - top, right - left) == (16, 4)
        assert np.allclose(heat.shown.values, whole[top:bottom, left:right])
        await press(app, pilot, "l", "j")
        assert heat.shown.box == (top + 4, bottom + 4, left + 1, right + 1)
        await press(app, pilot, "a")
        assert np.allclose(heat.shown.values, whole[top + 4 : bottom + 4, left + 1 : right + 1].abs())
        await press(app, pilot, "minus", "0")
        assert heat.shown.box == (0, 512, 0, 128)
        keep(app, "heat")

    drive(files / "model", do, view=view)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (10, 20, 30):
        weights = {f"layers.{n}.up": torch.full((4, 6), float(step + n)) for n in range(5)}
        (folder / f"checkpoint-{step}").mkdir()
        save_file(weights, folder / f"checkpoint-{step}" / "model.safetensors")
    return folder


@pytest.mark.slow
def test_a_run(run_folder: Path) -> None:
    def subject() -> Subject:
        run = run_of(str(run_folder), str(run_folder), None)
        assert run is not None
        return run

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert isinstance(app.subject, Run) and app.subject.step == 30 and shown(app, "step 30 (3 of 3)")
        await go_to(app, pilot, "layers.2.up")
        app.filter.value = ""
        await press(app, pilot, "v")
        assert app.panes.grid.window is not None and app.panes.grid.window.cells[0][0] == "32"
        await press(app, pilot, "left_square_bracket", "left_square_bracket", "left_square_bracket")
        assert app.subject.step == 10 and app.row is not None and app.row.start == "layers.2.up"
        await press(app, pilot, "v")
        assert app.panes.grid.window.cells[0][0] == "12"
        assert set(eval(app.line, {"lazyckpt": lazyckpt}).flatten().tolist()) == {12.0}
        await press(app, pilot, "e")
        change = (22 - 12) / 12
        assert shown(app, f"{change:.4f}") and shown(app, f"{np.sqrt(24) * 32:.4g}")
        keep(app, "run")
        await pilot.click("#slider", offset=(app.slider._places[1][0], 0))
        await settle(app, pilot)
        assert app.subject.step == 20

    drive(run_folder, do, subject=subject)
    assert run_of(str(run_folder / "checkpoint-10"), "", None) is None


@pytest.mark.slow
def test_a_comparison(tmp_path: Path) -> None:
    a = {f"layers.{n}.{w}": torch.randn(8, 8) for n in range(5) for w in ("up", "down")} | {"only_a": torch.ones(2)}
    b = {name: t.clone() for name, t in a.items() if name != "only_a"} | {"only_b": torch.ones(3)}
    b["layers.3.up"] += 0.5
    a["shape"], b["shape"] = torch.ones(2, 3), torch.ones(3, 2)
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert app.subject is not None and set(app.subject.view) == {*a, *b}
        worst = app.measures.numbers.worst(app.rows.whole)  # type: ignore[union-attr]
        assert worst is not None and worst.name == "layers.3.up" and worst.max_abs == pytest.approx(0.5)
        relative = float((b["layers.3.up"] - a["layers.3.up"]).norm() / a["layers.3.up"].norm())
        assert shown(app, f"{relative:.4f}") and shown(app, "only in A") and shown(app, "only in B")
        await press(app, pilot, "e")
        keep(app, "comparison")
        await go_to(app, pilot, "layers.3.up")
        await press(app, pilot, "v")
        assert app.panes.grid.window is not None and app.panes.grid.window.cells[0][:2] == ("0.5", "0.5")
        assert torch.allclose(eval(app.line, {"lazyckpt": lazyckpt}), torch.tensor(0.5))
        for side in (a, b):
            await press(app, pilot, "w", "v")
            assert app.panes.grid.window is not None
            assert app.panes.grid.window.cells[0][0] == f"{side['layers.3.up'][0, 0].item():.4g}"
            read = eval(app.line, {"lazyckpt": lazyckpt})
            assert torch.equal(read, side["layers.3.up"][: len(read), : len(read.T)])
        await press(app, pilot, "w", "d")
        assert shown(app, "64 of 64 elements")
        for name in ("only_a", "only_b", "shape"):
            await go_to(app, pilot, name)
            await press(app, pilot, "m", "v", "e", "f")
        app.filter.value = ""
        await press(app, pilot, "s", "s", "s", "g")
        assert app.rows is not None and app.look.order == "value"

    drive(tmp_path, do, subject=lambda: Pair(one(tmp_path / "a.safetensors"), one(tmp_path / "b.safetensors")))


@pytest.mark.slow
def test_a_url() -> None:
    fs = pytest.importorskip("fsspec").filesystem("memory")
    with fs.open("/browse/model.pt", "wb") as f:
        torch.save({"a.weight": torch.arange(600.0).reshape(60, 10), "b": torch.arange(7)}, f)

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "a.weight")
        await press(app, pilot, "v", "pagedown")
        assert app.panes.grid.window is not None and app.line.startswith(
            'lazyckpt.open("memory://browse/model.pt")["a.weight"]['
        )
        read = eval(app.line, {"lazyckpt": lazyckpt})
        assert [[float(c) for c in row] for row in app.panes.grid.window.cells] == read.tolist()
        fs.rm("/browse", recursive=True)
        await press(app, pilot, "home")
        assert app.panes.told.has_class("wrong") and "model.pt" in " ".join(screen(app))
        await press(app, pilot, "b")
        assert shown(app, "cannot be read")

    drive("memory://browse/model.pt", do)


@pytest.mark.slow
def test_a_lost_file(zero_cases: Any, tmp_path: Path) -> None:
    """Of a DeepSpeed checkpoint that its engine wrote: problems on top, errors in place, what is there still reads."""
    case = zero_cases["zero3_bf16_dp2"]
    shutil.copytree(case.path, tmp_path / "ckpt")
    lost = sorted((tmp_path / "ckpt").rglob("*zero_pp_rank_1_*optim_states.pt"))
    assert lost
    for path in lost:
        path.unlink()
    view = lazyckpt.open(tmp_path / "ckpt")
    name = next(n for n in view if view[n].ndim == 2 and view[n].shape[0] > 8)

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert shown(app, lost[0].name[:30]) and app.problems.has_class("some")
        await go_to(app, pilot, name)
        assert shown(app, "cannot be read")
        await press(app, pilot, "m")
        assert shown(app, "cannot be read")
        await press(app, pilot, "f")
        assert shown(app, "!!!!") and shown(app, "aaaa")
        keep(app, "lost-file")
        await press(app, pilot, "b")
        assert shown(app, "cannot be read")
        await press(app, pilot, "a")
        assert shown(app, "cannot be read") and not app.busy
        await press(app, pilot, "i", *"0:2", "enter")
        assert app.panes.grid.window is not None and not app.panes.told.has_class("wrong")
        first = case.truth["fp32"][name][0, 0].item()
        assert app.panes.grid.window.cells[0][0] == f"{np.float32(first):.4g}"
        await press(app, pilot, "i")
        app.panes.index.value = "-2:"
        await press(app, pilot, "enter")
        assert app.panes.told.has_class("wrong") and app.panes.grid.window is None
        await press(app, pilot, "p")
        assert shown(app, "is missing")

    drive(tmp_path / "ckpt", do, (80, 24))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 20), (30, 10)])
def test_small_terminals(files: Path, size: tuple[int, int]) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        keys = ("m", "v", "down", "b", "a", "d", "f", "e", "M", "escape", "question_mark", "escape", "x", "escape", "t")
        await press(app, pilot, *keys)
        await pilot.resize_terminal(100, 30)
        await press(app, pilot, "v")
        assert app.panes.grid.window is not None
        keep(app, f"small-{size[0]}")

    drive(files / "model", do, size)


@pytest.mark.slow
def test_ten_lines_are_enough_to_see_values(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await press(app, pilot, "down", "v")
        first = lazyckpt.open(files / "training.pt")["0.bias"][0].item()
        assert shown(app, "bias") and shown(app, f"{np.float32(first):.4g}") and shown(app, "lazyckpt.open(")
        keep(app, "short")

    drive(files / "training.pt", do, (40, 10))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_screen_is_as_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    """To renew: run with LAZYCKPT_SCREENSHOTS=folder, look at the pictures, copy the .txt files to tests/screens."""
    tensors = {f"layers.{n}.{w}": torch.arange(48.0).reshape(6, 8) + n for n in range(2) for w in ("down", "up")}
    save_file(tensors | {"norm": torch.ones(8)}, tmp_path / "tiny.safetensors")
    monkeypatch.chdir(tmp_path)

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        name = f"screen-{size[0]}x{size[1]}"
        await go_to(app, pilot, "layers.1.up")
        await press(app, pilot, "escape", "v")
        assert app.panes.grid.window is not None  # the filter has gone, the values stay
        keep(app, name)
        assert screen(app) == (ROOT / "tests" / "screens" / f"browse-{name}.txt").read_text("utf-8").splitlines()

    drive("tiny.safetensors", do, size)


@pytest.mark.slow
def test_quitting(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await pilot.press("q")
        await pilot.pause()

    app = drive(files / "model", do)
    assert (app.return_code, app.return_value) == (0, None)


@pytest.mark.slow
def test_an_error_of_opening_ends_it(tmp_path: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await pilot.pause()

    app = drive(tmp_path / "none", do)
    assert isinstance(app.return_value, lazyckpt.MissingFileError)


# -- the command


def process(*args: str, code: str = "") -> subprocess.CompletedProcess[str]:
    start = f"import sys; {code or ''}\nfrom lazyckpt.cli import main; sys.argv[1:] = {list(args)!r}; main()"
    return processes.run("-c", start)


@pytest.mark.slow
def test_the_command_needs_a_terminal_and_textual(files: Path) -> None:
    done = process("browse", str(files / "model"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: browse needs a terminal: ls and show print, also into pipes\n"
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        said = CliRunner(env={"TERM": "dumb"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lazyckpt.cli.browse.sys", SimpleNamespace(stdin=terminal, stdout=terminal))
            result = said.invoke(cli.app, ["browse", str(files / "model")])
    os.close(ours)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: browse needs a terminal with a cursor to place")
    hidden = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'textual' else f(n, *a)"
    )
    done = process("browse", str(files / "model"), code=hidden)
    assert (done.returncode, done.stderr) == (2, "error: browse needs Textual: pip install 'lazyckpt[browse]'\n")


@pytest.mark.slow
@pytest.mark.parametrize("colour", [True, False])
def test_the_command_in_a_terminal(files: Path, colour: bool) -> None:
    """A pseudo-terminal stands for ssh: no mouse, the line goes to the clipboard by OSC 52; NO_COLOR is heard."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM")}
    env |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", "LINES": "24"}
    env |= {} if colour else {"NO_COLOR": "1"}
    command = [sys.executable, "-m", "lazyckpt", "browse", str(files / "training.pt"), "--state", "exp_avg"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        seen = b""

        def until(what: bytes) -> None:
            nonlocal seen
            while what not in seen:
                seen += os.read(ours, 1 << 16)

        until(b"4 tensors")
        os.write(ours, b"c")
        until(b"\x1b]52;c;")
        os.write(ours, b"q")
        with suppress(OSError):  # of the end
            while more := os.read(ours, 1 << 16):
                seen += more
        assert running.wait(60) == 0
    os.close(ours)
    coloured = [c for c in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", seen) if len(set(c)) > 1]
    assert bool(coloured) == colour


def test_the_first_frame_needs_no_torch() -> None:
    """It is drawn before the checkpoint is opened, and what takes long to import is imported after it."""
    code = """
import sys
from lazyckpt.browse.app import Browser

def open_subject():
    seen.append(("torch" in sys.modules, browser.names.size.height > 5))
    raise OSError("it is not opened")

seen = []
browser = Browser(open_subject, "x")
print(browser.run(headless=True), seen)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "it is not opened [(False, True)]\n", done.stderr


@pytest.mark.slow
def test_other_commands_import_no_textual(files: Path) -> None:
    done = process("ls", str(files / "model"), code="sys.modules['textual'] = None")
    assert (done.returncode, done.stderr) == (0, "")
