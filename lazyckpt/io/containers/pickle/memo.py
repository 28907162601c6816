"""Items that the pickles of many ranks share: byte-identical entries of the top-level dict, parsed only once.

Ranks' files differ in a rank number or the state of a generator; the names and places of their tensors, most of the
pickle, are often identical. Such an item is parsed once, separately, and reused in other pickles that contain the same
bytes and refer to equal memo entries. So are the first items, as a run, of a dict in the top-level dict: the optimizer
states of ZeRO-2 differ only behind them. Sharing never changes the result of parsing a file:

- An item is parsed on an empty stack, and its memo records the entries of the outer memo that it refers to. An item
  that uses the outer stack, or refers to something mutable, is not shared.
- Shared objects are never modified. A pickle that modifies one, or modifies a class or function that it names, is
  parsed again without sharing (`refuse_shared`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ....core.dtypes import DType
from ....errors import CorruptError
from .records import Opaque
from .values import Device, Size

FEW = 64  # maximum items of a dict whose items are shared; checkpoints of training runs have about ten
NOTED = 1024  # maximum items of the dicts within the outermost one
_LEAST = 4 << 10  # minimum bytes of an item that is worth sharing
_SHORTEST = 256  # minimum bytes of a run of items that is worth sharing
_MOST = 48  # cached items
_CLEARED = object()
_WHOLE = (str, int, float, bytes, bool, type(None))
_LEAVES = frozenset((*_WHOLE, DType, Device, Size, complex, range, slice))


class Changes(Exception):
    """A pickle modifies a shared object, or an item depends on its surroundings: parse without sharing."""


class Note(NamedTuple):
    """A state of the machine: byte offset, stack, number of memo entries, and ``size`` of the container on top."""

    at: int
    stack: tuple[Any, ...]
    memo: int
    size: int

    @classmethod
    def of(cls, at: int, stack: Sequence[Any], memo: int) -> Note:
        top = stack[-1] if stack else None
        return cls(at, tuple(stack), memo, len(top) if isinstance(top, dict | list) else -1)

    def between(self, items: Sequence[Any]) -> bool:
        """Return whether the state seems to lie between two of these dict items: the values on its stack are among the
        first ``items`` and are complete."""
        if len(self.stack) % 2 or not all(a is b for a, b in zip(self.stack, items, strict=False)):
            return False
        top: Any = self.stack[-1] if self.stack else None
        if isinstance(top, dict | list):
            return self.size == len(top)
        return type(top) in _WHOLE  # the state of any other object may still follow


class Memo(dict[int, Any]):
    """The memo of an item that is parsed separately. ``asked`` holds the entries of the outer memo that it uses."""

    def __init__(self, outer: Mapping[int, Any]) -> None:
        super().__init__()
        self._outer = outer
        self.asked: dict[int, Any] = {}

    def __missing__(self, n: int) -> Any:
        value = self.asked[n] = self._outer[n]
        if not _lasts(value):
            raise Changes
        return value

    def __len__(self) -> int:
        raise Changes  # MEMOIZE: the number of the entry depends on everything before the item


@dataclass(slots=True)
class Item:
    """One or more dict items: their bytes and, once parsed, the values and memo entries that they produce.

    ``read`` is None before the item is parsed, and False if it cannot be shared."""

    data: bytes
    first: int
    read: bool | None = None
    values: tuple[Any, ...] = ()
    memo: dict[int, Any] = field(default_factory=dict)
    globals: dict[tuple[str, str], bool] = field(default_factory=dict)
    cost: int = 0
    before: dict[int, Any] = field(default_factory=dict)
    holds: frozenset[int] = frozenset()

    def understand(self, memo: Mapping[int, Any], alone: Callable[[Item, Memo], None]) -> None:
        """Parse the item separately, with the memo that the items before it produced."""
        own = Memo(memo)
        self.read = False
        try:
            alone(self, own)
        except (Changes, CorruptError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
                RuntimeError, MemoryError):  # fmt: skip
            return  # it depends on its surroundings or is damaged, so each pickle parses its own copy
        self.memo, self.before, self.read = dict(own), own.asked, True
        self.holds = _at_hand((*self.values, *self.memo.values()))

    def fits(self, memo: Mapping[int, Any]) -> bool:
        """Return whether the item has the same value with this memo of the items before it."""
        return all(_same(value, memo.get(n, _CLEARED)) for n, value in self.before.items())


@dataclass(slots=True)
class Items:
    """A cache of the items of recent pickles. ``named`` has one object for each global that any of them names."""

    known: list[Item] = field(default_factory=list)
    named: dict[tuple[str, str], Any] = field(default_factory=dict)
    last: bytes = b""  # the last pickle that shares nothing

    def find(self, data: bytes, at: int, memo: Mapping[int, Any], alone: Callable[[Item, Memo], None]) -> Item | None:
        """Return the cached item at this byte offset, or None. ``alone`` parses an item separately."""
        count = len(memo)
        for item in self.known:
            if item.first == count and item.read is not False and data.startswith(item.data, at):
                if item.read is None:
                    item.understand(memo, alone)
                if item.read and item.fits(memo):
                    return item
        return None

    def learn(self, data: bytes, notes: Sequence[Note]) -> None:
        """Cache the items of a dict. ``notes`` are states at which a key may begin; the last note, with all items on
        its stack, decides which of them do (values may have been popped again)."""
        items = notes[-1].stack
        for note, after in pairwise([note for note in notes if note.between(items)]):
            if after.at - note.at < _LEAST:
                continue
            self._keep(data[note.at : after.at], note.memo)

    def learn_run(self, data: bytes, notes: Sequence[Note]) -> None:
        """Cache the first items of a dict as one item, as far as they equal those of the last pickle. ``notes`` are as
        in `learn`; the first one is the state before the first item."""
        before, items = self.last, notes[-1].stack
        ends = [note for note in notes if note.between(items)]
        if not ends or not before.startswith(data[: ends[0].at + _SHORTEST]):
            return
        start = end = ends[0]
        for note in ends[1:]:
            if not before.startswith(data[end.at : note.at], end.at):
                break
            end = note
        if end.at - start.at >= _SHORTEST:
            self._keep(data[start.at : end.at], start.memo)

    def _keep(self, text: bytes, first: int) -> None:
        if any(k.first == first and k.data == text for k in self.known):
            return
        self.known.append(Item(text, first))
        if len(self.known) > _MOST:  # evict unused items first, such as the arguments of one rank
            unused = (n for n, item in enumerate(self.known) if not item.read)
            del self.known[next(unused, 0)]


def refuse_shared(target: Any, taken: Iterable[Item]) -> None:
    """Raise Changes if the object to be modified is shared: a part of an item, or a named class or function."""
    if isinstance(target, Opaque) and target.args is None:
        raise Changes
    for item in taken:
        if id(target) in item.holds:
            raise Changes


def _at_hand(values: Iterable[Any]) -> frozenset[int]:
    """Return the ids of all objects that a pickle can reach through these values: the values and the elements of their
    tuples (the arguments of a call, which may return one of them)."""
    seen: set[int] = set()
    left = list(values)
    while left:
        value = left.pop()
        if type(value) in _LEAVES or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            left.extend(value)
    return frozenset(seen)


def _lasts(value: Any) -> bool:
    """Return whether no pickle opcode can modify the value."""
    if isinstance(value, tuple):
        return all(type(v) in _WHOLE or isinstance(v, DType) for v in value)
    if isinstance(value, Opaque):
        return value.args is None  # named only: see `refuse_shared`
    return type(value) in _WHOLE or isinstance(value, DType) or callable(value)


def _same(a: Any, b: Any) -> bool:
    """Return whether two memo entries are equal. The first one is immutable (see `_lasts`)."""
    if a is b:
        return True
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_equal, a, b))
    return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or type(a) not in _WHOLE:
        return a is b
    return a.hex() == b.hex() if type(a) is float else bool(a == b)
