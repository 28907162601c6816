"""Megatron-LM's checkpoints: rank files (``--ckpt-format torch``), a file per tp, pp and ep rank, and a tracker file.

The same model as a distributed checkpoint (``torch_dist``) is in `megatron_dist`, as one of Megatron-FSDP
(``fsdp_dtensor``) in `megatron_fsdp`.

A rank's file has the tensors of `CheckpointView.shard`, of each model chunk of a stage under a key of its own
(``model0``, ``model1``). Files are numbered by tensor-, pipeline- and expert-parallel ranks, so the
expert-tensor-parallel degree has to divide the tensor-parallel one. The vocabulary is padded with zeros to a multiple
of make_vocab_size_divisible_by * tp, if that is given or in the source's arguments, else of tp; padding rows that are
not needed are removed if the arguments distinguish them from tokens. With several stages, the last one has its own
copy of a tied embedding. ``args`` are the source's with the new degrees, or are derived from names, shapes and a
config.json. If the view reads fp32 copies, the weights get the dtype that the arguments name.

The optimizer is written as Megatron saves it without ``--use-distributed-optimizer``, if the view has the states of
Adam or SGD for all parameters and, for 16-bit weights, their fp32 copies. Groups and options are the source's. Adam's
step count is at the same place as in a Megatron source (with each parameter: torch's AdamW; in the groups: FusedAdam of
Transformer Engine or apex); for other sources it is in the groups. Without a known iteration the checkpoint is a
"release", from which Megatron loads only the weights. States of random generators are not written: load with
``--no-load-rng``.

Experts keep the form that their names imply: SequentialMLP (``local_experts.N``), TEGroupedMLP
(``linear_fc1.weightN``), GroupedMLP (``weight1``). Norms also keep theirs: models of Transformer Engine's layers use
``linear_qkv.layer_norm_weight`` and ``mlp.linear_fc1.layer_norm_weight`` (``view.rename`` with your own table),
models of ``--transformer-impl local`` use ``input_layernorm.weight`` and ``pre_mlp_layernorm.weight``.

Source: megatron/training/checkpointing.py `get_checkpoint_name` (the names), `generate_state_dict` (the content of a
file), `read_metadata`, `_load_base_checkpoint` and `load_checkpoint` (what the loader looks up: ``args``,
``checkpoint_version``, ``iteration``, ``model``, ``optimizer``, ``opt_param_scheduler``; for a "release" only the
model); megatron/core/tensor_parallel/layers.py (`get_extra_state`: each of its layers has an ``_extra_state``,
None). A file's tensors are those of `layouts.shard` for the rank, in the parameter order of Megatron's model.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..core.placement import Division, Rank
from ..errors import DataError, MeshError
from ..jobs.destination import Kind
from ..jobs.plan import File, WritePlan
from ..jobs.publish import fingerprint
from ..layouts.megatron import flag, is_buffer
from ..layouts.pipeline import PipelineLayout
from ..layouts.ranks import division_of, mesh_of, place_of, world_size
from ..lazy import LazyArray
from ..reshaping import division
from .dcp import Key, StateDict, files_of, metadata_of, objects_of
from .megatron_dist import ABOUT, Keys, common, state_dict, value_of
from .megatron_fsdp import check_division
from .megatron_fsdp import state_dict as fsdp_state_dict
from .megatron_model import EXTRA, HEAD_MODULE, Model, model_of
from .options import WriteOptions
from .torch import Held, Viewed, layout_of, leaves, replaced, row
from .training import Lost
from .writer import BY_NAMES, View, Writer, forecast_of_states, plan_of_folder

CKPT_FORMATS = ("torch", "torch_dist", "fsdp_dtensor")
TRACKER = "latest_checkpointed_iteration.txt"
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_PER_TENSOR = 1024  # approximate bytes of a tensor in a file besides its data


def rank_folder(tp: int, pp: int, ep: int, pp_size: int, ep_size: int) -> str:
    """Return Megatron's folder name of a rank.

    >>> rank_folder(1, 0, 0, 1, 1), rank_folder(0, 2, 1, 4, 2)
    ('mp_rank_01', 'mp_rank_00_002_001')
    """
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pp_size > 1 else "") + (f"_{ep:03d}" if ep_size > 1 else "")


def is_rank_folder(name: str) -> bool:
    """Return whether a name has the form of `rank_folder`."""
    return _RANK_FOLDER.fullmatch(name) is not None


def _plan(
    view: View,
    dest: str | os.PathLike[str],
    options: WriteOptions,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    layout: PipelineLayout | None = None,
    vocab_multiple: int | None = None,
    ckpt_format: str = "torch",
    distributed_optimizer: bool | None = None,
) -> WritePlan:
    lost: Lost = {}
    whole = division(tp, pp, 1, ep, etp, vpp, layout, vocab_multiple)
    check_format(ckpt_format)
    if distributed_optimizer and ckpt_format == "torch":
        raise DataError("distributed_optimizer=True: it can be written with ckpt_format='torch_dist' only")
    if ckpt_format == "fsdp_dtensor":
        if distributed_optimizer is False:
            raise DataError("distributed_optimizer=False: Megatron-FSDP always has it, leave the argument out")
        check_division(whole)
    ranks = ranks_with_files(whole) if ckpt_format == "torch" else []
    model = model_of(view, whole, lost, one_optimizer=ckpt_format == "fsdp_dtensor")
    iteration = model.around["iteration"]
    folder = f"iter_{iteration:07d}" if iteration else "release"
    if ckpt_format == "torch_dist":
        if distributed_optimizer is None:
            distributed_optimizer = flag(view.meta.get("args"), "use_distributed_optimizer") is True
        return _plan_of_distributed(model, dest, options, folder, distributed_optimizer, lost)
    if ckpt_format == "fsdp_dtensor":
        state = fsdp_state_dict(model)
        return _plan_of_dcp(state, dict(state.paths), dest, options, folder, model.around["iteration"], {}, lost)
    files: list[File] = []
    where: list[tuple[LazyArray, object]] = []
    bare: list[bytes] = []
    for rank in ranks:
        key = f"{folder}/{rank_folder(rank.tp, rank.pp, rank.ep, pp, ep)}/model_optim_rng.pt"
        content = model.file(rank)
        held = list(leaves(content))
        for n, t in enumerate(held):
            if not isinstance(t, Held):
                lazy = t.tensor if isinstance(t, Viewed) else t
                where.append((lazy, (key, n, str(t.dtype), tuple(t.shape))))
        bare.append(_saved(replaced(content, lambda t: None)))
        files.append(File(key, sum(t.nbytes for t in held), partial(layout_of, value=content)))
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


def _plan_of_distributed(
    model: Model,
    dest: str | os.PathLike[str],
    options: WriteOptions,
    folder: str,
    distributed: bool,
    lost: Lost,
) -> WritePlan:
    """Return the plan of a distributed checkpoint, whose files do not depend on the ranks. ``distributed``: for
    Megatron's distributed optimizer."""
    model.args.ckpt_format, model.args.use_distributed_optimizer = "torch_dist", distributed
    whole = replace(model, division=division_of(mesh_of(1, 1, 1, 1))).file(Rank())
    weights = model.index.states["weights"]
    keys = Keys(weights, model.args)
    kinds = dict(model.index.states)
    if model.optimizer is None:
        kinds = {"weights": weights}
    elif distributed:  # it has copies of float32 weights, too
        kinds = {"fp32": {n: t for n, t in weights.items() if not is_buffer(n)}, **kinds}
    states = {
        state: {key: model.lazy(state, spec) for key, spec in keys.stacked(specs).items()}
        for state, specs in kinds.items()
        if state != "step"
    }
    modules = [name.removesuffix(EXTRA) for name in whole["model"] if name.endswith(EXTRA)]
    # (models/gpt/gpt_model.py `sharded_state_dict` leaves out the head's, models/mamba does not)
    objects = keys.objects(module for module in modules if module != HEAD_MODULE or keys.hybrid)
    state = state_dict(states, objects, distributed)
    beside = {
        "common.pt": _saved(replaced(common(whole, distributed), value_of)),
        "metadata.json": json.dumps(ABOUT).encode(),
    }
    return _plan_of_dcp(state, None, dest, options, folder, model.around["iteration"], beside, lost)


