"""The HTML output of a view and of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.expr import formula
from ...core.units import human_bytes, human_count, plural
from ...errors import Problem, and_more
from ...lazy import LazyArray
from ...namespace import Namespace
from ..layout import Cell, Drawing, Holder, drawing, ranges
from ..outline import outline
from ..text import facts
from ..values import Sample, sample, text_histogram
from .parts import Colours, Shown, page, safe, tag, title
from .tree import kind_html, plan, tree_html

# -- A map of which file holds which block of a tensor, drawn to scale.

_LISTED = 16  # holders in the legend of a map


def map_html(t: LazyArray) -> str:
    """Return a map of the blocks of the tensor, or of the hull of its selection, with a legend of their holders."""
    d = drawing(t)
    if not d.blocks:
        return tag("p", "no file holds elements of it" if t.numel() else "it has no elements", "dim")
    colours = Colours()
    for holder in d.holders:  # assign colours in fragment order, which does not depend on the order of the cells
        colours.of((holder,))
    height, width = _length(d.rows), _length(d.cols)
    flat = d.row_dim is None or len(d.cells) == 1
    shape = "height:26px" if flat else f"aspect-ratio:{min(max(width / height, 1.7), 8):.3g}"
    cells = "".join(_cell(c, d, colours) for c in d.cells)
    box = tag("div", cells, "map many" if len(d.cells) > 64 else "map", style=shape)
    return "\n".join([_caption(d), box, _notes(d), _legend(d.holders, colours)])


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _cell(cell: Cell, d: Drawing, colours: Colours) -> str:
    left, top = _share(cell.cols[0], d.cols), _share(cell.rows[0], d.rows)
    width, height = _share(cell.cols[1], d.cols) - left, _share(cell.rows[1], d.rows) - top
    where = f"left:{left:.4g}%;top:{top:.4g}%;width:{width:.4g}%;height:{height:.4g}%"
    text = ranges(cell.holders, 2)
    label = {"data_l": text} if width > 1.4 * len(text) + 2 and (height > 6 or d.row_dim is None) else {}
    block = f"{_interval(cell.rows, d.row_dim)}{_interval(cell.cols, d.col_dim)}".rstrip(", ")
    return tag(
        "span", "", colours.of(cell.holders), style=where, title=f"[{block}] {title(cell.holders)}"[:300], **label
    )


def _share(at: int, interval: tuple[int, int]) -> float:
    return 100 * (at - interval[0]) / _length(interval)


def _interval(interval: tuple[int, int], dim: int | None) -> str:
    return "" if dim is None else f"{interval[0]}:{interval[1]}, "


def _caption(d: Drawing) -> str:
    dims = [
        f"{arrow} dimension {dim}: {interval[0]:,} to {interval[1]:,}"
        for arrow, dim, interval in (("↓", d.row_dim, d.rows), ("→", d.col_dim, d.cols))
        if dim is not None
    ]
    return tag("div", ", ".join(dims), "note") if dims else ""


def _notes(d: Drawing) -> str:
    paths = len({h.path for h in d.holders})
    notes = [f"{'' if d.complete else 'more than '}{plural(d.blocks, 'block')} in {plural(paths, 'file')}"]
    if d.merged:
        notes.append(f"neighbours are drawn together, in {len(d.cells):,} cells")
    if d.undrawn:
        notes.append(f"also cut along dimension {', '.join(map(str, d.undrawn))}")
    most = max(len(c.holders) for c in d.cells)
    if most > 1 and not d.merged and not d.undrawn:
        notes.append(f"some are held {most:,} times" if len(d.cells) > 1 else f"held {most:,} times")
    return tag("div", "; ".join(notes), "note")


def _legend(holders: Sequence[Holder], colours: Colours) -> str:
    lines = []
    for h in holders[:_LISTED]:
        note = "" if h.path == h.label else tag("code", safe(h.path, 400), "dim")
        if h.missing:
            note = f"{tag('b', 'cannot be read')}: {safe(h.missing, 400)}"
        lines.append(tag("li", f"{tag('span', '', f'swatch {colours.of((h,))}')} {safe(h.label)} {note}"))
    if len(holders) > _LISTED:
        lines.append(tag("li", and_more(len(holders) - _LISTED), "dim"))
    return tag("ul", "\n".join(lines), "legend")


# -- A histogram of a sample of a tensor's elements, as bars.


def histogram_html(found: Sample) -> str:
    """Return the histogram of a sample as bars, with its size and statistics below."""
    size, stats = found.lines
    top = max(found.counts, default=0)
    bars = "".join(
        tag(
            "span",
            "",
            "" if n else "none",
            style=f"height:{100 * n / top:.3g}%",
            title=f"{a:.4g} to {b:.4g}: {n:,}",
        )
        for n, a, b in zip(found.counts, found.edges[:-1], found.edges[1:], strict=True)
    )
    # attributes instead of text: where styles are stripped there are no bars, and the labels of their ends disappear
    ends = tag("span", "", data_l=f"{found.low:.4g}") + " " + tag("span", "", data_l=f"{found.high:.4g}")
    drawn = tag("div", bars, "bars") + tag("div", ends, "ends", aria_hidden="true") if top else ""
    return drawn + tag("div", safe(size, 400), "note") + tag("div", safe(stats, 400), "note")


# -- The output of a view and of a tensor.

_PROBLEMS = 20  # maximum number of problems that are listed
_SEEN = 5  # maximum length of a list of problems that is open at first


def view_html(view: Namespace[Any], head: str = "") -> str:
    """Return a view as a collapsible tree below its problems. ``head`` is a line above both. No tensor data is read."""
    root = outline(view).root
    first, *rest = facts(view)
    if view.problems:  # the last fact is their number; the list below has it, too
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


def _problems(problems: tuple[Problem, ...]) -> str:
    if not problems:
        return ""
    lines = [tag("li", safe(line, 600)) for line in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        lines.append(tag("li", f"{and_more(len(problems) - _PROBLEMS)}: view.problems"))
    start = '<details class="warn" open>' if len(problems) <= _SEEN else '<details class="warn">'
    body = tag("ul", "\n".join(lines))
    return f"{start}{tag('summary', plural(len(problems), 'problem'))}\n{body}</details>"


def tensor_html(t: LazyArray, more: str = "") -> str:
    """Return a description of a tensor, a map of its blocks, and ``more`` (HTML) below. No tensor data is read."""
    size = f"{human_bytes(t.nbytes)} · {human_count(t.numel())} element{'s' * (t.numel() != 1)}"
    head = f"{tag('b', tag('code', safe(t.name, 400)))} · {kind_html(t)} · {size}"
    notes = []
    if tuple(t.shape) != t.spec.shape:
        notes.append(f"part of a tensor of shape [{', '.join(map(str, t.spec.shape))}]")
    if t.spec.stored_as:
        notes.append(f"stored as {t.spec.stored_as!r}")
    if t.spec.expr is not None:
        notes.append(formula(t.spec))
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
    """Return the result of `LazyTensor.show`."""
    if not histogram:
        return Shown(repr(t), tensor_html(t))
    found = sample(t)
    text = "\n".join(line for line in (repr(t), text_histogram(found), *found.lines) if line)
    return Shown(text, tensor_html(t, histogram_html(found)))
