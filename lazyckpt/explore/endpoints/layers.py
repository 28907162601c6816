"""``layers`` and ``updates``: quantities of a state and of the optimizer's last step, by kind and layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...derive.updates import steps_of
from ...errors import LazyckptError, printable
from ...inspect.architecture import layer_and_kind
from ...inspect.layers import QUANTITIES, SHARES, Layers, Relative, arranged, by_layer
from ...inspect.stats import stats_of_all
from ...inspect.updates import Measured, UpdateSize, measured
from ...lazy import LazyArray
from ..query import Query
from ..subject import FIRST, MORE, Subject, View, Wanted, effort

_SHOWN = ("rms", "norm", "std", "absmax", "mean", "zeros", "nan", "inf")
_ROWS = 2000  # tensors that an answer lists


def layers(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute quantities of a state by kind of parameter and layer. All tensors are read once.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    dict
        ``quantities``: name -> what it is called. ``kinds``, ``labels`` (short names of the kinds) and ``layers``.
        ``values``: name -> a list of rows, one for each kind, with a value (or "NaN") for each layer. ``relative``:
        name -> the fields of `Relative`, for all but shares. ``alone``: name -> kind that is in no layer -> its value.
        ``marks``: a list of kind, layer (or null) and "?" (cannot be read) or
        "!" (NaN or infinities). ``zeros``: the tensors that have zeros: name, number of elements, number of zeros;
        those with the largest share first, at most 2,000.
    """
    view = subject.part(query)
    tensors = {view.full_name(name): t for name, t in view.once()[0].items()}
    query.check()
    table = list(stats_of_all(tensors, progress=False, check=query.check))
    rows = [(one.name, one) for one in table]
    found = {name: by_layer(rows, name) for name in _SHOWN}
    dead = [(one.name, one.count, one.zeros) for one in table if one.error is None and one.zeros]
    dead.sort(key=lambda row: -row[2] / row[1])
    return _grids(found) | {"zeros": dead[:_ROWS], "zeros_in_all": len(dead)}


def _grids(found: dict[str, Layers]) -> dict[str, Any]:
    first = next(iter(found.values()))
    marks = {cell: mark for one in found.values() for cell, mark in one.marks.items()}
    return {
        "quantities": {name: QUANTITIES.get(name, name) for name in found},
        "kinds": first.kinds,
        "labels": first.labels,
        "layers": first.layers,
        "values": {name: one.values.tolist() for name, one in found.items()},
        "relative": {name: _fields(one.relative()) for name, one in found.items() if name not in SHARES},
        "alone": {name: dict(one.alone) for name, one in found.items()},
        "marks": [[kind, layer, mark] for (kind, layer), mark in marks.items()],
    }


def _fields(own: Relative) -> dict[str, Any]:
    return {"unit": own.unit, "units": own.units.tolist(), "values": own.values.tolist(), "limit": own.limit}


def updates(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute the norms of the optimizer's last step. The weights and the optimizer's states are read once.

    Parameters of the request: those of `Subject.checkpoint`.

    Returns
    -------
    dict
        As ``layers``, with the quantities ``ratio`` (the norm of the update in units of the weight's) and ``rms`` (of
        the update's elements); ``rows``: for each parameter name, optimizer, learning rate (or null), ratio, rms, bound
        (share of elements at the largest step of Adam, or null) and error (or null), at most 2,000; ``problems``.
    """
    view = subject.checkpoint(query)
    found = steps_of(view, None, None, {})
    query.check()
    table = list(measured(list(_measured(found.store, found.steps)), progress=False, check=query.check))
    grids = {name: arranged(name, _cells(table, name)) for name in ("ratio", "rms")}
    named = {"ratio": "norm of the update / norm of the weight", "rms": "root mean square of the update"}
    rows = [_row(one) for one in table]
    problems = [printable(str(one)) for one in found.index.problems if "update" in one.code]
    return _grids(grids) | {"quantities": named, "rows": rows[:_ROWS], "rows_in_all": len(rows), "problems": problems}


def _row(one: UpdateSize) -> list[Any]:
    error = None if one.error is None else printable(one.error)
    return [one.name, one.optimizer, one.lr, one.ratio, one.rms, one.bound, error]


def _measured(store: Any, steps: Any) -> Iterator[Measured]:
    for full, one in steps.items():
        layer = layer_and_kind(full)[0]
        row = UpdateSize(full, layer, None, one.optimizer, one.lr, one.rate, one.exact, count=one.update.numel)
        direction, weight = LazyArray(store, one.direction), LazyArray(store, one.weight)
        yield Measured(row, direction, weight, None, one.scale, one.decay, one.bounded)


def _cells(table: list[UpdateSize], quantity: str) -> dict[tuple[str, int | None], tuple[float, str]]:
    """Return the root mean square over the tensors of each kind and layer (experts), and a mark for what is missing."""
    groups: dict[tuple[str, int | None], list[UpdateSize]] = {}
    for one in table:
        layer, kind = layer_and_kind(one.name)
        groups.setdefault((kind, layer), []).append(one)
    cells = {}
    for cell, found in groups.items():
        good = [one for one in found if one.error is None]
        mark = "?" if len(good) < len(found) else "!" if any(one.nonfinite for one in good) else ""
        if quantity == "ratio":
            weight = math.sqrt(sum((one.weight or 0.0) ** 2 for one in good))
            value = math.sqrt(sum((one.update or 0.0) ** 2 for one in good)) / weight if weight else math.nan
        else:
            count = sum(one.count for one in good)
            squares = sum((one.rms or 0.0) ** 2 * one.count for one in good)
            value = math.sqrt(squares / count) if count else math.nan
        cells[cell] = value, mark
    return cells


def has_updates(view: View) -> bool:
    """Return whether a checkpoint has optimizer states from which updates are computed."""
    try:
        return bool(steps_of(view, None, None, {}).steps)
    except LazyckptError:
        return False


def _effort(view: View) -> int:
    return effort(view.nbytes, len(view))


def _report(subject: Subject) -> Iterator[Wanted]:
    view = subject.checkpoint(Query({}))
    yield Wanted("layers", {}, _effort(view))
    others = [state for state in view.states if state != view.state]
    moments = [state for state in others if state not in ("fp32", "weights")][:1]  # what the page shows first
    if others:
        yield Wanted("python", {"page": "optimizer", "state": (*moments, view.state)[0]}, level=MORE)
    if has_updates(view):
        yield Wanted("updates", {}, sum(map(_effort, view.states.values())))
    for state in (*moments, *(state for state in others if state not in moments)):
        yield Wanted("layers", {"state": state}, _effort(view.states[state]), FIRST if state in moments else MORE)


ENDPOINTS = {"layers": layers, "updates": updates}
REPORT = _report
