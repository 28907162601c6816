"""The order in which a model of transformers has its parameters: that of its modules, not that of a file.

A safetensors file lists tensors by dtype and name, an index by name, but an optimizer numbers parameters as the modules
registered them (torch/nn/modules/module.py `named_parameters`: a module's own first, then those of each sub-module).
What the parts of each module are, in order, tools/make_hf_orders.py found out for every model type (hf_orders.json).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

Orders = tuple[tuple[str, ...], ...]


def in_module_order(names: Iterable[str], orders: Orders) -> list[str] | None:
    """The names as the modules have them; None where no order, or no one order, is known for the parts of a module.

    >>> in_module_order(["a.bias", "a.weight", "b.10.w", "b.9.w"], (("weight", "bias"), ("a", "b")))
    ['a.weight', 'a.bias', 'b.9.w', 'b.10.w']
    >>> in_module_order(["a.k", "a.q"], (("q", "k"), ("k", "q")))
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        *modules, last = name.split(".")
        for part in modules:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):  # a tensor has the name of a module
                return None
        if last in node:
            return None
        node[last] = name
    try:
        return list(_walk(tree, orders))
    except LookupError:
        return None


def _walk(tree: Mapping[str, Any], orders: Orders) -> Iterator[str]:
    for part in _ordered(frozenset(tree), orders):
        below = tree[part]
        if isinstance(below, str):
            yield below
        else:
            yield from _walk(below, orders)


@functools.lru_cache(maxsize=1024)
def _ordered(parts: frozenset[str], orders: Orders) -> list[str]:
    if all(part.isdecimal() for part in parts):
        return sorted(parts, key=int)
    if len(parts) == 1:
        return list(parts)
    fitting = {tuple(part for part in order if part in parts) for order in orders if parts.issubset(order)}
    if len(fitting) != 1:
        raise LookupError(parts)
    return list(fitting.pop())


def orders_of(config: Any) -> Orders:
    """What is known of the modules of a model whose config.json says this: of its type, and of those within it."""
    table = _table()
    types = dict.fromkeys(_types(config, 4))
    found = dict.fromkeys(n for name in types for n in table["types"].get(name, ()))
    return tuple(tuple(table["orders"][n]) for n in found)


def _types(config: Any, depth: int) -> Iterator[str]:
    if isinstance(config, dict) and depth:
        kind = config.get("model_type")
        if isinstance(kind, str):
            yield kind
        for value in config.values():
            yield from _types(value, depth - 1)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(resources.files(__package__).joinpath("hf_orders.json").read_text())
    return table
