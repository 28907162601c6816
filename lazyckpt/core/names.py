"""Dotted names: prefixes and inner paths, natural order, globs, and suggestions for a wrong name."""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

Pattern = str | re.Pattern[str] | Callable[[str], bool]


# Attribute names of torch's wrapper modules: compilation (torch/_dynamo/eval_frame.py `OptimizedModule`), FSDP1
# (torch/distributed/fsdp/_common_utils.py `FSDP_WRAPPED_MODULE`), activation checkpointing
# (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py `_CHECKPOINT_PREFIX`). They are used nowhere else.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def unwrapped(name: str) -> str:
    """Return the name without torch's wrapper modules.

    >>> unwrapped("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight")
    'layers.0.up.weight'
    """
    if not any(word in name for word in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name


def any_wrapped(names: Iterable[str]) -> bool:
    """Return whether `unwrapped` may change one of the names. Much faster than asking for each."""
    text = "\n".join(names)
    return any(word in text for word in _WRAPPERS)


def free(name: str, taken: Container[str]) -> str:
    """Return the name if it is free, else with a number appended. The number of look-ups is logarithmic.

    >>> free("a", {"a", "a#2"}), free("b", {"a"})
    ('a#3', 'b')
    """
    if name not in taken:
        return name
    low, high = 1, 2  # invariant of the search: `low` is taken, `high` is free
    while f"{name}#{high}" in taken:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if f"{name}#{middle}" in taken else (low, middle)
    return f"{name}#{high}"


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``layers.10`` after ``layers.9``.

    >>> sorted(["a.10", "a.9", "a.b"], key=natural)
    ['a.9', 'a.10', 'a.b']
    """
    if name.isdecimal() and name.isascii() and len(name) < 19:
        return [(0, int(name), name)]
    parts = re.split(r"([0-9]{1,18})", name)  # runs of more digits are not counters
    return [(0, int(s), s) if s.isdecimal() and s.isascii() and len(s) < 19 else (1, 0, s) for s in parts if s]


def shortened(text: str, limit: int = 120) -> str:
    """Return the text without its middle if it is longer than ``limit`` characters.

    >>> shortened("a.very.long.name", 9)
    'a.ve…name'
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[len(text) - (limit - 1) // 2 :]}"


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """Return a predicate for names: of a glob (``*`` also matches dots), a compiled regex (searched), or a callable.

    >>> matcher("*.norm.weight")("layers.3.norm.weight")
    True
    """
    if isinstance(pattern, str):
        glob = re.compile(fnmatch.translate(pattern))
        return lambda name: glob.match(name) is not None
    if isinstance(pattern, re.Pattern):
        return lambda name: pattern.search(name) is not None
    return pattern


_OFFERED = 20_000  # the most paths offered for completion
_INNER = 2_000  # with more names, inner paths are not offered
_DEEP = 20  # with more levels in a name, inner paths are not offered
_LETTERS = 1 << 23  # the most characters of all offered paths


class Same(Mapping[str, str]):
    """Names, each mapped to itself: a table of them that takes no memory."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> str:
        if name in self._names:
            return name
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Names:
    """An ordered set of dotted names, with fast look-up of prefixes and inner paths."""

    def __init__(self, names: Iterable[str]) -> None:
        self.order: tuple[str, ...] = tuple(names)

    @cached_property
    def position(self) -> dict[str, int]:
        """The index of each name in `order`."""
        return {name: n for n, name in enumerate(self.order)}

    @cached_property
    def ranking(self) -> NDArray[np.int64]:
        """The indices in `order` of the sorted names."""
        return np.array(sorted(range(len(self.order)), key=self.order.__getitem__), np.int64)

    @cached_property
    def sorted(self) -> list[str]:
        """The names in plain sorted order."""
        return sorted(self.order)

    def below(self, prefix: str) -> Sequence[str]:
        """Return the names that begin with ``prefix.``, in plain sorted order."""
        start = prefix + "."
        lo = bisect_left(self.sorted, start)
        hi = bisect_left(self.sorted, prefix + "/", lo)  # "/" is the character after "."
        return self.sorted[lo:hi]

    def inside(self, path: str) -> list[str]:
        """Return the names and prefixes of names that end with ``.path``."""
        inner = "." + path
        found: dict[str, None] = {}
        if inner not in "\n".join(self.order):  # one search for all names, which most often finds nothing
            return []
        for name in self.order:
            at = name.find(inner)
            while at >= 0:
                end = at + len(inner)
                if end == len(name) or name[end] == ".":
                    found[name[:end]] = None
                at = name.find(inner, at + 1)
        return list(found)

    def paths(self) -> list[str]:
        """Return the paths to offer for completion.

        These are all prefixes and names or, if there are too many, those of the first levels. If there are few names,
        unique paths after a name's first component are included, except those that begin with a number: completions
        are sorted, and the numbers would come first.

        >>> Names(["model.up.weight"]).paths()
        ['model', 'model.up', 'model.up.weight', 'up', 'up.weight']
        """
        found = self._prefixes()
        if len(self.order) > _INNER or any(name.count(".") >= _DEEP for name in self.order):
            return found
        if sum(len(name) * name.count(".") ** 2 for name in self.order) > _LETTERS:
            return found
        split = [name.split(".") for name in self.order]
        places: dict[str, set[str]] = {}
        for parts in split:
            for start in range(1, len(parts)):
                for stop in range(start + 1, len(parts) + 1):
                    places.setdefault(".".join(parts[start:stop]), set()).add(".".join(parts[:stop]))
        behind = dict.fromkeys(".".join(parts[1:stop]) for parts in split for stop in range(2, len(parts) + 1))
        known = set(found)
        return found + [
            path for path in behind if len(places[path]) == 1 and path not in known and not path[:1].isdigit()
        ]

    def _prefixes(self) -> list[str]:
        """Return all prefixes and names, level by level, up to the limits; at least those of the first level."""
        found: dict[str, None] = {}
        letters = 0
        rest = [(name, name.find(".")) for name in self.order]  # the end of the level; -1: the end of the name
        while rest:
            level = dict.fromkeys(name if end < 0 else name[:end] for name, end in rest)
            letters += sum(map(len, level))
            if found and (len(found) + len(level) > _OFFERED or letters > _LETTERS):
                break
            found |= level
            rest = [(name, name.find(".", end + 1)) for name, end in rest if end >= 0]
        return list(found)

    def near(self, wrong: str, count: int = 3) -> list[str]:
        """Return the names or prefixes most similar to a wrong name, else the most similar inner paths.

        If the names below a prefix of the wrong name have similar ones, only these are compared. The running time is
        bounded: of a long name only both ends are compared, and of very many or very long names only the first ones.

        >>> Names(["model.0.q_proj.weight", "model.0.k_proj.weight"]).near("q_prj", 1)
        ['q_proj']
        """
        if below := self._beside(wrong):
            found = _alike(_ends(wrong), _stems(below, wrong.count(".")), count, 0.55)
            if found:
                return found
        wrong = _ends(wrong)
        depth = wrong.count(".")
        names = list(_within(self.order[:_SEARCHED], _CHARACTERS))
        found = _alike(wrong, _stems(names, depth), count, 0.55)
        if found:
            return found
        inner = dict.fromkeys(
            ".".join(parts[start : start + depth + 1])
            for parts in (name.split(".") for name in names[:_INNER] if len(name) <= _COMPARED)
            for start in range(1, len(parts) - depth)
        )
        return _alike(wrong, inner, count, 0.65)

    def _beside(self, wrong: str) -> list[str]:
        """Return the names below the longest prefix of a wrong name that has any; [] if all are below it."""
        at = wrong.rfind(".") if len(wrong) <= _COMPARED else -1
        while at > 0:
            if names := self.below(wrong[:at]):
                return list(_within(names[:_SEARCHED], _CHARACTERS)) if len(names) < len(self.order) else []
            at = wrong.rfind(".", 0, at)
        return []


_SEARCHED = 20_000  # the most names that are searched
_CHARACTERS = 2_000_000  # the most characters of all names that are searched
_COMPARED = 200  # the most characters of one name that are compared
_RANKED = 64  # the candidates, by common pairs of characters, that are compared in full


def _stems(names: Iterable[str], depth: int) -> Iterable[str]:
    """Return the names, and their first parts up to as many dots, each once."""
    starts = ((name, ".".join(name.split(".", depth + 1)[: depth + 1])) for name in names)
    return dict.fromkeys(stem for both in starts for stem in both)


def _within(names: Iterable[str], characters: int) -> Iterator[str]:
    """Yield the first names, up to a total number of characters."""
    for name in names:
        characters -= len(name)
        if characters < 0:
            return
        yield name


def _ends(name: str) -> str:
    """Return the name, or both ends of a long one."""
    return name if len(name) <= _COMPARED else name[: _COMPARED // 2] + name[-_COMPARED // 2 :]


def _alike(wrong: str, names: Iterable[str], count: int, least: float) -> list[str]:
    """Return the names most similar to the wrong one, best first, with a similarity of at least ``least``."""
    pairs = {wrong[n : n + 2] for n in range(len(wrong) - 1)} or {wrong}
    shortened = ((name, _ends(name)) for name in names if name)
    candidates = nlargest(
        _RANKED, shortened, lambda pair: sum(map(pair[1].__contains__, pairs)) - abs(len(pair[1]) - len(wrong)) / 2
    )
    mine = _grams(wrong)
    scored = [(_likeness(mine, _grams(short)), name) for name, short in candidates]
    return [name for score, name in nlargest(count, scored, lambda pair: pair[0]) if score >= least]


def _grams(text: str) -> Counter[str]:
    """Return the counts of the characters and of the pairs of neighbouring characters."""
    framed = f"\0{text}\0"
    return Counter(text) + Counter(framed[n : n + 2] for n in range(len(framed) - 1))


def _likeness(a: Counter[str], b: Counter[str]) -> float:
    """Return the similarity of two texts by their counts (Dice's coefficient), from 0 to 1."""
    return 2 * (a & b).total() / (a.total() + b.total())
