"""The sizes of an optimizer's last steps, as a table: norms of updates in units of the weights'.

Directions and weights are read in pieces by the engine of all long work, in bounded memory. A task returns sums in
float64, which are added exactly, in the order of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.rounding import exact_sum
from ..core.specs import TensorSpec
from ..errors import LazyckptError
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, runner
from ..jobs.progress import Bar
from ..lazy import LazyArray
from .rows import Rows, aligned, printed

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_RUN = 1 << 22  # elements of a task
_PIECE = 1 << 18  # elements at a time
_BOUND = 0.99  # of the learning rate: an element that moves so far is at the bound of Adam's and Lion's steps


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """The last step of one parameter: a row of an `UpdateTable`.

    Attributes
    ----------
    name
        The parameter.
    layer
        The first number between the dots of the name; None if there is none.
    step
        The step of the checkpoint, if it is one of a run.
    optimizer
        "adamw", "adam", "lion", "sgd", "adafactor" or "muon".
    lr
        The learning rate; None if it is not known, or is relative to the weights (Adafactor's).
    rate
        Where the learning rate is from. "recorded"; "scheduled": recorded after the scheduler has set that of the next
        step; "given"; "relative"; "unknown": updates are in units of it.
    exact
        Whether the states determine the update. If not, it is the update for a gradient that does not change.
    update, weight
        The L2 norms of the update and of the weight after it.
    ratio
        ``update / weight``; NaN for a weight of norm 0.
    rms
        The root mean square of the update's elements.
    bound
        The part of the elements that Adam or Lion moves by at least 0.99 of the learning rate, without weight decay:
        those whose gradients agree from step to step. None for other optimizers.
    cosine
        The cosine of the angle between the update and the change of the weight since the checkpoint before it in the
        run: 1 if there is one step between the two, and near 0 if steps point in all directions. None if there is no
        checkpoint before it.
    count
        The number of elements.
    nonfinite
        The number of elements whose update or weight is NaN or infinite. The other columns are of all other elements.
    error
        Why the update cannot be computed. All numbers but ``count`` are None then.
    """

    name: str
    layer: int | None
    step: int | None
    optimizer: str
    lr: float | None
    rate: str
    exact: bool
    update: float | None = None
    weight: float | None = None
    ratio: float | None = None
    rms: float | None = None
    bound: float | None = None
    cosine: float | None = None
    count: int = 0
    nonfinite: int | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the columns as plain objects."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class UpdateTable(Rows[UpdateSize]):
    """The last steps of several parameters, perhaps at several steps of a run: a sequence of `UpdateSize`.

    ``table[0]`` and ``table["name"]`` are rows (for a run the last step's), ``table[1:]`` is a table.
    ``pandas.DataFrame(table)`` and ``polars.DataFrame(table)`` have the columns of `UpdateSize`.

    Parameters
    ----------
    rows
        The rows.
    """

    __slots__ = ()

    def _searched(self) -> Iterator[UpdateSize]:
        return reversed(self._rows)

    @property
    def layers(self) -> UpdateTable:
        """The same in one row for each step and layer, named "layer 3"; what is in no layer keeps its row.

        Norms are those of all parameters of a layer together. ``cosine`` and ``bound`` are not computed; ``lr`` is None
        if the parameters have different ones.
        """
        groups: dict[tuple[int | None, int | None, str], list[UpdateSize]] = {}
        for one in self._rows:
            groups.setdefault((one.step, one.layer, "" if one.layer is not None else one.name), []).append(one)
        order = sorted(groups, key=lambda key: (key[0] is not None, key[0] or 0, key[1] is not None, key[1] or 0))
        return UpdateTable(
            _joined(groups[key]) if key[1] is not None else replace(groups[key][0], bound=None, cosine=None)
            for key in order
        )

    def lines(self, limit: int | None = None) -> list[tuple[str, ...]]:
        """Return header and rows as text, padded to columns.

        Parameters
        ----------
        limit
            Show only the first and last rows if there are more than this number.

        Returns
        -------
        list of tuple of str
            A tuple of cells for each line. The line of an update that cannot be computed has its reason in the last of
            fewer cells.
        """
        run = any(one.step is not None for one in self._rows)
        shown = self._shown(limit, lambda one: _cells(one, run))
        return aligned([("name", *(("step",) if run else ()), *_HEAD), *shown], _LEFT)

    def _inside(self, title: str, cell: str) -> str:
        text = super()._inside(title, cell)
        return f"<code>{text}</code>" if title == "name" else text

    def _css(self, title: str, cell: str) -> str:
        return "l" if title in _LEFT else ""


_HEAD = ("optimizer", "lr", "update", "weight", "ratio", "rms", "bound", "cosine", "note")
_LEFT = ("name", "optimizer", "note")


def _cells(one: UpdateSize, run: bool) -> tuple[str, ...]:
    first = (printed(one.name), *((f"{one.step}",) if run else ()))
    if one.error is not None:
        return (*first, one.optimizer, f"cannot be computed: {one.error}")
    numbers = (one.lr, one.update, one.weight, one.ratio, one.rms, one.bound, one.cosine)
    notes = [] if one.exact else ["constant gradient"]
    notes += {"scheduled": ["lr of the next step"], "unknown": ["in units of lr"]}.get(one.rate, [])
    notes += [f"{one.nonfinite:,} not finite"] if one.nonfinite else []
    return (*first, one.optimizer, *("" if x is None else f"{x:.3g}" for x in numbers), ", ".join(notes))


def _joined(rows: Sequence[UpdateSize]) -> UpdateSize:
    """Return the row of a layer."""
    first, good = rows[0], [one for one in rows if one.error is None]
    optimizers, rates = (list(dict.fromkeys(getattr(one, key) for one in rows)) for key in ("optimizer", "rate"))
    lrs = {one.lr for one in rows}
    base = UpdateSize(
        f"layer {first.layer}",
        first.layer,
        first.step,
        "+".join(optimizers),
        lrs.pop() if len(lrs) == 1 else None,
        rates[0] if len(rates) == 1 else "mixed",
        all(one.exact for one in rows),
        count=sum(one.count for one in rows),
    )
    if not good:
        return replace(base, error=first.error)
    update = math.hypot(*(one.update or 0.0 for one in good))
    weight = math.hypot(*(one.weight or 0.0 for one in good))
    odd = sum(one.nonfinite or 0 for one in good)
    count = sum(one.count for one in good) - odd
    return replace(
        base,
        update=update,
        weight=weight,
        ratio=update / weight if weight else math.nan,
        rms=update / math.sqrt(count) if count else math.nan,
        nonfinite=odd,
    )


class Measured(NamedTuple):
    """One update to measure: ``-(scale * direction + decay * weight)``. ``row`` has what is known of it before."""

    row: UpdateSize
    direction: LazyArray
    weight: LazyArray
    before: LazyArray | None
    scale: float
    decay: float
    bounded: bool


class _Sums(NamedTuple):
    """Sums over some elements: squares of the update, the weight and the change since an earlier checkpoint, products
    of update and change, and counts of elements at the bound and of those that are not finite."""

    update: float = 0.0
    weight: float = 0.0
    change: float = 0.0
    product: float = 0.0
    bound: int = 0
    odd: int = 0


def measured(
    updates: Sequence[Measured],
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
    check: Callable[[], None] = lambda: None,
) -> UpdateTable:
    """Return the table of some updates, in order. What cannot be read has a row that says why.

    ``executor``, ``memory``, ``progress``: see `WriteOptions`. ``check`` is called before each run of elements; what it
    raises ends the work. Raises WorkerError if workers died.
    """
    found: list[dict[int, _Sums]] = [{} for _ in updates]
    errors: dict[int, Exception] = {}
    left = [one.direction.numel() for one in updates]

    def tasks() -> Iterator[Task]:
        for n, one in enumerate(updates):
            operands = [one.direction, one.weight, *(() if one.before is None else (one.before,))]
            try:
                for t in operands:
                    t._check()
                pieces = [t.pieces(_RUN * t.itemsize) for t in operands]
                for parts in zip(*pieces, strict=True):
                    check()
                    if n in errors:
                        break
                    ahead, some = parts[0][0], [part for _, part in parts]
                    work = partial(_tried, n, ahead, some, one.scale, one.decay, one.bounded)
                    yield Task(sum(p.nbytes for p in some), _PIECE * 64 + len(some) * OVERHEAD, work, some[0])
            except (LazyckptError, OSError) as e:
                errors[n] = e.with_traceback(None)

    def done(task: Task, result: tuple[int, int, int, _Sums | Exception]) -> None:
        n, ahead, numel, what = result
        left[n] -= numel
        if isinstance(what, Exception):
            errors.setdefault(n, what)
        else:
            found[n][ahead] = what
        if not left[n]:
            _forget(updates[n].direction.spec)
        bar.add(task.nbytes)

    every = [t for one in updates for t in (one.direction, one.weight, one.before) if t is not None]
    with Bar(sum(t.nbytes for t in every), "updates", progress) as bar:
        runner(executor, memory)(tasks(), done, tensors=every)
    return UpdateTable(_row(one, found[n], errors.get(n)) for n, one in enumerate(updates))


def _forget(spec: TensorSpec) -> None:
    """Release what an operation keeps of whole operands: Muon's a matrix."""
    if spec.expr is not None:
        spec.expr.kept.clear()


def _row(one: Measured, parts: Mapping[int, _Sums], error: Exception | None) -> UpdateSize:
    if error is not None:
        return replace(one.row, error=" ".join(str(error).split()))
    total = _added([parts[ahead] for ahead in sorted(parts)])
    update, weight, change = map(math.sqrt, total[:3])
    count = one.direction.numel() - total.odd
    return replace(
        one.row,
        update=update,
        weight=weight,
        ratio=update / weight if weight else math.nan,
        rms=update / math.sqrt(count) if count else math.nan,
        bound=total.bound / count if one.bounded and count else None,
        cosine=total.product / (update * change) if one.before is not None and update and change else None,
        nonfinite=total.odd,
    )


def _tried(
    n: int, ahead: int, parts: Sequence[LazyArray], scale: float, decay: float, bounded: bool
) -> tuple[int, int, int, _Sums | Exception]:
    """Return the sums over a run of elements, or the error of reading it."""
    count = parts[0].numel()
    try:
        pieces = [part.pieces(_PIECE * part.itemsize) for part in parts]
        sums = [_summed([p[...] for _, p in some], scale, decay, bounded) for some in zip(*pieces, strict=True)]
    except (LazyckptError, OSError) as e:
        return n, ahead, count, e.with_traceback(None)
    return n, ahead, count, _added(sums)


def _added(sums: Sequence[_Sums]) -> _Sums:
    """Return the sums of all, the floating-point ones without rounding errors of the additions."""
    update, weight, change, product = (exact_sum([s[k] for s in sums]) for k in range(4))
    return _Sums(update, weight, change, product, sum(s.bound for s in sums), sum(s.odd for s in sums))


def _summed(blocks: Sequence[torch.Tensor], scale: float, decay: float, bounded: bool) -> _Sums:
    direction, weight, *rest = (block.double().reshape(-1) for block in blocks)
    update = direction * -scale
    if decay:
        update -= weight * decay
    change = weight - rest[0] if rest else None
    good = torch.isfinite(update) & torch.isfinite(weight)
    if change is not None:
        good &= torch.isfinite(change)
    odd = good.numel() - int(good.count_nonzero())
    if odd:
        direction, weight, update = direction[good], weight[good], update[good]
        change = None if change is None else change[good]
    return _Sums(
        _dot(update, update),
        _dot(weight, weight),
        0.0 if change is None else _dot(change, change),
        0.0 if change is None else _dot(update, change),
        int((direction.abs() >= _BOUND).count_nonzero()) if bounded else 0,
        odd,
    )


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).numpy().sum())  # numpy's sum does not depend on threads
