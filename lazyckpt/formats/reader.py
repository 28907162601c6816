"""What a reader of a format is, and what it is asked about.

A reader of another package registers itself under the entry-point group ``lazyckpt.readers`` (its value: a `Reader`).
`registry` asks it after the built-in ones, or by name (``open(path, format="its name")``).
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
    """What a reader is asked about: a file of a store, or (``path`` empty) the store's folder itself.

    What was sniffed is kept: ``entries``, the folder's listing, ``head``, the file's first bytes, listings of the
    folders in it; and in ``known`` what readers found out, so that it is found out once. ``listings``: those that are
    known of the store's folders.
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
        """The user's merge rules. A reader that never asks for them has no use for them."""
        self.asked_for_rules = True
        return self._rules

    def inside(self, folder: str) -> Mapping[str, Entry]:
        """The listing of a folder in the folder; {} if there is none."""
        return self.listed(folder) if folder else self.entries

    def listed(self, folder: str) -> Mapping[str, Entry]:
        """The listing of a folder of the store, "" for its own; each is asked for once."""
        if folder not in self._listings:
            self._listings[folder] = self.store.list(folder)
        return self._listings[folder]

    def around(self) -> Source:
        """The folder that the file is in."""
        return Source(self.store, listings=self._listings)

    @property
    def where(self) -> str:
        """As the user knows it, for messages."""
        return f"{self.store.root}/{self.path}" if self.path else self.store.root

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        return {} if self.path else self.listed("")

    @cached_property
    def size(self) -> int:
        return self.store.stat(self.path).size if self.path else 0

    @cached_property
    def head(self) -> bytes:
        return bytes(self.store.read(self.path, 0, min(512, self.size))) if self.path and self.size else b""


@dataclass(frozen=True, slots=True)
class Reader:
    """``name``: what `open(format=...)` calls it. ``recognises`` looks at names and first bytes only; ``read`` indexes.
    ``what``: the layout in words, for the message that no reader recognised a path. ``tags``: it knows itself which of
    several checkpoints in the folder is meant by a tag."""

    name: str
    what: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Index]
    tags: bool = False
