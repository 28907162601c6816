"""Thinning of a run: what becomes a delta, what stays, and that every step is readable whenever it is stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli import app
from lazyckpt.errors import DestinationError
from lazyckpt.runs import thin

Truth = dict[int, dict[str, torch.Tensor]]


def weights(steps: int) -> Truth:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator)
    found = {}
    for step in range(1, steps + 1):
        weight = weight + torch.randn(64, 96, generator=generator) * 1e-3
        found[step] = {"layer.w": weight.bfloat16(), "norm": torch.ones(30), "bias": torch.full((5,), float(step))}
    return found


def trainer(folder: Path, truth: Truth) -> None:
    """Folders as transformers' Trainer writes them, with an optimizer."""
    for step, tensors in truth.items():
        one = folder / f"checkpoint-{step}"
        one.mkdir(parents=True)
        save_file(tensors, one / "model.safetensors", {"format": "pt"})
        state = {
            n: {"step": torch.tensor(1.0), "exp_avg": torch.rand(t.shape), "exp_avg_sq": torch.rand(t.shape)}
            for n, t in enumerate(tensors.values())
        }
        torch.save({"state": state, "param_groups": [{"lr": 1e-3, "params": list(state)}]}, one / "optimizer.pt")
        (one / "config.json").write_text('{"model_type": "llama"}')
        (one / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def deepspeed(folder: Path, truth: Truth) -> None:
    for step, tensors in truth.items():
        tag = folder / f"global_step{step}"
        tag.mkdir(parents=True)
        torch.save({"module": tensors, "global_steps": step, "dp_world_size": 1}, tag / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(f"global_step{max(truth)}")


def zarr(folder: Path, truth: Truth) -> None:
    for step, tensors in truth.items():
        torch.save(tensors, folder.parent / "one.pt")
        lazyckpt.open(folder.parent / "one.pt", cache=False).to_zarr(folder / f"step-{step}", progress=False)


KINDS: dict[str, Callable[[Path, Truth], None]] = {"trainer": trainer, "deepspeed": deepspeed, "zarr": zarr}


def check(folder: Path, truth: Truth) -> None:
    """All steps of the run are there, bit for bit, also each by itself."""
    run = lazyckpt.open_run(folder)
    assert run.steps == tuple(truth)
    for name in next(iter(truth.values())):
        assert torch.equal(run[name][...], torch.stack([tensors[name] for tensors in truth.values()])), name
    for step, tensors in truth.items():
        view = lazyckpt.open(run.paths[step], cache=False)
        assert set(view) == set(tensors)
        assert all(torch.equal(view[name][...], tensor) for name, tensor in tensors.items())


def deltas(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and lazyckpt.open(p, cache=False).format == "delta")


@pytest.fixture(params=sorted(KINDS))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Truth]:
    folder, truth = tmp_path / "run", weights(4)
    folder.mkdir()
    KINDS[request.param](folder, truth)
    return folder, truth


def test_the_older_steps_become_deltas(run: tuple[Path, Truth]) -> None:
    folder, truth = run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    planned = lazyckpt.prune(folder, 2, thin=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert (planned.deleted, planned.remove, len(planned.thinned)) == (False, (), 2)
    done = lazyckpt.prune(folder, 2, thin=True, delete=True)
    assert (done.deleted, done.failed, [one.step for one in done.thinned]) == (True, (), [1, 2])
    assert [one.base for one in done.thinned] == [one.base for one in planned.thinned]
    check(folder, truth)
    now = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert done.nbytes == size - now
    assert len(deltas(folder)) == 2
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    # again: nothing is left to do; and later, when there is one more whole step to thin
    assert lazyckpt.prune(folder, 2, thin=True, delete=True).thinned == ()
    again = lazyckpt.prune(folder, 1, thin=True, delete=True)
    assert [one.step for one in again.thinned] == [3]
    check(folder, truth)


def test_what_stays_of_a_trainers_folder(tmp_path: Path) -> None:
    truth = weights(3)
    trainer(tmp_path, truth)
    done = lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    assert all({"exp_avg", "exp_avg_sq"} <= set(one.dropped) for one in done.thinned)
    one = tmp_path / "checkpoint-1"
    assert (one / "config.json").exists()
    assert (one / "trainer_state.json").exists()
    assert not (one / "optimizer.pt").exists()
    assert list(lazyckpt.open(one).states) == ["weights"]
    assert lazyckpt.verify(one).ok
    assert "exp_avg" in lazyckpt.open(tmp_path / "checkpoint-3").states
    sizes = [
        sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) for folder in (one, tmp_path / "checkpoint-3")
    ]
    assert sizes[0] < 0.25 * sizes[1]


def test_pruning_keeps_the_bases_of_what_stays(tmp_path: Path) -> None:
    truth = weights(5)
    trainer(tmp_path, truth)
    lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    state = {"global_step": 5, "best_model_checkpoint": "/old/checkpoint-2"}
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text(json.dumps(state))
    done = lazyckpt.prune(tmp_path, 1, delete=True)
    assert [item.name for item in done.remove] == ["checkpoint-1"]
    why = {item.name: item.reason for item in done.keep}
    assert why["checkpoint-3"] == "the base of checkpoint-2"
    assert why["checkpoint-4"] == "the base of checkpoint-3"
    check(tmp_path, {step: tensors for step, tensors in truth.items() if step > 1})


def test_a_base_keeps_the_states_that_deltas_need(tmp_path: Path) -> None:
    truth = weights(3)
    trainer(tmp_path, truth)
    lazyckpt.prune(tmp_path, 2, thin=("weights", "exp_avg"), delete=True)
    assert list(lazyckpt.open(tmp_path / "checkpoint-1").states) == ["weights", "exp_avg"]
    moment = lazyckpt.open(tmp_path / "checkpoint-1").states["exp_avg"]["layer.w"][...]
    done = lazyckpt.prune(tmp_path, 1, thin=("weights",), delete=True)
    needed = lazyckpt.open(tmp_path / "checkpoint-1").states["exp_avg"]
    assert torch.equal(needed["layer.w"][...], moment)
    assert done.failed == ()
    check(tmp_path, truth)


def test_long_chains_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.runs.prune.CHAIN", 2)
    truth = weights(6)
    deepspeed(tmp_path, truth)
    done = lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    assert [bool(one.base) for one in done.thinned] == [True, True, False, True, True]
    check(tmp_path, truth)


def test_files_and_buckets_are_not_thinned(tmp_path: Path) -> None:
    for step, tensors in weights(3).items():
        save_file(tensors, tmp_path / f"step_{step}.safetensors")
    done = lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    assert (done.thinned, done.remove) == ((), ())
    assert {item.reason for item in done.keep[:2]} == {"a single file: only folders are thinned"}
    with pytest.raises(DestinationError, match="folder on a disk"):
        lazyckpt.prune("memory://run", 1, thin=True)


def test_a_thinned_run_in_a_bucket(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    truth = weights(4)
    trainer(tmp_path / "run", truth)
    lazyckpt.prune(tmp_path / "run", 2, thin=True, delete=True)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "run"), "/thinned-run", recursive=True)
    try:
        run = lazyckpt.open_run("memory://thinned-run")
        assert run.steps == (1, 2, 3, 4)
        assert torch.equal(run["layer.w"][...], torch.stack([one["layer.w"] for one in truth.values()]))
        view = lazyckpt.open("memory://thinned-run/checkpoint-1")
        assert torch.equal(view["layer.w"][3:9], truth[1]["layer.w"][3:9])
        done = lazyckpt.prune("memory://thinned-run", 3)
        assert [item.name for item in done.remove] == ["checkpoint-1"]
    finally:
        memory.rm("/thinned-run", recursive=True)


