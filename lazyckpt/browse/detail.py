"""The description of a tensor or of the tensors below a prefix, without reading elements, and its line of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from textual.content import Content

from ..core.expr import formula
from ..core.units import human_bytes, human_count, plural
from ..errors import LazyckptError, and_more, printable
from ..lazy import LazyArray, cost_of
from ..show.text import kind
from ..view import CheckpointView
from .rows import Row, dtypes

if TYPE_CHECKING:
    from ..inspect.diff import Difference

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
_COUNTED = 50_000  # kinds of tensors are counted for at most this many tensors
_KINDS = 12  # maximum number of kinds of tensors
_SAID = 5  # maximum number of problems of a level

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


def of_level(row: Row, view: CheckpointView, problems: Sequence[str], states: Sequence[str]) -> Detail:
    """Return what is known about the tensors of a row: counts and sizes, dtypes, the kinds of tensors that it has, the
    states that have the same names, and the problems that mention them."""
    found = [("level", row.start[:-1] or "all")]
    if row.folded:
        one = row.nodes[0]
        found.append(
            ("alike", f"{len(row.nodes):,} levels of {human_bytes(one.nbytes)}: equal names, shapes and dtypes")
        )
    numel, nbytes = row.numel, row.nbytes
    found += [
        ("tensors", f"{row.tensors:,}"),
        ("elements", f"{numel:,}" + (f" ({human_count(numel)})" if numel >= 10_000 else "")),
        ("size", f"{nbytes:,} bytes ({human_bytes(nbytes)})"),
    ]
    of = dtypes(row.node)
    times = len(row.nodes)
    if len(of) > 1:
        found.append(("dtypes", f"{len(of):,}"))
    for dtype, tensors, size in of:
        share = f", {100 * size / sum(s for _, _, s in of):.1f} %" if len(of) > 1 and size else ""
        found.append(
            (
                "" if len(of) > 1 else "dtypes",
                f"{dtype}: {plural(times * tensors, 'tensor')}, {human_bytes(times * size)}{share}",
            )
        )
    if states:
        found.append(("states", ", ".join(states)))
    kinds = _kinds(row)
    found += [("kinds", f"{len(kinds):,}"), *(("", line) for line in kinds)] if kinds else []
    start = row.node.start if row.folded else row.start
    about = [line for line in problems if start and start[:-1] in line]
    found += [("" if n else "problems", line) for n, line in enumerate(about[:_SAID])]
    if len(about) > _SAID:
        found.append(("", and_more(len(about) - _SAID)))
    return found


def _kinds(row: Row) -> list[str]:
    """Return the kinds of tensors of a level, the most bytes first: names without numbers, with counts and sizes."""
    from ..show.repeated import template

    if row.node.tensors > _COUNTED:
        return []
    found: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}
    of, start = row.node.outline, len(row.node.start)
    for n in range(row.node.low, row.node.high):
        spec = of.spec(n)
        key = template(of.names[n][start:])[0], kind(spec)
        count, nbytes = found.get(key, (0, 0))
        found[key] = count + 1, nbytes + (spec.nbytes if of.names[n] not in of.twice else 0)
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    times = len(row.nodes)
    cells = [
        (human_bytes(times * nbytes), f"{times * count:,} x", ".".join(parts), what)
        for (parts, what), (count, nbytes) in rows[:_KINDS]
    ]
    widths = [max(len(printable(one[c])) for one in cells) for c in range(3)] if cells else []
    lines = [
        f"{size:>{widths[0]}}  {count:>{widths[1]}} {name:<{widths[2]}}  {what}" for size, count, name, what in cells
    ]
    return [*lines, *([and_more(len(rows) - _KINDS)] if len(rows) > _KINDS else [])]


def of_pair(name: str, pair: tuple[LazyArray | None, LazyArray | None], row: Difference | None) -> Detail:
    """Return what two tensors are and, if they have been compared, how they differ."""
    from ..show.differences import cosine_text, relative_text

    found = [("name", name)]
    found += [(side, "missing" if t is None else kind(t)) for side, t in zip("AB", pair, strict=True)]
    if row is None:
        return found
    if row.error is not None:
        return [*found, ("error", row.error)]
    if row.status == "equal":
        return [*found, ("equal", "all elements are equal")]
    if row.count is not None:
        total = pair[0].numel() if pair[0] is not None else 0
        share = f" ({100 * row.count / total:.3g} %)" if total else ""
        found.append(("differ", f"{row.count:,} of {total:,} elements{share}"))
        if row.at is not None:
            found.append(("first at", str(list(row.at))))
    norms = [f"{text} {value:.6g}" for text, value in (("A", row.norm_a), ("B", row.norm_b)) if value is not None]
    for label, text in (
        ("relative", relative_text(row)), ("cosine", cosine_text(row.cosine)),
        ("maximum", "" if row.max_abs is None else f"{row.max_abs:.6g}"), ("norms", ", ".join(norms)),
    ):  # fmt: skip
        if text:
            found.append((label, text))
    return found


def drawn(detail: Detail) -> Content:
    """Return a description as lines, printed literally."""
    width = max((len(what) for what, _ in detail), default=0)
    lines = []
    for what, text in detail:
        if what == "error":
            lines.append(Content.styled(f"cannot be read: {printable(text)}", "$text-error"))
        else:
            style = "bold" if what in ("name", "level") else ""
            head = f"{what:<{width}}  " if what else "  "
            lines.append(Content.assemble((head, "$text-accent"), (printable(text), style)))
    return Content("\n").join(lines)
