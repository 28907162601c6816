"""Keys and common content of megatron-core's distributed checkpoints (``--ckpt-format torch_dist``).

A key is a tensor of the whole model, so that any number of ranks loads it. The layers of a homogeneous decoder are
stacked under one key, [layers, ...], its experts under one key, [layers, experts, ...]; if layers differ (a list or a
number above 1 as ``moe_layer_freq``, Mamba layers), each has keys of its own. `formats.megatron.stacks` has the
reverse.

The optimizer's tensors have the keys of their parameters behind ``optimizer.state.exp_avg.`` and the like; the rest is
in ``common.pt``. Megatron-LM loads it into the same kind of optimizer only: with ``--use-distributed-optimizer`` from
the type ``fully_reshardable``, whose fp32 copies are called ``param``, without it from plain states, whose copies are
called ``fp32_param``. With expert parallelism it has two optimizers, and loads only from two.

Source: megatron/core/transformer/transformer_block.py, ssm/mamba_block.py, transformer/moe/experts.py, mlp.py,
models/gpt/gpt_model.py and gpt_layer_specs.py (`sharded_state_dict`, `sharded_state_dict_keys_map`), ssm/mamba_mixer.py
`_split_tensor_factory`; optimizer/optimizer.py and distrib_optimizer.py `sharded_state_dict`;
dist_checkpointing/serialization.py `save` (the files), mapping.py `ShardedObject.unique_key` (the keys of objects).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from ..core.box import Box
from ..core.compose import compose
from ..core.placement import Placement
from ..core.specs import TensorSpec, renamed
from ..errors import DataError, some
from ..jobs.plan import Writable
from ..layouts.megatron import fused_parts, stack_of
from ..layouts.stages import expert_of
from ..layouts.tables import pattern
from ..lazy import LazyArray
from .dcp import StateDict

ABOUT = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
_RESHARDABLE = "fully_reshardable"
_PARAM = "param"
_LOCAL_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


class Key(NamedTuple):
    """The key of a tensor, and its (number, count) in each of the key's leading dimensions: layers, experts."""

    name: str
    axes: tuple[tuple[int, int], ...]


