"""Retention: which checkpoints go, which stay, and what a kill or a second process in the middle does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli import app
from lazyckpt.errors import DestinationError, FormatError, MissingFileError

from . import processes

ROOT = Path(__file__).parents[1]


def deepspeed_like(folder: Path, *steps: int, latest: int | None = None) -> None:
    """Tags as DeepSpeed's engine without ZeRO writes them."""
    for step in steps:
        tag = folder / f"global_step{step}"
        tag.mkdir(parents=True)
        state = {"module": {"w": torch.full((8,), float(step))}, "global_steps": step, "dp_world_size": 1}
        torch.save(state, tag / "mp_rank_00_model_states.pt")
    if latest is not None:
        (folder / "latest").write_text(f"global_step{latest}")


def trainer_like(folder: Path, *steps: int, best: int | None = None) -> None:
    """Folders as transformers' Trainer writes them."""
    for step in steps:
        one = folder / f"checkpoint-{step}"
        one.mkdir(parents=True)
        save_file({"w": torch.full((8,), float(step))}, one / "model.safetensors", {"format": "pt"})
        (one / "config.json").write_text("{}")
        state = {"global_step": step, "best_model_checkpoint": None if best is None else f"/old/out/checkpoint-{best}"}
        (one / "trainer_state.json").write_text(json.dumps(state))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def went(done: lazyckpt.Pruned) -> list[str]:
    return [item.name for item in done.remove]


def why(done: lazyckpt.Pruned) -> dict[str, str]:
    return {item.name: item.reason for item in done.keep}


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    deepspeed_like(tmp_path, 1, 2, 10, 20, latest=20)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = lazyckpt.prune(tmp_path, 2)
    assert went(done) == ["global_step1", "global_step2"]
    assert not done.deleted
    assert done.nbytes == sum(p.stat().st_size for n in (1, 2) for p in (tmp_path / f"global_step{n}").iterdir())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_newest_stay_and_what_latest_names(tmp_path: Path) -> None:
    deepspeed_like(tmp_path, 1, 2, 10, 20, latest=2)
    done = lazyckpt.prune(tmp_path, 1, delete=True)
    assert done.deleted
    assert went(done) == ["global_step1", "global_step10"]
    assert names(tmp_path) == {"global_step2", "global_step20", "latest"}
    assert why(done) == {"global_step2": "named by latest", "global_step20": "of the newest 1"}
    assert lazyckpt.open_run(tmp_path)["w"][:, 0].tolist() == [2, 20]
    assert went(lazyckpt.prune(tmp_path, 1, delete=True)) == []


@pytest.mark.parametrize("latest", ["global_step99", "../elsewhere", "", "\0"])
def test_a_latest_that_leads_nowhere_or_is_missing(tmp_path: Path, latest: str) -> None:
    deepspeed_like(tmp_path, 1, 2, 3)
    if latest:
        (tmp_path / "latest").write_text(latest)
    assert went(lazyckpt.prune(tmp_path, 2, delete=True)) == ["global_step1"]


def test_the_best_of_the_trainer_stays(tmp_path: Path) -> None:
    trainer_like(tmp_path, 2, best=2)
    trainer_like(tmp_path, 5, 9, 14, best=5)
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors", {"format": "pt"})
    done = lazyckpt.prune(tmp_path, 1, delete=True)
    assert went(done) == ["checkpoint-2", "checkpoint-9"]
    assert names(tmp_path) == {"checkpoint-5", "checkpoint-14", "model.safetensors"}


