"""A view, and a tensor, as one output each."""

from __future__ import annotations

from typing import Any

from ...lazy import LazyArray
from ...namespace import Namespace
from ..sample import sample, text_histogram
from ..text import build, facts, human_bytes, human_count, plural
from .fragments import map_html
from .histogram import histogram_html
from .parts import Shown, page, safe, tag
from .rows import plan
from .tree import kind_html, tree_html

_PROBLEMS = 20  # lines that are listed
_SEEN = 5  # lines that are seen before anything is opened


def view_html(view: Namespace[Any], head: str = "") -> str:
    """A view as a tree that opens and closes, its problems first. ``head``: a line above. Reads no tensor data."""
    root = build(view)
    first, *rest = facts(view, root.numel, root.nbytes)
    if view.problems:  # they are below, in full
        rest.pop()
    line = " · ".join([tag("b", safe(first, 400)), *(safe(fact, 400) for fact in rest)])
    return page(
        [
            tag("div", safe(head, 400), "head") if head else "",
            tag("div", line, "head"),
            _problems(view.problems),
            tree_html(view, plan(root)),
        ],
        searched=True,
    )


def _problems(problems: tuple[str, ...]) -> str:
    if not problems:
        return ""
    lines = [tag("li", safe(line, 600)) for line in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        lines.append(tag("li", f"… and {len(problems) - _PROBLEMS:,} more: view.problems"))
    start = '<details class="warn" open>' if len(problems) <= _SEEN else '<details class="warn">'
    body = tag("ul", "\n".join(lines))
    return f"{start}{tag('summary', plural(len(problems), 'problem'))}\n{body}</details>"


def tensor_html(t: LazyArray, more: str = "") -> str:
    """A tensor: what it is, which file holds which block of it, and ``more`` (HTML). Reads no tensor data."""
    size = f"{human_bytes(t.nbytes)} · {human_count(t.numel())} element{'s' * (t.numel() != 1)}"
    head = f"{tag('b', tag('code', safe(t.name, 400)))} · {kind_html(t)} · {size}"
    notes = []
    if tuple(t.shape) != t.spec.shape:
        notes.append(f"of a tensor of shape [{', '.join(map(str, t.spec.shape))}]")
    if t.spec.stored_as:
        notes.append(f"stored as {t.spec.stored_as!r}")
    if t.spec.combine == "mean":
        notes.append("the mean of the replicas, taken in float32")
    if t.spec.rule:
        notes.append(t.spec.rule)
    return page(
        [
            tag("div", head, "head"),
            *(tag("div", safe(note, 400), "note") for note in notes),
            map_html(t),
            more,
        ]
    )


def shown(t: LazyArray, histogram: bool) -> Shown:
    """See `LazyTensor.show`."""
    if not histogram:
        return Shown(repr(t), tensor_html(t))
    found = sample(t)
    text = "\n".join(line for line in (repr(t), text_histogram(found), *found.lines) if line)
    return Shown(text, tensor_html(t, histogram_html(found)))
