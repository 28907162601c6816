"""Megatron-LM's checkpoint of rank files (``--ckpt-format torch``): one for each tp, pp and ep rank, and the tracker.

A rank has what `CheckpointView.shard` gives it: layers are dealt evenly, experts are cut as everything else is
(expert-tensor-parallel degree = tp). The vocabulary is padded with zeros to a multiple of
make_vocab_size_divisible_by * tp where the arguments of the source have that, else of tp; rows of padding that fewer
ranks lack are removed where the arguments distinguish them from tokens. The last of several stages has its copy of a
tied embedding. ``args`` is the source's, with the new degrees, or what names, shapes and a config.json say. Weights
of a view of fp32 copies get the dtype that the arguments name.

The optimizer is written as Megatron has it without ``--use-distributed-optimizer``, if the view has Adam's or SGD's
states of all parameters and, for weights of 16 bits, their fp32 copies: groups and options are the source's. Adam's
count of steps is where a source of Megatron has it (with each parameter: torch's AdamW; in the groups: FusedAdam of
Transformer Engine or apex), for other sources in the groups. Without a known iteration the checkpoint is a "release",
of which Megatron loads the weights alone. States of generators are not written: load with ``--no-load-rng``.

Experts keep the form that they have names of: SequentialMLP (``local_experts.N``), TEGroupedMLP
(``linear_fc1.weightN``), GroupedMLP (``weight1``). So do norms: models of Transformer Engine's layers call theirs
``linear_qkv.layer_norm_weight`` and ``mlp.linear_fc1.layer_norm_weight`` (``view.rename`` with a table of your own),
those of ``--transformer-impl local`` ``input_layernorm.weight`` and ``pre_mlp_layernorm.weight``.

Source: megatron/training/checkpointing.py `get_checkpoint_name` (the names), `generate_state_dict` (what is in a
file), `read_metadata`, `_load_base_checkpoint` and `load_checkpoint` (what is looked for when it is loaded: ``args``,
``checkpoint_version``, ``iteration``, ``model``, ``optimizer``, ``opt_param_scheduler``; of a "release" no more than
the model); megatron/core/tensor_parallel/layers.py (`get_extra_state`: each of its layers has an ``_extra_state``,
None). A file's tensors are those that `layouts.shard` gives the rank, in the order in which Megatron's model has its
parameters.
"""

from __future__ import annotations

import argparse
import io
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from ..core.box import Box
from ..core.compose import Piece, compose
from ..core.dtypes import DType
from ..core.index import Index, Mesh, Rank, TensorSpec, renamed
from ..errors import DataError, MeshError, some
from ..formats.megatron.layers import sort_key
from ..io.storage.base import Store
from ..jobs.destination import Kind
from ..jobs.plan import File, Writable, WritePlan
from ..jobs.publish import fingerprint
from ..layouts.megatron import VOCABULARY, is_buffer, is_expert, stack_of
from ..layouts.ranks import mesh_of
from ..layouts.rename.apply import heads_of
from ..layouts.shard import sharded
from ..lazy import LazyArray, named
from .megatron_args import EMBEDDING, complete, of_rank_files, source_args, true_vocabulary
from .megatron_optimizer import NO_OPTIM, Optimizer, optimizer_of
from .options import WriteOptions
from .torch import Held, Viewed, layout_of, leaves, replaced
from .training import Lost, restored, step_of
from .writer import BY_NAMES, WEIGHTS, View, Writer, forecast_of_states, plan_of_folder

TRACKER = "latest_checkpointed_iteration.txt"
_VERSION = 3.0  # checkpoint_version: rows of fused q, k and v by group
_HEAD = "output_layer.weight"
_HEAD_MODULE = "output_layer"  # is there on the last stage, whether it has a matrix of its own or not
_NAME = re.compile(r"(embedding|decoder\.layers\.\d+|decoder\.final_\w+|output_layer|mtp)\.")
_LINEAR = re.compile(r"(.*\.linear_\w+|output_layer)\.(?:weight|bias)\d*")
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BEHIND = (1 << 30,)  # sorts behind all others
_PER_TENSOR = 1024  # bytes that a tensor takes in a file besides its data, about