def test_a_delta_that_is_not_right_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = weights(2)
    trainer(tmp_path, truth)
    write = lazyckpt.Delta.write

    def damaged(self: lazyckpt.Delta, dest: Any, **options: Any) -> Any:
        result = write(self, dest, **options)
        chunk = next(p for p in (Path(dest) / "xor.weights" / "layer" / "w" / "c").rglob("*") if p.is_file())
        data = bytearray(chunk.read_bytes())
        data[200] ^= 1
        chunk.write_bytes(data)
        return result

    monkeypatch.setattr(lazyckpt.Delta, "write", damaged)
    done = lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    assert done.thinned == ()
    assert len(done.failed) == 1
    assert deltas(tmp_path) == []
    assert not list(tmp_path.glob(".*"))
    check(tmp_path, truth)


class Killed(BaseException):
    """The process ends here."""


def stops(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[int]:
    """Let the call number ``at`` that changes something end the process, before it does anything."""
    count = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            return call(*args, **options)

        return counted

    monkeypatch.setattr(thin.os, "replace", counting(os.replace))
    monkeypatch.setattr(thin.shutil, "rmtree", counting(shutil.rmtree))
    for name in ("unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, counting(getattr(Path, name)))
    monkeypatch.setattr(thin, "_verify", counting(thin._verify))
    yield count


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kill_at_any_point(tmp_path: Path, kind: str) -> None:
    truth = weights(2)
    template = tmp_path / "template"
    template.mkdir()
    KINDS[kind](template, truth)
    for at in range(1, 200, 1 if kind == "trainer" else 3):
        folder = tmp_path / str(at)
        shutil.copytree(template, folder)
        with pytest.MonkeyPatch.context() as patched:
            next(stops(patched, at))
            try:
                lazyckpt.prune(folder, 1, thin=True, delete=True)
                break
            except Killed:
                pass
        check(folder, truth)
        lazyckpt.prune(folder, 1, thin=True, delete=True)
        check(folder, truth)
        assert len(deltas(folder)) == 1
        assert not [p.name for p in folder.rglob("*") if p.name.startswith(".")], at
        assert len(list(folder.rglob("optimizer.pt"))) == (kind == "trainer"), at
        shutil.rmtree(folder)
    assert at > 10


def test_the_command(tmp_path: Path) -> None:
    truth = weights(3)
    trainer(tmp_path, truth)
    runner = CliRunner()
    planned = runner.invoke(app, ["prune", str(tmp_path), "--keep", "1", "--thin"])
    assert planned.exit_code == 0
    assert "checkpoint-1" in planned.output
    assert deltas(tmp_path) == []
    done = runner.invoke(
        app, ["prune", str(tmp_path), "--keep", "1", "--thin", "--state", "weights", "--delete", "--json"]
    )
    assert done.exit_code == 0
    assert [one["name"] for one in json.loads(done.output)["thinned"]] == ["checkpoint-1", "checkpoint-2"]
    check(tmp_path, truth)


def test_buckets_are_refused_before_anything_is_requested() -> None:
    for delete in (False, True):
        with pytest.raises(DestinationError, match=r"folder on a disk.*lazyckpt\.delta"):
            lazyckpt.prune("s3://nowhere/run", keep=1, thin=True, delete=delete)
    told = CliRunner().invoke(app, ["prune", "s3://nowhere/run", "--keep", "1", "--thin"])
    assert told.exit_code == 2 and "disk" in told.output
