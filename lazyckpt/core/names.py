"""Dotted names: where a path occurs in them, natural order, globs, and the nearest names to a wrong one."""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import nlargest

Pattern = str | re.Pattern[str] | Callable[[str], bool]


# modules that torch puts around others: compilation (torch/_dynamo/eval_frame.py `OptimizedModule`), FSDP1
# (torch/distributed/fsdp/_common_utils.py `FSDP_WRAPPED_MODULE`), activation checkpointing
# (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py `_CHECKPOINT_PREFIX`); nobody else uses these words
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def unwrapped(name: str) -> str:
    """The name without the modules that torch puts around others.

    >>> unwrapped("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight")
    'layers.0.up.weight'
    """
    if not any(word in name for word in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name


def free(name: str, taken: Container[str]) -> str:
    """The name if it is free, else the same with a number behind it. It takes few look-ups, however many are taken.

    >>> free("a", {"a", "a#2"}), free("b", {"a"})
    ('a#3', 'b')
    """
    if name not in taken:
        return name
    low, high = 1, 2  # in the end, `low` is a taken number and `high` a free one
    while f"{name}#{high}" in taken:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if f"{name}#{middle}" in taken else (low, middle)
    return f"{name}#{high}"


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts ``layers.10`` behind ``layers.9``.

    >>> sorted(["a.10", "a.9", "a.b"], key=natural)
    ['a.9', 'a.10', 'a.b']
    """
    parts = re.split(r"([0-9]{1,18})", name)  # longer runs of digits are no numbers that anybody counts with
    return [(0, int(s), s) if s.isdecimal() and s.isascii() and len(s) < 19 else (1, 0, s) for s in parts if s]


def shortened(text: str, limit: int = 120) -> str:
    """The text with its middle left out if it is longer than ``limit`` characters.

    >>> shortened("a.very.long.name", 9)
    'a.ve…name'
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[len(text) - (limit - 1) // 2 :]}"


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """A test for names: a glob (``*`` also crosses dots), a compiled regex (searched), or the callable itself.

    >>> matcher("*.norm.weight")("layers.3.norm.weight")
    True
    """
    if isinstance(pattern, str):
        glob = re.compile(fnmatch.translate(pattern))
        return lambda name: glob.match(name) is not None
    if isinstance(pattern, re.Pattern):
        return lambda name: pattern.search(name) is not None
    return pattern


_OFFERED = 20_000  # paths that are completed
_INNER = 2_000  # names of which paths inside are, too
_DEEP = 20  # levels; of names with more, paths inside are not completed
_LETTERS = 1 << 23  # characters of all paths that are completed


class Names:
    """An ordered set of dotted names that finds prefixes and inner paths fast."""

    def __init__(self, names: Iterable[str]) -> None:
        self.order: tuple[str, ...] = tuple(names)
        self._sorted: list[str] | None = None

    @cached_property
    def position(self) -> dict[str, int]:
        """Name -> its place in `order`."""
        return {name: n for n, name in enumerate(self.order)}

    @property
    def sorted(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self.order)
        return self._sorted

    def below(self, prefix: str) -> Sequence[str]:
        """The names that begin with ``prefix.``, in plain sorted order."""
        start = prefix + "."
        lo = bisect_left(self.sorted, start)
        hi = bisect_left(self.sorted, prefix + "/", lo)  # "/" is the character behind "."
        return self.sorted[lo:hi]

    def inside(self, path: str) -> list[str]:
        """The full paths at which ``path`` occurs inside the names: a name that ends with it, or a prefix."""
        inner = "." + path
        found: dict[str, None] = {}
        for name in self.order:
            at = name.find(inner)
            while at >= 0:
                end = at + len(inner)
                if end == len(name) or name[end] == ".":
                    found[name[:end]] = None
                at = name.find(inner, at + 1)
        return list(found)

    def paths(self) -> list[str]:
        """What one may want to complete: all prefixes and names or, if these are too many, those of as many levels as
        there is room for; of few names also the paths behind their first component that occur nowhere else (but those
        that begin with a number: what is offered is sorted, and they would come first).

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
        """All prefixes and names, by level, of as many levels as there is room for; at least of the first."""
        found: dict[str, None] = {}
        letters = 0
        rest = [(name, name.find(".")) for name in self.order]  # where the level ends; -1: with the name
        while rest:
            level = dict.fromkeys(name if end < 0 else name[:end] for name, end in rest)
            letters += sum(map(len, level))
            if found and (len(found) + len(level) > _OFFERED or letters > _LETTERS):
                break
            found |= level
            rest = [(name, name.find(".", end + 1)) for name, end in rest if end >= 0]
        return list(found)

    def near(self, wrong: str, count: int = 3) -> list[str]:
        """The names (or prefixes of names) most like a wrong one, else the paths inside names that are.

        The time is bounded, however many names there are and however long they are: of a long name both ends are
        compared, and of very many or very long names the first ones.

        >>> Names(["model.0.q_proj.weight", "model.0.k_proj.weight"]).near("q_prj", 1)
        ['q_proj']
        """
        wrong = _ends(wrong)
        depth = wrong.count(".")
        names = list(_within(self.order[:_SEARCHED], _CHARACTERS))
        starts = (".".join(name.split(".", depth + 1)[: depth + 1]) for name in names)
        stems = dict.fromkeys(stem for both in zip(names, starts, strict=True) for stem in both)
        found = _alike(wrong, stems, count, 0.55)
        if found:
            return found
        inner = dict.fromkeys(
            ".".join(parts[start : start + depth + 1])
            for parts in (name.split(".") for name in names[:_INNER] if len(name) <= _COMPARED)
            for start in range(1, len(parts) - depth)
        )
        return _alike(wrong, inner, count, 0.65)


_SEARCHED = 20_000  # names
_CHARACTERS = 2_000_000  # of all names that are searched
_COMPARED = 200  # characters of one name
_RANKED = 64  # names that share most pairs of characters with the wrong one, which are compared in full


def _within(names: Iterable[str], characters: int) -> Iterator[str]:
    """The first names that have so many characters together."""
    for name in names:
        characters -= len(name)
        if characters < 0:
            return
        yield name


def _ends(name: str) -> str:
    """A name, or both ends of a long one."""
    return name if len(name) <= _COMPARED else name[: _COMPARED // 2] + name[-_COMPARED // 2 :]


def _alike(wrong: str, names: Iterable[str], count: int, least: float) -> list[str]:
    """The names most like the wrong one, best first, whose likeness is at least ``least``."""
    pairs = {wrong[n : n + 2] for n in range(len(wrong) - 1)} or {wrong}
    shortened = ((name, _ends(name)) for name in names if name)
    candidates = nlargest(
        _RANKED, shortened, lambda pair: sum(map(pair[1].__contains__, pairs)) - abs(len(pair[1]) - len(wrong)) / 2
    )
    mine = _grams(wrong)
    scored = [(_likeness(mine, _grams(short)), name) for name, short in candidates]
    return [name for score, name in nlargest(count, scored, lambda pair: pair[0]) if score >= least]


def _grams(text: str) -> Counter[str]:
    """Characters and pairs of neighbours, with how often each occurs."""
    framed = f"\0{text}\0"
    return Counter(text) + Counter(framed[n : n + 2] for n in range(len(framed) - 1))


def _likeness(a: Counter[str], b: Counter[str]) -> float:
    """The share of what two texts are made of that they have in common (Dice's coefficient), from 0 to 1."""
    return 2 * (a & b).total() / (a.total() + b.total())
