"""`lazyckpt.delta`: what a checkpoint changes of another one, written as a delta checkpoint.

A delta is a Zarr hierarchy whose arrays are computed while they are written: the bits of a tensor combined with those
of the base, the rows that differ, or the whole tensor. So its writer is that of `CheckpointView.to_zarr`.
docs/formats/delta.md specifies the format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

from ..core.expr import computed
from ..core.index import Index
from ..core.specs import TensorSpec
from ..derive.deltas import KEY, About, Base, Entry, How, difference, location_of, payload
from ..derive.sources import Sources
from ..errors import DataError, DestinationError
from ..export.options import WriteOptions, WriteResult, complete, with_options
from ..export.registry import export
from ..export.writer import check_whole
from ..inspect.changes import Change, changes
from ..inspect.kept import OPENED, now_mark
from ..inspect.manifest import Digest, StateDigest, TensorDigest
from ..io.storage.urls import is_url
from ..jobs.destination import Destination
from ..jobs.executor import runner
from ..lazy import LazyArray
from ..view import CheckpointView, view_of
from ..view.bases import ABOUT

CHUNK, SHARD = "512KiB", "256MiB"  # a chunk of bfloat16 is what a read computes at a time (io/reading/compute.py)
_BETTER = 0.95  # a way to store a tensor that needs the base is taken if it needs at most so much of the other's bytes
_CODEC = {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "shuffle"}}


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor is stored in a delta.

    Attributes
    ----------
    state, name
        The tensor.
    how
        "same", "xor", "overwrite" or "whole".
    nbytes
        Its size in bytes.
    packed
        About how many bytes of the delta it takes.
    """

    state: str
    name: str
    how: How
    nbytes: int
    packed: int


