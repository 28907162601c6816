"""`lazyckpt browse`: driven by Textual's pilot, and what it draws."""

from __future__ import annotations

import asyncio
import html
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
from lazyckpt.browse.tree import Entry, Levels, chosen
from lazyckpt.show.layout import drawing
from lazyckpt.show.values import sample
from lazyckpt.testing.counting import opened

from . import processes

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

    def views() -> tuple[lazyckpt.CheckpointView, lazyckpt.CheckpointView]:
        view = given["view"] if "view" in given else lazyckpt.open(path)
        return view, view

    app = Browser(views, str(path), {})

    async def go() -> None:
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await do(app, pilot)

    asyncio.run(go())
    return app


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
    while app.entry is None or app.entry.start != name:
        before = app.names.cursor_line
        await press(app, pilot, "down")
        assert app.names.cursor_line != before, f"{name} is not in the tree"


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


def test_levels_add_up(files: Path) -> None:
    view = lazyckpt.open(files / "model")
    levels = Levels(view)
    assert (levels.whole.tensors, levels.whole.numel, levels.whole.nbytes) == (len(view), view.numel, view.nbytes)
    found = []

    def walk(above: Entry) -> None:
        for entry in levels.below(above):
            if entry.leaf:
                found.append(entry.start)
            else:
                part = view[entry.start[:-1]]
                assert (entry.tensors, entry.nbytes) == (len(part), levels_of(part)), entry
                walk(entry)

    def levels_of(part: Any) -> int:
        return sum(t.nbytes for name, t in part.items() if t.name != "model.lm_head.weight")

    # the embedding is counted where it comes first in the view
    first = next(n for n in view if n in ("lm_head.weight", "model.embed_tokens.weight"))
    assert {e.start: e.nbytes > 0 for e in levels.below(levels.whole) if e.leaf} == {
        "lm_head.weight": first == "lm_head.weight"
    }
    if first == "lm_head.weight":
        (model,) = (e for e in levels.below(levels.whole) if e.start == "model.")
        walk(next(e for e in levels.below(model) if e.start == "model.layers."))
        assert len(found) == 36
    else:
        walk(levels.whole)
        assert sorted(found) == sorted(view)


def test_levels_of_odd_names(tmp_path: Path) -> None:
    names = ["a", "a-b", "a.b", "a.10", "a.9", "a.9.x.y.z", "", ".", "..x", "b.c.d.e", "b.c.d.f", "<b>[red]x"]
    save_file({n: torch.ones(2) for n in names}, tmp_path / "odd.safetensors")
    levels = Levels(lazyckpt.open(tmp_path / "odd.safetensors"))
    found: list[str] = []
    rows: list[tuple[int, str, bool]] = []

    def walk(above: Entry, depth: int) -> None:
        for entry in levels.below(above):
            rows.append((depth, entry.label, entry.leaf))
            if entry.leaf:
                found.append(entry.start)
            else:
                assert entry.nbytes == 8 * entry.tensors
                walk(entry, depth + 1)

    walk(levels.whole, 0)
    assert sorted(found) == sorted(names)
    at = rows.index((0, "a", False))
    assert rows[at + 1 : at + 5] == [(1, "9", True), (1, "9.x.y.z", True), (1, "10", True), (1, "b", True)]
    assert (0, "b.c.d", False) in rows


def test_filters(files: Path) -> None:
    view = lazyckpt.open(files / "model")
    assert set(chosen(view, "layers.1.mlp")) == set(view.select("*layers.1.mlp*"))
    assert set(chosen(view, "model.*norm.weight")) == set(view.select("model.*norm.weight"))
    assert len(chosen(view, "nothing")) == 0
    assert chosen(view, "") is view


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


