"""The description of a tensor or of the tensors below a prefix, without reading elements, and its line of Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from textual.content import Content

from ..core.expr import formula
from ..core.units import human_bytes, human_count, plural
from ..errors import LazyckptError, and_more, printable
from ..lazy import cost_of
from ..show.text import kind
from ..view import CheckpointView
from .tree import Entry

# -- The line of Python that reads what the screen shows.


def quoted(text: str) -> str:
    """Return a Python string literal, in double quotes unless it needs escapes.

    >>> print(quoted("model.norm.weight"), quoted('"\\x1b'))
    "model.norm.weight" '"\\x1b'
    """
    plain = text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else repr(text)


def opening(path: str, options: Mapping[str, Any]) -> str:
    """Return the call of `lazyckpt.open`.

    >>> print(opening("ckpt", {"tag": "step9", "format": None}))
    lazyckpt.open("ckpt", tag="step9")
    """
    given = [f"{name}={quoted(v) if isinstance(v, str) else repr(v)}" for name, v in options.items() if v is not None]
    return f"lazyckpt.open({', '.join([quoted(path), *given])})"


def of_state(opened: str, state: str | None) -> str:
    """Append the look-up of a state to a line; None is the default state."""
    if state is None:
        return opened
    return f"{opened}.stored" if state == "stored" else f"{opened}.states[{quoted(state)}]"


def of_window(index: str | None, shape: Sequence[int], first: Sequence[int], last: Sequence[int]) -> str:
    """Return the index of a window within the selection of ``index``, which has ``shape``.

    The window extends from the element ``first`` to ``last``, both included, in C order. A window that is not a block
    is extended to one.

    >>> of_window(None, (512, 128), (0, 0), (7, 127)), of_window("0:4, ::8", (4, 16), (0, 0), (3, 15))
    ('[0:8]', '[0:4, ::8]')
    >>> of_window("::2", (256, 128), (8, 4), (15, 7)), of_window(None, (2, 4, 8), (0, 3, 0), (1, 1, 7))
    ('.lazy[::2][8:16, 4:8]', '[...]')
    """
    parts: list[str] = []
    if not first:  # an empty tensor or a scalar
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


# -- The description of a tensor or of the tensors below a prefix, without reading elements.

_LINES = 200  # maximum number of lines of files and byte ranges
_TIED = 20  # maximum number of tied names
_COUNTED = 20_000  # dtypes are counted for at most this many tensors

Detail = list[tuple[str, str]]  # (label, text) pairs; the label "error" marks an error


def of_tensor(view: CheckpointView, name: str) -> Detail:
    """Return name, kind, size, tied names and merge rule of a tensor, and the files and byte ranges that hold it."""
    t, owner = view[name], view.owner(name)
    found = [("name", name), ("kind", kind(t)), ("size", f"{t.nbytes:,} bytes ({human_bytes(t.nbytes)})")]
    found.append(("elements", f"{t.numel():,}"))
    tied = [owner, *(alias for alias, of in view.aliases.items() if of == owner)]
    tied = [n for n in dict.fromkeys(tied) if n != t.name]
    found += [("tied to", n) for n in tied[:_TIED]]
    if len(tied) > _TIED:
        found.append(("", and_more(len(tied) - _TIED)))
    if t.spec.rule:
        found.append(("rule", t.spec.rule))
    if t.spec.stored_as:
        found.append(("stored as", t.spec.stored_as))
    try:
        cost = cost_of(t)
    except (LazyckptError, OSError) as e:
        return [*found, ("error", str(e))]
    found.append(("reading", cost.summary))
    lines = [formula(t.spec)] if t.spec.expr is not None else []
    lines += cost.places
    found += [("", line) for line in lines[:_LINES]]
    if len(lines) > _LINES:
        found.append(("", and_more(len(lines) - _LINES)))
    return found


def of_prefix(view: CheckpointView, entry: Entry, names: list[str]) -> Detail:
    """Return counts and sizes of the tensors below an entry, whose names are ``names``."""
    found = [("prefix", entry.start[:-1])] if entry.start else []
    found += [
        ("tensors", f"{entry.tensors:,}"),
        ("elements", f"{entry.numel:,}" + (f" ({human_count(entry.numel)})" if entry.numel >= 10_000 else "")),
        ("size", f"{entry.nbytes:,} bytes ({human_bytes(entry.nbytes)})"),
    ]
    if len(names) <= _COUNTED:
        dtypes = Counter(view[name].spec.dtype.short for name in names)
        found += [("dtype", f"{dtype}: {plural(count, 'tensor')}") for dtype, count in dtypes.most_common()]
    return found


def drawn(detail: Detail) -> Content:
    """Return a description as lines, printed literally."""
    width = max((len(what) for what, _ in detail), default=0)
    lines = []
    for what, text in detail:
        if what == "error":
            lines.append(Content.styled(f"cannot be read: {printable(text)}", "$text-error"))
        else:
            style = "bold" if what in ("name", "prefix") else ""
            head = f"{what:<{width}}  " if what else "  "
            lines.append(Content.assemble((head, "$text-accent"), (printable(text), style)))
    return Content("\n").join(lines)
