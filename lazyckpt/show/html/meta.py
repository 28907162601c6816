"""Metadata as collapsible nested lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import and_more
from ...formats.dcp.objects import Meta
from ...markup import page, safe, tag
from ..about import Line, meta_lines

_OPEN = 30  # lines that are visible at first, at most


def meta_html(meta: Mapping[str, Any], most: int = 400) -> str:
    """Return the HTML output of `CheckpointView.meta`."""
    return page([meta_list(meta, most) or tag("p", "(no metadata)", "dim")])


def meta_list(meta: Any, most: int) -> str:
    """Return metadata as nested lists of at most so many lines; "" if there is none. Items of very many objects, which
    would have to be read, are left out."""
    lines, left_out = meta_lines(meta.outline() if isinstance(meta, Meta) else meta, None, most)
    if not lines:
        return ""
    levels = 1
    while levels < 4 and sum(line.depth <= levels for line in lines) <= _OPEN:
        levels += 1
    body = _list(lines, 0, levels)
    note = tag("div", and_more(left_out, "lines"), "note") if left_out else ""
    return body + note


def _list(lines: Sequence[Line], depth: int, levels: int) -> str:
    """Return the lines of one depth, with those below each inside."""
    items, at = [], 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and lines[end].depth > depth:
            end += 1
        line = lines[at]
        key = f"{tag('code', safe(line.key, 200))}"
        value = f" {tag('code', safe(line.value, 400), 'dim')}" if line.value else ""
        if end > at + 1:
            inner = _list(lines[at + 1 : end], depth + 1, levels)
            start = "<details open>" if depth + 1 < levels else "<details>"
            items.append(tag("li", f"{start}<summary>{key}{value}</summary>\n{inner}</details>"))
        else:
            items.append(tag("li", f"{key}{value}", "line"))
        at = end
    return tag("ul", "\n".join(items))
