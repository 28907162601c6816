"""Finding and keeping indexes. Neither fails: what cannot be used or written is said to the log "lazyckpt.cache"."""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Mapping
from typing import Any

from ...core.index import FileInfo, Index
from ...errors import LazyckptError
from ...io.memory import many_objects
from ...io.storage.base import Entry
from ...io.storage.local import LocalStore
from ...io.user_folder import Refused
from ..reader import Source
from . import entries, folder, members, state
from .values import NotKept

_log = logging.getLogger("lazyckpt.cache")


class Cached:
    """The entry of a checkpoint, which may not exist yet. Create it before the checkpoint is read.

    Parameters
    ----------
    source
        The folder that is opened; one that is worth an entry (`state.is_large`).
    format
        The reader that the user chose.
    """

    def __init__(self, source: Source, format: str | None) -> None:
        self._source, self._format = source, format
        self._began = time.time_ns()
        self._key = state.key_of(source, format)
        self._hopeless = False  # whether it is known already that the index cannot be kept

    def load(self) -> tuple[Index, dict[str, Mapping[str, Entry]]] | None:
        """Return the index and the listings that it was compared with; None if there is none that may be used."""
        if self._key is None:
            return None
        try:
            with folder.opened() as place:
                name = self._name(place)
                about, sections = entries.described(place.read(name), name, place.path)
            if about["key"] != place.fingerprint(self._key):
                raise Refused(f"{name} is that of another checkpoint")
            listings = unchanged(self._source, about)
            if listings is None:
                _log.debug("%s has changed since it was indexed", self._source.where)
                return None
            if "why" in about:
                self._hopeless = True
                return None
            return entries.index_of(about, sections, self._source.store), listings
        except FileNotFoundError:
            return None
        except entries.FAILURES as e:
            _log.debug("the cached index of %s is not used: %s", self._source.where, e)
            return None

    def save(self, index: Index) -> None:
        """Keep an index that was just read."""
        if self._key is None or self._hopeless:
            return
        try:
            about = self._described(index)
            with folder.opened(make=True) as place:
                place.secret(make=True)
                about["key"] = place.fingerprint(self._key)
                try:
                    with many_objects():
                        data = entries.payload(about, index, self._source.store)
                except (NotKept, RecursionError) as e:
                    _log.debug("the index of %s is not kept: %s", self._source.where, e)
                    data = entries.payload({**about, "why": str(e) or "nested too deep"})
                place.write(self._name(place), data)
        except NotKept as e:
            _log.debug("the index of %s is not kept: %s", self._source.where, e)
        except entries.FAILURES as e:
            _log.debug("the index of %s cannot be kept: %s", self._source.where, e)

    def _name(self, place: folder.Folder) -> str:
        assert self._key is not None
        return place.fingerprint(self._key)[:40]

    def _described(self, index: Index) -> dict[str, Any]:
        """Return the description of an entry. Raises NotKept if a file has changed while it was read, or may change
        without a trace."""
        source, store = self._source, self._source.store
        reader = source.known.get("reader")
        if (reader is not None or self._format is not None) and not _is_own(reader, self._format):
            raise NotKept("a reader of another package has read it")
        folders = state.folders_of(source, index)
        listings = {one: source.listed(one) for one in folders}
        states = [*index.pins.items(), *store.seen.items()]
        for path, info in states:
            entry = listings[posixpath.dirname(path)].get(posixpath.basename(path))
            listed = FileInfo(0, 0) if entry is None or entry.is_dir else entry.info
            if not info.may_be(listed):
                raise NotKept(f"{path} is not as its folder lists it")
        marks = [[one, state.mark(listing)] for one, listing in listings.items()]
        if any(hashed is None for _, hashed in marks):
            raise NotKept("the server gives no versions of the files")
        if max(map(state.newest, listings.values())) > self._began - state.TICK:
            raise NotKept("a file has just been written")
        probes = [path for path in state.probes_of(store, index) if _size(listings, path) is not None]
        sizes = {path: _size(listings, path) or 0 for path in probes}
        return {
            "where": state.shown(source.where),
            "tag": source.tag,
            "local": isinstance(store, LocalStore),
            "format": index.format,
            "tensors": sum(map(len, index.states.values())),
            "files": len(index.pins),
            "written": time.time(),
            "folders": marks,
            "probes": probes,
            "probed": state.probed(store, probes, sizes),
        }


def unchanged(source: Source, about: Mapping[str, Any]) -> dict[str, Mapping[str, Entry]] | None:
    """Return the listings of a checkpoint's folders if it is the one that an entry describes, else None. Raises
    LazyckptError, OSError, LookupError."""
    listings = {}
    for one, hashed in about["folders"]:
        listing = listings[one] = source.listed(one)
        if state.mark(listing) != hashed:
            return None
    probes = about["probes"]
    sizes = {path: _size(listings, path) or 0 for path in probes}
    return listings if state.probed(source.store, probes, sizes) == about["probed"] else None


def _size(listings: Mapping[str, Mapping[str, Entry]], path: str) -> int | None:
    """Return the size of a file by the listing of its folder, None if there is no such file."""
    entry = listings[posixpath.dirname(path)].get(posixpath.basename(path))
    return None if entry is None or entry.is_dir else entry.info.size


def _is_own(reader: Any, format: str | None) -> bool:
    """Return whether a built-in reader was used."""
    from ..registry import builtin

    if format is not None:
        return any(own.name == format for own in builtin())
    return any(own is reader for own in builtin())


# -- For users: what is there.


def kept() -> list[dict[str, Any]]:
    """Return the description of each entry, the last used first, with its ``name``, ``nbytes``, ``used`` and ``state``:
    "valid", "changed", "not kept: why", or why it cannot be used. Raises Refused; OSError if there is no cache."""
    found = []
    with folder.opened() as place:
        unusable = _without_key(place)
        for stored in place.entries():
            row: dict[str, Any] = {"name": stored.name, "nbytes": stored.nbytes, "used": stored.used}
            if unusable:
                found.append(row | {"state": unusable})
                continue
            try:
                about, _ = entries.described(place.read(stored.name, use=False), stored.name, place.path)
                row |= {key: about[key] for key in ("where", "tag", "format", "tensors", "files", "written")}
                row["state"] = f"not kept: {about['why']}" if "why" in about else _state(about)
            except FileNotFoundError:
                continue
            except entries.FAILURES as e:
                row["state"] = f"unusable: {e}"
            found.append(row)
    return found


def _without_key(place: folder.Folder) -> str:
    """Return why no entry can be used; "" if the key can be read."""
    try:
        place.secret()
    except FileNotFoundError:
        return "unusable: the key of the cache is gone"
    except (Refused, OSError) as e:
        return f"unusable: {e}"
    return ""


def _state(about: Mapping[str, Any]) -> str:
    if not about["local"]:
        return "remote"
    try:
        if members.ARCHIVE in about:
            return "valid" if members.is_unchanged(about["where"], about[members.ARCHIVE]) else "changed"
        return "changed" if unchanged(Source(LocalStore(about["where"])), about) is None else "valid"
    except (LazyckptError, OSError):
        return "changed"


def clear(where: str | None = None) -> int:
    """Remove all entries, or those of one path; return how many. Raises Refused; OSError if there is no cache."""
    with folder.opened() as place:
        names = [stored.name for stored in place.entries()]
        if where is not None:
            names = [row["name"] for row in kept() if row.get("where") == state.shown(where)]
        for name in names:
            place.remove(name)
    return len(names)