@dataclass(frozen=True, slots=True)
class _Model:
    """What all ranks' files are made of. ``index``: the whole model, in Megatron's names; ``extra``: the modules, as
    patterns, that have an ``_extra_state``; ``dtype``: of the weights, where these are made of fp32 copies."""

    store: Store
    index: Index
    mesh: Mesh
    args: argparse.Namespace
    optimizer: Optimizer | None
    around: Mapping[str, Any]
    extra: frozenset[str]
    dtype: torch.dtype | None
    kept: dict[str, Any] = field(default_factory=dict)  # of `sharded`, from one rank to the next

    def file(self, rank: Rank) -> dict[str, Any]:
        """A rank's file, with lazy tensors."""
        names = {state: tuple(specs) for state, specs in self.index.states.items()}
        here = sharded(self.index, names, self.mesh, rank, {}, self.kept).states
        tensors = {
            state: {name: self._in_file(state, spec) for name, spec in specs.items()} for state, specs in here.items()
        }
        weights = tensors["weights"]
        order = sorted(weights, key=lambda name: _place(name) or _BEHIND)
        head = [_HEAD_MODULE] if _HEAD not in weights and rank.pp == self.mesh.pp - 1 else []
        whole: dict[str, Any] = {"args": self.args, "checkpoint_version": _VERSION, **self.around}
        whole["model"] = _with_extra({name: weights[name] for name in order}, self.extra, head)
        if self.optimizer is not None:
            shapes = {name: tuple(weights[name].shape) for name in order}
            whole["optimizer"] = self.optimizer.of_rank(order, shapes, tensors)
        return whole

    def _in_file(self, state: str, spec: TensorSpec) -> Writable:
        """A tensor as the file has it. All experts of a rank in one, GroupedMLP's, of [experts, hidden, width] as
        [hidden, experts * width], the other as [experts * width, hidden], of the same bytes (transformer/moe/experts.py
        `GroupedMLP.forward`: ``view`` of the parameter)."""
        tensor = LazyArray(self.store, spec)
        if self.dtype is not None and state == "weights" and spec.dtype.is_floating_point:
            tensor = tensor.astype(self.dtype)
        which = stack_of(spec.name)
        if which is None or len(spec.shape) != 3:
            return tensor
        experts, inner, outer = spec.shape
        return Viewed(tensor, (inner, experts * outer) if which == 1 else (experts * inner, outer))


def rank_folder(tp: int, pp: int, ep: int, pp_size: int, ep_size: int) -> str:
    """The folder of a rank, as Megatron names it.

    >>> rank_folder(1, 0, 0, 1, 1), rank_folder(0, 2, 1, 4, 2)
    ('mp_rank_01', 'mp_rank_00_002_001')
    """
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pp_size > 1 else "") + (f"_{ep:03d}" if ep_size > 1 else "")


def is_rank_folder(name: str) -> bool:
    """Whether `rank_folder` gives such a name."""
    return _RANK_FOLDER.fullmatch(name) is not None


