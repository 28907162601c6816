"""``tree``: all names of a state, with what the tree shows of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...show.outline import Outline
from ..query import Query
from ..subject import Subject, Wanted


def tree(subject: Subject, query: Query) -> dict[str, Any]:
    """List the names of a state in sorted order, and the shape and dtype of each.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    dict
        ``names``: the names. ``kinds``: pairs of shape and dtype, each once. ``kind``: for each name an index of
        ``kinds``, or -1 if its tensor is listed under another name. ``tied``: name -> the name of its owner.
    """
    outline = Outline(subject.part(query))
    kinds = outline.kinds
    return {
        "names": list(outline.names),
        "kinds": [{"shape": list(shape), "dtype": str(dtype), "itemsize": dtype.itemsize} for shape, dtype in kinds],
        "kind": outline.marks.tolist(),
        "tied": outline.tied,
    }


def _report(subject: Subject) -> Iterator[Wanted]:
    yield Wanted("tree", {})
    if subject.other is not None:
        yield Wanted("tree", {"side": "b"})
    for state in subject.view.states:
        if state != subject.view.state:
            yield Wanted("tree", {"state": state})


ENDPOINTS = {"tree": tree}
REPORT = _report
