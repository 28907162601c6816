"""Map the keys of megatron-core's distributed checkpoints to the names of the model with tp = pp = ep = 1.

Sources: megatron/core/transformer/transformer_block.py `sharded_state_dict` (the layers of a homogeneous block are one
tensor with a leading axis of layers), transformer/moe/experts.py (a further axis of experts, under
``experts.experts``), models/gpt/gpt_layer_specs.py `sharded_state_dict_keys_map` (layer norms of the local spec have
the names of fused ones), mlp.py `apply_swiglu_sharded_factory` (``weight_w`` and ``weight_v`` when shards are
singletons), ssm/mamba_mixer.py `_split_tensor_factory` (``in_proj.weight.z``, ``in_proj.weight.x``, ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...core.box import Box, Selection, Shape
from ...core.compose import compose
from ...core.fragments import Fragments, fragments_of
from ...core.placement import Part, Placement
from ...core.specs import Fragment, TensorSpec, renamed
from ...errors import CorruptError
from ...layouts.megatron import PARTS
from ...layouts.tables import pattern

# -- Tensors that megatron-core reshapes before it saves them: a grid of blocks, each block flat.


def regridded(spec: TensorSpec, shape: Shape | None) -> TensorSpec:
    """Return the tensor in its original ``shape``; unchanged if that is None. Raises CorruptError for an impossible
    shape."""
    if shape is None or shape == spec.shape:
        return spec
    grid = spec.shape[:-1]
    fits = len(grid) == len(shape) and all(g and n % g == 0 for n, g in zip(shape, grid, strict=True))
    if not fits or prod(spec.shape) != prod(shape):
        raise CorruptError(
            f"{spec.name!r} of shape {spec.shape} claims the original shape {shape}, which cannot be: damaged"
        )
    block = tuple(n // g for n, g in zip(shape, grid, strict=True))
    rule = f"saved as a grid of {'x'.join(map(str, grid))} flat blocks"
    return replace(spec, shape=shape, fragments=Regridded(spec.fragments, block), rule=rule)


@dataclass(frozen=True, slots=True, eq=False)
class Regridded(Fragments):
    """Fragments of a tensor whose blocks are saved flat, as the last dimension of a grid. Each fragment of the grid is
    one flat interval of one block."""

    fragments: Sequence[Fragment]
    block: Shape

    def meeting(self, want: Selection) -> list[Fragment]:
        """Return the fragments of the wanted blocks."""
        if not all(map(len, want)):
            return []
        cells = [range(r[0] // n, r[-1] // n + 1) for r, n in zip(want, self.block, strict=True)]
        return list(self._moved(fragments_of(self.fragments).meeting((*cells, range(prod(self.block))))))

    def _moved(self, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        for fragment in fragments:
            for part in fragment.parts or (Part(Box.of(fragment.local_shape), (0,) * len(fragment.local_shape)),):
                *cell, first = part.start
                if prod(part.local.shape[:-1]) != 1:
                    raise CorruptError(f"a chunk of shape {part.local.shape} holds several blocks: Megatron writes one")
                span = (first, first + part.local.shape[-1])
                at = tuple(c * n for c, n in zip(cell, self.block, strict=True))
                yield replace(fragment, local_shape=self.block, parts=(Part(Box.of(self.block), at),), span=span)

    def __iter__(self) -> Iterator[Fragment]:
        return self._moved(self.fragments)

    def __len__(self) -> int:
        return len(self.fragments)


# -- Names of the model with tp = pp = ep = 1, from the keys of megatron-core's distributed checkpoints.

_MOST = 1 << 16  # layers, or experts, that a model may have
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "cross_attention.linear_q.layer_norm_": "pre_cross_attn_layernorm.",
}


def logical(keys: Mapping[str, TensorSpec], local: bool | None) -> dict[str, TensorSpec]:
    """Map the tensors of one state from keys to names, with a tensor for each layer and each expert. ``local``: whether
    the model was built from the local spec (args.transformer_impl); None if not known."""
    found = {one.name: one for stack in keys.values() for layer in _layers(stack) for one in _experts(layer)}
    return joined({one.name: one for one in (_unfused(spec, found, local) for spec in found.values())})


def _layers(spec: TensorSpec) -> Iterator[TensorSpec]:
    match = pattern("megatron.dist_layers").fullmatch(spec.name)
    if match is None or not spec.shape or spec.shape[0] > _MOST:
        yield spec
        return
    for n in range(spec.shape[0]):
        yield _nth(spec, n, f"{match['head']}.{n}.{match['tail']}", "layer")


def _experts(spec: TensorSpec) -> Iterator[TensorSpec]:
    one = pattern("megatron.dist_expert").fullmatch(spec.name)
    if one is not None:
        yield renamed(spec, f"{one['head']}.local_experts.{one['expert']}.{one['tail']}")
        return
    match = pattern("megatron.dist_experts").fullmatch(spec.name)
    if match is None or not spec.shape or spec.shape[0] > _MOST:
        yield spec
        return
    for n in range(spec.shape[0]):
        yield _nth(spec, n, f"{match['head']}.local_experts.{n}.{match['tail']}", "expert")


def _nth(spec: TensorSpec, n: int, name: str, what: str) -> TensorSpec:
    """Return the tensor at one index of the first dimension, without that dimension."""
    rest = (0,) * (len(spec.shape) - 1)
    block = Box((n, *rest), (n + 1, *spec.shape[1:]))
    placement = Placement.of(spec.shape, block, rest, tuple(range(1, len(spec.shape))))
    rule = f"{what} {n} of the {spec.shape[0]} that are stacked along the first dimension"
    return compose(
        name,
        spec.shape[1:],
        [(spec, placement)],
        f"{spec.rule}; {rule}" if spec.rule else rule,
        spec.stored_as or spec.name,
    )


def _unfused(spec: TensorSpec, names: Mapping[str, TensorSpec], local: bool | None) -> TensorSpec:
    """Rename a layer norm to its name in the model."""
    for fused, own in _FUSED.items():
        head, found, tail = spec.name.partition(fused)
        if found:
            matrix = f"{head}{fused.removesuffix('layer_norm_')}weight"
            # Transformer Engine's fused norms have that name in the model; next to experts there is no matrix to fuse
            if local or (local is not None and matrix not in names):
                return renamed(spec, f"{head}{own}{tail}")
    return spec


def joined(names: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Concatenate the parts of fused matrices that were saved as tensors of their own; keep other tensors.

    A number that an optimizer keeps for the matrix is saved with each part; the first copy is returned."""
    found: dict[str, TensorSpec] = {}
    used: set[str] = set()
    for name in names:
        if name in used:
            continue
        parts = _parts(name, names)
        if parts is None:
            found[name] = names[name]
            continue
        whole, members = parts
        used.update(members)
        specs = [names[one] for one in members]
        found[whole] = _concatenated(whole, specs) if specs[0].shape else renamed(specs[0], whole)
    return found


