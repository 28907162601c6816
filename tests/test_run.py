"""Runs: all steps of a training as one view."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.errors import DataError, DestinationError, FormatError, MissingFileError, TensorNotFoundError
from lazyckpt.formats.catalog import find
from lazyckpt.io.storage.local import LocalStore, split
from lazyckpt.runs.view import StepTensor
from lazyckpt.testing.counting import CountingStore, Counts

from .conftest import Checkpoints, complete
from .writers import Case, deepspeed_run


def model(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "layers.0.up.weight": torch.randn(64, 32, generator=generator),
        "layers.0.up.bias": torch.randn(64, generator=generator),
        "norm.weight": torch.randn(32, generator=generator).bfloat16(),
        "count": torch.tensor(step),
    }


def saved(folder: Path, steps: tuple[int, ...] = (1, 2, 10)) -> dict[int, dict[str, torch.Tensor]]:
    for step in steps:
        torch.save({"model": model(step), "step": step}, folder / f"step_{step}.pt")
    return {step: model(step) for step in steps}


def equal(t: lazyckpt.LazyTensor, truth: list[torch.Tensor]) -> bool:
    return torch.equal(t[...], torch.stack(truth))


# -- one kind of file


def test_every_tensor_has_all_steps(tmp_path: Path) -> None:
    truth = saved(tmp_path)
    run = lazyckpt.open_run(tmp_path)
    assert run.steps == (1, 2, 10)
    assert run.problems == ()
    assert list(run) == list(truth[1])
    for name in run:
        t = run[name]
        assert isinstance(t, StepTensor)
        assert t.shape == (3, *truth[1][name].shape)
        assert t.dtype == truth[1][name].dtype
        assert t.steps == (1, 2, 10)
        assert equal(t, [truth[s][name] for s in t.steps])
    whole = torch.stack([truth[s]["layers.0.up.weight"] for s in run.steps])
    t = run["layers.0.up.weight"]
    for key in (-1, slice(1, 3), (slice(None), 0), (slice(1, 3), slice(None, 8)), (..., 5), ([2, 0], slice(3, 9))):
        assert torch.equal(t[key], whole[key])
    assert np.array_equal(t.numpy(), whole.numpy())
    assert np.array_equal(np.asarray(t.lazy[::-1, :2]), whole.flip(0)[:, :2].numpy())
    assert t.lazy[::-1, :2].steps == (10, 2, 1)
    assert t.lazy[1:].lazy[1].steps == (10,)
    assert [row.norm() for row in t] == [w.norm() for w in whole]
    assert "run of 3 steps: 1, 2, 10" in repr(run)


def test_parts_states_and_single_steps(tmp_path: Path) -> None:
    truth = saved(tmp_path)
    run = lazyckpt.open_run(tmp_path)
    part = run["layers.0"]
    assert isinstance(part, lazyckpt.RunView)
    assert sorted(part) == ["up.bias", "up.weight"]
    assert part.steps == (1, 2, 10)
    assert equal(part["up.bias"], [truth[s]["layers.0.up.bias"] for s in run.steps])
    assert torch.equal(part.at(2)["up.bias"][...], truth[2]["layers.0.up.bias"])
    assert list(run.select("*.weight")) == ["layers.0.up.weight", "norm.weight"]
    assert torch.equal(run.at(10)["norm.weight"][...], truth[10]["norm.weight"])
    assert run.at(10).meta["step"] == 10
    assert run.paths[2] == str(tmp_path / "step_2.pt")
    assert {k: v.shape for k, v in part.to("cpu").items()} == {"up.weight": (3, 64, 32), "up.bias": (3, 64)}
    with pytest.raises(MissingFileError, match="no step 3; there are: 1, 2, 10"):
        run.at(3)
    with pytest.raises(TensorNotFoundError, match="up"):
        run["layers.0.up.weigth"]


def test_what_cuts_tensors_is_for_one_step(tmp_path: Path) -> None:
    """Of stacked tensors it would cut the steps."""
    saved(tmp_path)
    run = lazyckpt.open_run(tmp_path)
    with pytest.raises(DataError, match=r"rename one checkpoint, run\.at"):
        run.rename("hf")
    with pytest.raises(DataError, match=r"shard one checkpoint, run\.at"):
        run.shard(tp=2, rank=0)


def test_only_the_wanted_steps_and_bytes_are_read(tmp_path: Path) -> None:
    saved(tmp_path, tuple(range(1, 21)))
    counts = Counts()
    with mock.patch("lazyckpt.runs.view.locate", lambda where, options: (CountingStore(split(where)[0], counts), "")):
        run = lazyckpt.open_run(tmp_path)
        t = run["layers.0.up.weight"]
    counts.clear()
    assert t.lazy[3:5, :8].shape == (2, 8, 32)
    repr(t), t.explain(2), run.steps, run.problems
    assert counts.bytes == 0
    t[4]
    assert counts.paths == {"step_5.pt"}
    assert counts.bytes == 64 * 32 * 4
    counts.clear()
    t[2:4, :8]
    assert counts.paths == {"step_3.pt", "step_4.pt"}
    assert counts.bytes == 2 * 8 * 32 * 4


@pytest.mark.slow
def test_opening_reads_no_checkpoint_and_one_step_opens_one(tmp_path: Path) -> None:
    saved(tmp_path, tuple(range(1, 301)))
    opened: list[Any] = []  # (mock counts calls of several threads wrongly)

    def opening(path: Any, **options: Any) -> lazyckpt.CheckpointView:
        opened.append(path)
        return lazyckpt.CheckpointView(path, **options)

    with mock.patch("lazyckpt.runs.line.CheckpointView", opening):
        run = lazyckpt.open_run(tmp_path)
        assert len(opened) == 0
        run.at(7)
        assert len(opened) == 1
        assert run["norm.weight"].shape == (300, 32)
        assert len(opened) == 300


def test_a_run_pickles(tmp_path: Path) -> None:
    truth = saved(tmp_path)
    run = pickle.loads(pickle.dumps(lazyckpt.open_run(tmp_path)["layers.0"]))
    assert run.steps == (1, 2, 10)
    assert equal(run["up.bias"], [truth[s]["layers.0.up.bias"] for s in run.steps])
    assert torch.equal(run.at(2)["up.bias"][...], truth[2]["layers.0.up.bias"])
    t = pickle.loads(pickle.dumps(run["up.bias"].lazy[1:]))
    assert t.steps == (2, 10)
    assert equal(t, [truth[s]["layers.0.up.bias"] for s in (2, 10)])


def test_a_run_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    truth = saved(tmp_path / "run")
    run = lazyckpt.open_run(tmp_path / "run")
    with pytest.raises(DestinationError, match="inside of the checkpoint that is read"):
        run["layers"].to_safetensors(tmp_path / "run" / "out")
    run["layers"].to_safetensors(tmp_path / "out")
    view = lazyckpt.open(tmp_path / "out")
    assert equal(view["0.up.bias"], [truth[s]["layers.0.up.bias"] for s in (1, 2, 10)])


def test_a_run_as_xarray(tmp_path: Path) -> None:
    xr = pytest.importorskip("xarray")
    truth = saved(tmp_path)
    torch.save({"model": model(20) | {"layers.0.new": torch.ones(3)}, "step": 20}, tmp_path / "step_20.pt")
    run = lazyckpt.open_run(tmp_path)
    tree = run.to_xarray()
    assert isinstance(tree, xr.DataTree)
    weight = tree["layers/0/up/weight"]
    assert weight.dims == ("step", "d64", "d32")
    assert weight.coords["step"].values.tolist() == [1, 2, 10, 20]
    assert np.array_equal(weight.sel(step=10).values, truth[10]["layers.0.up.weight"].numpy())
    norms = (weight**2).sum(("d64", "d32")) ** 0.5
    assert np.allclose(norms, [w.norm() for w in run["layers.0.up.weight"]])
    assert tree["layers/0/new"].dims == ("step_2", "d3")
    assert tree["layers/0/new"].coords["step_2"].values.tolist() == [20]
    dask = run["layers"].to_xarray(chunks={"step": 1})["0/up/weight"]
    assert dask.data.numblocks[0] == 4
    assert np.array_equal(dask.values, weight.values)


# -- what differs between steps


def test_what_differs_is_told(tmp_path: Path) -> None:
    truth = {step: model(step) for step in (1, 2, 3, 4)}
    del truth[1]["norm.weight"]
    truth[2]["layers.0.up.bias"] = truth[2]["layers.0.up.bias"].half()
    truth[3]["layers.0.up.weight"] = torch.zeros(70, 32)
    truth[4]["new"] = torch.ones(2)
    for step, state in truth.items():
        save_file(state, tmp_path / f"model-step{step}.safetensors")
    run = lazyckpt.open_run(tmp_path)
    assert run.steps == (1, 2, 3, 4)
    assert run["norm.weight"].steps == (2, 3, 4)
    assert equal(run["norm.weight"], [truth[s]["norm.weight"] for s in (2, 3, 4)])
    assert run["new"].shape == (1, 2)
    assert run["layers.0.up.weight"].steps == (1, 2, 4)
    bias = run["layers.0.up.bias"]
    assert bias.dtype == torch.float32
    assert equal(bias, [truth[s]["layers.0.up.bias"].float() for s in run.steps])
    text = "\n".join(run.problems)
    assert "norm.weight: not there at step 1" in text
    assert "new: not there at steps 1, 2, 3" in text
    assert "layers.0.up.weight: the shape is another than [64, 32] at step 3" in text
    assert "layers.0.up.bias: f32 at steps 1, 3, 4, f16 at step 2: read as f32" in text
    assert "count" not in text


def test_dtypes_that_have_nothing_in_common(tmp_path: Path) -> None:
    for step, dtype in ((1, torch.float8_e4m3fn), (2, torch.bfloat16)):
        save_file({"w": torch.ones(4).to(dtype)}, tmp_path / f"step{step}.safetensors")
    run = lazyckpt.open_run(tmp_path)
    assert run["w"].steps == (2,)
    assert "no common dtype" in "\n".join(run.problems)


def test_what_cannot_be_read_is_told_and_the_rest_reads(tmp_path: Path) -> None:
    truth = saved(tmp_path, (1, 2, 3, 4))
    data = (tmp_path / "step_2.pt").read_bytes()
    (tmp_path / "step_2.pt").write_bytes(data[: len(data) // 2])
    (tmp_path / "step_4.pt").write_bytes(b"")
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.1").write_text("x")
    run = lazyckpt.open_run(tmp_path)
    assert run.steps == (1, 3)
    assert equal(run["layers.0.up.bias"], [truth[s]["layers.0.up.bias"] for s in (1, 3)])
    assert [line[:8] for line in run.problems] == ["step 2: ", "step 9: "]
    with pytest.raises(lazyckpt.LazyckptError):
        run.at(2)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no checkpoints"):
        lazyckpt.open_run(tmp_path)
    with pytest.raises(MissingFileError):
        lazyckpt.open_run(tmp_path / "nothing")
    (tmp_path / "step_1.pt").write_bytes(b"nonsense")
    with pytest.raises(FormatError, match="is a file"):
        lazyckpt.open_run(tmp_path / "step_1.pt")
    with pytest.raises(FormatError, match="none of its checkpoints"):
        len(lazyckpt.open_run(tmp_path))


def test_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    state = {"module": {"w": torch.ones(8)}, "global_steps": 1, "dp_world_size": 1}
    (tmp_path / "global_step1").mkdir()
    torch.save(state, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    assert lazyckpt.open_run(tmp_path).steps == (1,)
    torch.save({"model": {"w": torch.ones(2)}, "fp32": {"w": torch.ones(2)}}, tmp_path / "m.pt")
    lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "m.zarr")
    assert (tmp_path / "m.zarr" / "fp32").is_dir()
    for one in ("global_step1", "m.zarr"):  # neither a rank's file nor a state is a checkpoint
        with pytest.raises(FormatError, match="has no checkpoints in it"):
            lazyckpt.open_run(tmp_path / one)


def test_exports_to_zarr_are_steps(tmp_path: Path) -> None:
    truth = saved(tmp_path)
    lazyckpt.open(tmp_path / "step_1.pt").to_zarr(tmp_path / "step_20.zarr")
    lazyckpt.open(tmp_path / "step_2.pt").to_zarr(tmp_path / "step_30.zip")
    shutil.make_archive(str(tmp_path / "step_40"), "zip", tmp_path / "step_20.zarr", "weights/norm")  # no hierarchy
    shutil.make_archive(str(tmp_path / "step_50"), "zip", tmp_path, "step_1.pt")
    run = lazyckpt.open_run(tmp_path)
    assert run.steps == (1, 2, 10, 20, 30)
    assert equal(run["norm.weight"], [truth[step]["norm.weight"] for step in (1, 2, 10, 1, 2)])


def test_a_folder_of_exports_opens_as_its_newest(tmp_path: Path) -> None:
    truth = saved(tmp_path)
    for step in truth:
        lazyckpt.open(tmp_path / f"step_{step}.pt").to_zarr(tmp_path / "run" / f"step-{step}")
        lazyckpt.open(tmp_path / f"step_{step}.pt").to_zarr(tmp_path / "some" / f"{step}.zarr")
    assert lazyckpt.open(tmp_path / "run")["count"].item() == 10
    assert lazyckpt.open(tmp_path / "run", tag="step-2")["count"].item() == 2
    with pytest.raises(FormatError, match=r"holds exports of lazyckpt: .*10\.zarr"):
        lazyckpt.open(tmp_path / "some")


# -- which step a checkpoint is of


def test_steps_by_name_by_meta_and_by_the_user(tmp_path: Path) -> None:
    for name, tree in {
        "last.ckpt": {"state_dict": {"w": torch.tensor([40.0])}, "global_step": 40},
        "epoch=1-step=20.ckpt": {"state_dict": {"w": torch.tensor([20.0])}, "global_step": 20},
        "epoch_3.pt": {"model": {"w": torch.tensor([30.0])}, "step": 30},
        "model_7.pt": {"w": torch.tensor([7.0])},
        "optimizer_7.pt": {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0]}]},
        "final.pt": {"w": torch.tensor([50.0])},
    }.items():
        torch.save(tree, tmp_path / name)
    run = lazyckpt.open_run(tmp_path)
    assert run.steps == (7, 20, 30, 40)
    assert run["w"][:, 0].tolist() == [7, 20, 30, 40]
    (line,) = run.problems
    assert line.startswith("final.pt is left out: nothing tells its step")
    run = lazyckpt.open_run(tmp_path, steps={"final.pt": 50, "none.pt": 1})
    assert run["w"][:, 0].tolist() == [7, 20, 30, 40, 50]
    assert run.problems == ("steps['none.pt']: there is no such checkpoint: it has no effect",)


NAMES = {
    "global_step10": 10, "iter_0000300": 300, "checkpoint-500": 500, "step-7": 7, "epoch=3-step=40.ckpt": 40,
    "dist_epoch_2": 2, "checkpoint_3": 3, "global_step3_universal": 3,
}  # fmt: skip


def test_names_of_folders(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
    for name in (".step_1.abc", "tmp-checkpoint-1", "runs"):
        (tmp_path / name).mkdir()
    assert {f.name: f.number for f in find(LocalStore(tmp_path))} == NAMES


# -- real trainers


@pytest.fixture(scope="session")
def stretches(checkpoints: Checkpoints) -> dict[str, dict[str, Case]]:
    """Stretch -> tag -> the case."""
    return deepspeed_run.load(checkpoints("deepspeed_run"))


@pytest.fixture
def mixed(stretches: dict[str, dict[str, Case]], tmp_path: Path) -> tuple[Path, dict[int, Case]]:
    """ZeRO-2 on two ranks (steps 1 to 3), ZeRO-3 on four (101 to 103) in one folder."""
    cases: dict[int, Case] = {}
    for stretch, ahead in (("zero2", 0), ("zero3", 100)):
        for step in (1, 2, 3):
            case = stretches[stretch][f"global_step{step}"]
            shutil.copytree(case.path / f"global_step{step}", tmp_path / f"global_step{ahead + step}")
            cases[ahead + step] = case
    (tmp_path / "latest").write_text("global_step103")
    return tmp_path, cases


def test_across_stages_ranks_and_formats(mixed: tuple[Path, dict[int, Case]]) -> None:
    folder, cases = mixed
    whole = {step: complete(case).truth for step, case in cases.items()}  # ZeRO-3 holds no "weights"
    last = {name: t.bfloat16() for name, t in whole[103]["fp32"].items()}
    whole[200] = {"weights": last}
    (folder / "export").mkdir()
    save_file({name: t.clone() for name, t in last.items()}, folder / "export" / "model.safetensors")
    (folder / "export" / "config.json").write_text(json.dumps({"architectures": ["Nobody"]}))
    run = lazyckpt.open_run(folder, steps={"export": 200})
    assert run.steps == (1, 2, 3, 101, 102, 103, 200)
    compared = 0
    for name, t in run.items():
        for n, step in enumerate(t.steps):
            table = whole[step]
            truth = table["weights" if "weights" in table else "fp32"][name]
            assert torch.equal(t[n].double(), truth.double()), (name, step)
            compared += step
    assert compared > 1000
    fp32 = run.states["fp32"]
    assert fp32.steps == (1, 2, 3, 101, 102, 103)
    moments = run.states["exp_avg"]
    for name, t in moments.items():
        assert equal(t, [cases[s].truth["exp_avg"][name] for s in t.steps])
        assert t.steps == fp32.steps
    assert any("'fp32' is read there" in line for line in run.problems)
    assert run.at(102).mesh.dp == 4
    with pytest.raises(TensorNotFoundError, match="no state 'exp_avg'"):
        moments.at(200)


def test_a_lost_rank_leaves_its_step_out(mixed: tuple[Path, dict[int, Case]]) -> None:
    folder, cases = mixed
    (lost,) = (folder / "global_step102").glob("*zero_pp_rank_2_*optim_states.pt")
    lost.unlink()
    run = lazyckpt.open_run(folder)
    name = max(run, key=lambda n: run[n].numel())
    t = run[name]
    assert t.steps == (1, 2, 3, 101, 103)
    assert torch.equal(t[-1], cases[103].truth["fp32"][name])
    t[...]
    assert any(line.code == "changed-tensor" and "step 102" in line for line in run.problems)
    assert run.at(102)[name].shape == t.shape[1:]


def test_tags_without_a_step_and_stretches_in_folders(stretches: dict[str, dict[str, Case]], tmp_path: Path) -> None:
    folder = stretches["zero2"]["best"].path  # with latest, and a tag "best" of step 2
    run = lazyckpt.open_run(folder)
    assert run.steps == (1, 2, 3)
    assert run.problems == ("step 2: global_step2 is read; of the same step there is also best",)
    for stretch in ("zero2", "zero3"):
        shutil.copytree(stretches[stretch]["best"].path, tmp_path / stretch)
    run = lazyckpt.open_run(tmp_path)
    assert run.steps == (1, 2, 3)
    assert run.paths[1] == str(tmp_path / "zero2" / "global_step1")


def test_the_trainer(trainer_cases: dict[str, Case]) -> None:
    case = trainer_cases["trainer_llama"]
    older = torch.load(case.path.parent / "older.pt")
    run = lazyckpt.open_run(case.path)
    assert run.steps == (2, 4)
    for state, view in run.states.items():
        for name, t in view.items():
            assert equal(t, [older[state][name], case.truth[state][name]])
    assert run.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert equal(run["lm_head.weight"], [older["weights"]["lm_head.weight"], case.truth["weights"]["lm_head.weight"]])


@pytest.mark.parametrize("path", ["", "model.safetensors"])
def test_a_tag_where_there_are_none_is_an_error(tmp_path: Path, path: str) -> None:
    """Else one would take what is read for another step."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingFileError, match="there is no '5' in it: open it without tag="):
        lazyckpt.open(tmp_path / path, tag="5")
