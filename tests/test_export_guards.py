"""What an export or a prune finds is not trusted: finished ranks are compared, and a folder may have been replaced."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.errors import DestinationError
from lazyckpt.io import system
from lazyckpt.jobs import executor, places, publish, write

from . import processes
from .writers import bit_equal


def convert(*args: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["convert", *map(str, args)])


def damage(path: Path) -> None:
    """Other bytes in a file that looks as it did: the same size and times."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def second_rank_fails(patch: pytest.MonkeyPatch, runs: int) -> list[str]:
    """Let the file of the second rank fail when ``runs`` runs of the first are written; the files of all runs."""
    moved: list[str] = []
    real = write._move

    def move(target: Any, *args: Any) -> Any:
        if "mp_rank_01" in target.key:
            while len(moved) < runs:
                time.sleep(0.001)
            raise OSError(28, "No space left on device")
        done = real(target, *args)
        moved.append(target.key)
        return done

    patch.setattr(write, "_move", move)
    patch.setattr(executor, "_TOGETHER", 1)
    return moved


def runs_moved(patch: pytest.MonkeyPatch) -> list[str]:
    """The files of all runs that are written from now on."""
    moved: list[str] = []
    real = write._move
    patch.setattr(write, "_move", lambda target, *args: (moved.append(target.key), real(target, *args))[1])
    return moved


@pytest.mark.parametrize("what", ["bytes", "cut", "gone", "more", "ledger"])
def test_a_finished_rank_that_was_damaged_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    names = [f"layers.{n}.self_attn.{p}_proj.weight" for n in range(2) for p in "qkvo"]
    g = torch.Generator().manual_seed(0)
    (tmp_path / "model").mkdir()
    save_file({name: torch.randn(16, 16, generator=g) for name in names}, tmp_path / "model/model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    job = (tmp_path / "model", tmp_path / "out", "--to", "safetensors", "--tp", "2", "-q")
    with monkeypatch.context() as patch:
        second_rank_fails(patch, len(names))
        assert convert(*job).exit_code == 3
    (done,) = tmp_path.rglob("mp_rank_00/model.safetensors")
    good = done.read_bytes()
    if what == "bytes":
        damage(done)
    elif what == "cut":
        done.write_bytes(good[:-1])
    elif what == "gone":
        done.unlink()
    elif what == "more":
        (done.parent / "model-00001-of-00001.safetensors").write_bytes(good)
    else:
        (ledger,) = tmp_path.rglob(".lazyckpt-ledger")
        ledger.write_bytes(b"[[[")
    moved = runs_moved(monkeypatch)
    again = convert(*job)
    assert again.exit_code == 0, again.output
    count = {"bytes": 1, "more": 0}.get(what, len(names))
    assert [key.partition("/")[0] for key in moved].count("mp_rank_00") == count
    view = lazyckpt.open(tmp_path / "model")
    for tp in range(2):
        folder = tmp_path / "out" / f"mp_rank_{tp:02d}"
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        found = load_file(folder / "model.safetensors")
        wanted = view.shard(tp=2, rank=tp)
        assert found.keys() == set(wanted)
        assert all(bit_equal(found[name], wanted[name][...]) for name in wanted)
    assert (tmp_path / "out/mp_rank_00/model.safetensors").read_bytes() == good


def test_finished_ranks_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, tmp_path / "m.pt")
    job = (tmp_path / "m.pt", tmp_path / "out", "--to", "torch", "--tp", "2", "-q")
    with monkeypatch.context() as patch:
        second_rank_fails(patch, 1)
        assert convert(*job).exit_code == 3
    moved = runs_moved(monkeypatch)
    assert convert(*job).exit_code == 0 and moved == ["mp_rank_01/pytorch_model.bin"]
    assert sorted(path.name for path in (tmp_path / "out/mp_rank_00").iterdir()) == ["pytorch_model.bin"]


# -- prune