def _plan_of_dcp(
    state: StateDict,
    paths: Mapping[str, Key] | None,
    dest: str | os.PathLike[str],
    options: WriteOptions,
    folder: str,
    iteration: int,
    beside: Mapping[str, bytes],
    lost: Lost,
) -> WritePlan:
    """Return the plan of a folder of torch.distributed.checkpoint for an iteration. ``paths``: see `dcp.metadata_of`;
    ``beside`` are other files in it."""
    rows = list(files_of(state.tensors))
    serialized, spans = objects_of(state.objects)
    metadata = metadata_of(state, rows, spans, paths)
    lazy = {key: t for key, t in state.tensors.items() if isinstance(t, LazyArray)}
    texts = {"__0_0.distcp": serialized, **beside} if spans else dict(beside)
    where = [(t, (key, str(t.dtype), tuple(t.shape))) for key, t in lazy.items()]
    return plan_of_folder(
        dest,
        options,
        Kind("checkpoint of Megatron", (TRACKER,)),
        list(lazy.values()),
        fingerprint(where, [*texts.values(), metadata]),
        [
            File(f"{folder}/{name}", sum(c.item.tensor.nbytes for c in chunks), partial(row, [c.item for c in chunks]))
            for name, chunks in rows
        ],
        {
            **{f"{folder}/{name}": text for name, text in texts.items()},
            f"{folder}/.metadata": metadata,
            TRACKER: str(iteration or "release").encode(),
        },
        lost,
        around=2048 * max((len(chunks) for _, chunks in rows), default=1),
    )


def check_format(ckpt_format: str) -> None:
    """Raise DataError for a name that is none of `CKPT_FORMATS`."""
    if ckpt_format not in CKPT_FORMATS:
        known = " and ".join(map(repr, CKPT_FORMATS))
        raise DataError(f"ckpt_format={ckpt_format!r}: Megatron's formats that can be written are {known}")


def ranks_with_files(division: Division) -> list[Rank]:
    """Return the ranks that write a file, in the order of stages. Raises MeshError if several would write the same."""
    mesh, etp = division.mesh, division.etp
    if mesh.tp % etp:
        raise MeshError(
            f"etp={etp}: files of ranks are numbered by tp, pp and ep, so with tp={mesh.tp} ranks with other shards of "
            "the experts would write the same file: give an etp that divides tp"
        )
    ranks = {place_of(division, n).rank for n in range(world_size(mesh, etp))}
    return sorted(ranks, key=lambda rank: (rank.pp, rank.tp, rank.ep))


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


WRITER = Writer(
    name="megatron",
    what="Megatron's legacy rank files",
    plan=_plan,
    forecast=forecast_of_states,
    options=frozenset({"dtype", "mesh", "ckpt_format"}),
    refused={"stored": BY_NAMES},
)