def test_megatron_tracker(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        rank = tmp_path / f"iter_{step:07d}" / "mp_rank_00"
        rank.mkdir(parents=True)
        args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        model = {"language_model": {"w": torch.ones(3)}}
        torch.save({"args": args, "model": model, "iteration": step}, rank / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    done = lazyckpt.prune(tmp_path, 1)
    reasons = why(done)
    assert "iter_0000030" in reasons
    assert "still names 30" in reasons["iter_0000040"]  # being written, as far as anybody knows
    assert set(went(done)) <= {"iter_0000010", "iter_0000020"}


def test_what_is_not_complete_stays_unless_it_is_asked_for(tmp_path: Path) -> None:
    trainer_like(tmp_path, 1, 2, 3, 4)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # written last
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "thesis.odt").write_text("no checkpoint")
    done = lazyckpt.prune(tmp_path, 1)
    assert went(done) == ["checkpoint-1"]
    assert all("not complete" in why(done)[f"checkpoint-{n}"] for n in (2, 4, 8, 9))
    assert why(done)["checkpoint-3"] == "of the newest 1"
    done = lazyckpt.prune(tmp_path, 1, delete=True, incomplete=True)
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-8"}


def test_the_only_complete_one_stays(tmp_path: Path) -> None:
    trainer_like(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    assert went(lazyckpt.prune(tmp_path, 1, incomplete=True)) == ["checkpoint-2"]
    for keep in (0, -1):
        with pytest.raises(DestinationError, match="at least one"):
            lazyckpt.prune(tmp_path, keep, delete=True, incomplete=True)


def test_what_is_no_series_of_steps_is_never_touched(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        torch.save({"model": {"w": torch.ones(2)}, "step": step}, tmp_path / f"step_{step}.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optimizer_{step}.pt")
        torch.save({"w": torch.ones(2)}, tmp_path / f"model_{step}.pt")  # perhaps three models
        torch.save({"w": torch.ones(2)}, tmp_path / f"data_{step}.pt")
    trainer_like(tmp_path / "experiment_1", 1)
    trainer_like(tmp_path / "nested", 1, 2, 3)
    torch.save({"w": torch.ones(2), "step": 1}, tmp_path / "best_step_1.pt")
    (tmp_path / "notes_step_1.txt").write_text("mine")
    before = names(tmp_path)
    done = lazyckpt.prune(tmp_path, 1, delete=True)
    assert went(done) == ["optimizer_1.pt", "step_1.pt", "optimizer_2.pt", "step_2.pt"]
    assert names(tmp_path) == before - set(went(done))
    assert len(names(tmp_path / "nested")) == 3


def test_files_of_safetensors(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_file({"w": torch.ones(2)}, tmp_path / f"step_{step}.safetensors")
    assert went(lazyckpt.prune(tmp_path, 1)) == ["step_1.safetensors", "step_2.safetensors"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    trainer_like(elsewhere, 1, 2)
    trainer_like(run, 3, 4, 5, 6)
    (run / "checkpoint-1").symlink_to(elsewhere / "checkpoint-1")
    (run / "best").symlink_to("checkpoint-3")
    (run / "checkpoint-4" / "data").symlink_to(elsewhere)
    done = lazyckpt.prune(run, 1, delete=True)
    assert went(done) == ["checkpoint-4", "checkpoint-5"]
    assert names(run) == {"checkpoint-1", "best", "checkpoint-3", "checkpoint-6"}
    assert why(done)["checkpoint-3"] == "the link best leads to it"
    assert len(lazyckpt.open(elsewhere / "checkpoint-1")) == len(lazyckpt.open(elsewhere / "checkpoint-2")) == 1


def test_nothing_to_prune(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="nothing is removed"):
        lazyckpt.prune(tmp_path, 1, delete=True)
    with pytest.raises(MissingFileError):
        lazyckpt.prune(tmp_path / "nowhere", 1)
    with pytest.raises(DestinationError, match="hf upload"):
        lazyckpt.prune("hf://someone/run", 1)


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_like(tmp_path, 1, 2, 3)
    real = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name == "checkpoint-1":
            raise PermissionError(13, "Permission denied", str(source))
        if source.name == "checkpoint-2":
            shutil.rmtree(source)  # somebody else is faster
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    done = lazyckpt.prune(tmp_path, 1, delete=True)
    assert went(done) == ["checkpoint-2"]
    assert done.failed == ("checkpoint-1: Permission denied",)
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-3"}
    ran = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep", "1", "--delete"])
    assert ran.exit_code == 1


# -- kills, and several processes

DIE = """
import os, shutil, sys
from lazyckpt import prune  # imports torch, which removes files of its own
real = os.unlink
def dying(path, *args, **options):
    real(path, *args, **options)
    os._exit(9)
os.unlink = dying
prune(sys.argv[1], 1, delete=True)
"""
PRUNE = """
import sys, time
import lazyckpt
print("ready", flush=True)
sys.stdin.readline()
print(len(lazyckpt.prune(sys.argv[1], 1, delete=True).remove))
"""


@pytest.mark.slow
def test_a_killed_prune_is_finished_by_the_next(tmp_path: Path) -> None:
    trainer_like(tmp_path, 1, 2, 3, 4)
    died = processes.run("-c", DIE, tmp_path)
    assert died.returncode == 9
    left = [name for name in names(tmp_path) if name.startswith(".checkpoint-")]
    assert len(left) == 3  # all have got hidden names before the first file went
    assert {n for n in names(tmp_path) if not n.startswith(".")} == {"checkpoint-4"}
    assert lazyckpt.open_run(tmp_path).steps == (4,)
    dry = lazyckpt.prune(tmp_path, 1)
    assert sorted(item.name for item in dry.leftovers) == sorted(left)
    assert names(tmp_path) == {"checkpoint-4", *left}
    lazyckpt.prune(tmp_path, 1, delete=True)
    assert names(tmp_path) == {"checkpoint-4"}


@pytest.mark.slow
def test_two_at_once_and_a_reader(tmp_path: Path) -> None:
    trainer_like(tmp_path, *range(1, 41))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PRUNE, str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in started:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    until = time.monotonic() + 120
    while any(one.poll() is None for one in started) and time.monotonic() < until:
        for path in tmp_path.glob("checkpoint-*"):  # a reader finds a whole one, or none
            try:
                assert lazyckpt.open(path, cache=False)["w"][0] == float(path.name.partition("-")[2])
            except (MissingFileError, FormatError):
                assert not path.exists()
    removed = [int(one.communicate()[0]) for one in started]
    assert [one.returncode for one in started] == [0, 0]
    assert sum(removed) == 39
    assert names(tmp_path) == {"checkpoint-40"}


# -- the command


def test_the_command(tmp_path: Path) -> None:
    deepspeed_like(tmp_path, 1, 2, 3, latest=3)
    run = CliRunner()
    dry = run.invoke(app, ["prune", str(tmp_path), "--keep", "1"])
    assert dry.exit_code == 0
    assert "remove  global_step1" in dry.output
    assert "--delete removes them" in dry.output
    assert len(names(tmp_path)) == 4
    done = run.invoke(app, ["prune", str(tmp_path), "--keep", "2", "--delete", "--json"])
    assert done.exit_code == 0
    told = json.loads(done.output)
    assert [item["name"] for item in told["remove"]] == ["global_step1"]
    assert told["deleted"] is True
    assert names(tmp_path) == {"global_step2", "global_step3", "latest"}
    assert "nothing to remove" in run.invoke(app, ["prune", str(tmp_path), "--keep", "2"]).output
    assert run.invoke(app, ["prune", str(tmp_path), "--keep", "0"]).exit_code == 2
    assert run.invoke(app, ["prune", str(tmp_path / "no"), "--keep", "1"]).exit_code == 2
    assert run.invoke(app, ["prune", str(tmp_path)]).exit_code == 2
