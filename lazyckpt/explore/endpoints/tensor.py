"""``tensor``: what is known of one tensor without its values; ``tensor/layout``: which rank holds which block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from heapq import merge
from typing import Any

from ...core.expr import formula
from ...core.names import shortened
from ...errors import DataError, Problem, printable
from ...inspect.bits import has_bits
from ...inspect.codes import kind_of
from ...inspect.numbers import number_shape
from ...inspect.pixels import row_length
from ...inspect.stats import LIMIT
from ...inspect.whereabouts import ranges_of
from ...layouts.rename.apply import heads_of
from ...layouts.tables import pattern
from ...lazy import LazyArray
from ...show.layout import drawing, holders, ranges
from ..choice import of_steps, of_tensors
from ..lines import tensor as expression
from ..query import Query
from ..subject import Subject, View, Wanted

_RANGES = 1000  # maximum number of ranges of files that are listed
_PROBLEMS = 50  # maximum number of problems that are listed
_EARLY = 7  # steps of a run that a report shows before all tensors of the last step


def tensor(subject: Subject, query: Query) -> dict[str, Any]:
    """Describe a tensor. No elements are read.

    Parameters of the request: those of `Subject.tensor`.

    Returns
    -------
    dict
        ``name``, ``shape``, ``dtype``, ``short`` (name of the dtype), ``itemsize``, ``nbytes``, ``numel``. ``numbers``:
        the shape in numbers (a byte of packed 4-bit floats has two), or null if the elements are no numbers. ``wrap``:
        in how many columns a tensor of one dimension is best drawn, or null. ``bits`` and ``spectrum``: whether those
        requests take the tensor. ``state``; ``states``: name, shape and dtype in each
        state that has the tensor. ``owner``: the name that owns a tied tensor. ``about``: pairs of label and text.
        ``python``: the expression that opens the tensor. ``ranges``: where the bytes lie, and ``ranges_in_all``.
        ``of``: as in the request; ``derived``: what else the request takes as ``of``, each with a ``label``.
        ``problems``: those of its files, and what an update assumes. ``heads``: attention heads, as start and stop
        along a dimension, or null.
    """
    view = subject.checkpoint(query)
    part = subject.part(query)
    t = subject.tensor(query)
    name = query.text("name")
    dtype = t.spec.dtype
    try:
        numbers = list(number_shape(t))
    except DataError:
        numbers = None
    owner = part.owner(name)
    listed, in_all = ranges_of(t, _RANGES)
    labels: dict[str, list[Any]] = {}
    for operand in t.operands:
        for holder in holders(operand):
            labels.setdefault(holder.path, []).append(holder)
    paths = {one.path for one in listed}
    return {
        "name": name,
        "shape": list(t.shape),
        "dtype": str(dtype),
        "short": dtype.short,
        "itemsize": dtype.itemsize,
        "nbytes": t.nbytes,
        "numel": t.numel(),
        "numbers": numbers,
        "wrap": None if numbers is None else row_length(numbers),
        "bits": has_bits(dtype),
        "complex": dtype.is_complex,
        "spectrum": dtype.is_number and t.ndim >= 2 and min(t.shape[-2:]) <= LIMIT,
        "state": part.state,
        "states": [
            _in_state(state, held) for state, one in view.states.items() if (held := one.exact(name)) is not None
        ],
        "of": query.text("of", ""),
        "derived": list(_derived(subject, query, part, name)),
        "owner": owner if owner != name else None,
        "about": [[label, printable(text)] for label, text in _about(t) if text],
        "python": expression(subject, query),
        "ranges": [
            {**asdict(one), "path": printable(one.path), "rank": printable(ranges(labels.get(one.path, [])))}
            for one in listed
        ],
        "ranges_in_all": in_all,
        "problems": [
            {"code": one.code, "severity": kind_of(one.code).severity, "text": printable(str(one))}
            for one in (*view.problems, *_assumed(subject, query, part, name))
            if one.path in paths or one.path == name or one.code == "assumed-update"
        ][:_PROBLEMS],
        "heads": _heads(view, name, tuple(t.shape)),
    }


def _derived(subject: Subject, query: Query, part: View, name: str) -> Iterator[dict[str, str]]:
    """Yield what a page can show besides the tensor: the last step, and the change since the step before."""
    if part.state in ("weights", "fp32"):
        with suppress(DataError):
            if subject.last_steps(part, name).steps:
                yield {"of": "update", "label": "last step"}
    before = subject.before(query)
    t = part.exact(name)
    if before is not None and t is not None and t.spec.dtype.is_floating_point:
        old = subject.at(before)
        held = old if old.state == part.state else old.states.get(part.state)
        same = None if held is None else held.exact(name)
        if same is not None and same.shape == t.shape:
            yield {"of": "change", "label": f"change since {before}"}


def _assumed(subject: Subject, query: Query, part: View, name: str) -> tuple[Problem, ...]:
    """Return what the update assumes that a request is about."""
    if query.text("of", "") != "update":
        return ()
    return tuple(one for one in subject.last_steps(part, name).index.problems if one.code == "assumed-update")


def _in_state(state: str, t: LazyArray) -> dict[str, Any]:
    return {"name": state, "shape": list(t.shape), "dtype": str(t.spec.dtype), "short": t.spec.dtype.short}


def _about(t: LazyArray) -> Iterator[tuple[str, str]]:
    if t.spec.expr is not None:
        yield "computed as", formula(t.spec)
    yield "stored as", shortened(t.spec.stored_as) if t.spec.stored_as else ""
    yield "formed by", t.spec.rule


def _heads(view: View, name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Return the heads of an attention weight, by the configuration: names and intervals along a dimension.

    Fused weights are divided only if they are megatron-core's, which cuts them by groups: q of the group's heads, k, v.
    """
    found = heads_of(view.meta)
    if found is None or not shape:
        return None
    slices: list[tuple[str, int, int]] = []
    dim = 0
    if pattern("attention.gathered").search(name):
        at = 0
        for group in range(found.groups):
            each = found.queries // found.groups
            for what in (*(f"q {group * each + n}" for n in range(each)), f"k {group}", f"v {group}"):
                slices.append((what, at, at + found.dim))
                at += found.dim
    elif pattern("attention.q").search(name) or pattern("attention.kv").search(name):
        queries = pattern("attention.q").search(name)
        count, what = (found.queries, "head") if queries else (found.groups, "group")
        slices = [(f"{what} {n}", n * found.dim, (n + 1) * found.dim) for n in range(count)]
    elif pattern("attention.out").search(name) and len(shape) == 2:
        dim = 1
        slices = [(f"head {n}", n * found.dim, (n + 1) * found.dim) for n in range(found.queries)]
    if not slices or slices[-1][2] != shape[dim]:  # the configuration does not describe this tensor
        return None
    return {"dim": dim, "slices": [list(one) for one in slices]}


