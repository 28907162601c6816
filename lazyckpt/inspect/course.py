"""The course of a run: a quantity of every parameter, by kind and layer, at every step.

Besides the quantities of single checkpoints (`QUANTITIES` of inspect/layers.py), which need one step at a time, there
are those of `CHANGES`, which compare a step with another one. Each step is read once, or twice if it is compared with
the step before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..lazy import LazyArray
from .diff import diff
from .layers import QUANTITIES, Layers, arranged, by_layer, grouped, kind_labels
from .stats import stats_of_all

# Quantity -> what it is called.
CHANGES = {
    "growth": "L2 norm / that of the first step",
    "drift": "distance from the first step / its norm",
    "change": "distance from the step before / its norm",
    "cosine": "cosine with the step before",
    "towards": "cosine with the last step",
}

Values = NDArray[np.float64]
Tensors = Mapping[str, LazyArray]


@dataclass(frozen=True, slots=True)
class Course:
    """A quantity over the steps of a run.

    Attributes
    ----------
    quantity
        A name of `QUANTITIES` or `CHANGES`.
    steps
        The steps, ascending. Comparisons with the step before begin at the second one.
    kinds
        The kinds of parameters, in the order of `Layers`.
    layers
        The numbers of the layers, ascending.
    values
        float64 of shape (kinds, layers, steps); NaN where there is no value.
    alone
        Kind that is in no layer -> its values, of shape (steps,).
    marks
        (kind, layer or None, step) -> "?" if a tensor cannot be read or compared, "!" if it has elements that are NaN
        or infinite, which the values leave out.
    """

    quantity: str
    steps: tuple[int, ...]
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    values: Values
    alone: Mapping[str, Values]
    marks: Mapping[tuple[str, int | None, int], str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the quantity is called."""
        return (QUANTITIES | CHANGES)[self.quantity]

    @property
    def labels(self) -> list[str]:
        """Short names of the kinds."""
        return kind_labels(self.kinds)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the values as plain objects: kind, layer (None for what is in no layer), step and value."""
        for n, kind in enumerate(self.kinds):
            lines = [(None, self.alone[kind])] if kind in self.alone else []
            for layer, line in [*lines, *zip(self.layers, self.values[n], strict=True)]:
                for step, value in zip(self.steps, line.tolist(), strict=True):
                    if not math.isnan(value):
                        yield {"kind": kind, "layer": layer, "step": step, self.quantity: value}


def course(
    views: Iterable[tuple[int, Tensors]],
    quantity: str = "norm",
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
    check: Callable[[], None] = lambda: None,
) -> Course:
    """Return a quantity over the steps of a run.

    Parameters
    ----------
    views
        Steps, ascending, and their tensors by full name.
    quantity
        A name of `QUANTITIES` or `CHANGES`.
    executor, memory, progress
        See `WriteOptions`.
    check
        Called between runs of elements; what it raises ends the work.

    Raises
    ------
    DataError
        There is no such quantity.
    WorkerError
        Workers of the executor died.
    """
    if quantity not in QUANTITIES and quantity not in CHANGES:
        raise DataError(f"there is no quantity {quantity!r} of a run; there are: {', '.join(QUANTITIES | CHANGES)}")
    options: dict[str, Any] = {"executor": executor, "memory": memory, "progress": progress, "check": check}
    found: dict[int, Layers] = {}
    first: Tensors | None = None
    before: Tensors | None = None
    if quantity == "towards":
        listed = list(views)
        for step, tensors in listed:
            found[step] = _compared(listed[-1][1], tensors, quantity, options)
        return _stacked(quantity, found)
    for step, tensors in views:
        if quantity in ("change", "cosine", "drift"):
            earlier = first if quantity == "drift" else before
            if earlier is not None:
                found[step] = _compared(earlier, tensors, quantity, options)
            first = tensors if first is None else first
            before = tensors
        else:
            found[step] = _single(tensors, "norm" if quantity == "growth" else quantity, options)
    whole = _stacked(quantity, found)
    return _grown(whole) if quantity == "growth" else whole


def _single(tensors: Tensors, quantity: str, options: Mapping[str, Any]) -> Layers:
    return by_layer(((one.name, one) for one in stats_of_all(tensors, **options)), quantity)


def _compared(a: Tensors, b: Tensors, quantity: str, options: Mapping[str, Any]) -> Layers:
    """Return how far the tensors of two steps are apart."""
    return differences(diff(a, b, **options), "relative" if quantity in ("change", "drift") else "cosine")


def differences(rows: Iterable[Any], quantity: str) -> Layers:
    """Return a quantity of compared tensors by kind and layer: "relative" or "cosine", of `Difference`s.

    Of several tensors of one kind and layer (experts), the root mean square of the relative differences and the
    smallest cosine are taken. A tensor that cannot be read, or that one side lacks, is marked.
    """
    cells: dict[tuple[str, int | None], tuple[float, str]] = {}
    for cell, found in grouped((row.name, row) for row in rows).items():
        values = [getattr(row, quantity) for row in found if getattr(row, quantity) is not None]
        join: Callable[[Sequence[float]], float] = min if quantity == "cosine" else _joined
        odd = any(row.status in ("unreadable", "shape", "only in a", "only in b") for row in found)
        cells[cell] = (join(values) if values else math.nan, "?" if odd else "")
    return arranged(quantity, cells)


def _joined(values: Sequence[float]) -> float:
    """Return the root mean square of relative differences."""
    return math.hypot(*values) / math.sqrt(len(values))


def _stacked(quantity: str, found: Mapping[int, Layers]) -> Course:
    """Return the results of single steps as one."""
    steps = tuple(found)
    kinds = tuple(dict.fromkeys(kind for one in found.values() for kind in one.kinds))
    layers = tuple(sorted({layer for one in found.values() for layer in one.layers}))
    rows, columns = ({one: n for n, one in enumerate(each)} for each in (kinds, layers))
    values = np.full((len(kinds), len(layers), len(steps)), math.nan)
    alone: dict[str, Values] = {}
    for at, one in enumerate(found.values()):
        if one.kinds and one.layers:
            values[np.ix_([rows[k] for k in one.kinds], [columns[n] for n in one.layers], [at])] = one.values[..., None]
        for kind, value in one.alone.items():
            alone.setdefault(kind, np.full(len(steps), math.nan))[at] = value
    marks = {(*cell, step): mark for step, one in found.items() for cell, mark in one.marks.items()}
    return Course(quantity, steps, kinds, layers, values, alone, marks)


def _grown(whole: Course) -> Course:
    """Return the values in units of those of the first step that has one."""
    with np.errstate(invalid="ignore", divide="ignore"):
        alone = {kind: line / _first(line[None])[0] for kind, line in whole.alone.items()}
        values = whole.values / _first(whole.values)
    return replace(whole, values=values, alone=alone)


def _first(values: Values) -> Values:
    """Return the first number along the last axis, NaN if there is none, with that axis kept."""
    if not values.size:
        return np.full((*values.shape[:-1], 1), math.nan)
    at = np.argmax(np.isfinite(values), axis=-1)[..., None]
    found: Values = np.take_along_axis(values, at, -1)
    found[found == 0] = math.nan
    return found