class Delta:
    """What a checkpoint changes of another one. `lazyckpt.delta` returns it.

    Parameters
    ----------
    new, base
        The checkpoints. Without a base all tensors are stored whole.
    states
        Names of the states of ``new`` to write; None for all.
    """

    def __init__(self, new: CheckpointView, base: CheckpointView | None, states: Sequence[str] | None = None) -> None:
        for view in (new, base):
            if view is not None and any(kind == "below" for kind, _ in view._steps):
                raise DataError("the names of this view are relative to a prefix: take the delta of the whole views")
        self.new, self.base = new, base
        self._states = new._states_or(states)
        check_whole(new)
        self._options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Delta({self.new.root!r} over {'nothing' if self.base is None else repr(self.base.root)})"

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], tuple[LazyArray, LazyArray | None]]:
        """(State, name) -> the tensor, and that of the base if it has the same shape and dtype."""
        found: dict[tuple[str, str], tuple[LazyArray, LazyArray | None]] = {}
        for state, part in self._states.items():
            side = None if self.base is None else self.base.states.get(state)
            for name, tensor in part.once()[0].items():
                other = None if side is None else side.exact(name)
                if other is not None and (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
                    other = None
                found[state, name] = tensor, other
        return found

    @cached_property
    def _changes(self) -> dict[tuple[str, str], Change]:
        run = runner(self._options.get("executor"), self._options.get("memory"))
        found = changes(list(self._pairs.values()), run, self._options.get("progress"))
        return dict(zip(self._pairs, found, strict=True))

    def compare(
        self, *, executor: Executor | None = None, memory: int | str | None = None, progress: bool | None = None
    ) -> None:
        """Compare the checkpoints, which reads both once. `tensors`, `nbytes`, `digest` and `write` do it if this was
        not called before.

        Parameters
        ----------
        executor, memory, progress
            See `WriteOptions`.

        Raises
        ------
        LazyckptError
            What reading the checkpoints raises.
        """
        self._options = {"executor": executor, "memory": memory, "progress": progress}
        _ = self._changes

    @property
    def tensors(self) -> tuple[Stored, ...]:
        """How each tensor is stored. Reads both checkpoints once, at the first use."""
        found = []
        for (state, name), change in self._changes.items():
            how, packed = _choice(change, self._pairs[state, name][0])
            found.append(Stored(state, name, how, change.nbytes, packed))
        return tuple(found)

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the base that the checkpoint lacks, of its default state."""
        return () if self.base is None else tuple(name for name in self.base if self.new.exact(name) is None)

    @property
    def nbytes(self) -> int:
        """About how many bytes the delta takes, estimated from samples."""
        return sum(one.packed for one in self.tensors)

    @property
    def digest(self) -> Digest:
        """The digests of the checkpoint that the delta and its base make together."""
        return self._digest(lambda change: change.digest)

    def _digest(self, of: Callable[[Change], str]) -> Digest:
        tables: dict[str, dict[str, TensorDigest]] = {state: {} for state in self._states}
        for (state, name), change in self._changes.items():
            spec = self._pairs[state, name][0].spec
            if of(change):
                tables[state][name] = TensorDigest(spec.dtype.name, spec.shape, of(change))
        tied = {state: part.once()[1] for state, part in self._states.items()}
        return Digest(
            "sha256",
            {
                state: StateDigest.of(
                    table | {a: table[o] for a, o in tied[state].items() if o in table},
                    {a: o for a, o in tied[state].items() if o in table},
                )
                for state, table in tables.items()
            },
        )

    def _about(self, location: str) -> About:
        states: dict[str, dict[str, Entry]] = {state: {} for state in self._states}
        for one in self.tensors:
            change, spec = self._changes[one.state, one.name], self._pairs[one.state, one.name][0].spec
            runs = change.runs or () if one.how == "overwrite" else ()
            old = "" if one.how == "whole" else change.base
            states[one.state][one.name] = Entry(one.how, spec.dtype, spec.shape, change.digest, old, runs)
        base = Base("", "")
        if self.base is not None:
            whole = ABOUT not in self.base.kept and self.base.kept.get(OPENED)
            root = self._digest(lambda change: change.base).root or ""
            base = Base(location, root, now_mark(self.base) if whole else "")
        aliases = {a: o for part in self._states.values() for a, o in part.once()[1].items()}
        return About(base, self.digest.root or "", states, aliases, self.new.format)

    def _payload(self, about: About) -> CheckpointView:
        """Return the view of what is stored."""
        views = [self.new] if self.base is None else [self.new, self.base]
        sources = Sources(views)
        states: dict[str, dict[str, TensorSpec]] = {}
        several = sources.index({}, "delta")
        for state, table in about.states.items():
            pairs = sources.of([view.states.get(state, view) for view in views])
            for name, entry in table.items():
                new = pairs.operand(0, name)
                old = pairs.operand(1, name) if entry.how in ("xor", "overwrite") else None
                found = difference(entry.how, new, old, entry.runs)
                if found is not None:
                    states.setdefault(payload(state, entry.how), {})[name] = computed(name, found)
        if not states:
            states[payload(next(iter(about.states)), "xor")] = {}
        index = Index(
            format="delta",
            states=states,
            files=several.files,
            stored={},
            meta={KEY: about.to_meta(), "meta": self.new._index.meta},
            mesh=self.new.mesh,
        )
        return view_of(sources.store, index, next(iter(states)), (), True)

    def _check_place(self, dest: str | os.PathLike[str], options: WriteOptions) -> None:
        """Raise DestinationError if the delta cannot be written to a place on this disk: comparing may take hours."""
        from ..export.zarr import destination_of

        tensors = [one for pair in self._pairs.values() for one in pair if one is not None]
        place = destination_of(dest, tensors, complete(options, "write"))
        if isinstance(place, Destination):
            place.check()

    @with_options
    def write(
        self, dest: str | os.PathLike[str], *, location: str | None = None, **options: Unpack[WriteOptions]
    ) -> WriteResult:
        """Write the delta. Reads both checkpoints twice: to compare them, and to write what differs.

        Parameters
        ----------
        dest
            A folder, or a URL. It is a Zarr hierarchy that only `lazyckpt.open` puts together with its base.
        location
            Where readers find the base: a path relative to ``dest``, or a URL. By default where it is now.
        **options
            See `WriteOptions`.

        Returns
        -------
        WriteResult
            The folder.

        Raises
        ------
        DestinationError
            The destination exists already, or cannot be written.
        LazyckptError
            What reading the checkpoints raises.
        """
        if options.get("manifest"):
            raise DestinationError("manifest=True: a delta has the digests of its tensors already; leave it out")
        self._check_place(dest, options)
        self._options = {**complete(options, "write")}
        place = os.fspath(dest)
        if location is None:
            location = "" if self.base is None else location_of(_path_of(self.base), place, is_url)
        about = self._about(location)
        own: dict[str, Any] = {"codec": _CODEC, "chunk": CHUNK, "shard": SHARD}
        return export("zarr", self._payload(about), dest, options, **own)


def delta(
    new: CheckpointView | str | os.PathLike[str],
    base: CheckpointView | str | os.PathLike[str],
    *,
    states: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Delta:
    """Compare a checkpoint with its base, to write what differs as a delta checkpoint. Reads no tensor data yet.

    ``lazyckpt.delta(new, base).write(dest)`` writes the delta, and ``lazyckpt.open(dest)`` opens the checkpoint again,
    bit for bit, as long as the base is there. The base may be a delta itself. The checkpoints may have different
    formats and parallel layouts.

    Each tensor is stored in the smallest way: nothing if it is unchanged, the bits combined with those of the base by
    exclusive or, the rows that differ, or the whole tensor.

    Parameters
    ----------
    new
        The checkpoint to store: a view or a path.
    base
        The checkpoint that readers of the delta have, too.
    states
        Names of the states to store. By default all states of ``new``.
    storage_options
        Options of fsspec's file system for URLs.

    Returns
    -------
    Delta
        ``tensors`` says how each tensor is stored, ``nbytes`` about how large the delta is, ``write`` writes it.

    Raises
    ------
    LazyckptError
        What `lazyckpt.open` raises.
    DataError
        A view is a part below a prefix.
    """
    views = [
        one if isinstance(one, CheckpointView) else CheckpointView(one, storage_options=storage_options)
        for one in (new, base)
    ]
    return Delta(views[0], views[1], states)


def recorded_digest(view: CheckpointView) -> Digest | None:
    """Return the digests that a delta records of its tensors; None for any other checkpoint. Reads no tensor data.

    Parameters
    ----------
    view
        A view, as `lazyckpt.open` returned it.
    """
    if ABOUT not in view.kept:
        return None
    about = view.kept[ABOUT][1]
    return Digest("sha256", {state: _digests(table, about.aliases) for state, table in about.states.items()})


def _digests(table: Mapping[str, Entry], aliases: Mapping[str, str]) -> StateDigest:
    found = {name: TensorDigest(e.dtype.name, e.shape, e.digest) for name, e in table.items()}
    tied = {a: o for a, o in aliases.items() if o in found}
    return StateDigest.of(found | {a: found[o] for a, o in tied.items()}, tied)


def _choice(change: Change, tensor: LazyArray) -> tuple[How, int]:
    """Return how a tensor is stored, and about how many bytes that takes."""
    if change.base and change.same:
        return "same", 0
    ways: list[tuple[float, How]] = [(change.whole * change.nbytes, "whole")]
    if change.base:
        ways.append((change.xor * change.changed, "xor"))
        if change.runs and tensor.ndim and change.changed < change.nbytes:
            ways.append((change.whole * change.changed, "overwrite"))
    least = min(size for size, _ in ways)
    for kind in ("whole", "overwrite", "xor"):  # of about the same size, the one that needs least of the base
        for size, how in ways:
            if how == kind and least >= _BETTER * size:
                return how, round(size)
    raise AssertionError(ways)


def _path_of(view: CheckpointView) -> str:
    """Return the path or URL at which a view can be opened again."""
    if ABOUT in view.kept:
        return str(view.kept[ABOUT][0])
    if view.format in ("safetensors", "torch") and len(view.files) == 1:
        return f"{view.root}/{next(iter(view.files))}"
    return view.root
