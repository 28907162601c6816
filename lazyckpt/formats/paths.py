"""Names of files that a file claims, and names in messages."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
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


def some(names: Iterable[str]) -> str:
    """The first three of them, for a message."""
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
