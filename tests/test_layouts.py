"""Placements on a mesh against torch's own: what it cuts, and what it computes."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from lazyckpt.layouts.placements import Cut, Layout, MeshPlacement, Same, Summand

from .lanes import rounds


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    shape = draw(st.lists(st.integers(0, 13), max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    placements: list[MeshPlacement] = []
    for _ in mesh:
        kinds = ["same", "cut", "strided"] if shape else ["same"]
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, max(0, len(shape) - 1)))
        placements.append(Same() if kind == "same" else Cut(dim, draw(st.integers(2, 5)) if kind == "strided" else 1))
    return Layout(mesh, tuple(placements)), shape


def of_torch(placement: MeshPlacement) -> Any:
    if isinstance(placement, Cut):
        return (
            Shard(placement.dim) if placement.split == 1 else _StridedShard(placement.dim, split_factor=placement.split)
        )
    return Replicate()


def cut_by_torch(whole: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """As `distribute_tensor` cuts: one mesh dimension after the other."""
    for m in layout.order or range(len(layout.mesh)):
        placement = of_torch(layout.placements[m])
        if not isinstance(placement, Replicate):
            whole = placement._split_tensor(whole, layout.mesh[m], with_padding=False)[0][coordinate[m]]
    return whole


def assert_placed(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    local = cut_by_torch(whole, layout, coordinate)
    assert layout.local_shape(shape, coordinate) == tuple(local.shape)
    filled = torch.full_like(local, -1)
    hull = layout.hull(shape, coordinate)
    for part in layout.parts(shape, coordinate):
        there = part.local.shift([g - a for g, a in zip(part.start, part.local.start, strict=True)])
        filled[part.local.slices] = whole[there.slices]
        assert there & hull == there
    assert torch.equal(filled, local)


@given(layouts())
@settings(max_examples=rounds(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ranks_hold_what_torch_gives_them(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    seen = torch.zeros(shape, dtype=torch.int)
    keys: dict[tuple[int, ...], int] = {}
    for coordinate in layout.coordinates():
        assert_placed(layout, shape, coordinate)
        keys[layout.key(coordinate)] = keys.get(layout.key(coordinate), 0) + 1
        if keys[layout.key(coordinate)] == 1:
            for part in layout.parts(shape, coordinate):
                seen[part.local.shift([g - a for g, a in zip(part.start, part.local.start, strict=True)]).slices] += 1
    assert bool((seen == 1).all()), "together they hold every element once"
    assert len(set(keys.values())) == 1, "every shard has as many replicas"


@given(layouts())
@settings(max_examples=rounds(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_shapes_and_offsets_are_those_that_torch_computes(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    placements = [of_torch(p) for p in layout.placements]
    for coordinate in layout.coordinates():
        local, offset = _compute_local_shape_and_global_offset(shape, layout.mesh, list(coordinate), placements)
        assert layout.local_shape(shape, coordinate) == local
        parts = layout.parts(shape, coordinate)
        if 0 not in local:
            assert parts[0].start == tuple(offset)
        else:
            assert not any(part.local for part in parts)


@pytest.mark.parametrize("order", [(1, 0), (0, 1), (2, 0, 1), (1, 2, 0)])
def test_mesh_dimensions_cut_in_their_order(order: tuple[int, ...]) -> None:
    mesh = (2, 3, 2)[: len(order)]
    layout = Layout(mesh, (Cut(0),) * len(mesh), order)
    for size, coordinate in product((7, 12, 13), layout.coordinates()):
        assert_placed(layout, (size, 2), coordinate)


def test_fsdp_of_tensor_parallel_shards() -> None:
    """torch/distributed/tensor/placement_types.py, the example of `_StridedShard`."""
    layout = Layout((2, 2), (Cut(0, 2), Cut(0)))
    rows = {c: layout.runs((8, 8), c)[0] for c in layout.coordinates()}
    assert rows == {(0, 0): [(0, 2)], (0, 1): [(4, 2)], (1, 0): [(2, 2)], (1, 1): [(6, 2)]}


def test_sums_are_told() -> None:
    assert Layout((2, 2), (Same(), Summand("avg"))).partial == "avg"
    assert Layout((2,), (Cut(0),)).partial == ""


@pytest.mark.parametrize(
    ("mesh", "placements", "order"),
    [
        ((2,), (), None),
        ((0,), (Same(),), None),
        ((2,), (Cut(-1),), None),
        ((2,), (Cut(0, 0),), None),
        ((2,), (Same(),), (1,)),
    ],
)
def test_what_fits_nothing_is_refused(mesh: Any, placements: Any, order: Any) -> None:
    with pytest.raises(ValueError):
        Layout(mesh, placements, order)


def test_claims_cost_no_more_than_a_message() -> None:
    """Numbers of a hostile file: dimensions, and how often they are cut, of any size."""
    with pytest.raises(ValueError, match="dimension 3"):
        Layout((2,), (Cut(3),)).runs((4, 4), (0,))
    huge = 1 << 60
    with pytest.raises(ValueError, match="pieces"):
        Layout((2,), (Cut(0, huge),)).parts((huge,), (0,))
    with pytest.raises(ValueError, match="pieces"):
        Layout((2, 2), (Cut(0, 9_000), Cut(1, 9_000))).parts((36_000, 36_000), (0, 0))
    assert Layout((1 << 20,), (Cut(0),)).local_shape((huge,), (5,)) == (huge >> 20,)
