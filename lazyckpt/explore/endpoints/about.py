"""``about``: what the subject is, in one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...derive.sources import address_of, place_of
from ...errors import Problem, printable
from ...inspect.codes import kind_of
from ...namespace import Namespace
from ...show.about import facts_of
from ..packing import VERSION
from ..query import Query
from ..subject import Subject, Wanted

_PROBLEMS = 200  # maximum number of problems that are listed


def about(subject: Subject, query: Query) -> dict[str, Any]:
    """Describe the subject: kind, title, steps, and each checkpoint's format, mesh, states, sizes and problems.

    Parameters of the request: ``step``, for a run.
    """
    sides = [subject.checkpoint(query)]
    if subject.other is not None:
        sides.append(subject.other)
    return {
        "api": VERSION,
        "kind": subject.kind,
        "title": printable(subject.title or address_of(subject.view)),
        "steps": list(subject.run.steps) if subject.run is not None else [],
        "sides": [_described(view) for view in sides],
    }


def _described(view: Namespace[Any]) -> dict[str, Any]:
    mesh = view.mesh
    return {
        "root": printable(view.root),
        "place": printable(place_of(view)),
        "format": view.format,
        "mesh": {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep},
        "state": view.state,
        "states": [
            {"name": name, "tensors": len(state), "numel": state.numel, "nbytes": state.nbytes}
            for name, state in view.states.items()
        ],
        "numel": view.numel,
        "nbytes": view.nbytes,
        "tensors": len(view),
        "files": len(view.files),
        "experts": any("expert" in name for name in view),
        "file_bytes": sum(info.size for info in view.files.values()),
        "facts": [[printable(a), printable(b)] for a, b in facts_of(view)],
        "problems": [problem_of(problem) for problem in view.problems[:_PROBLEMS]],
        "problems_in_all": len(view.problems),
    }


def problem_of(problem: Problem) -> dict[str, str]:
    """Return a problem as the pages show it, with what to do about it."""
    kind = kind_of(problem.code)
    return {"code": problem.code, "severity": kind.severity, "text": printable(str(problem)), "advice": kind.todo}


def _report(subject: Subject) -> Iterator[Wanted]:
    yield Wanted("about", {})


ENDPOINTS = {"about": about}
REPORT = _report