def layout(subject: Subject, query: Query) -> dict[str, Any]:
    """Return which rank holds which block of a tensor, on the two dimensions along which it is cut most.

    Parameters of the request: those of `Subject.tensor`. ``cells``: the maximum number of blocks.

    Returns
    -------
    dict
        ``row_dim``, ``col_dim`` (null if not drawn), ``rows``, ``cols`` (intervals of elements). ``cells``: ``rows``,
        ``cols``, ``holders`` (indices into ``labels``), ``missing``. ``labels``: label and path of each holder.
        ``merged``: whether neighbouring blocks are drawn together. ``undrawn``: further dimensions that are cut.
        ``parts``: true if the tensor is computed from several tensors, whose blocks are not drawn.
    """
    found = drawing(subject.tensor(query), query.number("cells", 400, 1, 5000))
    index = {holder: n for n, holder in enumerate(found.holders)}
    return {
        "row_dim": found.row_dim,
        "col_dim": found.col_dim,
        "rows": found.rows,
        "cols": found.cols,
        "cells": [
            {"rows": cell.rows, "cols": cell.cols, "holders": [index[h] for h in cell.holders], "missing": cell.missing}
            for cell in found.cells
        ],
        "labels": [[printable(holder.label), printable(holder.path)] for holder in found.holders],
        "blocks": found.blocks,
        "complete": found.complete,
        "merged": found.merged,
        "undrawn": found.undrawn,
    }


def _report(subject: Subject) -> Iterator[Wanted]:
    """Yield the facts, a picture, a histogram and values of each tensor, in each state and on both sides; of a run at
    its last step, and for other steps what pages show at first sight."""
    view = subject.checkpoint(Query({}))
    views: list[tuple[View, dict[str, str]]] = [(view, {})]
    if subject.other is not None:
        views.append((subject.other, {"side": "b"}))
    views += [(part, {"state": state}) for state, part in view.states.items() if state != view.state]
    if subject.run is None:
        return of_tensors(views)
    return merge(of_tensors(views), of_steps(subject, _EARLY), key=lambda wanted: wanted.level)


ENDPOINTS = {"tensor": tensor, "tensor/layout": layout}
REPORT = _report
