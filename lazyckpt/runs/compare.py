"""`lazyckpt.diff` and `lazyckpt.digest`: compare checkpoints, given as views or as paths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import replace
from typing import Literal

from ..errors import FormatError, SelectionError, TensorNotFoundError, some
from ..inspect.diff import Difference, diff_digests, equal_names
from ..inspect.diff import diff as diff_tensors
from ..inspect.kept import kept_digest
from ..inspect.manifest import Digest
from ..jobs.destination import MARK_OF_MANIFEST
from ..show.compared import Diff
from ..tensor import LazyTensor
from ..view import CheckpointView
from .view import RunView

_HEAD = 256  # bytes of a file that say whether it is a manifest


def diff(
    a: CheckpointView | Digest | str | os.PathLike[str],
    b: CheckpointView | Digest | str | os.PathLike[str],
    *,
    states: Sequence[str] | Literal["all"] | None = None,
    digests: bool = True,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Diff:
    """Compare two checkpoints tensor by tensor, of any formats and parallel layouts, in bounded memory.

    Tensors of the same dtype are compared bit by bit, others by value. A tensor that cannot be read, or whose file is
    missing, gets a row that says so, and the others are compared.

    If both checkpoints have a manifest beside them (``manifest=True`` of an export writes it) that is still of their
    files, by size, time of modification and time of change, tensors of equal digests are not read. ``Diff.digests``
    says how many.

    Parameters
    ----------
    a, b
        Views, or paths to open; or manifests (`Digest`, or the path of a ``.json`` file): then digests are compared,
        and only the other side is read, unless it is a manifest or has one, too.
    states
        Names of the states to compare, or "all". By default the states that the two views read (the weights or, if
        there are none, fp32).
    digests
        Whether manifests beside the checkpoints are used. False reads all tensors. Manifests are not authenticated:
        pass False for a checkpoint from a source that you do not trust.
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
    FormatError
        Two manifests have digests of different algorithms.
    DataError
        ``memory`` is not a size.
    WorkerError
        Workers of the executor died.
    LazyckptError
        What `lazyckpt.open` raises.
    """
    one, other = (_opened(side) for side in (a, b))
    if isinstance(one, Digest) or isinstance(other, Digest):
        return _by_digests(one, other, states, digests, executor, memory, progress)
    if isinstance(one, RunView) and isinstance(other, RunView) and one.steps != other.steps:
        raise SelectionError(
            f"the runs have other steps: {some(one.steps, 6)}; and {some(other.steps, 6)}. "
            "Compare a step that both have: diff(a.at(step), b.at(step))"
        )
    kept = [kept_digest(view) if digests else None for view in (one, other)]
    if states is None:
        same = _same(one, other, kept, one.state, other.state)
        found = diff_tensors(one, other, executor=executor, memory=memory, progress=progress, same=same)
        return Diff(_with_lost(found.rows, one, other))
    there = list(dict.fromkeys([*one.states, *other.states]))
    wanted = there if states == "all" else [states] if isinstance(states, str) else list(states)
    rows: list[Difference] = []
    for state in wanted:
        if state not in there:
            raise TensorNotFoundError(f"neither checkpoint has a state {state!r}; they have: {', '.join(there)}")
        sides: list[Mapping[str, LazyTensor]] = [view.states.get(state, {}) for view in (one, other)]
        same = _same(sides[0], sides[1], kept, state, state)
        found = diff_tensors(*sides, executor=executor, memory=memory, progress=progress, same=same)
        of_state = tuple(replace(row, state=state) for row in found)
        # the index does not record which state a lost name belongs to: list it once
        rows += _with_lost(of_state, one, other, state) if state == wanted[0] else of_state
    return Diff(tuple(rows))


def _opened(side: CheckpointView | Digest | str | os.PathLike[str]) -> CheckpointView | Digest:
    if isinstance(side, CheckpointView | Digest):
        return side
    manifest = manifest_of(side)
    return CheckpointView(side) if manifest is None else manifest


def manifest_of(path: str | os.PathLike[str]) -> Digest | None:
    """Return the manifest that a path is of, None if the path is of anything else. Raises as `Digest.from_json`."""
    if not os.fspath(path).endswith(".json") or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        if MARK_OF_MANIFEST not in file.read(_HEAD):
            return None
        file.seek(0)
        return Digest.from_json(file.read())


def _same(
    a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor], kept: Sequence[Digest | None], of_a: str, of_b: str
) -> Set[str]:
    """Return the names of the tensors that manifests say are equal."""
    one, other = kept
    if one is None or other is None or one.algorithm != other.algorithm:
        return frozenset()
    if of_a not in one.states or of_b not in other.states:
        return frozenset()
    return equal_names(a, b, one.states[of_a], other.states[of_b])


def _by_digests(
    a: CheckpointView | Digest,
    b: CheckpointView | Digest,
    states: Sequence[str] | Literal["all"] | None,
    digests: bool,
    executor: Executor | None,
    memory: int | str | None,
    progress: bool | None,
) -> Diff:
    """Compare a manifest with another one, or with the digests of a checkpoint."""
    manifest = a if isinstance(a, Digest) else b
    assert isinstance(manifest, Digest)
    sides = []
    for side in (a, b):
        found = side if isinstance(side, Digest) else kept_digest(side) if digests else None
        if isinstance(side, CheckpointView) and (found is None or found.algorithm != manifest.algorithm):
            there = [state for state in side.states if state in manifest.states]
            algorithm = manifest.algorithm
            found = side.digest(
                algorithm=algorithm, states=there or None, executor=executor, memory=memory, progress=progress
            )
        assert found is not None
        sides.append(found)
    one, other = sides
    if one.algorithm != other.algorithm:
        raise FormatError(f"the manifests have {one.algorithm} and {other.algorithm} digests, which cannot be compared")
    if states is None:
        return Diff(diff_digests(one, other))
    listed = list(dict.fromkeys([*one.states, *other.states]))
    wanted = listed if states == "all" else [states] if isinstance(states, str) else list(states)
    rows: list[Difference] = []
    for state in wanted:
        if state not in listed:
            raise TensorNotFoundError(f"neither manifest has a state {state!r}; they have: {', '.join(listed)}")
        rows += diff_digests(one.states.get(state, {}), other.states.get(state, {}), state)
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
