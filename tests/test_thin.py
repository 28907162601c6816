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
from lazyckpt.errors import CorruptError, DataError, DestinationError
from lazyckpt.io.storage.uploads import FsspecUploads
from lazyckpt.runs import thin

from .servers.fixtures import Cloud

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


def files(folder: Path, truth: Truth) -> None:
    """Single files."""
    for step, tensors in truth.items():
        save_file(tensors, folder / f"step_{step}.safetensors")


def scripts(folder: Path, truth: Truth) -> None:
    """Single files of a script, with optimizers beside them."""
    for step, tensors in truth.items():
        torch.save({"model": tensors, "step": step}, folder / f"model_{step}.pt")
        torch.save({"state": {0: {"exp_avg": torch.rand(64, 96)}}, "param_groups": []}, folder / f"optimizer_{step}.pt")


KINDS: dict[str, Callable[[Path, Truth], None]] = {
    "trainer": trainer, "deepspeed": deepspeed, "zarr": zarr, "files": files, "scripts": scripts
}  # fmt: skip


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
    assert (planned.deleted, len(planned.thinned)) == (False, 2)
    assert [item.name for item in planned.remove] == [
        n for n in ("optimizer_1.pt", "optimizer_2.pt") if folder / n in before
    ]
    done = lazyckpt.prune(folder, 2, thin=True, delete=True)
    assert (done.deleted, done.failed, [one.step for one in done.thinned]) == (True, (), [1, 2])
    assert [one.base for one in done.thinned] == [one.base for one in planned.thinned]
    check(folder, truth)
    now = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert done.nbytes == size - now
    assert len(deltas(folder)) == 2
    assert sorted(p.name for p in folder.glob("optimizer_*")) == (
        ["optimizer_3.pt", "optimizer_4.pt"] if (folder / "model_4.pt").exists() else []
    )
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


def test_files_step_by_step(tmp_path: Path) -> None:
    """A delta over a file is still one when the file has become a delta itself, also when it is pruned."""
    truth = weights(5)
    files(tmp_path, truth)
    for keep in (4, 3, 1):
        done = lazyckpt.prune(tmp_path, keep, thin=True, delete=True)
        assert done.failed == ()
        check(tmp_path, truth)
        assert lazyckpt.verify(tmp_path / "step_1").ok
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(f"step_{n}" for n in range(1, 5)), "step_5.safetensors"]
    assert lazyckpt.open(tmp_path, cache=False).files.keys() == {"step_5.safetensors"}
    (tmp_path / "latest").write_text("step_2")
    done = lazyckpt.prune(tmp_path, 1, delete=True)
    assert [item.name for item in done.remove] == ["step_1"]
    assert {item.name: item.reason for item in done.keep}["step_3"] == "the base of step_2"
    check(tmp_path, {step: tensors for step, tensors in truth.items() if step > 1})


def test_what_stopped_thinning_has_left_goes_with_the_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, weights(2))
    (tmp_path / ".checkpoint-1.thin" / "whole.weights").mkdir(parents=True)
    assert [item.name for item in lazyckpt.prune(tmp_path, 1, delete=True).remove] == ["checkpoint-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_zip_files(tmp_path: Path) -> None:
    truth = weights(3)
    (tmp_path / "run").mkdir()
    for step, tensors in truth.items():
        torch.save(tensors, tmp_path / "one.pt")
        lazyckpt.open(tmp_path / "one.pt", cache=False).to_zarr(tmp_path / f"run/step_{step}.zip", progress=False)
    done = lazyckpt.prune(tmp_path / "run", 1, thin=True, delete=True)
    assert [one.name for one in done.thinned] == ["step_1.zip", "step_2.zip"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step_1", "step_2", "step_3.zip"]
    check(tmp_path / "run", truth)


def test_files_that_are_not_thinned(tmp_path: Path) -> None:
    truth = weights(3)
    files(tmp_path, truth)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "notes.txt").write_text("mine")
    done = lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    assert [one.step for one in done.thinned] == [2] and done.failed == ()
    assert (tmp_path / "step_1.safetensors").exists() and (tmp_path / "step_1" / "notes.txt").exists()
    # moments that one keeps are not in the model's file: the optimizer's stays
    (tmp_path / "other").mkdir()
    scripts(tmp_path / "other", truth)
    done = lazyckpt.prune(tmp_path / "other", 1, thin=("weights", "exp_avg"), delete=True)
    assert len(done.thinned) == 2 and len(list((tmp_path / "other").glob("optimizer_*"))) == 3


def test_a_state_that_no_checkpoint_has(tmp_path: Path) -> None:
    for kind in (trainer, scripts):  # with an optimizer in the folder of the checkpoint, and beside it
        folder = tmp_path / kind.__name__
        folder.mkdir()
        kind(folder, weights(2))
        for delete in (False, True):
            with pytest.raises(DataError, match=r"'wieghts'.*There are .*weights"):
                lazyckpt.prune(folder, 1, thin=("weights", "wieghts"), delete=delete)
        assert deltas(folder) == []


def test_an_optimizer_stays_if_its_model_is_not_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = weights(3)
    scripts(tmp_path, truth)

    def wrong(*args: Any) -> None:
        raise CorruptError("the disk is faulty")

    monkeypatch.setattr(thin, "_verify", wrong)
    done = lazyckpt.prune(tmp_path, 1, thin=True, delete=True)
    assert len(done.failed) == 2 and not done.thinned and not done.remove
    assert len(list(tmp_path.glob("optimizer_*"))) == 3 and not list(tmp_path.glob(".*"))
    check(tmp_path, truth)


def in_memory(folder: Path, name: str) -> str:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)
    memory.put(str(folder), f"/{name}", recursive=True)
    return f"memory://{name}"


