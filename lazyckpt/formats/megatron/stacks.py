"""From the keys of megatron-core's distributed checkpoints to the names of the model with tp = pp = ep = 1.

Sources: megatron/core/transformer/transformer_block.py `sharded_state_dict` (the layers of a homogeneous block are one
tensor with a leading axis of layers), transformer/moe/experts.py (a further axis of experts, under
``experts.experts``), models/gpt/gpt_layer_specs.py `sharded_state_dict_keys_map` (layer norms of the local spec stand
under the names of fused ones), mlp.py `apply_swiglu_sharded_factory` (``weight_w`` and ``weight_v`` when shards are
singletons), ssm/mamba_mixer.py `_split_tensor_factory` (``in_proj.weight.z``, ``.x``, ...).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ...core.box import Box
from ...core.compose import Piece, compose, whole_of
from ...core.index import TensorSpec, renamed

_LAYERS = re.compile(r"(?P<head>(?:^|.*\.)layers)\.(?P<tail>(?!\d+\.).+)")
_EXPERTS = re.compile(r"(?P<head>.*\.mlp\.experts)\.experts\.(?P<tail>(?!\d+\.).+)")
_ONE_EXPERT = re.compile(r"(?P<head>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<tail>.+)")
_MOST = 1 << 16  # layers, or experts, that a model may have
_FUSED_ROWS = (("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"), (".x", ".B", ".C"))
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "cross_attention.linear_q.layer_norm_": "pre_cross_attn_layernorm.",
}


def logical(keys: Mapping[str, TensorSpec], local: bool | None) -> dict[str, TensorSpec]:
    """The tensors of one state by key -> by name, each layer and each expert a tensor of its own. ``local``: whether
    the model was made of the local spec (args.transformer_impl), None if that is not known."""
    found = {one.name: one for stack in keys.values() for layer in _layers(stack) for one in _experts(layer)}
    return _joined({one.name: one for one in (_unfused(spec, found, local) for spec in found.values())})


def _layers(spec: TensorSpec) -> Iterator[TensorSpec]:
    match = _LAYERS.fullmatch(spec.name)
    if match is None or not spec.shape or spec.shape[0] > _MOST:
        yield spec
        return
    for n in range(spec.shape[0]):
        yield _nth(spec, n, f"{match['head']}.{n}.{match['tail']}", "layer")


def _experts(spec: TensorSpec) -> Iterator[TensorSpec]:
    one = _ONE_EXPERT.fullmatch(spec.name)
    if one is not None:
        yield renamed(spec, f"{one['head']}.local_experts.{one['expert']}.{one['tail']}")
        return
    match = _EXPERTS.fullmatch(spec.name)
    if match is None or not spec.shape or spec.shape[0] > _MOST:
        yield spec
        return
    for n in range(spec.shape[0]):
        yield _nth(spec, n, f"{match['head']}.local_experts.{n}.{match['tail']}", "expert")


def _nth(spec: TensorSpec, n: int, name: str, what: str) -> TensorSpec:
    """One index of the first dimension, which goes."""
    rest = (0,) * (len(spec.shape) - 1)
    piece = Piece(spec, Box((n, *rest), (n + 1, *spec.shape[1:])), rest, tuple(range(1, len(spec.shape))))
    rule = f"{what} {n} of the {spec.shape[0]} that are stacked along the first dimension"
    return compose(
        name, spec.shape[1:], [piece], f"{spec.rule}; {rule}" if spec.rule else rule, spec.stored_as or spec.name
    )


def _unfused(spec: TensorSpec, names: Mapping[str, TensorSpec], local: bool | None) -> TensorSpec:
    """A layer norm under the name that the model gives it."""
    for fused, own in _FUSED.items():
        head, found, tail = spec.name.partition(fused)
        if found:
            matrix = f"{head}{fused.removesuffix('layer_norm_')}weight"
            # Transformer Engine's fused norms have that name in the model; beside experts there is nothing to fuse with
            if local or (local is not None and matrix not in names):
                return renamed(spec, f"{head}{own}{tail}")
    return spec


def _joined(names: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """With what was saved as several tensors, one for each matrix that is fused in it, put together."""
    found: dict[str, TensorSpec] = {}
    for name, spec in names.items():
        whole, parts = _fused(name, names)
        if not parts:
            found[name] = spec
        elif whole not in found:
            found[whole] = _above(whole, parts)
    return found


def _fused(name: str, names: Mapping[str, TensorSpec]) -> tuple[str, list[TensorSpec]]:
    """The name of the whole that a tensor is a part of, and all its parts; none if it is no part, or not all fit."""
    for endings in _FUSED_ROWS:
        ending = next((e for e in endings if name.endswith(e)), None)
        if ending is not None:
            whole = name.removesuffix(ending)
            parts = [names[whole + e] for e in endings if whole + e in names]
            if len(parts) == len(endings) and len({(p.dtype, len(p.shape), p.shape[1:]) for p in parts}) == 1:
                return (whole, parts) if parts[0].shape else ("", [])
    return "", []


def _above(name: str, parts: Sequence[TensorSpec]) -> TensorSpec:
    """Tensors one above the other."""
    first = parts[0]
    starts = accumulate((part.shape[0] for part in parts), initial=0)
    pieces = [whole_of(part, (at, *(0,) * (len(first.shape) - 1))) for part, at in zip(parts, starts, strict=False)]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return compose(name, shape, pieces, " above ".join(p.name for p in parts), first.stored_as or first.name)
