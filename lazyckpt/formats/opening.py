"""Opening of a path or a URL: the store of its bytes and its index."""

from __future__ import annotations

import os
import posixpath
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.index import Index
from ..errors import LazyckptError, MissingFileError, Problem
from ..io.storage.access import present
from ..io.storage.base import Entry, Listing, Store
from ..io.storage.cache import configured
from ..io.storage.mounts import mode_of
from ..io.storage.urls import is_url
from ..io.system import after_fork
from ..io.user_folder import enabled
from . import links
from .archives import locate
from .cache.opening import Cached
from .cache.state import folders_of, is_large, rules_text
from .catalog import read_one
from .megatron.files import marker_of
from .reader import Source
from .registry import read_index, recognising
from .shared.wrappers import without_wrappers
from .zarr.documents import JOB

# -- The process's cache of indexes, valid as long as the files do not change.

_KEPT = 8  # indexes kept; an index is small compared to its checkpoint, but not negligible
_ENTRY = "entry of the index cache"  # in `Source.known`
_lock = threading.Lock()
Listings = Mapping[str, Mapping[str, Entry]]
_indexes: dict[tuple[Any, ...], tuple[Listings, Index]] = {}


def cached_index(source: Source, format: str | None) -> Index:
    """Return the result of `index_of`, cached as long as no file or folder that it read has changed.

    This process keeps the last indexes in memory, and compares names, sizes, times, inodes and versions. Those of large
    checkpoints are kept in files, too (`cache`)."""
    key = _key(source, format)
    if key is None:
        return index_of(source, format)
    found = None if _ENTRY in source.known else recalled(source, format)
    if found is not None:
        return found
    listable = source.store.listable
    if listable:
        source.listed("")  # before reading, so that later changes invalidate the entry
    index = index_of(source, format)
    if index.listed is not None:  # which chunks there are is looked up each time
        return index
    folders = {posixpath.dirname(path) for path in index.pins} | {""} if listable else set()
    kept: Cached | None = source.known[_ENTRY]
    if kept is not None:
        kept.save(index)
        folders.update(folders_of(source, index))
    _remember(key, index, {folder: source.listed(folder) for folder in folders})
    return index


def recalled(source: Source, format: str | None) -> Index | None:
    """Return the index of a checkpoint that was opened before and has not changed, else None."""
    key = _key(source, format)
    if key is None:
        return None
    found = _remembered(source, key)
    if found is not None:
        return found
    kept = Cached(source, format) if enabled() and is_large(source) else None
    source.known[_ENTRY] = kept
    loaded = None if kept is None else kept.load()
    if loaded is None:
        return None
    _remember(key, *loaded)
    return loaded[0]


def _key(source: Source, format: str | None) -> tuple[Any, ...] | None:
    """Return what identifies an index; None if there are rules that cannot be compared with those of another call."""
    rules = rules_text(source.rules) if source.rules else ""
    return None if rules is None else (source.store.key, source.path, source.tag, format, rules)


def _remembered(source: Source, key: tuple[Any, ...]) -> Index | None:
    with _lock:
        known = _indexes.get(key)
    if known is not None:
        listings, index = known
        if _unchanged(source, listings, index):
            return index
    return None


def _remember(key: tuple[Any, ...], index: Index, listings: Listings) -> None:
    with _lock:
        _indexes.pop(key, None)
        _indexes[key] = listings, index
        while len(_indexes) > _KEPT:
            del _indexes[next(iter(_indexes))]


def index_of(source: Source, format: str | None) -> Index:
    """Return the result of `read_index` under the model's own names."""
    return without_wrappers(read_index(source, format))


def _unchanged(source: Source, listings: Listings, index: Index) -> bool:
    """Return whether the listings of the folders are unchanged.

    http cannot list folders, so there the files are compared; that needs more than their sizes from the server."""
    if source.store.listable:
        return all(_equal(source.listed(folder), seen) for folder, seen in listings.items())
    for path, pin in index.pins.items():
        now = present(source.store, path)
        if now is None or not (pin.version or pin.mtime_ns) or not now.may_be(pin):
            return False
    return True


def _equal(now: Mapping[str, Entry], seen: Mapping[str, Entry]) -> bool:
    """Return whether two listings are equal, on a local disk with inodes: modification times can be set back."""
    changes = [listing.changes if isinstance(listing, Listing) else None for listing in (now, seen)]
    return now == seen and changes[0] == changes[1]


def _forget() -> None:
    """Replace the lock after a fork, because a thread of the parent may hold it."""
    global _lock
    _lock = threading.Lock()


after_fork(_forget)


