"""What the tensors of a training state are, in files of ordinary loops: names without wrappers, averages, ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lazyckpt
from lazyckpt.core.index import Index
from lazyckpt.core.specs import TensorSpec
from lazyckpt.errors import FormatError
from lazyckpt.formats.shared.wrappers import without_wrappers
from lazyckpt.testing.oracle import same


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), checkpoint_wrapper(nn.Linear(4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_a_loop_that_wraps_its_model(tmp_path: Path, key: str) -> None:
    model, optimizer = trained(torch.compile(small(), backend="eager"))  # type: ignore[arg-type]
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
    assert [problem.code for problem in view.problems] == ["undecided-name"]


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


def stepped(model: nn.Module, named: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, before: str = "") -> dict[str, torch.Tensor]:
    return {
        before + name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if p in optimizer.state
    }


def assert_moments(path: Path, tree: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    torch.save(tree, path)
    view = lazyckpt.open(path)
    assert {problem.code for problem in view.problems} <= {"unsorted-tensor"}  # the weights of a second model
    assert sorted(view.states["exp_avg"]) == sorted(expected)
    for name, value in expected.items():
        same(view.states["exp_avg"][name][...], value, name)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("last", [2, 5], ids=["same shapes", "other shapes"])
def test_the_optimizer_of_another_model_does_not_take_the_names_of_the_first(
    tmp_path: Path, last: int, named: bool
) -> None:
    actor, critic = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, last))
    first, second = stepped(actor, named), stepped(critic, named)
    tree = {
        "critic_optimizer": second.state_dict(),
        "optimizer": first.state_dict(),
        "model": actor.state_dict(),
        "critic": critic.state_dict(),
    }
    assert_moments(tmp_path / "x.pt", tree, moments(actor, first) | moments(critic, second, "critic."))
    tree["actor"], tree["actor_optimizer"] = tree.pop("model"), tree.pop("optimizer")
    both = moments(actor, first, "actor.") | moments(critic, second, "critic.")
    if named or last != 2:
        assert_moments(tmp_path / "y.pt", tree, both)


def test_names_that_two_optimizers_would_take_are_given_to_neither(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    a, b = stepped(first), stepped(second)
    torch.save({"model": first.state_dict(), "opt_a": a.state_dict(), "opt_b": b.state_dict()}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert list(view.states["exp_avg"]) == ["opt_a.0", "opt_a.1", "opt_b.0", "opt_b.1"]
    assert "for 4 of 4 order and shapes leave more than one way" in view.problems[0]
    torch.save({"opt_b": b.state_dict(), "model": first.state_dict(), "optimizer": a.state_dict()}, tmp_path / "y.pt")
    view = lazyckpt.open(tmp_path / "y.pt")
    for name, value in moments(first, a).items():
        same(view.states["exp_avg"][name][...], value, name)


def test_parameters_that_have_numbers_for_names(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (5, 3, 4)])
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": [model[2]]}, {"params": [model[1]]}])
    for p in model[1:]:
        p.grad = torch.randn_like(p)
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_moments(tmp_path / "x.pt", tree, moments(model, optimizer))
    alike = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
    tree = {"model": alike.state_dict(), "optimizer": stepped(nn.ParameterList([alike[1]])).state_dict()}
    torch.save(tree, tmp_path / "y.pt")
    view = lazyckpt.open(tmp_path / "y.pt")
    assert list(view.states["exp_avg"]) == ["optimizer.0"]  # "0" is the name of a parameter


@pytest.mark.parametrize("inner", [False, True])
def test_an_optimizer_with_names_of_a_compiled_model(tmp_path: Path, inner: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    compiled = torch.compile(model)
    optimizer = stepped(model if inner else compiled, named=True)  # type: ignore[arg-type]
    weights = (compiled if inner else model).state_dict()  # type: ignore[attr-defined]
    tree = {"model": weights, "optimizer": optimizer.state_dict()}
    assert_moments(tmp_path / "x.pt", tree, moments(model, optimizer))


@pytest.mark.parametrize("params", [None, 3, {"0": 1}, Path("x")])
def test_groups_whose_parameters_are_no_list(tmp_path: Path, params: Any) -> None:
    state = {0: {"exp_avg": torch.ones(3)}}
    tree = {"model": {"w": torch.ones(3)}, "optimizer": {"state": state, "param_groups": [{"params": params}]}}
    torch.save(tree, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert list(view) == ["w"] and list(view.states["exp_avg"]) == ["0"]
    assert view.problems[0].code == "undecided-name"


def test_a_file_of_weights_for_each_rank_is_no_folder_of_models(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for rank in range(2):
        save_file({"w": torch.full((2,), float(rank))}, tmp_path / f"model_{rank}.safetensors")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optimizer_{rank}.pt")
    with pytest.raises(FormatError):
        lazyckpt.open(tmp_path)


@pytest.mark.parametrize(
    "word", ["rng", "train_state", "lr_scheduler", "dataloader", "epoch", "scheduler", "optimizer"]
)
def test_a_module_with_the_name_of_something_else_keeps_its_weights(tmp_path: Path, word: str) -> None:
    module, other = (nn.ModuleDict({"fc": nn.Linear(2, 3), "bn": nn.BatchNorm1d(3)}).state_dict() for _ in range(2))
    truth = {f"{top}.{name}": value for top, held in ((word, module), ("dec", other)) for name, value in held.items()}
    torch.save({word: module, "dec": other}, tmp_path / "nested.pt")
    torch.save({"state": {"model": {"dec": other}}, word: module}, tmp_path / "level.pt")
    torch.save({word: module}, tmp_path / "alone.pt")
    view = lazyckpt.open(tmp_path / "nested.pt")
    assert set(view) == set(truth) and list(view.states) == ["weights"] and not view.problems
    for name, value in truth.items():
        same(view[name][...], value, name)
    assert {*lazyckpt.open(tmp_path / "alone.pt")} == {f"{word}.{name}" for name in module}
    assert {f"{word}.{name}" for name in module} <= set(lazyckpt.open(tmp_path / "level.pt"))
    if word == "rng":
        assert "state dict of a module" in view["rng.fc.weight"].explain()


def test_what_is_not_a_module_is_no_weight(tmp_path: Path) -> None:
    """As torchtitan, Composer and verl write them: counters, random states, learning rates."""
    beside = {
        "rng": {"cpu": torch.get_rng_state(), "fc": {"weight": torch.ones(2)}, "python": (3, (1, 2), None)},
        "train_state": {"step": torch.tensor(3), "loss": torch.tensor(0.5)},
        "lr_scheduler": {"_last_lr": [torch.tensor([0.5])]},
        "dataloader": {"order": torch.arange(3)},
    }
    torch.save({"layers": nn.Linear(2, 3).state_dict(), **beside}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert set(view) == {"layers.weight", "layers.bias"} and list(view.states) == ["weights"]
    assert view.problems == ()
    same(view["rng.fc.weight"][...], torch.ones(2), "the stored name finds it")


def test_weights_beside_the_model_are_told(tmp_path: Path) -> None:
    head = nn.Linear(2, 3).state_dict()
    torch.save({"model": nn.Linear(5, 2).state_dict(), "head": head, "step": 3}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert set(view) == {"weight", "bias"}
    (problem,) = view.problems
    assert problem.code == "unsorted-tensor" and "'head'" in problem
    same(view["head.weight"][...], head["weight"], "the stored name finds it")


def test_states_of_generators_are_no_weights(tmp_path: Path) -> None:
    net, optimizer = trained(nn.Linear(3, 4))
    tree = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    tree |= {"cuda_rng_state": [torch.zeros(16, dtype=torch.uint8)], "random_mask": torch.ones(16)}
    torch.save(tree, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert list(view) == ["net.weight", "net.bias", "random_mask"]
    same(view["rng"][...], tree["rng"], "the stored name finds it")


@pytest.mark.parametrize("word", ["rng", "random", "rng_state", "random_proj"])
def test_bytes_of_a_module_with_such_a_name_are_weights(tmp_path: Path, word: str) -> None:
    """A table of 16 bytes is as long as the state of CUDA's generator."""
    table = torch.arange(16, dtype=torch.uint8)
    inner = {"lut": table, "weight": torch.ones(2), "random_mask": table + 1, "rng": {"cuda": [table + 2]}}
    torch.save(
        {"enc": {word: inner, f"{word}.fc.lut": table + 3, f"{word}.fc.weight": torch.ones(2)}}, tmp_path / "x.pt"
    )
    view = lazyckpt.open(tmp_path / "x.pt")
    held = ("lut", "weight", "random_mask", "fc.lut", "fc.weight")
    assert list(view) == [f"enc.{word}.{name}" for name in held]
    same(view[f"enc.{word}.lut"][...], table, "lut")
