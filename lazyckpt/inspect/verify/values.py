"""Judgement of the elements: which tensors are not sane, and in which rows of which rank's file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.dtypes import DType
from ...errors import LazyckptError, some
from ..report import Finding
from .sweep import Swept, Target, blocks_of
from .tally import is_judged

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

Array = np.ndarray[Any, Any]
Mask = Callable[["torch.Tensor"], "torch.Tensor"]

SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col", "v"}  # never negative
_MOMENTS = ("exp_avg", "momentum_buffer", *sorted(SQUARES))
_PIECE = 16 << 20  # bytes that are looked at together
_RUNS = 256  # runs of a tensor in which odd elements are looked up
_FAR = 1000.0  # times the usual size: an element so far out is reported
_MANY = 1e-3  # of the elements, or `_SOME`: more than that are no outliers
_SOME = 32
_LEAST = 1024  # elements from which a tensor has a usual size
_EDGE = 0.005  # of the elements of an 8-bit dtype: scaling puts one of each block at the edge
PARAMETERS = ("weights", "fp32", "model")  # states whose elements are parameters


class Place(NamedTuple):
    """Where some elements of a tensor are.

    Attributes
    ----------
    elements
        The number of elements.
    files
        The files that hold them.
    rows
        Indices in the first dimension, ascending.
    first
        The index of the first one.
    """

    elements: int
    files: tuple[str, ...]
    rows: tuple[int, ...]
    first: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        if self.rows and len(self.first) > 1:
            parts.append(f"row{'s' * (len(self.rows) != 1)} {some(self.rows, 4)}")
        parts += [f"of {some(self.files, 2)}" if parts else some(self.files, 2)] if self.files else []
        text = f", in {' '.join(parts)}" if parts else ""
        return f"{text}, first at [{', '.join(map(str, self.first))}]" if self.first else text

    @property
    def details(self) -> dict[str, Any]:
        """The place as plain objects."""
        return {
            "elements": self.elements, "files": list(self.files), "rows": list(self.rows[:1000]),
            "first": list(self.first),
        }  # fmt: skip


def judged(targets: Sequence[Target], swept: Swept, steps: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the findings about the values of tensors.

    Parameters
    ----------
    targets, swept
        The tensors, and what `sweep` found.
    steps
        Name -> number of steps that the optimizer has made on a parameter; "" for the others.
    """
    found = swept.tallies
    zero = {
        (target.state, target.name)
        for n, target in enumerate(targets)
        if target.state not in PARAMETERS and found["count"][n] and found["zeros"][n] == found["count"][n]
    }
    order = np.argsort(swept.runs.tensors, kind="stable")
    begins = np.searchsorted(swept.runs.tensors[order], np.arange(len(targets) + 1))
    for n in _unusual(targets, swept, np.diff(begins)).tolist():
        target, tally = targets[n], swept.tallies[n]
        if not tally["count"] or not is_judged(target.tensor.spec.dtype):
            continue
        own = order[begins[n] : begins[n + 1]]
        yield from _of_tensor(target, tally, swept, own, steps, zero)


def _unusual(targets: Sequence[Target], swept: Swept, runs: Array) -> Array:
    """Return the numbers of the targets that a look at their tallies does not clear: of a million, nearly none."""
    found = swept.tallies
    dtypes = [target.tensor.spec.dtype for target in targets]
    tiny = {d: torch.finfo(_real(d)).smallest_normal if is_judged(d) else 0.0 for d in set(dtypes)}
    smallest = np.array([tiny[d] for d in dtypes])
    squares = np.array([target.state in SQUARES for target in targets], np.bool_)
    count, low, high = found["count"], found["low"], found["high"]
    largest = np.maximum(high, -low)
    with np.errstate(invalid="ignore", divide="ignore"):
        usual = np.sqrt(found["squares"] / np.maximum(count, 1))
        far = largest > 0.95 * np.sqrt(count / np.maximum(_SOME, _MANY * count)) * usual
    odd = (found["nan"] > 0) | (found["inf"] > 0) | (found["zeros"] > 0) | (found["edge"] > 0) | (low == high)
    odd |= (squares & (low < 0)) | (largest < smallest) | (count >= _LEAST) & (far | (runs >= 4))
    return np.flatnonzero(odd & (count > 0))


