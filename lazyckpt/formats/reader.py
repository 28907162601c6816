"""What a reader is, and which one reads a path: the first of an ordered tuple that recognises it.

A reader of another package registers itself under the entry-point group ``lazyckpt.readers`` (its value: a `Reader`).
It is asked after the built-in ones, or by name (``open(path, format="its name")``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from ..core.index import Index
from ..core.names import matcher
from ..errors import FormatError, LazyckptError
from ..io.collecting import many_objects
from ..io.store import Entry, Store

GROUP = "lazyckpt.readers"
# What a folder that is no checkpoint itself may hold, for the message that says so.
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_FOLDERS = ("checkpoint-", "global_step", "step")
_LOOKED = 32  # folders in it that are looked into


class Source:
    """What a reader is asked about: a file of a store, or (``path`` empty) the store's folder itself.

    What was sniffed is kept: ``entries``, the folder's listing, and ``head``, the file's first bytes.
    """

    def __init__(
        self, store: Store, path: str = "", tag: str | None = None, rules: Mapping[str, Any] | None = None
    ) -> None:
        self.store = store
        self.path = path
        self.tag = tag
        self.rules = rules or {}

    @property
    def where(self) -> str:
        """As the user knows it, for messages."""
        return f"{self.store.root}/{self.path}" if self.path else self.store.root

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        return {} if self.path else self.store.list()

    @cached_property
    def size(self) -> int:
        return self.store.stat(self.path).size if self.path else 0

    @cached_property
    def head(self) -> bytes:
        return bytes(self.store.read(self.path, 0, min(512, self.size))) if self.path and self.size else b""


@dataclass(frozen=True, slots=True)
class Reader:
    """``name``: what `open(format=...)` calls it. ``recognises`` looks at names and first bytes only; ``read`` indexes.
    ``what``: the layout in words, for the message that no reader recognised a path. ``tags``: it knows itself which of
    several checkpoints in the folder is meant by a tag."""

    name: str
    what: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Index]
    tags: bool = False


def builtin() -> tuple[Reader, ...]:
    from . import dcp, deepspeed, huggingface, megatron, ranks, safetensors, tensorparallel, torchsave, trainers, zarr

    # a folder of a trainer may hold what others recognise too: the one that knows more of it comes first
    return (
        zarr.READER,  # its documents are nobody else's
        deepspeed.READER,
        megatron.READER,
        megatron.DIST,
        *trainers.READERS,
        tensorparallel.LLAMA,
        tensorparallel.FILES,
        ranks.READER,
        trainers.FOLDER,
        dcp.READER,
        dcp.HUB,
        huggingface.READER,
        safetensors.READER,
        torchsave.READER,
        zarr.FOLDER,
    )


def read_index(source: Source, format: str | None = None) -> Index:
    """Index a checkpoint with the first reader that recognises it, or the one of that name.

    Raises FormatError if there is none; the readers' own errors for damage and missing files.
    """
    readers = builtin()
    if format is not None:
        for reader in (*readers, *_installed()):
            if reader.name == format:
                return _read(reader, source)
        names = ", ".join(r.name for r in (*readers, *_installed()))
        raise FormatError(f"no reader is named {format!r}; there are: {names}")
    found = recognising(source)
    if found is None:
        raise FormatError(_unknown(source, readers))
    return _read(found, source)


def recognising(source: Source) -> Reader | None:
    """The first reader that recognises it."""
    for readers in (builtin, _installed):  # to find out what is installed takes as long as opening a checkpoint
        for reader in readers():
            if reader.recognises(source):
                return reader
    return None


def _read(reader: Reader, source: Source) -> Index:
    with many_objects():
        return _with_unused(reader.read(source), source.rules)


def _with_unused(index: Index, rules: Mapping[str, Any]) -> Index:
    """With a line for every rule of the user that no tensor's name matches: it is a slip, and has no other sign."""
    names = {*index.ruled, *(name for state in index.states.values() for name in state)} if rules else ()
    lines = [
        f"rules[{glob!r}] matches no tensor: it has no effect (it is compared with the full names, as the view lists "
        "them; a tied tensor's is its owner's)"
        for glob in rules
        if not any(map(matcher(glob), names))
    ]
    return replace(index, problems=(*index.problems, *lines)) if lines else index


def _installed() -> tuple[Reader, ...]:
    return tuple(point.load() for point in entry_points(group=GROUP))


def _inside(source: Source) -> list[str]:
    """Folders in a folder that can be opened, for the message that it itself cannot: checkpoints, or those of a run."""
    found = []
    for name in sorted(name for name, entry in source.entries.items() if entry.is_dir)[:_LOOKED]:
        try:
            sub = Source(source.store.below(name))
            reader = recognising(sub)
            if any(n.startswith(_FOLDERS) for n in sub.entries) if reader is None else reader.name != "zarr-arrays":
                found.append(name)
        except (LazyckptError, OSError):  # it cannot be looked into: nothing to offer
            continue
    return found


def _unknown(source: Source, readers: tuple[Reader, ...]) -> str:
    if source.path:
        found = f"it begins with {source.head[:8]!r}" if source.size else "it is empty (0 bytes)"
    elif source.entries:
        names = sorted(source.entries)
        found = f"it has {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        if known := _inside(source):
            more = f" and {len(known) - 5} more" if len(known) > 5 else ""
            return f"{source.where} is no checkpoint itself. Open one of those in it: {', '.join(known[:5])}{more}"
        inside = [n for n, e in source.entries.items() if n.endswith(_FILES) or (e.is_dir and n.startswith(_FOLDERS))]
        if inside:
            found += f" (open {source.where}/{min(inside)}?)"
    else:
        found = "it is an empty folder"
    listed = "; ".join(r.what for r in readers)
    return f"{source.where} is no checkpoint that lazyckpt knows: {found}. It reads: {listed}."
