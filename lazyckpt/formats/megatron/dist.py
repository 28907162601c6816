"""megatron-core's distributed checkpoints: a folder with metadata.json, common.pt and the tensors of all ranks.

Writer: megatron/core/dist_checkpointing/serialization.py `save`, core.py (`metadata.json`), strategies/torch.py (on
torch.distributed.checkpoint) or, up to 0.15, strategies/zarr.py. A key is a tensor of the whole model, whatever the
parallel layout; `stacks` gives the model's own names. Optimizers: optimizer/optimizer.py `sharded_state_dict`
("optimizer.state.exp_avg." and the key of the parameter), optimizer/distrib_optimizer.py
`sharded_param_state_fully_reshardable`, `_fs_model_space` (reshaped to a grid: `regridded`).
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from ...core.index import Index, Mesh, TensorSpec, renamed
from ...errors import CorruptError, FormatError, LazyckptError
from ...io.store import Store
from .. import torchsave
from ..dcp import reader as dcp
from ..members import Member, together
from ..paths import some
from . import zarrs
from .regrid import regridded
from .stacks import logical

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)")
_BUFFER = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_NAMES = {"fp32_param": "fp32", "param": "fp32"}
_MAX_JSON = 1 << 16
_FORMATS = {"torch_dist": "megatron-dist", "zarr": "megatron-zarr"}


def is_dist(entries: Mapping[str, Any]) -> bool:
    """Whether a folder's listing is that of such a checkpoint."""
    return "metadata.json" in entries and ("common.pt" in entries or ".metadata" in entries)


def read(store: Store, folder: str = "") -> Index:
    """Index such a folder. Raises CorruptError, FormatError (a backend that is not known), MissingFileError."""
    backend = _backend(store, folder)
    problems: list[str] = []
    tensors = _tensors(store, folder, backend)
    members: list[tuple[tuple[str, ...], Member]] = [((), tensors)]
    path = posixpath.join(folder, "common.pt")
    common: Mapping[str, Any] = {}
    try:
        member = torchsave.member(store, path, "common.pt/")
        common = member.meta
        members.insert(0, ((), member))
    except LazyckptError as e:
        problems.append(f"{path} cannot be read, nor the arguments of the run and the schedule in it: {e}")
    whole = together(_FORMATS[backend], members)
    args = vars(common["args"]) if hasattr(common.get("args"), "__dict__") else {}
    states, lines = _states(tensors, _local(args))
    return Index(
        format=whole.format,
        states=states or {"weights": {}},
        files=whole.files,
        stored=whole.stored,
        meta=whole.meta,
        mesh=_mesh(args),
        problems=(*problems, *tensors.problems, *lines),
    )


def _backend(store: Store, folder: str) -> str:
    path = posixpath.join(folder, "metadata.json")
    try:
        about = json.loads(bytes(store.read(path, 0, min(store.stat(path).size, _MAX_JSON))))
        backend = about["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptError(f"{store.root}/{path} does not name a sharded_backend: the file is damaged") from None
    if backend not in _FORMATS:
        raise FormatError(
            f"{store.root}/{path}: the backend {backend!r:.60} is none that lazyckpt reads ({', '.join(_FORMATS)})"
        )
    return str(backend)


def _tensors(store: Store, folder: str, backend: str) -> Member:
    if backend == "zarr":
        return zarrs.in_folder(store, folder)
    return dcp.in_folder(store, folder, lambda key: "_extra_state/" not in key)


def _states(member: Member, local: bool | None) -> tuple[dict[str, dict[str, TensorSpec]], list[str]]:
    by_key: dict[str, dict[str, TensorSpec]] = {}
    buffers: list[str] = []
    inside: set[str] = {path[0] for path in member.objects if path}  # type: ignore[misc]
    for key, (_, spec) in member.tensors.items():
        match = _STATE.fullmatch(key)
        if match is not None:
            state = _NAMES.get(match["state"], match["state"])
            whole = regridded(spec, member.reshaped.get(key))
            by_key.setdefault(state, {})[match["key"]] = renamed(whole, match["key"])
        elif _BUFFER.match(key):
            buffers.append(key)
        elif not key.endswith("_extra_state") and not any(key.startswith(f"{name}.") for name in inside):
            by_key.setdefault("weights", {})[key] = regridded(spec, member.reshaped.get(key))
    states = {state: logical(keys, local) for state, keys in by_key.items()}
    order = ["weights", "fp32"]
    states = dict(sorted(states.items(), key=lambda item: order.index(item[0]) if item[0] in order else 2))
    lines = []
    if buffers:
        lines.append(
            f"{len(buffers):,} tensors are buffers of the distributed optimizer as ranks hold them (dp_reshardable: "
            f"{some(buffers)}): which parameter stands where in them is not in the checkpoint. They are in "
            "view.stored; saved with --dist-ckpt-optim-fully-reshardable they would be states by parameter"
        )
    return states, lines


def _local(args: Mapping[str, Any]) -> bool | None:
    implementation = args.get("transformer_impl")
    return None if implementation is None else implementation == "local"


def _mesh(args: Mapping[str, Any]) -> Mesh:
    def degree(name: str) -> int:
        value = args.get(f"{name}_parallel_size")
        return value if type(value) is int and value > 0 else 1

    tp, pp, ep = degree("tensor_model"), degree("pipeline_model"), degree("expert_model")
    dp = args.get("data_parallel_size")
    return Mesh(tp=tp, pp=pp, dp=dp if type(dp) is int and dp > 0 else 1, ep=ep)
