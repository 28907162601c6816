"""``compare/...``: how two checkpoints, or two steps of a run, differ.

They differ in names, dtypes and shapes, and in the values of tensors, whose distance has a number and a picture.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from heapq import merge
from itertools import accumulate
from json import loads
from math import inf, prod
from typing import Any

import numpy as np

from ...core.columns import Kind
from ...derive.arithmetic import difference
from ...derive.sources import place_of
from ...errors import LazyckptError, TensorNotFoundError, printable
from ...inspect.architecture import layer_and_kind
from ...inspect.diff import Difference, Status, diff
from ...inspect.layers import arranged
from ...lazy import LazyArray
from ...show.differences import changed_prefix
from ...show.outline import outline
from ..choice import picture_values
from ..lines import compared
from ..query import Query
from ..subject import FIRST, MORE, TENSORS, Subject, View, Wanted, effort
from .values import picture

_AT_ONCE = 64 << 20  # bytes of both checkpoints that an answer compares
_MOST = 4096  # tensors that an answer compares
_CHANGED = 5000  # names that an answer lists
_PICTURES = 24  # differences that a report draws before it shows other things on demand
_EVERY = 4096  # names between two checks
_LEFT_OUT = ("state", "by_digest")


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The names of two states, and what is known of them without reading."""

    a: View | None
    b: View | None
    names: Sequence[str]
    """The names of both, sorted."""
    rows: Sequence[Difference]
    """What their dtypes and shapes say; tensors that are to be compared have the status "equal" or "dtype"."""
    cells: Mapping[str, tuple[int, int | None]]
    """Name -> number of its kind, and layer."""
    kinds: Sequence[str]
    labels: Sequence[str]
    layers: Sequence[int]
    ends: Sequence[int]
    """The bytes to read for all names before each one, and for all."""


def compare(subject: Subject, query: Query) -> dict[str, Any]:
    """Compare names, dtypes and shapes of two checkpoints. Nothing is read.

    Parameters of the request: ``state``, the state of both; by default the one that each was opened in. ``step`` and
    ``with``: the two steps of a run, by default the last one and the one before it.

    Returns
    -------
    dict
        ``paths``, where the two are; ``steps``, the two steps of a run, else null; ``python``, the expressions that
        open them; ``names``, how many there are in both together; ``both``, how many tensors can be compared;
        ``nbytes``, how much that reads; ``counts``, status -> number of names; ``changed``, at most 5,000 lists of
        name, status, and dtype and shape (or the reason why it cannot be read) on both sides; ``changed_in_all``;
        ``prefix``, null or what all names of one checkpoint have in front in the other, and their number; ``kinds``
        with their ``labels``; ``layers``.
    """
    found = _pairs(subject, query)
    pair = subject.pair(query)
    steps = None if subject.run is None else [subject.step(query), subject.other_step(query)]
    changed = [row for row in found.rows if row.status != "equal"]
    lost = [(name, why) for view in (found.a, found.b) if view is not None for name, why in view.unreadable.items()]
    counts: dict[str, int] = {}
    for row in changed:
        counts[row.status] = counts.get(row.status, 0) + 1
    if lost:
        counts["unreadable"] = len(lost)
    moved = changed_prefix(changed)
    listed = [[name, "unreadable", printable(str(why)), None] for name, why in lost]
    listed += [[row.name, row.status, row.a, row.b] for row in changed[:_CHANGED]]
    return {
        "paths": [printable(place_of(view)) for view in pair],
        "steps": steps,
        "python": list(compared(subject, query)),
        "names": len(found.names),
        "both": sum(row.status in ("equal", "dtype") for row in found.rows),
        "nbytes": found.ends[-1],
        "counts": counts,
        "changed": listed[:_CHANGED],
        "changed_in_all": len(changed) + len(lost),
        "prefix": None if moved is None else [printable(moved[0]), moved[1]],
        "kinds": list(found.kinds),
        "labels": list(found.labels),
        "layers": list(found.layers),
    }


