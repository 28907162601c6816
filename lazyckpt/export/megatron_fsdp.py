"""The state dict of Megatron-FSDP's checkpoints (``--ckpt-format fsdp_dtensor``), a DCP folder that any ranks load.

A key is a tensor of the whole model. Wrappers put "module." before its name: one in the model, and in the optimizer one
for each wrapper (two, and one more in mixed precision). In mixed precision the weights are the fp32 copies. The first
matrix of a SwiGLU is two tensors, ``weight_w`` and ``weight_v``. The options of a parameter's group are an object for
each parameter and option. Megatron-LM passes over keys that it does not find, so that every key has to be right.

The step count is in the options, from where Transformer Engine's FusedAdam loads it, and in a state of each parameter,
from where torch's AdamW loads it.

Source: Megatron-LM megatron/training/checkpointing.py `generate_state_dict`, `preprocess_fsdp_dtensor_state_dict`,
`_load_fsdp_dtensor_base_checkpoint`; megatron/core/transformer/fsdp_dtensor_checkpoint.py
`handle_swiglu_in_state_dict`, `handle_experts_in_state_dict`, `handle_fp8_extra_state_case`;
megatron/core/optimizer/distrib_optimizer.py `sharded_param_state_fsdp_dtensor`,
`_param_groups_to_param2group_meta`. `formats.megatron.fsdp_names` has the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..core.placement import Division
from ..errors import DataError, MeshError, some
from ..jobs.plan import Writable
from ..layouts.megatron import flag, fused_parts, is_buffer, is_gated, stack_of
from ..layouts.tables import pattern
from ..lazy import LazyArray
from .dcp import StateDict, flattened
from .megatron_model import Model
from .megatron_optimizer import Optimizer
from .torch import Held

_MODEL = "module."
_WRAPPERS = 2  # FullyShardedDataParallel and MegatronFSDP; in mixed precision also Float16Module
_HALVES = ("_w", "_v")


def check_division(division: Division) -> None:
    """Raise MeshError for a pipeline, in which Megatron-FSDP's stages overwrite each other's layers."""
    if division.mesh.pp > 1:
        raise MeshError(
            f"pp={division.mesh.pp}: Megatron-FSDP's stages number their layers from 0, so that its checkpoints hold "
            "one stage only: write ckpt_format='torch_dist', or leave out pp="
        )


def state_dict(model: Model) -> StateDict:
    """Return the keys with their tensors and objects. Raises DataError for a model whose keys are not known."""
    args, weights = model.args, model.index.states["weights"]
    masters = model.index.states.get("fp32", {})
    split = _split_gates(model)
    _check(model)
    args.ckpt_format, args.use_distributed_optimizer, args.use_megatron_fsdp = "fsdp_dtensor", True, True
    found = StateDict()
    for top, value in {"args": args, "checkpoint_version": 3.0, **model.around}.items():
        for path, part in flattened(value, (top,)):
            found.add(path, part)
    for name, spec in weights.items():
        tensor = LazyArray(model.store, masters.get(name, spec))
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.astype(torch.float32)
        for key, part in _halves(name, tensor, split):
            found.add(("model", f"{_MODEL}{key}"), part)
    if model.optimizer is None:
        return found
    optimizer = model.optimizer
    outside = "module." * (_WRAPPERS + (flag(args, "bf16", "fp16") is True))
    shapes = {name: spec.shape for name, spec in weights.items() if not is_buffer(name)}
    step = _step(model, optimizer)
    for name, options in optimizer.options_of(shapes).items():
        tensors: dict[str, Writable] = {
            state: LazyArray(model.store, model.index.states[state][name]) for state in optimizer.states
        }
        if step is not None:
            tensors.setdefault("step", Held(torch.tensor(step, dtype=torch.float32, device="cpu")))
            options = {**options, "step": int(step)}
        for state, held in tensors.items():
            for key, part in _halves(name, held, split):
                found.add(("optimizer", "state", f"{outside}{key}", state), part)
        for option, value in options.items():
            found.add(("optimizer", "param_to_group_meta", f"{outside}{name}", option), value)
    return found


def _split_gates(model: Model) -> bool:
    """Return whether the first matrices of MLPs are stored as two tensors: Megatron-LM does so with ``--swiglu``, not
    with other gates."""
    swiglu = flag(model.args, "swiglu")
    if swiglu is None and is_gated(model.args) is not False and any(map(_is_gate, model.index.states["weights"])):
        raise DataError(
            "nothing says whether this model has SwiGLU or another gate, which decides the keys of its checkpoints: "
            "open it with its config.json, or write ckpt_format='torch_dist'"
        )
    return swiglu is True


def _is_gate(name: str) -> bool:
    return pattern("megatron.fsdp_gate").search(name) is not None


def _halves(name: str, tensor: Writable, split: bool) -> Iterator[tuple[str, Writable]]:
    """Yield the tensors that a tensor is stored as: (key, tensor)."""
    if not split or not _is_gate(name):
        yield name, tensor
        return
    for n, ending in enumerate(_HALVES):
        if not isinstance(tensor, LazyArray) or not tensor.shape:  # a step count
            yield f"{name}{ending}", tensor
            continue
        rows = tensor.shape[0] // 2
        yield f"{name}{ending}", tensor.lazy[n * rows : (n + 1) * rows]


def _check(model: Model) -> None:
    weights = model.index.states["weights"]
    stacks = [name for name, spec in weights.items() if stack_of(name) is not None and len(spec.shape) == 3]
    if stacks:
        raise DataError(
            f"{some(stacks)}: Megatron-FSDP saves the experts of GroupedMLP under one name for all ranks. Write "
            "ckpt_format='torch_dist', or rename them to linear_fc1.weight0, ... (TEGroupedMLP)"
        )
    biases = [name for name in weights if pattern("megatron.grouped_bias").match(name)]
    if biases and model.division.mesh.ep > 1:
        raise DataError(
            f"{some(biases)}: with expert parallelism Megatron-FSDP gives the biases of all ranks' experts the same "
            "names: write ckpt_format='torch_dist', or leave out ep="
        )
    try:
        mixers = [name for name in weights if fused_parts(name, model.args) is not None]
    except ValueError:
        mixers = [name for name in weights if pattern("megatron.mixer").search(name)]
    if mixers:
        raise DataError(
            f"{some(mixers)}: versions of Megatron-FSDP save the fused matrices of Mamba layers and delta nets as one "
            "tensor or as several, and nothing says which one will load it: write ckpt_format='torch_dist'"
        )


def _step(model: Model, optimizer: Optimizer) -> float | None:
    """Return the number of steps that the optimizer has done; None if it does not count them."""
    if "step" in optimizer.states:
        first = next(iter(model.index.states["step"].values()))  # (Megatron has one number for all parameters)
        return float(LazyArray(model.store, first)[...].max())
    counts = (options.get("step") for groups in optimizer.chain for options in groups.values())
    return optimizer.each if optimizer.each is not None else next((float(n) for n in counts if n is not None), None)
