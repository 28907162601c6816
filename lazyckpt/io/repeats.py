"""What the pickles of many ranks have in common: the same items, byte for byte, of the dict that each of them is.

Ranks' files differ in a rank number or the state of a generator; the names and places of their tensors, most of the
pickle, are often the same. An item that begins with as many memo entries as it did in another pickle, is the same
bytes, and refers to equal memo entries of what stands before it, means the same: it need not be read again.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from .records import Opaque

FEW = 64  # items of a dict that is looked at: what is saved of a training run has some ten
_LEAST = 4 << 10  # bytes of an item that are worth the trouble
_MOST = 48  # items that are kept
_CLEARED = object()
_WHOLE = (str, int, float, bytes, bool, type(None))


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
        """Whether it is one between two of these items of a dict: the values so far are what they were, and whole."""
        if len(self.stack) % 2 or not all(a is b for a, b in zip(self.stack, items, strict=False)):
            return False
        top: Any = self.stack[-1] if self.stack else None
        if isinstance(top, dict | list):
            return self.size == len(top)
        return type(top) in _WHOLE  # an object might still be given its state


@dataclass(slots=True)
class Item:
    """Some items of a dict: their bytes, what they leave on the stack and in the memo. ``before``: the memo entries
    that they refer to; None as long as nobody asked."""

    data: bytes
    first: int
    values: tuple[Any, ...]
    memo: dict[int, Any]
    whole: Mapping[int, Any]
    globals: dict[tuple[str, str], bool]
    before: dict[int, Any] | None = None

    def fits(self, memo: Mapping[int, Any]) -> bool:
        """Whether it would mean the same after the items that left this memo."""
        if self.before is None:
            self.before = self._references()
        return all(_same(value, memo.get(n, _CLEARED)) for n, value in self.before.items())

    def _references(self) -> dict[int, Any]:
        found = {}
        # (an item alone is no pickle: a STOP ends it)
        try:
            for op, arg, _ in pickletools.genops(self.data + b"."):
                if op.name in ("BINGET", "LONG_BINGET", "GET") and type(arg) is int and arg < self.first:
                    found[arg] = self.whole.get(arg, _CLEARED)
        except (ValueError, UnicodeError):  # it reads some things more strictly than we do
            return {-1: _CLEARED}  # what no memo has
        return found


@dataclass(slots=True)
class Items:
    """Those of the pickles that were read last."""

    known: list[Item] = field(default_factory=list)

    def find(self, data: bytes, at: int, memo: Mapping[int, Any]) -> Item | None:
        """The item that stands at this byte, if it is known."""
        count = len(memo)
        for item in self.known:
            if item.first == count and data.startswith(item.data, at) and item.fits(memo):
                return item
        return None

    def learn(
        self, data: bytes, notes: Sequence[Note], memo: Mapping[int, Any], names: Mapping[tuple[str, str], bool]
    ) -> None:
        """Keep the items of a dict. ``notes``: states where a key may have begun, and the last one with all of them on
        the stack; it tells which are right (a value may be taken from the stack again)."""
        items = notes[-1].stack
        ends = [note for note in notes if note.between(items)]
        if sorted(memo) != list(range(len(memo))):
            return
        for note, after in pairwise(ends):
            if after.at - note.at < _LEAST:
                continue
            text = data[note.at : after.at]
            if any(k.first == note.memo and k.data == text for k in self.known):
                continue
            own = {n: memo[n] for n in range(note.memo, after.memo)}
            values = items[len(note.stack) : len(after.stack)]
            self.known.append(Item(text, note.memo, values, own, memo, dict(names)))
            if len(self.known) > _MOST:  # what was of no use yet (another rank's arguments) goes first
                unused = (n for n, item in enumerate(self.known) if item.before is None)
                del self.known[next(unused, 0)]


def _same(a: Any, b: Any) -> bool:
    """Whether two memo entries are the same for good: nothing changes them later."""
    if a is b:
        return not isinstance(a, list | dict | set) and a is not _CLEARED
    if isinstance(a, Opaque) and isinstance(b, Opaque):  # named, not called: a class or a function
        return (a.module, a.name) == (b.module, b.name) and type(a) is type(b) and a.args is None and b.args is None
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_equal, a, b))
    return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and type(a) in _WHOLE and bool(a == b)
