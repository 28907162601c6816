"""The choice of the reader for a path: the first that recognises it, built-in readers before those of other packages.

All built-in readers are listed here; the module of each is imported on first use.
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

# (module in this package, name of its Reader), in the order of trial. A trainer's folder may hold files that other
# readers recognise too, so the more specific reader comes first.
_BUILTIN = (
    ("zarr", "READER"),  # no other format has these documents
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
_FOLDERS = ("checkpoint-", "global_step", "step")  # prefixes of the checkpoints in a run's folder
_LOOKED = 32  # the most subfolders that are inspected
_BELOW = 100  # inspection stops after this many folders in them (a link to "." would repeat endlessly)
HEADERS, REMOTE_HEADERS = 1200, 64  # zip headers that opening a checkpoint reads at most; the others are deferred
_LISTED = 5  # the most names in a message
_RUN = "run"


def _reader(module: str, name: str) -> Reader:
    reader: Reader = getattr(import_module(f".{module}", __package__), name)
    return reader


def builtin() -> Iterator[Reader]:
    """Yield the built-in readers, in the order of trial."""
    return (_reader(module, name) for module, name in _BUILTIN)


def read_index(source: Source, format: str | None = None) -> Index:
    """Return the index of a checkpoint from the first reader that recognises it, or from the reader named ``format``.

    Raises FormatError if there is no such reader, the readers' own errors for damage and missing files, and
    CorruptError, with the cause, for any other exception of a reader.
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
    """Return all readers in the order of trial: the built-in ones, then those of other packages."""
    return (*builtin(), *_installed())


def recognising(source: Source) -> Reader | None:
    """Return the first reader that recognises a source; None if there is none.

    Raises CorruptError, with the cause, for any exception of a reader that is not an error of lazyckpt or the file
    system.
    """
    if "reader" not in source.known:
        source.known["reader"] = _recognising(source)
    found: Reader | None = source.known["reader"]
    return found


def _recognising(source: Source) -> Reader | None:
    with decoding(source.where, "looking at it"):
        for reader in builtin():
            if reader.recognises(source):
                return reader
    for reader in _installed():  # last, because looking up entry points takes as long as opening a checkpoint
        with decoding(source.where, f"reader {reader.name!r}"):
            if reader.recognises(source):
                return reader
    return None


def _read_as(reader: Reader, source: Source) -> Index:
    """Return the index from a reader that the user named.

    Raises FormatError if it finds nothing and another reader recognises the source.
    """
    index, error = None, None
    try:
        index = _read(reader, source)
        if any(index.states.values()) or index.unreadable:
            return index
    except LazyckptError as e:
        error = e
    other = None
    with suppress(LazyckptError, OSError):  # the result of the named reader stands
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
    """Return the index from a reader, which may defer the check of zip headers to the reads of their records."""
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
    """Return the index with a problem for every rule of the user that matches no tensor: probably a typing error."""
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
    """Return whether a file's name has an ending of checkpoint files."""
    return name.lower().endswith(_FILES)


def checkpoints_in(source: Source) -> list[str]:
    """Return the names in a folder that can be opened.

    These are files with endings of checkpoints, folders that a reader recognises, and folders of checkpoints.
    """
    files = sorted(
        (n for n, e in source.entries.items() if not e.is_dir and is_checkpoint_file(n) and n[0] != "."), key=natural
    )
    return files + [name for name, kind in _folders(source).items() if kind not in ("", "zarr-arrays")]


def only_checkpoint(source: Source) -> str | None:
    """Return the only name in a folder that can be opened; None if there are none or several."""
    found = checkpoints_in(source)
    folders = _folders(source)
    if len(found) != 1 or len(folders) < sum(entry.is_dir for entry in source.entries.values()):
        return None
    return found[0] if found[0] not in folders or folders[found[0]] != _RUN else None


def _folders(source: Source) -> dict[str, str]:
    """Return subfolder -> the name of the reader that recognises it, `_RUN` if it holds checkpoints, else "".

    If there are many subfolders, only the first ones are inspected.
    """
    found: dict[str, str] = {}
    below = 0
    for name in sorted((n for n, e in source.entries.items() if e.is_dir), key=natural)[:_LOOKED]:
        if below > _BELOW:
            break
        found[name] = ""
        with suppress(LazyckptError, OSError):  # an unreadable folder is not offered
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
    """Return the error message that no reader recognises a source, with what there is instead."""
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
