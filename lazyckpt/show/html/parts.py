"""Building blocks of all HTML of lazyckpt: escaped text, elements, the frame with style and script, and colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files

from ...core.dtypes import BOOL, DType
from ...errors import printable
from ..layout import Holder, ranges

_COLOURS = 8  # distinct colours of holders; further holders reuse them
_LONG = 160  # characters of a name that are shown


def safe(text: str, limit: int = _LONG) -> str:
    """Escape text of a checkpoint for use as HTML text or as an attribute's value, and cut it at ``limit`` characters.

    Markup and control characters are escaped.

    >>> safe('<b>"\\x1b')
    '&lt;b&gt;&quot;\\\\x1b'
    """
    text = printable(text[: limit + 1])
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


def tag(name: str, body: str, css: str = "", **attributes: str) -> str:
    """Return an element. ``body`` is HTML; the values of ``attributes`` (``data_x`` for data-x) are text.

    >>> tag("b", "x", "dim", title="a<b")
    '<b class="dim" title="a&lt;b">x</b>'
    """
    values = {"class": css} if css else {}
    values |= {key.replace("_", "-"): value for key, value in attributes.items()}
    inner = "".join(f' {key}="{safe(value, 400)}"' for key, value in values.items())
    return f"<{name}{inner}>{body}</{name}>"


def page(parts: Iterable[str], searched: bool = False) -> str:
    """Join the parts to one output. Its style does not affect the rest of the page, and "$" is not typeset in it."""
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
    """Return the CSS class of a dtype: wide floats, 16-bit floats, smaller floats, integers, or other."""
    if dtype.is_floating_point:
        return "float" if dtype.itemsize >= 4 else "half" if dtype.itemsize == 2 else "small"
    if dtype.is_complex or dtype is BOOL or dtype.name.startswith("bits"):
        return "other"
    return "int"


def owner(holder: Holder) -> object:
    """Return the key of a holder's colour: its rank, which all files of the rank share, or else its path."""
    return holder.rank if holder.rank is not None else holder.path


@dataclass(slots=True)
class Colours:
    """The assignment of colours to owners within one output."""

    known: dict[object, int] = field(default_factory=dict)

    def of(self, holders: Sequence[Holder]) -> str:
        """Return the CSS class of the first holder that can be read, or "lost"."""
        there = next((h for h in holders if not h.missing), None)
        if there is None:
            return "lost"
        return f"k{self.known.setdefault(owner(there), len(self.known)) % _COLOURS}"


def title(holders: Sequence[Holder]) -> str:
    """Return the tooltip of a box."""
    text = ranges(holders)
    lost = sum(bool(h.missing) for h in holders)
    if len(holders) == 1:
        text += f": {holders[0].path}" if holders[0].path != text else ""
    return text + (" (missing)" if lost == len(holders) else f" ({lost} missing)" if lost else "")


@dataclass(frozen=True, slots=True)
class Shown:
    """An object with two representations: text for a terminal and HTML for a notebook."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html
