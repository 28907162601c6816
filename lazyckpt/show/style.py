"""The look of all plots: colours, text and axes. matplotlib's settings (rcParams) are read, and never changed.

A figure has a face colour of its own, so that it can be read in dark notebooks. It is dark if matplotlib's own figures
are (``plt.style.use("dark_background")``), and so is what is drawn into Axes of a dark figure. Colours are told apart
by readers who do not see red or green: viridis for magnitudes, blue to orange for signed numbers, and the palette of
Okabe and Ito for groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.units import human_bytes
from ..errors import DataError, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

LABEL = 40  # characters of a label
_SMALL, _PLAIN, _LARGE = 7.5, 8.5, 10.5  # sizes of text in points
_ACROSS, _BOLD = 15.5, 11.0  # characters of small text, and of titles, in an inch
_CYCLE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a300", "#6e7781")  # Okabe and Ito
_TICKS = 40  # labels along an axis


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of a figure, as matplotlib takes them."""

    paper: str
    """Behind everything."""
    ink: str
    """Titles, and text that is data."""
    soft: str
    """Labels and notes."""
    line: str
    """Axes and grids."""
    empty: str
    """Cells without a value."""
    lost: str
    """What cannot be read."""
    accent: str
    """A single line, or bars."""


LIGHT = Theme("#ffffff", "#1f2328", "#59636e", "#d5dbe1", "#eef1f4", "#b3401b", "#0072b2")
DARK = Theme("#14181d", "#e6edf3", "#a3aeb9", "#3a424b", "#232a31", "#ff9166", "#4aa3f0")


def import_matplotlib() -> Any:
    """Import matplotlib.pyplot, or raise a DataError that says what to install."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise DataError(f"plots need matplotlib: pip install 'lazyckpt[plot]' ({e})") from None
    return plt


def theme_of(face: Any) -> Theme:
    """Return the theme for a face colour. What is transparent counts as light."""
    from matplotlib.colors import to_rgba

    *rgb, alpha = to_rgba(face)
    return DARK if alpha > 0.5 and _luminance(rgb) < 0.4 else LIGHT


def axes_of(ax: Axes | None, size: tuple[float, float] = (6.4, 3.6), grid: str = "") -> tuple[Any, Theme]:
    """Return Axes to draw into, in our style: ``ax``, or those of a new figure of ``size`` inches.

    ``grid`` names the axes that have lines across: "", "x", "y" or "both".
    """
    if ax is None:
        figure, theme = new_figure(size)
        ax = figure.subplots()
    else:
        theme = theme_of(ax.figure.get_facecolor())
    dress(ax, theme, grid)
    return ax, theme


def new_figure(size: tuple[float, float]) -> tuple[Figure, Theme]:
    """Return an empty figure of ``size`` inches, and its theme. A constrained layout makes room for labels.

    A notebook shows the figure once, also if it is the value of a cell.
    """
    plt = import_matplotlib()
    theme = theme_of(plt.rcParams["figure.facecolor"])
    figure = plt.figure(figsize=size, layout="constrained", facecolor=theme.paper, edgecolor=theme.paper)
    vars(figure)["_ipython_display_"] = partial(_display, figure)
    return figure, theme


def _display(figure: Figure) -> None:
    """Close a figure that a notebook is about to show: matplotlib's inline backend shows all open ones after the cell.

    Raises
    ------
    NotImplementedError
        Always. IPython then shows the figure as it shows others.
    """
    plt = import_matplotlib()
    if "inline" in plt.get_backend():
        plt.close(figure)
    raise NotImplementedError


@contextmanager
def closed_on_error(figure: Figure) -> Iterator[None]:
    """Close a figure if drawing into it fails: notebooks would show what there is of it."""
    try:
        yield
    except BaseException:
        import_matplotlib().close(figure)
        raise


def dress(ax: Any, theme: Theme, grid: str = "") -> None:
    """Give Axes our style. Their data stays."""
    ax.set_facecolor(theme.paper)
    for side, spine in ax.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=theme.line, linewidth=0.8)
    ax.grid(False)
    if grid:
        ax.grid(True, axis=grid, color=theme.line, linewidth=0.6, linestyle="-", alpha=0.8)
        ax.set_axisbelow(True)
    ax.tick_params(which="both", color=theme.line, labelcolor=theme.soft, labelsize=_PLAIN, length=3, width=0.8)
    ax.tick_params(which="minor", length=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set(color=theme.soft, fontsize=_PLAIN, fontweight="normal")
        axis.get_offset_text().set(color=theme.soft, fontsize=_SMALL)


def bare(ax: Any) -> None:
    """Take the lines and ticks of the axes away, for heat maps: the cells show where they end."""
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(which="both", length=0, pad=4)


def headline(ax: Any, title: str, notes: Iterable[str] = (), theme: Theme = LIGHT) -> None:
    """Write a title over Axes, at their left, and below it the notes in small text. Both may have any characters."""
    place, figure = ax.get_position(), ax.figure.figure
    spec = ax.get_subplotspec()
    last = spec is None or spec.is_last_col()
    wide = max(1.5, (1 - place.x0 if last else place.width * 1.1) * figure.get_size_inches()[0] - 0.1)
    room = max(16, int(wide * _BOLD))
    lines = _lines([plain(printable(note)) for note in notes if note], max(20, int(wide * _ACROSS)))
    pad = 7 + (len(lines) * _PLAIN * 1.25 + 3 if lines else 0)
    ax.set_title(
        short(title, room), x=0, ha="left", loc="center", pad=pad, color=theme.ink, fontsize=_LARGE, fontweight="bold"
    )
    if lines:
        note = ax.annotate("\n".join(lines), (0, 1), (0, 6), "axes fraction", "offset points", annotation_clip=False)
        note.set(color=theme.soft, fontsize=_PLAIN, va="bottom", ha="left", linespacing=1.25, gid="note")
        note.set_in_layout(False)


def _lines(notes: Sequence[str], width: int) -> list[str]:
    """Return notes as lines of text, with as many on a line as fit."""
    lines: list[str] = []
    for note in notes:
        joined = f"{lines[-1]} \N{MIDDLE DOT} {note}" if lines else note
        if lines and len(joined) <= width:
            lines[-1] = joined
        else:
            lines += wrap(note, width)
    return lines


def legend(ax: Any, theme: Theme, handles: Sequence[Any] | None = None, title: str = "", outside: bool = False) -> None:
    """Add a legend without a frame; ``outside``: to the right of the Axes."""
    where: dict[str, Any] = {"loc": "best"}
    if outside:
        where = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
    if handles is not None:
        where["handles"] = handles
    made = ax.legend(
        title=title or None,
        frameon=False,
        fontsize=_PLAIN,
        labelcolor=theme.ink,
        handlelength=1.2,
        title_fontsize=_PLAIN,
        **where,
    )
    made.get_title().set_color(theme.soft)


def colour_bar(ax: Any, image: Any, label: str, theme: Theme, **options: Any) -> Any:
    """Add a slim bar of the colours of an image, with its label."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02, aspect=22, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", color=theme.line, labelcolor=theme.soft, labelsize=_SMALL, length=2, width=0.8)
    bar.set_label(folded(label, ax), color=theme.soft, fontsize=_PLAIN)
    long = getattr(bar, "long_axis", bar.ax.yaxis)
    if isinstance(image.norm, LogNorm):
        log_axis(long, *image.get_clim())
    else:
        long.set_major_locator(MaxNLocator(5))
        plain_axis(long)
    bar.ax.minorticks_off()
    return bar


