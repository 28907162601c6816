"""Names of an optimizer's parameters from the values of their fp32 copies, if order and shapes are ambiguous.

DeepSpeed's runtime/fp16/unfused_optimizer.py keeps an fp32 copy of every parameter and writes it into the 16-bit weight
after each step, so a copy belongs to a weight only if it rounds to it. A few elements usually exclude all weights of
the same shape but one. Opening reads none of them; the first use of the names of such a state does.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.dtypes import DType, to_numpy
from ...core.select import Selection
from ...core.specs import TensorSpec
from ...errors import ChangedFileError, LazyckptError, Problem
from ...io.reading.gather import read
from ...io.storage.base import Store

_SAMPLE = 256  # elements of each sampled row
_BLOCK = 1 << 20  # elements that are read at a time if samples do not decide
_ROUNDS = "named by the fp32 copy, which rounds to this weight and to no other of its shape"
_FITS = "named by the one order of the parameters that the fp32 copies fit"


@dataclass(frozen=True, slots=True)
class Copies:
    """The fp32 copies of an optimizer whose parameters cannot be named by order and shapes."""

    where: str
    """The file, for problems."""
    total: int
    """Number of parameters of the optimizer."""
    copies: Mapping[str, TensorSpec]
    """Key of a numbered parameter -> its copy."""
    weights: Mapping[str, TensorSpec]
    """Name -> weight that may be one of the parameters."""
    ways: Sequence[Mapping[str, str]] = ()
    """Key -> name, for each convention that fits."""


class Undecided:
    """The names of numbered parameters, determined on first use. Picklable, and without a lock, which a fork could
    leave locked."""

    def __init__(self, store: Store, optimizers: Sequence[Copies]) -> None:
        self._store = store
        self._optimizers = tuple(optimizers)
        self._names: dict[str, tuple[str, str]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Undecided, (self._store, self._optimizers)

    @property
    def names(self) -> Mapping[str, tuple[str, str]]:
        """Key of a numbered parameter -> its name and the evidence. The first use reads some of the weights."""
        if self._names is None:
            found: dict[str, tuple[str, str]] = {}
            for optimizer in self._optimizers:
                found |= _decided(self._store, optimizer)
            self._names = found  # concurrent threads compute the same result
        return self._names

    def problems(self) -> tuple[Problem, ...]:
        """Return a problem for each optimizer with parameters that have no name, or none yet. Nothing is read."""
        names = self._names
        problems = []
        for of in self._optimizers:
            count = sum(names is None or number not in names for number in of.copies)
            said = f"{of.where}: the optimizer numbers its parameters; for {count} of {of.total} order and shapes leave"
            if names is None:
                how = "their fp32 copies will be compared with the weights when their names are first looked at"
                line = f"{said} more than one way to name them, or none: {how}"
                problems.append(Problem("undecided-name", line, of.where))
            elif count:
                how = "and fp32 copies do not decide: their states stay under their numbers"
                line = f"{said} more than one way to name them, or none, {how}"
                problems.append(Problem("undecided-name", line, of.where))
        return tuple(problems)


class UndecidedTable(Mapping[str, TensorSpec]):
    """A state by name, or by number for parameters that stay without a name.

    ``spare`` has further tensors by name, which are included if nothing else has the name and no number of the same
    shape is left. ``renames`` maps names to other names."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        undecided: Undecided,
        spare: Mapping[str, TensorSpec],
        renames: Mapping[str, str] | None = None,
    ) -> None:
        self._made = specs, undecided, spare, renames
        self._known: dict[str, TensorSpec] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return UndecidedTable, self._made

    def renamed(self, renames: Mapping[str, str]) -> UndecidedTable:
        """Return the same table under other names."""
        specs, undecided, spare, _ = self._made
        return UndecidedTable(specs, undecided, spare, renames)

    def _all(self) -> dict[str, TensorSpec]:
        if self._known is None:
            specs, undecided, spare, renames = self._made
            known: dict[str, TensorSpec] = {}
            open_shapes = set()  # a spare tensor of such a shape may be one of the numbers
            for number, spec in specs.items():
                name, rule = undecided.names.get(number, (number, spec.rule))
                known.setdefault(name, replace(spec, name=name, rule=rule))
                if name == number:
                    open_shapes.add(spec.shape)
            for name, spec in spare.items():
                if spec.shape not in open_shapes:
                    known.setdefault(name, spec)
            new = renames or {}
            self._known = {new.get(name, name): replace(s, name=new.get(name, name)) for name, s in known.items()}
        return self._known

    def __getitem__(self, name: str) -> TensorSpec:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _decided(store: Store, of: Copies) -> dict[str, tuple[str, str]]:
    """Return the names of numbers, each with the evidence. Raises ChangedFileError."""
    may_be: dict[str, list[str]] = {number: [] for number in of.copies}
    unread: set[str] = set()
    for shape, dtype in dict.fromkeys((weight.shape, weight.dtype) for weight in of.weights.values()):
        if not (dtype.is_floating_point and dtype.is_number):  # such a tensor has no fp32 copy
            continue
        numbers = {i: copy for i, copy in of.copies.items() if copy.shape == shape}
        weights = {n: weight for n, weight in of.weights.items() if (weight.shape, weight.dtype) == (shape, dtype)}
        try:
            for number, names in _alike(store, numbers, weights, dtype).items():
                may_be[number] += names
        except ChangedFileError:
            raise
        except LazyckptError:  # unreadable values exclude no name
            for number in numbers:
                may_be[number] += weights
            unread |= numbers.keys()
    claims = Counter(name for names in may_be.values() for name in names)
    found = {
        number: (names[0], _ROUNDS)
        for number, names in may_be.items()
        if len(names) == 1 and claims[names[0]] == 1 and number not in unread
    }
    fitting = [way for way in of.ways if all(way.get(i) is None or way[i] in names for i, names in may_be.items())]
    for number in may_be.keys() - found.keys():
        given = {way.get(number) for way in fitting}
        if len(given) == 1 and (name := given.pop()) is not None:
            found[number] = name, _FITS
    return found


