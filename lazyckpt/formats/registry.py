"""The registry of readers. A path is read by the first reader that recognises it: built-in ones, then plug-ins.

All built-in readers are listed here; the module of a reader is imported when the reader is first needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..core.index import Index
from ..core.names import Names, matcher, natural
from ..errors import FormatError, LazyckptError, Problem, decoding, some
from ..io.memory import many_objects
from ..io.storage.base import Store
from .reader import GROUP, Reader, Source

# Module in this package, name of its Reader, and whether it also reads single files. Readers are tried in this order:
# a trainer's folder may contain files that other readers also recognise, so the more specific reader comes first.
_BUILTIN = (
    ("zarr.reader", "READER", True),  # no other format has its metadata documents
    ("orbax.reader", "READER", False),
    ("deepspeed.reader", "READER", False),
    ("trainers.verl", "ROLE", False),
    ("trainers.verl", "STEP", False),
    ("megatron.nemo", "READER", False),  # (its folders of ranks have the names of Megatron-LM's)
    ("megatron.reader", "READER", False),
    ("megatron.dist", "READER", False),
    ("megatron.fsdp", "READER", False),
    ("nanotron.reader", "READER", False),
    ("torchsnapshot", "READER", False),
    ("trainers.olmo", "READER", False),
    ("trainers.levanter", "READER", False),
    ("trainers.litgpt", "READER", False),
    ("trainers.colossalai", "READER", False),
    ("trainers.lightning", "READER", False),
    ("trainers.sharding", "READER", False),
    ("trainers.torchtune", "READER", False),
    ("tensor_parallel", "LLAMA", False),
    ("tensor_parallel", "FILES", False),
    ("torch_xla", "READER", False),
    ("ranks.reader", "READER", False),
    ("trainers.folder", "READER", False),
    ("dcp.reader", "READER", True),
    ("dcp.hub", "READER", False),
    ("skyrl", "READER", False),
    ("trainers.mlx", "READER", False),
    ("huggingface", "READER", True),
    ("gguf", "READER", True),
    ("safetensors", "READER", True),
    ("numpy_files", "READER", True),
    ("hdf5", "READER", True),
    ("flax", "READER", True),
    ("tensorflow", "READER", True),
    ("torchscript", "READER", True),
    ("torch_export", "READER", True),
    ("pickles", "READER", True),
    ("torch_save", "READER", True),
    ("zarr.reader", "FOLDER", False),
)
_FILES = (".pt", ".pt2", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf")
_FOLDERS = ("checkpoint-", "global_step", "step")  # prefixes of the names of checkpoints in a run's folder
_LOOKED = 32  # maximum number of subfolders that are examined
_BELOW = 100  # maximum number of folders in them; a link to "." would otherwise be followed again and again
HEADERS = 1200  # zip headers that are read when a checkpoint on a disk is opened; the others are deferred
_LISTED = 5  # maximum number of names in a message
_RUN = "run"


def _reader(module: str, name: str) -> Reader:
    reader: Reader = getattr(import_module(f".{module}", __package__), name)
    return reader


def builtin(files: bool = False) -> Iterator[Reader]:
    """Return the built-in readers in the order in which they are tried; with ``files``, those of single files only."""
    return (_reader(module, name) for module, name, of_files in _BUILTIN if of_files or not files)


def read_index(source: Source, format: str | None = None) -> Index:
    """Index a checkpoint with the reader named ``format``, or with the first reader that recognises it.

    Raises FormatError if there is no such reader, the reader's own errors for damaged and missing files, and
    CorruptError, with the cause, for every other exception of a reader.
    """
    if format is not None:
        for reader in readers():
            if reader.name == format:
                return _read_as(reader, source)
        near = Names(dict.fromkeys(reader.name for reader in readers())).near(format)
        hint = f": did you mean {' or '.join(map(repr, near))}?" if near else "."
        raise FormatError(f"no reader is named {format[:40]!r}{hint} `lazyckpt formats` lists all readers")
    found = recognising(source)
    if found is None:
        raise FormatError(unknown(source))
    return _read(found, source)


def readers() -> tuple[Reader, ...]:
    """Return all readers in the order in which they are tried: built-in ones, then those of other packages."""
    return (*builtin(), *_installed())


def recognising(source: Source) -> Reader | None:
    """Return the first reader that recognises a source, or None.

    Raises CorruptError, with the cause, for exceptions of a reader other than LazyckptError and OSError."""
    if "reader" not in source.known:
        source.known["reader"] = _recognising(source)
    found: Reader | None = source.known["reader"]
    return found


def _recognising(source: Source) -> Reader | None:
    with decoding(source.where, "looking at it"):
        for reader in builtin(files=bool(source.path)):
            if reader.recognises(source):
                return reader
    for reader in _installed():  # last, because listing entry points takes as long as opening a checkpoint
        with decoding(source.where, f"reader {reader.name!r}"):
            if reader.recognises(source):
                return reader
    return None


def _read_as(reader: Reader, source: Source) -> Index:
    """Index a source with the reader that the user named.

    Raises FormatError if the reader finds nothing and another reader recognises the source."""
    index, error = None, None
    try:
        index = _read(reader, source)
        if any(index.states.values()) or index.unreadable:
            return index
    except LazyckptError as e:
        error = e
    other = None
    with suppress(LazyckptError, OSError):  # on an error, the result of `reader` is used
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
    """Index a source with a reader. Zip headers beyond a limit are checked later, when their tensors are read."""
    store = source.store
    if not isinstance(store, Store):
        return reader.read(source)
    store.reads_of_headers, store.guards = HEADERS, {}
    try:
        index = reader.read(source)
        for path, guard in store.guards.items():
            guard.settle(store, path)
    finally:
        store.reads_of_headers = None
    return replace(index, guards=dict(store.guards)) if store.guards else index


def _with_unused(index: Index, rules: Mapping[str, Any]) -> Index:
    """Add a problem for every rule of the user that matches no tensor, because such a mistake has no other sign."""
    names = {*index.ruled, *(name for state in index.states.values() for name in state)} if rules else ()
    unused = [
        Problem(
            "unused-rule",
            f"rules[{glob!r}] matches no tensor: it has no effect (it is compared with full names, as the view lists "
            "them; a tied tensor has the name of its owner)",
        )
        for glob in rules
        if not any(map(matcher(glob), names))
    ]
    return replace(index, problems=(*index.problems, *unused)) if unused else index


def _installed() -> tuple[Reader, ...]:
    found = []
    for point in _points():
        try:
            found.append(point.load())
        except Exception as e:
            raise FormatError(f"the plug-in reader {point.name!r} ({point.value}) cannot be imported: {e}") from e
    return tuple(found)


def _points() -> tuple[EntryPoint, ...]:
    """Return the entry points of other packages' readers. They are listed anew when the folders of packages change."""
    return _listed(tuple((folder, _modified(folder or ".")) for folder in sys.path), tuple(map(id, sys.meta_path)))


