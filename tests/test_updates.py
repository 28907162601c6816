"""Updates: the last step of an optimizer, from its states, against what real optimizers added to the weights."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import testing
from lazyckpt.cli.program import app
from lazyckpt.core.expr import computed, make, operand
from lazyckpt.errors import DataError
from lazyckpt.inspect.updates import UpdateTable
from lazyckpt.lazy import LazyArray

from . import recordings
from .algebra import index, keys
from .lanes import rounds

SHAPES = {"layers.0.fc.weight": (7, 5), "layers.0.fc.bias": (7,), "layers.1.fc.weight": (4, 9), "head.weight": (3, 6)}
Weights = dict[str, Tensor]


class Lion(torch.optim.Optimizer):
    """The rule of google/automl lion/lion_pytorch.py, with its names of states and options."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                moment = state.setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((moment * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                moment.mul_(second).add_(p.grad, alpha=1 - second)


class Trained:
    """A checkpoint after some steps of an optimizer, the weights before the last one, and its gradients."""

    def __init__(
        self,
        folder: Path,
        optimizer: Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer],
        steps: int = 4,
        dtype: torch.dtype = torch.float64,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        steady: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(steps)
        params = {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
            for name, shape in shapes.items()
        }
        made = optimizer(list(params.items()))
        self.paths: list[Path] = []
        self.updates: list[Weights] = []
        gradients: Weights = {}
        for step in range(1, steps + 1):
            if not (steady and gradients):
                gradients = {n: torch.randn(p.shape, generator=generator, dtype=dtype) for n, p in params.items()}
            for name, p in params.items():
                p.grad = gradients[name].clone()
            before = {name: p.detach().clone() for name, p in params.items()}
            made.step()
            self.weights = {name: p.detach().clone() for name, p in params.items()}
            self.updates.append({name: self.weights[name] - before[name] for name in params})
            self.paths.append(folder / f"step_{step}.pt")
            torch.save({"model": self.weights, "optimizer": made.state_dict(), "step": step}, self.paths[-1])
        self.view = lazyckpt.open(self.paths[-1], cache=False)
        self.update = self.updates[-1]
        torch.save(gradients, folder / "gradients.bin")
        self.gradients = lazyckpt.open(folder / "gradients.bin", cache=False)


def close(found: Tensor, truth: Tensor, rounding: float = 1e-12) -> None:
    assert found.dtype == truth.dtype
    assert float((found - truth).abs().max()) <= rounding, (found, truth)


def agrees(trained: Trained, rounding: float = 1e-12, **options: Any) -> lazyckpt.show.updates.Updates:
    updates = trained.view.updates(**options)
    assert set(updates) == set(trained.update), updates.problems
    for name, truth in trained.update.items():
        close(updates[name][...], truth, rounding)
    for row in updates.table():
        size = float(trained.update[row.name].double().norm())
        assert row.update == pytest.approx(size, rel=max(1e-9, 100 * rounding))
        assert row.weight == pytest.approx(float(trained.weights[row.name].double().norm()), rel=1e-9)
    return updates


def groups(params: list[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
    """Two groups, as training scripts make them: no weight decay for biases."""
    decayed = [p for name, p in params if not name.endswith("bias")]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for n, p in params if n.endswith("bias")], "weight_decay": 0.0},
    ]


