"""The memory that a model's weights, gradients and optimizer take on each rank of a mesh, by arithmetic.

Tensors are cut as `CheckpointView.shard` cuts them; nothing is read. What is assumed is listed in `Costs.assumed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.dtypes import FROM_NAME, DType
from ..core.placement import Mesh
from ..core.units import human_bytes
from ..errors import DataError, some
from ..layouts.pipeline import PipelineLayout, pipeline_of
from ..layouts.ranks import division_of, mesh_of, world_size
from ..layouts.shard import StageSize, stage_sizes
from ..lookup import STORED
from ..namespace import Namespace

OPTIMIZERS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "adamw": (("exp_avg", 4), ("exp_avg_sq", 4)),
    "adamw-bf16": (("exp_avg", 2), ("exp_avg_sq", 2)),
    "adamw-8bit": (("exp_avg", 1), ("exp_avg_sq", 1)),
    "sgd": (("momentum", 4),),
    "none": (),
}
"""Optimizer -> its states, and the bytes of each for an element. "none": no training, so no gradients either."""

_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True, slots=True)
class Cost:
    """The memory for one purpose on each rank of a pipeline stage.

    Attributes
    ----------
    what
        "weights", "gradients", "fp32 weights", or the name of a state of the optimizer.
    nbytes
        The size in bytes.
    how
        The arithmetic, as text.
    """

    what: str
    nbytes: int
    how: str


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The memory on each rank of a pipeline stage.

    Attributes
    ----------
    stage
        The number of the stage.
    others, experts
        The elements that a rank has before data-parallel ranks divide them: of parameters outside experts, and of
        experts.
    tensors
        The number of tensors.
    costs
        The memory by purpose.
    """

    stage: int
    others: int
    experts: int
    tensors: int
    costs: tuple[Cost, ...]

    @property
    def nbytes(self) -> int:
        """The size of all in bytes."""
        return sum(cost.nbytes for cost in self.costs)


@dataclass(frozen=True, slots=True)
class Costs:
    """The memory on each rank of a mesh. See `memory_per_rank`.

    Attributes
    ----------
    mesh
        The parallel degrees.
    world
        The number of ranks.
    zero
        The stage of ZeRO.
    optimizer
        The name of the optimizer, of `OPTIMIZERS`.
    stages
        The memory by pipeline stage.
    assumed
        What the arithmetic assumes, and what it leaves out, as sentences.
    """

    mesh: Mesh
    world: int
    zero: int
    optimizer: str
    stages: tuple[StageCosts, ...]
    assumed: tuple[str, ...]

    @property
    def largest(self) -> StageCosts:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.nbytes)

    def __str__(self) -> str:
        most = self.largest
        parts = ", ".join(f"{cost.what} {human_bytes(cost.nbytes)}" for cost in most.costs)
        if len(self.stages) > 1:
            where = f"on each rank of pipeline stage {most.stage}, the fullest ({self.world:,} ranks in all)"
        else:
            where = "on one rank" if self.world == 1 else f"on each of {self.world:,} ranks"
        return f"{human_bytes(most.nbytes)} {where}: {parts}"