class Keys:
    """The keys of a model. ``weights`` are its tensors on one rank, ``args`` megatron-core's arguments."""

    def __init__(self, weights: Mapping[str, TensorSpec], args: Any) -> None:
        self._args, self._weights = args, weights
        layers = [match for match in map(pattern("megatron.decoder_layer").match, weights) if match is not None]
        self._layers = max((int(match[1]) + 1 for match in layers), default=0)
        self._experts: dict[str, int] = {}
        for expert in filter(None, map(expert_of, weights)):
            self._experts[expert.layer] = max(self._experts.get(expert.layer, 0), expert.number + 1)
        differ = any(_differ(getattr(args, key, None)) for key in ("moe_layer_freq", "linear_attention_freq"))
        differ = differ or bool(getattr(args, "heterogeneous_layers_config_path", None))
        self.hybrid = any("mixer." in name for name in weights)  # a MambaModel, or Falcon-H1
        self._stacked = not differ and not self.hybrid
        # layers of megatron-core's own modules, whose norms have the keys of fused ones (not in multi-latent attention)
        qkv = {name.partition(".self_attention.linear_qkv.weight")[0] for name in weights}
        self._unfused = {
            name.partition(".input_layernorm.")[0] for name in weights if ".input_layernorm." in name
        } & qkv

    def of(self, name: str) -> Key:
        """Return the key of a tensor or object of one layer and one expert (of a stack of experts: of all)."""
        for norm, fused in _LOCAL_NORMS.items():
            head, found, tail = name.partition(norm)
            if found and head in self._unfused:
                name = f"{head}{fused}{tail}"
        index: list[tuple[int, int]] = []
        expert, which = expert_of(name), stack_of(name)
        if expert is not None:  # local_experts.3.linear_fc1.weight, or linear_fc1.weight3
            before, _, inner = expert.layer.rpartition(".experts.")
            name = f"{before}.experts.experts.{inner.removeprefix('local_experts.')}{expert.tail.removeprefix('.')}"
            index = [(expert.number, self._experts[expert.layer])]
        elif which is not None:
            name = f"{name.removesuffix(f'weight{which}')}experts.linear_fc{which}.weight"
        layer = pattern("megatron.decoder_layer").match(name)
        if layer is not None and self._stacked:
            name, index = f"decoder.layers.{name[layer.end() :]}", [(int(layer[1]), self._layers), *index]
        return Key(name, tuple(index))

    def stacked(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return the tensors of one state by their keys.

        Raises DataError if layers or experts differ in what they have, and for a fused matrix of unknown parts.
        """
        pieces: dict[str, list[tuple[Key, TensorSpec]]] = {}
        for name, spec in specs.items():
            key = self.of(name)
            for suffix, part in self._parts(name, spec):
                pieces.setdefault(f"{key.name}{suffix}", []).append((key, part))
        return {key: _stack(key, found) for key, found in pieces.items()}

    def _parts(self, name: str, spec: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors that a tensor is stored as: (what follows the key, tensor)."""
        try:
            parts = fused_parts(name, self._args)
        except ValueError as e:
            raise DataError(f"{e}: a distributed checkpoint stores them one by one. Write rank files instead") from None
        if parts is None:
            yield "", spec
            return
        rest = tuple(spec.shape[1:])
        if sum(size for _, size in parts) != spec.shape[0]:
            raise DataError(
                f"{name!r} of shape {spec.shape} does not have the rows of its fused parts by the arguments "
                f"({', '.join(f'{part} {size}' for part, size in parts)})"
            )
        at = 0
        for part, size in parts:
            block = Box((at, *(0 for _ in rest)), (at + size, *rest))
            placement = Placement.of(spec.shape, block, (0,) * len(spec.shape))
            yield f".{part}", compose(name, (size, *rest), [(spec, placement)], spec.rule, spec.stored_as or name)
            at += size

    def objects(self, modules: Iterable[str]) -> Iterator[str]:
        """Yield the keys of the ``_extra_state`` of modules (mapping.py `ShardedObject.unique_key`)."""
        for module in modules:
            many = self._experts.get(f"{module}.weight")  # experts in a grouped linear layer
            names = [module] if many is None else [f"{module}.weight{n}" for n in range(many)]
            for key in (self.of(name if many is not None else f"{name}.weight") for name in names):
                yield _object(key.name.removesuffix(".weight"), key.axes)
        for name, spec in self._weights.items():
            if stack_of(name) is not None and len(spec.shape) == 3:
                key = self.of(name)
                for n in range(spec.shape[0]):
                    yield _object(key.name.removesuffix(".weight"), (*key.axes, (n, spec.shape[0])))


def _differ(frequency: Any) -> bool:
    """Return whether a frequency of layers makes megatron-core keep the layers apart."""
    return isinstance(frequency, list) or (type(frequency) is int and frequency > 1)


def _object(module: str, index: tuple[tuple[int, int], ...]) -> str:
    index = index or ((0, 1),)
    numbers, counts = (".".join(map(str, column)) for column in zip(*index, strict=True))
    return f"{module}._extra_state/shard_{numbers}_{counts}"


def _stack(key: str, pieces: list[tuple[Key, TensorSpec]]) -> TensorSpec:
    """Return the tensor of a key from those of layers and experts."""
    first, like = pieces[0]
    counts = tuple(count for _, count in first.axes)
    apart = sorted({str((tuple(spec.shape), str(spec.dtype))) for _, spec in pieces})
    if len(apart) > 1 or len(pieces) != prod(counts):
        what = f"shapes and dtypes {some(apart)}" if len(apart) > 1 else f"{len(pieces)} of {prod(counts)} of them"
        raise DataError(
            f"megatron-core stacks the tensors of layers and experts under {key!r}, and here they have {what}. Write "
            "rank files instead, or a view of the other tensors"
        )
    axes = list(range(len(like.shape)))
    if stack_of(like.name) is not None and len(axes) == 3:
        axes = [0, 2, 1]  # GroupedMLP's matrices [experts, in, out] are stored as those of linear layers
    if not counts and axes == sorted(axes):
        return renamed(like, key)
    shape = (*counts, *(like.shape[axis] for axis in axes))
    lead = (None,) * len(counts)
    placed = [
        (spec, Placement.at(spec.shape, (*(n for n, _ in one.axes), *(0 for _ in axes)), (*lead, *axes)))
        for one, spec in pieces
    ]
    return compose(key, shape, placed, like.rule, like.stored_as or like.name)


# -- the checkpoint


def state_dict(states: Mapping[str, Mapping[str, LazyArray]], objects: Iterable[str], distributed: bool) -> StateDict:
    """Return the tensors and objects in the distributed files. ``states``: state -> key -> tensor; ``distributed``:
    for Megatron's distributed optimizer."""
    found = StateDict()
    for state, tensors in states.items():
        kind = {"fp32": _PARAM if distributed else "fp32_param"}.get(state, state)
        prefix = "" if state == "weights" else f"optimizer.state.{kind}."
        for key, tensor in tensors.items():
            found.add((f"{prefix}{key}",), tensor)
    for key in objects:
        found.add((key,), [None])
    return found


def common(whole: Mapping[str, Any], distributed: bool) -> dict[str, Any]:
    """Return the content of ``common.pt`` from that of the file of a single rank."""
    about: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if distributed:
        about |= {"distrib_optim_sharding_type": _RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False}
    kept = {key: value for key, value in whole.items() if key != "model"}
    if "optimizer" in kept:
        parts = kept["optimizer"] if isinstance(kept["optimizer"], list) else [kept["optimizer"]]
        made = [_optimizer(part, distributed) for part in parts]
        kept["optimizer"] = made[0] if len(made) == 1 else dict(enumerate(made))
    return {**kept, "content_metadata": about}


def value_of(tensor: Writable) -> torch.Tensor:
    """Return a small tensor itself."""
    return tensor[...] if isinstance(tensor, LazyArray) else torch.as_tensor(getattr(tensor, "tensor", tensor))


def _optimizer(part: Mapping[str, Any], distributed: bool) -> dict[str, Any]:
    inner = part.get("optimizer", part)
    groups = [{name: value for name, value in group.items() if name != "params"} for group in inner["param_groups"]]
    counts = [state["step"] for state in inner["state"].values() if "step" in state]
    step = value_of(counts[0]) if counts else None
    scaler = {"grad_scaler": part["grad_scaler"]} if "grad_scaler" in part else {}
    if distributed:
        groups = [group if step is None else {**group, "step": float(step)} for group in groups]
        return {"optimizer": {"param_groups": groups}, **scaler, "param_state_sharding_type": _RESHARDABLE}
    made = {"state": {} if step is None else {"common_step": step}, "param_groups": groups}
    return {"optimizer": made, **scaler} if "optimizer" in part else made
