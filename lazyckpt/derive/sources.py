"""Several views as operands of expressions."""

from __future__ import annotations

import os
from ast import literal_eval
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from ..core.expr import computed, of_one_store, operand, relocated_sources
from ..core.index import FileInfo, Index
from ..core.specs import Expr, Input, TensorSpec
from ..errors import Problem, TensorNotFoundError
from ..io.storage.base import Store
from ..io.storage.credentials import without_secrets
from ..io.storage.joined import Joined, joined
from ..namespace import Namespace


def all_views(views: Any, what: str) -> list[Any]:
    """Return the views that are given, in a list. Raises TypeError if one is no view, such as a path."""
    if isinstance(views, Namespace):
        raise TypeError(f"{what} takes a list of views, not one view")
    found = list(views)
    for one in found:
        if not isinstance(one, Namespace):
            raise TypeError(f"{what} takes views, not {one!r:.80}: lazyckpt.open(path) gives the view of a checkpoint")
    return found


def place_of(view: Namespace[Any]) -> str:
    """Return where a view is from, for messages: the file if it is of a single one, else the folder."""
    files = list(view._index.files)
    return f"{view.root}/{files[0]}" if len(files) == 1 and not isinstance(view._store, Joined) else view.root


_OPENED = "opened by"  # key of `Namespace.kept`
_ADDRESS = "opened at"  # key of `Namespace.kept`


def note_opening(view: Namespace[Any], call: str, path: str, options: Mapping[str, Any]) -> None:
    """Remember what a view was opened with, for `opening_of` and `address_of`: the function, the path and the options.
    Options that are None are left out. If one is no plain data, only the path is remembered."""
    told = {name: _plain(value) for name, value in options.items() if value is not None}
    shown = without_secrets(path, {}) if "://" in path else path
    view.kept[_ADDRESS] = shown_path(path)
    if all(value is not None for value in told.values()):
        text = "".join(f", {name}={value}" for name, value in told.items())
        view.kept[_OPENED] = f"{call}({shown!r}{text})"


def _plain(value: Any) -> str | None:
    """Return a value as Python writes it; None if it is no plain data."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        value = dict(value)
    try:
        return repr(value) if literal_eval(repr(value)) == value else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def opening_of(view: Namespace[Any]) -> str | None:
    """Return the call of Python that opens a view; None if the view is derived from others, or if its options cannot be
    shown."""
    return view.kept.get(_OPENED)


def shown_path(path: str) -> str:
    """Return a path or URL for titles: without secrets, and absolute if it is "." or ends in ".."."""
    if "://" in path:
        return without_secrets(path, {})
    return os.path.abspath(path) if os.path.basename(os.path.normpath(path)) in ("", ".", "..") else path


def address_of(view: Namespace[Any]) -> str:
    """Return the path or URL that a view was opened with, without secrets. For a derived view, return `place_of` it."""
    address: str | None = view.kept.get(_ADDRESS)
    return place_of(view) if address is None else address


class Sources:
    """The views that new tensors are computed from, with one store for all.

    Parameters
    ----------
    views
        The views, each in the state that it shows.

    Attributes
    ----------
    store
        The store of the new tensors: that of the views, or a `Joined` one if they have several.
    """

    store: Store

    def __init__(self, views: Sequence[Namespace[Any]]) -> None:
        self.views = list(views)
        self.store, self._numbers = joined([view._store for view in self.views])

    def of(self, views: Sequence[Namespace[Any]]) -> Sources:
        """Return the same views in other states, in the same order, with the same store for all.

        Parameters
        ----------
        views
            The views, each of the same checkpoint as the view of this number.
        """
        found = copy(self)
        found.views = list(views)
        return found

    def operand(self, number: int, name: str) -> Expr | Input:
        """Return a tensor of a view as an operand.

        Parameters
        ----------
        number
            The number of the view.
        name
            A name in the view, exact.

        Raises
        ------
        TensorNotFoundError
            The view has no tensor of this name.
        """
        spec = self.views[number]._spec(name)
        if spec is None:
            raise TensorNotFoundError(f"there is no tensor {name!r} in {place_of(self.views[number])}")
        return relocated_sources(operand(spec), self._numbers[number])

    def tensor(self, name: str, node: Expr | Input) -> TensorSpec:
        """Return the spec of a new tensor.

        Parameters
        ----------
        name
            Its name.
        node
            Its value. An operand is the tensor itself if the views have one store; if they have several, it is an
            expression, because fragments do not say which store has their files.
        """
        return (computed if isinstance(self.store, Joined) else of_one_store)(name, node)

    def index(
        self,
        tensors: Mapping[str, TensorSpec],
        format: str,
        *,
        aliases: Mapping[str, str] | None = None,
        problems: Sequence[Problem] = (),
        like: int = 0,
    ) -> Index:
        """Return the index of a view of new tensors.

        Parameters
        ----------
        tensors
            Name -> tensor.
        format
            The name of the format that the view has.
        aliases
            Tied names -> the name that owns the tensor.
        problems
            What is wrong with the new tensors; those of the views are kept, too.
        like
            The number of the view whose metadata the new view has.
        """
        base = self.views[like]._index
        files: dict[str, FileInfo] = {}
        several = isinstance(self.store, Joined)
        for view, number in zip(self.views, self._numbers, strict=True):
            found = view._index.files
            files |= {f"{number}/{path}": info for path, info in found.items()} if several else dict(found)
        told = dict.fromkeys(problem for view in self.views for problem in view.problems)
        return replace(
            base,
            format=format,
            states={"weights": tensors},
            files=files,
            stored=tensors,
            indexed={},
            aliases=aliases or {},
            problems=(*told, *problems),
            unreadable={},
            ruled=(),
            guards={},
            watched=None,
            layout=None,
            open_problems=None,
        )
