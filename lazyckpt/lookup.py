"""Look-up of lazy arrays by name, tied name, prefix and inner path; parts of a checkpoint, and its states.

Look-ups read no tensor data.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeVar

from .core.index import Index
from .core.names import Names, Pattern, Same, matcher, shortened
from .core.specs import Specs, TensorSpec
from .errors import MissingFileError, TensorNotFoundError, some
from .formats.torch_save import stored_specs
from .io.storage.access import lost
from .io.storage.base import Store
from .lazy import LazyArray

STORED = "stored"  # the state of the tensors as they are stored, under their raw names
# States that are whole state dicts list tied names, too; a moment is listed only under the name that owns the tensor.
_FULL_STATES = ("weights", "fp32")

A = TypeVar("A", bound=LazyArray, covariant=True)
N = TypeVar("N", bound="Lookup[Any]", covariant=True)
# How a part of a checkpoint was selected: by a prefix, which is removed from its names, or by names.
Step = tuple[Literal["below"], str] | tuple[Literal["select"], Pattern | frozenset[str]]


class States(Mapping[str, N]):
    """State name -> view, read-only. Raises TensorNotFoundError for an unknown state."""

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


class Lookup(Mapping[str, A]):
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
        if isinstance(found, Lookup):
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


def _is_known(stored: Mapping[str, TensorSpec] | None) -> bool:
    """Return whether the stored names are in memory, so that a look-up reads no file."""
    if isinstance(stored, ChainMap):
        return all(map(_is_known, stored.maps))
    return type(stored) is dict or isinstance(stored, Specs)


def _holds(word: str, name: str) -> bool:
    return word in name


def _quoted(name: str) -> str:
    """Return a name for a message; only both ends of a very long one."""
    return repr(shortened(name, 200))
