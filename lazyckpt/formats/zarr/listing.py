"""The states of a hierarchy's chunks, from listings that are made when it is opened.

A hierarchy whose chunks are pinned one by one, each at its first read, could be read half from before and half from
after it is written anew. A listing of a thousand chunks is one request (on a local disk, some milliseconds), so chunks
are pinned when the hierarchy is opened, also those that are absent. The rest of `Listed` says what happens where there
is no listing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ...core.chunking import grid_of
from ...core.index import FileInfo
from ...io.pool import each
from ...io.storage.base import Store, changed
from ...io.storage.listed import Folder, Listed
from .grid import GridFragments

_PAGE = 1000  # files that a request lists
_REMOTE = 64 * _PAGE  # chunks that are listed in all; more take long, and much memory
_LOCAL = 1 << 10  # each may be in a folder of its own, which takes 50 us
_DOCUMENTS = 8  # files beside the chunks in the folder of an array


def listed(store: Store, documents: Mapping[str, FileInfo], arrays: Mapping[str, GridFragments]) -> Listed:
    """Return the documents, and the chunks of all arrays as they are now, as far as they can be listed.

    Parameters
    ----------
    store
        The store of the hierarchy.
    documents
        The documents that were read.
    arrays
        The arrays by their folder.

    Raises
    ------
    ChangedFileError
        A document was replaced after it was read.
    """
    files: dict[str, FileInfo] = {}
    whole = _list(store, arrays, files) if isinstance(store, Store) else set()
    if files:
        for path, info in documents.items():
            if path in files and not info.may_be(files[path]):
                raise changed(store.root, path, info, files[path])
            if path not in files and not posixpath.dirname(path):
                store.verify(path)
    folders = {
        path: Folder(replace(array, keys=None).holds, path in whole, "" if path in whole else _of(path, documents))
        for path, array in arrays.items()
    }
    chunks = {path: info for path, info in files.items() if path not in documents}
    covering = Listed({}, folders)
    keys: dict[str, list[str]] = {path: [] for path in whole}
    for path in list(chunks):
        folder = covering.folder(path)
        if folder is None:
            del chunks[path]
        elif folder in whole:
            keys[folder].append(path[len(folder) :].lstrip("/"))
    for folder, found in keys.items():
        one = arrays[folder].keys
        if one is not None:
            one.take(found)
    return Listed(chunks | dict(documents), folders)


def _list(store: Store, arrays: Mapping[str, GridFragments], files: dict[str, FileInfo]) -> set[str]:
    """Add the files of arrays to ``files``; return the folders of those of which all files were listed."""
    if not arrays or not (store.is_remote or not store.gap):  # on a network file system, each file takes a request
        return set()
    sizes = {path: prod(grid_of(one.array.shape, one.array.chunk)) for path, one in arrays.items()}
    left = total = _REMOTE if store.is_remote else _LOCAL
    expected = sum(sizes.values()) + len(arrays)
    rounds = max(len(arrays) / store.width, min(max(sizes.values()), total) / _PAGE)  # with a listing for each array
    if expected <= total and (not store.is_remote or expected / _PAGE <= max(4, rounds)):
        found = store.tree("", total + _DOCUMENTS * len(arrays))
        if found is not None:
            files.update(found)
            return set(arrays)
    limits: dict[str, int] = {}
    for path in sorted(sizes, key=lambda path: sizes[path]):
        # of the large arrays, those are listed that have few chunks, if a request can tell
        limits[path] = sizes[path] if sizes[path] <= left else _PAGE if store.is_remote else 0
        left -= min(left, sizes[path])
    whole: set[str] = set()

    def one(path: str) -> None:
        found = store.tree(path, limits[path] + _DOCUMENTS)
        if found is not None:
            files.update(found)
            whole.add(path)

    each(one, [path for path in arrays if limits[path]], store.width if store.is_remote else 1)
    return whole


def _of(folder: str, documents: Mapping[str, FileInfo]) -> str:
    """Return the document that describes an array: its own, or that of a group above it."""
    while True:
        for name in ("zarr.json", ".zarray", ".zmetadata", ".zgroup"):
            path = posixpath.join(folder, name)
            if path in documents:
                return path
        if not folder:
            return ""
        folder = posixpath.dirname(folder)
