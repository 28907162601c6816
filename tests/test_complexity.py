"""Parsing and drawing take about as long as what they are given is large: four times as much, less than nine times.

(Twice as much may take less than three times as long; over two doublings noise counts for less. Time is that of the
processor, the best of several rounds where the first one was slow.)
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lazyckpt
from lazyckpt import CheckpointView
from lazyckpt.core.names import Names
from lazyckpt.inspect.table import Table
from lazyckpt.io.containers.zip import read_zip
from lazyckpt.io.containers.zip_columns import Records
from lazyckpt.io.containers.zip_offsets import data_offsets
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.storage.streams import StoreFile

from .hostility import Entry, raw_zip

pytestmark = pytest.mark.slow

Write = Callable[[Path, int], Path]


def seconds(do: Callable[[], object], rounds: int = 1) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        do()
        best = min(best, time.process_time() - start)
    return best


def memory(do: Callable[[], object]) -> int:
    """Bytes that it holds at most."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_linear(small: Callable[[], object], large: Callable[[], object], what: str = "") -> None:
    """``large`` does four times as much."""
    small()  # imports, caches
    a, b = seconds(small), seconds(large)
    if b > 9 * max(a, 0.002):  # once more, on a machine that may be busy
        a, b = seconds(small, 9), seconds(large, 3)
    assert b < 9 * max(a, 0.002), f"{what}: {a:.3f} s, and {b:.3f} s for four times as much"
    assert memory(large) < 9 * max(memory(small), 1 << 16), what


# -- parsing


def write_torch(path: Path, count: int) -> Path:
    torch.save({f"layers.{n}.mlp.weight": torch.empty(2) for n in range(count)}, path)
    return path


def write_legacy(path: Path, count: int) -> Path:
    tensors = {f"layers.{n}.mlp.weight": torch.empty(2) for n in range(count)}
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    return path


def write_training(path: Path, count: int) -> Path:
    states = {n: {"step": torch.tensor(1.0), "exp_avg": torch.empty(2)} for n in range(count)}
    model = {f"layers.{n}.weight": torch.empty(2) for n in range(count)}
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": [{"params": list(range(count))}]}}, path)
    return path


def safetensors_header(names: list[str], size: int = 0) -> bytes:
    """A file of tensors of so many elements, all in a row, that are not there if the size is 0."""
    table = {
        name: {"dtype": "F32", "shape": [size], "data_offsets": [4 * size * n, 4 * size * (n + 1)]}
        for n, name in enumerate(names)
    }
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * size * len(names))


def write_safetensors(path: Path, count: int) -> Path:
    path = path.with_suffix(".safetensors")
    path.write_bytes(safetensors_header([f"layers.{n}.mlp.weight" for n in range(count)]))
    return path


