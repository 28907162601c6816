"""The line of Python that reads what the screen shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def quoted(text: str) -> str:
    """A Python string, in double quotes where it needs no escapes.

    >>> print(quoted("model.norm.weight"), quoted('"\\x1b'))
    "model.norm.weight" '"\\x1b'
    """
    plain = text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else repr(text)


def opening(path: str, options: Mapping[str, Any]) -> str:
    """
    >>> print(opening("ckpt", {"tag": "step9", "format": None}))
    lazyckpt.open("ckpt", tag="step9")
    """
    given = [f"{name}={quoted(v) if isinstance(v, str) else repr(v)}" for name, v in options.items() if v is not None]
    return f"lazyckpt.open({', '.join([quoted(path), *given])})"


def of_state(opened: str, state: str | None) -> str:
    """Of a state by its name; None: the one that is read by default."""
    if state is None:
        return opened
    return f"{opened}.stored" if state == "stored" else f"{opened}.states[{quoted(state)}]"


def of_window(index: str | None, shape: Sequence[int], first: Sequence[int], last: Sequence[int]) -> str:
    """The index of a window of what ``index`` selects, which has ``shape``: from the element ``first`` to ``last``,
    both included, in C order; a window that is more than one block is read with what is around it.

    >>> of_window(None, (512, 128), (0, 0), (7, 127)), of_window("0:4, ::8", (4, 16), (0, 0), (3, 15))
    ('[0:8]', '[0:4, ::8]')
    >>> of_window("::2", (256, 128), (8, 4), (15, 7)), of_window(None, (2, 4, 8), (0, 3, 0), (1, 1, 7))
    ('.lazy[::2][8:16, 4:8]', '[...]')
    """
    parts: list[str] = []
    if not first:  # no elements, or one: no dimensions
        shape = ()
    for dim, (n, a, b) in enumerate(zip(shape, first, last, strict=True)):
        crossing = any(x != y for x, y in zip(first[:dim], last[:dim], strict=True)) and dim < len(shape) - 1
        if crossing or (a == 0 and b == n - 1):
            parts.append(":")
        elif a == b and dim < len(shape) - 2:
            parts.append(str(a))
        else:
            parts.append(f"{a}:{b + 1}")
    while parts and parts[-1] == ":":
        parts.pop()
    window = f"[{', '.join(parts)}]" if parts else ""
    if not window:
        return f"[{index}]" if index else "[...]"
    return f".lazy[{index}]{window}" if index else window