def differences(subject: Subject, query: Query) -> dict[str, Any]:
    """Compare the elements of some tensors. They are read once.

    Parameters of the request: ``state``, ``step`` and ``with``, as for ``compare``. ``low``, the number of the first
    name in sorted order. The answer has as many names as are some 64 MiB together on both sides, at most 4,096 and at
    least one.

    Returns
    -------
    dict
        ``high``, the number of the first name that the answer does not have. ``rows``, objects with the fields of
        `lazyckpt.inspect.diff.Difference` (``name``, ``status``, ``a``, ``b``, ``count``, ``max_abs``, ``at``,
        ``error``, ``relative``, ``cosine``, ``norm_a``, ``norm_b``), ``kind`` (a number of ``kinds``) and ``layer``.
    """
    found = _pairs(subject, query)
    low = query.number("low", 0, 0, len(found.names))
    high = _block(found, low)
    sides: list[dict[str, LazyArray]] = [{}, {}]
    for name in found.names[low:high]:
        for side, view in zip(sides, (found.a, found.b), strict=True):
            t = None if view is None else view.exact(name)
            if t is not None:
                side[name] = t
    query.check()
    rows = {row.name: row for row in diff(*sides, progress=False, check=query.check)}
    return {"high": high, "rows": [_row(rows[name], found) for name in found.names[low:high]]}


def _row(row: Difference, found: _Pairs) -> dict[str, Any]:
    kind, layer = found.cells[row.name]
    told = {key: value for key, value in asdict(row).items() if key not in _LEFT_OUT}
    return told | {"error": row.error and printable(row.error), "kind": kind, "layer": layer}


def _block(found: _Pairs, low: int) -> int:
    """Return the end of the names that one request compares."""
    high = bisect_right(found.ends, found.ends[low] + _AT_ONCE, low) - 1
    return min(max(high, low + 1), low + _MOST, len(found.names))


def tile(subject: Subject, query: Query) -> bytes:
    """Pool a window of the difference of two tensors, the first minus the second, in a grid of cells.

    Parameters of the request: ``name``; ``state``, ``step`` and ``with``, as for ``compare``; those of
    ``tensor/tile``. Differences are in float64.

    Returns
    -------
    bytes
        As for ``tensor/tile``.
    """
    a, b = _sides(subject, query)
    name = query.text("name")
    for view, which in ((a, "first"), (b, "second")):
        if view is None or view.exact(name) is None:
            raise TensorNotFoundError(f"there is no tensor {name!r:.200} in this state of the {which} checkpoint")
    assert a is not None and b is not None  # they have the tensor
    return picture(LazyArray(*difference(a, b, name)), query)


def _sides(subject: Subject, query: Query) -> tuple[View | None, View | None]:
    """Return the state of both checkpoints that a request is about; None for one that lacks it."""
    pair = subject.pair(query)
    state = query.text("state", "")
    if not state:
        return pair
    a, b = (view.stored if state == "stored" else view.states.get(state) for view in pair)
    if a is None and b is None:
        raise TensorNotFoundError(f"there is no state {state!r:.60}: the request 'about' lists the states")
    return a, b