def write_huggingface(path: Path, count: int) -> Path:
    path.mkdir()
    names = [f"layers.{n}.mlp.weight" for n in range(count)]
    shards = max(1, count // 100)
    table = {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        (path / file).write_bytes(safetensors_header(names[k::shards]))
        table |= dict.fromkeys(names[k::shards], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return path


def write_zarr(path: Path, count: int) -> Path:
    array = {
        "zarr_format": 3, "node_type": "array", "shape": [2], "data_type": "float32", "fill_value": 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }  # fmt: skip
    nodes: dict[str, Any] = {f"a{n}": array for n in range(count)}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": nodes}
    path.mkdir()
    group = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": consolidated}
    (path / "zarr.json").write_text(json.dumps(group))
    return path


def write_dcp(path: Path, count: int) -> Path:
    dcp.save({f"layers.{n}.weight": torch.zeros(2) for n in range(count)}, checkpoint_id=path, no_dist=True)
    return path


PARSERS: dict[str, tuple[Write, int]] = {
    "torch": (write_torch, 500),
    "torch, legacy": (write_legacy, 500),
    "torch, with an optimizer": (write_training, 250),
    "safetensors": (write_safetensors, 1500),
    "an index of Hugging Face": (write_huggingface, 1500),
    "documents of zarr": (write_zarr, 250),
    "metadata of DCP": (write_dcp, 250),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
def test_opening_is_linear(parser: str, tmp_path: Path) -> None:
    write, count = PARSERS[parser]
    small, large = write(tmp_path / "small", count), write(tmp_path / "large", 4 * count)
    assert len(lazyckpt.open(large, cache=False)) >= 4 * len(lazyckpt.open(small, cache=False)) > 0
    assert_linear(
        lambda: lazyckpt.open(small, cache=False), lambda: lazyckpt.open(large, cache=False), f"opening {parser}"
    )


def test_directories_of_zips_are_linear(tmp_path: Path) -> None:
    def write(name: str, count: int) -> Callable[[], object]:
        (tmp_path / name).write_bytes(raw_zip([Entry(b"archive/data/%d" % n, b"abcd") for n in range(count)]))
        store = LocalStore(tmp_path)

        def parse() -> None:
            file = StoreFile(store, name)
            start, entries = read_zip(file)
            assert len(data_offsets(file, start, Records.of(entries))) == count

        return parse

    assert_linear(write("small", 4000), write("large", 16_000), "the directory of a zip")


# -- drawing

NAMESPACES: dict[str, Callable[[int], list[str]]] = {
    "layers": lambda n: [f"layers.{k}.{part}" for k in range(n // 4) for part in ("q", "k", "v", "norm.weight")],
    "siblings": lambda n: [f"w{k}" for k in range(n)],
    "numbers with gaps": lambda n: [str(k * (k + 1) // 2) for k in range(n)],
    "long names": lambda n: [f"{k:06}" + "x" * 500 for k in range(n)],
    "one long name": lambda n: ["x" * (1 << 16), *(f"w{k}" for k in range(n))],
    "deep names": lambda n: ["a." * 60 + str(k) for k in range(n)],
    "deep names of their own": lambda n: [f"a{k}." * 60 + "w" for k in range(n // 8)],
    "odd characters": lambda n: [f"\x1b[31m{k}\n" for k in range(n)],
}


def view_of(folder: Path, names: list[str]) -> CheckpointView:
    path = folder / f"{len(names)}.safetensors"
    path.write_bytes(safetensors_header(names))
    return lazyckpt.open(path, cache=False)


DRAWINGS: dict[str, Callable[[CheckpointView], object]] = {
    "repr": repr,
    "tree": lambda view: view.tree(),
    "html": lambda view: view._repr_html_(),
    "explain": lambda view: view.explain(),
    "paths for completion": lambda view: Names(view).paths(),
    "select": lambda view: len(view.select("*7*")),
    "states": lambda view: repr(view.states),
}


@pytest.mark.product
@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_drawing_is_linear(namespace: str, drawing: str, tmp_path: Path) -> None:
    make, draw = NAMESPACES[namespace], DRAWINGS[drawing]
    small, large = view_of(tmp_path, make(500)), view_of(tmp_path, make(2000))
    assert_linear(lambda: draw(small), lambda: draw(large), f"{drawing} of {namespace}")


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_what_is_drawn_is_bounded_in_width(namespace: str, tmp_path: Path) -> None:
    """However long the names are: a line of text, and the whole of a notebook's output."""
    view = view_of(tmp_path, NAMESPACES[namespace](2000))
    for text in (repr(view), view.tree(), repr(view.states)):
        assert max(map(len, text.splitlines())) < 2000
    assert len(view._repr_html_()) < 4 << 20


def test_one_long_name_is_not_paid_for_by_every_row(tmp_path: Path) -> None:
    view = view_of(tmp_path, NAMESPACES["one long name"](5000))
    assert len(view.tree()) < 5 << 20


def test_a_table_of_statistics_is_bounded_in_width(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_header(["x" * (1 << 16), *(f"w{n}" for n in range(50))], 1))
    table = lazyckpt.open(path).stats(progress=False)
    assert isinstance(table, Table)
    assert max(map(len, str(table).splitlines())) < 1000


def test_a_name_of_which_only_the_middle_differs_is_told_apart(tmp_path: Path) -> None:
    view = view_of(tmp_path, ["layers.10.mlp.down_proj.weight", "layers.9.mlp.down_proj.weight"])
    assert "10" in view.tree() and "9" in view.tree()


@pytest.mark.parametrize("elements", [1 << 27, 1 << 40])
def test_a_wide_tensor_is_drawn_at_once(elements: int, tmp_path: Path) -> None:
    """As wide as a flat vector of an optimizer is: what is drawn looks at no element, not even by number."""
    path = tmp_path / "x.pt"
    wide = torch.zeros(1).expand(elements)
    torch.save({"w": wide, "v": torch.zeros(2, 3)}, path)
    view = lazyckpt.open(path)

    def draw() -> None:
        t = view["w"]
        for one in (t, t.lazy[5:], t.lazy[::-3], t.lazy[None, 7:-7:2]):
            repr(one), one._repr_html_(), list(one.fragments), one._sel.hull

    view["v"]._repr_html_()
    assert seconds(draw) < 1


def test_completion_of_deep_names_is_bounded() -> None:
    deep = ["a." * 30_000 + "w", *(f"b{n}." * 50 + "w" for n in range(500))]
    assert seconds(lambda: Names(deep).paths(), 1) < 5
    assert sum(map(len, Names(deep).paths())) < 1 << 25