def log_axis(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis with plain numbers: powers of ten, and 2 and 5 between them if there are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    few = high < 1000 * low
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def count_axis(axis: Any, most: int = 9) -> None:
    """Label an axis of numbers that count or number something: with whole numbers only, also if there is one."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def plain_axis(axis: Any) -> None:
    """Label a linear axis with plain numbers, without a factor for all of them at its end."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.6g}".replace("-", "\N{MINUS SIGN}")))


def byte_axis(axis: Any, most: float) -> None:
    """Label an axis of bytes from 0 to ``most`` with round sizes."""
    step = 1
    while most > 5 * step:
        step *= 2
    ticks = [n * step for n in range(int(most // step) + 1)]
    axis.set_ticks(ticks, labels=[human_bytes(tick).replace(".0 ", " ") for tick in ticks])


# -- colours


def magnitudes(theme: Theme) -> Colormap:
    """Return the map for numbers of one sign: viridis. Cells without a value have a colour of their own."""
    found: Colormap = import_matplotlib().get_cmap("viridis").with_extremes(bad=theme.empty)
    return found


def sizes(theme: Theme) -> Colormap:
    """Return the map for sizes from 0: from the colour of an empty cell to blue."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("sizes", [theme.empty, theme.accent], 255).with_extremes(bad=theme.paper)


def signed(theme: Theme) -> Colormap:
    """Return the map for signed numbers: blue below zero, orange above, and the paper at zero."""
    from matplotlib.colors import LinearSegmentedColormap

    middle = "#f4f4f2" if theme is LIGHT else "#262c33"
    ends = ("#08306b", "#2171b5", "#8fc1e3"), ("#f7b267", "#d9590b", "#7f2704")
    if theme is DARK:
        ends = ("#bfe1ff", "#4aa3f0", "#1f5c99"), ("#a8510f", "#f28c28", "#ffd9a8")
    found = LinearSegmentedColormap.from_list("signed", [*ends[0], middle, *ends[1]], 255)
    return found.with_extremes(bad=theme.empty)


def colours(labels: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each label: those of Okabe and Ito for a few, lighter ones after them, a scale for many."""
    from matplotlib.colors import to_hex

    some = list(_CYCLE)
    if len(labels) > len(some):
        some += [to_hex(mixed(one, "white", 0.55)) for one in _CYCLE]
    if len(labels) <= len(some):
        return dict(zip(labels, some, strict=False))
    scale = import_matplotlib().get_cmap("viridis")
    return {label: scale(n / (len(labels) - 1)) for n, label in enumerate(labels)}


def shades(count: int, theme: Theme) -> list[Any]:
    """Return colours for numbered things, such as layers or steps, from dark to light, as far as the paper permits."""
    scale = import_matplotlib().get_cmap("viridis")
    low, high = (0.3, 1.0) if theme is DARK else (0.0, 0.8)
    return [scale(low + (high - low) * n / max(1, count - 1)) for n in range(count)]


def mixed(colour: str, other: str, share: float) -> Any:
    """Return a colour with a share of another one in it."""
    from matplotlib.colors import to_rgb

    return tuple((1 - share) * a + share * b for a, b in zip(to_rgb(colour), to_rgb(other), strict=True))


def on(colour: Any) -> str:
    """Return the colour of text on a colour: black or white."""
    from matplotlib.colors import to_rgb

    return "#101418" if _luminance(to_rgb(colour)) > 0.36 else "#ffffff"


def _luminance(rgb: Sequence[float]) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


# -- heat maps of rows and columns that have names


def heat(ax: Any, values: NDArray[np.float64], colours: Colormap, norm: Normalize | None, theme: Theme) -> Any:
    """Draw a matrix as cells, with the paper between them if they are few, and return the image."""
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    bare(ax)
    for place, count in ((ax.axhline, values.shape[0]), (ax.axvline, values.shape[1])):
        if count <= 100:
            for n in range(1, count):
                place(n - 0.5, color=theme.paper, linewidth=1.2 if count <= 40 else 0.6)
    return image


def size_of(rows: Sequence[str], columns: int, right: float = 1.6) -> tuple[float, float]:
    """Return the size in inches of the figure of a heat map whose cells are as large as their number permits."""
    left = 0.35 + 0.075 * max(map(len, rows), default=0)
    wide = min(9.0, max(2.6, columns * (0.42 if columns <= 12 else 0.2 if columns <= 40 else 0.105)))
    high = min(9.0, max(0.6, len(rows) * (0.27 if len(rows) <= 20 else 0.18 if len(rows) <= 40 else 0.13)))
    return left + wide + right, high + 1.35


def row_ticks(ax: Any, labels: Sequence[str]) -> None:
    """Label rows: every one of a few, else those of an even spacing."""
    shown = _spread(len(labels))
    ax.set_yticks(shown, labels=[labels[n] for n in shown])
    if len(labels) > 20:
        ax.tick_params(axis="y", labelsize=_SMALL if len(labels) <= _TICKS else _SMALL - 1)


def column_ticks(ax: Any, labels: Sequence[str], slanted: bool = False) -> None:
    """Label columns: every one of a few, else round numbers. ``slanted`` labels may be long."""
    numbers = [int(one) if one.isdecimal() else None for one in labels]
    known = [n for n in numbers if n is not None]
    room = 30 if not slanted and max(map(len, labels), default=0) <= 2 else 24 if slanted else 12
    if len(labels) <= room:
        shown = list(range(len(labels)))
    elif len(known) >= len(labels) - 1 and not slanted:
        every = next(n for n in _round() if sum(k % n == 0 for k in known) <= 16)
        shown = [at for at, n in enumerate(numbers) if n is None or n % every == 0]
    else:
        shown = _spread(len(labels), room)
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    ax.set_xticks(shown, labels=[labels[n] for n in shown], **turned)


def _spread(count: int, most: int = _TICKS) -> list[int]:
    """Return at most so many of the numbers below ``count``, evenly spaced."""
    every = next(n for n in _round() if count <= n * most)
    return list(range(0, count, every))


def _round() -> Iterable[int]:
    return (k * 10**n for n in range(30) for k in (1, 2, 5))


# -- text


def short(text: str, most: int = LABEL) -> str:
    """Shorten a text to its end, which is more specific than its beginning, and make it safe for matplotlib."""
    text = printable(text)
    return plain(text if len(text) <= most else "\N{HORIZONTAL ELLIPSIS}" + text[1 - most :])


def folded(label: str, ax: Any) -> str:
    """Return the label of a vertical axis in as many lines as the height of Axes asks for."""
    high = ax.get_position().height * ax.figure.figure.get_size_inches()[1]
    return "\n".join(wrap(label, max(16, int(high * _ACROSS))))


def plain(text: str) -> str:
    """Escape "$", which starts mathematics in matplotlib."""
    return text.replace("$", r"\$")


def number(x: float) -> str:
    """Return a number in few characters.

    >>> [number(x) for x in (0.0, 1234567.0, 12.345, 1.5e-7, float("nan"))]
    ['0', '1.23e+06', '12.3', '1.5e-07', '']
    """
    return "" if math.isnan(x) else f"{x:.3g}"
