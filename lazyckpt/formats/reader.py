"""What a reader is, and which one reads a path: the first of an ordered tuple that recognises it.

A reader of another package registers itself under the entry-point group ``lazyckpt.readers`` (its value: a `Reader`).
It is asked after the built-in ones, or by name (``open(path, format="its name")``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from ..core.index import Index
from ..core.names import matcher, natural
from ..errors import FormatError, LazyckptError, decoding
from ..io.collecting import many_objects
from ..io.store import Entry, Store

GROUP = "lazyckpt.readers"
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_FOLDERS = ("checkpoint-", "global_step", "step")  # how the names of checkpoints in a run's folder begin
_LOOKED = 32  # folders in a folder that are looked into
_BELOW = 100  # folders in those: looking into more stops (a link to "." would be looked into again and again)
_LISTED = 5  # names in a message
_RUN = "run"


class Source:
    """What a reader is asked about: a file of a store, or (``path`` empty) the store's folder itself.

    What was sniffed is kept: ``entries``, the folder's listing, ``head``, the file's first bytes, listings of the
    folders in it; and in ``known`` what readers found out, so that it is found out once.
    """

    def __init__(
        self, store: Store, path: str = "", tag: str | None = None, rules: Mapping[str, Any] | None = None
    ) -> None:
        self.store = store
        self.path = path
        self.tag = tag
        self.rules = rules or {}
        self.known: dict[Any, Any] = {}

    def inside(self, folder: str) -> Mapping[str, Entry]:
        """The listing of a folder in the folder; {} if there is none."""
        if not folder:
            return self.entries
        key = "inside", folder
        if key not in self.known:
            self.known[key] = self.store.list(folder)
        found: Mapping[str, Entry] = self.known[key]
        return found

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

    Raises FormatError if there is none; the readers' own errors for damage and missing files; CorruptError, with the
    cause, for whatever else a reader raises.
    """
    if format is not None:
        known = readers()
        for reader in known:
            if reader.name == format:
                return _read(reader, source)
        raise FormatError(f"no reader is named {format[:40]!r}; there are: {', '.join(r.name for r in known)}")
    found = recognising(source)
    if found is None:
        raise FormatError(unknown(source))
    return _read(found, source)


def readers() -> tuple[Reader, ...]:
    """All readers in the order in which they are asked: those of lazyckpt, then those of other packages."""
    return (*builtin(), *_installed())


def recognising(source: Source) -> Reader | None:
    """The first reader that recognises it. Raises CorruptError, with the cause, for whatever a reader raises that is no
    error of lazyckpt or of the file system."""
    if "reader" not in source.known:
        source.known["reader"] = _recognising(source)
    found: Reader | None = source.known["reader"]
    return found


def _recognising(source: Source) -> Reader | None:
    with decoding(source.where, "looking at it"):
        for reader in builtin():
            if reader.recognises(source):
                return reader
    for reader in _installed():  # to find out what is installed takes as long as opening a checkpoint
        with decoding(source.where, f"reader {reader.name!r}"):
            if reader.recognises(source):
                return reader
    return None


def _read(reader: Reader, source: Source) -> Index:
    with many_objects(), decoding(source.where, f"reader {reader.name!r}"):
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
    found = []
    for point in entry_points(group=GROUP):
        try:
            found.append(point.load())
        except Exception as e:
            raise FormatError(f"the plug-in reader {point.name!r} ({point.value}) cannot be imported: {e}") from e
    return tuple(found)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file's name ends as checkpoints' names do."""
    return name.lower().endswith(_FILES)


def checkpoints_in(source: Source) -> list[str]:
    """Names in a folder that can be opened: files by their endings, folders that a reader recognises or that have such
    folders in them."""
    files = sorted(
        (n for n, e in source.entries.items() if not e.is_dir and is_checkpoint_file(n) and n[0] != "."), key=natural
    )
    return files + [name for name, kind in _folders(source).items() if kind not in ("", "zarr-arrays")]


def only_checkpoint(source: Source) -> str | None:
    """The name in a folder that can be opened, if there is just one."""
    found = checkpoints_in(source)
    folders = _folders(source)
    if len(found) != 1 or len(folders) < sum(entry.is_dir for entry in source.entries.values()):
        return None
    return found[0] if found[0] not in folders or folders[found[0]] != _RUN else None


def _folders(source: Source) -> dict[str, str]:
    """Folders in a folder -> the name of the reader that recognises it, `_RUN` if it has checkpoints in it, else "". Of
    many folders the first ones only."""
    found: dict[str, str] = {}
    below = 0
    for name in sorted((n for n, e in source.entries.items() if e.is_dir), key=natural)[:_LOOKED]:
        if below > _BELOW:
            break
        found[name] = ""
        with suppress(LazyckptError, OSError):  # it cannot be looked into: nothing to offer
            sub = Source(source.store.below(name))
            if sub.entries == source.entries:  # a link to the folder itself
                continue
            below += sum(entry.is_dir for entry in sub.entries.values())
            reader = recognising(sub)
            if reader is not None:
                found[name] = reader.name
            elif any(n.startswith(_FOLDERS) or is_checkpoint_file(n) for n in sub.entries):
                found[name] = _RUN
    return found


def unknown(source: Source) -> str:
    """That no reader knows it, and what there is, for an error."""
    if source.path:
        found = f"it begins with {source.head[:8]!r}" if source.size else "it is empty (0 bytes)"
    elif source.entries:
        inside = checkpoints_in(source)
        folders = [name for name in inside if source.entries[name].is_dir]
        if folders == inside and inside:
            return f"{source.where} is no checkpoint itself. Open one of those in it: {_listed(inside)}"
        if inside:
            return (
                f"{source.where} has several checkpoints, and nothing says that they belong together: "
                f"{_listed(inside)}. Open one with tag={inside[0]!r}, or by its own path as the file."
            )
        found = f"it has {_listed(sorted(source.entries, key=natural))}"
    else:
        found = "it is an empty folder"
    return f"{source.where} is no checkpoint that lazyckpt knows: {found}. `lazyckpt formats` lists what it reads."


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:60] for name in names[:_LISTED])
    return f"{shown} and {len(names) - _LISTED:,} more" if len(names) > _LISTED else shown