EXACT: dict[str, Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(groups(p), lr=0.01, betas=(0.9, 0.95), eps=1e-6),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(groups(p), lr=0.01, amsgrad=True),
    "adamw_maximize": lambda p: torch.optim.AdamW(groups(p), lr=0.01, maximize=True),
    "adam_l2": lambda p: torch.optim.Adam(groups(p), lr=0.01),
    "adam_no_decay": lambda p: torch.optim.Adam([x for _, x in p], lr=0.01),
    "sgd": lambda p: torch.optim.SGD(groups(p), lr=0.01, momentum=0.9, dampening=0.2),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_update_is_what_the_last_step_added(tmp_path: Path, name: str) -> None:
    trained = Trained(tmp_path, EXACT[name])
    updates = agrees(trained)
    assert updates.problems == ()
    assert all(row.exact and row.rate == "recorded" and row.lr == 0.01 for row in updates.table())


@pytest.mark.parametrize("name", EXACT)
def test_of_float32_within_rounding(tmp_path: Path, name: str) -> None:
    agrees(Trained(tmp_path, EXACT[name], dtype=torch.float32, steps=9), rounding=5e-7)


def test_of_the_first_step(tmp_path: Path) -> None:
    updates = agrees(Trained(tmp_path, EXACT["adamw"], steps=1))
    assert all(row.bound == 1 for row in updates.table())  # Adam's first step moves everything by the rate


def lion(params: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return Lion([p for _, p in params], 0.003, (0.9, 0.99), 0.1)


def nesterov(params: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in params], lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.0)


def test_lion_and_nesterov_are_exact_with_gradients(tmp_path: Path) -> None:
    for n, make_optimizer in enumerate((lion, nesterov)):
        (tmp_path / f"{n}").mkdir()
        trained = Trained(tmp_path / f"{n}", make_optimizer)
        updates = agrees(trained, gradients=trained.gradients)
        assert all(row.exact for row in updates.table())


def test_without_gradients_they_are_those_of_a_steady_gradient(tmp_path: Path) -> None:
    trained = Trained(tmp_path, lion, steady=True)
    updates = agrees(trained)
    assert not any(row.exact for row in updates.table())
    assert [problem.code for problem in updates.problems] == ["assumed-update"]
    (tmp_path / "sgd").mkdir()
    many = Trained(tmp_path / "sgd", nesterov, steps=400, steady=True)  # the buffer is then g / (1 - momentum)
    agrees(many, rounding=1e-9)


@pytest.fixture
def exact_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon, with the iteration in float64 in place of bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.double().clone())


MATRICES = {"layers.0.a.weight": (7, 5), "layers.1.a.weight": (4, 9), "layers.2.a.weight": (6, 6)}


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.usefixtures("exact_iteration")
def test_muon(tmp_path: Path, adjust: str | None) -> None:
    for mixed in (False, True):
        folder = tmp_path / str(mixed)
        folder.mkdir()
        trained = Trained(
            folder,
            lambda p: torch.optim.Muon(p, lr=0.02, nesterov=mixed, adjust_lr_fn=adjust),  # noqa: B023
            shapes=MATRICES,
        )
        updates = agrees(trained, gradients=trained.gradients if mixed else None)
        assert {row.optimizer for row in updates.table()} == {"muon"}
        t = updates["layers.1.a.weight"]
        assert torch.equal(t[1:3, ::2], t[...][1:3, ::2])


def test_muon_as_torch_computes_it_in_bfloat16(tmp_path: Path) -> None:
    shapes = {"w": (48, 32)}
    trained = Trained(tmp_path, lambda p: torch.optim.Muon(p, lr=0.02, nesterov=False), shapes=shapes)
    found, truth = trained.view.updates()["w"][...], trained.update["w"]
    assert float((found - truth).norm() / truth.norm()) < 0.02  # the precision of bfloat16 over five iterations


def test_adafactor_of_torch(tmp_path: Path) -> None:
    trained = Trained(
        tmp_path, lambda p: torch.optim.Adafactor([x for _, x in p], lr=1e-4, weight_decay=0.1), dtype=torch.float64
    )
    without = trained.view.updates()
    assert not len(without)
    assert "gradients" in str(without.problems[0])
    # relative to the norm of the weights before the step, of which the checkpoint has the ones after it
    updates = trained.view.updates(gradients=trained.gradients)
    for name, truth in trained.update.items():
        assert float((updates[name][...] - truth).norm() / truth.norm()) < 1e-3
    assert {row.rate for row in updates.table()} == {"relative"}


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactor_of_transformers(tmp_path: Path, relative: bool, beta1: float | None) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    trained = Trained(
        tmp_path,
        lambda p: optimization.Adafactor(
            [x for _, x in p],
            lr=None if relative else 1e-3,
            scale_parameter=relative,
            relative_step=relative,
            warmup_init=relative,
            beta1=beta1,
            weight_decay=0.0 if relative else 0.1,
        ),
    )
    updates = agrees(trained, gradients=None if beta1 else trained.gradients)
    assert all(row.exact for row in updates.table())


