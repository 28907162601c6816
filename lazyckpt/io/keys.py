"""What may be a key of a dict or an element of a set: hashing and finding it must not take long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import CorruptError
from .limits import Budget

COMMON = (1 << 61) - 1  # integers below it are their own hashes
_MOST = 100  # keys of one container that may have the same hash
_ELEMENTS = 4096  # of a tuple that is a key, over all levels
_LEVELS = 16


def check_key(key: Any) -> int:
    """What hashing the key costs, in elementary steps.

    Hashing a tuple recurses in C, and visits a shared element as often as it is referred to. Raises CorruptError for
    what no honest key is.
    """
    if isinstance(key, int):
        return 1 + key.bit_length() // 64
    level, seen = [key], 1
    for _ in range(_LEVELS):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, tuple | frozenset):
                seen += len(one)
                if seen > _ELEMENTS:
                    raise CorruptError("a dictionary key that expands to thousands of elements")
                inner.extend(one)
            elif isinstance(one, int):
                seen += one.bit_length() // 64
        if not inner:
            return seen
        level = inner
    raise CorruptError("a dictionary key that is nested absurdly deep")


def check_keys(keys: Iterable[Any]) -> None:
    """Raise CorruptError if these are made to take long as the keys of one container."""
    equal: dict[int, int] = {}
    for key in keys:
        kind = type(key)
        if kind is str or (kind is int and -COMMON < key < COMMON):
            continue
        check_key(key)
        found = equal[hash(key)] = equal.get(hash(key), 0) + 1
        if found > _MOST:
            raise CorruptError("hundreds of dictionary keys that have the same hash")


class Keys:
    """Refuses keys of the dicts and sets of one file that are made to take long to hash or to find."""

    __slots__ = ("_budget", "_equal")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._equal: dict[tuple[int, int], int] = {}  # (a dict or set, a hash) -> keys that have it, where that is rare

    def check(self, target: Any, keys: Iterable[Any]) -> None:
        """Charge the keys that ``target`` is given. Raises CorruptError past the limit."""
        for key in keys:
            kind = type(key)
            if kind is str or (kind is int and -COMMON < key < COMMON):
                continue
            self._budget.steps(check_key(key))
            place = id(target), hash(key)
            number = self._equal[place] = self._equal.get(place, 0) + 1
            self._budget.steps(number)
