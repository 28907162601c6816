"""What is known of a tensor, or of the tensors below a prefix, without reading elements."""

from __future__ import annotations

from collections import Counter

from textual.content import Content

from ..core.dtypes import short_name
from ..errors import LazyckptError
from ..printing import printable
from ..show.text import human_bytes, human_count, kind, plural
from ..view import CheckpointView
from .levels import Entry

_LINES = 200  # of files and byte ranges
_TIED = 20  # names
_COUNTED = 20_000  # tensors of which the dtypes are looked at

Detail = list[tuple[str, str]]  # (what, text); "error" is one


def of_tensor(view: CheckpointView, name: str) -> Detail:
    """Name, kind, size, tied names, rule, and the files and byte ranges that hold it."""
    t, owner = view[name], view.owner(name)
    found = [("name", name), ("kind", kind(t)), ("size", f"{t.nbytes:,} bytes ({human_bytes(t.nbytes)})")]
    found.append(("elements", f"{t.numel():,}"))
    tied = [owner, *(alias for alias, of in view.aliases.items() if of == owner)]
    tied = [n for n in dict.fromkeys(tied) if n != t.name]
    found += [("tied to", n) for n in tied[:_TIED]]
    if len(tied) > _TIED:
        found.append(("", f"and {len(tied) - _TIED:,} more"))
    if t.spec.rule:
        found.append(("rule", t.spec.rule))
    if t.spec.stored_as:
        found.append(("stored as", t.spec.stored_as))
    try:
        head, *rest = t.explain().splitlines()
    except (LazyckptError, OSError) as e:
        return [*found, ("error", str(e))]
    found.append(("reading", head.rpartition(": ")[2].partition(" bytes from ")[2] or head))
    skip = {f"  {t.spec.rule}", f"  stored as {t.spec.stored_as!r}"}
    lines = [line.strip() for line in rest if line not in skip]
    found += [("", line) for line in lines[:_LINES]]
    if len(lines) > _LINES:
        found.append(("", f"... and {len(lines) - _LINES:,} more"))
    return found


def of_prefix(view: CheckpointView, entry: Entry, names: list[str]) -> Detail:
    """Counts and sizes of what is below; ``names``: of the tensors there."""
    found = [("prefix", entry.start[:-1])] if entry.start else []
    found += [
        ("tensors", f"{entry.tensors:,}"),
        ("elements", f"{entry.numel:,}" + (f" ({human_count(entry.numel)})" if entry.numel >= 10_000 else "")),
        ("size", f"{entry.nbytes:,} bytes ({human_bytes(entry.nbytes)})"),
    ]
    if len(names) <= _COUNTED:
        dtypes = Counter(short_name(view[name].dtype) for name in names)
        found += [("dtype", f"{dtype}: {plural(count, 'tensor')}") for dtype, count in dtypes.most_common()]
    return found


def drawn(detail: Detail) -> Content:
    """As lines, literally."""
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
