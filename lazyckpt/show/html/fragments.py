"""Which file holds which block of a tensor, drawn to scale."""

from __future__ import annotations

from collections.abc import Sequence

from ...lazy import LazyArray
from ..layout import Cell, Drawing, Holder, drawing, ranges
from ..text import plural
from .parts import Colours, safe, tag, title

_LISTED = 16  # holders below a map


def map_html(t: LazyArray) -> str:
    """A map of the tensor's blocks, or of the hull of what is selected of it, and whose they are."""
    d = drawing(t)
    if not d.blocks:
        return tag("p", "no file holds elements of it" if t.numel() else "it has no elements", "dim")
    colours = Colours()
    for holder in d.holders:  # colours go by rank, however cells are ordered
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
        told = "" if h.path == h.label else tag("code", safe(h.path, 400), "dim")
        if h.missing:
            told = f"{tag('b', 'cannot be read')}: {safe(h.missing, 400)}"
        lines.append(tag("li", f"{tag('span', '', f'swatch {colours.of((h,))}')} {safe(h.label)} {told}"))
    if len(holders) > _LISTED:
        lines.append(tag("li", f"… and {len(holders) - _LISTED:,} more", "dim"))
    return tag("ul", "\n".join(lines), "legend")
