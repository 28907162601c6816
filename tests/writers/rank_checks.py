"""What is checked on gloo ranks: loading into running distributed models. See ranks.py.

FOLDER/inputs.json names the checkpoints and their truths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lazyckpt
from lazyckpt import DataError, MeshError
from lazyckpt.distributed import (
    EPDegrees,
    LazyReader,
    build_ep_fqn2spec_info,
    drop_ep_dim,
    drop_ep_dims,
    ep_specs,
    init_ep_mesh,
    load_into,
    restore_ep_dim,
    restore_ep_dims,
)
from lazyckpt.testing.counting import opened

from . import bit_equal
from .dcp_contents import TinyNet, adam, train
from .nasty_model import NastyModel

CHECKS: dict[str, tuple[int, Callable[[Path], None]]] = {}


def check(world: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(function: Callable[[Path], None]) -> Callable[[Path], None]:
        CHECKS[function.__name__] = world, function
        return function

    return add


def inputs(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "inputs.json").read_text())
    return found


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def equal(module: nn.Module, truth: Mapping[str, Tensor]) -> None:
    for name, tensor in module.state_dict().items():
        assert bit_equal(full(tensor), truth[name]), name


def forget(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            local(tensor).zero_()


def written(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> Path:
    path = folder / f"{name}.safetensors"
    if dist.get_rank() == 0:
        save_file({k: t.contiguous() for k, t in tensors.items()}, path)
    dist.barrier()
    return path


def reads_its_shards(path: Path, module: nn.Module, **how: Any) -> None:
    """Fill a module, and count: of a file without archives a rank reads just the bytes that it holds."""
    view, counts = opened(path)
    counts.clear()
    load_into(view, module, **how)
    held = sum(local(t).nbytes for t in module.state_dict().values())
    assert counts.bytes == held, (counts.bytes, held)


def fsdp(model: TinyNet, mesh: Any, **how: Any) -> TinyNet:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return model


# -- view.load_into


@check(2)
def uneven_shards(folder: Path) -> None:
    """FSDP2 on 2 ranks from what 3 ranks saved; one parameter has fewer rows than there are ranks."""
    case = inputs(folder)["fsdp2_uneven"]
    truth = torch.load(case["truth"])["weights"]
    model = fsdp(TinyNet(hidden=5, inner=4, vocab=11), init_device_mesh("cpu", (2,)))
    train(model, adam(model))
    kept = dict(model.named_parameters())
    forget(model)
    model(torch.arange(8))  # the root's parameters stay gathered after it
    assert tuple(lazyckpt.open(case["path"]).load_into(model)) == ([], [])
    equal(model, truth)
    assert all(kept[name] is p for name, p in model.named_parameters()), "filled in place"
    forget(model)
    reads_its_shards(written(folder, "uneven", truth), model)
    equal(model, truth)


@check(2)
def meta_device(folder: Path) -> None:
    """DTensors on the meta device get memory, and the model runs."""
    truth = TinyNet().state_dict()
    path = written(folder, "meta", truth)
    with torch.device("meta"):
        model = TinyNet()
    fsdp(model, init_device_mesh("cpu", (2,)))
    reads_its_shards(path, model)
    equal(model, truth)
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    ids = torch.arange(8)
    assert torch.allclose(model(ids), TinyNet()(ids), atol=1e-5)
    train(model, adam(model))


@check(2)
def other_dimension(folder: Path) -> None:
    """FSDP2 along the last dimension, and in bf16."""
    truth = TinyNet(hidden=6, inner=8).state_dict()
    path = written(folder, "last", truth)
    model = TinyNet(hidden=6, inner=8)
    place = lambda p: Shard(p.ndim - 1) if p.shape[-1] % 2 == 0 else Shard(0)  # noqa: E731
    fsdp(model, init_device_mesh("cpu", (2,)), shard_placement_fn=place)
    forget(model)
    reads_its_shards(path, model)
    equal(model, truth)
    half = fsdp(TinyNet(hidden=6, inner=8).bfloat16(), init_device_mesh("cpu", (2,)))
    lazyckpt.open(path).load_into(half)
    equal(half, {name: t.bfloat16() if t.is_floating_point() else t for name, t in truth.items()})


@check(2)
def what_cannot_be_loaded(folder: Path) -> None:
    path = written(folder, "partial", {"weight": torch.ones(4, 4)})
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Partial()]))
    with pytest.raises(DataError, match="before they are reduced"):
        lazyckpt.open(path).load_into(module)
    shards = nn.Linear(5, 4, bias=False)
    fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(DataError, match=r"\(4, 4\) in the checkpoint and \(4, 5\)"):
        lazyckpt.open(path).load_into(shards)


@check(4)
def several_mesh_dimensions(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    whole = {"a": torch.randn(9, 5), "b": torch.randn(3, 7), "c": torch.randn(6), "d": torch.tensor(2.0)}
    path = written(folder, "several", whole)
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            module = nn.Module()
            for name, t in whole.items():
                over = [p if isinstance(p, Shard) and p.dim < t.ndim else Replicate() for p in (first, second)]
                module.register_parameter(name, nn.Parameter(distribute_tensor(t, mesh, over)))
            locals_ = {name: local(p).clone() for name, p in module.named_parameters()}
            forget(module)
            reads_its_shards(path, module)
            for name, p in module.named_parameters():
                assert bit_equal(local(p), locals_[name]), (name, first, second)


@check(4)
def tensor_parallel(folder: Path) -> None:
    """TP x FSDP2 (strided shards), also where nothing divides; HSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for sizes in ({"hidden": 8, "inner": 12}, {"hidden": 5, "inner": 9}):
        truth = TinyNet(**sizes).state_dict()
        path = written(folder, f"tp{sizes['hidden']}", truth)
        model = TinyNet(**sizes)
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fsdp(model, mesh["dp"])
        before = {name: local(p).clone() for name, p in model.named_parameters()}
        forget(model)
        reads_its_shards(path, model)
        for name, p in model.named_parameters():
            assert bit_equal(local(p), before[name]), name
    hybrid = fsdp(TinyNet(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    forget(hybrid)
    truth = TinyNet().state_dict()
    reads_its_shards(written(folder, "hybrid", truth), hybrid)
    equal(hybrid, truth)


# -- dcp.load


@check(2)
def from_deepspeed(folder: Path) -> None:
    """ZeRO-3's weights and optimizer states into FSDP2 and AdamW."""
    case = inputs(folder)["zero3"]
    truth = torch.load(case["truth"])
    model = NastyModel(*case["sizes"], with_empty=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    weights, optim = get_state_dict(model, optimizer)
    optim["state"] = {name: states for name, states in optim["state"].items() if name in truth["exp_avg"]}
    state = {"model": weights, "optim": optim}
    view, counts = opened(case["path"])
    counts.clear()
    reader = LazyReader(view)
    dcp.load(state, storage_reader=reader)
    held = sum(local(t).nbytes for t in weights.values())
    held += sum(local(t).nbytes for states in optim["state"].values() for t in states.values())
    assert counts.bytes <= held, (counts.bytes, held)
    for name, tensor in weights.items():
        assert bit_equal(full(tensor), truth["fp32"][name]), name
    for name, states in optim["state"].items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert bit_equal(full(states[moment]), truth[moment][name]), (name, moment)
        assert full(states["step"]) == case["step"]
    assert optim["param_groups"][0]["lr"] != 0.5 and "optim.param_groups.0.params" in reader.kept


@check(2)
def from_other_ranks(folder: Path) -> None:
    """A model of 2 ranks from checkpoints of 4 and of 2, wrapped in other ways; states set by torch."""
    for name in ("hsdp", "wrapped", "flat_optimizer", "fsdp1"):
        case = inputs(folder)[name]
        truth = torch.load(case["truth"])
        model = fsdp(TinyNet(), init_device_mesh("cpu", (2,)))
        optimizer = adam(model)
        weights, optim = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": optim}
        dcp.load(state, storage_reader=LazyReader(case["path"]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        equal(model, truth["weights"])
        for fqn, p in model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert bit_equal(full(optimizer.state[p][moment]), truth[moment][fqn]), (name, fqn)


@check(2)
def sharded_tensors(folder: Path) -> None:
    whole = torch.arange(35.0).view(7, 5)
    path = written(folder, "sharded", {"w": whole})
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])  # type: ignore[list-item]
    state = {"w": sharded_tensor.zeros(spec, 7, 5)}
    dcp.load(state, storage_reader=LazyReader(path))
    (shard,) = state["w"].local_shards()
    start = shard.metadata.shard_offsets[0]
    assert bit_equal(shard.tensor, whole[start : start + shard.tensor.shape[0]])


@check(2)
def errors_of_ranks(folder: Path) -> None:
    path = written(folder, "errors", {"w": torch.ones(4)})
    for state, word in (({"nope": torch.zeros(2)}, "Missing key"), ({"w": torch.zeros(3)}, "Size mismatch")):
        with pytest.raises(BaseException, match=word):  # CheckpointException is no Exception
            dcp.load(state, storage_reader=LazyReader(path))


@check(2)
def guide(folder: Path) -> None:
    """The example of the guide, on a ZeRO-3 checkpoint."""
    case = inputs(folder)["zero3"]
    truth = torch.load(case["truth"])
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "distributed.md").read_text("utf-8")
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "LazyReader" in c]
    model = NastyModel(*case["sizes"], with_empty=False)
    for name, p in model.named_parameters():
        p.requires_grad_(name in truth["exp_avg"])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    exec(code.replace("runs/gpt", case["path"]), {"lazyckpt": lazyckpt, "model": model, "optimizer": optimizer})
    equal(model, truth["fp32"])
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert bit_equal(full(optimizer.state[p]["exp_avg"]), truth["exp_avg"][name]), name


# -- experts


class Experts(nn.Module):
    """A stack of experts (this EP rank's, in a running model), biases and a router."""

    def __init__(self, experts: int, hidden: int = 6, inner: int = 8) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, inner))
        self.bias = nn.Parameter(torch.randn(experts, inner))


