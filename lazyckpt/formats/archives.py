"""Paths of users that lead into archives: a folder that was packed as a tar or a zip opens as the folder would.

An archive that is a checkpoint itself (a zip of torch.save or of Zarr, a `checkpoint.pth.tar` of torch.save) is a file
for the reader of its format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import DestinationError, FormatError, MissingFileError
from ..io.containers.tar import is_tar, read_tar
from ..io.containers.torch_tar import is_torch_tar
from ..io.containers.zip import ZIP_MAGIC, read_zip
from ..io.containers.zip_folder import read_zip_folder
from ..io.storage.archive import ArchiveStore, archive_store
from ..io.storage.base import Store
from ..io.storage.cache import BlockCache, configured
from ..io.storage.credentials import without_secrets
from ..io.storage.local import split
from ..io.storage.members import Tree
from ..io.storage.remote import Remote
from ..io.storage.streams import StoreFile
from ..io.storage.urls import is_url, split_url
from ..io.user_folder import enabled
from .cache.members import KeptMembers
from .cache.state import mark_of_file
from .catalog import is_step_folder
from .zarr.tree import ROOTS

_ENDINGS = (".tar", ".zip", ".nemo")  # .nemo: a tar of NeMo, compressed in versions before 1.7
_NEMO = ".nemo"
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst", ".tar.lz4")
_MAGICS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_INSIDE = re.compile(r"(\w[\w+.-]*://[^/]*/.*?\.(?:tar|zip|nemo))/(.*[^/])/*", re.IGNORECASE)
_HEAD, _TAIL = 32 << 10, 64 << 10  # bytes of the two ends that are read at once
_FILES = (
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".gguf",
    ".distcp",
    ".metadata",
)  # the endings of files of checkpoints
_KEPT = 4  # tables that are kept, of the archives that were opened last
_trees: dict[tuple[Any, ...], Tree] = {}


def locate(
    path: str,
    storage_options: Mapping[str, Any] | None = None,
    io: str = "auto",
    cache: Callable[[], BlockCache | None] = configured,
    kept: bool = False,
) -> tuple[Store, str]:
    """Return the store of a user's path or URL and the name in it, as `urls.split_url` does, but with the folder in an
    archive for a path of an archive, or of what is in one. ``io``: see `LocalStore`. ``cache`` returns the block cache
    of a remote store. ``kept``: tables of archives are kept in the index cache, and taken from it.

    Raises MissingFileError if there is nothing at the path, and the errors of a damaged archive.
    """
    store: Store
    inside = ""
    if is_url(path):
        match = _INSIDE.fullmatch(path)
        found = None if match is None else _file_at(match[1], storage_options)
        store, name = found or split_url(path, storage_options)
        inside = match[2] if match is not None and found else ""
    else:
        try:
            store, name = split(path, io)
        except MissingFileError:
            outer = _outer(path)
            if outer is None:
                raise
            (store, name), inside = split(outer[0], io), outer[1]
    if isinstance(store, Remote):
        store.cache = cache()
    archive = opened_archive(store, name, kept) if name else None
    if archive is None:
        if inside:
            raise MissingFileError(f"{store.root}/{name} is a file that holds no folder: there is no {inside!r} in it")
        return store, name
    return _within(archive, inside) if inside else (_top(archive), "")


def check_outside(path: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise DestinationError for a path or URL that leads into an archive, which is only read. Costs a request only if
    a folder in the URL has the name of an archive."""
    if is_url(path):
        match = _INSIDE.fullmatch(path)
        found = match[1] if match is not None and _file_at(match[1], storage_options) else None
    else:
        found = (_outer(path) or (None,))[0]
    if found is not None:
        raise only_read(without_secrets(found, storage_options or {}))


def is_archive(name: str) -> bool:
    """Return whether a file has the name of an archive."""
    return name.lower().endswith(_ENDINGS)


def only_read(where: str) -> DestinationError:
    """Return the error for a change of an archive."""
    return DestinationError(
        f"{where} is an archive, which is only read: choose another place, or unpack it and change the folder"
    )


