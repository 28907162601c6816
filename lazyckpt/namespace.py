"""A checkpoint as a namespace of lazy arrays: their look-up, and what is known of the checkpoint without reading it.

A `Namespace` is a view without the methods that read, write, convert and show it. It consists of an index and the store
of its files.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any, Self

import numpy as np

from .core.box import Shape
from .core.columns import Extents, ExtentSpecs
from .core.dtypes import DType
from .core.expr import leaves
from .core.index import FileInfo
from .core.names import Same
from .core.placement import Mesh
from .core.specs import Place, kind_of, marks_of, place_of
from .errors import Problem
from .formats.dcp.objects import Meta
from .io.metadata import with_torch
from .io.storage.base import Store
from .io.storage.joined import Joined, stores_of
from .io.storage.traffic import Traffic
from .lookup import A, Lookup, Step


class Owned(Mapping[str, A]):
    """The tensors of a view by the names that own them. They are described when they are looked up.

    Parameters
    ----------
    view
        The view.
    names
        Full name of each tensor -> its name in the view.
    """

    def __init__(self, view: Namespace[A], names: Mapping[str, str]) -> None:
        self._view, self._names = view, names

    def __getitem__(self, owner: str) -> A:
        found: A = self._view[self._names[owner]]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def place(self, owner: str) -> tuple[Store, Place] | None:
        """Return where a tensor is that is one run of plain values, if that takes no description of it."""
        found = place_of(self._view.specs, owner)
        return None if found is None else (self._view._store, found)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self._view.nbytes


class Namespace(Lookup[A]):
    """A `Lookup` with what is known of the checkpoint: its files, problems, aliases and sizes."""

    __slots__ = ()

    def close(self) -> None:
        """Close open files and mappings, as ``with lazyckpt.open(path) as view:`` does at its end.

        Afterwards, reading from this view, its parts, its states and their tensors raises DataError; names, shapes and
        dtypes stay available. Other views of the same path and tensors that have been read are not affected. Closing
        twice has no effect.
        """
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def root(self) -> str:
        """The folder that file names are relative to."""
        return self._store.root

    @property
    def format(self) -> str:
        """The name of the layout: "torch", "safetensors", "deepspeed-zero3", ..."""
        return self._index.format

    @property
    def mesh(self) -> Mesh:
        """The parallel degrees that the checkpoint was written with."""
        return self._index.mesh

    @property
    def whole(self) -> bool:
        """Whether the view has all names of the checkpoint's default state."""
        return not self._steps and self._state == next(iter(self._index.states), None)

    @property
    def state(self) -> str:
        """The name of the state that this view reads."""
        return self._state

    @property
    def meta(self) -> Mapping[str, Any]:
        """Everything in the checkpoint that is not a tensor, as plain objects and inert records (`Opaque`)."""
        if self._meta is None:
            self._meta = _converted(self._index.meta)
        return self._meta

    @property
    def io(self) -> Traffic:
        """What was asked of the server so far, opening included: ``requests``, ``bytes``, ``retries``, ``cache_hits``
        and ``seconds`` of waiting. Views made from the same `open` share the counters. All are 0 for local files."""
        return Traffic.total(one.io for one in stores_of(self._store))

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """The files of the view's tensors: path relative to ``root`` -> size in bytes and modification time. The view
        of a whole checkpoint has all files of the checkpoint."""
        if not self._steps:
            return self._index.files
        found: Mapping[str, FileInfo] | None = self.kept.get("files")
        if found is None:
            paths = dict.fromkeys(path for owner in self._owners() for path in self._paths(owner))
            only = getattr(self._index.files, "only", None)  # a mapping that looks at files on demand
            found = only(paths) if only else {p: info for p, info in self._index.files.items() if p in paths}
            self.kept["files"] = found
        return found

    def _paths(self, owner: str) -> Iterator[str]:
        """Yield the paths of the files that a tensor is read from, by its full name."""
        several = isinstance(self._store, Joined)
        place = None if several else place_of(self.specs, owner)
        if place is not None:  # most tensors of large views, without making their specs
            yield place.path
            return
        for one in leaves(self.specs[owner]):
            for fragment in one.spec.fragments:
                yield f"{one.source}/{fragment.extent.path}" if several else fragment.extent.path

    def _stat(self, path: str) -> FileInfo:
        """Return the size and the modification time that a file has now, which `files` has as of opening.

        Parameters
        ----------
        path
            A path of `files`.

        Returns
        -------
        FileInfo
            What the storage says.

        Raises
        ------
        MissingFileError
            There is no such file any more.
        """
        return self._store.stat(path)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names of the checkpoint: alias -> name that owns the tensor (full names)."""
        return self._index.aliases

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is missing or unusual in the checkpoint: sentences with a ``code`` to filter by and, if one file or
        tensor is concerned, its ``path`` (`lazyckpt.Problem`).

        If only values can decide the names of an optimizer's states, these are compared when such a state is first
        listed or looked up. A problem says so until then, and remains if the values do not decide.
        """
        later = self._index.open_problems
        return self._index.problems if later is None else (*self._index.problems, *later())

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Names of this view whose shape and dtype are unknown because their file is missing -> reason."""
        lost = self._index.unreadable
        return {name: lost[full] for name, full in self._shown_of({name: name for name in lost}).items()}

    @property
    def numel(self) -> int:
        """Number of elements. Tied tensors are counted once."""
        return sum(prod(kind_of(self.specs, owner)[0]) for owner in self._owners())

    @property
    def nbytes(self) -> int:
        """Bytes of the elements. Tied tensors are counted once."""
        if not self._steps and not self._index.aliases:
            numbers: dict[tuple[Shape, DType], int] = {}
            counts = np.bincount(marks_of(self.specs, numbers), minlength=len(numbers)).tolist()
            return sum(n * prod(shape) * dtype.itemsize for n, (shape, dtype) in zip(counts, numbers, strict=True))
        kinds = (kind_of(self.specs, owner) for owner in self._owners())
        return sum(prod(shape) * dtype.itemsize for shape, dtype in kinds)

    def owner(self, name: str) -> str:
        """Return the full name that owns a tensor: the name itself, or the name that it is tied to.

        Parameters
        ----------
        name
            A name of the view.

        Returns
        -------
        str
            A name in the whole checkpoint.
        """
        full = self.full_name(name)
        return full if full in self.specs else self._index.aliases.get(full, full)

    def full_name(self, name: str) -> str:
        """Return the name that a name of this view has in the whole checkpoint.

        Parameters
        ----------
        name
            A name of the view. An unknown name is returned unchanged.

        Returns
        -------
        str
            A name in the whole checkpoint.
        """
        return self._listed.get(name) or self._alias(name) or name

    def _owned(self) -> Owned[A]:
        """Return the tensors of this view by the names that own them, each once."""
        if not self._index.aliases:
            return Owned(self, {full: name for name, full in self._listed.items()})
        return Owned(self, {self.owner(name): name for name in self._listed})

    def _owners(self) -> Collection[str]:
        """Return the full names that own the tensors of this view."""
        specs, listed, aliases = self.specs, self.full_names, self._index.aliases
        if isinstance(listed, Same):  # each name is its own
            return listed.keys()
        return {full if full in specs else aliases.get(full, full): None for full in listed.values()}.keys()

    def once(self) -> tuple[dict[str, A], dict[str, str]]:
        """Return the tensors of the view without duplicates, as exporters write them.

        Returns
        -------
        tuple of two dicts
            Name -> tensor, with each tied tensor once, under the name that owns it if the view has that name; and each
            further name -> the name in the first dict that it is tied to.
        """
        if isinstance(self._listed, Same):  # no names are tied
            return {name: self[name] for name in self._listed}, {}
        names: dict[str, str] = {}  # the name that owns a tensor -> the one it is written under
        for name in self:
            owner = self.owner(name)
            if owner == self.full_name(name) or owner not in names:
                names[owner] = name
        aliases = {name: kept for name in self if (kept := names[self.owner(name)]) != name}
        return {name: self[name] for name in names.values()}, aliases

    def _pickled_steps(self) -> tuple[Any, ...]:
        steps = []
        view = self._other(steps=())
        for kind, what in self._steps:
            step: Step = (kind, what)  # type: ignore[assignment]
            view = view._other(steps=(*view._steps, step))
            # a function may not be picklable, the names that it has selected are
            steps.append((kind, frozenset(view)) if kind == "select" and callable(what) else step)
        return tuple(steps)


def _converted(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata with torch's objects in the place of their descriptions."""
    if isinstance(meta, ChainMap):
        return ChainMap(*(_converted(part) for part in meta.maps))  # type: ignore[arg-type]  # it is only read
    found: Mapping[str, Any] = meta.converted(with_torch) if isinstance(meta, Meta) else with_torch(meta)
    return found


def columns_of(view: object) -> Extents | None:
    """Return the tensors of a view as columns, if they are all tensors of one file under their own names, in order."""
    if not isinstance(view, Namespace) or not isinstance(view._listed, Same):
        return None
    specs = view.specs
    return specs.extents if isinstance(specs, ExtentSpecs) and specs.is_whole else None


def plain_meta(view: Namespace[Any]) -> Mapping[str, Any]:
    """Return `Namespace.meta` as it was read, without torch: a `DType` in the place of a torch.dtype, and so on."""
    return view._index.meta
