"""``run/...``: the course of a run: norms, changes and drift of its parameters, by kind and layer, over its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

from ...errors import DataError, LazyckptError, printable
from ...inspect.architecture import architecture, layer_and_kind
from ...inspect.course import CHANGES, course
from ...inspect.layers import QUANTITIES, arranged
from ...lazy import LazyArray
from ..query import Query
from ..subject import FIRST, MORE, Run, Subject, Wanted, effort

_REPORTED = ("norm", "growth", "change", "drift", "cosine", "std", "absmax")  # of which a report has curves
_TWICE = ("change", "cosine", "drift", "towards")  # quantities that read two tensors for a value


def run(subject: Subject, query: Query) -> dict[str, Any]:
    """List the steps of a run and the kinds of parameters of one of them. Nothing is read.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    dict
        ``steps``; ``quantities``, pairs of a name and what it is called; ``twice``, those that read two tensors for a
        value; ``kinds``, a list of objects with ``kind`` (names with ``*`` for numbers), ``label``, ``layers`` (how
        many there are), ``tensors``, ``nbytes`` (at that step) and ``first`` (a name).
    """
    found = _run(subject)
    whole = architecture(subject.part(query), query.check).of_kind()
    layout = arranged("", {(kind, group.layer): (0.0, "") for kind, groups in whole.items() for group in groups})
    return {
        "steps": list(found.steps),
        "quantities": [list(pair) for pair in (QUANTITIES | CHANGES).items()],
        "twice": list(_TWICE),
        "kinds": [
            {
                "kind": kind,
                "label": label,
                "layers": sum(group.layer is not None for group in whole[kind]),
                "tensors": sum(len(group.names) for group in whole[kind]),
                "nbytes": sum(group.nbytes for group in whole[kind]),
                "first": whole[kind][0].names[0],
            }
            for kind, label in zip(layout.kinds, layout.labels, strict=True)
        ],
    }


def over_steps(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute a quantity of one kind of parameter, by layer, at every step. Only the tensors of that kind are read.

    Parameters of the request: ``kind``; ``quantity``, one of ``quantities`` ("norm" by default); ``state``.

    Returns
    -------
    dict
        ``label``, what the quantity is called; ``steps``; ``layers``; ``values``, a list over the steps for each layer;
        ``alone``, the same for a kind that is in no layer, else null; null for a step without a value; ``marks``, a
        list of layer, step and mark ("?": a tensor cannot be read or compared, "!": it has NaN or infinite elements);
        ``errors``, step -> why its checkpoint cannot be opened.
    """
    steps = _run(subject)
    kind = query.text("kind")
    quantity = query.one_of("quantity", tuple(QUANTITIES | CHANGES))
    errors: dict[str, str] = {}
    found = course(_each(subject, query, steps, kind, errors), quantity, progress=False, check=query.check)
    if len(errors) == len(steps.steps):
        raise DataError(
            f"no step of the run has such tensors; step {min(errors, key=int)}: {errors[min(errors, key=int)]}"
        )
    if not found.kinds and not errors:
        raise DataError(f"the run has no parameters of the kind {kind!r:.200}: the request 'run' lists them")
    return {
        "label": found.label,
        "steps": list(found.steps),
        "layers": list(found.layers),
        "values": [_listed(line) for line in found.values[0]] if len(found.values) else [],
        "alone": _listed(found.alone[kind]) if kind in found.alone else None,
        "marks": [[layer, step, mark] for (_, layer, step), mark in found.marks.items()],
        "errors": errors,
    }


def _each(
    subject: Subject, query: Query, steps: Run, kind: str, errors: dict[str, str]
) -> Iterator[tuple[int, Mapping[str, LazyArray]]]:
    """Yield the tensors of a kind at each step, each once."""
    state = query.text("state", "")
    for step in steps.steps:
        query.check()
        try:
            view = subject.part(Query({"step": str(step), "state": state}))
            names = [name for name in view._owners() if layer_and_kind(name)[1] == kind]
            tensors = {name: view.exact(name) for name in names}
        except (LazyckptError, OSError) as e:
            errors[str(step)] = printable(str(e))
            continue
        yield step, {name: t for name, t in tensors.items() if t is not None}


def _listed(line: Any) -> list[float | None]:
    return [None if isnan(value) else value for value in line.tolist()]


def _run(subject: Subject) -> Run:
    if subject.run is None:
        raise DataError("this explorer shows no run")
    return subject.run


def _report(subject: Subject) -> Iterator[Wanted]:
    if subject.run is None:
        return
    yield Wanted("run", {})
    kinds = run(subject, Query({}))["kinds"]
    for quantity in _REPORTED:
        for one in kinds:
            reads = effort(one["nbytes"], one["tensors"]) * len(subject.run.steps) * (2 if quantity in _TWICE else 1)
            level = FIRST if quantity == _REPORTED[0] else MORE
            yield Wanted("run/course", {"kind": one["kind"], "quantity": quantity}, reads, level)


ENDPOINTS = {"run": run, "run/course": over_steps}
REPORT = _report
