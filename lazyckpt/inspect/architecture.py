"""The parameters of a model by layer and kind, from names, shapes and dtypes alone. No tensor data is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ..core.box import Shape
from ..core.dtypes import DType
from ..core.specs import kind_of
from ..layouts.stages import expert_of
from ..layouts.tables import pattern
from ..namespace import Namespace

ROLES = ("embedding", "attention", "mlp", "experts", "router", "norm", "head", "other")
"""What a parameter is for, in the order of display."""

_EVERY = 4096  # tensors between two checks
_TESTS = (
    ("experts", "role.experts"),
    ("router", "role.router"),
    ("norm", "role.norm"),
    ("head", "role.head"),
    ("embedding", "role.embedding"),
    ("attention", "role.attention"),
    ("mlp", "role.mlp"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of one layer and one kind: one tensor, or the experts of a layer.

    Attributes
    ----------
    layer
        The number of the layer; None for what belongs to no layer.
    kind
        The tensors' full name with ``*`` in the place of every number.
    role
        One of `ROLES`.
    names
        The full names, each tied tensor once, under the name that owns it.
    shape, dtype
        The shape and the dtype of each tensor; None if they differ.
    numel, nbytes
        The elements of all tensors, and their size in bytes.
    """

    layer: int | None
    kind: str
    role: str
    names: tuple[str, ...]
    shape: Shape | None
    dtype: DType | None
    numel: int
    nbytes: int

    @property
    def stack(self) -> str:
        """The part of the kind before the number of the layer, such as ``model.layers.``; "" without a layer."""
        return "" if self.layer is None else self.kind.partition("*")[0]


@dataclass(frozen=True, slots=True)
class Block:
    """Layers of one stack that have the same kinds, counts, shapes and dtypes.

    Attributes
    ----------
    stack
        The names' part before the number of the layer, such as ``model.layers.``.
    layers
        The numbers of the layers, ascending.
    tensors, numel, nbytes
        Tensors, elements and bytes of each of the layers.
    """

    stack: str
    layers: tuple[int, ...]
    tensors: int
    numel: int
    nbytes: int

    @property
    def label(self) -> str:
        """The numbers of the layers as text.

        >>> Block("h.", (0, 1, 2, 5), 1, 1, 4).label
        '0-2, 5'
        """
        runs: list[list[int]] = []
        for number in self.layers:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The parameters of a view by layer and kind.

    Attributes
    ----------
    groups
        The groups, in the order in which the view has their first tensors.
    """

    groups: tuple[Group, ...]

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The numbers of the layers, ascending; None first, if there are tensors of no layer."""
        return tuple(sorted({group.layer for group in self.groups}, key=lambda layer: -1 if layer is None else layer))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds, in the order of their first tensors."""
        return tuple(dict.fromkeys(group.kind for group in self.groups))

    @property
    def numel(self) -> int:
        """The number of elements; tied tensors are counted once."""
        return sum(group.numel for group in self.groups)

    @property
    def nbytes(self) -> int:
        """The size in bytes; tied tensors are counted once."""
        return sum(group.nbytes for group in self.groups)

    def of_kind(self) -> dict[str, list[Group]]:
        """Return the groups of each kind, by layer."""
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            found.setdefault(group.kind, []).append(group)
        for groups in found.values():
            groups.sort(key=lambda group: -1 if group.layer is None else group.layer)
        return found

    def blocks(self) -> list[Block]:
        """Return the layers, with those of a stack that are alike together, in the order of their first layers."""
        layers: dict[tuple[str, int], list[Group]] = {}
        for group in self.groups:
            if group.layer is not None:
                layers.setdefault((group.stack, group.layer), []).append(group)
        alike: dict[Any, list[tuple[int, Sequence[Group]]]] = {}
        for (stack, layer), groups in sorted(layers.items()):
            looks = frozenset((group.kind, len(group.names), group.shape, group.dtype, group.numel) for group in groups)
            alike.setdefault((stack, looks), []).append((layer, groups))
        return [_block(stack, found) for (stack, _), found in alike.items()]


def _block(stack: str, found: Sequence[tuple[int, Sequence[Group]]]) -> Block:
    first = found[0][1]
    tensors, numel, nbytes = (sum(of) for of in zip(*((len(g.names), g.numel, g.nbytes) for g in first), strict=True))
    return Block(stack, tuple(layer for layer, _ in found), tensors, numel, nbytes)


def architecture(view: Namespace[Any], check: Callable[[], None] = lambda: None) -> Architecture:
    """Group the tensors of a view by layer and kind. Tied tensors are counted once, under the name that owns them.

    Parameters
    ----------
    view
        The view.
    check
        Called now and then; what it raises ends the work.
    """
    specs = view.specs
    found: dict[tuple[int | None, str], list[str]] = {}
    for n, name in enumerate(view._owners()):
        if n % _EVERY == 0:
            check()
        found.setdefault(layer_and_kind(name), []).append(name)
    return Architecture(tuple(_group(layer, kind, names, specs) for (layer, kind), names in found.items()))


def _group(layer: int | None, kind: str, names: Sequence[str], specs: Any) -> Group:
    kinds = [kind_of(specs, name) for name in names]
    counts = [(prod(shape), dtype.itemsize) for shape, dtype in kinds]
    shapes, dtypes = {shape for shape, _ in kinds}, {dtype for _, dtype in kinds}
    return Group(
        layer,
        kind,
        role_of(kind),
        tuple(names),
        shapes.pop() if len(shapes) == 1 else None,
        dtypes.pop() if len(dtypes) == 1 else None,
        sum(numel for numel, _ in counts),
        sum(numel * size for numel, size in counts),
    )


def layer_and_kind(name: str) -> tuple[int | None, str]:
    """Return the number of the layer that a tensor belongs to, and its kind.

    The layer is the first number between dots of a full name. The kind is the name with ``*`` for every such number and
    for the number of an expert.

    >>> layer_and_kind("model.layers.12.mlp.experts.3.up_proj.weight")
    (12, 'model.layers.*.mlp.experts.*.up_proj.weight')
    >>> layer_and_kind("model.norm.weight")
    (None, 'model.norm.weight')
    """
    parts = name.split(".")
    layer = None
    for n, part in enumerate(parts):
        if part.isdecimal() and part.isascii() and len(part) < 10:
            layer = int(part) if layer is None else layer
            parts[n] = "*"
    kind = ".".join(parts)
    if parts[-1][-1:].isdecimal():  # the number of an expert stands at the end: linear_fc1.weight3
        expert = expert_of(name)
        if expert is not None and not expert.tail:
            kind = f"{kind.rstrip('0123456789')}*"
    return layer, kind


@lru_cache(4096)
def role_of(kind: str) -> str:
    """Return what a kind of parameter is for, by its name: one of `ROLES`. For display only.

    >>> role_of("model.layers.*.self_attn.q_proj.weight"), role_of("model.layers.*.input_layernorm.weight")
    ('attention', 'norm')
    """
    return next((role for role, entry in _TESTS if pattern(entry).search(kind)), "other")