def _plan(
    view: View, dest: str | os.PathLike[str], options: WriteOptions, *, tp: int = 1, pp: int = 1, ep: int = 1
) -> WritePlan:
    lost: Lost = {}
    model = _model(view, mesh_of(tp, pp, 1, ep), lost)
    iteration = model.around["iteration"]
    folder = f"iter_{iteration:07d}" if iteration else "release"
    files: list[File] = []
    where: list[tuple[LazyArray, object]] = []
    bare: list[bytes] = []
    for rank in (Rank(t, p, 0, e) for p in range(pp) for t in range(tp) for e in range(ep)):
        key = f"{folder}/{rank_folder(rank.tp, rank.pp, rank.ep, pp, ep)}/model_optim_rng.pt"
        whole = model.file(rank)
        held = list(leaves(whole))
        for n, t in enumerate(held):
            if not isinstance(t, Held):
                lazy = t.tensor if isinstance(t, Viewed) else t
                where.append((lazy, (key, n, str(t.dtype), tuple(t.shape))))
        bare.append(_saved(replaced(whole, lambda t: None)))
        files.append(File(key, sum(t.nbytes for t in held), partial(layout_of, value=whole)))
    return plan_of_folder(
        dest,
        options,
        Kind("checkpoint of Megatron", (TRACKER,)),
        [t for t, _ in where],
        fingerprint(where, bare),
        files,
        {TRACKER: str(iteration or "release").encode()},
        lost,
        around=max(map(len, bare)) + _PER_TENSOR * -(-len(where) // len(files)),
    )


def _model(view: View, mesh: Mesh, lost: Lost) -> _Model:
    if view.state not in WEIGHTS:
        raise DataError(f"rank files of Megatron hold weights and their states, this is a view of {view.state!r}")
    tensors, aliases = view.once()
    _check(view, tensors, mesh)
    args = source_args(view.meta, lost)
    own = view.states[view.state]
    # (a head that is tied is no tensor of the model's)
    weights = {
        name: renamed(own[name].spec, name) for name in (*tensors, *aliases) if name not in aliases or name != _HEAD
    }
    states = {"weights": weights}
    for state, part in view.states.items():
        if state != "weights":
            states[state] = {name: renamed(t.spec, name) for name, t in part.items() if name in weights}
    tied = _HEAD not in weights
    dtype = _trained_in(args) if view.state == "fp32" else None
    complete(args, weights, view.meta, tied, dtype or _usual(weights))
    if mesh.tp > 1 and heads_of({"args": args}) is None and any(".linear_qkv." in name for name in weights):
        raise DataError(
            f"tp={mesh.tp}: nothing tells how many heads and groups of them linear_qkv is of, so it cannot be cut (the "
            "source has no args and no config.json): write it with tp=1"
        )
    states = _without_padding(states, args, mesh.tp, lost)
    of_16_bits = dtype is not None or any(_is_half(spec.dtype.torch) for spec in states["weights"].values())
    unknown = [name for name in weights if _place(name) is None and not is_buffer(name)]
    if unknown and len(states) > 1:
        lost["optimizer"] = f"the place of {some(unknown)} among its parameters is not known: {NO_OPTIM}"
    optimizer = None if unknown else optimizer_of(view, states, of_16_bits, mesh.ep, lost)
    around = _around(view, optimizer, args, lost)
    of_rank_files(args, states["weights"], mesh, around["iteration"], lost)
    wanted = ("weights", *(("fp32",) if of_16_bits else ()), *optimizer.states) if optimizer else ("weights",)
    index = Index("megatron", {state: states[state] for state in wanted}, {}, meta={**view.meta, "args": args})
    store = next(iter(tensors.values())).store
    return _Model(store, index, mesh, args, optimizer, around, _extra(view, weights), dtype)


def _check(view: View, tensors: Mapping[str, LazyArray], mesh: Mesh) -> None:
    strange = [name for name in tensors if _NAME.match(name) is None]
    if not tensors:
        raise DataError("there is no tensor in this view")
    if len(strange) == len(tensors):
        raise DataError(
            f"{some(strange)} are no names of megatron-core's models: take view.rename('megatron') first, or a table "
            "of your own (names begin with embedding., decoder.layers.N., decoder.final_layernorm. or output_layer.)"
        )
    if strange:
        raise DataError(
            f"megatron-core's models have no {some(strange)}, so their loader would refuse the checkpoint. Leave it "
            "out: view.select(lambda name: name not in [...]), or give it one of their names with view.rename({...})"
        )
    if mesh.pp > 1 and any(name.startswith("mtp.") for name in tensors):
        raise MeshError(f"pp={mesh.pp}: layers that predict further tokens (mtp.) can be written for one stage only")
    if mesh.ep > 1 and not any(map(is_expert, tensors)):
        raise MeshError(f"ep={mesh.ep}: this model has no experts")


# -- the model


def _usual(weights: Mapping[str, TensorSpec]) -> torch.dtype:
    """The dtype of most weights."""
    counts: dict[DType, int] = {}
    for spec in weights.values():
        counts[spec.dtype] = counts.get(spec.dtype, 0) + prod(spec.shape)
    return max(counts, key=lambda dtype: counts[dtype]).torch


def _trained_in(args: argparse.Namespace) -> torch.dtype | None:
    """The 16 bits that the weights of a source of fp32 copies had in training."""
    said = getattr(args, "params_dtype", None)
    return said if isinstance(said, torch.dtype) and _is_half(said) else None


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _without_padding(
    states: dict[str, dict[str, TensorSpec]], args: argparse.Namespace, tp: int, lost: Lost
) -> dict[str, dict[str, TensorSpec]]:
    """Vocabularies without those rows of padding that fewer tensor-parallel ranks do not have."""
    weights = states["weights"]
    rows = weights[EMBEDDING].shape[0] if EMBEDDING in weights else 0
    true = true_vocabulary(args, rows)
    if true is None:
        return states
    step = tp * args.make_vocab_size_divisible_by
    wanted = -(-true // step) * step
    if wanted >= rows:
        return states
    names = [name for name, spec in weights.items() if VOCABULARY.search(name) and spec.shape[0] == rows]
    for name in names:
        lost[name] = f"rows {wanted} to {rows} of its {rows}: padding that tp={tp} has not, behind {true} tokens"
    return {
        state: {name: _cropped(spec, wanted, rows) if name in names else spec for name, spec in specs.items()}
        for state, specs in states.items()
    }


def _cropped(spec: TensorSpec, wanted: int, rows: int) -> TensorSpec:
    if not spec.shape or spec.shape[0] != rows:  # a count of steps
        return spec
    rest = (0,) * (len(spec.shape) - 1)
    shape = (wanted, *spec.shape[1:])
    rule = "; ".join(filter(None, (spec.rule, f"without {rows - wanted} rows of padding")))
    return compose(spec.name, shape, [Piece(spec, Box((0, *rest), shape), (0, *rest))], rule, spec.stored_as)


def _place(name: str) -> tuple[int, ...] | None:
    """What sorts names as the model has its parameters; None if the place of one is not known."""
    which = stack_of(name)
    if which is not None:
        name = f"{name[: -len('.weight1')]}.linear_fc{which}.weight"
    if is_buffer(name):
        name = f"{name.rpartition('.')[0]}.bias"
    return sort_key(_GROUPED.sub(r"\1.\2", name))


def _extra(view: View, weights: Mapping[str, TensorSpec]) -> frozenset[str]:
    """The modules with an ``_extra_state``: Megatron's linear layers, and what the source's file has besides."""
    model = view.meta.get("model")
    theirs = [key for key in model if isinstance(key, str)] if isinstance(model, Mapping) else []
    found = {key.removesuffix("._extra_state") for key in theirs if key.endswith("._extra_state")}
    linear = {match[1] for match in map(_LINEAR.fullmatch, weights) if match is not None}
    return frozenset(_NUMBER.sub("0", f"{module}.") for module in found | linear | {_HEAD_MODULE})


def _with_extra(model: Mapping[str, Writable], extra: frozenset[str], more: list[str]) -> OrderedDict[str, Any]:
    """The model's state dict: behind the parameters of each such module, also of those that have none here (``more``),
    its ``_extra_state``."""
    made: OrderedDict[str, Any] = OrderedDict()
    last = ""
    for name, tensor in model.items():
        for module in _left(last, name):
            if _NUMBER.sub("0", f"{module}.") in extra:
                made[f"{module}._extra_state"] = None
        made[name] = tensor
        last = name
    for module in (*_left(last, ""), *more):
        if _NUMBER.sub("0", f"{module}.") in extra:
            made[f"{module}._extra_state"] = None
    return made


def _left(name: str, after: str) -> list[str]:
    """The modules, the inner ones first, that have this parameter and not the one after it."""
    parts = name.split(".")[:-1]
    modules = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return [module for module in modules if not after.startswith(f"{module}.")]


# -- what stands around it


def _around(view: View, optimizer: Optimizer | None, args: argparse.Namespace, lost: Lost) -> dict[str, Any]:
    """The count of iterations, the schedule, the generators' states as far as a rank of another layout can have them.
    Iteration 0: the weights are released, not those of a run to go on with."""
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
        lost["rng_state"] = "generators' states are of the source's ranks: load with --no-load-rng"
    for key in ("opt_param_scheduler", "num_floating_point_operations_so_far"):
        made = restored(meta.get(key), key, partial(named, view.stored), lost)
        if made is not None:
            around[key] = made
    if optimizer is not None and "opt_param_scheduler" not in around:
        lost["opt_param_scheduler"] = "the source has none: load with --override-opt_param-scheduler, it begins anew"
        rate = next((group["lr"] for groups in optimizer.chain for group in groups.values() if "lr" in group), 0.0)
        around["opt_param_scheduler"] = {
            "max_lr": rate, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant",
            "num_steps": 0,
        }  # fmt: skip
    if meta.get("rerun_state_machine") is not None:
        lost["rerun_state_machine"] = "it is of the source's ranks"
    return around


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


WRITER = Writer(
    name="megatron",
    what="Megatron's legacy rank files",
    plan=_plan,
    forecast=forecast_of_states,
    options=frozenset({"dtype", "mesh"}),
    refused={"stored": BY_NAMES},
)
