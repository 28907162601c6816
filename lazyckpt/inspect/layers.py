"""Quantities of tensors by kind of parameter and layer: what plots and tables of a whole model show.

`layer_and_kind` of inspect/architecture.py says which layer and kind a tensor is of. Tensors of the same layer and kind
(experts) are taken together. Everything here is computed from rows of statistics; nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .architecture import ROLES, layer_and_kind, role_of
from .table import Stats, Table

Values = NDArray[np.float64]

# Quantity -> what it is called.
QUANTITIES = {
    "norm": "L2 norm",
    "rms": "root mean square",
    "std": "standard deviation",
    "absmax": "largest |x|",
    "l1": "L1 norm",
    "mean": "mean",
    "min": "minimum",
    "max": "maximum",
    "zeros": "share of zeros",
    "nan": "share of NaN",
    "inf": "share of infinities",
}
SIGNED = frozenset(("mean", "min", "max"))
SHARES = frozenset(("zeros", "nan", "inf"))


def kind_labels(kinds: Sequence[str]) -> list[str]:
    """Shorten kinds for display: to the part after the layer's number, and without a final ".weight", where that is
    unique.

    >>> kind_labels(["embed.weight", "layers.*.mlp.up.weight", "layers.*.mlp.up.bias", "layers.*.norm.weight"])
    ['embed', 'mlp.up', 'mlp.up.bias', 'norm']
    """
    tails = [kind.partition("*.")[2] or kind for kind in kinds]
    bare = [tail.removesuffix(".weight") or tail for tail in tails]
    taken = _counts(bare)
    known = _counts(tails)
    return [
        short if taken[short] == 1 else tail if known[tail] == 1 else kind
        for short, tail, kind in zip(bare, tails, kinds, strict=True)
    ]


def _counts(texts: Iterable[str]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for text in texts:
        found[text] = found.get(text, 0) + 1
    return found


@dataclass(frozen=True, slots=True)
class Relative:
    """A quantity of all tensors, in a unit for each kind, so that colours show how the layers of a kind differ.

    Attributes
    ----------
    unit
        "median": that of the kind's magnitudes that are not zero. "largest": the kind's largest magnitude, for
        quantities with a sign.
    units
        float64: the unit of each kind; NaN if all its values are zero.
    values
        float64 of shape (kinds, layers). "median": the binary logarithm of value / unit; a zero is -inf, or 0 if all
        of its kind are zero. "largest": value / unit.
    limit
        The end of the scale of colours, on both sides of 0. Values beyond it have the colours of the ends.
    """

    unit: str
    units: Values
    values: Values
    limit: float


_LEAST = math.log2(1.5)  # end of the scale of colours, at least: half as much again as the median


def _limit_of(powers: Values) -> float:
    """Return the end of the scale of colours: the largest deviation, or less if it is an outlier."""
    found = np.abs(powers[np.isfinite(powers)])
    if not found.size:
        return _LEAST
    return max(_LEAST, min(float(found.max()), 3 * float(np.percentile(found, 95)), 6.0))


@dataclass(frozen=True, slots=True)
class Layers:
    """A quantity of all tensors, a row for each kind of parameter and a column for each layer.

    Attributes
    ----------
    quantity
        One of `QUANTITIES`, or a name of the caller's.
    kinds
        The kinds: embeddings first, then those of layers by what they are for, what is in no layer, and the head.
    layers
        The numbers of the layers, ascending. Kinds that are in no layer have their value in ``alone``.
    values
        float64 of shape (kinds, layers); NaN where there is no tensor, or none that can be read.
    alone
        Kind that is in no layer -> its value.
    marks
        (kind, layer) -> "?" if a tensor cannot be read, "!" if it has NaN or infinities, or overflows.
    """

    quantity: str
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    values: Values
    alone: Mapping[str, float]
    marks: Mapping[tuple[str, int | None], str]

    @property
    def labels(self) -> list[str]:
        """Short names of the kinds."""
        return kind_labels(self.kinds)

    def relative(self) -> Relative:
        """Return the values of each kind in the unit of that kind, which colours of layers show."""
        every = np.column_stack([self.values, [self.alone.get(kind, math.nan) for kind in self.kinds]])
        every = np.where(np.isfinite(every) & (every != 0), np.abs(every), math.nan)
        units = np.full(len(self.kinds), math.nan)
        some = np.isfinite(every).any(axis=1)
        if self.quantity in SIGNED:
            units[some] = np.nanmax(every[some], axis=1)
            with np.errstate(invalid="ignore", divide="ignore"):
                return Relative("largest", units, self.values / units[:, None], 1.0)
        units[some] = np.nanmedian(every[some], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            powers: Values = np.log2(self.values / units[:, None])
        powers[(self.values == 0) & np.isnan(units)[:, None]] = 0
        powers[np.isinf(self.values)] = math.nan
        return Relative("median", units, powers, _limit_of(powers))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the values as plain objects: kind, layer (None for what is in no layer) and value."""
        rows: list[dict[str, Any]] = []
        for n, kind in enumerate(self.kinds):
            if kind in self.alone:
                rows.append({"kind": kind, "layer": None, self.quantity: self.alone[kind]})
            rows += [
                {"kind": kind, "layer": layer, self.quantity: float(value)}
                for layer, value in zip(self.layers, self.values[n], strict=True)
                if not math.isnan(value)
            ]
        return rows


