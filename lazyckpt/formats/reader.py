"""The interface of format readers: `Reader`, and `Source`, the file or folder that it reads.

Another package registers a reader as an entry point of the group ``lazyckpt.readers``, whose value is a `Reader`. It is
tried after the built-in readers, and can be selected by name (``open(path, format="its name")``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.index import Index
from ..io.storage.base import Entry, Store
from .shared.announce import announce_folders, listing

GROUP = "lazyckpt.readers"


class Source:
    """A file of a store, or the store's folder itself if ``path`` is empty.

    The listings of folders, the first bytes of the file, and whatever readers put into ``known`` are cached.

    Parameters
    ----------
    store
        The store of the folder.
    path
        Path of the file in the store; "" for the folder.
    tag
        The checkpoint that the user selected with ``open(tag=...)``.
    rules
        The user's merge rules.
    listings
        Listings of the store's folders that are known already.
    """

    def __init__(
        self,
        store: Store,
        path: str = "",
        tag: str | None = None,
        rules: Mapping[str, Any] | None = None,
        listings: dict[str, Mapping[str, Entry]] | None = None,
    ) -> None:
        self.store = store
        self.path = path
        self.tag = tag
        self._rules = rules or {}
        self.asked_for_rules = False
        self.known: dict[Any, Any] = {}
        self._size: int | None = None
        self._head: bytes | None = None
        self._listings = {} if listings is None else listings
        if isinstance(store, Store):
            if not store.pins:
                store.look_ahead()
            if store.ahead is not None:
                store.ahead.know(self._listings)

    @property
    def rules(self) -> Mapping[str, Any]:
        """The user's merge rules. Rules have no effect if the reader never gets this property."""
        self.asked_for_rules = True
        return self._rules

    def inside(self, folder: str) -> Mapping[str, Entry]:
        """Return the listing of a subfolder: name -> entry; empty if there is no such folder."""
        return self.listed(folder) if folder else self.entries

    def listed(self, folder: str) -> Mapping[str, Entry]:
        """Return the listing of a folder of the store, "" for the store's own. Each folder is listed once."""
        if folder not in self._listings:
            self._listings[folder] = listing(self.store, folder)
        return self._listings[folder]

    def list_all(self, folders: Iterable[str]) -> None:
        """List several folders, concurrently if they are behind a network."""
        announce_folders(self.store, folders)

    @property
    def folders(self) -> Collection[str]:
        """The folders that have been listed."""
        return self._listings.keys()

    def around(self) -> Source:
        """Return the folder that the file is in."""
        return Source(self.store, listings=self._listings)

    @property
    def where(self) -> str:
        """The path as the user knows it, for messages."""
        return f"{self.store.root}/{self.path}" if self.path else self.store.root

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The listing of the folder: name -> entry; empty if the source is a file."""
        return {} if self.path else self.listed("")

    # not functools.cached_property: in Python 3.11, one thread at a time computes it, of all sources

    @property
    def size(self) -> int:
        """Size of the file in bytes; 0 if the source is a folder."""
        if self._size is None:
            self._size = self.store.stat(self.path).size if self.path else 0
        return self._size

    @property
    def head(self) -> bytes:
        """The first 512 bytes of the file; empty if the source is a folder."""
        if self._head is None:
            length = min(512, self.size)
            self._head = bytes(self.store.read(self.path, 0, length)) if length else b""
        return self._head


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of one format.

    Attributes
    ----------
    name
        Name of the format, as in ``open(format=...)``.
    what
        Description of the format, as `lazyckpt formats` lists it.
    recognises
        Return whether a source has this format, by names and first bytes only.
    read
        Read the index of a source.
    tags
        Whether ``read`` itself resolves ``Source.tag`` in a folder with several checkpoints.
    """

    name: str
    what: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Index]
    tags: bool = False
