"""Names without what wraps a model, and numbers of optimizers, in files that real modules and optimizers give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

import lazyckpt
from lazyckpt.testing.oracle import same

from .conftest import need
from .writers.dcp_contents import TinyNet


def _fabric(model: nn.Module) -> nn.Module:
    need("lightning")
    from lightning.fabric.wrappers import _FabricModule

    class Strategy:
        precision = None

    return _FabricModule(model, Strategy())  # type: ignore[arg-type,no-untyped-call]


def _peft(model: nn.Module) -> nn.Module:
    """As peft nests it (peft/peft_model.py, peft/tuners/tuners_utils.py)."""
    outer, tuner = nn.Module(), nn.Module()
    outer.base_model, tuner.model = tuner, model
    return outer


def _layers(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], nn.Module]:
    def inner(model: nn.Module) -> nn.Module:
        for n, layer in enumerate(model.layers):  # type: ignore[arg-type]
            model.layers[n] = wrap(layer)  # type: ignore[index,operator]
        return model

    return inner


def _flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, list[Callable[[nn.Module], Any]]] = {
    "ddp": [nn.parallel.DistributedDataParallel],
    "compile": [torch.compile],
    "compiled ddp": [nn.parallel.DistributedDataParallel, torch.compile],
    "ddp of compiled": [torch.compile, nn.parallel.DistributedDataParallel],
    "checkpointed layers": [_layers(checkpoint_wrapper)],
    "checkpointed, compiled layers, ddp": [
        _layers(checkpoint_wrapper), _layers(torch.compile), nn.parallel.DistributedDataParallel,
    ],
    "fsdp": [_flat],
    "fsdp of layers": [_layers(_flat), _flat],
    "fsdp of checkpointed": [_layers(checkpoint_wrapper), _layers(_flat), torch.compile],
    "peft": [_peft],
    "peft, ddp, compile": [_peft, nn.parallel.DistributedDataParallel, torch.compile],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _states(wrapped: nn.Module) -> dict[str, Any]:
    """A state dict by the wrapper's names (FSDP would take its own off), and optimizer states keyed by them."""
    named = dict(wrapped.named_parameters())
    weights = {n: t.detach().clone() for n, t in (*named.items(), *wrapped.named_buffers())}
    state = {n: {"exp_avg": t + 1, "step": torch.tensor(3.0)} for n, t in weights.items() if n in named}
    return {"model": weights, "optimizer": {"state": state, "param_groups": [{"params": list(state)}]}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("how", ["torch", "dcp", "safetensors"])
def test_names_are_the_models_own(tmp_path: Path, name: str, how: str) -> None:
    torch.manual_seed(0)
    model: Any = TinyNet()
    original = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    trained = dict(model.named_parameters()).keys()
    wrapped = model
    for wrap in WRAPPERS[name]:
        wrapped = wrap(wrapped)
    state = _states(wrapped)
    assert set(state["model"]) != set(original), "there is something to see through"
    if how == "torch":
        torch.save(state, tmp_path / "x.pt")
        view = lazyckpt.open(tmp_path / "x.pt")
    elif how == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
        view = lazyckpt.open(tmp_path / "x")
    else:
        save_file({n: t.contiguous() for n, t in state["model"].items()}, tmp_path / "model.safetensors")
        torch.save(state["optimizer"], tmp_path / "optimizer.bin")
        view = lazyckpt.open(tmp_path)
    assert set(view) == set(original) and view.problems == ()
    for key, tensor in original.items():
        same(view[key][...], tensor, key)
    assert set(view.states["exp_avg"]) == set(trained)
    for key in trained:
        same(view.states["exp_avg"][key][...], original[key] + 1, key)
    stored = next(n for n in state["model"] if "layers.0" in n and n.endswith("up.weight"))
    raw = stored if how == "safetensors" else f"model.{stored}"
    assert raw in view.stored and repr(raw) in view["layers.0.up.weight"].explain()


@pytest.mark.slow
def test_fabric_modules(tmp_path: Path) -> None:
    model = TinyNet()
    wrapped = _fabric(model)
    names = [n for n, _ in wrapped.named_parameters()]
    assert names[0].startswith("_forward_module.")
    torch.save({n: p.detach() for n, p in wrapped.named_parameters()}, tmp_path / "x.pt")
    assert list(lazyckpt.open(tmp_path / "x.pt")) == [n for n, _ in model.named_parameters()]


def test_a_models_own_words_stay(tmp_path: Path) -> None:
    torch.save({"module.a": torch.zeros(2), "head": torch.ones(2)}, tmp_path / "x.pt")
    assert list(lazyckpt.open(tmp_path / "x.pt")) == ["module.a", "head"]
    torch.save({"_orig_mod.a": torch.zeros(2), "a": torch.ones(2)}, tmp_path / "y.pt")
    view = lazyckpt.open(tmp_path / "y.pt")
    assert set(view) == {"_orig_mod.a", "a"} and any(line.code == "duplicate-tensor" for line in view.problems)


# -- numbers of optimizers


class Mixed(nn.Module):
    """Equal shapes side by side, a BatchNorm, a tied weight, a float buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * self.scale
        for block in self.blocks:
            h = h + block(h)
        out: Tensor = self.head(h)
        return out


def _matrices(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]


def _reversed(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())[::-1]}]


def _one_by_one(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p]} for p in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.1, centered=True),
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "adamax": torch.optim.Adamax,
}
GROUPS: dict[str, Callable[[nn.Module], list[dict[str, Any]]]] = {
    "one": lambda model: [{"params": list(model.parameters())}],
    "two": _matrices,
    "each": _one_by_one,
    "reversed": _reversed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_number_gets_the_right_name_or_none(tmp_path: Path, kind: str, groups: str, frozen: bool) -> None:
    torch.manual_seed(1)
    model = Mixed()
    if frozen:
        model.blocks[0][0].requires_grad_(False)  # type: ignore[index]
    chosen = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in GROUPS[groups](model)]
    optimizer = OPTIMIZERS[kind]([g for g in chosen if g["params"]])
    for _ in range(2):
        model(torch.arange(6) % 7).square().sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    names = {id(p): name for name, p in model.named_parameters()}
    named = 0
    for p, slots in optimizer.state.items():
        for state, value in slots.items():
            if isinstance(value, Tensor) and names[id(p)] in view.states[state]:
                same(view.states[state][names[id(p)]][...], value, (state, names[id(p)]))
                named += state != "step"
    left = {n for s in view.states if s != "weights" for n in view.states[s] if n.isdecimal()}
    assert bool(left) == any(line.code == "undecided-name" for line in view.problems)
    if groups == "one" and not frozen:
        assert not left, "the order of the module tells"
    if groups == "two":
        assert left, "the buffer may be any of the vectors"