def _of_tensor(
    target: Target, tally: Any, swept: Swept, own: Array, steps: Mapping[str, float], zero: Collection[tuple[str, str]]
) -> Iterator[Finding]:
    name, dtype = _shown(target), target.tensor.spec.dtype
    count, nan, inf, zeros, edge = (int(tally[key]) for key in ("count", "nan", "inf", "zeros", "edge"))
    low, high = float(tally["low"]), float(tally["high"])
    largest = max(high, -low)
    odd = own[swept.odd[own]]
    mask_like = "mask" in target.name.lower()
    if nan:
        place = _found(target, swept, odd, torch.isnan)
        yield _finding("not-a-number", f"{name} has {nan:,} NaN among {count:,} elements", target, place)
    if inf and not mask_like:
        place = _found(target, swept, odd, torch.isinf)
        yield _finding("infinite-values", f"{name} has {inf:,} infinities among {count:,} elements", target, place)
    if nan or inf or count == 1:
        if low < 0 and _never_negative(target):
            yield _negative(target, name, low, swept, own)
        return
    if zeros == count:
        yield from _all_zero(target, name, steps, zero)
        return
    if low == high:
        if target.state not in PARAMETERS:
            return
        yield _finding("constant-values", f"all {count:,} elements of {name} are {low:g}", target)
        return
    if low < 0 and _never_negative(target):
        yield _negative(target, name, low, swept, own)
    limits = torch.finfo(_real(dtype))
    if largest < limits.smallest_normal and target.state in PARAMETERS:
        yield _finding("denormal-values", f"no element of {name} is larger than {largest:.3g}", target)
    if edge > (_EDGE * count if dtype.itemsize == 1 else 0) and not mask_like:
        near = own[swept.largest[own] >= np.float32(limits.max)]
        place = _found(target, swept, near, lambda x: x.abs() >= limits.max)
        text = f"{name} has {edge:,} elements of the largest size of {dtype.name}, {limits.max:g}"
        yield _finding("saturated-values", text, target, place)
    elif target.state in PARAMETERS and count >= _LEAST and not mask_like:
        yield from _outlying(target, name, tally, swept, own)
    shape = target.tensor.spec.shape
    row = math.prod(shape[1:])
    if len(shape) > 1 and zeros >= row > 1 and target.state in PARAMETERS and shape[0] > 1:
        yield from _dead(target, name)


def _never_negative(target: Target) -> bool:
    return target.state in SQUARES and not target.tensor.spec.dtype.torch.is_complex


def _negative(target: Target, name: str, low: float, swept: Swept, own: Array) -> Finding:
    text = f"{name} is a mean of squares and has negative elements, down to {low:g}"
    return _finding(
        "wrong-moment", text, target, _found(target, swept, own if len(own) <= _RUNS else None, lambda x: x < 0)
    )


def _all_zero(
    target: Target, name: str, steps: Mapping[str, float], zero: Collection[tuple[str, str]]
) -> Iterator[Finding]:
    """Yield what an all-zero tensor means: nothing for a moment before the first step.

    ``zero`` has (state, name) of all moments that are zero: those of a parameter are one finding.
    """
    count = math.prod(target.tensor.spec.shape)
    if target.state in PARAMETERS:
        if target.tensor.ndim > 1:
            # the second factor of a LoRA pair begins as zero
            severity = "note" if "lora_b" in target.name.lower() else None
            yield _finding("all-zero", f"all {count:,} elements of {name} are zero", target, severity=severity)
        else:
            text = f"all {count:,} elements of {name} are zero"
            yield _finding("all-zero", text, target, severity="note")
        return
    step = steps.get(target.name, steps.get("", 0))
    if step > 0 and target.state in _MOMENTS:
        both = [state for state in _MOMENTS if (state, target.name) in zero]
        if both[0] == target.state:
            text = f"{' and '.join(both)} of {target.name} are all zero after {step:,.0f} steps"
            yield _finding("zero-moments", text, target, details={"states": both})


def _outlying(target: Target, name: str, tally: Any, swept: Swept, own: Array) -> Iterator[Finding]:
    """Yield a finding if a few elements are far larger than all others."""
    count, squares = int(tally["count"]), float(tally["squares"])
    largest = max(float(tally["high"]), -float(tally["low"]))
    usual = math.sqrt(squares / count)
    if len(own) >= 4:  # a robust mean: that of the run in the middle
        numbers = swept.runs.counts[own]
        usual = min(usual, float(np.median(np.sqrt(swept.squares[own].astype(np.float64) / numbers))))
    few = max(_SOME, _MANY * count)
    if largest <= 0.95 * math.sqrt(count / few) * usual:  # that many outliers are larger
        return
    rest = _trimmed(target, swept, own, largest, few)
    if rest is None or not largest > _FAR * rest > 0:
        return
    far = own[swept.largest[own] > _FAR * rest] if len(own) else None
    place = _found(target, swept, far, lambda x: x.abs() > _FAR * rest)
    if 0 < place.elements <= few:
        text = f"{name} has {place.elements:,} elements up to {largest:.3g}, the others are about {rest:.3g}"
        yield _finding("outlying-values", text, target, place)


