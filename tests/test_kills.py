"""Exports that are killed at any moment, run out of space, or whose source changes: nothing but the whole ever appears,
and the same call goes on where the last one was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lazyckpt
from lazyckpt.distributed import dcp_to_torch_save, save_state_dict
from lazyckpt.errors import ChangedFileError, CorruptError, DestinationError, MissingFileError
from lazyckpt.jobs import executor as job
from lazyckpt.jobs import ledger, pieces, places
from lazyckpt.jobs import publish as staging
from lazyckpt.jobs import write as output
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.publish import discard, unfinished

from . import gguf_models, processes
from .writers import bit_equal

pytestmark = pytest.mark.slow

RUN = 4096  # bytes

# how each writer is called -> (what it is called at, the call)
WRITERS: dict[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "safetensors": ("x.safetensors", lambda view, dest: view.to_safetensors(dest, memory="64MiB")),
    "safetensors shards": ("st", lambda v, dest: v.to_safetensors(dest, max_shard_size="60KB", memory="64MiB")),
    "safetensors beside": ("beside", lambda v, dest: v.to_safetensors(dest, max_shard_size="60KB", memory="64MiB")),
    "torch": ("x.pt", lambda view, dest: view.to_torch(dest, memory="64MiB")),
    "torch shards": ("pt", lambda view, dest: view.to_torch(dest, max_shard_size="60KB", memory="64MiB")),
    "dcp": ("dcp", lambda view, dest: view.to_dcp(dest, memory="64MiB")),
    "universal": ("universal", lambda view, dest: view.to_universal(dest, memory="64MiB")),
    "gguf": ("x.gguf", lambda view, dest: gguf_models.to_gguf(view, dest, dtype="f32", memory="64MiB")),
}
# those that are killed: also a writer of computed tensors
KILLED = WRITERS | {
    "gguf quantized": ("q.gguf", lambda view, dest: gguf_models.to_gguf(view, dest, dtype="q8_0", memory="64MiB")),
}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.w": torch.randn(30 + n, 64 if n % 4 else 60, generator=g) for n in range(40)}
    weights |= {"b": torch.randn(1001, generator=g).bfloat16(), "n": torch.tensor(7), "empty": torch.empty(0, 3)}
    state = {
        n: {kind: torch.randn(t.shape, generator=g) for kind in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(4.0)}
        for n, t in enumerate(weights.values())
        if t.is_floating_point()
    }
    params = list(state)
    path = tmp_path_factory.mktemp("source") / "training.pt"
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": params}]}
    torch.save({"model": weights | {"tied": weights["b"]}, "optimizer": optimizer, "epoch": 3}, path)
    return path


def content(place: Path) -> dict[str, bytes]:
    if place.is_file():
        return {place.name: place.read_bytes()}
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def prepared(folder: Path, name: str) -> Path:
    """The destination, with what stands there before."""
    dest = folder / KILLED[name][0]
    if name == "safetensors beside":
        dest.mkdir()
        (dest / "config.json").write_text("{}")
    return dest


# -- kill -9

_KILLED = """
import itertools, json, os, random, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # the children are forked
import lazyckpt
from lazyckpt.export import dcp, files, universal  # all that import `write_at`
from lazyckpt.jobs import executor as job, ledger, pieces, publish as staging, write as stream
from lazyckpt.jobs.publish import staging_path, unfinished
from tests import test_kills