def opened_archive(store: Store, name: str, kept: bool = False) -> ArchiveStore | None:
    """Return the folder in an archive; None if the file is none, or a checkpoint itself. ``kept``: see `locate`."""
    low = name.lower()
    if low.endswith((*_PACKED, _NEMO)):
        _refuse_packed(store, name)
    if not is_archive(low):
        return None
    info = store.stat(name)
    mark = mark_of_file(store, name)
    inner = store.pinned({name: info})
    key = (store.key, name, info, mark)
    tree = _trees.get(key) if info.version or info.mtime_ns else None
    entry = KeptMembers(store, name, info, mark) if tree is None and kept and enabled() else None
    if entry is not None:
        tree = entry.load()
    if tree is None:
        tree = _read(StoreFile(inner, name, tail=_TAIL if inner.gap else 1 << 13, head=_HEAD if inner.gap else 0), low)
        if tree is None:
            return None
        if entry is not None:
            entry.save(tree)
    _trees[key] = tree
    for old in list(_trees)[:-_KEPT]:
        _trees.pop(old, None)
    return archive_store(inner, name, tree, mark=mark)


def _read(file: StoreFile, name: str) -> Tree | None:
    head = file.at(0, min(512, file.size))
    if name.endswith((".tar", _NEMO)):
        tree = read_tar(file) if is_tar(head) else None
        return None if tree is None or is_torch_tar(tree) else tree
    if not head.startswith(ZIP_MAGIC) or not _may_be_folder(_first(head)):
        return None
    found = read_zip(file)
    names = [entry.name for entry in found.entries]
    is_folder = all(map(_may_be_folder, names)) and any(name.endswith(_FILES) for name in names)
    return read_zip_folder(file, found) if is_folder else None


def _first(head: bytes) -> str:
    """Return the name of the first record of a zip."""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].decode("utf-8", "replace")


def _may_be_folder(name: str) -> bool:
    """Return False for the name of a record that zips of torch.save, of torch.export or of Zarr have at the top."""
    parts = name.split("/")
    return len(parts) > 2 or parts[-1] not in ("data.pkl", "constants.pkl", "archive_format", *ROOTS, ".zattrs")


def _refuse_packed(store: Store, name: str) -> None:
    """Raise FormatError if a file is a compressed tar."""
    head = bytes(store.read(name, 0, min(6, store.stat(name).size)))
    if head.startswith(_MAGICS):
        again = "or pack the folder without compression (tar -cf)"
        if name.lower().endswith(_NEMO):
            again = f"or decompress it: gunzip -c {name} > plain{_NEMO} (NeMo writes plain ones since 1.7)"
        raise FormatError(
            f"{store.root}/{name} is a compressed tar, which cannot be read by ranges: unpack it and open the folder, "
            f"{again}"
        )


def _top(archive: ArchiveStore) -> Store:
    """Return the folder that was packed: the only folder of the archive, or the archive."""
    entries = archive.list()
    if len(entries) == 1:
        (name, entry), *_ = entries.items()
        if entry.is_dir and not is_step_folder(name):
            return archive.below(name)
    return archive


def _within(archive: ArchiveStore, path: str) -> tuple[Store, str]:
    """Return the store and the name for a path in an archive."""
    folder, _, name = path.rpartition("/")
    entry = archive.list(folder).get(name)
    if entry is None:
        raise MissingFileError(f"{archive.root}/{path}: no such file or folder in the archive")
    if entry.is_dir:
        return archive.below(path), ""
    return (archive.below(folder) if folder else archive), name


def _file_at(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Store, str] | None:
    """Return the store and the name for a URL if there is a file."""
    try:
        store, name = split_url(url, storage_options)
    except MissingFileError:
        return None
    return (store, name) if name else None


def _outer(path: str) -> tuple[str, str] | None:
    """Return the path of the archive that a local path leads into, and the path in it."""
    full = Path(os.path.expanduser(path))
    for above in full.parents:
        if above.name.lower().endswith(_ENDINGS) and above.is_file():
            return str(above), full.relative_to(above).as_posix()
    return None
