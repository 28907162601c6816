"""What Megatron's checkpoints are made from: the model of a view with its arguments, optimizer and other entries.

Source: megatron/training/checkpointing.py `generate_state_dict` (the content of a rank's file), `load_checkpoint` (what
the loader looks up); megatron/core/tensor_parallel/layers.py (`get_extra_state`: each of its layers has an
``_extra_state``, None).
"""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from ..core.box import Box
from ..core.compose import compose
from ..core.dtypes import DType
from ..core.index import Index
from ..core.placement import Division, Placement, Rank
from ..core.specs import TensorSpec, renamed
from ..derive.groups import step_of
from ..errors import DataError, MeshError, some
from ..formats.megatron.layers import sort_key
from ..io.storage.base import Store
from ..jobs.plan import Writable
from ..layouts.configured import check_config
from ..layouts.megatron import is_buffer, is_expert, number, stack_of
from ..layouts.rename.apply import heads_of, rows_of
from ..layouts.shard import sharded, zeros_like
from ..layouts.stages import chunk_of
from ..layouts.tables import pattern
from ..lazy import LazyArray, named
from .megatron_args import EMBEDDING, complete, of_rank_files, source_args, true_vocabulary
from .megatron_optimizer import NO_OPTIM, Optimizer, optimizer_of
from .torch import Viewed
from .training import Lost, restored
from .writer import WEIGHTS, View

_VERSION = 3.0  # checkpoint_version in which rows of fused q, k and v are ordered by group
_HEAD = "output_layer.weight"
HEAD_MODULE = "output_layer"  # the last stage has it even if its matrix is tied
EXTRA = "._extra_state"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BEHIND = (1 << 30,)  # sorts after all others


@dataclass(frozen=True, slots=True)
class Model:
    """The content that all ranks' files are made from. ``index`` is the whole model with Megatron's names; ``extra``
    has patterns of the modules with an ``_extra_state``; ``dtype`` is the dtype of weights made from fp32 copies."""

    store: Store
    index: Index
    division: Division
    args: argparse.Namespace
    optimizer: Optimizer | None
    around: Mapping[str, Any]
    extra: frozenset[str]
    dtype: torch.dtype | None
    kept: dict[str, Any] = field(default_factory=dict)  # cache of `sharded`, shared by all ranks

    def file(self, rank: Rank) -> dict[str, Any]:
        """Return the content of a rank's file, with lazy tensors."""
        names = {state: tuple(specs) for state, specs in self.index.states.items()}
        here = sharded(self.index, names, self.division, tuple(rank), {}, self.kept).states
        tensors = {
            state: {name: self._in_file(state, spec) for name, spec in specs.items()} for state, specs in here.items()
        }
        weights = tensors["weights"]
        pipeline = self.division.pipeline
        several = pipeline.chunks > 1
        chunks: list[dict[str, str]] = [{} for _ in range(pipeline.chunks)]  # name in the chunk -> name on the rank
        for name in weights:
            number_of_chunk, own = chunk_of(name) if several else (0, name)
            chunks[number_of_chunk][own] = name
        chunks = [
            {own: chunk[own] for own in sorted(chunk, key=lambda own: _place(own) or _BEHIND)} for chunk in chunks
        ]
        order = [name for chunk in chunks for name in chunk.values()]
        whole: dict[str, Any] = {"args": self.args, "checkpoint_version": _VERSION, **self.around}
        for n, chunk in enumerate(chunks):
            last = rank.pp == pipeline.stages - 1 and n == pipeline.chunks - 1
            head = [HEAD_MODULE] if last and _HEAD not in chunk else []
            model = {own: weights[name] for own, name in chunk.items()}
            whole[f"model{n}" if several else "model"] = _with_extra(model, self.extra, head)
        if self.optimizer is not None:
            shapes = {name: tuple(weights[name].shape) for name in order}
            whole["optimizer"] = self.optimizer.of_rank(order, shapes, tensors)
        return whole

    def lazy(self, state: str, spec: TensorSpec) -> LazyArray:
        """Return a tensor, in the dtype that its state has."""
        tensor = LazyArray(self.store, spec)
        if (
            self.dtype is not None
            and state == "weights"
            and spec.dtype.is_floating_point
            and not is_buffer(spec.name)  # (these are float32 in all runs)
        ):
            tensor = tensor.astype(self.dtype)
        return tensor

    def _in_file(self, state: str, spec: TensorSpec) -> Writable:
        """Return a tensor in the shape that the file has. GroupedMLP keeps all experts of a rank in two tensors of
        shape [experts, hidden, width] and [experts, width, hidden]; the file has the same bytes as [hidden, experts *
        width] and [experts * width, hidden] (transformer/moe/experts.py `GroupedMLP.forward`: ``view`` of the
        parameter)."""
        tensor = self.lazy(state, spec)
        which = stack_of(spec.name)
        if which is None or len(spec.shape) != 3:
            return tensor
        experts, inner, outer = spec.shape
        return Viewed(tensor, (inner, experts * outer) if which == 1 else (experts * inner, outer))


