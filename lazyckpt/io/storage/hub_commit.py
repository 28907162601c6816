"""What the stores of one commit on the Hub share: its listing, its files in huggingface_hub's cache, its connection.

A commit does not change, so its listing is kept, also for the next store of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

from ...core.index import FileInfo
from .base import Entry
from .hub_cache import Snapshot
from .hub_errors import NoEntryError
from .hub_requests import Connection
from .hub_url import Place

_PAGES = 3  # pages of a recursive listing, after which the folders of a large repository are listed one by one
_KEPT = 8  # commits whose listings are kept
_Page = tuple[list[dict[str, Any]], str]  # entries, and the URL of the next page
_Repeated = Callable[[Callable[[], _Page]], _Page]


class Tree:
    """What is known of the listing of a commit."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Entry]] = {}
        self.whole: list[str] = []  # folders that were listed with everything below them
        self.is_large = False  # the folders are listed one by one

    def get(self, folder: str) -> Mapping[str, Entry] | None:
        """Return the entries of a folder, {} if there is no such folder, None if that is unknown."""
        found = self.folders.get(folder)
        if found is None and any(folder.startswith(f"{above}/" if above else "") for above in self.whole):
            return {}
        return found

    def add(self, folder: str, entries: Iterable[Mapping[str, Any]], recursive: bool) -> None:
        """Add the answer to a request for the listing of a folder."""
        folders: dict[str, dict[str, Entry]] = {folder: {}}
        for entry in entries:
            path = entry.get("path")
            if isinstance(path, str) and path:
                above, _, name = path.rpartition("/")
                is_dir = entry.get("type") == "directory"
                folders.setdefault(above, {})[name] = Entry(FileInfo(0, 0) if is_dir else _info(entry), is_dir)
        self.folders.update(folders)
        if recursive:
            self.whole.append(folder)


_trees: dict[tuple[str, str], Tree] = {}  # of the last commits: endpoint and URL -> listing


def _tree_of(endpoint: str, url: str) -> Tree:
    tree = _trees.pop((endpoint, url), None) or Tree()
    _trees[endpoint, url] = tree
    while len(_trees) > _KEPT:
        _trees.pop(next(iter(_trees)), None)
    return tree


class Commit:
    """What the stores of one commit share: the connection, the listing, and what is known of the cache.

    Parameters
    ----------
    place
        The repository, with the commit as its revision.
    connection
        Its requests.
    cache_dir
        The folder of huggingface_hub's cache, None for that of its settings.
    offline
        Whether only the cache is read.
    """

    def __init__(self, place: Place, connection: Connection, cache_dir: str | None, offline: bool) -> None:
        self.place = place
        self.connection = connection
        self.snapshot = Snapshot(place, cache_dir)
        self.offline = offline
        self.local: dict[str, FileInfo] = {}  # the files that are read from the cache, as they are there
        self._states: dict[str, FileInfo | None] = {}  # path -> its state if it is read from the cache
        self._has_snapshot = self.snapshot.root.is_dir()

    @cached_property
    def _tree(self) -> Tree:
        return _tree_of(self.connection.endpoint, self.place.url)

    def cached(self, path: str, wanted: FileInfo | None) -> FileInfo | None:
        """Return the state of a file that is read from the cache, None if it is read from the Hub."""
        if not self._has_snapshot:
            return None
        if path not in self._states:
            state = self.snapshot.state(path)
            if wanted is None:
                folder, _, name = path.rpartition("/")
                entry = (self._tree.get(folder) or {}).get(name)
                wanted = entry.info if entry is not None else None
            if state is not None and wanted is not None:
                state = wanted if state.may_be(wanted) else None
            self._states[path] = state
        return self._states[path]

    def uncached(self, path: str) -> None:
        """Read a file from the Hub from now on, because the cache has lost it."""
        self._states[path] = None
        self.local.pop(path, None)

    def entries(self, folder: str, repeated: _Repeated) -> Mapping[str, Entry]:
        """Return the entries of a folder, with few requests: a whole tree takes one if it has at most 1,000 entries."""
        if self.offline:
            return self.snapshot.list(folder)
        known = self._tree.get(folder)
        if known is not None:
            return known
        found = None if self._tree.is_large else self._pages(folder, True, repeated)
        if found is None:
            self._tree.is_large = True
            self._tree.add(folder, self._pages(folder, False, repeated) or (), False)
        else:
            self._tree.add(folder, found, True)
        return self._tree.folders[folder]

    def _pages(self, folder: str, recursive: bool, repeated: _Repeated) -> list[dict[str, Any]] | None:
        """Return all pages of a listing; None if a recursive one has many."""
        found: list[dict[str, Any]] = []
        after, number = "", 0
        while True:
            try:
                page, after = repeated(partial(self.connection.tree, self.place.revision, folder, recursive, after))
            except NoEntryError:
                return []
            found += page
            number += 1
            if not after:
                return found
            if recursive and number >= _PAGES:
                return None


def _info(entry: Mapping[str, Any]) -> FileInfo:
    """Return the state of a file from its entry in a listing."""
    lfs = entry.get("lfs")
    stored = lfs if isinstance(lfs, dict) else entry
    size = stored.get("size", entry.get("size"))
    return FileInfo(size if isinstance(size, int) else 0, 0, str(stored.get("oid") or ""))
