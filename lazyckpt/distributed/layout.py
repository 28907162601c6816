"""Derive the experts' mesh of the saving run from the grid of a checkpoint's pieces.

torch's distributed checkpoints store neither meshes nor placements, only which block of a tensor each piece is
(torch/distributed/checkpoint/metadata.py). A tensor [E, ...] in n0 x n1 blocks was cut by n0 EP ranks and n1 ranks of
"ep_fsdp"; other grids are ambiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from torch.distributed.tensor import Replicate, Shard

from ..core.fragments import fragment_boxes
from ..tensor import LazyTensor
from .mesh import EPDegrees, EPSpecInfo, planned

Grid = list[list[int]]  # for every dimension, the widths of its blocks


def ep_specs(
    view: Mapping[str, LazyTensor], plan: Mapping[str, Shard | Replicate] | None = None
) -> dict[str, EPSpecInfo]:
    """Derive how the tensors of a view were distributed over the ("ep", "ep_fsdp") mesh that saved them. Reads nothing.

    Parameters
    ----------
    view
        Names -> lazy tensors.
    plan
        Which tensors are experts: glob -> placement over "ep", as for `build_ep_fqn2spec_info`. By default the tensors
        of three or more dimensions that are cut along the first and one other dimension.

    Returns
    -------
    dict of str to EPSpecInfo
        By name. ``mesh`` is the `EPDegrees` of the ranks that hold elements, or None if the pieces are ambiguous. A
        tensor that may or may not be an expert has no placement, and a ``note`` that says so.

    Raises
    ------
    MeshError
        A glob of the plan matches no name.
    """
    names = list(view)
    grids = {name: _grid(view[name]) for name in names}
    if plan is None:
        wanted: dict[str, Shard | Replicate] = {n: Shard(0) if _stacked(grids[n]) else Replicate() for n in names}
    else:
        wanted = planned(names, plan)
    found = _degrees(
        [g for name, over in wanted.items() if isinstance(over, Shard) and (g := grids[name])], _dims(wanted, grids)
    )
    infos = {}
    for name, over in wanted.items():
        grid = grids[name]
        if isinstance(over, Shard):
            infos[name] = _expert(name, over, grid, found)
        elif plan is None and (note := _open(grid)):
            infos[name] = EPSpecInfo(name, None, None, None, note)
        else:
            infos[name] = EPSpecInfo(name, over, found)
    return infos


def _grid(tensor: LazyTensor) -> Grid | None:
    """Return the grid of a tensor's pieces; None if they do not form a grid."""
    shape = tensor.spec.shape
    boxes = {globe for fragment in tensor.fragments for _, globe in fragment_boxes(fragment)}
    if not boxes:
        return [[n] for n in shape]
    starts = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), len(shape))
    stops = np.minimum(np.array([box.stop for box in boxes], np.int64).reshape(starts.shape), shape)
    grid, count = [], 1
    for dim, size in enumerate(shape):
        edges = np.unique(starts[:, dim]).tolist()
        ends = [*edges[1:], size]
        if edges[0] != 0 or not np.array_equal(stops[:, dim], np.array(ends)[np.searchsorted(edges, starts[:, dim])]):
            return None
        grid.append([b - a for a, b in zip(edges, ends, strict=True)])
        count *= len(edges)
    return grid if count == len(boxes) else None


def _cut(grid: Grid) -> list[int]:
    return [dim for dim, widths in enumerate(grid) if len(widths) > 1]


def _stacked(grid: Grid | None) -> bool:
    """Return whether a grid can only be that of stacked experts over ("ep", "ep_fsdp")."""
    return grid is not None and len(grid) >= 3 and len(_cut(grid)) == 2 and _cut(grid)[0] == 0


def _open(grid: Grid | None) -> str:
    """Return why a tensor without a plan may be distributed over "ep"; empty if it certainly is not."""
    if grid is None:
        return "its pieces are no grid of blocks"
    cut = _cut(grid)
    if len(grid) == 2 and cut == [0, 1]:
        return (
            f"its {len(grid[0])} x {len(grid[1])} pieces may be those of experts (biases), or of tensor parallelism "
            "and FSDP: a plan tells"
        )
    if len(grid) >= 3 and cut == [0]:
        return (
            f"its {len(grid[0])} pieces along dimension 0 may be experts over 'ep', over 'ep' and 'ep_fsdp', or FSDP "
            "alone: a plan tells"
        )
    return ""


def _dims(wanted: Mapping[str, Shard | Replicate], grids: Mapping[str, Grid | None]) -> list[int]:
    return [over.dim for name, over in wanted.items() if isinstance(over, Shard) and grids[name]]


def _degrees(grids: Iterable[Grid], dims: Iterable[int]) -> EPDegrees | None:
    """Return the sizes of the mesh by majority of the experts that are cut along their own and one other dimension."""
    shown: Counter[EPDegrees] = Counter()
    for grid, dim in zip(grids, dims, strict=True):
        others = [d for d in _cut(grid) if d != dim]
        if dim < len(grid) and len(others) == 1:
            shown[EPDegrees(len(grid[dim]), len(grid[others[0]]))] += 1
    return max(shown, key=lambda degrees: (shown[degrees], degrees)) if shown else None


def _expert(name: str, over: Shard, grid: Grid | None, mesh: EPDegrees | None) -> EPSpecInfo:
    """Return the spec of a tensor that the plan distributes over "ep", checked against its pieces."""
    if grid is None:
        return EPSpecInfo(name, over, mesh, None, "its pieces are no grid of blocks: they do not tell how it was cut")
    if over.dim >= len(grid):
        return EPSpecInfo(name, None, mesh, None, f"it has {len(grid)} dimensions, none of the number {over.dim}")
    cut = _cut(grid)
    size, pieces = sum(grid[over.dim]), grid[over.dim]
    if not cut:
        degrees = EPDegrees()
        if mesh is None or mesh == degrees:
            return EPSpecInfo(name, over, degrees, Replicate())
    others = [d for d in cut if d != over.dim]
    if mesh is None:
        note = (
            f"its {len(pieces)} pieces may be those of as many EP ranks, or of fewer that share theirs over 'ep_fsdp'"
        )
        return EPSpecInfo(name, over, None, None, note)
    if others:
        if len(others) == 1 and (len(pieces), len(grid[others[0]])) == mesh and pieces == _chunks(size, mesh.ep):
            return EPSpecInfo(name, over, mesh, Shard(others[0]))
    else:
        alone, both = pieces == _chunks(size, mesh.ep), pieces == _nested(size, mesh)
        if alone and both:
            note = "whether 'ep_fsdp' cuts it along the same dimension cannot be told: most ranks would have nothing"
            return EPSpecInfo(name, over, mesh, None, note)
        if alone or both:
            return EPSpecInfo(name, over, mesh, Replicate() if alone else Shard(over.dim))
    sizes = " x ".join(str(len(widths)) for widths in grid)
    note = (
        f"its {sizes} pieces are not those of {mesh.ep} EP ranks with {mesh.ep_fsdp} ranks of 'ep_fsdp', as others show"
    )
    return EPSpecInfo(name, None, None, None, note)


def _chunks(size: int, count: int) -> list[int]:
    """Return the widths of the chunks of torch.chunk, without empty ones."""
    step = -(-size // count)
    return [min(step, size - at) for at in range(0, size, step)] if step else [0]


def _nested(size: int, mesh: EPDegrees) -> list[int]:
    return [width for chunk in _chunks(size, mesh.ep) for width in _chunks(chunk, mesh.ep_fsdp)]
