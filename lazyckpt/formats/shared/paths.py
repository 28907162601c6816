"""Validation of paths that files refer to, grouped problems, and access to nested dicts and lists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import Problem, some
from ...io.containers.pickle.plain import Path, text


def inside(path: Any) -> bool:
    """Return whether a path in a file is a valid relative path in the file's folder or below.

    >>> inside("shards/a.bin"), inside("../a.bin"), inside("/etc/passwd")
    (True, False, False)
    """
    if not isinstance(path, str) or not path.isprintable() or any(c in path for c in "\\:"):
        return False
    normal = posixpath.normpath(path)
    return not posixpath.isabs(path) and normal != "." and normal.split("/")[0] != ".."


def grouped(code: str, reasons: Mapping[str, str], what: str) -> list[Problem]:
    """Return one problem for all names that differ only in numbers and have the same reason.

    >>> for p in grouped("unmerged-tensor", {"a.0.w": "it is odd", "a.1.w": "it is odd", "b": "it is odd"}, "stay"):
    ...     print(p)
    2 tensors (a.0.w, a.1.w) stay: it is odd
    'b' stay: it is odd
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((re.sub(r"\d+", "#", name), reason), []).append(name)
    problems = []
    for (_, reason), names in groups.items():
        one = len(names) == 1
        of = repr(names[0]) if one else f"{len(names):,} tensors ({some(names)})"
        problems.append(Problem(code, f"{of} {what}: {reason}", names[0] if one else None))
    return problems


# -- Access to nested dicts and lists by path. Pure.


def at(root: Any, path: Path) -> Any:
    """Return the value at a path; None if there is none. A mapping is asked only for the keys of the path.

    >>> at({"groups": [{"lr": 0.1}]}, ("groups", 0, "lr"))
    0.1
    """
    value = root
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def put(root: dict[Any, Any], path: Path, value: Any) -> None:
    """Set the value at a path, and create the dicts and lists on the way.

    Numbers are indices of lists (torch/distributed/checkpoint/_traverse.py `set_element`), which may have gaps. Nothing
    is set if a value on the way is neither a dict nor a list."""
    here_at: Any = root
    for here, after in zip(path, (*path[1:], None), strict=True):
        fresh: Any = value if after is None else [] if isinstance(after, int) else {}
        if isinstance(here_at, list):
            if not isinstance(here, int) or here > len(here_at) + 10_000:
                return
            here_at += [None] * (here + 1 - len(here_at))
            if here_at[here] is None or after is None:
                here_at[here] = fresh
        elif not isinstance(here_at, dict):
            return
        elif here not in here_at or after is None:
            here_at[here] = fresh
        here_at = here_at[here]


def paths(root: Any, depth: int) -> Iterator[Path]:
    """Yield the paths of the values in nested dicts and in lists of dicts, down to ``depth`` levels. Keys become text.

    >>> list(paths({"a": {"b": {"c": 1}}, "d": [2, 3]}, 2))
    [('a', 'b'), ('d',)]
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(root, dict):
        items = root.items()
    elif isinstance(root, list) and any(isinstance(item, dict) for item in root):
        items = enumerate(root)
    for key, value in items:
        part = key if isinstance(root, list) else text(key)
        below = False
        if depth > 1:
            for path in paths(value, depth - 1):
                below = True
                yield (part, *path)
        if not below:
            yield (part,)
