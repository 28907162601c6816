"""The HTML output of a view and of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ...core.expr import formula
from ...core.names import natural
from ...core.units import human_bytes, plural
from ...errors import Problem, and_more
from ...lazy import LazyArray
from ...markup import Shown, cell, dtype_class, page, safe, table, tag
from ...namespace import Namespace, plain_meta
from ..layout import Cell, Drawing, Holder, drawing, holders, ranges
from ..outline import outline
from ..text import facts
from ..values import Sample, corners, sample, text_histogram, values
from .meta import meta_list
from .parts import Colours, title
from .tree import kind_html, lost_of, plan, tree_html

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
    wide, high = _scaled(_length(d.cols), _length(d.rows) if d.row_dim is not None else 0)
    cells = "".join(_cell(c, d, colours, wide, high) for c in d.cells)
    box = tag("div", cells, "map many" if len(d.cells) > 64 else "map", style=f"width:{wide}px;height:{high}px")
    return "\n".join([_framed(box, d), _notes(d), _legend(d.holders, colours)])


_WIDE, _HIGH, _THIN = 360, 220, 18  # the largest map in pixels, and its thinnest side


def _scaled(columns: int, rows: int) -> tuple[int, int]:
    """Return the width and the height of a map in pixels: to scale, unless one side would be too thin to see."""
    if not rows:
        return _WIDE, 26
    scale = min(_WIDE / max(1, columns), _HIGH / rows)
    return max(_THIN, round(columns * scale)), max(_THIN, round(rows * scale))


def _framed(box: str, d: Drawing) -> str:
    """Return a map with the intervals of its dimensions at its sides."""
    side, under = (
        "" if dim is None else f"{_dim(interval)}" for dim, interval in ((d.row_dim, d.rows), (d.col_dim, d.cols))
    )
    left = tag("span", side, "side") if side else tag("span", "")
    corner = tag("span", "") if under else ""
    return tag("div", f"{left}{box}{corner}" + (tag("span", under, "under") if under else ""), "drawn")


def _dim(interval: tuple[int, int]) -> str:
    return f"{interval[1]:,}" if interval[0] == 0 else f"{interval[0]:,} to {interval[1]:,}"


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _cell(cell: Cell, d: Drawing, colours: Colours, wide: int, high: int) -> str:
    left, top = _share(cell.cols[0], d.cols), _share(cell.rows[0], d.rows)
    width, height = _share(cell.cols[1], d.cols) - left, _share(cell.rows[1], d.rows) - top
    where = f"left:{left:.4g}%;top:{top:.4g}%;width:{width:.4g}%;height:{height:.4g}%"
    text = ranges(cell.holders, 2)
    fits = wide * width / 100 > 6.5 * len(text) + 8 and high * height / 100 > 15
    label = {"data_l": text} if fits else {}
    block = f"{_interval(cell.rows, d.row_dim)}{_interval(cell.cols, d.col_dim)}".rstrip(", ")
    return tag(
        "span", "", colours.of(cell.holders), style=where, title=f"[{block}] {title(cell.holders)}"[:300], **label
    )


def _share(at: int, interval: tuple[int, int]) -> float:
    return 100 * (at - interval[0]) / _length(interval)


def _interval(interval: tuple[int, int], dim: int | None) -> str:
    return "" if dim is None else f"{interval[0]}:{interval[1]}, "


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
_FILES = 40  # maximum number of files that are listed
_SIDE = 60  # rows of the tree of another state
_SMALL = 20_000  # tensors up to which the trees of other states are drawn, too


def view_html(view: Namespace[Any], head: str = "") -> str:
    """Return a view as a collapsible tree below its problems. ``head`` is a line above both. No tensor data is read."""
    root = outline(view).root
    first, *rest = facts(view)
    if view.problems:  # the last fact is their number; the list below has it, too
        rest.pop()
    line = " · ".join([tag("b", safe(first, 400)), *(safe(fact, 400) for fact in rest)])
    rows = plan(root)
    lost = lost_of(view, rows)
    return page(
        [
            tag("div", safe(head, 400), "head") if head else "",
            tag("div", line, "head"),
            _totals(view),
            _problems(view.problems),
            tree_html(rows, frozenset(lost)),
            _states(view),
            _files(view, lost),
            _meta(view),
        ],
        ("search", "copy"),
    )


def _totals(view: Namespace[Any]) -> str:
    """Return the bytes of each dtype, as a bar and as text."""
    found = [(dtype, nbytes) for dtype, nbytes in outline(view).dtypes() if nbytes]
    total = sum(nbytes for _, nbytes in found)
    if not found:
        return ""
    bar = "".join(
        tag("span", "", f"fill {dtype_class(dtype)}", style=f"flex:{nbytes / total:.4g}") for dtype, nbytes in found
    )
    texts = [
        tag("span", f"{tag('b', dtype.short, dtype_class(dtype))} {human_bytes(nbytes)} ({_percent(nbytes, total)})")
        for dtype, nbytes in found
    ]
    return tag("div", tag("span", bar, "track", aria_hidden="true") + "\n" + "\n".join(texts), "totals")


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return (
        "100%"
        if part == whole
        else f"{share:.0f}%"
        if 10 <= share < 99.5
        else f"{share:.2g}%"
        if share < 10
        else ">99%"
    )


def _problems(problems: tuple[Problem, ...]) -> str:
    if not problems:
        return ""
    lines = [tag("li", f"{safe(line, 600)} {tag('code', safe(line.code), 'dim')}") for line in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        lines.append(tag("li", f"{and_more(len(problems) - _PROBLEMS)}: view.problems"))
    start = '<details class="warn" open>' if len(problems) <= _SEEN else '<details class="warn">'
    body = tag("ul", "\n".join(lines))
    return f"{start}{tag('summary', plural(len(problems), 'problem'))}\n{body}</details>"


def _more(title: str, body: str) -> str:
    """Return what opens on a click."""
    return tag("details", f"{tag('summary', title)}\n{body}", "more")


def _states(view: Namespace[Any]) -> str:
    """Return the other states, each with a tree of its own that opens on a click."""
    states = view.states
    others = {state: part for state, part in states.items() if state != view.state and len(part)}
    if view.state not in states or not others:
        return ""
    lines = []
    for state, part in others.items():
        where = tag("code", f"view.states[{safe(repr(state))}]", "dim")
        if len(part) > _SMALL:
            lines.append(tag("li", f"{tag('code', safe(state))} {plural(len(part), 'tensor')} {where}"))
            continue
        root = outline(part).root
        dtypes = ", ".join(dtype.short for dtype, _ in outline(part).dtypes())
        text = f"{plural(len(part), 'tensor')}, {human_bytes(root.nbytes)} {dtypes}"
        title = f"{tag('code', safe(state))} {tag('span', text, 'dim')} {where}"
        lines.append(tag("li", _more(title, tree_html(plan(root, _SIDE), css="tree side", most=12))))
    title = f"other states: {', '.join(tag('code', safe(state)) for state in others)}"
    return _more(title, tag("ul", "\n".join(lines)))


def _files(view: Namespace[Any], lost: Mapping[int, tuple[Holder, ...]]) -> str:
    """Return the files, the missing ones first."""
    gone = {holder.path: None for held in lost.values() for holder in held}
    infos = view.files
    if len(infos) + len(gone) < 2 and not gone:
        return ""
    lines = [tag("li", f"{tag('span', '', 'swatch lost')} {tag('code', safe(path, 400))} (missing)") for path in gone]
    shown = list(islice((item for item in infos.items() if item[0] not in gone), max(0, _FILES - len(lines))))
    shown.sort(key=lambda item: natural(item[0]))
    lines = lines[:_FILES]
    lines += [
        tag("li", f"{tag('code', safe(path, 400))} {tag('span', human_bytes(info.size), 'dim')}")
        for path, info in shown
    ]
    total = len(infos) + sum(path not in infos for path in gone)
    if total > len(lines):
        lines.append(tag("li", and_more(total - len(lines)), "dim"))
    size = human_bytes(sum(info.size for info in infos.values()))
    title = f"{plural(total, 'file')}, {size}" + (f", {len(gone):,} missing" if gone else "")
    return _more(title, tag("ul", "\n".join(lines)))


def _meta(view: Namespace[Any]) -> str:
    """Return the metadata, of which only the first levels and lines are shown."""
    body = meta_list(plain_meta(view), _META)
    return _more("metadata", body) if body else ""


_META = 40  # lines of the metadata in the output of a view


def tensor_html(t: LazyArray, numbers: str = "", more: str = "") -> str:
    """Return a description of a tensor beside a map of its blocks. ``numbers`` (HTML) stands below the description,
    ``more`` below all. No tensor data is read."""
    head = f"{tag('b', tag('code', safe(t.name, 400)))} · {kind_html(t)}"
    known = [
        ("size", f"{human_bytes(t.nbytes)}"),
        ("elements", f"{t.numel():,}"),
    ]
    held = holders(t)
    ranks = {holder.rank for holder in held if holder.rank is not None}
    if held:
        files = plural(len({holder.path for holder in held}), "file")
        known.append(("held by", f"{plural(len(ranks), 'rank')}, in {files}" if len(ranks) > 1 else files))
    if tuple(t.shape) != t.spec.shape:
        known.append(("part", f"of a tensor of shape [{', '.join(map(str, t.spec.shape))}]"))
    if t.spec.stored_as:
        known.append(("name", f"stored as {t.spec.stored_as!r}"))
    if t.spec.expr is not None:
        known.append(("computed", formula(t.spec)))
    if t.spec.rule:
        known.append(("rule", t.spec.rule))
    body = "".join(f"<tr>{cell(what, 'l')}{cell(safe(text, 400), 'l')}</tr>" for what, text in known)
    facts = tag("div", f"<table><tbody>{body}</tbody></table>\n{numbers}", "facts")
    card = tag("div", f"{facts}\n{tag('div', map_html(t))}", "card")
    return page([tag("div", head, "head"), card, more])


def values_html(t: LazyArray) -> str:
    """Return the corners of a tensor as a table, with the indices of rows and columns. Reads only these elements."""
    found = corners(t)
    head = [("", "l"), *((str(n) if n is not None else "…", "") for n in found.columns)]
    rows = [
        [cell("…" if n is None else str(n), "l dim"), *(cell(safe(text, 40), "v") for text in line)]
        for n, line in zip(found.rows, found.texts, strict=True)
    ]
    note = tag("div", safe(found.note, 200), "note") if found.note else ""
    return note + table(head, rows)


def shown(t: LazyArray, histogram: bool, numbers: bool) -> Shown:
    """Return the result of `LazyTensor.show`."""
    corner, bars, lines = "", "", [repr(t)]
    if numbers or histogram:
        corner = values_html(t)
        lines.append(values(t))
    if histogram:
        found = sample(t)
        lines += [text_histogram(found), *found.lines]
        bars = histogram_html(found)
    return Shown("\n".join(line for line in lines if line), tensor_html(t, corner, bars))
