"""Fragments as boxes: they say where the elements are, on real checkpoints, and drawings of them stay small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.core.box import Box, c_strides
from lazyckpt.core.extents import Extent
from lazyckpt.core.placement import Part, Rank
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.show.layout import boxes, drawing, ranges
from lazyckpt.tensor import LazyTensor
from lazyckpt.testing.contract import each, open_case
from lazyckpt.testing.counting import opened

from .writers import Case


def test_boxes_hold_what_they_say(case: Case) -> None:
    """Each element stands in a box, and reading it reads of a file that the boxes name for it."""
    view = open_case(case)
    for state, name, t, whole in each(view, case):
        count = torch.zeros(whole.shape, dtype=torch.int64)
        files: dict[str, torch.Tensor] = {}
        for block in boxes(t):
            assert block.box & Box.of(t.shape) == block.box, "nothing past the end"
            count[block.box.slices] += 1
            files.setdefault(block.holder.path, torch.zeros(whole.shape, dtype=torch.bool))[block.box.slices] = True
        assert bool((count > 0).all()), (state, name)
        dice = random.Random(name)
        for _ in range(3 if whole.numel() else 0):
            at = tuple(dice.randrange(n) for n in whole.shape)
            read = {line.split(":")[0].strip() for line in t.explain(at).splitlines() if line.startswith("  ")}
            assert read & {path for path, held in files.items() if held[at]}, (state, name, at)


def test_boxes_of_a_part(case: Case) -> None:
    """Of a part of a tensor: those of the whole, cut to the hull of what is selected."""
    view = open_case(case)
    for _, _, t, whole in each(view, case):
        if not whole.ndim or whole.shape[0] < 3 or not whole.numel():
            continue
        hull = Box.of(t.shape) & Box((1, *(0 for _ in t.shape[1:])), t.shape)
        every = {(b.box & hull, b.holder.path) for b in boxes(t) if b.box & hull}
        for part in (t.lazy[1:], t.lazy[:0:-1]):
            found = {(b.box, b.holder.path) for b in boxes(part)}
            assert found <= every
            held = torch.zeros(whole.shape, dtype=torch.bool)
            for box, _ in found:
                held[box.slices] = True
            assert bool(held[1:].all()) and not bool(held[0].any())
        assert list(boxes(t.lazy[:0])) == []


def test_it_reads_nothing(case: Case) -> None:
    view, counts = opened(case.path, **case.info.get("open", {}))
    parts = list(each(view, case))
    counts.clear()
    for _, _, t, _ in parts:
        drawing(t)
    assert counts.requests == 0


def tensor(shape: tuple[int, ...], fragments: list[Fragment]) -> LazyTensor:
    return LazyTensor(LocalStore("/"), TensorSpec("w", shape, torch.float32, fragments))


def fragment(path: str, local: Box, start: tuple[int, ...], rank: Rank | None) -> Fragment:
    extent = Extent(path, 0, torch.float32, local.shape, c_strides(local.shape))
    return Fragment(extent, local.shape, (Part(local, start),), rank=rank)


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> LazyTensor:
    """A tensor cut evenly, over as many ranks."""
    sizes = tuple(n // c for n, c in zip(shape, cuts, strict=True))
    found = []
    for n in range(torch.Size(cuts).numel()):
        at = [n // s % c for s, c in zip(c_strides(cuts), cuts, strict=True)]
        start = tuple(a * s for a, s in zip(at, sizes, strict=True))
        found.append(fragment(f"rank{n}.pt", Box.of(sizes), start, Rank(dp=n)))
    return tensor(shape, found)


def test_labels() -> None:
    box = Box.of((2,))
    labels = [
        [Rank(tp=1, dp=3), Rank(), Rank(dp=3)],
        [Rank()],
        [None, None],
    ]
    want = [["tp 1 dp 3", "tp 0 dp 0", "tp 0 dp 3"], ["rank 0"], ["f0.pt", "f1.pt"]]
    for given, expected in zip(labels, want, strict=True):
        t = tensor((2,), [fragment(f"a/f{n}.pt", box, (0,), rank) for n, rank in enumerate(given)])
        assert [b.holder.label for b in boxes(t)] == expected
    t = tensor((2,), [fragment(f"{n}/f.pt", box, (0,), None) for n in "ab"])
    assert [b.holder.label for b in boxes(t)] == ["a/f.pt", "b/f.pt"]
    assert ranges(b.holder for b in boxes(t)) == "a/f.pt, b/f.pt"


def test_which_dimensions_are_drawn() -> None:
    for shape, cuts, drawn, undrawn in (
        ((8, 6), (4, 1), (0, 1), ()),
        ((8, 6), (1, 2), (0, 1), ()),
        ((8,), (4,), (None, 0), ()),
        ((), (), (None, None), ()),
        ((1, 8), (1, 4), (None, 1), ()),
        ((16, 8, 6), (8, 1, 2), (0, 2), ()),
        ((16, 8, 6), (1, 4, 1), (0, 1), ()),
        ((4, 8, 16), (2, 4, 8), (1, 2), (0,)),
        ((64, 32, 3, 3), (1, 1, 1, 1), (0, 1), ()),
    ):
        d = drawing(grid(shape, cuts))
        assert ((d.row_dim, d.col_dim), d.undrawn) == (drawn, undrawn), (shape, cuts)
        assert d.complete and not d.merged
        assert d.blocks == torch.Size(cuts).numel()
        assert sum(c.blocks for c in d.cells) == d.blocks


def test_replicas_are_one_cell() -> None:
    t = tensor((4, 4), [fragment(f"{n}.pt", Box.of((4, 4)), (0, 0), Rank(tp=n)) for n in range(8)])
    (cell,) = drawing(t).cells
    assert (cell.rows, cell.cols, cell.blocks) == ((0, 4), (0, 4), 8)
    assert [h.label for h in cell.holders] == [f"tp {n}" for n in range(8)]
    assert ranges(cell.holders) == "tp 0-7"


@pytest.mark.parametrize(("shape", "cuts"), [((65536, 512), (4096, 1)), ((4096,), (2048,)), ((64, 64), (64, 64))])
def test_many_blocks_are_few_cells(shape: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    d = drawing(grid(shape, cuts), cells=100)
    assert d.merged and 50 <= len(d.cells) <= 100
    assert sum(c.blocks for c in d.cells) == d.blocks == torch.Size(cuts).numel()
    held = torch.zeros(d.rows[1], d.cols[1], dtype=torch.bool)
    for cell in d.cells:
        held[slice(*cell.rows), slice(*cell.cols)] = True
    assert bool(held.all())


@pytest.mark.slow
def test_more_than_can_be_looked_at() -> None:
    d = drawing(grid((50_000,), (25_000,)))
    assert (d.blocks, d.complete, d.merged) == (20_000, False, True)
    assert len(d.cells) <= 200


def test_lost_files_are_told(dcp_hole: tuple[lazyckpt.CheckpointView, Case]) -> None:
    view, case = dcp_hole
    lost = 0
    for name in case.truth["weights"]:
        for block in boxes(view[name]):
            gone = block.holder.path == "__1_0.distcp"
            assert bool(block.holder.missing) == gone
            lost += gone
    assert lost


def test_cells_that_miss_their_file(tmp_path: Path, dcp_hole: tuple[lazyckpt.CheckpointView, Case]) -> None:
    view, _ = dcp_hole
    t = max(view.values(), key=lambda t: len(t.fragments))
    assert {c.missing for c in drawing(t).cells} == {True, False}