def model_of(view: View, division: Division, lost: Lost, one_optimizer: bool = False) -> Model:
    """Return the model of a view. ``one_optimizer``: experts have none of their own, even on several ranks."""
    mesh = division.mesh
    if view.state not in WEIGHTS:
        raise DataError(f"rank files of Megatron hold weights and their states, this is a view of {view.state!r}")
    tensors, aliases = view.once()
    _check(tensors, division)
    args = source_args(view.meta, lost)
    own = view.states[view.state]
    # a tied head is not a separate tensor of the model
    weights = {
        name: renamed(own[name].spec, name) for name in (*tensors, *aliases) if name not in aliases or name != _HEAD
    }
    states = {"weights": weights}
    for state, part in view.states.items():
        if state != "weights":
            states[state] = {name: renamed(t.spec, name) for name, t in part.items() if name in weights}
    tied = _HEAD not in weights
    dtype = _trained_in(args) if view.state == "fp32" else None
    if view.format == "megatron-fsdp" and view.state == "weights" and "fp32" not in states:
        dtype = _trained_in(args) if _usual(weights) == torch.float32 else None
        if dtype is not None:  # its weights are the fp32 copies
            states["fp32"] = {name: spec for name, spec in weights.items() if not is_buffer(name)}
    if "args" not in view.meta:
        check_config(view.meta, {name: spec.shape for name, spec in weights.items()}, rows=rows_of(view.meta))
    complete(args, weights, view.meta, tied, dtype or _usual(weights))
    if mesh.tp > 1 and heads_of({"args": args}) is None and any(".linear_qkv." in name for name in weights):
        raise DataError(
            f"tp={mesh.tp}: how many heads and groups linear_qkv has is not known, so it cannot be cut (the source has "
            "no args and no config.json): write it with tp=1"
        )
    states = _padded_for(states, args, division, lost)
    of_16_bits = dtype is not None or any(_is_half(spec.dtype.torch) for spec in states["weights"].values())
    unknown = [name for name in weights if _place(name) is None and not is_buffer(name)]
    if unknown and len(states) > 1:
        lost["optimizer"] = f"the place of {some(unknown)} among its parameters is not known: {NO_OPTIM}"
    optimizer = None if unknown else optimizer_of(view, states, of_16_bits, 1 if one_optimizer else mesh.ep, lost)
    around = _around(view, optimizer, args, lost)
    of_rank_files(args, states["weights"], division, around["iteration"], lost)
    masters = ("fp32",) if of_16_bits and "fp32" in states else ()
    wanted = ("weights", *masters, *(optimizer.states if optimizer else ()))
    index = Index("megatron", {state: states[state] for state in wanted}, {}, meta={**view.meta, "args": args})
    store = next(iter(tensors.values())).store
    return Model(store, index, division, args, optimizer, around, _extra(view, weights), dtype)


