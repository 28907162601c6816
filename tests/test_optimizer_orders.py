"""An optimizer numbers its parameters in an order of its own: a number gets the right name, or none and a problem."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lazyckpt
from lazyckpt.testing.counting import opened

from .groupings import GROUPINGS, MODELS, Stack, optimizer_of, wrong_names


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
    first = {id(p): n for n, p in model.named_parameters()}
    shared = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
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


def opened_as(folder: Path, writer: str, model: str, grouping: str) -> tuple[lazyckpt.CheckpointView, dict[str, float]]:
    built = MODELS[model]()
    optimizer, truth = optimizer_of(GROUPINGS[grouping](built))
    return lazyckpt.open(WRITERS[writer](folder, built, optimizer)), truth


# Of so many groupings one is tried with each model; the default lane tries each grouping with some model, by torch.
STEPS = {"torch": (4, 12), "deepspeed": (8, 16), "dcp": (16, 32)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_order_of_groups_gives_a_wrong_name(
    tmp_path: Path, writer: str, model: str, pytestconfig: pytest.Config
) -> None:
    found = {}
    step = STEPS[writer][pytestconfig.getoption("lane") != "all"]
    first = list(MODELS).index(model)
    for n, grouping in enumerate(GROUPINGS):
        if (n + first) % step == 0:
            folder = tmp_path / str(n)
            folder.mkdir()
            view, truth = opened_as(folder, writer, model, grouping)
            wrong, named = wrong_names(view.states["exp_avg"], truth)
            told = any(line.code == "undecided-name" for line in view.problems)
            if wrong or told != (named < len(truth)):
                found[grouping] = len(wrong), named, len(truth), told
    assert not found, "grouping -> wrong names, names, parameters, whether a problem tells of numbers"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "grouping"),
    [
        ("12 equal layers", "all"),
        ("12 equal layers", "sorted, decay"),
        ("12 equal layers", "reversed, decay"),
        ("12 equal layers", "decay"),
        ("12 equal layers without biases", "sorted"),
        ("12 equal layers without biases", "reversed"),
        ("10 equal layers of Llama", "sorted, decay"),
        ("10 equal layers of Llama", "reversed, decay"),
        ("equal layers and an equal head", "head first, decay"),
    ],
)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_fits_several_orders_stays_under_numbers(tmp_path: Path, writer: str, model: str, grouping: str) -> None:
    view, truth = opened_as(tmp_path, writer, model, grouping)
    assert wrong_names(view.states["exp_avg"], truth) == ([], 0)
    assert len(view.states["exp_avg"]) == len(truth)
    assert any(line.code == "undecided-name" for line in view.problems)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grouping", ["sorted, decay", "sorted by value, decay"])
@pytest.mark.parametrize("writer", WRITERS)
def test_layers_sorted_by_their_text_or_their_value_stay_under_numbers(
    tmp_path: Path, writer: str, grouping: str
) -> None:
    """Whether layers.10 comes before layers.2 or behind it, no shape shows; the embedding and the head come first."""
    view, truth = opened_as(tmp_path, writer, "12 layers of Llama", grouping)
    assert wrong_names(view.states["exp_avg"], truth) == ([], 2)
    assert len(view.states["exp_avg"]) == len(truth)
    assert any(line.code == "undecided-name" for line in view.problems)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "grouping", "known"),
    [
        ("equal layers and an equal head", "all", "order of the modules"),
        ("10 equal layers of Llama", "all", "order of the modules"),
        ("12 layers of Llama", "all", "order of the modules"),
        ("12 layers of Llama", "decay", "order of the modules"),
        ("12 layers of Llama", "YOLO", "order of the modules"),
        ("12 layers of Llama", "head first", "order of the modules"),
        ("2 layers of Llama", "sorted, decay", "sorted names"),
        ("12 layers of Llama", "reversed", "reversed order"),
        ("12 layers of Llama", "head first, one group", "head first"),
        ("minGPT, 12 layers", "decay", "order of the modules"),
        ("minGPT, 2 layers", "minGPT", "sorted names"),
        ("every shape another", "shuffled", "shapes that no other has"),
    ],
)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_fits_one_order_has_names_and_says_by_which(
    tmp_path: Path, writer: str, model: str, grouping: str, known: str
) -> None:
    view, truth = opened_as(tmp_path, writer, model, grouping)
    assert wrong_names(view.states["exp_avg"], truth) == ([], len(truth))
    assert view.problems == ()
    for name in truth:
        assert known in view.states["exp_avg"][name].explain()


def test_a_frozen_parameter_does_not_hide_another_order(tmp_path: Path) -> None:
    """The order of the modules fits with the embedding left out, and so do sorted names."""
    model = Stack([nn.Linear(4, 4, bias=False) for _ in range(12)], 4, 9, 9)
    model.embed.requires_grad_(False)
    layers = sorted((n, p) for n, p in model.named_parameters() if n.startswith("layers"))
    rest = [(n, p) for n, p in model.named_parameters() if n.startswith(("norm", "head"))]
    optimizer, truth = optimizer_of([layers, rest])
    view = lazyckpt.open(by_torch(tmp_path, model, optimizer))
    wrong, _ = wrong_names(view.states["exp_avg"], truth)
    assert wrong == [] and any(line.code == "undecided-name" for line in view.problems)


class Arguments:
    """In place of transformers.TrainingArguments."""

    def __init__(self, **options: float) -> None:
        self.__dict__.update(options)


@pytest.mark.parametrize(("rate", "grouping", "named"), [(0.1, "decay", 24), (0.2, "sorted, decay", 0)])
def test_the_trainers_own_groups_are_in_the_order_of_the_modules(
    tmp_path: Path, rate: float, grouping: str, named: int
) -> None:
    """A Trainer that was given an optimizer has other arguments than that."""
    model = MODELS["12 equal layers"]()
    optimizer, truth = optimizer_of(GROUPINGS[grouping](model))
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.1
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(Arguments(learning_rate=rate, weight_decay=0.1), tmp_path / "training_args.bin")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    view = lazyckpt.open(tmp_path)
    assert view.format == "hf-trainer"
    assert wrong_names(view.states["exp_avg"], truth) == ([], named)
    assert any(line.code == "undecided-name" for line in view.problems) == (not named)


# -- fp32 copies that tell (DeepSpeed without ZeRO, 16 bit)


def with_copies(folder: Path, model: nn.Module, grouping: str, dtype: torch.dtype) -> tuple[Path, dict[str, float]]:
    """runtime/fp16/unfused_optimizer.py `state_dict`: fp32 copies in a list for each group; weights are their values,
    rounded."""
    groups = [group for group in GROUPINGS[grouping](model) if group]
    optimizer, truth = optimizer_of(groups)
    copies = [[p.detach().clone() for _, p in group] for group in groups]
    wrapped = {
        "dynamic_loss_scale": False,
        "cur_scale": 1.0,
        "cur_iter": 3,
        "optimizer_state_dict": optimizer.state_dict(),
        "fp32_groups": copies,
    }
    return zero0(folder, model, wrapped, dtype), truth


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "grouping"),
    [
        *(
            ("12 equal layers", g)
            for g in ("decay", "sorted, decay", "reversed, decay", "one by one", "shuffled, decay")
        ),
        *(("10 equal layers of Llama", g) for g in ("sorted, decay", "shuffled, decay")),
        *(("a tied head", g) for g in ("decay", "shuffled, decay")),
    ],
)
def test_fp32_copies_tell_what_the_order_does_not(tmp_path: Path, name: str, grouping: str, dtype: torch.dtype) -> None:
    model = MODELS[name]()
    for p in model.parameters():
        nn.init.normal_(p)
    path, truth = with_copies(tmp_path, model, grouping, dtype)
    view, counts = opened(path)
    counts.clear()
    assert repr(view) and counts.requests == 0
    before = view.problems
    assert wrong_names(view.states["exp_avg"], truth) == ([], len(truth))
    masters = view.states["fp32"]
    for key, p in model.named_parameters():
        assert torch.equal(masters[key][...], p)
    assert view.problems == ()
    if before:
        assert "fp32 copies" in before[0]
        assert any("fp32 copy" in t.explain() for t in view.states["exp_avg"].values())
        assert counts.bytes > 0
    again = pickle.loads(pickle.dumps(lazyckpt.open(path)))
    assert wrong_names(again.states["exp_avg"], truth) == ([], len(truth))


def test_equal_fp32_copies_tell_by_the_order_that_the_others_fit(tmp_path: Path) -> None:
    """Biases that are all zeros round to each other; the weights show that names were sorted."""
    model = MODELS["12 equal layers"]()
    for key, p in model.named_parameters():
        nn.init.zeros_(p) if key.endswith("bias") else nn.init.normal_(p)
    path, truth = with_copies(tmp_path, model, "sorted, decay", torch.bfloat16)
    view = lazyckpt.open(path)
    assert wrong_names(view.states["exp_avg"], truth) == ([], 24)
    assert view.problems == ()


def test_equal_fp32_copies_in_no_usual_order_stay_under_their_numbers(tmp_path: Path) -> None:
    model = MODELS["12 equal layers"]()
    for key, p in model.named_parameters():
        nn.init.ones_(p) if key.endswith("bias") else nn.init.normal_(p)
    path, truth = with_copies(tmp_path, model, "shuffled, decay", torch.float16)
    view = lazyckpt.open(path)
    assert wrong_names(view.states["exp_avg"], truth) == ([], 12)
    assert any(line.code == "undecided-name" for line in view.problems)
    assert "layers.0.bias" not in view.states["fp32"], "its weight is none of the copies for certain"
    assert set(view.states["fp32"]) == set(view.states["exp_avg"])


def test_fp32_copies_of_other_weights_tell_nothing(tmp_path: Path) -> None:
    model = MODELS["12 equal layers"]()
    path, truth = with_copies(tmp_path, model, "decay", torch.float16)
    file = next(path.rglob("*.pt"))
    root = torch.load(file, weights_only=False)
    root["module"] = {n: t + 1 for n, t in root["module"].items()}
    torch.save(root, file)
    view = lazyckpt.open(path)
    assert wrong_names(view.states["exp_avg"], truth) == ([], 0)
    assert any(line.code == "undecided-name" for line in view.problems)


def test_what_is_read_of_fp32_copies_is_little(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    path, truth = with_copies(tmp_path, model, "decay", torch.bfloat16)
    view, counts = opened(path)
    counts.clear()
    assert set(view.states["exp_avg"]) == set(truth)
    assert counts.bytes < 100_000, f"of {view.nbytes:,} bytes of weights: {counts}"
