"""``ranks``: what each rank and each file of a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ...errors import TensorNotFoundError, printable
from ...inspect.ranks import FileHeld, held_by, ranks_of
from ...inspect.report import Finding
from ...inspect.verify.agreement import differing_ranks
from ..query import Query
from ..subject import MORE, Subject, View, Wanted, effort
from .about import problem_of

_FILES = 20_000  # files that an answer lists
_LOST = 2000  # damaged tensors that an answer lists
_STEPS = "ranks/steps"  # of `Namespace.kept`
_PIECES = 20_000  # pieces of a file that an answer lists


def ranks(subject: Subject, query: Query) -> dict[str, Any]:
    """Count what each rank and each file holds of the states. Nothing is read.

    Parameters of the request: ``state``, one state, or "" for all; ``side`` and ``step``.

    Returns
    -------
    dict
        ``mesh``; ``ranks``, a list of objects with ``rank`` (tp, pp, dp, ep; null for files of no known rank),
        ``tensors``, ``nbytes``, ``missing`` (bytes that are in files that cannot be read) and ``files`` (indices of
        ``files``); ``files``, a list of objects with ``path``, ``size`` (null if there is no such file), ``tensors``,
        ``nbytes``, ``missing`` (the reason, or "") and ``problems``; ``files_in_all``; ``lost``, a list of state, name
        and number of elements that are in no file that can be read; ``lost_in_all``.
    """
    found = ranks_of(_states(subject, query), query.check)
    number = {path: n for n, path in enumerate(islice(found.files, _FILES))}
    return {
        "mesh": {axis: getattr(found.mesh, axis) for axis in ("tp", "pp", "dp", "ep")},
        "ranks": [
            {
                "rank": None if held.rank is None else held.rank._asdict(),
                "tensors": held.tensors,
                "nbytes": held.nbytes,
                "missing": held.missing,
                "files": [number[file.path] for file in held.files if file.path in number],
            }
            for held in found.ranks
        ],
        "files": [_file(found.files[path]) for path in number],
        "files_in_all": len(found.files),
        "lost": [[state, name, count] for (state, name), count in islice(found.lost.items(), _LOST)],
        "lost_in_all": len(found.lost),
    }


def _file(held: FileHeld) -> dict[str, Any]:
    return {
        "path": held.path,
        "size": held.size,
        "tensors": held.tensors,
        "nbytes": held.nbytes,
        "missing": printable(held.missing),
        "problems": [problem_of(problem) for problem in held.problems],
    }


def holding(subject: Subject, query: Query) -> dict[str, Any]:
    """List what a file holds. Nothing is read.

    Parameters of the request: ``path``, the file's; those of ``ranks``.

    Returns
    -------
    dict
        ``pieces``, a list of state, full name, elements, bytes and the offset in the file (null if it is packed or
        missing), at most 20,000; ``more``, whether there are further ones.
    """
    path = query.text("path")
    states = list(_states(subject, query))
    pieces = list(islice(held_by(states, path, query.check), _PIECES + 1))
    if not pieces and not any(path in view.files for view in states):
        raise TensorNotFoundError(f"the checkpoint has no file {path!r:.200}")
    return {
        "pieces": [[state, one.name, one.numel, one.nbytes, one.offset] for state, one in pieces[:_PIECES]],
        "more": len(pieces) > _PIECES,
    }


def steps(subject: Subject, query: Query) -> dict[str, Any]:
    """Compare the numbers of steps that the files of ranks record. Their counters are read, of a few bytes each.

    Parameters of the request: ``side`` and ``step``.

    Returns
    -------
    dict
        ``findings``, objects with ``code``, ``severity``, ``text``, ``advice``: the files that record another step than
        most; none if all agree, or if the format does not record steps for each rank.
    """
    view = subject.checkpoint(query)
    found: tuple[Finding, ...] | None = view.kept.get(_STEPS)
    if found is None:  # the page asks for it whenever it is shown
        found = view.kept[_STEPS] = tuple(differing_ranks(view.format, lambda: view.stored, query.check))
    return {"findings": [problem_of(one) | {"severity": one.severity, "advice": one.todo} for one in found]}


def _states(subject: Subject, query: Query) -> Iterable[View]:
    if query.text("state", ""):
        return [subject.part(query)]
    return list(subject.checkpoint(query).states.values())


def _report(subject: Subject) -> Iterator[Wanted]:
    yield Wanted("ranks", {})
    yield Wanted("ranks/steps", {}, effort(0, len(subject.checkpoint(Query({})).files)), MORE)


ENDPOINTS = {"ranks": ranks, "ranks/file": holding, "ranks/steps": steps}
REPORT = _report