def check_remote(url: str, truth: Truth, **options: Any) -> None:
    run = lazyckpt.open_run(url, **options)
    assert run.steps == tuple(truth)
    for name in next(iter(truth.values())):
        assert torch.equal(run[name][...], torch.stack([tensors[name] for tensors in truth.values()])), name


@pytest.mark.parametrize("kind", ["trainer", "files", "scripts", "zarr"])
def test_buckets(tmp_path: Path, kind: str) -> None:
    truth = weights(4)
    (tmp_path / "run").mkdir()
    KINDS[kind](tmp_path / "run", truth)
    url = in_memory(tmp_path / "run", f"thin-{kind}")
    memory = pytest.importorskip("fsspec").filesystem("memory")
    before = memory.du(f"/thin-{kind}")
    planned = lazyckpt.prune(url, 2, thin=True)
    assert memory.du(f"/thin-{kind}") == before and len(planned.thinned) == 2
    done = lazyckpt.prune(url, 2, thin=True, delete=True)
    assert done.failed == () and [one.step for one in done.thinned] == [1, 2]
    assert done.nbytes == before - memory.du(f"/thin-{kind}")
    check_remote(url, truth)
    lazyckpt.prune(url, 1, thin=True, delete=True)
    check_remote(url, truth)
    assert not [path for path in memory.find(f"/thin-{kind}") if "lazyckpt-" in path]
    memory.rm(f"/thin-{kind}", recursive=True)


@pytest.mark.slow
def test_object_stores(tmp_path: Path, cloud: Cloud) -> None:
    truth = weights(3)
    (tmp_path / "run").mkdir()
    files(tmp_path / "run", truth)
    url, options = cloud.put_folder(tmp_path / "run", "thinned"), {"storage_options": cloud.options}
    if url.startswith("http"):
        with pytest.raises(DestinationError, match="only read"):
            lazyckpt.prune(url, 1, thin=True, delete=True, **options)
        return
    done = lazyckpt.prune(url, 1, thin=True, delete=True, **options)
    assert done.failed == () and [one.step for one in done.thinned] == [1, 2]
    check_remote(url, truth, **options)
    assert lazyckpt.open(lazyckpt.open_run(url, **options).paths[1], cache=False, **options).format == "delta"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "scripts"])
def test_a_kill_in_a_bucket(tmp_path: Path, kind: str) -> None:
    truth = weights(2)
    (tmp_path / "run").mkdir()
    KINDS[kind](tmp_path / "run", truth)
    for at in range(1, 100, 4):
        url = in_memory(tmp_path / "run", f"killed-{kind}")
        count = 0
        with pytest.MonkeyPatch.context() as patched:
            for name in ("put", "remove"):
                call = getattr(FsspecUploads, name)

                def counted(*args: Any, call: Callable[..., Any] = call, at: int = at) -> Any:
                    nonlocal count
                    count += 1
                    if count == at:
                        raise Killed
                    return call(*args)

                patched.setattr(FsspecUploads, name, counted)
            try:
                lazyckpt.prune(url, 1, thin=True, delete=True)
                break
            except Killed:
                pass
        check_remote(url, truth)
        lazyckpt.prune(url, 1, thin=True, delete=True)
        check_remote(url, truth)
        memory = pytest.importorskip("fsspec").filesystem("memory")
        left = [path.rpartition("/")[2] for path in memory.find(f"/killed-{kind}")]
        assert not [name for name in left if "lazyckpt-" in name], at
        assert len([name for name in left if "optimizer" in name]) == 1, at
        assert lazyckpt.open(lazyckpt.open_run(url).paths[1], cache=False).format == "delta"
    assert at > 5


def test_an_object_that_is_not_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = weights(2)
    trainer(tmp_path / "run", truth)
    url = in_memory(tmp_path / "run", "wrong")
    put = FsspecUploads.put

    def damaged(self: FsspecUploads, key: str, content: Any) -> int:
        pieces = list(content)
        if "/c/" in key:
            pieces = [bytes(len(pieces[0])), *pieces[1:]]
        return put(self, key, pieces)

    monkeypatch.setattr(FsspecUploads, "put", damaged)
    done = lazyckpt.prune(url, 1, thin=True, delete=True)
    assert len(done.failed) == 1 and "bytes that were sent" in done.failed[0] and not done.thinned
    monkeypatch.undo()
    check_remote(url, truth)
    assert lazyckpt.prune(url, 1, thin=True, delete=True).failed == ()
    check_remote(url, truth)


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

    monkeypatch.setattr(os, "replace", counting(os.replace))
    monkeypatch.setattr(os, "rename", counting(os.rename))
    monkeypatch.setattr(shutil, "rmtree", counting(shutil.rmtree))
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
        assert len(list(folder.rglob("optimizer*.pt"))) == (kind in ("trainer", "scripts")), at
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
