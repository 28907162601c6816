"""Faults of the checkpoints of Megatron-LM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .fault import (
    FAILS,
    Fault,
    both,
    copy,
    cut,
    edit,
    flip,
    one,
    remove,
    storage,
    swap,
    write,
)

_TP, _DISTOPT = "megatron/tp2_gelu_tied/legacy", "megatron/tp2_pp2_distopt_tied/legacy"
_DIST, _EP = "megatron/tp2_pp2_distopt_tied/dist", "megatron/ep2/legacy"
_TIED = "megatron/tp2_pp2_distopt_tied/legacy"
_RANK = "mp_rank_01/model_optim_rng.pt"


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, torch.Tensor):
            yield f"{path}.{key}", value
        yield from _tensors(value, f"{path}.{key}")


def _weight(part: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def edit_model(state: dict[str, Any]) -> None:
        change(next(t.data for name, t in _tensors(state["model"]) if part in name and t.numel() > 4))

    return edit_model


def _add(t: torch.Tensor) -> None:
    t.view(-1)[3] += 0.5


def _arg(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit_args(state: dict[str, Any]) -> None:
        setattr(state["args"], name, value)

    return edit_args


def _later(state: dict[str, Any]) -> None:
    state["iteration"] += 5


def _sums(folder: Path) -> dict[str, str]:
    base = one(folder, "metadata.json").parent
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(base.iterdir())}


def _integrity(change: Callable[[Path, dict[str, str]], Any]) -> Callable[[Path], None]:
    """Write integrity.json as Megatron-LM does (pull request 4305), then make the fault."""

    def make(folder: Path) -> None:
        listed = _sums(folder)
        base = one(folder, "metadata.json").parent
        changed = change(base, listed)
        (base / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": changed or listed}))

    return make


def _changed(base: Path, listed: dict[str, str]) -> None:
    path = base / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _gone(base: Path, listed: dict[str, str]) -> None:
    listed["__9_0.distcp"] = "0" * 64


def _outside(base: Path, listed: dict[str, str]) -> None:
    listed["../../../etc/hostname"] = "0" * 64


MEGATRON = (
    Fault("the folder of a rank is missing", "Megatron-LM", _TP, lambda f: one(f, _RANK).unlink(), "quick",
          "missing-file", file="mp_rank_01"),
    Fault("a rank's file is cut off", "Megatron-LM", _TP, cut(_RANK), "quick", "unreadable-file", file="mp_rank_01"),
    Fault("a rank's file is of another iteration", "Megatron-LM", _TP, edit(_RANK, _later), "quick",
          "left-over-file", file="mp_rank_01", text="iteration 8"),
    Fault("a rank's file is a copy of another rank's", "Megatron-LM", _TP,
          copy("mp_rank_00/model_optim_rng.pt", _RANK), "default", "identical-files", text="mp_rank_0"),
    Fault("the files of two ranks are swapped", "Megatron-LM", _TP, swap("mp_rank_00/model_optim_rng.pt", _RANK),
          "quick", "inconsistent-metadata", file="mp_rank_0", text="mixed up"),
    Fault("a rank's file is of a save with other degrees", "Megatron-LM", _TP,
          edit(_RANK, _arg("tensor_model_parallel_size", 4)), "quick", "left-over-file", file="mp_rank_01"),
    Fault("`latest_checkpointed_iteration.txt` is missing", "Megatron-LM", _TP,
          remove("latest_checkpointed_iteration.txt"), "quick", "unfinished-save"),
    Fault("the newest iteration is not the one of `latest_checkpointed_iteration.txt`", "Megatron-LM", _TP,
          write("iter_0000009/mp_rank_00/model_optim_rng.pt", b""), "quick", "unfinished-save"),
    Fault("the arguments say another hidden size", "Megatron-LM", _TP,
          both(*(edit(f"mp_rank_0{n}/model_optim_rng.pt", _arg("hidden_size", 20)) for n in (0, 1))), "quick",
          "config-mismatch"),
    Fault("the arguments say another number of layers", "Megatron-LM", _TP,
          both(*(edit(f"mp_rank_0{n}/model_optim_rng.pt", _arg("num_layers", 3)) for n in (0, 1))), "quick",
          "config-mismatch", text="3"),
    Fault("a norm differs between tensor-parallel ranks", "Megatron-LM", _TP, edit(_RANK, _weight("norm", _add)),
          "full", "differing-replicas", tensor="norm", text="0.5.*mp_rank_01|mp_rank_01.*0.5"),
    Fault("the embedding differs between the first and the last pipeline stage", "Megatron-LM", _TIED,
          edit("mp_rank_00_001/model_optim_rng.pt", _weight("output_layer.weight", _add)), "full", "differing-replicas",
          tensor="embedding", text="mp_rank_00_001"),
    Fault("a flipped bit in a storage", "Megatron-LM", _TP, flip(_RANK, storage), "default", "wrong-checksum",
          file="mp_rank_01"),
    Fault("a file of the distributed optimizer is missing", "Megatron-LM", _DISTOPT,
          remove("mp_rank_01_000/distrib_optim.pt"), "quick", "missing-file", file="mp_rank_01_000/distrib_optim.pt"),
    Fault("the rank with an expert is missing", "Megatron-LM", _EP, remove("mp_rank_00_001/model_optim_rng.pt"),
          "quick", "missing-file", file="mp_rank_00_001"),
    Fault("a file of a rank is missing", "Megatron-LM torch_dist", _DIST, remove("__1_0.distcp"), "quick",
          "missing-file", file="__1_0"),
    Fault("`.metadata` is missing", "Megatron-LM torch_dist", _DIST, remove(".metadata"), FAILS),
    Fault("`common.pt` is missing", "Megatron-LM torch_dist", _DIST, remove("common.pt"), "quick", "missing-file",
          file="common.pt"),
    Fault("a file differs from `integrity.json`", "Megatron-LM torch_dist", _DIST, _integrity(_changed), "default",
          "wrong-checksum", file="__0_0"),
    Fault("a file that `integrity.json` lists is missing", "Megatron-LM torch_dist", _DIST, _integrity(_gone),
          "quick", "missing-file", file="__9_0"),
    Fault("`integrity.json` names files outside the folder", "Megatron-LM torch_dist", _DIST, _integrity(_outside),
          "quick", "unreadable-file", text="outside"),
    Fault("`integrity.json` cannot be parsed", "Megatron-LM torch_dist", _DIST,
          lambda f: (one(f, "metadata.json").parent / "integrity.json").write_text("{") and None, "quick",
          "inconsistent-metadata", file="integrity.json"),
)  # fmt: skip
