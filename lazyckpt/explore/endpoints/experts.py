"""``experts``: the experts of a mixture-of-experts model, by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...inspect.expert_likeness import SAMPLE, Parts, experts_by_layer, likeness_of
from ...inspect.expert_norms import expert_norms, parts_of
from ...lazy import LazyArray
from ..query import Query
from ..subject import FIRST, MORE, Subject, View, Wanted, effort

_KEY = "experts by layer"  # of `Namespace.kept`
_MANY = 65_536  # tensors, beyond which a report has nothing of experts


def experts(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute the norm of each expert of each layer. The experts are read once.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    dict
        ``layers``, their numbers as text, or their names if several stacks of layers have experts; ``experts``, their
        numbers; ``norms``, a list of rows, one for each layer, with a value (or
        "NaN") for each expert; ``marks``, a list of layer, expert and "?" (cannot be read) or "!" (NaN or infinities);
        ``dead``, pairs of layer and expert whose elements are all zero.
    """
    found = expert_norms(_tensors(subject.part(query)), progress=False, check=query.check)
    dead = [
        [layer, expert]
        for layer, row in zip(found.kinds, found.values.tolist(), strict=True)
        for expert, norm in zip(found.layers, row, strict=True)
        if norm == 0 and not math.isnan(norm)
    ]
    return {
        "layers": found.kinds,
        "experts": found.layers,
        "norms": found.values.tolist(),
        "marks": [[layer, expert, mark] for (layer, expert), mark in found.marks.items()],
        "dead": dead,
    }


def likeness(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute the cosines between the experts of a layer. At most 256 MiB are read: evenly spaced rows of larger ones.

    Parameters of the request: ``layer``, as ``experts`` names it; those of `Subject.part`.

    Returns
    -------
    dict
        ``layer``; ``experts``; ``cosines``, a list of rows; ``exact``, whether all elements were read; ``read`` and
        ``nbytes``, the bytes that were read and those of all experts of the layer.
    """
    layer = query.text("layer", "0")
    found = likeness_of(_parts(subject.part(query)), layer, SAMPLE, query.check)
    return {
        "layer": found.layer,
        "experts": found.experts,
        "cosines": found.cosines.tolist(),
        "exact": found.exact,
        "read": found.read,
        "nbytes": found.nbytes,
    }


def layers(subject: Subject, query: Query) -> dict[str, Any]:
    """List the layers that have experts. Nothing is read.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    dict
        ``layers``, as ``experts`` names them; ``experts``, their numbers; ``reads``, for each layer the bytes that
        ``experts/likeness`` and ``experts/nearest`` read.
    """
    parts = _parts(subject.part(query))
    sizes = [sum(t.nbytes for each in kinds.values() for t in each.values()) for kinds in parts.values()]
    return {
        "layers": list(parts),
        "experts": sorted({expert for kinds in parts.values() for each in kinds.values() for expert in each}),
        "reads": [min(nbytes, SAMPLE) for nbytes in sizes],
    }


def nearest(subject: Subject, query: Query) -> dict[str, Any]:
    """Find the most alike other expert of each expert of a layer, as ``experts/likeness`` compares them.

    Parameters of the request: those of ``experts/likeness``.

    Returns
    -------
    dict
        ``layer``; ``experts``; ``nearest``, for each the number of the other expert with the largest cosine, or null if
        it is zero or not finite; ``cosines``, that cosine, or "NaN"; ``exact``, ``read``, ``nbytes``.
    """
    layer = query.text("layer", "0")
    found = likeness_of(_parts(subject.part(query)), layer, SAMPLE, query.check)
    others, cosines = found.nearest()
    return {
        "layer": found.layer,
        "experts": found.experts,
        "nearest": others,
        "cosines": cosines.tolist(),
        "exact": found.exact,
        "read": found.read,
        "nbytes": found.nbytes,
    }


def _parts(view: View) -> Parts:
    """Return the experts' tensors by layer; they are found once."""
    found: Parts | None = view.kept.get(_KEY)
    if found is None:
        found = view.kept[_KEY] = experts_by_layer(_tensors(view))
    return found


def _tensors(view: View) -> dict[str, LazyArray]:
    return {view.full_name(name): t for name, t in view.once()[0].items()}


def _report(subject: Subject) -> Iterator[Wanted]:
    view = subject.checkpoint(Query({}))
    if len(view) > _MANY:
        if any("expert" in name for name in view):
            yield Wanted("experts", {}, effort(view.nbytes, len(view)))
        return
    sizes: dict[str, int] = {}
    for _, (layer, _), t in parts_of(_tensors(view)):
        sizes[layer] = sizes.get(layer, 0) + effort(t.nbytes, 1)
    if sizes:
        yield Wanted("experts", {}, sum(sizes.values()))
        yield Wanted("experts/layers", {})
    for n, (layer, nbytes) in enumerate(sizes.items()):
        yield Wanted("experts/likeness", {"layer": layer}, min(nbytes, SAMPLE), MORE if n else FIRST)
        yield Wanted("python", {"page": "experts", "layer": layer}, level=MORE)
    for layer, nbytes in sizes.items():
        yield Wanted("experts/nearest", {"layer": layer}, min(nbytes, SAMPLE), MORE)


ENDPOINTS = {
    "experts": experts,
    "experts/layers": layers,
    "experts/likeness": likeness,
    "experts/nearest": nearest,
}
REPORT = _report