class Model(nn.Module):
    def __init__(self, experts: int, total: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.router = nn.Linear(6, total or experts, bias=False)
        self.layers = nn.ModuleList([Experts(experts), Experts(experts)])


PLAN = {"layers.*": Shard(0)}


def running(total: int, mesh: Any, dim: int | None) -> Model:
    """The model as an EP trainer has it: cut over "ep" by itself, then sharded over "ep_fsdp" along ``dim``."""
    whole = Model(total)
    place, size = mesh.get_coordinate()[0], mesh.shape[0]
    step = -(-total // size)
    model = Model(max(0, min(step, total - place * step)), total)
    with torch.no_grad():
        model.router.weight.copy_(whole.router.weight)
        for mine, theirs in zip(model.layers, whole.layers, strict=True):
            for name, p in mine.named_parameters():
                p.copy_(theirs.get_parameter(name)[place * step : (place + 1) * step])
    if dim is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["ep_fsdp"], shard_placement_fn=lambda p: Shard(dim))
        fully_shard(model.router, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


@check(4)
def experts(folder: Path) -> None:
    mesh = init_ep_mesh(2)
    assert mesh.mesh_dim_names == ("ep", "ep_fsdp") and mesh.mesh.tolist() == [[0, 2], [1, 3]]
    assert init_ep_mesh(2, ep_outside=True).mesh.tolist() == [[0, 1], [2, 3]]
    for total in (4, 5, 3):
        for dim in (None, 1, 0):
            truth = {name: t.detach() for name, t in Model(total).state_dict().items()}
            model = running(total, mesh, dim)
            specs = build_ep_fqn2spec_info(model, PLAN, mesh)
            assert set(specs) == set(truth) and not specs["router.weight"].sharded
            weights = model.state_dict()
            restored = restore_ep_dims({"model": weights}, specs)["model"]
            for name, tensor in restored.items():
                assert tuple(tensor.shape) == tuple(truth[name].shape), (total, dim, name)
                if name.startswith("layers"):
                    want = (Shard(0),) if dim is None else (Shard(0), Shard(dim))
                    assert (
                        tuple(tensor.placements) == want and local(tensor).data_ptr() == local(weights[name]).data_ptr()
                    )
                assert bit_equal(full(tensor), truth[name]), (total, dim, name)
            dropped = drop_ep_dims(restored, specs)
            for name, tensor in dropped.items():
                assert type(tensor) is type(weights[name].detach()) and tensor.shape == weights[name].shape, name
                assert local(tensor).data_ptr() == local(weights[name]).data_ptr()
                if isinstance(tensor, DTensor):
                    assert tensor.placements == weights[name].placements
                    assert tensor.device_mesh == weights[name].device_mesh

            out = folder / f"experts_{total}_{dim}"
            dcp.save({"model": restored}, checkpoint_id=out)
            view = lazyckpt.open(out)
            for name, tensor in view.items():
                assert bit_equal(tensor[...], truth[name]), name
            forget(model)
            load_into(view, model, ep=specs)
            for name, tensor in restored.items():
                assert bit_equal(full(tensor), truth[name]), (total, dim, name, "load_into")
            forget(model)
            dcp.load({"model": restored}, storage_reader=LazyReader(view))
            for name, tensor in restored.items():
                assert bit_equal(full(tensor), truth[name]), (total, dim, name, "dcp.load")
            forget(model)
            reads_its_shards(written(folder, f"experts_{total}", truth), model, ep=specs)
            if dim == 1:
                found = ep_specs(view)["layers.0.w1"]
                assert found.placement == Shard(0) and found.mesh == EPDegrees(2, 2), found
                assert found.fsdp_placement == Shard(1)
                planned = ep_specs(view, PLAN)["layers.1.bias"]
                assert planned.sharded and planned.fsdp_placement == Shard(1), planned


@check(4)
def states_of_experts(folder: Path) -> None:
    """Optimizer states lose and get back the EP dimension like their parameters; steps stay."""
    mesh = init_ep_mesh(4)
    model = running(8, mesh, None)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    weights, optim = get_state_dict(model, optimizer)
    specs = build_ep_fqn2spec_info(model, PLAN, mesh)
    state = restore_ep_dims({"model": weights, "optim": optim}, specs)
    moment = state["optim"]["state"]["layers.0.w1"]["exp_avg"]
    assert moment.shape == (8, 6, 8) and state["optim"]["state"]["layers.0.w1"]["step"].shape == ()
    assert not isinstance(state["optim"]["state"]["router.weight"]["exp_avg"], DTensor)
    back = drop_ep_dims(state, specs)
    assert torch.equal(back["optim"]["state"]["layers.0.w1"]["exp_avg"], optim["state"]["layers.0.w1"]["exp_avg"])
    flat = restore_ep_dims({"optim": {"state.layers.1.w1.exp_avg": torch.ones(2, 6, 8)}}, specs)
    assert flat["optim"]["state.layers.1.w1.exp_avg"].shape == (8, 6, 8)


@check(4)
def meshes_that_do_not_fit(folder: Path) -> None:
    mesh = init_ep_mesh(2)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_fsdp", "ep"))
    model = Model(2)
    with pytest.raises(MeshError, match="cannot be dealt to 3"):
        init_ep_mesh(3)
    for wrong in (line, turned, None):
        with pytest.raises(MeshError):
            build_ep_fqn2spec_info(model, PLAN, wrong)  # type: ignore[arg-type]
        with pytest.raises(MeshError):
            restore_ep_dim(torch.ones(2, 2), wrong)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="matches none"):
        build_ep_fqn2spec_info(model, {"decoder.*": Shard(0)}, mesh)
    with pytest.raises(MeshError, match="no placement"):
        build_ep_fqn2spec_info(model, {"layers.*": Partial()}, mesh)  # type: ignore[dict-item]
    with pytest.raises(MeshError, match="cannot drop"):
        drop_ep_dim(distribute_tensor(torch.ones(4, 4), line, [Shard(0)]), mesh)
    with pytest.raises(MeshError, match="cannot drop"):
        drop_ep_dim(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1), Shard(0)]), mesh)
    with pytest.raises(MeshError, match="cannot get"):
        restore_ep_dim(distribute_tensor(torch.ones(4, 4), line, [Shard(0)]), mesh)
    with pytest.raises(MeshError, match="does not cut so"):
        restore_ep_dim(torch.ones(1 + mesh.get_coordinate()[0], 2), mesh)  # type: ignore[index]
    first = {**PLAN, "*": Replicate()}
    assert build_ep_fqn2spec_info(model, first, mesh)["layers.0.w1"].ep_mesh == mesh["ep"]
