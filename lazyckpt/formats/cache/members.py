"""Tables of archives: which members a tar or a zip has, and where.

To find the members of a tar of large files takes a request for each of them. An entry is used as long as the archive
has the same size, time and version, and on a disk also the same inode, time of change and ends. It is read by the
builder that reads archives, so it can claim no more than an archive can.
"""

from __future__ import annotations

import json
import logging
import posixpath
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.index import FileInfo
from ...io.containers.zip_folder import LARGEST_TEXT
from ...io.limits import Budget
from ...io.storage.base import Store
from ...io.storage.local import LocalStore
from ...io.storage.members import Member, Tree
from ...io.user_folder import Refused
from . import entries, folder, state

_log = logging.getLogger("lazyckpt.cache")
_PLAIN = -1  # in place of the number of bytes of a deflated member
ARCHIVE = "archive"  # the key of an archive's state in the description


class KeptMembers:
    """The entry of an archive, which may not exist yet. Create it before the archive is read.

    Parameters
    ----------
    store, name
        The archive.
    info
        Its state.
    mark
        The time of the last change and the inode of a local file.
    """

    def __init__(self, store: Store, name: str, info: FileInfo, mark: str) -> None:
        self._store, self._name, self._info, self._mark = store, name, info, mark
        self._began = time.time_ns()
        self._where = f"{store.root}/{name}"
        self._key = state.text_of(store, "members", name)

    def load(self) -> Tree | None:
        """Return the members; None if there is no entry that may be used."""
        if self._key is None or not self._is_told:
            return None
        try:
            with folder.opened() as place:
                entry = place.fingerprint(self._key)[:40]
                about, sections = entries.described(place.read(entry), entry, place.path)
                if about["key"] != place.fingerprint(self._key):
                    raise Refused(f"{entry} is that of another archive")
            if about[ARCHIVE] != state_of(self._store, self._name, self._info, self._mark):
                _log.debug("%s has changed since its members were kept", self._where)
                return None
            return tree_of(sections, self._where, self._info.size)
        except FileNotFoundError:
            return None
        except entries.FAILURES as e:
            _log.debug("the kept members of %s are not used: %s", self._where, e)
            return None

    def save(self, tree: Tree) -> None:
        """Keep the members of an archive that was just read. A small archive on a disk is not worth an entry."""
        if self._key is None or not self._is_told or (not self._store.is_remote and len(tree.files) < state.MANY):
            return
        if self._mark and max(self._info.mtime_ns, int(self._mark.split()[0])) > self._began - state.TICK:
            return  # it has just been written
        try:
            about = {
                "where": state.shown(self._where),
                "tag": None,
                "local": not self._store.is_remote,
                "format": "members of an archive",
                "tensors": 0,
                "files": len(tree.files),
                "written": time.time(),
                ARCHIVE: state_of(self._store, self._name, self._info, self._mark),
            }
            with folder.opened(make=True) as place:
                place.secret(make=True)
                about["key"] = place.fingerprint(self._key)
                place.write(place.fingerprint(self._key)[:40], entries.packed(about, sections_of(tree)))
        except entries.FAILURES as e:
            _log.debug("the members of %s cannot be kept: %s", self._where, e)

    @property
    def _is_told(self) -> bool:
        """Whether a change of the archive shows."""
        return bool(self._info.version if self._store.is_remote else self._mark)


def state_of(store: Store, name: str, info: FileInfo, mark: str) -> list[Any]:
    """Return what an archive has in common with the one whose members are kept. Raises LazyckptError, OSError."""
    ends = state.probed(store, [name], {name: info.size}) if isinstance(store, LocalStore) else ""
    return [*info, mark, ends]


def is_unchanged(where: str, kept: list[Any]) -> bool:
    """Return whether a local archive is the one whose members are kept. Raises LazyckptError, OSError."""
    above, name = posixpath.split(where)
    store = LocalStore(above)
    return state_of(store, name, store.stat(name), state.mark_of_file(store, name)) == kept


def sections_of(tree: Tree) -> list[tuple[str, str, bytes]]:
    """Return the members as sections of an entry."""
    rows: list[tuple[int, int, int, int]] = []
    names: list[list[Any]] = []  # a name; the row of a file, the target of a link, or None for a folder
    for above, inside in tree.folders.items():  # folders are before what is in them
        for last in inside:
            name = f"{above}/{last}" if above else last
            member = tree.files.get(name)
            if member is None:
                names.append([name, tree.links.get(name)])
                continue
            names.append([name, len(rows)])
            rows.append((member.offset, member.size, _PLAIN if member.stored is None else member.stored, member.crc))
    columns = np.array(rows, np.int64).reshape(len(rows), 4)
    return [("columns", "I64", columns.tobytes()), ("names", "U8", json.dumps(names).encode())]


def tree_of(sections: Mapping[str, memoryview], where: str, size: int) -> Tree:
    """Return the members of an archive of ``size`` bytes. Raises ValueError, LookupError, TypeError or CorruptError for
    a damaged entry."""
    columns = np.frombuffer(sections["columns"], np.int64).reshape(-1, 4)
    offset, nbytes, stored, _ = columns.T
    taken = np.where(stored == _PLAIN, nbytes, stored)
    if len(columns) and (min(offset.min(), nbytes.min(), taken.min()) < 0 or (taken > size - offset).any()):
        raise ValueError("a member is outside of the archive")
    if (nbytes[stored != _PLAIN] > LARGEST_TEXT).any():
        raise ValueError("a member is compressed, and too large for that")
    budget = Budget(where, size)
    tree = Tree(where, budget)
    rows = columns.tolist()
    for name, what in json.loads(bytes(sections["names"])):
        if what is None:
            tree.add(name, None)
        elif isinstance(what, str):
            tree.add_link(name, what)
        else:
            at, count, packed, crc = rows[what]
            if packed != _PLAIN:
                budget.inflated(count)
            tree.add(name, Member(at, count) if packed == _PLAIN else Member(at, count, packed, crc))
    return tree.finish()