def _parts(name: str, names: Mapping[str, TensorSpec]) -> tuple[str, list[str]] | None:
    """Return the name of the matrix that a tensor is a part of, and the names of all its parts; None if it is not a
    part, or if parts are missing."""
    if name.endswith(("_w", "_v")):
        members = [f"{name[:-2]}_w", f"{name[:-2]}_v"]
        return (name[:-2], members) if _fit(members, names) else None
    base, _, part = name.rpartition(".")
    for module, parts in PARTS:
        if part in parts and base.endswith((f".{module}.weight", f".{module}.bias")):
            members = [f"{base}.{one}" for one in parts]
            if _fit(members, names):
                return base, members
    return None


def _fit(members: list[str], names: Mapping[str, TensorSpec]) -> bool:
    """Return whether all parts are present and can be concatenated along the first dimension, or are numbers."""
    specs = [names[name] for name in members if name in names]
    alike = {(spec.dtype, spec.shape[1:], bool(spec.shape)) for spec in specs}
    return len(specs) == len(members) and len(alike) == 1


def _concatenated(name: str, specs: list[TensorSpec]) -> TensorSpec:
    """Concatenate tensors along the first dimension."""
    first = specs[0]
    rest = (0,) * (len(first.shape) - 1)
    pieces, at = [], 0
    for spec in specs:
        pieces.append((spec, Placement.at(spec.shape, (at, *rest))))
        at += spec.shape[0]
    rule = " above ".join([first.name, *(spec.name.rpartition(".")[2] for spec in specs[1:])])
    return compose(name, (at, *first.shape[1:]), pieces, rule, first.stored_as or first.name)