def _pairs(subject: Subject, query: Query) -> _Pairs:
    a, b = _sides(subject, query)
    keeper = subject.view.kept
    key = f"compared {query.text('state', '')}"
    steps = None if subject.run is None else (subject.step(query), subject.other_step(query))
    kept = keeper.get(key)
    if kept is not None and kept[0] is subject.other and kept[1] == steps:
        found: _Pairs = kept[2]
        return found
    names = sorted({name for view in (a, b) if view is not None for name in view.full_names})
    rows: list[Difference] = []
    sizes = [0]
    where: dict[str, tuple[str, int | None]] = {}
    sides = [{} if view is None else _kinds(view) for view in (a, b)]
    for n, name in enumerate(names):
        if n % _EVERY == 0:
            query.check()
        layer, kind = layer_and_kind(name)
        where[name] = kind, layer
        x, y = (kinds.get(name) for kinds in sides)
        status: Status
        if x is None or y is None:
            status = "only in a" if y is None else "only in b"
        else:
            status = "shape" if x[0] != y[0] else "dtype" if x[1] is not y[1] else "equal"
            if status != "shape":
                sizes.append(prod(x[0]) * (x[1].itemsize + y[1].itemsize))
        if len(sizes) < n + 2:
            sizes.append(0)
        rows.append(Difference(name, status, _text(x), _text(y)))
    layout = arranged("", dict.fromkeys(where.values(), (0.0, "")))
    number = {kind: n for n, kind in enumerate(layout.kinds)}
    cells = {name: (number[kind], layer) for name, (kind, layer) in where.items()}
    ends = list(accumulate(sizes))
    found = _Pairs(a, b, names, rows, cells, layout.kinds, layout.labels, layout.layers, ends)
    keeper[key] = subject.other, steps, found
    return found


def _kinds(view: View) -> dict[str, Kind]:
    """Return the shape and dtype of each tensor."""
    found = outline(view)
    kinds = dict(enumerate(found.kinds))
    for n in np.flatnonzero(found.marks < 0).tolist():  # counted under another name
        spec = found.spec(n)
        kinds[~n] = spec.shape, spec.dtype
    marks = found.marks.tolist()
    return {
        name: kinds[mark if mark >= 0 else ~n] for n, (name, mark) in enumerate(zip(found.names, marks, strict=True))
    }


@lru_cache(4096)
def _text(kind: Kind | None) -> str | None:
    return None if kind is None else f"{kind[1].short}{list(kind[0])}"


def _report(subject: Subject) -> Iterator[Wanted]:
    if subject.other is not None:
        return _of_pair(subject, {}, FIRST)
    steps = () if subject.run is None else subject.run.steps
    if len(steps) < 2:
        return iter(())
    pairs: list[dict[str, str]] = [{}, {"with": str(steps[0])}][: len(steps) - 1]  # the last step, and another one
    return merge(*(_of_pair(subject, pair, MORE) for pair in pairs), key=lambda wanted: wanted.level)


def _of_pair(subject: Subject, pair: Mapping[str, str], level: int) -> Iterator[Wanted]:
    """Yield what a report holds of a comparison; ``pair`` has the parameters that name its two steps."""
    yield Wanted("compare", pair, level=level)
    try:
        found = _pairs(subject, Query(pair))
    except (LazyckptError, OSError):
        return  # the answer says so
    rows: list[dict[str, Any]] = []
    low = 0
    while low < len(found.names):
        high = _block(found, low)
        nbytes = effort(found.ends[high] - found.ends[low], high - low)
        asked = {"low": str(low), **pair}
        yield Wanted("compare/differences", asked, nbytes, level, lambda body: rows.extend(loads(body)["rows"]))
        low = high
    rows = [row for row in rows if row["count"] and row["status"] in ("values", "dtype")]
    rows.sort(key=lambda row: (-_distance(row["relative"]), row["name"]))
    number = {name: n for n, name in enumerate(found.names)}
    for place, row in enumerate(rows):
        name, level = row["name"], MORE if place < _PICTURES else TENSORS
        t = None if found.a is None else found.a.exact(name)
        values = None if t is None else picture_values(name, t)
        if values is not None:
            n = number[name]
            yield Wanted("tensor", {"name": name}, level=level)
            yield Wanted("compare/tile", {**values, **pair}, found.ends[n + 1] - found.ends[n], level)


def _distance(relative: Any) -> float:
    return relative if isinstance(relative, float) else inf  # "Infinity", or none: the first tensor is zero


ENDPOINTS = {"compare": compare, "compare/differences": differences, "compare/tile": tile}
REPORT = _report
