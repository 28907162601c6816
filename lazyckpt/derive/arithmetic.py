"""Views that are computed from the tensors of the same names of several views: sums, differences, means, merges.

Names are matched exactly. A tensor of the result is one expression over the tensors of that name; nothing is read.
Names that all views tie to each other stay tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, Literal, NamedTuple

from ..core.dtypes import FROM_NAME, DType
from ..core.expr import cast, make
from ..core.index import Index
from ..core.specs import Expr, Input, TensorSpec, kind_of
from ..errors import DataError, some
from ..io.storage.base import Store
from ..io.storage.joined import stores_of
from ..namespace import Namespace
from .dequantize.evidence import quantized_among
from .sources import Sources, place_of

Missing = Literal["error", "skip", "keep"]
Operand = Expr | Input
# The expression of a tensor: from its name and its operands, one for each view.
Formula = Callable[[str, Sequence[Operand]], Operand]

_SHOWN = 4  # names in a message
_CODES = 1  # bytes of a float that is usually a code, which has a scale


class Row(NamedTuple):
    """A tensor of the result.

    Attributes
    ----------
    name
        Its name.
    operands
        The number of a view and a name in it, for each operand.
    formula
        Its expression, from its name and its operands. None: the first operand itself.
    """

    name: str
    operands: Sequence[tuple[int, str]]
    formula: Formula | None


def combined(
    views: Sequence[Namespace[Any]],
    formula: Formula,
    *,
    what: str,
    format: str = "combined",
    missing: Missing = "error",
    dtype: DType | None = None,
    like: int = 0,
) -> tuple[Store, Index]:
    """Return the store and the index of the view whose tensors are computed from those of several views, by name.

    Parameters
    ----------
    views
        The views, each in the state that it shows. The result has the order of names of the first.
    formula
        The expression of a floating-point tensor, from its name and its operands.
    what
        What is computed, for errors: "the mean".
    format
        The name of the format that the result has.
    missing
        What to do with names that a view lacks, and with tensors of different shapes: "error", "skip" (the result lacks
        them), "keep" (the result has the tensor of the first view that has the name).
    dtype
        The dtype of the floating-point tensors of the result. None: that of the expressions.
    like
        The number of the view whose metadata the result has.

    Raises
    ------
    DataError
        ``missing`` is "error" and a name or a shape is missing; a tensor has a dtype that is not computed with.
    """
    check_missing(missing)
    for view in views:
        if view.format == "run":
            raise DataError("the tensors of a run are stacked over its steps: combine run.at(step), or take run.mean()")
    unlike = unlike_names(views)
    if unlike and missing == "error":
        raise DataError(_message(views, unlike, what))
    rows = []
    for name in dict.fromkeys(name for view in views for name in view):
        if name not in unlike:
            rows.append(Row(name, [(n, name) for n in range(len(views))], formula))
        elif missing == "keep":
            first = next(n for n, view in enumerate(views) if name in view.full_names)
            rows.append(Row(name, [(first, name)], None))
    if unlike and not rows:
        raise DataError(f"{what}: no tensor has the same name and shape in all views: view.rename makes names alike")
    return assembled(views, rows, what=what, format=format, dtype=dtype, like=like)


def check_missing(missing: str) -> None:
    """Raise DataError if ``missing`` is none of the ways to treat names that a view lacks."""
    if missing not in ("error", "skip", "keep"):
        raise DataError(f"missing={missing!r:.40}: it is 'error', 'skip' or 'keep'")


def assembled(
    views: Sequence[Namespace[Any]],
    rows: Iterable[Row],
    *,
    what: str,
    format: str,
    dtype: DType | None = None,
    like: int = 0,
) -> tuple[Store, Index]:
    """Return the store and the index of the view of these tensors.

    Tensors that are not of floating-point numbers are kept if the operands are equal; reading them checks it. Names
    that all views tie to each other stay tied.

    Parameters
    ----------
    views
        The views that the operands are in.
    rows
        The tensors.
    what, format, dtype, like
        As for `combined`.

    Raises
    ------
    DataError
        A tensor has a dtype that is not computed with.
    """
    sources = Sources(views)
    stores = stores_of(sources.store)
    tensors: dict[str, TensorSpec] = {}
    owners: dict[tuple[tuple[int, str], ...], Row] = {}
    aliases: dict[str, str] = {}
    for row in rows:
        tied = tuple((n, views[n].owner(name)) for n, name in row.operands)
        first = owners.setdefault(tied, row)
        if all(a[1] != b[1] for a, b in zip(first.operands, row.operands, strict=True)):
            aliases[row.name] = first.name
            continue
        operands = [_first(sources.operand(n, name), stores) for n, name in row.operands]
        if row.formula is None:
            if dtype is not None and operands[0].dtype.is_floating_point:
                _check(row.name, operands, what)
            spec = sources.tensor(row.name, operands[0])
        elif all(one.dtype.is_floating_point for one in operands):
            _check(row.name, operands, what)
            spec = sources.tensor(row.name, row.formula(row.name, operands))
        else:
            spec = sources.tensor(row.name, _agreed(row.name, operands, what))
        tensors[row.name] = _in_dtype(spec, dtype) if dtype is not None and spec.dtype.is_floating_point else spec
    return sources.store, sources.index(tensors, format, aliases=aliases, like=like)


def _in_dtype(spec: TensorSpec, dtype: DType) -> TensorSpec:
    """Return a tensor in another dtype; an operation that rounds its result itself rounds to it, and only once."""
    expr = spec.expr
    if expr is None or not (expr.op == "linear" or expr.op.startswith("merge.")) or expr.params.get("dtype"):
        return cast(spec, dtype)
    return replace(spec, dtype=dtype, expr=replace(expr, params={**expr.params, "dtype": dtype}, dtype=dtype, kept={}))


def unlike_names(views: Sequence[Namespace[Any]]) -> dict[str, str]:
    """Return the names that a view lacks, or whose shapes differ -> why."""
    found: dict[str, str] = {}
    first = views[0]
    for n, view in enumerate(views):
        for name in view if n else ():
            if name not in first.full_names:
                found.setdefault(name, "")
    for name in first:
        shapes = []
        for view in views:
            if name not in view.full_names:
                found[name] = ""
                break
            shapes.append(kind_of(view.specs, view.owner(name))[0])
        else:
            if len(set(shapes)) > 1:
                found[name] = " and ".join("x".join(map(str, shape)) or "scalar" for shape in dict.fromkeys(shapes))
    return found


def _message(views: Sequence[Namespace[Any]], unlike: Mapping[str, str], what: str) -> str:
    parts = []
    for n, view in enumerate(views, 1):
        lacks = [name for name, why in unlike.items() if not why and name not in view.full_names]
        if lacks:
            parts.append(f"view {n} ({place_of(view)}) lacks {some(map(repr, lacks), _SHOWN)}")
    shapes = [f"{name!r} is {why}" for name, why in unlike.items() if why]
    if shapes:
        parts.append(f"shapes differ: {some(shapes, _SHOWN)}")
    advice = quantized_among(views) or (
        "view.rename and view.select make views alike; in a mean or a merge, missing='skip' leaves such tensors out"
    )
    return f"{what} takes views with the same names and shapes: {'; '.join(parts)}. {advice}"


def _check(name: str, operands: Iterable[Operand], what: str) -> None:
    """Raise DataError for floats that are usually codes whose scales are tensors of their own."""
    for one in operands:
        if one.dtype.itemsize <= _CODES or not one.dtype.is_number:
            raise DataError(
                f"{what} does not compute with {name!r}, which is {one.dtype.short}: its scales may be other tensors. "
                "Take view.dequantize(), or view.astype(torch.float32) if the numbers are not scaled"
            )


def _agreed(name: str, operands: Sequence[Operand], what: str) -> Operand:
    kinds = dict.fromkeys(one.dtype.short for one in operands)
    if len(kinds) > 1:
        raise DataError(f"{what}: {name!r} is {' and '.join(kinds)}: only floating-point tensors are combined")
    return operands[0] if len(operands) == 1 or _same(operands) else make("merge.agreed", *operands, name=name)


def _same(operands: Sequence[Operand]) -> bool:
    first = operands[0]
    if not isinstance(first, Input):
        return False
    return all(isinstance(one, Input) and one.spec is first.spec and one.source == first.source for one in operands)


def _first(node: Operand, stores: Sequence[Store]) -> Operand:
    """Return an operand that names the first of the stores that are the same object, so that a tensor that occurs
    twice is found to be one."""
    if isinstance(node, Input):
        number = next(n for n, one in enumerate(stores) if one is stores[node.source])
        return node if number == node.source else replace(node, source=number)
    return replace(node, inputs=tuple(_first(one, stores) for one in node.inputs), kept={})


def linear(operands: Sequence[Operand], weights: Sequence[float], dtype: Any = None) -> Expr:
    """Return the sum of the operands, each times its weight, as one operation.

    Operands that are linear combinations themselves are put in the place of their sum, so that nothing is rounded in
    between; a tensor that occurs several times is read once.

    Parameters
    ----------
    operands, weights
        The tensors, and a number for each.
    dtype
        The dtype of the result; by default the one that torch promotes those of the tensors to.
    """
    terms: dict[Any, tuple[Operand, float]] = {}

    def add(node: Operand, weight: float) -> None:
        if isinstance(node, Expr) and node.op == "linear" and not node.params.get("dtype"):
            for inner, factor in zip(node.inputs, node.params["weights"], strict=True):
                add(inner, weight * factor)
            return
        key = (node.source, id(node.spec)) if isinstance(node, Input) else id(node)
        terms[key] = (node, terms[key][1] + weight if key in terms else weight)

    for node, weight in zip(operands, weights, strict=True):
        add(node, float(weight))
    nodes, factors = zip(*terms.values(), strict=True)
    return make("linear", *nodes, weights=factors, **({} if dtype is None else {"dtype": dtype}))


def _numbers(weights: Any) -> list[float]:
    """Return the weights of a mean. Raises DataError if they are no list of numbers."""
    try:
        listed = list(weights)
        if any(isinstance(one, str | bytes) for one in listed):
            raise TypeError
        return [float(one) for one in listed]
    except (TypeError, ValueError):
        raise DataError(f"weights={weights!r:.60}: a mean takes a list of numbers, one for each view") from None


def weighted(views: Sequence[Namespace[Any]], weights: Sequence[float], what: str) -> tuple[Store, Index]:
    """Return the linear combination of views: see `combined`."""
    return combined(views, lambda name, operands: linear(operands, weights), what=what)


def difference(a: Namespace[Any], b: Namespace[Any], name: str) -> tuple[Store, TensorSpec]:
    """Return the store and the spec of ``a[name] - b[name]`` in float64. Nothing is read; integers are converted.

    Raises
    ------
    DataError
        The shapes differ, or a dtype is not computed with.
    TensorNotFoundError
        A view has no tensor of this name.
    """
    sources = Sources([a, b])
    operands = [sources.operand(n, name) for n in (0, 1)]
    if operands[0].shape != operands[1].shape:
        shapes = " and ".join("x".join(map(str, one.shape)) or "scalar" for one in operands)
        raise DataError(f"the difference of {name!r}: the shapes differ, {shapes}")
    wide = FROM_NAME["float64"]
    for one in operands:
        if not one.dtype.is_number or one.dtype.is_complex:
            raise DataError(
                f"the difference of {name!r}: its elements are {one.dtype.short}, which have no signed difference: "
                "take a tensor of real numbers"
            )
    doubles = [one if one.dtype is wide else make("cast", one, dtype=wide) for one in operands]
    return sources.store, sources.tensor(name, linear(doubles, (1.0, -1.0), wide))


def average(
    views: Sequence[Namespace[Any]], weights: Sequence[float] | None, missing: Missing = "error", like: int = 0
) -> tuple[Store, Index]:
    """Return the mean of views, weighted if ``weights`` are given: see `lazyckpt.mean`."""
    if not views:
        raise DataError("a mean of no views: give at least one")
    if weights is None:
        return combined(
            views, lambda name, operands: make("mean", *operands), what="the mean", missing=missing, like=like
        )
    numbers = _numbers(weights)
    if len(numbers) != len(views):
        raise DataError(f"{len(numbers)} weights are given for {len(views)} views: one for each")
    total = sum(numbers)
    if not total or not isfinite(total):
        raise DataError(f"the weights of a mean sum to {total:g}: give finite numbers with another sum")
    shares = [weight / total for weight in numbers]
    return combined(views, lambda name, operands: linear(operands, shares), what="the mean", missing=missing, like=like)
