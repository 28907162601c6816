"""An optimizer numbers its parameters in an order of its own: a number gets the right name, or none and a problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lazyckpt

from .groupings import GROUPINGS, MODELS, optimizer_of, wrong_names


def by_torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x.pt")
    return folder / "x.pt"


def by_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def zero0(folder: Path, model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> Path:
    """What DeepSpeed's engine writes without ZeRO (runtime/engine.py `_save_checkpoint`)."""
    tag = folder / "zero" / "global_step1"
    tag.mkdir(parents=True)
    weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()}
    names = {id(t): n for n, t in model.state_dict(keep_vars=True).items()}
    shared = {n: names[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if names[id(p)] != n}
    root = {
        "module": weights,
        "buffer_names": [n for n, _ in model.named_buffers()],
        "optimizer": optimizer,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": shared,
        "frozen_param_fragments": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.18.0",
        "global_steps": 1,
    }
    torch.save(root, tag / "mp_rank_00_model_states.pt")
    (folder / "zero" / "latest").write_text("global_step1")
    return folder / "zero"


def by_deepspeed(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    return zero0(folder, model, optimizer.state_dict())


WRITERS: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], Path]] = {
    "torch": by_torch,
    "dcp": by_dcp,
    "deepspeed": by_deepspeed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_order_of_groups_gives_a_wrong_name(tmp_path: Path, writer: str, model: str) -> None:
    found = {}
    for n, (grouping, grouped) in enumerate(GROUPINGS.items()):
        if writer == "dcp" and n % 3:  # slow to write
            continue
        built = MODELS[model]()
        optimizer, truth = optimizer_of(grouped(built))
        folder = tmp_path / str(n)
        folder.mkdir()
        view = lazyckpt.open(WRITERS[writer](folder, built, optimizer))
        wrong, named = wrong_names(view.states["exp_avg"], truth)
        told = any("numbers its parameters" in line for line in view.problems)
        if wrong or told != (named < len(truth)):
            found[grouping] = len(wrong), named, len(truth), told
    assert not found, "grouping -> wrong names, names, parameters, whether a problem tells of numbers"
