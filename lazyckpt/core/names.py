"""Dotted names: where a path occurs in them, natural order, globs, and the nearest names to a wrong one."""

from __future__ import annotations

import difflib
import fnmatch
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence

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
    low, high = 1, 2  # numbers of which the first is taken, the second free in the end
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


class Names:
    """An ordered set of dotted names that finds prefixes and inner paths fast."""

    def __init__(self, names: Iterable[str]) -> None:
        self.order: tuple[str, ...] = tuple(names)
        self._sorted: list[str] | None = None

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
        split = [name.split(".") for name in self.order]
        found: dict[str, None] = {}
        for depth in range(1, max(map(len, split), default=0) + 1):
            level = dict.fromkeys(".".join(parts[:depth]) for parts in split if len(parts) >= depth)
            if found and len(found) + len(level) > _OFFERED:
                break
            found |= level
        if len(split) > _INNER or any(len(parts) > 20 for parts in split):
            return list(found)
        places: dict[str, set[str]] = {}
        for parts in split:
            for start in range(1, len(parts)):
                for stop in range(start + 1, len(parts) + 1):
                    places.setdefault(".".join(parts[start:stop]), set()).add(".".join(parts[:stop]))
        behind = dict.fromkeys(".".join(parts[1:stop]) for parts in split for stop in range(2, len(parts) + 1))
        return list(found) + [
            path for path in behind if len(places[path]) == 1 and path not in found and not path[:1].isdigit()
        ]

    def near(self, wrong: str, count: int = 3) -> list[str]:
        """The names (or prefixes of names) most like a wrong one, else the paths inside names that are.

        >>> Names(["model.0.q_proj.weight", "model.0.k_proj.weight"]).near("q_prj", 1)
        ['q_proj']
        """
        depth = wrong.count(".")
        stems = dict.fromkeys(
            ".".join(parts[: d + 1])
            for parts in (name.split(".") for name in self.order[:20_000])
            for d in (len(parts) - 1, min(depth, len(parts) - 1))
        )
        found = difflib.get_close_matches(wrong, list(stems), n=count, cutoff=0.5)
        if found:
            return found
        inner = dict.fromkeys(
            ".".join(parts[start : start + depth + 1])
            for parts in (name.split(".") for name in self.order[:_INNER])
            for start in range(1, len(parts) - depth)
        )
        return difflib.get_close_matches(wrong, list(inner), n=count, cutoff=0.6)
