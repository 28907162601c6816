"""The interface of the readers of formats.

Another package registers a `Reader` as an entry point of the group ``lazyckpt.readers``. `registry` tries it after the
built-in readers, or selects it by name (``open(path, format="its name")``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.index import Index
from ..io.storage.base import Entry, Store

GROUP = "lazyckpt.readers"


class Source:
    """What a reader inspects: a file of a store, or the store's root folder.

    Listings of folders and the file's size and first bytes are cached.

    Parameters
    ----------
    store
        The store of the bytes.
    path
        The file's path in the store; empty for the store's root folder.
    tag
        The checkpoint of the folder that the user asked for, if any.
    rules
        The user's merge rules.
    listings
        Known listings of the store's folders, by path. The source adds its own.

    Attributes
    ----------
    known : dict
        A cache for the readers' own findings.
    asked_for_rules : bool
        Whether the reader has used `rules`.
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
        self._listings = {} if listings is None else listings

    @property
    def rules(self) -> Mapping[str, Any]:
        """The user's merge rules. If a reader never uses this property, the user's rules are reported as unused."""
        self.asked_for_rules = True
        return self._rules

    def inside(self, folder: str) -> Mapping[str, Entry]:
        """Return the listing of a folder in the folder; {} if it does not exist.

        Parameters
        ----------
        folder
            The folder's path in the store; "" for the root folder.
        """
        return self.listed(folder) if folder else self.entries

    def listed(self, folder: str) -> Mapping[str, Entry]:
        """Return the listing of a folder of the store, and cache it.

        Parameters
        ----------
        folder
            The folder's path in the store; "" for the root folder.
        """
        if folder not in self._listings:
            self._listings[folder] = self.store.list(folder)
        return self._listings[folder]

    def around(self) -> Source:
        """Return the source of the folder that holds the file."""
        return Source(self.store, listings=self._listings)

    @property
    def where(self) -> str:
        """The path or URL that the user passed, for messages."""
        return f"{self.store.root}/{self.path}" if self.path else self.store.root

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The folder's listing; empty for a file."""
        return {} if self.path else self.listed("")

    @cached_property
    def size(self) -> int:
        """The file's size in bytes; 0 for a folder."""
        return self.store.stat(self.path).size if self.path else 0

    @cached_property
    def head(self) -> bytes:
        """The file's first bytes, at most 512; empty for a folder."""
        return bytes(self.store.read(self.path, 0, min(512, self.size))) if self.path and self.size else b""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of a format.

    Attributes
    ----------
    name
        The name for `open(format=...)`.
    what
        A description of the format, for messages and `lazyckpt formats`.
    recognises
        Returns whether a source is of the format. It only looks at names and first bytes.
    read
        Returns the index of a source.
    tags
        Whether ``read`` itself finds the checkpoint in the folder that a tag names.
    """

    name: str
    what: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Index]
    tags: bool = False
