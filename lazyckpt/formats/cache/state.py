"""Which checkpoints are worth an entry of the cache, and whether a checkpoint is still the one that was indexed.

Opening looks at the cache only where reading the index takes long: a folder with hundreds of files, or with megabytes
of metadata, or behind a network. A small local checkpoint is opened as if there were no cache.

An entry is used if all of these are as they were when the checkpoint was indexed:

- the path, the options, and lazyckpt itself;
- all folders of the checkpoint: names, sizes, modification times and, on a local disk, the times of the last change and
  the numbers of the inodes, which programs cannot set; at a URL the versions (ETag), without which nothing is kept;
- the first and the last bytes of some files, where headers and zip directories with their checksums are. This notices
  what file systems with coarse or wrong times hide, and files that were exchanged in another way.

A file that was changed in the last seconds is not trusted: it may change again without another modification time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import re
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.index import Index
from ...core.names import natural
from ...io.storage.base import Entry, Listing, Store
from ...io.storage.local import LocalStore
from ..reader import Source

MANY = 256  # entries of a folder; so many headers take about a tenth of a second
LARGE = 4 << 20  # bytes of metadata; parsing takes as long
_METADATA = (".metadata", ".index.json", ".index.fp16.json", ".index.bf16.json")
_BELOW = 4  # subfolders that are looked at, the last ones by name
_ZARR = ("zarr.json", ".zgroup", ".zmetadata")  # the files of hierarchies are looked at on use
TICK = 2 * 10**9  # nanoseconds, the coarsest times of file systems (FAT); NFS has seconds
_PROBES = 64  # files of which both ends are read
_END = 4 << 10  # bytes of each end
_BITS = (1 << 63) - 1
_IMPORTED = time.time_ns()
_PLAIN = (str, int, float, bool, type(None))


def is_large(source: Source) -> bool:
    """Return whether a checkpoint is worth an entry. Reads nothing; lists at most a few folders."""
    store = source.store
    if source.path or not store.listable or not (type(store) is LocalStore or store.is_remote):
        return False
    entries = source.entries
    if len(entries) >= MANY or any(e.info.size >= LARGE and n.endswith(_METADATA) for n, e in entries.items()):
        return True
    if any(name in entries for name in _ZARR):
        return False
    if store.is_remote:  # each file takes a request
        return bool(entries)
    folders = sorted((n for n, e in entries.items() if e.is_dir and not n.startswith(".")), key=natural)
    if source.tag is not None:
        folders = [source.tag] if source.tag in folders else []
    else:
        folders = folders[-_BELOW:]
    return any(_is_large(source.listed(folder)) for folder in folders)


def _is_large(entries: Mapping[str, Entry]) -> bool:
    if len(entries) >= MANY:
        return True
    return any(e.info.size >= LARGE and n.endswith(_METADATA) for n, e in entries.items())


def key_of(source: Source, format: str | None) -> str | None:
    """Return a text that identifies a checkpoint and the options of opening it; None if there is none.

    The path is as the user spells it, because problems name it."""
    rules = rules_text(source.rules)
    return None if rules is None else text_of(source.store, source.path, source.tag, format, rules)


def text_of(store: Store, *what: object) -> str | None:
    """Return a text that identifies something in a store and the options of the store; None if there is none."""
    options = dict(store.options)
    own = program()
    if own is None or not _is_plain(options):
        return None
    return repr((own, store.root, *what, sorted(options.items())))


def shown(where: str) -> str:
    """Return a path or URL without a user name and password in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", where)


def rules_text(rules: Mapping[str, Any]) -> str | None:
    """Return a text that identifies merge rules; None if they are no plain data."""
    table = dict(rules)
    return repr(table) if _is_plain(table) else None


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple):
        inner = [one for pair in value.items() for one in pair] if type(value) is dict else value
        return all(map(_is_plain, inner))
    return type(value) in _PLAIN


@functools.cache
def program() -> str | None:
    """Return a text that identifies this version of lazyckpt, also between releases; None if another version has been
    installed since this process began."""
    root = Path(__file__).parents[2]
    found = [(root / "__init__.py").stat()]
    for room in ("core", "formats", "io", "layouts"):
        for folder, _, names in os.walk(root / room):
            found += [os.stat(os.path.join(folder, name)) for name in sorted(names) if name.endswith((".py", ".toml"))]
    if max(max(status.st_mtime_ns, status.st_ctime_ns) for status in found) > _IMPORTED:
        return None
    text = repr([(status.st_size, status.st_mtime_ns) for status in found])
    return hashlib.sha256(text.encode()).hexdigest()


def folders_of(source: Source, index: Index) -> list[str]:
    """Return the folders that the index depends on: those of its files and of all others that were read, and those
    above them."""
    found = {"", *source.folders}
    for path in (*index.pins, *source.store.seen):
        folder = posixpath.dirname(path)
        while folder and folder not in found:
            found.add(folder)
            folder = posixpath.dirname(folder)
    return sorted(found)


def mark(listing: Mapping[str, Entry]) -> str | None:
    """Return a hash of the state of a folder's entries; None if it would not change with each change of a file."""
    found = hashlib.sha256()
    numbers = array("q")
    if isinstance(listing, Listing):
        changes = dict(zip(listing, listing.changes, strict=True))
        names = sorted(listing)
        for name in names:
            (size, mtime, _), is_dir = listing[name]
            changed, inode = changes[name]
            numbers.extend((size & _BITS, mtime & _BITS, changed & _BITS, inode & _BITS, is_dir))
        texts: Iterable[str] = names
    else:
        names = sorted(listing)
        if not all(listing[name].info.version or listing[name].is_dir for name in names):
            return None
        numbers.extend(n & _BITS for name in names for n in (*listing[name].info[:2], listing[name].is_dir))
        texts = (text for name in names for text in (name, listing[name].info.version))
    found.update(json.dumps(list(texts)).encode())
    found.update(numbers.tobytes())
    return found.hexdigest()


def mark_of_file(store: Store, name: str) -> str:
    """Return the time of the last change and the inode of a local file: a modification time can be set back. Empty for
    a file behind a network, and one that is not there."""
    if not isinstance(store, LocalStore):
        return ""
    try:
        s = os.stat(os.path.join(store.root, name))
    except OSError:
        return ""
    return f"{s.st_ctime_ns} {s.st_ino}"


def newest(listing: Mapping[str, Entry]) -> int:
    """Return the time of the last change of an entry, in nanoseconds; 0 where versions tell of changes."""
    if not isinstance(listing, Listing):
        return 0
    times = max((entry.info.mtime_ns for entry in listing.values()), default=0)
    return max([times, *(changed for changed, _ in listing.changes)])


def probes_of(store: Store, index: Index) -> list[str]:
    """Return the files whose ends are to be compared: evenly spaced ones, and those that name the others."""
    if not isinstance(store, LocalStore):  # versions identify the content
        return []
    files, others = sorted(index.pins), sorted(path for path in store.seen if path not in index.pins)
    step = max(1, -(-len(files) // _PROBES))
    return [*dict.fromkeys([*others[:_PROBES], *files[::step], *files[-1:]])]


def probed(store: Store, paths: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Return a hash of both ends of files. Raises LazyckptError, OSError."""
    found = hashlib.sha256()
    for path in paths:
        size = sizes[path]
        found.update(f"{path}\0{size}\0".encode("utf-8", "surrogatepass"))
        if size <= 2 * _END:
            found.update(store.read(path, 0, size))
        else:
            found.update(store.read(path, 0, _END))
            found.update(store.read(path, size - _END, _END))
    return found.hexdigest()
