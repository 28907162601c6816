"""Which reader reads a path: the first that recognises it, of lazyckpt's own in their order, then of other packages.

Every reader of lazyckpt is named here, and its module is imported when it is asked for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ..core.index import Index
from ..core.names import matcher, natural
from ..errors import FormatError, LazyckptError, Problem, decoding, some
from ..io.memory import many_objects
from ..io.storage.fsspec import RemoteStore
from ..io.storage.local import LocalStore
from .reader import GROUP, Reader, Source

# Module in this package, name of its Reader; in the order in which they are asked. A trainer's folder may hold what
# other readers recognise too, so the reader that knows more about a folder comes first.
_BUILTIN = (
    ("zarr", "READER"),  # no other format has its documents
    ("deepspeed", "READER"),
    ("megatron", "READER"),
    ("megatron", "DIST"),
    ("trainers.lightning", "READER"),
    ("trainers.sharding", "READER"),
    ("trainers.torchtune", "READER"),
    ("tensor_parallel", "LLAMA"),
    ("tensor_parallel", "FILES"),
    ("ranks", "READER"),
    ("trainers.folder", "READER"),
    ("dcp", "READER"),
    ("dcp", "HUB"),
    ("huggingface", "READER"),
    ("safetensors", "READER"),
    ("torch_save", "READER"),
    ("zarr", "FOLDER"),
)
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_FOLDERS = ("checkpoint-", "global_step", "step")  # how the names of checkpoints in a run's folder begin
_LOOKED = 32  # folders in a folder that are looked into
_BELOW = 100  # folders in those: looking into more stops (a link to "." would be looked into again and again)
HEADERS, REMOTE_HEADERS = 1200, 64  # reads of headers of zips when a checkpoint is opened; later ones are deferred
_LISTED = 5  # names in a message
_RUN = "run"


def _reader(module: str, name: str) -> Reader:
    reader: Reader = getattr(import_module(f".{module}", __package__), name)
    return reader


def builtin() -> Iterator[Reader]:
    """The readers of lazyckpt, in the order in which they are asked."""
    return (_reader(module, name) for module, name in _BUILTIN)


def read_index(source: Source, format: str | None = None) -> Index:
    """Index a checkpoint with the first reader that recognises it, or the one of that name.

    Raises FormatError if there is none; the readers' own errors for damage and missing files; CorruptError, with the
    cause, for whatever else a reader raises.
    """
    if format is not None:
        for reader in readers():
            if reader.name == format:
                return _read_as(reader, source)
        listed = ", ".join(dict.fromkeys(reader.name for reader in readers()))
        raise FormatError(f"no reader is named {format[:40]!r}; there are: {listed}")
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


def _read_as(reader: Reader, source: Source) -> Index:
    """The index by a reader that was named. Where it finds nothing and another reader recognises the source, raise
    FormatError."""
    index, error = None, None
    try:
        index = _read(reader, source)
        if any(index.states.values()) or index.unreadable:
            return index
    except LazyckptError as e:
        error = e
    other = None
    with suppress(LazyckptError, OSError):  # then what `reader` has found counts
        other = recognising(source)
    if other is not None and other.name != reader.name:
        raise FormatError(
            f"{source.where} is not of the format {reader.name!r} ({reader.what}): it is recognised as {other.name!r}. "
            "Open it without format="
        ) from error
    if index is None:
        assert error is not None
        raise error
    return index


def _read(reader: Reader, source: Source) -> Index:
    with many_objects(), decoding(source.where, f"reader {reader.name!r}"):
        source.asked_for_rules = False
        index = _deferring(reader, source)
        asked = source.asked_for_rules
        if source.rules and not asked:
            line = f"rules have no effect: checkpoints that {reader.name!r} reads have no shards that rules merge"
            return replace(index, problems=(*index.problems, Problem("unused-rule", line)))
        return _with_unused(index, source.rules)


def _deferring(reader: Reader, source: Source) -> Index:
    """The index by a reader, which may leave headers of zips to be checked when they are read."""
    store = source.store
    if not isinstance(store, LocalStore | RemoteStore):
        return reader.read(source)
    store.reads_of_headers, store.guards = REMOTE_HEADERS if store.gap else HEADERS, {}
    try:
        index = reader.read(source)
    finally:
        store.reads_of_headers = None
    return replace(index, guards=dict(store.guards)) if store.guards else index


def _with_unused(index: Index, rules: Mapping[str, Any]) -> Index:
    """With a problem for every rule of the user that no tensor's name matches: it is a slip, and has no other sign."""
    names = {*index.ruled, *(name for state in index.states.values() for name in state)} if rules else ()
    unused = [
        Problem(
            "unused-rule",
            f"rules[{glob!r}] matches no tensor: it has no effect (it is compared with the full names, as the view "
            "lists them; a tied tensor's is its owner's)",
        )
        for glob in rules
        if not any(map(matcher(glob), names))
    ]
    return replace(index, problems=(*index.problems, *unused)) if unused else index


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
            return f"{source.where} is no checkpoint itself. Open one of those in it: {some(inside, _LISTED)}"
        if inside:
            return (
                f"{source.where} has several checkpoints, and nothing says that they belong together: "
                f"{some(inside, _LISTED)}. Open one with tag={inside[0]!r}, or by its own path as the file."
            )
        names = sorted(source.entries, key=natural)
        found = f"it has {some(names, _LISTED)}"
    else:
        found = "it is an empty folder"
    return f"{source.where} is no checkpoint that lazyckpt knows: {found}. `lazyckpt formats` lists what it reads."
