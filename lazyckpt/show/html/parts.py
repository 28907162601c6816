"""What all HTML of lazyckpt is made of: text that stays text, the frame with style and script, colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files

from ...core.dtypes import BOOL, DType
from ...errors import printable
from ..layout import Holder, ranges

_COLOURS = 8  # of holders; then they begin anew
_LONG = 160  # characters of a name that are shown


def safe(text: str, limit: int = _LONG) -> str:
    """Text of a checkpoint as HTML text or the value of an attribute: no markup, no control characters, no end of
    the world if it is long.

    >>> safe('<b>"\\x1b')
    '&lt;b&gt;&quot;\\\\x1b'
    """
    text = printable(text[: limit + 1])
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


def tag(name: str, body: str, css: str = "", **attributes: str) -> str:
    """An element; ``body`` is HTML, the values of ``attributes`` (``data_x`` for data-x) are text.

    >>> tag("b", "x", "dim", title="a<b")
    '<b class="dim" title="a&lt;b">x</b>'
    """
    told = {"class": css} if css else {}
    told |= {key.replace("_", "-"): value for key, value in attributes.items()}
    inner = "".join(f' {key}="{safe(value, 400)}"' for key, value in told.items())
    return f"<{name}{inner}>{body}</{name}>"


def page(parts: Iterable[str], searched: bool = False) -> str:
    """The parts as one output. Its style reaches nothing else on the page, nor do notebooks typeset "$" in it."""
    script = f"<script>(() => {{\n{_resource('search.js')}}})();</script>" if searched else ""
    body = "\n".join(part for part in parts if part)
    return f'<div class="lazyckpt tex2jax_ignore mathjax_ignore">\n<style>\n{_style()}</style>\n{body}\n{script}</div>'


@cache
def _style() -> str:
    text = _resource("style.css").split("*/\n", 1)[1].replace("&", "div.lazyckpt.lazyckpt.lazyckpt")
    return text.replace("@dark", _resource("dark.css"))


@cache
def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def dtype_class(dtype: DType) -> str:
    """The colour of a dtype: full floats, 16-bit floats, smaller ones, integers, all else."""
    if dtype.is_floating_point:
        return "float" if dtype.itemsize >= 4 else "half" if dtype.itemsize == 2 else "small"
    if dtype.is_complex or dtype is BOOL or dtype.name.startswith("bits"):
        return "other"
    return "int"


def owner(holder: Holder) -> object:
    """What has one colour: a rank, all files of which have the same, or a file of which no rank is known."""
    return holder.rank if holder.rank is not None else holder.path


@dataclass(slots=True)
class Colours:
    """The same colour for the same owner, in all of an output."""

    known: dict[object, int] = field(default_factory=dict)

    def of(self, holders: Sequence[Holder]) -> str:
        """The class of what they hold: of the first that can be read."""
        there = next((h for h in holders if not h.missing), None)
        if there is None:
            return "lost"
        return f"k{self.known.setdefault(owner(there), len(self.known)) % _COLOURS}"


def title(holders: Sequence[Holder]) -> str:
    """What a box says when one points at it."""
    text = ranges(holders)
    lost = sum(bool(h.missing) for h in holders)
    if len(holders) == 1:
        text += f": {holders[0].path}" if holders[0].path != text else ""
    return text + (" (missing)" if lost == len(holders) else f" ({lost} missing)" if lost else "")


@dataclass(frozen=True, slots=True)
class Shown:
    """Something to look at: text for a terminal, HTML for a notebook."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html
