"""Names to lazy arrays: lookup by name, prefix and inner path, parts, and states.

A `Namespace` is a view without the methods that read, write, convert and show it. It consists of an index and the store
of its files. Lookups read no tensor data.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from .core.box import Shape
from .core.columns import Extents, ExtentSpecs
from .core.dtypes import DType
from .core.expr import leaves
from .core.index import FileInfo, Index
from .core.names import Names, Pattern, Same, matcher, shortened
from .core.placement import Mesh
from .core.specs import Place, Specs, TensorSpec, kind_of, marks_of, place_of
from .errors import MissingFileError, Problem, TensorNotFoundError, some
from .formats.dcp.objects import Meta
from .formats.torch_save import stored_specs
from .io.metadata import with_torch
from .io.storage.access import lost
from .io.storage.base import Store
from .io.storage.joined import Joined, stores_of
from .io.storage.traffic import Traffic
from .lazy import LazyArray

STORED = "stored"  # the state of the tensors as they are stored, under their raw names
# States that are whole state dicts list tied names, too; a moment is listed only under the name that owns the tensor.
_FULL_STATES = ("weights", "fp32")

A = TypeVar("A", bound=LazyArray, covariant=True)
N = TypeVar("N", bound="Namespace[Any]", covariant=True)
# How a part of a checkpoint was selected: by a prefix, which is removed from its names, or by names.
Step = tuple[Literal["below"], str] | tuple[Literal["select"], Pattern | frozenset[str]]


class States(Mapping[str, N]):
    """State name -> namespace, read-only. Raises TensorNotFoundError for an unknown state."""

    __slots__ = ("_views",)

    def __init__(self, views: Mapping[str, N]) -> None:
        self._views = dict(views)

    def __getitem__(self, state: str) -> N:
        found = self._views.get(state)
        if found is None:
            raise TensorNotFoundError(f"there is no state {state!r}; there are: {', '.join(self._views) or 'none'}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


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


class Namespace(Mapping[str, A]):
    """The tensors of a checkpoint, or of a part of it, in one of its states, by dotted name."""

    __slots__ = (
        "__weakref__",
        "_by_stored",
        "_full",
        "_index",
        "_meta",
        "_names",
        "_of_all",
        "_sides",
        "_specs",
        "_state",
        "_steps",
        "_store",
        "_tensors",
        "kept",
    )

    _tensor: ClassVar[Any] = LazyArray  # the class of the arrays, `A`
    _states: ClassVar[type[States[Any]]] = States

    _store: Store
    _index: Index
    _state: str
    _steps: tuple[Step, ...]
    kept: dict[str, Any]  # results that modules above have computed for this namespace, by their own keys

    def _init(self, store: Store, index: Index, state: str, steps: tuple[Step, ...], of_all: bool) -> None:
        self._store = store
        self._index = index
        self._state = state
        self._steps = steps
        self._of_all = of_all and not steps  # whether the stored names of all states are found
        self._forget()

    def _forget(self) -> None:
        """Reset what is computed on demand."""
        self.kept = {}
        self._full: Mapping[str, str] | None = None
        self._meta: Mapping[str, Any] | None = None
        self._names: Names | None = None
        self._specs: Mapping[str, TensorSpec] | None = None
        self._tensors: dict[str, A] = {}
        self._by_stored: Mapping[str, TensorSpec] | None = None
        self._sides: dict[str, Self] = {}  # state -> its view, so that ``view.states[...]`` in a loop is cheap

    def _other(self, state: str | None = None, steps: tuple[Step, ...] | None = None) -> Self:
        view = object.__new__(type(self))
        view._init(self._store, self._index, state or self._state, self._steps if steps is None else steps, False)
        return view

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

    # -- the namespace

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the whole state as data, by full name, also those that this view does not show."""
        if self._specs is None:
            if self._state != STORED:
                self._specs = self._index.states[self._state]
            elif self._index.stored is not None:
                self._specs = self._index.stored
            else:
                self._specs = stored_specs(self._store, self._index)
        return self._specs

    @property
    def full_names(self) -> Mapping[str, str]:
        """Names of this view -> names in the whole checkpoint."""
        return self._listed

    @property
    def _listed(self) -> Mapping[str, str]:
        """Names of this view -> full names."""
        if self._full is None:
            names: Mapping[str, str] = Same(self.specs)
            tied = self._index.aliases if self._state in _FULL_STATES else {}
            if any(owner in self.specs for owner in tied.values()):
                names = dict(names)
                names.update((a, a) for a, owner in tied.items() if owner in self.specs)
            self._full = self._shown_of(names)
        return self._full

    def _shown_of(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Return the names that this view shows of a table of full names: name in the view -> full name."""
        for kind, what in self._steps:
            if kind == "below":
                start = f"{what}."
                names = {n.removeprefix(start): full for n, full in names.items() if n.startswith(start)}
            else:
                keep = what.__contains__ if isinstance(what, frozenset) else matcher(what)
                names = {n: full for n, full in names.items() if keep(n)}
        return names

    @property
    def names(self) -> Names:
        """The names of this view, with lookup by prefix and inner path."""
        if self._names is None:
            self._names = Names(self._listed)
        return self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def __contains__(self, name: object) -> bool:
        """Return whether ``view[name]`` finds something: a full name, a tied name, a prefix, or a unique inner path.
        False for names in `unreadable`, whose lookup raises MissingFileError."""
        if isinstance(name, str) and self._spec(name) is not None:
            return True
        try:
            self[name]  # type: ignore[index]  # another type raises TensorNotFoundError
        except (TensorNotFoundError, MissingFileError):
            return False
        return True

    def exact(self, name: str) -> A | None:
        """Return the tensor of exactly this name. Prefixes and paths inside names are not looked up.

        Parameters
        ----------
        name
            A name of the view, or a tied name.

        Returns
        -------
        LazyTensor or None
            None if no tensor has this name.
        """
        found = self._tensors.get(name)
        if found is None and (spec := self._spec(name)) is not None:
            found = self._tensors[name] = self._tensor(self._store, spec)
        return found

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, path: str) -> Any:
        """Look up a tensor or a part of the view by name. Reads no tensor data.

        The type of the result depends on the checkpoint, so type checkers see Any. `tensor` and `prefix` do the same
        lookup with a precise type; an annotation (``w: LazyTensor = view["up.weight"]``) works, too. ``name in view``
        and `get` agree with this lookup.

        A state finds only its own tensors, also by the raw names that they are stored under. The view of the whole
        checkpoint, as it was opened, also finds the raw names of all states if that needs no further reading.

        Parameters
        ----------
        path
            A name, a tied name, a prefix of names, or a path that occurs at one place inside the names.

        Returns
        -------
        LazyTensor or CheckpointView
            The tensor of a name; for a prefix the view of the names below it, relative to the prefix.

        Raises
        ------
        TensorNotFoundError
            The path occurs at several places, which the message lists, or at none; then it lists the nearest names.
        MissingFileError
            The file that has this tensor is missing.
        """
        if not isinstance(path, str):
            raise TensorNotFoundError(f"tensors are looked up by name, not by {type(path).__name__}")
        found = self._tensors.get(path)
        if found is None:
            found = self.exact(path)
        if found is not None:
            return found
        if path in ("", "."):
            return self
        path = path.removesuffix(".")
        if below := self.names.below(path):
            return self._part(path, below)
        if (found := self.exact(path)) is not None:  # the path ended with a dot
            return found
        if path in self._index.unreadable and not self._steps:
            raise lost(self._store, MissingFileError(self._index.unreadable[path]))
        if not self._steps and path in self._stored_names:
            return self._tensor(self._store, self._stored_names[path])
        places = self.names.inside(path)
        if len(places) == 1:
            return self[places[0]]
        if places:
            listed = some(map(_quoted, places), 6)
            raise TensorNotFoundError(f"{_quoted(path)} occurs at {len(places)} places: {listed}. Give a longer path.")
        stored = self._index.stored
        if self._of_all and stored is not self.specs and _is_known(stored) and self.stored.names.below(path):
            return self.stored[path]
        raise TensorNotFoundError(
            f"there is no tensor or prefix {_quoted(path)} among the {len(self):,} names of {self._state!r}.",
            lambda: self._hint(path),
        )

    def _part(self, prefix: str, names: Sequence[str]) -> Self:
        """Return the view below a prefix; ``names``: all names below it, in any order."""
        part = self._other(steps=(*self._steps, ("below", prefix)))
        cut, listed, position = len(prefix) + 1, self._listed, self.names.position
        part._full = {name[cut:]: listed[name] for name in sorted(names, key=position.__getitem__)}
        return part

    def tensor(self, name: str) -> A:
        """Return the tensor that ``view[name]`` finds.

        Parameters
        ----------
        name
            A name, a tied name, or a path that occurs at one place inside the names.

        Returns
        -------
        LazyTensor
            The tensor. Nothing of it is read.

        Raises
        ------
        TensorNotFoundError
            There is no such tensor, or the name is a prefix.
        MissingFileError
            The file that has this tensor is missing.
        """
        found = self[name]
        if isinstance(found, Namespace):
            raise TensorNotFoundError(f"{name!r} is a prefix of {len(found):,} names, not a tensor: use view.prefix")
        tensor: A = found
        return tensor

    def prefix(self, path: str) -> Self:
        """Return the part of the view that ``view[path]`` finds, with names relative to it.

        Parameters
        ----------
        path
            A prefix of names, or a path that occurs at one place inside them.

        Returns
        -------
        CheckpointView
            The part; of the same class as this view.

        Raises
        ------
        TensorNotFoundError
            There is no such prefix, or the path is a tensor's name.
        """
        found = self[path]
        if not isinstance(found, type(self)):
            raise TensorNotFoundError(f"{path!r} is a tensor: use view.tensor")
        return found

    def search(self, text: str) -> Self:
        """Return the tensors whose names contain all words of a text. Upper and lower case are the same.

        Parameters
        ----------
        text
            Words separated by spaces. A word with ``*``, ``?`` or ``[`` is a glob of the whole name. An empty text
            selects all tensors.

        Returns
        -------
        CheckpointView
            The tensors under their names in this view; empty if none matches.
        """
        words = text.casefold().split()
        tests = [matcher(word) if set(word) & set("*?[") else partial(_holds, word) for word in words]
        return self.select(lambda name: all(test(name.casefold()) for test in tests))

    def _spec(self, name: str) -> TensorSpec | None:
        """Return the spec of an exact name of this view; for a tied name the owner's spec under the tied name."""
        full = self._listed.get(name)
        if full is None:
            full = self._alias(name)
            if full is None:
                return None
        spec = self.specs.get(full)
        if spec is None:
            owner = self._index.aliases[full]
            spec = replace(self.specs[owner], name=full, rule=f"tied: the same tensor as {owner!r}")
        return spec

    @property
    def _stored_names(self) -> Mapping[str, TensorSpec]:
        """Raw names that lookups find, too: those that the tensors of this state are stored under and, in the view that
        was opened, the raw names of all states if they are known already."""
        if self._by_stored is None:
            stored, specs = self._index.stored, self.specs
            if isinstance(specs, Specs):
                renamed = specs.renamed
            else:
                renamed = {s.stored_as: s for s in specs.values() if s.stored_as}
            known = stored if self._of_all and stored is not None and _is_known(stored) else {}
            self._by_stored = ChainMap(renamed, known)  # type: ignore[arg-type]  # it is only read
        return self._by_stored

    def _alias(self, name: str) -> str | None:
        """Return the full name of a tied alias that this state does not list, or None."""
        if self._state in _FULL_STATES or self._state == STORED:
            return None
        full = self._below(name)
        if self._index.aliases.get(full) not in self.specs:
            return None
        return self._shown_of({full: full}).get(name)

    def _below(self, name: str) -> str:
        """Return the full name of a name of this view: put the view's prefixes in front of it."""
        for kind, what in reversed(self._steps):
            name = f"{what}.{name}" if kind == "below" else name
        return name

    def _hint(self, path: str) -> str:
        """Return a sentence for a message that says where a name that is not in this view may be found."""
        full = self._below(path)
        for state in self._index.states:
            other = self._other(state=state, steps=())
            if state != self._state and (other.exact(full) is not None or other.names.below(full)):
                return f"It is in view.states[{state!r}]."
        near = self.names.near(path)
        if near:
            hint = f"Did you mean {' or '.join(map(_quoted, near))}?"
        else:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in self))
            hint = f"At the top there is: {some(map(_quoted, tops), 5)}." if tops else ""
        return f"For patterns use select. {hint}" if set(path) & set("*?") else hint

    def _ipython_key_completions_(self) -> list[str]:
        """Return what ``view["<Tab>`` offers: prefixes and names; only the first levels of a very large view; also the
        unique paths inside names of a small one."""
        return self.names.paths()

    # -- parts and other sides of it

    def select(self, pattern: Pattern) -> Self:
        """Return the tensors whose names match a pattern.

        Parameters
        ----------
        pattern
            A glob (``*`` also matches dots), a compiled regular expression (searched), or a function of the name.

        Returns
        -------
        CheckpointView
            The tensors under their names in this view; empty if none matches.
        """
        return self._other(steps=(*self._steps, ("select", pattern)))

    @property
    def states(self) -> Mapping[str, Self]:
        """The same part of every state of the checkpoint: "weights", "fp32", then those of the optimizer ("exp_avg",
        ...). Views read the first one by default."""
        return self._states({state: self._side(state) for state in self._index.states})

    @property
    def stored(self) -> Self:
        """Every tensor of the whole checkpoint as it is stored, under its raw name, without merging or hiding."""
        return self._side(STORED, ())

    def _side(self, state: str, steps: tuple[Step, ...] | None = None) -> Self:
        if state not in self._sides:
            self._sides[state] = self._other(state=state, steps=steps)
        return self._sides[state]

    # -- what it is

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
        specs, listed = self.specs, self.full_names.values()
        return {full if full in specs else self._index.aliases.get(full, full): None for full in listed}.keys()

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


def _is_known(stored: Mapping[str, TensorSpec] | None) -> bool:
    """Return whether the stored names are in memory, so that a look-up reads no file."""
    if isinstance(stored, ChainMap):
        return all(map(_is_known, stored.maps))
    return type(stored) is dict or isinstance(stored, Specs)


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


def _holds(word: str, name: str) -> bool:
    return word in name


def _quoted(name: str) -> str:
    """Return a name for a message; only both ends of a very long one."""
    return repr(shortened(name, 200))