# -- Opening.

# Names of files that are part of a checkpoint: a rank's file (DeepSpeed, FSDP, Meta's Llama), a shard, an optimizer.
_PART = re.compile(
    r".*rank[-_]?\d+.*|.*-\d{5}-of-(?!00001\.)\d{5}\..*|consolidated\.\d+\.pth|optimizer(_\d+)?\.(pt|bin)"
)
# A usual name of a file that is whole, too, but not beside the metadata of torch_checkpointing.
_ITEM = re.compile(r".+_\d+\.(safetensors|pt)")


def opened(
    path: str | os.PathLike[str],
    format: str | None,
    tag: str | None = None,
    rules: Mapping[str, Any] | None = None,
    cache: bool | str | os.PathLike[str] = True,
    storage_options: Mapping[str, Any] | None = None,
    io: str = "auto",
    unfinished: bool = False,
) -> tuple[Store, Index]:
    """Return the store and the index for `lazyckpt.open`; for a run's folder, those of the newest complete checkpoint
    or of ``tag``. ``unfinished``: also those of an export to a bucket that is not finished."""
    if not (tag is None or isinstance(tag, str)):
        raise TypeError(f"tag={tag!r}: the name of a checkpoint is due, a text such as 'checkpoint-500'")
    if not (rules is None or (isinstance(rules, Mapping) and all(isinstance(glob, str) for glob in rules))):
        raise TypeError("rules: a table of globs and merge rules is needed")
    url = os.fsdecode(path)
    mode_of(io)  # refuse a wrong mode also for a URL, where it has no effect
    blocks = configured(cache) if is_url(url) or isinstance(cache, str) else None
    store, name = locate(url, storage_options, io, lambda: blocks, bool(cache))

    def read(source: Source) -> Index:
        return cached_index(source, format) if cache else index_of(source, format)

    asked = source = Source(store, name, tag, rules)
    if is_url(url) and not name and not unfinished and store.listable and JOB in source.entries:
        raise MissingFileError(
            f"{source.where}: an export is being written there, or was interrupted. Run the same export again: it goes "
            "on where it stopped. (Or it is being removed by `lazyckpt prune`: run that again.)"
        )
    # of a large checkpoint, also finding out what to read takes long
    known = recalled(source, format) if cache and enabled() and is_large(source) else None
    source, index = read_one(source, read) if known is None else (source, known)
    if tag is None and (gone := links.lost(asked)):
        index = replace(index, problems=(*gone, *index.problems))
    if not is_url(url):  # listing a remote folder is expensive or impossible
        index = _marked(source, _one_of_many(source, index))
    elif unknown := [path for path, pin in index.pins.items() if not (pin.version or pin.mtime_ns)]:
        line = (
            f"the server gives neither an ETag nor a time of modification for {unknown[0]}: if the file is replaced "
            "by one of the same size, the new numbers are read without an error"
        )
        index = replace(index, problems=(*index.problems, Problem("unpinned-file", line, unknown[0])))
    source.store.pin(index.pins if index.listed is None else index.listed)
    if index.guards:
        source.store.guards = dict(index.guards)
    return source.store, index


def _marked(source: Source, index: Index) -> Index:
    """Add a problem to the index of a checkpoint that NeMo has not finished to save."""
    path = os.path.abspath(source.store.root)
    mark = marker_of(os.path.join(path, source.path) if source.path else path)
    if not os.path.exists(mark):
        return index
    line = (
        f"{os.path.basename(mark)} is beside it: NeMo has not finished this save, and removes it when it starts again"
    )
    return replace(index, problems=(Problem("unfinished-save", line, source.path or None), *index.problems))


def _one_of_many(source: Source, index: Index) -> Index:
    """Add a problem to the index of a file that is only part of the checkpoint in its folder, unless it has one, or the
    reader looked for the other files, too."""
    named = _PART.fullmatch(source.path)
    if not (named or _ITEM.fullmatch(source.path)) or index.files.keys() - {source.path}:
        return index
    if any(problem.code in ("part-of-checkpoint", "missing-file") for problem in index.problems):
        return index
    folder = source.around()
    try:
        reader = recognising(folder) if len(folder.entries) > 1 else None
    except (LazyckptError, OSError):  # the file itself is readable, and an unreadable folder adds no information
        return index
    if reader is None or (named is None and reader.name != "torch-checkpointing"):
        return index
    line = f"{source.path} is one file of a checkpoint ({reader.name}): open its folder, {folder.where}, for all of it"
    return replace(index, problems=(*index.problems, Problem("part-of-checkpoint", line, source.path)))
