"""`lazyckpt.diff`: two checkpoints, given as views or as what they are opened by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Literal

from .errors import TensorNotFoundError
from .inspect.diff import Diff
from .inspect.diff import diff as diff_tensors
from .tensor import LazyTensor
from .view import CheckpointView


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
    by their numbers; what cannot be read is told, and the rest compared. ``executor``, ``memory``, ``progress``: as of
    `CheckpointView.to_safetensors`.

    Raises TensorNotFoundError (a state that neither has), DataError (a size that is not understood), WorkerError, and
    what opening raises.
    """
    one, other = (view if isinstance(view, CheckpointView) else CheckpointView(view) for view in (a, b))
    if states is None:
        return diff_tensors(one, other, executor=executor, memory=memory, progress=progress)
    there = list(dict.fromkeys([*one.states, *other.states]))
    wanted = there if states == "all" else [states] if isinstance(states, str) else list(states)
    rows = []
    for state in wanted:
        if state not in there:
            raise TensorNotFoundError(f"neither checkpoint has a state {state!r}; they have: {', '.join(there)}")
        sides: list[Mapping[str, LazyTensor]] = [view.states.get(state, {}) for view in (one, other)]
        found = diff_tensors(*sides, executor=executor, memory=memory, progress=progress)
        rows += [replace(row, state=state) for row in found]
    return Diff(tuple(rows))