def _check(tensors: Mapping[str, LazyArray], division: Division) -> None:
    mesh, pipeline = division.mesh, division.pipeline
    strange = [name for name in tensors if pattern("megatron.model").search(name) is None]
    if not tensors:
        raise DataError("there is no tensor in this view")
    if any(name.startswith("encoder.layers.") for name in strange):
        raise DataError(
            f"{some(strange)} are names of megatron-core's T5Model or BertModel, and to_megatron writes GPTModel and "
            "MambaModel only. Take view.to_safetensors, or write what view.shard gives for each rank"
        )
    if any(name.startswith("language_model.decoder.layers.") for name in strange):
        raise DataError(
            f"{some(strange)} are names of a model with towers, and to_megatron writes megatron-core's GPTModel and "
            "MambaModel only. Take view.prefix('language_model').to_megatron for the language model alone"
        )
    if len(strange) == len(tensors):
        raise DataError(
            f"{some(strange)} are no names of megatron-core's models: take view.rename('megatron') first, or a table "
            "of your own (names begin with embedding., decoder.layers.N., decoder.final_layernorm. or output_layer.)"
        )
    if strange:
        raise DataError(
            f"megatron-core's GPTModel and MambaModel have no {some(strange)}, so their loader would refuse the "
            "checkpoint. Leave it out: view.select(lambda name: name not in [...]), or give it one of their names with "
            "view.rename({...})"
        )
    if (pipeline.further or 0) > 0 and not any(name.startswith("mtp.") for name in tensors):
        raise MeshError("the layout has a stage m, but this model has no layers that predict further tokens (mtp.)")
    if pipeline.chunks > 1 and any("mixer." in name for name in tensors):
        raise MeshError("megatron-core's models with Mamba layers have one chunk on each stage: leave out vpp=")
    if mesh.ep > 1 and not any(map(is_expert, tensors)):
        raise MeshError(f"ep={mesh.ep}: this model has no experts")
    if division.etp != mesh.tp and not any(map(is_expert, tensors)):
        raise MeshError(f"etp={division.etp}: this model has no experts")


# -- the model


def _usual(weights: Mapping[str, TensorSpec]) -> torch.dtype:
    """Return the dtype of most weights, by number of elements."""
    counts: dict[DType, int] = {}
    for spec in weights.values():
        counts[spec.dtype] = counts.get(spec.dtype, 0) + prod(spec.shape)
    return max(counts, key=lambda dtype: counts[dtype]).torch


