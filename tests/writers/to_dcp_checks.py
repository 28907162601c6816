"""What `to_dcp` wrote, loaded by torch on two gloo ranks into sharded models with their optimizers.

Run by :mod:`.ranks`, with a folder that has ``zero2``, what was made of a ZeRO-2 checkpoint, and its truth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lazyckpt

from . import bit_equal
from .dcp_contents import TinyNet, adam, train
from .nasty_model import NastyModel
from .torch_dcp import States, truth_of

__all__ = ["CHECKS"]


class TiedNet(TinyNet):
    """With a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight


def from_torch(folder: Path) -> None:
    """A file that one process wrote, with a tie, written again in chunks of a few rows."""
    truth: list[Any] = [None]
    if dist.get_rank() == 0:
        model = TiedNet()
        optimizer = adam(model)
        train(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 12}
        torch.save(state, folder / "tied.pt")
        truth[0] = {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()
        lazyckpt.open(folder / "tied.pt").to_dcp(folder / "tied", verify=True)
    dist.broadcast_object_list(truth)
    weights, optim = truth[0]

    model = TiedNet()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loaded = load(folder / "tied", model, optimizer, step=0)
    found = truth_of(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    if dist.get_rank() == 0:
        states: States = {"weights": weights}
        for number, name in enumerate(names):
            for state, value in optim["state"][number].items():
                states.setdefault(state, {})[name] = value
        same(found, states)
    assert loaded["step"] == 12
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer)  # goes on


def from_zero2(folder: Path) -> None:
    sizes = json.loads((folder / "zero2.json").read_text())
    model = NastyModel(**sizes)
    sharded(model)
    groups = model.param_groups()
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    load(folder / "zero2", model, optimizer)
    found = truth_of(model, optimizer)
    if dist.get_rank() == 0:
        truth = {path.stem: load_file(path) for path in (folder / "truth").glob("*.safetensors")}
        wanted = {state: truth["fp32" if state == "weights" else state] for state in found if state != "step"}
        buffers = {name for name, _ in model.named_buffers()}
        for state, tensors in wanted.items():
            for name, tensor in tensors.items():
                if name not in buffers:
                    assert bit_equal(found[state][name], tensor), (state, name)
        assert len(wanted) == 3
        assert all(float(step) == 3 for step in found["step"].values())


def sharded(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim, **more}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state


def same(found: States, wanted: States) -> None:
    assert found.keys() == wanted.keys()
    for state, tensors in wanted.items():
        assert found[state].keys() == tensors.keys(), state
        for name, tensor in tensors.items():
            other: Tensor = found[state][name]
            assert bit_equal(other, tensor), (state, name)


CHECKS = {"from_torch": (2, from_torch), "from_zero2": (2, from_zero2)}