def test_a_map_needs_no_colour(files: Path) -> None:
    drawn = fragments.drawn(drawing(lazyckpt.open(files / "model")["model.norm.weight"]), 30).plain
    assert "across dimension 0: 0 to 128" in drawn
    assert drawn.count("a" * 30) == 2
    assert ".safetensors" in drawn


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
        assert shown(app, "lm_head.weight  bf16 [1000, 128]")
        await go_to(app, pilot, "model.layers.1.mlp.up_proj.weight")
        await press(app, pilot, "escape", "d")
        assert app.filter.value == "" and app.entry is not None
        assert app.entry.start == "model.layers.1.mlp.up_proj.weight"  # the cursor stays
        assert shown(app, "bf16 [512, 128]") and shown(app, "131,072 bytes (128.0 KiB)")
        await press(app, pilot, "m")
        assert shown(app, "aaaaaaaaaaaaaaaaaaaa")
        await press(app, pilot, "question_mark")
        await press(app, pilot, "escape", "s", "escape", "up", "down", "left")
        keep(app, f"map-{size[0]}x{size[1]}")
        assert counts.requests == 0

    drive(files / "model", do, size, view=view)


@pytest.mark.slow
def test_expanding_and_collapsing(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        names = app.names
        assert names.cursor_node is not None
        await press(app, pilot, "down")
        lines = names.last_line
        assert app.entry is not None and app.entry.start == "model."
        assert app.line == f'lazyckpt.open("{files / "model"}")["model"].to("cpu")'
        await press(app, pilot, "enter")
        assert names.last_line < lines
        await press(app, pilot, "enter")
        assert names.last_line == lines

    drive(files / "model", do)


@pytest.mark.slow
def test_values_read_what_they_show(files: Path) -> None:
    view, counts = opened(files / "model")
    t = view["model.layers.1.mlp.up_proj.weight"]

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, t.name)
        counts.clear()
        await press(app, pilot, "v")
        height, width = app.grid.room
        assert app.grid.window is not None
        assert (len(app.grid.window.cells), len(app.grid.window.heads)) == (height, width)
        assert 0 < counts.bytes <= 2 * (height * 128) * 2  # rows lie apart: a gap may be read with them
        counts.clear()
        await press(app, pilot, "pagedown", "down", "greater_than_sign")
        line = app.line
        left = app.grid.room[0]  # a long path may take another line of the terminal
        assert line.endswith(f"[{height + 1}:{height + 1 + left}, {width}:{2 * width}]")
        read = eval(line, {"lazyckpt": lazyckpt})
        cells = [[float(c) for c in row] for row in app.grid.window.cells]
        assert torch.allclose(torch.tensor(cells), read.float(), rtol=1e-3)
        await press(app, pilot, "end")
        assert app.grid.window.labels[-1] == "511"
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
        app.index.value = index
        await press(app, pilot, "enter")
        if index == "0:":
            assert not app.told.has_class("wrong") and app.grid.window is not None
        else:
            assert app.told.has_class("wrong") and app.grid.window is None
            app.index.value = "0:4"
            await press(app, pilot, "enter")
            assert not app.told.has_class("wrong") and app.grid.window is not None

    drive(files / "model", do)


@pytest.mark.slow
def test_histograms(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "model.norm.weight")
        await press(app, pilot, "h")
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

    monkeypatch.setattr("lazyckpt.browse.histogram.stats_of", slow)
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
        await pilot.press("h")
        await pilot.press("up")  # something else is looked at meanwhile
        await settle(app, pilot)
        assert app.entry is not None and app.entry.start != "model.norm.weight"
        await pilot.press("down")
        await pilot.press("h")
        go_on.set()
        await settle(app, pilot)
        assert shown(app, "cannot be read: the connection was lost")
        await press(app, pilot, "v")
        assert app.grid.window is not None  # it goes on

    drive(files / "model", do)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_states(files: Path, size: tuple[int, int]) -> None:
    path = files / "training.pt"

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "0.weight")
        await press(app, pilot, "s")
        assert app.screen.query_one(OptionList).option_count == len(lazyckpt.open(path).states) + 1
        await press(app, pilot, "down", "enter")
        assert app.view is not None and app.view.state == "exp_avg"
        assert app.entry is not None and app.entry.start == "0.weight"
        await press(app, pilot, "v")
        assert app.line.startswith(f'lazyckpt.open("{path}").states["exp_avg"]["0.weight"]')
        read = eval(app.line, {"lazyckpt": lazyckpt})
        assert app.grid.window is not None
        assert f"{read.flatten()[0].item():.4g}" == app.grid.window.cells[0][0]
        assert screen(app)[1].startswith(" exp_avg | torch")
        app.filter.value = ""
        await press(app, pilot, "s", "end", "enter")
        assert app.view.state == "stored" and app.entry is not None
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
            entry = app.entry
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
    """A level of 1,200 is not made at once, and nothing below it is."""
    save_file({f"layers.{n}.{w}": torch.ones(1) for n in range(1200) for w in "ab"}, tmp_path / "big.safetensors")

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        assert shown(app, "2,400 tensors, 9.4 KiB")
        assert app.names.last_line == 501
        await press(app, pilot, "end")
        assert shown(app, "700 more (Enter)")
        await press(app, pilot, "enter")
        assert app.names.last_line == 1001
        assert app.entry is not None and app.entry.start == "layers.500."
        await press(app, pilot, "enter")
        await press(app, pilot, "down", "down")
        assert app.entry.start == "layers.500.b"

    drive(tmp_path / "big.safetensors", do)


