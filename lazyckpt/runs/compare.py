"""`lazyckpt.diff` and `lazyckpt.digest`: compare checkpoints, given as views or as paths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Literal

from ..errors import SelectionError, TensorNotFoundError, some
from ..inspect.diff import Diff, Difference
from ..inspect.diff import diff as diff_tensors
from ..inspect.manifest import Digest
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
    """Compare two checkpoints tensor by tensor, of any formats and parallel layouts, in bounded memory.

    Tensors of the same dtype are compared bit by bit, others by value. A tensor that cannot be read, or whose file is
    missing, gets a row that says so, and the others are compared.

    Parameters
    ----------
    a, b
        Views, or paths to open.
    states
        Names of the states to compare, or "all". By default the states that the two views read (the weights or, if
        there are none, fp32).
    executor, memory, progress
        See `WriteOptions`.

    Returns
    -------
    Diff
        A sequence with a `Difference` for each tensor. ``diff(a, b).equal`` is True if nothing differs.

    Raises
    ------
    TensorNotFoundError
        Neither checkpoint has one of ``states``.
    SelectionError
        ``a`` and ``b`` are runs with different steps.
    DataError
        ``memory`` is not a size.
    WorkerError
        Workers of the executor died.
    LazyckptError
        What `lazyckpt.open` raises.
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
        # the index does not record which state a lost name belongs to: list it once
        rows += _with_lost(of_state, one, other, state) if state == wanted[0] else of_state
    return Diff(tuple(rows))


def digest(
    checkpoint: CheckpointView | str | os.PathLike[str],
    *,
    algorithm: str = "sha256",
    states: Sequence[str] | None = None,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Digest:
    """Compute digests of the contents of a checkpoint, which do not depend on format, layout or files.

    Parameters
    ----------
    checkpoint
        A view, or a path to open.
    algorithm, states, executor, memory, progress
        See `CheckpointView.digest`.

    Returns
    -------
    Digest
        The digests of all tensors, states and the whole.

    Raises
    ------
    LazyckptError
        What `lazyckpt.open` and `CheckpointView.digest` raise.
    """
    view = checkpoint if isinstance(checkpoint, CheckpointView) else CheckpointView(checkpoint)
    return view.digest(algorithm=algorithm, states=states, executor=executor, memory=memory, progress=progress)


def _with_lost(
    rows: tuple[Difference, ...], a: CheckpointView, b: CheckpointView, state: str | None = None
) -> tuple[Difference, ...]:
    """Add rows for the names that one side cannot describe because their file is missing."""
    lost = {**b.unreadable, **a.unreadable}
    if not lost:
        return rows

    def marked(row: Difference) -> Difference:
        alone = row.status in ("only in a", "only in b") and row.name in lost
        return replace(row, status="unreadable", error=lost[row.name]) if alone else row

    names = {row.name for row in rows}
    rest = (
        Difference(n, "unreadable", None, None, error=why, state=state) for n, why in lost.items() if n not in names
    )
    return (*map(marked, rows), *rest)