# -- what a checkpoint does not record


def rewritten(trained: Trained, change: Callable[[dict[str, Any]], None], folder: Path) -> lazyckpt.CheckpointView:
    saved = torch.load(trained.paths[-1], weights_only=True)
    change(saved["optimizer"])
    torch.save(saved, folder / "changed.pt")
    return lazyckpt.open(folder / "changed.pt", cache=False)


def test_older_adam_with_weight_decay_is_undecided(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adamw"])

    def older(optimizer: dict[str, Any]) -> None:  # torch before 2.7 does not record it
        for group in optimizer["param_groups"]:
            del group["decoupled_weight_decay"]

    view = rewritten(trained, older, tmp_path)
    updates = view.updates()
    assert list(updates) == ["layers.0.fc.bias"]  # without decay it is the same
    assert [problem.code for problem in updates.problems] == ["undecided-update"]
    for name, truth in trained.update.items():
        close(view.updates(optimizer="adamw")[name][...], truth)
    assert not torch.equal(view.updates(optimizer="adam")["head.weight"][...], trained.update["head.weight"])


def test_moments_of_another_optimizer_are_not_taken_for_adams(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adamw"])

    def lamb(optimizer: dict[str, Any]) -> None:
        for group in optimizer["param_groups"]:
            for key in ("amsgrad", "decoupled_weight_decay", "fused"):
                del group[key]
            group |= {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}

    assert not len(rewritten(trained, lamb, tmp_path).updates())

    def nothing(optimizer: dict[str, Any]) -> None:
        for group in optimizer["param_groups"]:
            for key in [key for key in group if key != "params"]:
                del group[key]

    view = rewritten(trained, nothing, tmp_path)
    assert not len(view.updates())
    assert not len(view.updates(optimizer="adamw"))
    updates = view.updates(
        optimizer="adamw", betas=(0.9, 0.95), eps=1e-6, weight_decay={"*.bias": 0, "*": 0.1}, lr=0.01
    )
    for name, truth in trained.update.items():
        close(updates[name][...], truth)
    assert all(row.rate == "given" for row in updates.table())


def test_without_a_learning_rate_updates_are_in_units_of_it(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adam_l2"])

    def no_rate(optimizer: dict[str, Any]) -> None:
        for group in optimizer["param_groups"]:
            del group["lr"]

    updates = rewritten(trained, no_rate, tmp_path).updates()
    for name, truth in trained.update.items():
        close(updates[name][...] * 0.01, truth)
    assert {(row.lr, row.rate) for row in updates.table()} == {(None, "unknown")}
    assert [problem.code for problem in updates.problems] == ["assumed-update"]


def test_a_rate_that_a_scheduler_has_set_is_said_to_be_the_next_steps(tmp_path: Path) -> None:
    def scheduled(params: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = EXACT["adamw"](params)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return optimizer

    trained = Trained(tmp_path, scheduled)
    updates = trained.view.updates()
    assert {row.rate for row in updates.table()} == {"scheduled"}
    assert "next step" in str(updates.problems[0])
    assert {row.rate for row in trained.view.updates(lr=0.01).table()} == {"given"}


def test_mistakes(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adamw"])
    for options in ({"learning_rate": 1.0}, {"optimizer": "adamax"}):
        with pytest.raises(DataError):
            trained.view.updates(**options)
    with pytest.raises(DataError, match="no optimizer states"):
        trained.gradients.updates()
    assert not len(trained.view.updates(lr=100.0).view.select("*weight"))  # 1 - lr * wd is not positive
    assert not len(trained.view.updates(optimizer="sgd"))


# -- lazily


def test_parts_and_what_they_read(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adamw"], shapes={"layers.0.w": (300, 40), "layers.1.w": (8, 8)})
    view, reads = testing.opened(trained.paths[-1])
    updates = view["layers.0"].updates()
    assert list(updates) == ["w"]
    reads.clear()
    row = updates["w"][7]
    assert reads.bytes == 3 * 40 * 8 + 4  # a row of both moments and of the weight, and the step
    close(row, trained.update["layers.0.w"][7])
    assert list(view.select("*.1.*").updates()) == ["layers.1.w"]
    path = tmp_path / "updates.safetensors"
    view.updates().view.to_safetensors(path)
    close(lazyckpt.open(path)["layers.1.w"][...], trained.update["layers.1.w"])


some = settings(max_examples=rounds(40), deadline=None)


@st.composite
def directions(draw: st.DrawFn) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))

    def some(*shape: int, positive: bool = False) -> Tensor:
        found = torch.randn(shape, generator=generator)
        return (found.square() + 1e-6 if positive else found).to(dtype)

    op = draw(st.sampled_from(["adam", "lion", "sgd", "adafactor", "muon"]))
    mixed = draw(st.booleans())
    if op == "adam":
        tensors = {"m": some(*shape), "v": some(*shape, positive=True)}
        params: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "bias_correction": True, "step": 7.0}
        if mixed:
            tensors["step"], params["step"] = torch.tensor(7.0), None
        return "update.adam", tensors, params
    if op == "adafactor":
        tensors = {"g": some(*shape)}
        params = {"clip": 0.7, "least": 1e-3, "floor": 1e-3, "rate": 0.1, "step": 3.0}
        if mixed:
            tensors["v"] = some(*shape, positive=True)
            return "update.adafactor", tensors, params | {"roles": ("gradient", "variance")}
        tensors["r"] = some(*shape[:-1], positive=True)
        tensors["c"] = some(*shape[:-2], shape[-1], positive=True)
        tensors["w"] = some(*shape)
        return "update.adafactor", tensors, params | {"roles": ("gradient", "rows", "columns", "weight")}
    shape = shape[:2] if op == "muon" else shape
    tensors = {"m": some(*shape)} | ({"g": some(*shape)} if mixed else {})
    if op == "muon":
        own = {"coefficients": (3.4, -4.8, 2.0), "steps": 5, "eps": 1e-7, "ratio": 1.5, "momentum": 0.9}
        return "update.muon", tensors, own
    return f"update.{op}", tensors, {"betas": (0.9, 0.99), "momentum": 0.9}


@some
@given(st.data())
def test_a_slice_equals_the_slice_of_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    op, tensors, params = data.draw(directions())
    path = tmp_path_factory.mktemp("ops") / "a.pt"
    torch.save(tensors, path)
    view = lazyckpt.open(path, cache=False)
    spec = computed("d", make(op, *(operand(view.specs[name]) for name in tensors), **params))
    whole = LazyArray(view._store, spec)[...]
    assert torch.isfinite(whole).all()
    key = data.draw(keys(tuple(whole.shape)))
    found = LazyArray(view._store, spec)[key]
    assert np.array_equal(found.numpy(), index(whole.numpy(), key))


# -- recorded checkpoints of other writers


def unpacked(group: str, case: str, folder: Path) -> Path:
    with tarfile.open(recordings.GOLDEN / group / f"{case}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / case


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_deepspeeds_steps(case: str, tmp_path: Path) -> None:
    """The updates of ZeRO's flat moments are the differences of the fp32 weights of consecutive steps, with the rate
    that the checkpoint before has recorded for the next step."""
    run = lazyckpt.open_run(unpacked("deepspeed_run", case, tmp_path) / "ckpt")
    assert run.steps == (1, 2, 3)
    for step in (2, 3):
        before, after = run.at(step - 1), run.at(step)
        rates = {name: one.lr for name, one in before.updates().steps.items()}
        updates = after.updates(lr=rates)
        assert len(updates) == 17
        for name in updates:
            change = after.states["fp32"][name][...].double() - before.states["fp32"][name][...].double()
            close(updates[name][...].double(), change, 3e-7)
    table = run.updates().table()
    assert {row.step for row in table} == {1, 2, 3}
    assert all(row.rate == "scheduled" for row in table)
    assert all(row.cosine is None for row in table if row.step == 1)
    cosines = [row.cosine for row in table if row.cosine is not None]
    assert len(cosines) > 30
    assert min(cosines) > 0.9999  # the direction does not depend on the rate


UPDATES = {  # group, case, folder -> optimizer, number of parameters
    ("dcp", "fsdp1", "ckpt"): ("adamw", 15),
    ("dcp", "fsdp2", "ckpt"): ("adamw", 15),
    ("dcp", "flat_optimizer", "ckpt"): ("adamw", 15),
    ("deepspeed_zero", "zero2_sgd", "ckpt"): ("sgd", 23),
    ("deepspeed_zero", "zero3_lion", "ckpt"): ("lion", 23),
    ("deepspeed_zero", "zero3_amsgrad", "ckpt"): ("adamw", 23),
    ("megatron", "tp2_dp2_distopt", "dist"): ("adamw", 15),
    ("megatron", "tp2_dp2_distopt", "legacy"): ("adamw", 15),
    ("trainers", "trainer_llama", "ckpt"): ("adamw", 28),
    ("trainers", "lightning_two_optimizers", "ckpt"): ("adam+adamw", 8),
    ("rank_files", "verl_fsdp2", "ckpt"): ("adamw", 15),
}


@pytest.mark.parametrize("where", UPDATES, ids="-".join)
def test_formats_of_training_checkpoints(where: tuple[str, str, str], tmp_path: Path) -> None:
    group, case, folder = where
    view = lazyckpt.open(unpacked(group, case, tmp_path) / folder)
    updates = view.updates(lr=0.5)
    rows = updates.table()
    assert ("+".join(dict.fromkeys(row.optimizer for row in rows)), len(rows)) == UPDATES[where], updates.problems
    assert not any(row.error or row.nonfinite for row in rows)
    name = rows[-1].name
    weights = view.states["fp32"] if "fp32" in view.states else view.states["weights"]
    update = updates[name][...]
    assert update.shape == weights[name].shape
    assert rows[-1].update == pytest.approx(float(update.double().norm()), rel=1e-5)
    assert rows[-1].weight == pytest.approx(float(weights[name][...].double().norm()), rel=1e-5)


def test_groups_without_names(tmp_path: Path) -> None:
    """DeepSpeed without ZeRO numbers parameters in groups of different decay: what that leaves open is not guessed."""
    view = lazyckpt.open(unpacked("deepspeed_kinds", "zero0_fp32", tmp_path) / "ckpt")
    updates = view.updates()
    assert not len(updates)
    assert "weight_decay 0.1, 0.0" in str(updates.problems[0])
    assert len(view.updates(weight_decay={"*.weight": 0.1, "*": 0.0})) == 23


def test_megatrons_decay_is_by_its_rule_and_said_so(tmp_path: Path) -> None:
    updates = lazyckpt.open(unpacked("megatron", "single", tmp_path) / "dist").updates()
    assert any("megatron-core" in str(problem) for problem in updates.problems)
    assert all((one.decay > 0) == (len(one.weight.shape) > 1) for one in updates.steps.values())


# -- tables, plots, the command line


def test_tables(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adamw"])
    table = trained.view.updates().table()
    assert table["head.weight"].layer is None
    assert [row.layer for row in table] == [0, 0, 1, None]
    joined = table.layers
    assert [row.name for row in joined] == ["head.weight", "layer 0", "layer 1"]
    zero = torch.cat([trained.update[name].reshape(-1) for name in trained.update if ".0." in name])
    assert joined["layer 0"].update == pytest.approx(float(zero.norm()))
    assert joined["layer 0"].rms == pytest.approx(float(zero.square().mean().sqrt()))
    assert UpdateTable(pickle.loads(pickle.dumps(table))) == table
    assert len(str(table).splitlines()) == 5
    assert "<table>" in table._repr_html_()
    with pytest.raises(lazyckpt.TensorNotFoundError):
        table["nothing"]
    frame = pytest.importorskip("pandas").DataFrame(table)
    assert list(frame["ratio"]) == [row.ratio for row in table]


def test_elements_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adam_no_decay"])

    def damaged(optimizer: dict[str, Any]) -> None:
        optimizer["state"][0]["exp_avg"][2, 3] = float("nan")
        optimizer["state"][0]["exp_avg_sq"][1, 1] = 0.0
        optimizer["state"][0]["exp_avg"][1, 1] = float("inf")

    row = rewritten(trained, damaged, tmp_path).updates().table()["layers.0.fc.weight"]
    good = torch.ones(7, 5, dtype=torch.bool)
    good[2, 3] = good[1, 1] = False
    assert row.nonfinite == 2
    assert row.update == pytest.approx(float(trained.update["layers.0.fc.weight"][good].norm()))


def test_a_step_that_cannot_be_computed_has_the_reason_in_its_row(tmp_path: Path) -> None:
    trained = Trained(tmp_path, EXACT["adam_no_decay"])

    def unstarted(optimizer: dict[str, Any]) -> None:
        optimizer["state"][1]["step"] = torch.tensor(0.0)

    table = rewritten(trained, unstarted, tmp_path).updates().table()
    assert [row.name for row in table if row.error] == ["layers.0.fc.bias"]
    assert "0 steps" in str(table["layers.0.fc.bias"].error)
    assert "cannot be computed" in str(table)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    Trained(tmp_path, EXACT["adamw"])
    (tmp_path / "gradients.bin").unlink()
    return tmp_path


def test_runs(run: Path) -> None:
    found = lazyckpt.open_run(run).updates("layers")
    assert list(found) == [1, 2, 3, 4]
    table = found.table()
    assert len(table) == 12
    assert all(row.cosine == pytest.approx(1) for row in table if row.step != 1)  # one step between two checkpoints
    assert [row.step for row in lazyckpt.open_run(run).updates("*.bias", steps=[4, 2]).table()] == [2, 4]
    with pytest.raises(DataError, match="no optimizer states"):
        lazyckpt.open_run(run).updates("nothing")


def test_a_step_without_states_is_left_out(run: Path) -> None:
    saved = torch.load(run / "step_2.pt", weights_only=True)
    torch.save({"model": saved["model"], "step": 2}, run / "step_2.pt")
    found = lazyckpt.open_run(run).updates()
    assert list(found) == [1, 3, 4]
    assert any("step 2" in str(problem) for problem in found.problems)


def test_plots(run: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    found = lazyckpt.open_run(run).updates()
    ax = found.plot()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "layer")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["head.weight", "0", "1"]
    values = np.asarray(ax.images[0].get_array())
    assert values.shape == (3, 4)
    assert values[1, 3] == pytest.approx(found[4].table().layers["layer 0"].ratio)
    lines = found.plot("update", lines=True).lines
    assert [list(line.get_xdata()) for line in lines] == [[1, 2, 3, 4]] * 3
    one = found[4].plot("bound")
    assert [text.get_text() for text in one.get_xticklabels()] == ["0", "1"]
    assert [text.get_text() for text in one.get_yticklabels()] == ["fc", "fc.bias", "head"]
    with pytest.raises(DataError, match="no quantity"):
        found.plot("loss")


def test_the_command(run: Path) -> None:
    def called(*args: str) -> Any:
        return CliRunner().invoke(app, ["updates", *args])

    path = str(run / "step_4.pt")
    done = called(path, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["updates"]
    assert [row["name"] for row in rows] == [
        "layers.0.fc.weight",
        "layers.0.fc.bias",
        "layers.1.fc.weight",
        "head.weight",
    ]
    halved = json.loads(called(path, "head", "--json", "--lr", "0.005", "--option", "weight_decay=0").stdout)["updates"]
    assert len(halved) == 1
    assert 0.4 < halved[0]["update"] / rows[-1]["update"] < 0.6
    assert called(path, "--layers").stdout.splitlines()[2].split()[:3] == ["layer", "0", "adamw"]
    done = called(str(run), "--run", "--csv", "--plot", str(run / "map.png"))
    assert len(done.stdout.splitlines()) == 17
    assert (run / "map.png").read_bytes().startswith(b"\x89PNG")
    done = called(path, "--optimizer", "sgd")
    assert done.exit_code == 0
    assert "no updates" in done.output
    assert called(path, "--option", "lr").exit_code == 2
    assert called(path, "--lines").exit_code == 2
