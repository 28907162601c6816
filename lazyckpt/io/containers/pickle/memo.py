"""What the pickles of many ranks have in common: the same items, byte for byte, of the dict that each of them is.

Ranks' files differ in a rank number or the state of a generator; the names and places of their tensors, most of the
pickle, are often the same. Such an item is read once, by itself, and taken over where the same bytes stand in another
pickle and refer to equal entries of its memo. A file that is read among others is read as if it were alone:

- An item is read on an empty stack, and its memo notes what of the other memo it refers to. If it takes anything from
  the stack, or refers to something that can change, it is not shared.
- What is shared never changes: a pickle that edits something shared, or a class or function that it names, is read
  again alone (`refuse_shared`).
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

FEW = 64  # items of a dict that is looked at: what is saved of a training run has some ten
_LEAST = 4 << 10  # bytes of an item that are worth the trouble
_MOST = 48  # items that are kept
_CLEARED = object()
_WHOLE = (str, int, float, bytes, bool, type(None))
_LEAVES = frozenset((*_WHOLE, DType, Device, Size, complex, range, slice))


class Changes(Exception):
    """A pickle changes what it would share, or an item is not one by itself: to be read alone."""


class Note(NamedTuple):
    """A state of the machine: the byte it is at, what is on the stack, how many memo entries there are; ``size``: of
    the container on top."""

    at: int
    stack: tuple[Any, ...]
    memo: int
    size: int

    @classmethod
    def of(cls, at: int, stack: Sequence[Any], memo: int) -> Note:
        top = stack[-1] if stack else None
        return cls(at, tuple(stack), memo, len(top) if isinstance(top, dict | list) else -1)

    def between(self, items: Sequence[Any]) -> bool:
        """Whether it seems to be one between two of these items of a dict: the values so far are what they were, and
        whole."""
        if len(self.stack) % 2 or not all(a is b for a, b in zip(self.stack, items, strict=False)):
            return False
        top: Any = self.stack[-1] if self.stack else None
        if isinstance(top, dict | list):
            return self.size == len(top)
        return type(top) in _WHOLE  # an object might still be given its state


class Memo(dict[int, Any]):
    """The memo of an item that is read by itself. ``asked``: entries of the pickle's own memo that it refers to."""

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
        raise Changes  # MEMOIZE: which entry that is depends on all that stands before


@dataclass(slots=True)
class Item:
    """Some items of a dict: their bytes, and what they leave on the stack and in the memo, once they were ``read`` by
    themselves (None: not yet; False: they are not to be shared)."""

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
        """Read it by itself, after the items that left this memo."""
        own = Memo(memo)
        self.read = False
        try:
            alone(self, own)
        except (Changes, CorruptError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
                RuntimeError, MemoryError):  # fmt: skip
            return  # what it means depends on more than its bytes, or it is broken: each pickle reads it for itself
        self.memo, self.before, self.read = dict(own), own.asked, True
        self.holds = _at_hand((*self.values, *self.memo.values()))

    def fits(self, memo: Mapping[int, Any]) -> bool:
        """Whether it means the same after the items that left this memo."""
        return all(_same(value, memo.get(n, _CLEARED)) for n, value in self.before.items())


@dataclass(slots=True)
class Items:
    """Those of the pickles that were read last. ``named``: one object for each thing that any of them names."""

    known: list[Item] = field(default_factory=list)
    named: dict[tuple[str, str], Any] = field(default_factory=dict)

    def find(self, data: bytes, at: int, memo: Mapping[int, Any], alone: Callable[[Item, Memo], None]) -> Item | None:
        """The item that stands at this byte, if it is known. ``alone``: reads one by itself."""
        count = len(memo)
        for item in self.known:
            if item.first == count and item.read is not False and data.startswith(item.data, at):
                if item.read is None:
                    item.understand(memo, alone)
                if item.read and item.fits(memo):
                    return item
        return None

    def learn(self, data: bytes, notes: Sequence[Note]) -> None:
        """Keep the items of a dict. ``notes``: states where a key may have begun, and the last one with all of them on
        the stack; it tells which are right (a value may be taken from the stack again)."""
        items = notes[-1].stack
        for note, after in pairwise([note for note in notes if note.between(items)]):
            if after.at - note.at < _LEAST:
                continue
            text = data[note.at : after.at]
            if any(k.first == note.memo and k.data == text for k in self.known):
                continue
            self.known.append(Item(text, note.memo))
            if len(self.known) > _MOST:  # what was of no use yet (another rank's arguments) goes first
                unused = (n for n, item in enumerate(self.known) if not item.read)
                del self.known[next(unused, 0)]


def refuse_shared(target: Any, taken: Iterable[Item]) -> None:
    """Raise Changes if what is about to be edited is shared: a part of an item, or a class or function by its name."""
    if isinstance(target, Opaque) and target.args is None:
        raise Changes
    for item in taken:
        if id(target) in item.holds:
            raise Changes


def _at_hand(values: Iterable[Any]) -> frozenset[int]:
    """The ids of all objects that a pickle can come by through these: they themselves, and what is in their tuples (the
    arguments of a call, which may return one of them)."""
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
    """Whether nothing in a pickle can change it."""
    if isinstance(value, tuple):
        return all(type(v) in _WHOLE or isinstance(v, DType) for v in value)
    if isinstance(value, Opaque):
        return value.args is None  # named only: see `refuse_shared`
    return type(value) in _WHOLE or isinstance(value, DType) or callable(value)


def _same(a: Any, b: Any) -> bool:
    """Whether two memo entries, of which the first lasts, are the same."""
    if a is b:
        return True
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_equal, a, b))
    return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or type(a) not in _WHOLE:
        return a is b
    return a.hex() == b.hex() if type(a) is float else bool(a == b)