@pytest.mark.slow
def test_a_url() -> None:
    fs = pytest.importorskip("fsspec").filesystem("memory")
    with fs.open("/browse/model.pt", "wb") as f:
        torch.save({"a.weight": torch.arange(600.0).reshape(60, 10), "b": torch.arange(7)}, f)

    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await go_to(app, pilot, "a.weight")
        await press(app, pilot, "v", "pagedown")
        assert app.grid.window is not None and app.line.startswith(
            'lazyckpt.open("memory://browse/model.pt")["a.weight"]['
        )
        read = eval(app.line, {"lazyckpt": lazyckpt})
        assert [[float(c) for c in row] for row in app.grid.window.cells] == read.tolist()
        fs.rm("/browse", recursive=True)
        await press(app, pilot, "home")
        assert app.told.has_class("wrong") and "model.pt" in " ".join(screen(app))
        await press(app, pilot, "h")
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
        assert shown(app, "!!!!") and shown(app, "aaaa")
        keep(app, "lost-file")
        await press(app, pilot, "h")
        assert shown(app, "cannot be read")
        await press(app, pilot, "a")
        assert shown(app, "cannot be read") and not app.busy
        await press(app, pilot, "i", *"0:2", "enter")
        assert app.grid.window is not None and not app.told.has_class("wrong")
        first = case.truth["fp32"][name][0, 0].item()
        assert app.grid.window.cells[0][0] == f"{np.float32(first):.4g}"
        await press(app, pilot, "i")
        app.index.value = "-2:"
        await press(app, pilot, "enter")
        assert app.told.has_class("wrong") and app.grid.window is None
        await press(app, pilot, "p")
        assert shown(app, "is missing")

    drive(tmp_path / "ckpt", do, (80, 24))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 20), (30, 10)])
def test_small_terminals(files: Path, size: tuple[int, int]) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await press(app, pilot, "m", "v", "down", "h", "a", "d", "question_mark", "escape", "s", "escape", "t")
        await pilot.resize_terminal(100, 30)
        await press(app, pilot, "v")
        assert app.grid.window is not None
        keep(app, f"small-{size[0]}")

    drive(files / "model", do, size)


@pytest.mark.slow
def test_ten_lines_are_enough_to_see_values(files: Path) -> None:
    async def do(app: Browser, pilot: Pilot[Any]) -> None:
        await press(app, pilot, "down", "v")
        first = lazyckpt.open(files / "training.pt")["0.bias"][0].item()
        assert shown(app, "bias  f32 [64]") and shown(app, f"{np.float32(first):.4g}") and shown(app, "lazyckpt.open(")
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
        assert app.grid.window is not None  # the filter has gone, the values stay
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


@pytest.mark.slow
def test_other_commands_import_no_textual(files: Path) -> None:
    done = process("ls", str(files / "model"), code="sys.modules['textual'] = None")
    assert (done.returncode, done.stderr) == (0, "")
