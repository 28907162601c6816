"""A map of which file holds which block of a tensor. Letters mark the files, so that it is readable without colour."""

from __future__ import annotations

from textual.content import Content

from ..core.units import plural
from ..errors import and_more, printable
from ..show.layout import Cell, Drawing, Holder, ranges

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = ("primary", "success", "warning", "accent", "secondary")  # names of the theme's colours
_MISSING = "!"
_HEIGHT = 10  # maximum number of lines of a two-dimensional map
_LISTED = 52  # maximum number of holders in the legend


def drawn(d: Drawing, width: int) -> Content:
    """Return a map of ``width`` columns, to scale, with a legend of the letters."""
    if not d.blocks:
        return Content("no file holds elements of it")
    if len(d.holders) == 1 and d.complete and not d.holders[0].missing:
        path = printable(d.holders[0].path)
        return Content.assemble("One file has all of it: ", (path, "bold"), f", {plural(d.blocks, 'block')}.")
    number = {holder: n for n, holder in enumerate(d.holders)}
    height = 2 if d.row_dim is None else min(_HEIGHT, max(2, d.rows[1] - d.rows[0]))
    grid = _grid(d, max(8, width), height)
    lines = [_line(row, number) for row in grid]
    notes = [_axes(d), *_notes(d)]
    return Content("\n").join([*(Content.styled(n, "$text-muted") for n in notes if n), *lines, *_legend(d, number)])


def _grid(d: Drawing, width: int, height: int) -> list[list[Cell | None]]:
    """Return the cell at each position of the map. Larger cells come first in a drawing, so smaller ones cover them."""
    grid: list[list[Cell | None]] = [[None] * width for _ in range(height)]
    for cell in d.cells:
        top, bottom = _places(cell.rows, d.rows, height)
        left, right = _places(cell.cols, d.cols, width)
        for y in range(top, bottom):
            grid[y][left:right] = [cell] * (right - left)
    return grid


def _places(part: tuple[int, int], whole: tuple[int, int], size: int) -> tuple[int, int]:
    """Scale an interval to ``size`` positions; the result has at least one position."""
    length = whole[1] - whole[0]
    first = min(size - 1, (part[0] - whole[0]) * size // length)
    return first, max(first + 1, (part[1] - whole[0]) * size // length)


def _line(row: list[Cell | None], number: dict[Holder, int]) -> Content:
    """Return a row of the map, with adjacent cells of the same holder in one piece of text."""
    pieces: list[tuple[str, str]] = []
    for cell in row:
        mark, style = (" ", "") if cell is None else _mark(number[cell.holders[0]], cell.missing)
        if pieces and pieces[-1][1] == style and pieces[-1][0][0] == mark:
            pieces[-1] = pieces[-1][0] + mark, style
        else:
            pieces.append((mark, style))
    return Content.assemble(*pieces)


def _mark(n: int, missing: bool) -> tuple[str, str]:
    if missing:
        return _MISSING, "$text-error on $error-muted"
    colour = _COLOURS[n % len(_COLOURS)]
    return _LETTERS[n % len(_LETTERS)], f"$text-{colour} on ${colour}-muted"


def _axes(d: Drawing) -> str:
    named = ((d.row_dim, d.rows, "down"), (d.col_dim, d.cols, "across"))
    axes = [f"{way} dimension {dim}: {a:,} to {b:,}" for dim, (a, b), way in named if dim is not None]
    return ", ".join(axes)


def _notes(d: Drawing) -> list[str]:
    paths = len({h.path for h in d.holders})
    notes = [f"{'' if d.complete else 'more than '}{plural(d.blocks, 'block')} in {plural(paths, 'file')}"]
    if d.merged:
        notes.append("neighbours are drawn together")
    if d.undrawn:
        notes.append(f"also cut along dimension {', '.join(map(str, d.undrawn))}")
    most = max(len(c.holders) for c in d.cells)
    if most > 1 and not d.merged and not d.undrawn:
        notes.append(f"held {most:,} times: the copy that is read first is drawn")
    return ["; ".join(notes), ""]


def _legend(d: Drawing, number: dict[Holder, int]) -> list[Content]:
    lines = [Content("")]
    for h in d.holders[:_LISTED]:
        mark, style = _mark(number[h], bool(h.missing))
        note = f"cannot be read: {h.missing}" if h.missing else "" if h.path == h.label else h.path
        lines.append(
            Content.assemble(
                (f" {mark} ", style),
                f" {printable(h.label)}  ",
                (printable(note), "$text-error" if h.missing else "$text-muted"),
            )
        )
    if len(d.holders) > _LISTED:
        rest = ranges(d.holders[_LISTED:], 4)
        lines.append(Content.styled(f"{and_more(len(d.holders) - _LISTED)}: {printable(rest)}", "$text-muted"))
    return lines