@lru_cache(maxsize=1)
def _listed(_folders: object, _finders: object) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))  # takes milliseconds, and a folder may have many that no reader recognises


def _modified(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file's name has the ending of a checkpoint."""
    return name.lower().endswith(_FILES)


def checkpoints_in(source: Source) -> list[str]:
    """Return the names in a folder that can be opened: files by their endings, folders that a reader recognises, and
    folders that contain checkpoints."""
    files = sorted(
        (n for n, e in source.entries.items() if not e.is_dir and is_checkpoint_file(n) and n[0] != "."), key=natural
    )
    return files + [name for name, kind in _folders(source).items() if kind not in ("", "zarr-arrays")]


def only_checkpoint(source: Source) -> str | None:
    """Return the only name in a folder that can be opened; None if there is not exactly one."""
    found = checkpoints_in(source)
    folders = _folders(source)
    if len(found) != 1 or len(folders) < sum(entry.is_dir for entry in source.entries.values()):
        return None
    return found[0] if found[0] not in folders or folders[found[0]] != _RUN else None


def _folders(source: Source) -> dict[str, str]:
    """Return, for each subfolder, the name of the reader that recognises it, `_RUN` if it contains checkpoints, or "".

    If there are many subfolders, only the first ones are examined."""
    found: dict[str, str] = {}
    below = 0
    names = sorted((n for n, e in source.entries.items() if e.is_dir), key=natural)[:_LOOKED]
    source.list_all(names)
    for name in names:
        if below > _BELOW:
            break
        found[name] = ""
        with suppress(LazyckptError, OSError):  # an unreadable folder is not suggested to the user
            sub = Source(source.store.below(name), listings={"": source.inside(name)})
            if sub.entries == source.entries:  # a link to the folder itself
                continue
            below += sum(entry.is_dir for entry in sub.entries.values())
            reader = recognising(sub)
            if reader is not None:
                found[name] = reader.name
            elif any(n.startswith(_FOLDERS) or is_checkpoint_file(n) for n in sub.entries):
                found[name] = _RUN
    return found


# A file of a layout that no reader reads -> what wrote it, and what to do.
_REFUSED = {
    # smdistributed/modelparallel/torch/checkpoint_utils.py `save_checkpoint`; how tensor-parallel ranks cut a module is
    # in the library, not in the files
    "smp_config.pt": (
        "a partial checkpoint of SageMaker's model parallelism (smp.save_checkpoint), which is not read as a whole: "
        "load it with that library and save it with partial=False, or open the file of one rank by its own path"
    ),
}


def unknown(source: Source) -> str:
    """Return the error message for a source that no reader recognises, with a description of its content."""
    for name, what in _REFUSED.items():
        if name in source.entries:
            return f"{source.where} is {what}."
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
