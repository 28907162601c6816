"""`lazyckpt.diff`: two checkpoints, given as views or as what they are opened by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Literal

from ..errors import SelectionError, TensorNotFoundError, some
from ..inspect.diff import Diff, Difference
from ..inspect.diff import diff as diff_tensors
from ..tensor import LazyTensor
from ..view import CheckpointView
from .view import RunView


def diff(
    a: CheckpointView | str | os.PathLike[str],
    b: CheckpointView | str | os.PathLike[str],
    *,
    states: Sequence[str] | Literal["all"] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Diff:
    """Compare two checkpoints, tensor by tensor, in bounded memory: whatever their formats, and however they are cut
    over ranks. Nothing differs if ``diff(a, b).equal``; the result is a sequence of `Difference`s.

    ``a``, ``b``: views, or paths to open. ``states``: None compares what both views read (the weights or, where there
    are none, fp32); a list, or "all", the states of these names. Tensors of one dtype are compared bit by bit, others
    by their numbers; what cannot be read, or not even be described as its file is gone, is told, and the rest compared.
    ``executor``, ``memory``, ``progress``: as of `CheckpointView.to_safetensors`.

    Raises TensorNotFoundError (a state that neither has), SelectionError (two runs with other steps), DataError (a size
    that is not understood), WorkerError, and what opening raises.
    """
    one, other = (view if isinstance(view, CheckpointView) else CheckpointView(view) for view in (a, b))
    if isinstance(one, RunView) and isinstance(other, RunView) and one.steps != other.steps:
        raise SelectionError(
            f"the runs have other steps: {some(one.steps, 6)}; and {some(other.steps, 6)}. "
            "Compare a step that both have: diff(a.at(step), b.at(step))"
        )
    if states is None:
        found = diff_tensors(one, other, executor=executor, memory=memory, progress=progress)
        return Diff(_with_lost(found.rows, one, other))
    there = list(dict.fromkeys([*one.states, *other.states]))
    wanted = there if states == "all" else [states] if isinstance(states, str) else list(states)
    rows: list[Difference] = []
    for state in wanted:
        if state not in there:
            raise TensorNotFoundError(f"neither checkpoint has a state {state!r}; they have: {', '.join(there)}")
        sides: list[Mapping[str, LazyTensor]] = [view.states.get(state, {}) for view in (one, other)]
        found = diff_tensors(*sides, executor=executor, memory=memory, progress=progress)
        of_state = tuple(replace(row, state=state) for row in found)
        # which states lost names belonged to, nothing tells: they are told once
        rows += _with_lost(of_state, one, other, state) if state == wanted[0] else of_state
    return Diff(tuple(rows))


def _with_lost(
    rows: tuple[Difference, ...], a: CheckpointView, b: CheckpointView, state: str | None = None
) -> tuple[Difference, ...]:
    """With the names that a side cannot even describe, as their file is gone: they are none of its tensors'."""
    lost = {**b.unreadable, **a.unreadable}
    if not lost:
        return rows

    def told(row: Difference) -> Difference:
        alone = row.status in ("only in a", "only in b") and row.name in lost
        return replace(row, status="unreadable", error=lost[row.name]) if alone else row

    names = {row.name for row in rows}
    rest = (
        Difference(n, "unreadable", None, None, error=why, state=state) for n, why in lost.items() if n not in names
    )
    return (*map(told, rows), *rest)
