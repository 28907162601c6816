"""``tree``: all names of a state, and what the tree shows of each tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...core.expr import leaves
from ...core.fragments import fragments_of
from ...errors import printable
from ...inspect.ranks import ranks_of
from ...inspect.stats import stats_of_all
from ...show.outline import Outline, outline
from ..packing import pack
from ..query import Query
from ..subject import MORE, Subject, View, Wanted, effort

TIED, IDLE, LOST, PROBLEM = 1, 2, 4, 8
"""Marks of a tensor, as bits: its tensor has another name; the optimizer has no state for it; elements of it are in
files that cannot be read; a problem names it."""

_MOST = 4096  # tensors whose norms one request computes
_AT_ONCE = 32 << 20  # bytes that they have together, unless one has more
_STAND_IN = "\N{SYMBOL FOR NEWLINE}"
_LISTED = 1000  # names without a shape, and texts of problems, that an answer has
_WHOLE = ("weights", "fp32")  # the states that are not of an optimizer


def tree(subject: Subject, query: Query) -> bytes:
    """List the names of a state in plain sorted order, and the shape and dtype of each.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    bytes
        Header: ``count`` of names; ``kinds``, shapes and dtypes, each once; ``tied``, number of a name -> the name that
        owns its tensor; ``twice``, the numbers of names whose tensor is counted under another one; ``odd``, number ->
        name, for names with a line feed or invalid Unicode; ``unreadable``, pairs of a name without a shape and the
        reason. Arrays: ``text`` (uint8), the names as UTF-8, each with a line feed behind it, and stand-ins for odd
        ones; ``kind`` (int32), for each name an index of ``kinds``.
    """
    view = subject.part(query)
    found = outline(view)
    names, numbered = found.names, found.marks.astype(np.int32)
    query.check()
    data, odd = _lines(names)
    twice = np.flatnonzero(numbered < 0).tolist()
    numbers = {kind: n for n, kind in enumerate(found.kinds)}
    for n in twice:
        spec = found.spec(n)
        numbered[n] = numbers.setdefault((spec.shape, spec.dtype), len(numbers))
    rank = {name: n for n, name in enumerate(names)} if found.tied else {}
    header = {
        "count": len(names),
        "kinds": [{"shape": list(shape), "dtype": dtype.short, "itemsize": dtype.itemsize} for shape, dtype in numbers],
        "tied": {rank[name]: owner for name, owner in found.tied.items()},
        "twice": twice,
        "odd": odd,
        "unreadable": [[name, printable(why)] for name, why in list(view.unreadable.items())[:_LISTED]],
    }
    return pack(header, {"text": np.frombuffer(data, np.uint8), "kind": numbered})


def _lines(names: Sequence[str]) -> tuple[bytes, dict[int, str]]:
    """Return names as lines of UTF-8, with stand-ins for those that are no line; and these by their numbers."""
    odd: dict[int, str] = {}
    text = "\n".join([*names, ""])
    if text.count("\n") == len(names):
        with suppress(UnicodeEncodeError):
            return text.encode(), odd
    lines = []
    for n, name in enumerate(names):
        line = name.replace("\n", _STAND_IN).encode("utf-8", "replace")
        lines.append(line + b"\n")
        if line != name.encode("utf-8", "surrogatepass"):
            odd[n] = name
    return b"".join(lines), odd


def marks(subject: Subject, query: Query) -> bytes:
    """Return what is unusual about the tensors of a state.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    bytes
        Header: ``problems``, number of a name -> sentences; ``lost``, number of a name -> elements that only files hold
        that cannot be read. Arrays: ``marks`` (uint8), for each name the sum of 1 (tied), 2 (the optimizer has no state
        for it: it is frozen, or no parameter), 4 (lost elements) and 8 (a problem names it).
    """
    view = subject.part(query)
    found = outline(view)
    names = found.names
    flags = np.zeros(len(names), np.uint8)
    full = [view.full_name(name) for name in names] if view.problems or len(view.states) > 1 else names
    owner = {n: found.tied[name] for n, name in enumerate(names) if name in found.tied} if found.tied else {}
    for n in owner:
        flags[n] |= TIED
    trained = _trained(view)
    if trained is not None:
        for n, name in enumerate(full):
            if name not in trained and owner.get(n) not in trained:
                flags[n] |= IDLE
    query.check()
    problems: dict[int, list[str]] = {}
    lost: dict[int, int] = {}
    if view.problems:
        place = {name: n for n, name in enumerate(full)}
        for problem in view.problems:
            at = place.get(problem.path) if problem.path is not None else None
            if at is not None and len(problems) < _LISTED:
                problems.setdefault(at, []).append(printable(str(problem)))
                flags[at] |= PROBLEM
        gone = _lost(view, query)
        for n, name in enumerate(full if gone else ()):
            count = gone.get(owner.get(n, name))
            if count:
                lost[n] = count
                flags[n] |= LOST
    return pack({"problems": problems, "lost": lost}, {"marks": flags})


def _trained(view: View) -> frozenset[str] | None:
    """Return the full names that the optimizer has states for; None if the view is of no weights, or if there is no
    optimizer."""
    if view.state not in _WHOLE:
        return None
    names: set[str] = set()
    for state, part in view.states.items():
        if state not in _WHOLE:
            names.update(part.full_names.values())
    return frozenset(names) or None


def _lost(view: View, query: Query) -> dict[str, int]:
    """Return the full names of the tensors that have lost elements, and their numbers."""
    specs = view.specs
    holed = []
    for n, name in enumerate(view._owners()):
        if n % 256 == 0:
            query.check()
        if not all(fragments_of(one.spec.fragments).intact for one in leaves(specs[name])):
            holed.append(name)
    return {name: count for (_, name), count in ranks_of([view], query.check, holed).lost.items()}


def norms(subject: Subject, query: Query) -> bytes:
    """Compute the norms of some tensors. Their elements are read once.

    Parameters of the request: ``low``, the number of the first name in the order of ``tree``; those of `Subject.part`.
    The answer has as many names as are some 32 MiB together, at most 4,096 and at least one.

    Returns
    -------
    bytes
        Header: ``high``, the number of the first name that the answer does not have; ``errors``, number of a name ->
        why its tensor cannot be read. Arrays, float64, a value for each name: ``norm``, the root of the sum of squares;
        ``largest``, the largest absolute value; ``odd``, the number of elements that are NaN or infinite, which the
        others leave out; NaN for tensors that cannot be read.
    """
    view = subject.part(query)
    found = outline(view)
    low = query.number("low", 0, 0, len(found.names))
    high = _block(found, low)
    query.check()
    chosen = {str(n): view.exact(found.names[n]) for n in range(low, high)}
    table = stats_of_all({n: t for n, t in chosen.items() if t is not None}, progress=False, check=query.check)
    numbers = np.full((3, high - low), np.nan)
    errors: dict[str, str] = {}
    for row in table:
        if row.error is not None:
            errors[row.name] = printable(row.error)
            continue
        odd = row.count - row.finite
        numbers[:, int(row.name) - low] = (row.l2 or 0.0, np.nan if row.absmax is None else row.absmax, odd)
    return pack({"high": high, "errors": errors}, {"norm": numbers[0], "largest": numbers[1], "odd": numbers[2]})


def _block(found: Outline, low: int) -> int:
    """Return the end of the names whose norms one request computes."""
    sums = found.nbytes
    high = bisect_right(sums, sums[low] + _AT_ONCE, low) - 1
    return min(max(high, low + 1), low + _MOST, len(found.names))


def totals(subject: Subject, query: Query) -> dict[str, Any]:
    """Sum up a group of names in every state. Nothing is read.

    Parameters of the request: ``prefix``, the names' part before a dot, or "" for all names; ``side`` and ``step``.

    Returns
    -------
    dict
        ``states``: a list of objects with ``name``, ``tensors``, ``numel``, ``nbytes``, tied tensors counted once.
    """
    view = subject.checkpoint(query)
    prefix = query.text("prefix", "")
    states = []
    for name, part in view.states.items():
        query.check()
        found = outline(part)
        low, high = 0, len(found.names)
        if prefix:
            low = bisect_left(found.names, prefix + ".")
            high = bisect_left(found.names, prefix + "/", low)  # "/" is the character after "."
        states.append(
            {
                "name": name,
                "tensors": high - low,
                "numel": int(found.numels[high] - found.numels[low]),
                "nbytes": int(found.nbytes[high] - found.nbytes[low]),
            }
        )
    return {"states": states}


def _report(subject: Subject) -> Iterator[Wanted]:
    view = subject.checkpoint(Query({}))
    yield Wanted("tree", {})
    yield Wanted("tree/marks", {})
    yield Wanted("tree/totals", {})
    found = outline(view)
    low = 0
    while low < len(found.names):
        high = _block(found, low)
        nbytes = int(found.nbytes[high] - found.nbytes[low])
        yield Wanted("tree/norms", {"low": str(low)}, effort(nbytes, high - low))
        low = high
    if subject.other is not None:
        yield Wanted("tree", {"side": "b"}, level=MORE)
        yield Wanted("tree/marks", {"side": "b"}, level=MORE)
    for state in view.states:
        if state != view.state:
            yield Wanted("tree", {"state": state}, level=MORE)
            yield Wanted("tree/marks", {"state": state}, level=MORE)


ENDPOINTS = {"tree": tree, "tree/marks": marks, "tree/norms": norms, "tree/totals": totals}
REPORT = _report