def _alike(
    store: Store, copies: Mapping[str, TensorSpec], weights: Mapping[str, TensorSpec], dtype: DType
) -> dict[str, list[str]]:
    """Return the weights that each number's copy rounds to; all have the same shape and ``dtype``. No more is read than
    is needed to decide."""
    if not copies:
        return {}
    found: dict[str, list[str]] = {}
    mine, theirs = (_grouped(specs, lambda spec: _sample(store, spec, dtype)) for specs in (copies, weights))
    for key, numbers in mine.items():
        names = theirs.get(key, {})
        if len(numbers) > 1 or len(names) > 1:
            ours, whole = (_grouped(specs, lambda spec: _digest(store, spec, dtype)) for specs in (numbers, names))
            found |= {i: list(whole.get(digest, ())) for digest, same in ours.items() for i in same}
        else:
            found |= {i: list(names) for i in numbers}
    return found


def _grouped(specs: Mapping[str, TensorSpec], key: Callable[[TensorSpec], bytes]) -> dict[bytes, dict[str, TensorSpec]]:
    """Group specs by key."""
    found: dict[bytes, dict[str, TensorSpec]] = {}
    for name, spec in specs.items():
        found.setdefault(key(spec), {})[name] = spec
    return found


def _sample(store: Store, spec: TensorSpec, dtype: DType) -> bytes:
    """Read a few elements of the first, the middle and the last row, converted to ``dtype``."""
    if 0 in spec.shape or not spec.shape:
        return _digest(store, spec, dtype)
    rows = dict.fromkeys((0, spec.shape[0] // 2, max(0, spec.shape[0] - (_SAMPLE if len(spec.shape) == 1 else 1))))
    inner = (slice(_SAMPLE),) if len(spec.shape) > 1 else ()
    wide = 1 if inner else _SAMPLE
    keys = [(slice(row, row + wide), *[0] * (len(spec.shape) - 2), *inner) for row in rows]
    return b"".join(_rounded(store, spec, key, dtype) for key in keys)


def _digest(store: Store, spec: TensorSpec, dtype: DType) -> bytes:
    """Return a digest of all elements, converted to ``dtype`` and read block by block."""
    digest = hashlib.blake2b()
    lead, row = 0, spec.numel
    while lead < len(spec.shape) and row > _BLOCK:
        row //= spec.shape[lead]
        lead += 1
    step = max(1, _BLOCK // max(1, row)) if lead else 1
    for at in itertools.product(*map(range, spec.shape[: lead - 1])) if lead else [()]:
        for start in range(0, spec.shape[lead - 1], step) if lead else [None]:
            key = at if start is None else (*at, slice(start, start + step))
            digest.update(_rounded(store, spec, key, dtype))
    return digest.digest()


def _rounded(store: Store, spec: TensorSpec, key: Any, dtype: DType) -> bytes:
    values = read(store, spec, Selection.all(spec.shape)[key].reads()).reshape(-1).to(dtype.torch)
    array = to_numpy(values)
    raw = array.view(f"u{dtype.itemsize}")
    raw[np.isnan(array)] = np.iinfo(raw.dtype).max  # NaN has many bit patterns; use one for all
    return raw.tobytes()
