"""Metadata and problems of a view with HTML of their own. They are the same mappings and tuples otherwise."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from ..core.units import plural
from ..errors import Problem, and_more
from ..formats.dcp.objects import Meta
from ..inspect.codes import kind_of
from ..markup import cell, page, safe, table, tag

_ROWS = 200  # problems that are shown


class Metadata(dict[str, Any]):
    """The metadata of a checkpoint: a dict that notebooks show as a tree."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from .html.meta import meta_html

        return meta_html(self)


class LazyMetadata(Meta):
    """Metadata whose items are read on first use. Notebooks show it as a tree, without items of very many objects."""

    def _repr_html_(self) -> str:
        from .html.meta import meta_html

        return meta_html(self)


class JoinedMetadata(ChainMap[str, Any]):
    """Metadata of several sources. Notebooks show it as a tree."""

    def _repr_html_(self) -> str:
        from .html.meta import meta_html

        return meta_html(self)


def shown_meta(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata that notebooks show as a tree. Nothing is read."""
    if type(meta) is dict:
        return Metadata(meta)
    if type(meta) is Meta:
        made = object.__new__(LazyMetadata)
        made.__dict__.update(meta.__dict__)  # they share what has been read
        return made
    if type(meta) is ChainMap:
        return JoinedMetadata(*meta.maps)
    return meta


class Problems(tuple[Problem, ...]):
    """The problems of a checkpoint: a tuple that notebooks show as a table, with what to do about each."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = []
        for one in self[:_ROWS]:
            todo = kind_of(one.code).todo
            what = safe(str(one), 600) + (f"<br>{tag('span', safe(todo, 400), 'dim')}" if todo else "")
            rows.append(
                [cell(tag("code", safe(one.code)), "l"), cell(what, "w"), cell(safe(one.path or "", 200), "w dim")]
            )
        if not rows:
            return page([tag("p", "no problems", "dim")])
        head = tag("div", tag("b", plural(len(self), "problem")), "head")
        more = tag("div", and_more(len(self) - _ROWS), "note") if len(self) > _ROWS else ""
        return page(
            [head, table([("code", "l"), ("problem, and what to do", "l"), ("file or tensor", "l")], rows), more]
        )
