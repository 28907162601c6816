"""Escaped text, elements, tables, and the frame of an output with its style and scripts.

Outputs fetch nothing. What scripts add (search, copying of names) appears only where scripts run; lists and tables stay
readable where scripts and styles are stripped (GitHub). Colours follow the notebook's theme, and print is light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files

from ..core.dtypes import BOOL, DType
from ..errors import printable

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
    inner = f' class="{css}"' if css else ""
    for key, value in attributes.items():
        inner += f' {key.replace("_", "-")}="{safe(value, 400)}"'
    return f"<{name}{inner}>{body}</{name}>"


def cell(body: str, css: str = "", span: int = 1) -> str:
    """Return a cell of a table: HTML, the class of its column ("" right, "l" left), and how many columns it fills."""
    return tag("td", body, css) if span == 1 else tag("td", body, css, colspan=str(span))


def table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], total: Sequence[str] = ()) -> str:
    """Return a table.

    Parameters
    ----------
    head
        Title and class of each column: "" for numbers, which are aligned to the right, "l" for text.
    rows
        The cells of each row, made by `cell`.
    total
        The cells of a last row that is set apart.
    """
    titles = "".join(tag("th", safe(title), css) for title, css in head)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    if total:
        body += f'\n<tr class="total">{"".join(total)}</tr>'
    inner = f"<table>\n<thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return tag("div", inner, "scroll")


def page(parts: Iterable[str], scripts: Sequence[str] = ()) -> str:
    """Join the parts to one output. Its style does not affect the rest of the page, and "$" is not typeset in it.

    ``scripts`` are some of "search" and "copy"."""
    code = "".join(f"(() => {{\n{_resource(f'{name}.js')}}})();\n" for name in scripts)
    script = f"<script>{code}</script>" if code else ""
    body = "\n".join(part for part in parts if part)
    return f'<div class="lazyckpt tex2jax_ignore mathjax_ignore">\n<style>\n{_style()}</style>\n{body}\n{script}</div>'


@cache
def _style() -> str:
    text = _resource("style.css").split("*/\n", 1)[1].replace("&", "div.lazyckpt.lazyckpt.lazyckpt")
    return text.replace("@dark", _resource("dark.css")).replace("@light", _resource("light.css"))


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


@dataclass(frozen=True, slots=True)
class Shown:
    """An object with two representations: text for a terminal and HTML for a notebook."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html