def memory_per_rank(
    view: Namespace[Any],
    *,
    dtype: str | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    layout: PipelineLayout | None = None,
    zero: int = 0,
    optimizer: str = "adamw",
    gradients: str = "float32",
    rules: Mapping[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Costs:
    """Return the memory for weights, gradients and optimizer on each rank, without reading.

    Parameters
    ----------
    view
        The weights. Tied tensors are counted once, and again on each pipeline stage that needs a copy.
    dtype
        The weights' dtype by torch's name; None keeps the stored dtypes.
    tp, pp, dp, ep, etp, layout, rules
        As of `CheckpointView.shard`: ``dp`` counts the ranks with the same experts, and parameters outside experts are
        the same on ``ep * dp`` ranks.
    zero
        The stage of ZeRO, which divides among data-parallel ranks the optimizer (1), gradients, too (2), and weights,
        too (3).
    optimizer
        One of `OPTIMIZERS`. Weights that are not float32 have a further float32 copy.
    gradients
        The gradients' dtype by torch's name, or "same" for that of the weights.
    check
        Called now and then; what it raises ends the work.

    Raises
    ------
    DataError
        An argument is not one of these.
    MeshError, FormatError
        As `CheckpointView.shard` raises them: a degree does not divide the model, or nothing tells how a tensor is cut.
    """
    if zero not in (0, 1, 2, 3):
        raise DataError(f"zero={zero!r}: the stages of ZeRO are 0 (none), 1, 2 and 3")
    if optimizer not in OPTIMIZERS:
        raise DataError(f"optimizer={optimizer!r}: it is one of {some(OPTIMIZERS)}")
    weights = None if dtype is None else _dtype("dtype", dtype)
    slopes = None if gradients == "same" else _dtype("gradients", gradients)
    if view.state == STORED:
        raise DataError("the memory is that of a state's tensors, not of tensors under their raw names: take a state")
    mesh = mesh_of(tp, pp, dp, ep)
    division = division_of(mesh, etp, pipeline_of(pp, layout=layout))
    sizes = stage_sizes(view._index, view.state, view._owners(), division, rules or {}, view.kept, check)
    world = world_size(mesh, etp)
    ranks = world // (tp * pp), world // (division.etp * ep * pp)  # with the same parameters, outside and in experts
    stages = tuple(_stage(n, size, weights, slopes, zero, optimizer, ranks) for n, size in enumerate(sizes))
    return Costs(mesh, world, zero, optimizer, stages, _assumed(weights, optimizer, zero, ranks))


def _dtype(what: str, name: str) -> DType:
    if name not in _DTYPES:
        raise DataError(f"{what}={name!r}: it is one of {some(_DTYPES)}")
    return FROM_NAME[name]


def _stage(
    number: int,
    size: StageSize,
    weights: DType | None,
    gradients: DType | None,
    zero: int,
    optimizer: str,
    ranks: tuple[int, int],
) -> StageCosts:
    others, experts = ({weights: sum(n.values())} if weights else n for n in (size.others, size.experts))
    costs = [_cost("weights", others, experts, None, ranks if zero >= 3 else (1, 1))]
    if optimizer != "none":
        costs.append(_cost("gradients", others, experts, gradients, ranks if zero >= 2 else (1, 1)))
        divided = ranks if zero >= 1 else (1, 1)
        narrow = [{dtype: n for dtype, n in table.items() if dtype.itemsize != 4} for table in (others, experts)]
        if any(narrow):
            costs.append(_cost("fp32 weights", narrow[0], narrow[1], FROM_NAME["float32"], divided))
        costs += [_cost(name, others, experts, each, divided) for name, each in OPTIMIZERS[optimizer]]
    return StageCosts(number, sum(others.values()), sum(experts.values()), size.tensors, tuple(costs))


def _cost(
    what: str,
    others: Mapping[DType, int],
    experts: Mapping[DType, int],
    each: DType | float | None,
    ranks: tuple[int, int],
) -> Cost:
    """Return the memory of some elements. ``each`` is their dtype or size, None that of the weights; ``ranks`` are the
    numbers of ranks that divide them."""
    nbytes, terms = 0, []
    for table, among in ((others, ranks[0]), (experts, ranks[1])):
        for dtype, count in table.items():
            size = (dtype if each is None else each).itemsize if not isinstance(each, int | float) else each
            nbytes += int(-(-count // among) * size)
            terms.append(f"{count:,}" + (f" / {among:,}" if among > 1 else "") + f" x {size:g} B")
    return Cost(what, nbytes, " + ".join(terms) or "0")


def _assumed(weights: DType | None, optimizer: str, zero: int, ranks: tuple[int, int]) -> tuple[str, ...]:
    found = [
        "Activations, buffers of communication, the allocator's overhead and temporary copies are not counted.",
        "Every tensor is counted as if it were trained; a tied tensor once on each pipeline stage that uses it.",
    ]
    if weights is None:
        found.append("The weights have the dtypes in which they are stored.")
    elif weights.itemsize == 1:
        found.append("Scales of 8-bit weights, and what a recipe keeps in a wider dtype, are not counted.")
    if optimizer != "none":
        found.append("Weights that do not have 4 bytes an element have a float32 copy in the optimizer.")
    if optimizer == "adamw-8bit":
        found.append("Scales of the 8-bit moments are not counted.")
    if zero and max(ranks) > 1:
        same = f"{ranks[0]:,} ranks" if ranks[0] == ranks[1] else f"{ranks[0]:,} ranks, of experts {ranks[1]:,}"
        found.append(f"ZeRO divides evenly among the ranks that hold the same parameters: {same}. Padding is left out.")
    return tuple(found)
