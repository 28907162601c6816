"""Experts that megatron-core's GroupedMLP keeps in one array, as the matrices of each: as SequentialMLP has them.

Source: megatron/core/transformer/moe/experts.py `GroupedMLP`: x @ weight, so the arrays (here [experts, in, out]) are
those of linear layers transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...core.box import Box
from ...core.compose import Piece, compose
from ...core.index import TensorSpec, renamed

_STACK = re.compile(r"(.*\.experts\.)weight([12])")
_MOST = 1 << 16


def apart(states: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
    """All states, each such array as its experts' matrices."""
    counts = {
        name: spec.shape[0]
        for specs in states.values()
        for name, spec in specs.items()
        if len(spec.shape) == 3 and spec.shape[0] <= _MOST and _STACK.fullmatch(name)
    }
    return {
        state: {one.name: one for name, spec in specs.items() for one in _apart(spec, counts.get(name, 0))}
        for state, specs in states.items()
    }


def _apart(spec: TensorSpec, count: int) -> Iterator[TensorSpec]:
    match = _STACK.fullmatch(spec.name)
    if match is None or (spec.shape and (len(spec.shape) != 3 or spec.shape[0] != count)) or not count:
        yield spec
        return
    for n in range(count):
        name = f"{match[1]}local_experts.{n}.linear_fc{match[2]}.weight"
        if not spec.shape:  # a number (a step) is that of all
            yield renamed(spec, name)
            continue
        _, rows, columns = spec.shape
        piece = Piece(spec, Box((n, 0, 0), (n + 1, rows, columns)), (0, 0), (2, 1))
        rule = f"expert {n} of {spec.name!r}, transposed"
        rule = f"{spec.rule}; {rule}" if spec.rule else rule
        yield compose(name, (columns, rows), [piece], rule, spec.stored_as or spec.name)
