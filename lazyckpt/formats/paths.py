"""Names of files that a file claims, and names in messages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any


def inside(path: Any) -> bool:
    """Whether what a file gives as the name of another is one, and lies in the same folder or below.

    >>> inside("shards/a.bin"), inside("../a.bin"), inside("/etc/passwd")
    (True, False, False)
    """
    if not isinstance(path, str) or not path.isprintable() or any(c in path for c in "\\:"):
        return False
    normal = posixpath.normpath(path)
    return not posixpath.isabs(path) and normal != "." and normal.split("/")[0] != ".."


_LONG = 80  # characters of a name in a message


def some(names: Iterable[str], count: int = 3) -> str:
    """The first of them, for a message.

    >>> some("abcd"), some("abc")
    ('a, b, c, ...', 'a, b, c')
    """
    first = list(islice(names, count + 1))
    shown = [name if len(name) <= _LONG else f"{name[:_LONG]}..." for name in first]
    return ", ".join(shown[:count]) + (", ..." if len(first) > count else "")


def told_together(reasons: Mapping[str, str], what: str) -> list[str]:
    """A line for each reason, of the names that differ in numbers only: a model has a hundred layers.

    >>> told_together({"a.0.w": "it is odd", "a.1.w": "it is odd", "b": "it is odd"}, "cannot be read")
    ['2 tensors (a.0.w, a.1.w) cannot be read: it is odd', "'b' cannot be read: it is odd"]
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((re.sub(r"\d+", "#", name), reason), []).append(name)
    return [
        f"{repr(names[0]) if len(names) == 1 else f'{len(names):,} tensors ({some(names)})'} {what}: {reason}"
        for (_, reason), names in groups.items()
    ]
