"""``architecture``: the parameters by layer and kind, and what a change of dtype or mesh would cost in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ...errors import DataError, printable
from ...inspect.architecture import ROLES, Group, architecture
from ...inspect.costs import OPTIMIZERS, memory_per_rank
from ...layouts.pipeline import PipelineLayout
from ..query import Query
from ..subject import Subject, View, Wanted

_MOST = 20_000  # groups that an answer has
_DEGREE = 1 << 20
_STAGES = 256  # pipeline stages of a model of any number of layers


def parameters(subject: Subject, query: Query) -> dict[str, Any]:
    """Group the tensors of a state by layer and kind. Nothing is read.

    Parameters of the request: those of `Subject.part`.

    Returns
    -------
    dict
        ``numel``, ``nbytes``; ``kinds``, a list of objects with ``kind`` (the names with ``*`` for numbers), ``role``
        (of ``roles``), ``layers`` (numbers), ``tensors``, ``numel``, ``nbytes`` (of all of them), ``shape`` and
        ``dtype`` (null if they differ), ``first`` (a name); ``blocks``, layers that are alike, with ``stack``,
        ``label``, ``layers``, and ``tensors``, ``numel``, ``nbytes`` of each; ``groups_in_all``, and ``groups``, at
        most 20,000 lists of layer (or null), index of ``kinds``, tensors, elements, bytes.
    """
    view = subject.part(query)
    found = architecture(view, query.check)
    kinds = found.of_kind()
    number = {kind: n for n, kind in enumerate(kinds)}
    return {
        "roles": list(ROLES),
        "numel": found.numel,
        "nbytes": found.nbytes,
        "kinds": [_kind(kind, groups) for kind, groups in kinds.items()],
        "blocks": [
            {
                "stack": block.stack,
                "label": block.label,
                "layers": list(block.layers),
                "tensors": block.tensors,
                "numel": block.numel,
                "nbytes": block.nbytes,
            }
            for block in found.blocks()
        ],
        "groups": [[g.layer, number[g.kind], len(g.names), g.numel, g.nbytes] for g in found.groups[:_MOST]],
        "groups_in_all": len(found.groups),
    }


def _kind(kind: str, groups: list[Group]) -> dict[str, Any]:
    shapes = {group.shape for group in groups}
    dtypes = {group.dtype for group in groups}
    shape, dtype = next(iter(shapes)), next(iter(dtypes))
    return {
        "kind": kind,
        "role": groups[0].role,
        "layers": [group.layer for group in groups if group.layer is not None],
        "tensors": sum(len(group.names) for group in groups),
        "numel": sum(group.numel for group in groups),
        "nbytes": sum(group.nbytes for group in groups),
        "shape": list(shape) if len(shapes) == 1 and shape is not None else None,
        "dtype": dtype.short if len(dtypes) == 1 and dtype is not None else None,
        "first": groups[0].names[0],
    }


def memory(subject: Subject, query: Query) -> dict[str, Any]:
    """Compute the memory that weights, gradients and optimizer take on each rank of a mesh. Nothing is read.

    Parameters of the request: those of `lazyckpt.inspect.costs.memory_per_rank` (``dtype``, ``tp``, ``pp``, ``dp``,
    ``ep``, ``etp``, ``layout``, ``zero``, ``optimizer``, ``gradients``); ``side`` and ``step``. It is that of the
    weights, whatever the state.

    Returns
    -------
    dict
        ``world``, the number of ranks; ``stages``, for each pipeline stage ``stage``, ``others`` and ``experts``
        (elements on a rank before data-parallel ranks divide them), ``tensors``, ``nbytes`` and ``costs``, a list of
        ``what``, ``nbytes`` and ``how``; ``assumed``, sentences; ``optimizers``, their names; ``problems`` of the
        division.
    """
    view = _weights(subject.checkpoint(query))
    layout: PipelineLayout | None = query.text("layout", "") or None
    pp = query.number("pp", 1, 1, _DEGREE)
    if pp > max(_STAGES, len(view)) or (pp > _STAGES and pp > len(architecture(view, query.check).layers)):
        raise DataError(f"pp={pp:,}: the model has fewer layers than pipeline stages are asked for")
    found = memory_per_rank(
        view,
        dtype=query.text("dtype", "") or None,
        tp=query.number("tp", 1, 1, _DEGREE),
        pp=pp,
        dp=query.number("dp", 1, 1, _DEGREE),
        ep=query.number("ep", 1, 1, _DEGREE),
        etp=query.number("etp", 1, 1, _DEGREE) if "etp" in query else None,
        layout=layout,
        zero=query.number("zero", 0, 0, 3),
        optimizer=query.one_of("optimizer", tuple(OPTIMIZERS)),
        gradients=query.text("gradients", "float32"),
        check=query.check,
    )
    return {
        "world": found.world,
        "zero": found.zero,
        "optimizer": found.optimizer,
        "stages": [asdict(stage) | {"nbytes": stage.nbytes} for stage in found.stages],
        "assumed": [printable(line) for line in found.assumed],
        "optimizers": list(OPTIMIZERS),
    }


def _weights(view: View) -> View:
    for state in ("weights", "fp32"):
        if state in view.states:
            return view.states[state]
    raise DataError("the checkpoint has no weights: the memory is reckoned from their shapes")


def _report(subject: Subject) -> Iterator[Wanted]:
    yield Wanted("architecture", {})
    yield Wanted("architecture/memory", {})


ENDPOINTS = {"architecture": parameters, "architecture/memory": memory}
REPORT = _report