def _trained_in(args: argparse.Namespace) -> torch.dtype | None:
    """Return the 16-bit dtype that the arguments state for the weights; None if there is none."""
    stated = getattr(args, "params_dtype", None)
    return stated if isinstance(stated, torch.dtype) and _is_half(stated) else None


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _padded_for(
    states: dict[str, dict[str, TensorSpec]], args: argparse.Namespace, division: Division, lost: Lost
) -> dict[str, dict[str, TensorSpec]]:
    """Give vocabularies the rows that this division needs: remove padding, or add zeros."""
    tp, multiple = division.mesh.tp, division.vocab_multiple
    weights = states["weights"]
    rows = weights[EMBEDDING].shape[0] if EMBEDDING in weights else 0
    true = true_vocabulary(args, rows)
    if multiple is not None:
        args.make_vocab_size_divisible_by = multiple
    step = tp * (number(args, "make_vocab_size_divisible_by") or 1)
    wanted = -(-(rows if true is None else true) // step) * step
    if wanted == rows:
        return states
    names = [
        name for name, spec in weights.items() if pattern("model.vocabulary").search(name) and spec.shape[0] == rows
    ]
    for name in names if wanted < rows else ():
        lost[name] = f"rows {wanted} to {rows} of its {rows}: padding behind {true} tokens that tp={tp} does not need"
    return {
        state: {name: _with_rows(spec, wanted, rows) if name in names else spec for name, spec in specs.items()}
        for state, specs in states.items()
    }


def _with_rows(spec: TensorSpec, wanted: int, rows: int) -> TensorSpec:
    if not spec.shape or spec.shape[0] != rows:  # a step count
        return spec
    rest = tuple(spec.shape[1:])
    shape, kept = (wanted, *rest), (min(wanted, rows), *rest)
    pieces = [(spec, Placement.of(spec.shape, Box.of(kept), (0,) * len(shape)))]
    what = f"without {rows - wanted} rows of padding"
    if wanted > rows:
        more = (wanted - rows, *rest)
        pieces.append((zeros_like(spec, more), Placement.at(more, (rows, *(0 for _ in rest)))))
        what = f"with {wanted - rows} rows of zeros behind it"
    return compose(spec.name, shape, pieces, "; ".join(filter(None, (spec.rule, what))), spec.stored_as)


def _place(name: str) -> tuple[int, ...] | None:
    """Return a key that sorts names in the order of the model's parameters; None for an unknown name."""
    which = stack_of(name)
    if which is not None:
        name = f"{name[: -len('.weight1')]}.linear_fc{which}.weight"
    if is_buffer(name):
        name = f"{name.rpartition('.')[0]}.bias"
    return sort_key(pattern("megatron.grouped_expert").sub(r"\1.\2", name))


def _extra(view: View, weights: Mapping[str, TensorSpec]) -> frozenset[str]:
    """Return patterns of the modules with an ``_extra_state``: Megatron's linear layers, and those in the source."""
    model = view.meta.get("model")
    theirs = [key for key in model if isinstance(key, str)] if isinstance(model, Mapping) else []
    found = {key.removesuffix(EXTRA) for key in theirs if key.endswith(EXTRA)}
    linear = {match[1] for match in map(pattern("megatron.linear").fullmatch, weights) if match is not None}
    return frozenset(_NUMBER.sub("0", f"{module}.") for module in found | linear | {HEAD_MODULE})


def _with_extra(model: Mapping[str, Writable], extra: frozenset[str], more: list[str]) -> OrderedDict[str, Any]:
    """Build the model's state dict, in which the parameters of each module in ``extra`` are followed by its
    ``_extra_state``. ``more`` are modules without parameters on this rank."""
    made: OrderedDict[str, Any] = OrderedDict()
    last = ""
    for name, tensor in model.items():
        for module in _left(last, name):
            if _NUMBER.sub("0", f"{module}.") in extra:
                made[f"{module}{EXTRA}"] = None
        made[name] = tensor
        last = name
    for module in (*_left(last, ""), *more):
        if _NUMBER.sub("0", f"{module}.") in extra:
            made[f"{module}{EXTRA}"] = None
    return made


def _left(name: str, after: str) -> list[str]:
    """Return the modules, innermost first, that contain this parameter but not the one after it."""
    parts = name.split(".")[:-1]
    modules = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return [module for module in modules if not after.startswith(f"{module}.")]


# -- the other entries of a file


def _around(view: View, optimizer: Optimizer | None, args: argparse.Namespace, lost: Lost) -> dict[str, Any]:
    """Return the iteration, the scheduler and other entries that do not depend on the source's ranks. Iteration 0
    means a release: weights only, not a run that can be resumed."""
    meta = view.meta
    steps = step_of(view)
    counts = (meta.get("iteration"), meta.get("step"), int(steps.done) if steps is not None else None)
    iteration = next((n for n in counts if type(n) is int and n > 0), 0)
    if optimizer is not None and not iteration:
        iteration = max(1, int(optimizer.each or 1))
    around: dict[str, Any] = {"iteration": iteration}
    if iteration and optimizer is None:
        lost.setdefault("optimizer", f"the source has none: {NO_OPTIM}")
    if iteration:
        lost["rng_state"] = "generators' states belong to the source's ranks: load with --no-load-rng"
    for key in ("opt_param_scheduler", "num_floating_point_operations_so_far"):
        made = restored(meta.get(key), key, partial(named, view.stored), lost)
        if made is not None:
            around[key] = made
    if optimizer is not None and "opt_param_scheduler" not in around:
        lost["opt_param_scheduler"] = "the source has none: load with --override-opt_param-scheduler to start a new one"
        rate = next((group["lr"] for groups in optimizer.chain for group in groups.values() if "lr" in group), 0.0)
        around["opt_param_scheduler"] = {
            "max_lr": rate, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant",
            "num_steps": 0,
        }  # fmt: skip
    if meta.get("rerun_state_machine") is not None:
        lost["rerun_state_machine"] = "it belongs to the source's ranks"
    return around
