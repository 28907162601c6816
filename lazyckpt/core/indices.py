"""Indices as text, as Python writes them: parsed, never evaluated."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from ..errors import SelectionError


def parse_index(text: str) -> Any:
    """The key that ``t[text]`` would index with; nothing is evaluated. Raises SelectionError for all but literals.

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
        raise SelectionError(_not_understood(text))
    return _item(tree.slice, text)


def _item(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Tuple(elts):
            return tuple(_item(e, text) for e in elts)
        case ast.List(elts):
            return [_literal(e, text) for e in elts]
        case ast.Slice(lower, upper, step):
            return slice(*(None if e is None else _literal(e, text) for e in (lower, upper, step)))
        case ast.Constant(value) if value is Ellipsis:
            return value
    return _literal(node, text)


def _literal(node: ast.expr, text: str) -> int | None:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, int):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return -value
    raise SelectionError(_not_understood(text))


def _not_understood(text: str) -> str:
    return f"the index [{text}] is not understood: it takes ints, slices, ..., None and one list of ints"
