"""The bases of delta checkpoints: which checkpoint a delta changes, and what is known of its tensors unread."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.index import Index
from ..derive import versions
from ..derive.deltas import About, about_of, located, restored, without_ending
from ..derive.versions import published_of
from ..errors import DataError, LazyckptError, MissingFileError
from ..formats.opening import opened
from ..formats.shared.versions import Published
from ..inspect.kept import OPENED, kept_digest, now_mark
from ..io.storage.base import Store
from ..io.storage.urls import is_url
from ..namespace import Namespace

ABOUT = "delta"  # key of `Namespace.kept`: the path and the description of the delta that was opened


@dataclass(frozen=True)
class Bases:
    """How the base of a delta is found: the one that the caller gives, or the one where the delta says that it is.

    Attributes
    ----------
    open
        Opens a view of a path, with ``base=`` and the options.
    given
        The base that the caller gives: a view, a path, or None.
    options
        ``cache``, ``storage_options`` and ``io``, which bases are opened with, too.
    """

    open: Callable[..., Namespace[Any]]
    given: Namespace[Any] | str | os.PathLike[str] | None
    options: Mapping[str, Any]

    def of_delta(self, about: About, where: str) -> Namespace[Any]:
        """Return the base of a delta at ``where``."""
        if (given := self._given()) is not None:
            return given
        place = located(about.base.location, where, is_url)
        options = {**self.options} if is_url(place) else {**self.options, "storage_options": None}
        try:
            try:
                return self.open(place, **options)
            except MissingFileError:
                thinned = without_ending(place)  # a single file that has become a delta itself
                if not thinned:
                    raise
                return self.open(thinned, **options)
        except LazyckptError as e:
            raise MissingFileError(
                f"{where} is a delta, and its base cannot be opened ({_some_words(e)}). "
                "Open it with base=, the checkpoint whose digest begins with "
                f"{about.base.digest[:16]} (it was {place})"
            ) from e

    def of_version(self, version: Published, where: str) -> Namespace[Any]:
        """Return the version that a published one at ``where`` is a delta over: version 0 is the given base, others are
        beside it."""
        if version.base > 0:
            place = f"{where.rpartition('/')[0]}/{version.name.format(version.base)}"
            is_delta = published_of(opened(place, None, **self.options)[1]) is not None
            return self.open(place, base=self.given if is_delta else None, **self.options)
        if (given := self._given()) is not None:
            return given
        raise MissingFileError(
            f"{where} is version {version.version}, and the first delta is over the model that the engine was started "
            "with: open it with base=, the path of that model"
        )

    def _given(self) -> Namespace[Any] | None:
        given = self.given
        return given if given is None or isinstance(given, Namespace) else self.open(given, **self.options)


def is_delta(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a delta, which a base belongs to. Raises the errors of opening."""
    store, index = opened(path, None)
    return published_of(index) is not None or about_of(index, store.root) is not None


@dataclass(frozen=True)
class Whole:
    """A checkpoint, put together with its base if it is a delta. ``kept`` is for `Namespace.kept`."""

    store: Store
    index: Index
    kept: dict[str, Any]


def with_base(store: Store, index: Index, format: str | None, bases: Bases) -> Whole:
    """Return the checkpoint at a path; if it is a delta, put together with its base.

    Parameters
    ----------
    store, index
        What the path holds.
    format
        The reader that the caller asked for. With one, a delta is opened as it is stored.
    bases
        How the base is found.

    Raises
    ------
    MissingFileError
        The base is not found.
    DataError
        A base is given and the path is no delta, or the base is not the one of the delta.
    """
    where = store.root
    if format is not None and bases.given is not None:
        raise DataError("base= is for a delta checkpoint: open it without format=")
    if (version := published_of(index)) is not None:
        store, index = versions.restored(store, index, version, bases.of_version(version, where), where)
        store.pin(index.pins)
        return Whole(store, index, {})
    about = None if format is not None else about_of(index, where)
    if about is None:
        if bases.given is not None:
            raise DataError(f"{where} is no delta checkpoint: open it without base=")
        return Whole(store, index, {OPENED: True})
    base = bases.of_delta(about, where) if about.needs_base else None
    store, index = restored(store, index, about, base, _known_of(base, about), where)
    store.pin(index.pins)
    return Whole(store, index, {ABOUT: (where, about)})


def _some_words(error: Exception) -> str:
    """Return the beginning of an error's text, on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _known_of(base: Namespace[Any] | None, about: About) -> Callable[[str, str], str | bool | None]:
    """Return what is known of the tensors of a base without reading them: their digests, if the base is a delta itself
    or has a manifest; or that its files are the ones that the delta was made from. See `restored`."""
    if base is None:
        return lambda state, name: None
    if ABOUT in base.kept:
        tables = base.kept[ABOUT][1].states
        aliases = base.kept[ABOUT][1].aliases

        def recorded(state: str, name: str) -> str | None:
            table = tables.get(state, {})
            entry = table.get(name) or table.get(aliases.get(name, ""))
            return None if entry is None else entry.digest

        return recorded
    if about.base.files and base.kept.get(OPENED) and now_mark(base) == about.base.files:
        return lambda state, name: True
    found = kept_digest(base)
    if found is None:
        return lambda state, name: None
    states = found.states

    def listed(state: str, name: str) -> str | None:
        one = states[state].get(name) if state in states else None
        return None if one is None else one.digest

    return listed
