"""An index written as text: ``0:4, ::8`` -> what Python would pass to ``__getitem__``. Nothing is evaluated."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from ..errors import SelectionError

_KNOWN = "ints, slices, ..., None, one list of ints"


def parse_index(text: str) -> Any:
    """The key that ``t[text]`` would index with. Raises SelectionError for anything but literal indices.

    >>> parse_index("0:4, ::-8")
    (slice(0, 4, None), slice(None, None, -8))
    >>> parse_index("..., [3, 1], None")
    (Ellipsis, [3, 1], None)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(f"_[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        raise SelectionError(f"the index [{text}] is not understood: {_KNOWN}")
    return _item(tree.slice, text)


def _item(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Tuple(elts):
            return tuple(_item(e, text) for e in elts)
        case ast.List(elts):
            return [_scalar(e, text) for e in elts]
        case ast.Slice(lower, upper, step):
            return slice(*(None if e is None else _scalar(e, text) for e in (lower, upper, step)))
        case ast.Constant(value) if value is None or value is Ellipsis:
            return value
    return _scalar(node, text)


def _scalar(node: ast.expr, text: str) -> int | bool | None:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, int):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return -value
    raise SelectionError(f"the index [{text}] is not understood: {_KNOWN}; not {ast.unparse(node)!r}")