source, folder, name, kills, seed = sys.argv[1:]
dest, rng = Path(folder) / test_kills.KILLED[name][0], random.Random(seed)
stream.PIECE = pieces.PIECE = stream.RUN = test_kills.RUN
job._TOGETHER = 1
ledger._HELD = 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def counted(module, attribute, calls, log=None):
    # the process dies in the middle of such a call
    real, turns = getattr(module, attribute), itertools.count(1)

    def call(*args, **options):
        turn = next(turns)  # at once, whatever other threads do
        if log is not None:
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            os.write(log, (json.dumps([path, args[2], len(args[1])]) + "\\n").encode())
        if turn == calls:
            if attribute == "write_at":
                real(args[0], args[1][: len(args[1]) // 2], args[2])
            die()
        return real(*args, **options)

    setattr(module, attribute, call)


def export(phase, calls, log):
    counted(stream, "write_at", calls if phase == "run" else -1, log)
    if phase == "rename":
        counted(os, "rename", 1)
        counted(os, "replace", calls)
    elif phase == "ledger":
        counted(ledger.Ledger, "add", calls)
    elif phase == "gone":
        counted(staging.shutil, "rmtree", 1)
    test_kills.KILLED[name][1](lazyckpt.open(source), dest)


def finished():
    # run by run, with what the file's name is
    state = ledger.read_ledger(staging_path(dest) / staging.LEDGER)
    return {(key, at, run.nbytes) for key, file in state.files.items() for at, run in file.runs.items()}


log_path = Path(folder + ".log")
total, before, kept = 0, set(), []
phases = ["run"] * (int(kills) - 2) + ["ledger", "rename"]
for turn, phase in enumerate([*phases, "last"]):
    calls = rng.randint(6, 20) if phase != "rename" else 1 if dest.suffix else rng.randint(1, 3)
    log_path.write_bytes(b"")
    child = os.fork()
    if child == 0:
        try:
            export(phase, calls, os.open(log_path, os.O_WRONLY | os.O_APPEND))
        except BaseException as e:
            print(type(e).__name__, e, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    written = [json.loads(line) for line in log_path.read_text().splitlines()]
    total += sum(nbytes for *_, nbytes in written)
    again = [(path.split("/", 3 + folder.count("/"))[-1], at, nbytes) for path, at, nbytes in written]
    twice = before.intersection(again)
    assert not twice, "what is finished is not written again: " + str(twice)
    if phase == "last":
        assert status == 0, status
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (phase, status)
    visible = sorted(p.name for p in dest.iterdir()) if dest.is_dir() else dest.exists()
    if name == "safetensors beside":
        assert "model.safetensors.index.json" not in visible
        assert phase == "rename" or visible == ["config.json"], (phase, visible)
    else:
        assert not visible, (phase, visible)
    before = finished()
    assert unfinished(dest) == sum(nbytes for *_, nbytes in before)
    kept.append(unfinished(dest))
assert kept == sorted(kept) and unfinished(dest) is None
print(json.dumps({"kept": kept, "written": total}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors in /proc")
@pytest.mark.parametrize("name", KILLED)
def test_resume_after_a_kill_at_any_moment(
    training: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("killed", "whole"):
        (tmp_path / folder).mkdir()
    dest, whole = (prepared(tmp_path / folder, name) for folder in ("killed", "whole"))
    kills = "5" if name == "gguf quantized" else "6"  # (it writes a quarter of the bytes)
    done = processes.run("-c", _KILLED, training, dest.parent, name, kills, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(dest.parent) == [dest.name], "nothing is left behind"

    moved: list[int] = []
    move = stream._move
    monkeypatch.setattr(stream, "_move", lambda path, tensor, *a: moved.append(tensor.nbytes) or move(path, tensor, *a))
    KILLED[name][1](lazyckpt.open(training), whole)
    assert content(dest) == content(whole)
    found = json.loads(done.stdout)
    # each kill loses what four tasks had written at most, and what of the last run the log counts twice
    assert sum(moved) <= found["written"] <= sum(moved) + 6 * 5 * RUN, found
    assert 0 < found["kept"][3] < found["kept"][-1] == sum(moved), "all was written by calls that were killed"
    compared(training, dest, name)


def compared(source: Path, dest: Path, name: str) -> None:
    """What was written against what torch.load reads of the source."""
    truth = torch.load(source, weights_only=True)
    weights = truth["model"]
    view = lazyckpt.open(dest)
    if name.startswith("gguf"):
        gguf_models.compared(view, weights)
        return
    assert set(view) == set(weights) and not view.problems
    for key, tensor in weights.items():
        wanted = tensor.float() if name == "universal" and tensor.is_floating_point() else tensor
        assert bit_equal(view[key][...], wanted), key
    if name in ("dcp", "universal"):
        names = list(weights)
        for n, state in truth["optimizer"]["state"].items():
            for kind in ("exp_avg", "exp_avg_sq"):
                assert bit_equal(view.states[kind][names[n]][...], state[kind]), names[n]


# -- what else may happen to a job


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs, each of which is told of at once."""
    monkeypatch.setattr(stream, "PIECE", RUN)
    monkeypatch.setattr(pieces, "PIECE", RUN)
    monkeypatch.setattr(stream, "RUN", RUN)
    monkeypatch.setattr(job, "_TOGETHER", 1)
    monkeypatch.setattr(ledger, "_HELD", 0)


def after(runs: int, do: Callable[[], Any], patch: pytest.MonkeyPatch) -> list[int]:
    """Something happens when so many runs are written. Returns the bytes of each run, as they are written."""
    moved: list[int] = []
    move = stream._move

    def moving(path: str, tensor: Any, *args: Any) -> Any:
        moved.append(tensor.nbytes)
        if len(moved) == runs:
            do()
        return move(path, tensor, *args)

    patch.setattr(stream, "_move", moving)
    return moved


def fails(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(training: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = prepared(tmp_path, name)
    before = content(dest) if dest.exists() else None
    real, written = os.pwrite, 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 400_000:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    with monkeypatch.context() as patch, pytest.raises(DestinationError, match=r"No space left on device.*call again"):
        patch.setattr(stream.os, "pwrite", pwrite)
        WRITERS[name][1](lazyckpt.open(training), dest)
    assert (content(dest) if dest.exists() else None) == before
    kept = unfinished(dest)
    assert kept
    moved = after(-1, int, monkeypatch)
    WRITERS[name][1](lazyckpt.open(training), dest)
    if name == "safetensors beside":
        (dest / "config.json").unlink()
    compared(training, dest, name)
    again = sum(moved)
    WRITERS[name][1](lazyckpt.open(training), tmp_path / f"other{dest.suffix}")
    assert again + kept == sum(moved) - again and unfinished(dest) is None


def _mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    return (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode
        == 0
    )


@pytest.mark.usefixtures("small")
def test_a_volume_that_is_full(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    if shutil.which("mount") is None or not _mounted(volume, "600k"):
        pytest.skip("this user mounts nothing")
    try:
        view = lazyckpt.open(training)
        taken = volume / "other"
        taken.write_bytes(bytes(1 << 10) * 250)
        with pytest.raises(DestinationError, match=r"bytes are to be written, [\d,]+ are free"):
            view.to_torch(volume / "a" / "x.pt")
        assert os.listdir(volume) == ["other"]
        taken.unlink()
        monkeypatch.setattr(output, "check_room", lambda *_: None)  # somebody else takes the room meanwhile
        after(20, lambda: taken.write_bytes(bytes(1 << 10) * 250), monkeypatch)
        with pytest.raises(DestinationError, match=r"No space left on device.*call again"):
            view.to_safetensors(volume, max_shard_size="60KB")
        assert sorted(os.listdir(volume)) == [".volume.incomplete", "other"], "on the volume itself"
        assert unfinished(volume)
        taken.unlink()
        written = view.to_safetensors(volume, max_shard_size="60KB")
        assert sorted(os.listdir(volume)) == sorted(path.name for path in written)
        compared(training, volume, "safetensors")
        for to in ("to_dcp", "to_universal", "to_zarr"):
            with pytest.raises(DestinationError, match="is a mounted volume"):
                getattr(view, to)(volume, overwrite=True)
    finally:
        subprocess.run(["umount", volume], check=True)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "replaced": lambda path: os.replace(shutil.copy(path, f"{path}.new"), path),
    "truncated": lambda path: os.truncate(path, os.path.getsize(path) // 2),
    "rewritten": lambda path: path.write_bytes(bytes(os.path.getsize(path))),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.usefixtures("small")
@pytest.mark.product
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_source_that_changes(
    training: Path, tmp_path: Path, name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, and after the last of it was read."""
    runs = after(-1, int, monkeypatch)
    WRITERS[name][1](lazyckpt.open(training), tmp_path / f"whole{Path(WRITERS[name][0]).suffix}")
    count = len(runs)
    for when in (count // 2, count):
        folder = tmp_path / str(when)
        folder.mkdir()
        source = Path(shutil.copy(training, tmp_path / f"{when}.pt"))
        dest = prepared(folder, name)
        before = content(dest) if dest.exists() else None
        expected = (ChangedFileError, CorruptError, MissingFileError)
        with monkeypatch.context() as patch, pytest.raises(expected, match=rf"{when}\.pt"):
            after(when, lambda source=source: CHANGES[change](source), patch)  # type: ignore[misc]
            WRITERS[name][1](lazyckpt.open(source), dest)
        assert (content(dest) if dest.exists() else None) == before
        if change != "removed":  # that may come back
            assert unfinished(dest) is None and os.listdir(folder) == ([dest.name] if before else [])
        shutil.copy(training, source)  # another file of the same name and content
        moved = after(-1, int, monkeypatch)
        WRITERS[name][1](lazyckpt.open(source), dest)
        assert len(moved) == count, "of another source nothing is believed"


@pytest.mark.usefixtures("small")
def test_resume_after_a_source_file_was_lost_and_restored(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copy2(training, tmp_path / "in.pt"))
    dest = tmp_path / "x.pt"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        after(40, fails(OSError(5, "Input/output error")), patch)
        lazyckpt.open(source).to_torch(dest)
    kept = unfinished(dest)
    os.rename(source, tmp_path / "away.pt")
    with pytest.raises(MissingFileError):
        lazyckpt.open(source)
    os.rename(tmp_path / "away.pt", source)
    moved = after(-1, int, monkeypatch)
    lazyckpt.open(source).to_torch(dest, verify=True)
    assert kept and sum(moved) == lazyckpt.open(source).nbytes - kept


# -- what is believed


def interrupted(training: Path, dest: Path, runs: int = 60) -> int:
    """Bytes that an export to there has finished, which then failed."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DestinationError, match="call again"):
        after(runs, fails(OSError(5, "Input/output error")), patch)
        write = "to_torch" if dest.suffix == ".pt" else "to_safetensors"
        getattr(lazyckpt.open(training), write)(dest, memory="64MiB")
    found = unfinished(dest)
    assert found
    return found


def gone_on(training: Path, dest: Path, patch: pytest.MonkeyPatch) -> int:
    """Bytes that the next call writes."""
    written = 0
    real = stream.write_at

    def write_at(fd: int, data: Any, offset: int) -> None:
        nonlocal written
        written += len(data)
        real(fd, data, offset)

    with patch.context() as p:
        p.setattr(stream, "write_at", write_at)
        write = "to_torch" if dest.suffix == ".pt" else "to_safetensors"
        getattr(lazyckpt.open(training), write)(dest)
    truth = torch.load(training)["model"]
    found = torch.load(dest) if dest.suffix == ".pt" else load_file(dest)
    assert all(bit_equal(found[key], truth[key]) for key in found) and len(found) >= len(truth) - 1
    if dest.suffix == ".pt":
        assert zipfile.ZipFile(dest).testzip() is None
    assert unfinished(dest) is None and not list(dest.parent.glob(f".{dest.name}*"))
    return written


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_truncated_or_corrupted_ledger(
    training: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = sum(t.nbytes for t in torch.load(training)["model"].values()) - 2002  # the tied one
    for n, spoil in enumerate(
        [lambda b: b[:-5], lambda b: b + b"[0, 1", lambda b: b + b"\0" * 50, lambda b: b[: len(b) // 2]]
    ):
        dest = tmp_path / f"{n}{suffix}"
        interrupted(training, dest)
        path = staging.staging_path(dest) / staging.LEDGER
        path.write_bytes(spoil(path.read_bytes()))
        kept = unfinished(dest)
        assert kept and gone_on(training, dest, monkeypatch) == nbytes - kept


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_that_do_not_match_the_ledger(
    training: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = sum(t.nbytes for t in torch.load(training)["model"].values()) - 2002
    for n, spoil in enumerate([lambda p: os.truncate(p, 5), lambda p: p.unlink(), lambda p: os.truncate(p, 10 << 20)]):
        dest = tmp_path / f"{n}{suffix}"
        interrupted(training, dest)
        (path,) = staging.staging_path(dest).glob(f"*/{dest.name}")
        spoil(path)
        assert gone_on(training, dest, monkeypatch) == nbytes


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_writes_lost_in_a_reboot_are_repeated(
    training: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = sum(t.nbytes for t in torch.load(training)["model"].values()) - 2002
    dest = tmp_path / f"x{suffix}"
    kept = interrupted(training, dest)
    (tmp_path / "boot").write_text("another")
    (path,) = staging.staging_path(dest).glob(f"*/{dest.name}")
    (file,) = ledger.read_ledger(staging.staging_path(dest) / staging.LEDGER).files.values()
    lost = sorted(file.runs)[3:7]
    with path.open("r+b") as opened:
        for offset in lost:
            opened.seek(offset + 100)
            opened.write(bytes(50))
    monkeypatch.setattr(ledger, "_BOOT", tmp_path / "boot")
    assert gone_on(training, dest, monkeypatch) == nbytes - kept + sum(file.runs[offset].nbytes for offset in lost)


def stopped(patch: pytest.MonkeyPatch, where: Any, attribute: str, calls: int, write: Callable[[], Any]) -> None:
    """Such a call of a function ends an export, which keeps what it has."""
    with patch.context() as p:
        real, left = getattr(where, attribute), [calls]

        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(*args, **options)

        p.setattr(where, attribute, call)
        with pytest.raises(KeyboardInterrupt):
            write()


REPLACING: dict[str, Callable[[Any, Path], Any]] = {
    "safetensors": lambda v, dest: v.to_safetensors(dest, max_shard_size="60KB", overwrite=True),
    "torch": lambda v, dest: v.to_torch(dest, max_shard_size="60KB", overwrite=True),
    "dcp": lambda v, dest: v.to_dcp(dest, overwrite=True),
    "universal": lambda v, dest: v.to_universal(dest, overwrite=True),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", REPLACING)
def test_repeated_export_after_all_files_were_published(
    training: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, dest = lazyckpt.open(training), tmp_path / "x"
    write = partial(REPLACING[name], view, dest)
    write()
    whole = content(dest)
    # killed when everything had its name, before the folder that it was made in was gone
    with monkeypatch.context() as patch:
        patch.setattr(staging._Job, "remove", lambda *_, **__: None)
        write()
    assert unfinished(dest) and content(dest) == whole
    stopped(monkeypatch, stream, "_move", 40, write)
    assert content(dest) == whole
    write()
    assert content(dest) == whole
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.usefixtures("small")
def test_kill_while_removing_files_of_another_job(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, dest = lazyckpt.open(training), tmp_path / "x"
    REPLACING["safetensors"](view, dest)
    other = tmp_path / "other.pt"
    torch.save({name: tensor + 1 for name, tensor in torch.load(training)["model"].items()}, other)
    write = partial(REPLACING["safetensors"], lazyckpt.open(other), dest)
    stopped(monkeypatch, os, "replace", 2, write)  # complete, and the first file is about to get its name

    def half(folder: Path) -> None:
        next(folder.glob("*/model-00001-of-*")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging, "_empty", half)
        REPLACING["safetensors"](view, dest)
    write()
    truth = torch.load(other)
    found = lazyckpt.open(dest)
    assert all(bit_equal(found[key][...], truth[key]) for key in truth)


@pytest.mark.usefixtures("small")
def test_reboot_while_files_are_published(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, dest = lazyckpt.open(training), tmp_path / "x"
    write = partial(REPLACING["safetensors"], view, dest)
    write()
    whole = content(dest)
    stopped(monkeypatch, os, "replace", 3, write)  # the index, and the first file
    left = sorted(staging.staging_path(dest).glob("*/*.safetensors"))
    assert len(left) == len(whole) - 2
    with left[0].open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(bytes(50))
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(ledger, "_BOOT", tmp_path / "boot")
    write()
    assert content(dest) == whole


# -- what is left behind


@pytest.mark.usefixtures("small")
def test_unfinished_and_discard(training: Path, tmp_path: Path) -> None:
    dest = tmp_path / "x.pt"
    assert unfinished(dest) is None
    discard(dest)
    interrupted(training, dest)
    discard(str(dest))
    assert unfinished(dest) is None and os.listdir(tmp_path) == []

    interrupted(training, dest)
    kept = interrupted(training, tmp_path / "y.pt")
    view = lazyckpt.open(training)
    view.select("*.w").to_torch(dest)  # another job
    assert unfinished(dest) is None and set(torch.load(dest)) == {name for name in view if name.endswith(".w")}
    assert unfinished(tmp_path / "y.pt") == kept

    for name in ("x.zarr", "x.zip"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(DestinationError, match="call again"):
            patch.setattr(places.Folder, "forget", fails_always)
            view.to_zarr(tmp_path / name, verify=True)
        assert (unfinished(tmp_path / name) or 0) > view.nbytes
        assert unfinished(f"file://{tmp_path / name}") == unfinished(tmp_path / name)
        discard(tmp_path / name)
        assert unfinished(tmp_path / name) is None
    with pytest.raises(DestinationError, match="URL"):
        unfinished("s3://bucket/x.zarr")
    discard(tmp_path / "y.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


def fails_always(*_: Any) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.usefixtures("small")
def test_resume_of_a_single_dcp_file(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazyckpt.open(training).to_dcp(tmp_path / "dcp")
    dest = tmp_path / "x.pt"
    with monkeypatch.context() as patch, pytest.raises(DestinationError, match="call again"):
        after(100, fails(OSError(5, "Input/output error")), patch)
        dcp_to_torch_save(tmp_path / "dcp", dest)
    kept = unfinished(dest)
    moved = after(-1, int, monkeypatch)
    dcp_to_torch_save(tmp_path / "dcp", dest)
    again = sum(moved)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "y.pt")
    assert kept and again + kept == sum(moved) - again
    assert dest.read_bytes().replace(b"x/", b"y/") == (tmp_path / "y.pt").read_bytes().replace(b"x/", b"y/")


@pytest.mark.usefixtures("small")
def test_failed_save_of_tensors_in_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{n}": torch.randn(64, 64) for n in range(8)}
    with monkeypatch.context() as patch, pytest.raises(DestinationError, match="Nothing was written"):
        after(20, fails(OSError(5, "Input/output error")), patch)
        save_state_dict(state, tmp_path / "x.pt", safe_serialization=False)
    assert os.listdir(tmp_path) == []


def test_recovery_after_a_kill_while_replacing_a_folder(training: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(training)
    view.select("b").to_dcp(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / ".out.replaced")
    with pytest.raises(DestinationError, match="exists already"):
        view.to_dcp(tmp_path / "out")
    assert list(lazyckpt.open(tmp_path / "out")) == ["b"]
    shutil.copytree(tmp_path / "out", tmp_path / ".out.replaced")
    view.to_dcp(tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]


# -- where it may not go


@pytest.mark.parametrize("to", ["to_safetensors", "to_torch", "to_dcp", "to_universal", "to_zarr"])
def test_destination_inside_of_the_source_is_refused(training: Path, tmp_path: Path, to: str) -> None:
    lazyckpt.open(training).to_safetensors(tmp_path / "in", max_shard_size="60KB")
    before = content(tmp_path / "in")
    view = lazyckpt.open(tmp_path / "in")
    for dest in (tmp_path / "in", tmp_path / "in" / "deep", tmp_path / "in" / "very" / "deep"):
        with pytest.raises(DestinationError, match=r"is inside of the checkpoint|holds the checkpoint"):
            getattr(view, to)(dest, overwrite=True)
    assert content(tmp_path / "in") == before and os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("to", ["to_safetensors", "to_torch", "to_dcp", "to_universal", "to_zarr"])
def test_destination_link_is_kept(training: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for overwrite in (False, True):
        getattr(lazyckpt.open(training), to)(tmp_path / "link", overwrite=overwrite)
        assert sorted(os.listdir(tmp_path)) == ["link", "nowhere"] and (tmp_path / "link").is_symlink()
        assert "b" in lazyckpt.open(tmp_path / "nowhere")


@pytest.mark.parametrize("to", ["to_safetensors", "to_torch", "to_dcp", "to_universal", "to_zarr"])
def test_invalid_paths(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    write = getattr(lazyckpt.open(training), to)
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    for dest, why in [
        ("", "empty text"),
        ("loop", "Too many levels"),
        ("loop/x", "Too many levels"),
        ("x" * 250, "too long"),
        ("x" * 300, "too long"),
    ]:
        with pytest.raises(DestinationError, match=why):
            write(dest)
        assert os.listdir() == ["loop"]


@pytest.mark.parametrize("to", ["to_safetensors", "to_torch", "to_dcp", "to_universal", "to_zarr"])
def test_paths_with_parents(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    write = getattr(lazyckpt.open(training), to)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    os.symlink(tmp_path / "a" / "b", tmp_path / "c" / "link")
    monkeypatch.chdir(tmp_path / "c")
    write("nothing/../x")
    write("link/../y")
    assert sorted(os.listdir()) == ["link", "x"], "as the system would have it"
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "y"]
    for dest in ("x", "../a/y"):
        assert lazyckpt.open(dest)["b"].shape == (1001,)
