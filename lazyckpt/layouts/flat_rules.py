"""The user's rules for flat parameters: which parameters a flat parameter consists of, and their offsets. No I/O.

Writer: torch/distributed/fsdp/_flat_param.py `FlatParamHandle._init_flat_param_and_metadata`, which concatenates the
parameters of a module. With ``use_orig_params=True`` each begins at a multiple of 16 bytes (of the dtype that the model
computes in), and the total is padded to a multiple of the world size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..core.box import Shape
from ..errors import FormatError

_ALIGNMENTS = (0, 2, 4, 8, 16)  # elements in 16 bytes; 0: not aligned


@dataclass(frozen=True, slots=True)
class FlatRule:
    """The parameters of a flat parameter.

    ``shapes`` holds the parameters in order, with names relative to the module. Each parameter begins at a multiple of
    ``align`` elements (0: no alignment); None means that the total size decides.
    """

    shapes: Mapping[str, Shape]
    align: int | None = None


def is_flat_rule(rule: Any) -> bool:
    """Return whether a rule is one for flat parameters: a table with the key "flat"."""
    return isinstance(rule, Mapping) and "flat" in rule


def flat_rule(glob: str, rule: Any) -> FlatRule:
    """Parse ``{"flat": {"up.weight": [7, 6], "up.bias": [7]}, "align": 4}``. Raises FormatError.

    >>> flat_rule("*_flat_param", {"flat": {"weight": [2, 3]}}).shapes
    {'weight': (2, 3)}
    """
    shapes = rule["flat"] if is_flat_rule(rule) else None
    align = rule.get("align") if is_flat_rule(rule) else None
    if (
        not isinstance(shapes, Mapping)
        or not shapes
        or not rule.keys() <= {"flat", "align"}
        or not all(isinstance(name, str) and _is_shape(shape) for name, shape in shapes.items())
        or not (align is None or (type(align) is int and 0 <= align <= 1 << 20))
    ):
        raise FormatError(
            f"rules[{glob!r}] = {str(rule)[:200]} is not understood: the rule of a flat parameter is a table of its "
            "parameters in order, such as {'flat': {'up.weight': [64, 32], 'up.bias': [64]}}, and optionally 'align', "
            "their alignment in elements"
        )
    return FlatRule({name: tuple(shape) for name, shape in shapes.items()}, align)


def places(sizes: Sequence[int], total: int, world: int, align: int | None = None) -> list[list[int]]:
    """Return all possible layouts of parameters of these sizes in a flat one of ``total`` elements.

    A layout is the list of the parameters' first elements. All sizes are in elements.

    >>> places([66, 30, 5], 101, 2), places([66, 30, 5], 106, 2)
    ([[0, 66, 96]], [[0, 68, 100]])
    """
    found = []
    for step in _ALIGNMENTS if align is None else (align,):
        at, begins = 0, []
        for size in sizes:
            if step:
                at += -at % step
            begins.append(at)
            at += size
        if step:
            at += -at % world
        if at == total and begins not in found:
            found.append(begins)
    return found


def misfit(sizes: Sequence[int], total: int, world: int) -> str:
    """Return the reason why parameters of these sizes do not fill a flat one, for an error message."""
    return (
        f"its parameters have {sum(sizes):,} elements together, it has {total:,} (padding for {world} ranks included)"
    )


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(type(n) is int and n >= 0 for n in shape) and prod(shape) < 1 << 62