def run_of(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": torch.full((8,), float(step))}, folder / f"checkpoint-{step}/model.safetensors")
        (folder / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps({"global_step": step}))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.skipif(system.PORTABLE, reason="a path is checked, not held")
@pytest.mark.parametrize("when", ["looking", "hiding", "removing"])
def test_prune_stays_inside_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Somebody makes the folder's path a link to another run while it is pruned: that one keeps all that it has."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    run_of(run, 1, 2, 3)
    run_of(victim, 1, 2, 3)
    if when == "removing":  # all that has a hidden name, too
        (victim / ".checkpoint-1.01234567.pruned").mkdir()
        (run / ".checkpoint-1.01234567.pruned").mkdir()
        for folder in (victim, run):
            (folder / ".checkpoint-1.01234567.pruned" / "model.safetensors").write_bytes(b"x")
    before = names(victim)
    real_rename, real_rmtree, real_lstat = os.rename, shutil.rmtree, Path.lstat
    swapped: list[int] = []

    def swap() -> None:
        if not swapped:
            swapped.append(1)
            real_rename(run, tmp_path / "moved")
            run.symlink_to(victim)

    def rename(*args: Any, **options: Any) -> None:
        real_rename(*args, **options)
        if when == "hiding":
            swap()

    def rmtree(*args: Any, **options: Any) -> None:
        if when == "removing":
            swap()
        real_rmtree(*args, **options)

    def lstat(self: Path) -> os.stat_result:
        if when == "looking" and "checkpoint-2" in str(self):
            swap()
        return real_lstat(self)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    if when != "removing":
        with pytest.raises(DestinationError, match="replaced"):
            lazyckpt.prune(run, 1, delete=True)
    else:
        lazyckpt.prune(run, 1, delete=True)
    assert swapped
    assert names(victim) == before


def test_prune_removes_links_but_not_their_targets(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run_of(run, 1, 2, 3)
    run_of(other, 9)
    (run / "checkpoint-1/deep").mkdir()
    (run / "checkpoint-1/deep/up").symlink_to(tmp_path)
    (run / "checkpoint-1/deep/here").symlink_to(run)
    (run / "checkpoint-1/file.json").symlink_to(other / "checkpoint-9/trainer_state.json")
    (run / "checkpoint-2/kept").symlink_to(run / "checkpoint-3")
    (run / ".checkpoint-0.01234567.pruned").symlink_to(other)
    before = names(other)
    done = lazyckpt.prune(run, 1, delete=True)
    assert [item.name for item in done.remove] == ["checkpoint-1", "checkpoint-2"] and not done.failed
    assert names(other) == before and (run / "checkpoint-3/model.safetensors").exists()
    assert (run / ".checkpoint-0.01234567.pruned").is_symlink()


# -- what is written, and not loaded


def test_command_reports_states_that_zero_3_does_not_load(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    kinds = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    state = {n: {kind: torch.ones_like(t) for kind in kinds} for n, t in enumerate(weights.values())}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "m.pt")
    told = convert(tmp_path / "m.pt", tmp_path / "u", "--to", "universal").output
    (line,) = (line for line in told.splitlines() if "max_exp_avg_sq:" in line and "ZeRO-3" in line)
    assert "left out" not in line and "does not load" in line
    assert (tmp_path / "u/zero/a/max_exp_avg_sq.pt").exists()
    as_json = convert(tmp_path / "m.pt", tmp_path / "v", "--to", "universal", "--json")
    result = json.loads(as_json.stdout)["result"]
    assert result["left_out"] == {} and list(result["not_loaded"]) == ["max_exp_avg_sq"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", ["os.chmod", "publish.rename_directory", "os.unlink", "places.rename_directory"])
def test_ctrl_c_while_the_result_is_published_loses_nothing(tmp_path: Path, call: str, after: bool) -> None:
    """Whichever call it interrupts: the result is there, or the next call goes on."""
    torch.save({f"l.{n}": torch.full((3,), float(n)) for n in range(5)}, tmp_path / "x.pt")
    view, out = lazyckpt.open(tmp_path / "x.pt"), tmp_path / "out.zarr"
    view.to_zarr(out)
    module, name = call.split(".")
    target = {"os": os, "publish": publish, "places": places}[module]
    real = getattr(target, name)
    calls: list[object] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        mine = name != "unlink" or str(arguments[0]).startswith(str(out))
        if mine and not after:
            raise KeyboardInterrupt
        result = real(*arguments, **options)
        if mine:
            raise KeyboardInterrupt
        return result

    with mock.patch.object(target, name, interrupted), suppress(KeyboardInterrupt):
        view.to_zarr(out, overwrite=True)
    assert calls
    there = publish.unfinished(out)
    assert out.exists() or there
    if there:
        view.to_zarr(out, overwrite=True)
    assert lazyckpt.diff(view, out).equal
    view.to_zarr(out, overwrite=True)  # the hidden files of the job, if they are left, are no foreign files
    assert sorted(path.name for path in out.iterdir()) == ["weights", "zarr.json"]
    assert lazyckpt.diff(view, out).equal


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_a_process_that_dies_when_the_folder_gets_its_permissions(tmp_path: Path) -> None:
    """With a umask that lets the group write, a staging folder with the usual mode would be refused the next time."""
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    code = (
        "import os, sys, lazyckpt; os.umask(0o002); real = os.chmod\n"
        "os.chmod = lambda *a, **k: (real(*a, **k), os._exit(9))\n"
        "lazyckpt.open(sys.argv[1]).to_zarr(sys.argv[2])"
    )
    out = tmp_path / "out.zarr"
    done = processes.run("-c", code, tmp_path / "x.pt", out)
    assert done.returncode == 9
    view, before = lazyckpt.open(tmp_path / "x.pt"), os.umask(0o002)
    try:
        view.to_zarr(out, overwrite=True)
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o775 and lazyckpt.diff(view, out).equal