def grouped(rows: Iterable[tuple[str, Any]]) -> dict[tuple[str, int | None], list[Any]]:
    """Group what belongs to names by kind and layer."""
    cells: dict[tuple[str, int | None], list[Any]] = {}
    for name, one in rows:
        layer, kind = layer_and_kind(name)
        cells.setdefault((kind, layer), []).append(one)
    return cells


def arranged(quantity: str, cells: Mapping[tuple[str, int | None], tuple[float, str]]) -> Layers:
    """Return the values and marks of (kind, layer) pairs as `Layers`."""
    kinds = tuple(sorted(dict.fromkeys(kind for kind, _ in cells), key=_place))
    layers = tuple(sorted({layer for _, layer in cells if layer is not None}))
    rows, columns = ({one: n for n, one in enumerate(each)} for each in (kinds, layers))
    values = np.full((len(kinds), len(layers)), math.nan)
    alone: dict[str, float] = {}
    for (kind, layer), (value, _) in cells.items():
        if layer is None:
            alone[kind] = value
        else:
            values[rows[kind], columns[layer]] = value
    marks = {cell: mark for cell, (_, mark) in cells.items() if mark}
    return Layers(quantity, kinds, layers, values, alone, marks)


def _place(kind: str) -> tuple[int, int]:
    """Return a key that sorts kinds as data passes through a model: embeddings, layers with norms last, the head."""
    role = role_of(kind)
    if "*" not in kind:
        return {"embedding": 0, "head": 3}.get(role, 2), 0
    return 1, ROLES.index(role)


def by_layer(rows: Iterable[tuple[str, Stats]], quantity: str = "norm") -> Layers:
    """Return a quantity by kind and layer.

    Parameters
    ----------
    rows
        Full names, and the statistics of their tensors.
    quantity
        One of `QUANTITIES`.

    Raises
    ------
    DataError
        There is no such quantity.
    """
    if quantity not in QUANTITIES:
        raise DataError(f"there is no quantity {quantity!r}; there are: {', '.join(QUANTITIES)}")
    return arranged(quantity, {cell: _cell(found, _OF[quantity]) for cell, found in grouped(rows).items()})


def _cell(found: Sequence[Stats], value: Callable[[Stats], float | None]) -> tuple[float, str]:
    """Return the value of some tensors together, and its mark."""
    good = [one for one in found if one.error is None]
    if not good:
        return math.nan, "?"
    whole = good[0] if len(good) == 1 else Table(good).total
    number = value(whole)
    number = math.nan if number is None else float(number)
    odd = math.isinf(number) or any(one.finite < one.count for one in good)
    return number, "?" if len(good) < len(found) else "!" if odd else ""


def _share(count: int | None, one: Stats) -> float:
    return (count or 0) / one.count if one.count else math.nan


_OF: dict[str, Callable[[Stats], float | None]] = {
    "norm": lambda one: one.l2,
    "rms": lambda one: one.l2 / math.sqrt(one.finite) if one.l2 is not None and one.finite else math.nan,
    "std": lambda one: one.std,
    "absmax": lambda one: one.absmax,
    "l1": lambda one: one.l1,
    "mean": lambda one: one.mean,
    "min": lambda one: one.min,
    "max": lambda one: one.max,
    "zeros": lambda one: _share(one.zeros, one),
    "nan": lambda one: _share(one.nan, one),
    "inf": lambda one: _share((one.posinf or 0) + (one.neginf or 0), one),
}