def _trimmed(target: Target, swept: Swept, own: Array, largest: float, few: float) -> float | None:
    """Return the root of the mean square of the elements without the outliers; None if these are more than ``few``
    (there is no gap between both), or if the elements cannot be read."""
    near = own[swept.largest[own] < largest / _FAR] if len(own) >= 4 else own[:0]
    if len(near) >= len(own) / 2 > 0:
        return math.sqrt(float(swept.squares[near].sum(dtype=np.float64)) / int(swept.runs.counts[near].sum()))
    total, count = 0.0, 0
    try:
        for _, piece in target.tensor.pieces(_PIECE):
            x = _flat(piece[...]).abs()
            kept = x[x < largest / _FAR]
            norm = float(torch.linalg.vector_norm(kept))
            total, count = total + norm * norm, count + kept.numel()
    except (LazyckptError, OSError):  # sweep reports it
        return None
    removed = math.prod(target.tensor.spec.shape) - count
    return math.sqrt(total / count) if count and removed <= few else None


def _dead(target: Target, name: str) -> Iterator[Finding]:
    """Yield a finding about rows whose elements are all zero."""
    tensor = target.tensor
    rows: list[int] = []
    try:
        size = max(1, _PIECE // max(1, tensor.nbytes // tensor.spec.shape[0]))
        for at in range(0, tensor.spec.shape[0], size):
            x = tensor.lazy[at : at + size][...]
            alive = x.reshape(x.shape[0], -1).to(torch.float32 if x.itemsize < 8 else x.dtype).ne(0).any(1)
            rows += (torch.nonzero(~alive).flatten() + at).tolist()
    except (LazyckptError, OSError):  # sweep reports it
        return
    if rows:
        what = "expert" if tensor.ndim > 2 else "row"
        total = tensor.spec.shape[0]
        text = f"{len(rows):,} of {total:,} {what}s of {name} are zero: {some(_spans(rows), 4)}"
        yield _finding("dead-rows", text, target, details={"rows": rows[:1000], "of": total})


def _spans(rows: Sequence[int]) -> list[str]:
    """Return ascending numbers as text, "3" or "5 to 9"."""
    found: list[list[int]] = []
    for row in rows:
        if found and row == found[-1][1] + 1:
            found[-1][1] = row
        else:
            found.append([row, row])
    return [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in found]


def _found(target: Target, swept: Swept | None, runs: Array | None, odd: Mask) -> Place:
    """Look up the elements of some runs, or of the whole tensor, for which ``odd`` is true."""
    count, rows, files = 0, dict[int, None](), dict[str, None]()
    first: tuple[int, ...] = ()
    for box, path in _blocks(target, swept, runs):
        part = target.tensor.lazy[box] if box else target.tensor
        try:
            for ahead, piece in part.pieces(_PIECE):
                flat = odd(_flat(piece[...]))
                places = torch.nonzero(flat).flatten()
                if not len(places):
                    continue
                count += len(places)
                shape = tuple(part.shape)
                at = np.unravel_index((places + ahead).numpy(), shape) if shape else ()
                starts = [s.start or 0 for s in box] if box else [0] * len(shape)
                where = [a + s for a, s in zip(at, starts, strict=True)]
                rows |= dict.fromkeys(np.unique(where[0]).tolist()) if where else {}
                here = tuple(int(a[0]) for a in where)
                first = min(first, here) if first else here
                if path:
                    files[path] = None
        except (LazyckptError, OSError):  # sweep reports it
            continue
    return Place(count, tuple(files), tuple(sorted(rows)), first)


def _blocks(target: Target, swept: Swept | None, runs: Array | None) -> Iterator[tuple[tuple[slice, ...], str]]:
    """Yield the blocks of a tensor that some runs hold, with their files; the whole tensor if there are none."""
    if swept is None or runs is None or not len(runs):
        paths = {f.extent.path for f in target.tensor.fragments[:2]}
        yield (), (paths.pop() if len(paths) == 1 else "")
        return
    copies = blocks_of(target.tensor)
    for n in runs[:_RUNS].tolist():
        yield copies[int(swept.runs.blocks[n])].slices, swept.paths[int(swept.runs.files[n])]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return elements as float32, float64, or both parts of complex numbers."""
    if x.is_complex():
        x = torch.view_as_real(x)[..., 0] + torch.view_as_real(x)[..., 1]
    return (x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)).reshape(-1)


def _real(dtype: DType) -> torch.dtype:
    return dtype.torch.to_real() if dtype.torch.is_complex else dtype.torch


def _shown(target: Target) -> str:
    return target.name if target.state in PARAMETERS[:1] else f"{target.state}: {target.name}"


def _finding(
    code: str,
    text: str,
    target: Target,
    place: Place | None = None,
    details: Mapping[str, Any] | None = None,
    severity: Any = None,
) -> Finding:
    facts = dict(details or {}) | ({} if place is None else place.details) | {"state": target.state}
    file = place.files[0] if place is not None and len(place.files) == 1 else None
    return Finding(code, text + (str(place) if place is not None else ""), file, target.name, severity, details=facts)
