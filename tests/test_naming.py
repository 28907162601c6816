"""What the tensors of a training state are, in files of ordinary loops: names without wrappers, averages, ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lazyckpt
from lazyckpt.core.index import Index, TensorSpec
from lazyckpt.formats.wrappers import without_wrappers

from .oracle import same


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), checkpoint_wrapper(nn.Linear(4, 4)))


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_a_loop_that_wraps_its_model(tmp_path: Path, key: str) -> None:
    model, optimizer = trained(torch.compile(small()))  # type: ignore[arg-type]
    weights = {f"module.{name}": t for name, t in model.state_dict().items()}
    average = {f"module.{name}": t * 2 for name, t in model.state_dict().items()}
    tree: dict[str, Any] = {key: weights, "optimizer": optimizer.state_dict(), "ema": average, "rng": torch.arange(4)}
    torch.save(tree, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert view.problems == ()
    assert list(view.states) == ["weights", "exp_avg", "exp_avg_sq", "ema", "step"]
    assert list(view)[:2] == ["0.weight", "0.bias"] and "2.weight" in list(view)
    for name in view:
        stored = view[name].spec.stored_as.removeprefix(f"{key}.")
        assert stored.startswith("module._orig_mod.")
        same(view[name][...], weights[stored], name)
        same(view.states["ema"][name][...], average[stored], name)
        assert f"stored as '{key}.{stored}'" in view[name].explain()
        same(view[f"{key}.{stored}"][...], weights[stored], "the stored name finds it")
    for n, (name, _) in enumerate(model.named_parameters()):
        for state, value in optimizer.state_dict()["state"][n].items():
            bare = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            same(view.states[state][bare][...], value, (name, state))
    assert view.meta["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert repr(view.meta["rng"]) == "<tensor 'rng'>"
    same(view["rng"][...], tree["rng"], "what is neither is found by its stored name")
    assert "rng" in view.stored and "rng" not in list(view)


def test_several_optimizers_in_a_list(tmp_path: Path) -> None:
    a, b = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (a, b)]
    b(a(torch.ones(1, 2))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    state_dict = {f"{k}.{n}": t for k, m in (("a", a), ("b", b)) for n, t in m.state_dict().items()}
    torch.save(
        {"state_dict": state_dict, "optimizer_states": [o.state_dict() for o in optimizers]}, tmp_path / "x.ckpt"
    )
    view = lazyckpt.open(tmp_path / "x.ckpt")
    assert set(view.states["momentum_buffer"]) == set(state_dict)
    for optimizer, module, k in zip(optimizers, (a, b), "ab", strict=True):
        for n, (name, _) in enumerate(module.named_parameters()):
            wanted = optimizer.state_dict()["state"][n]["momentum_buffer"]
            same(view.states["momentum_buffer"][f"{k}.{name}"][...], wanted, name)


def test_ids_that_nothing_determines_stay(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert list(view.states["momentum_buffer"]) == ["0", "1"]
    assert len(view.problems) == 1 and "under their numbers" in view.problems[0]


def test_an_optimizer_alone(tmp_path: Path) -> None:
    _, optimizer = trained(small())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    view = lazyckpt.open(tmp_path / "optimizer.pt")
    assert view.state == "exp_avg" and list(view) == [str(n) for n in range(6)]
    same(view["0"][...], optimizer.state_dict()["state"][0]["exp_avg"], "by its number")


def index(*names: str, format: str = "torch") -> Index:
    specs = {name: TensorSpec(name, (2,), torch.float32, ()) for name in names}
    return Index(format=format, states={"weights": specs}, files={})


@pytest.mark.parametrize(
    ("stored", "names"),
    [
        (("module.a.w", "module.b.w"), ("a.w", "b.w")),
        (("module.a.w", "b.w"), ("module.a.w", "b.w")),
        (("_forward_module.module.a", "_forward_module.module._orig_mod.b"), ("a", "b")),
        (("base_model.model.model.q.lora_A.weight",), ("model.q.lora_A.weight",)),
        (("layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w",), ("layers.0.w",)),
        (("_orig_mod.w", "w"), ("_orig_mod.w", "w")),
        (("module.module.w",), ("w",)),
        (("module.",), ("module.",)),
        (("module",), ("module",)),
    ],
)
def test_what_wraps_a_model(stored: tuple[str, ...], names: tuple[str, ...]) -> None:
    found = without_wrappers(index(*stored))
    assert tuple(found.states["weights"]) == names
    assert [s.stored_as or s.name for s in found.states["weights"].values()] == list(stored)
    clash = len(stored) == 2 and stored[0] == "_orig_mod.w"
    assert len(found.problems) == clash


def test_deepspeed_takes_its_own_wrapper_off() -> None:
    kept = without_wrappers(index("module.a", "module.b", format="deepspeed-zero3"))
    assert list(kept.states["weights"]) == ["module.a", "module.b"]
    assert list(without_wrappers(index("_forward_module.a", format="deepspeed-zero3")).states["weights"]) == ["a"]
