"""A state answers with its own tensors, by every kind of look-up; what it lacks, it says where to find."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.testing.counting import opened


def _trained(folder: Path, layout: str) -> Path:
    """A model whose last parameter is frozen, so that the optimizer has states of the others only."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    model[1].bias.requires_grad = False  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if layout == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x.pt")
        return folder / "x.pt"
    if layout == "trainer":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        return folder
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    held = optimizer.state_dict()
    states = {name: held["state"][n] for n, name in enumerate(names)}
    dcp.save({**model.state_dict(), "optim": {"state": states}}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(params=["torch", "trainer", "dcp"])
def view(request: pytest.FixtureRequest, tmp_path: Path) -> lazyckpt.CheckpointView:
    return lazyckpt.open(_trained(tmp_path, request.param))


def test_a_frozen_parameter_has_no_moments(view: lazyckpt.CheckpointView) -> None:
    frozen = "1.bias"
    assert view[frozen].shape == (3,)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        moments = view.states[state]
        assert moments and frozen not in list(moments)
        for name in (frozen, "model.1.bias", view[frozen].spec.stored_as or "model.1.bias"):
            assert name not in moments and moments.get(name) is None
            with pytest.raises(lazyckpt.TensorNotFoundError):
                _ = moments[name]
        with pytest.raises(lazyckpt.TensorNotFoundError) as error:
            _ = moments[frozen]
        assert "weights" in str(error.value), "where the name is"
        with pytest.raises(lazyckpt.TensorNotFoundError) as below:
            _ = moments["1"]["bias"]
        assert "weights" in str(below.value)


def test_stored_names_find_tensors_of_their_own_state(view: lazyckpt.CheckpointView) -> None:
    for state in ("exp_avg", "exp_avg_sq"):
        moments = view.states[state]
        for raw in view.stored:
            found = moments.get(raw)
            if found is not None and isinstance(found, lazyckpt.LazyTensor):
                assert raw.endswith(state) or raw in moments, (state, raw)
    other = next(raw for raw in view.stored if raw.endswith("exp_avg_sq"))
    assert other not in view.states["exp_avg"] and other not in view.states["weights"]
    assert torch.equal(view[other][...], view.stored[other][...]), "the view as it was opened finds all of them"


def test_show_of_a_state_refuses_names_of_others(tmp_path: Path) -> None:
    path = str(_trained(tmp_path, "torch"))
    shown = CliRunner().invoke(cli.app, ["show", path, "0.weight[0, 0]", "--state", "exp_avg"])
    assert shown.exit_code == 0, shown.output
    for name in ("1.bias", "model.1.bias", "optimizer.state.0.exp_avg_sq"):
        refused = CliRunner().invoke(cli.app, ["show", path, f"{name}[0]", "--state", "exp_avg"])
        assert refused.exit_code != 0, refused.output


def test_a_tied_name_follows_the_selection(tmp_path: Path) -> None:
    embedding, other = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([embedding, other])
    (embedding.sum() + other.sum()).backward()
    optimizer.step()
    weights = {"embed.weight": embedding.detach(), "norm.weight": other.detach(), "head.weight": embedding.detach()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    moments = lazyckpt.open(tmp_path / "x.pt").states["exp_avg"]
    assert "head.weight" in moments and moments["head.weight"].name == "head.weight"
    part = moments.select("norm.*")
    assert "head.weight" not in part and part.get("head.weight") is None
    assert "head.weight" in moments.select("*.weight")


def test_a_miss_is_cheap_and_its_message_bounded(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.{w}_proj.weight" for n in range(60) for e in range(128) for w in "gud"]
    one = torch.zeros(1)
    torch.save(dict.fromkeys(names, one) | {"last": torch.ones(1)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    wrong = names[777].replace("experts", "expert")
    assert view.get(wrong) is None  # what is found out once
    started = time.process_time()
    for _ in range(5):
        assert view.get(wrong) is None and wrong not in view
    silent = time.process_time() - started
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view[wrong]
    started = time.process_time()
    assert repr(names[777]) in str(error.value)
    told = time.process_time() - started
    assert told < 3, "near names are searched for in bounded time"
    assert silent / 10 < max(told, 0.02), "and only where the message is shown"


def test_long_names_are_told_in_bounded_time_and_length(tmp_path: Path) -> None:
    long = {f"{'block.' * 3000}{n}.weight": torch.zeros(1) for n in range(300)}
    torch.save(long, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    for wrong in ("weigth", next(iter(long)) + "x", "x" * 50_000, "a." * 20_000):
        started = time.process_time()
        with pytest.raises(lazyckpt.TensorNotFoundError) as error:
            _ = view[wrong]
        assert len(str(error.value)) < 2000
        assert time.process_time() - started < 3


def test_the_error_travels_with_its_message(view: lazyckpt.CheckpointView) -> None:
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view["0.wieght"]
    for again in (copy.copy(error.value), copy.deepcopy(error.value), pickle.loads(pickle.dumps(error.value))):
        assert type(again) is lazyckpt.TensorNotFoundError and isinstance(again, KeyError)
        assert str(again) == str(error.value) and "'0.weight'" in str(again)
    assert str(pickle.loads(pickle.dumps(lazyckpt.TensorNotFoundError("a"))).args[0]) == "a"


def test_a_name_whose_file_is_gone_is_not_listed(dcp_hole: tuple[lazyckpt.CheckpointView, object]) -> None:
    view, _ = dcp_hole
    for name in view.unreadable:
        assert name not in view and name not in list(view)
        with pytest.raises(lazyckpt.MissingFileError):
            view.get(name)


def test_looking_up_reads_nothing(tmp_path: Path) -> None:
    view, counts = opened(_trained(tmp_path, "torch"))
    counts.clear()
    assert "0" in view and "nothing" not in view and view.get("1.bias") is not None
    assert "1.bias" not in view.states["exp_avg"]
    assert counts.requests == 0
