"""Exports that several processes share: each does its part, the last one publishes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import DataError, DestinationError
from lazyckpt.export import writer
from lazyckpt.jobs import destination, shares
from lazyckpt.jobs.executor import run

from . import processes

COUNT = 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state = {f"layers.{n}.{kind}": torch.randn(40, 50 + n) for n in range(6) for kind in ("up", "down")}
    torch.save({**state, "step": torch.tensor(7)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRITERS: dict[str, dict[str, Any]] = {
    "to_safetensors": {"max_shard_size": "20KB"},
    "to_torch": {"max_shard_size": "20KB"},
    "to_dcp": {},
    "to_universal": {},
    "to_zarr": {"chunk": "4KB", "codec": "zstd"},
}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_shares_write_what_one_process_writes(source: Path, tmp_path: Path, name: str, order: tuple[int, ...]) -> None:
    view = lazyckpt.open(source)
    whole = getattr(view, name)(tmp_path / "whole", **WRITERS[name])
    out = tmp_path / "out" / "here"
    results = []
    for n in order:
        assert not out.exists()
        results.append(getattr(view, name)(out, share=(n, COUNT), verify=True, **WRITERS[name]))
    assert [bool(result.paths) for result in results] == [False, False, True]
    assert [path.name for path in results[-1].paths] == [
        p.name if p != tmp_path / "whole" else "here" for p in whole.paths
    ]
    assert _files(out) == _files(tmp_path / "whole")
    assert os.listdir(out.parent) == ["here"], "nothing is left beside it"
    if len(whole.paths) > COUNT:  # each wrote a third
        assert max(result.nbytes for result in results) < whole.nbytes / 2


def test_a_complete_share_is_not_done_again(source: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(source)
    first = view.to_safetensors(tmp_path / "out", share=(1, 2), max_shard_size="20KB")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.share-1-of-2").rglob("*")}
    assert len(stamps) > 2
    again = view.to_safetensors(tmp_path / "out", share=(1, 2), max_shard_size="20KB")
    assert again.nbytes == first.nbytes
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.share-1-of-2").rglob("*")}


def test_a_share_of_another_job_is_replaced(source: Path, tmp_path: Path) -> None:
    """As after the source has changed: the first share is of the old one."""
    view = lazyckpt.open(source)
    view.to_safetensors(tmp_path / "out", share=(0, 2), max_shard_size="20KB", dtype=torch.float16)
    view.to_safetensors(tmp_path / "out", share=(1, 2), max_shard_size="20KB")
    assert not (tmp_path / "out").exists(), "the shares are not of the same job"
    view.to_safetensors(tmp_path / "out", share=(0, 2), max_shard_size="20KB")
    assert not lazyckpt.diff(view, tmp_path / "out")


def test_another_number_of_shares_is_refused(source: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(source)
    view.to_safetensors(tmp_path / "out", share=(0, 2), max_shard_size="20KB")
    with pytest.raises(DestinationError, match="other shares"):
        view.to_safetensors(tmp_path / "out", share=(0, 3), max_shard_size="20KB")
    view.to_safetensors(tmp_path / "other", share=(0, 3), max_shard_size="20KB")


@pytest.mark.parametrize("share", [(2, 2), (-1, 2), (0, 0), "1/2", 3, (0,), (0.0, 2), (True, "2")])
def test_invalid_shares(source: Path, tmp_path: Path, share: Any) -> None:
    with pytest.raises(DataError, match="share"):
        lazyckpt.open(source).to_safetensors(tmp_path / "out", share=share)
    assert not (tmp_path / "out").exists()


def test_destinations_that_cannot_be_shared(source: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(source)
    for dest in (tmp_path / "x.zarr.zip", "memory://shares/x.zarr"):
        with pytest.raises(DestinationError, match="shared"):
            view.to_zarr(dest, share=(0, 2))


def test_a_share_anew(source: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(source)
    view.to_safetensors(tmp_path / "out", share=(1, 2), max_shard_size="20KB")
    folder = tmp_path / ".out.share-1-of-2"
    (damaged, *_) = folder.rglob("*.safetensors")
    damaged.write_bytes(b"damaged")
    view.to_safetensors(tmp_path / "out", share=(1, 2), max_shard_size="20KB", resume=False)
    view.to_safetensors(tmp_path / "out", share=(0, 2), max_shard_size="20KB")
    assert not lazyckpt.diff(view, tmp_path / "out")


def test_a_destination_that_appears_meanwhile_is_kept(source: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(source)
    view.to_zarr(tmp_path / "out", share=(0, 2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(DestinationError, match="not empty"):
        view.to_zarr(tmp_path / "out", share=(1, 2))
    assert _files(tmp_path / "out") == {"mine.txt": b"kept"}


def test_more_shares_than_files(source: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(source)
    for n in range(4):
        result = view.to_safetensors(tmp_path / "out", share=(n, 4))  # one file
    assert result.paths and not lazyckpt.diff(view, tmp_path / "out")


def test_work_is_divided_by_bytes() -> None:
    sizes = [5, 100, 1, 1, 90, 3, 0, 60, 60, 2, 2, 76]
    parts = [[size for _, size in shares._mine(enumerate(sizes), shares.Share(n, 4), sum(sizes), 0)] for n in range(4)]
    assert [size for part in parts for size in part] == sizes, "consecutive files, each in one share"
    assert max(map(sum, parts)) <= sum(sizes) / 4 + max(sizes)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", ["take", "publish"])
@pytest.mark.parametrize("name", ["to_safetensors", "to_zarr"])
def test_a_share_that_fails_while_it_finishes(
    source: Path, tmp_path: Path, name: str, at: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that it has moved together are kept, and the next call publishes them."""
    view, out = lazyckpt.open(source), tmp_path / "out"
    getattr(view, name)(out, share=(0, 2), **WRITERS[name])
    calls: list[object] = []
    where = shares.Folder if at == "take" else destination.Files if name == "to_safetensors" else destination.Whole
    do = getattr(where, at)

    def failing(*args: Any) -> None:
        calls.append(args)
        if at == "publish" or len(calls) == 3:
            raise error
        do(*args)

    with monkeypatch.context() as patch, pytest.raises((DestinationError, KeyboardInterrupt)):
        patch.setattr(where, at, failing)
        getattr(view, name)(out, share=(1, 2), **WRITERS[name])
    assert not out.exists()
    assert getattr(view, name)(out, share=(0, 2), **WRITERS[name]).paths
    assert not lazyckpt.diff(view, out) and not list(tmp_path.glob(".*"))


def test_files_of_shares_that_are_gone_are_not_left_out(source: Path, tmp_path: Path) -> None:
    view, out = lazyckpt.open(source), tmp_path / "out"
    view.to_safetensors(out, share=(0, 2), max_shard_size="20KB")
    next((tmp_path / ".out.share-0-of-2").glob("*.safetensors")).unlink()
    with pytest.raises(DestinationError, match="Call every share again"):
        view.to_safetensors(out, share=(1, 2), max_shard_size="20KB")
    assert not out.exists()
    for n in range(2):
        result = view.to_safetensors(out, share=(n, 2), max_shard_size="20KB")
    assert result.paths and not lazyckpt.diff(view, out) and not list(tmp_path.glob(".*"))


def test_shares_that_have_finished_are_not_published_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes find all shares complete. When the second one has the staging directory, the first one has
    published, and has not removed the folders yet."""
    view, out = lazyckpt.open(source), tmp_path / "out"
    view.to_safetensors(out, share=(0, 2), max_shard_size="20KB", overwrite=True)
    published = destination.Files.publish
    done: list[bool] = []

    def again(self: Any, content: Any) -> None:
        published(self, content)
        shares._finish(plan[0], self, 2, False, run)
        done.append(True)

    plan: list[Any] = []
    write_share = shares.write_share
    monkeypatch.setattr(writer, "write_share", lambda p, *a, **k: (plan.append(p), write_share(p, *a, **k))[1])
    monkeypatch.setattr(destination.Files, "publish", again)
    assert view.to_safetensors(out, share=(1, 2), max_shard_size="20KB", overwrite=True).paths
    assert done and not lazyckpt.diff(view, out) and not list(tmp_path.glob(".*"))


def test_unfinished_work_of_another_number_of_shares_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "..out.share-0-of-3.incomplete").mkdir()
    (tmp_path / ".out.share-notes").mkdir()
    view = lazyckpt.open(source)
    with pytest.raises(DestinationError, match="other shares"):
        view.to_safetensors(tmp_path / "out", share=(0, 2), max_shard_size="20KB")
    view.to_safetensors(tmp_path / "out", share=(0, 3), max_shard_size="20KB")


# -- processes


_SHARE = """
import itertools, os, signal, sys
import lazyckpt
from lazyckpt.jobs import executor, ledger

source, out, share, count, most = sys.argv[1:]
if int(most):  # the process is killed when it has written and recorded so many runs
    ledger._HELD, executor._TOGETHER = 0, 1
    add, added = ledger.Ledger.add, itertools.count(1)
    def held(*arguments):
        add(*arguments)
        if next(added) == int(most):
            os.kill(os.getpid(), signal.SIGKILL)
    ledger.Ledger.add = held
result = lazyckpt.open(source).to_safetensors(out, share=(int(share), int(count)), max_shard_size="20KB")
print(len(result.paths))
"""


_AT_ONCE = """
import os, sys, traceback
import lazyckpt

source, out, count = sys.argv[1:]
children = []
for share in range(int(count)):
    if pid := os.fork():
        children.append(pid)
        continue
    code = 1
    try:
        result = lazyckpt.open(source).to_safetensors(out, share=(share, int(count)), max_shard_size="20KB")
        os.write(1, b"%d\\n" % len(result.paths))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def _share(source: Path, out: Path, share: int, count: int, most: int = 0) -> subprocess.CompletedProcess[str]:
    return processes.run("-c", _SHARE, *map(str, (source, out, share, count, most)))


@pytest.mark.slow
def test_shares_at_the_same_time(source: Path, tmp_path: Path) -> None:
    """Exactly one publishes, or a share that was done sees that another one has."""
    for turn in range(3):
        out = tmp_path / f"out{turn}"
        done = processes.run("-c", _AT_ONCE, source, out, "4")
        assert done.returncode == 0, done.stderr
        found = [int(line) for line in done.stdout.split()]
        assert len(found) == 4 and any(found)
        assert not lazyckpt.diff(source, out)
        assert not list(tmp_path.glob(f".out{turn}.*"))


@pytest.mark.slow
def test_a_killed_share_is_called_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _share(source, out, 0, 2, 2).returncode == -signal.SIGKILL
    assert list(tmp_path.glob("..out.share-0-of-2.incomplete/*/*.safetensors"))
    assert _share(source, out, 1, 2).stdout == "0\n", "a share is missing"
    assert not out.exists()
    assert int(_share(source, out, 0, 2).stdout) > 2
    assert not lazyckpt.diff(source, out) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("stop", ["before", "half"])
def test_a_share_that_is_killed_while_it_finishes(
    source: Path, tmp_path: Path, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of some shares are moved already; any share that is called again finishes."""
    view, out = lazyckpt.open(source), tmp_path / "out"
    view.to_safetensors(out, share=(0, 2), max_shard_size="20KB")
    pid = os.fork()
    if not pid:
        taken = []
        take = shares.Folder.take

        def stopping(self: Any, other: Any, key: str) -> None:
            if len(taken) == (0 if stop == "before" else 3):
                os._exit(9)
            taken.append(key)
            take(self, other, key)

        shares.Folder.take = stopping  # type: ignore[method-assign]
        try:
            lazyckpt.open(source).to_safetensors(out, share=(1, 2), max_shard_size="20KB")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not out.exists()
    assert view.to_safetensors(out, share=(0, 2), max_shard_size="20KB").paths
    assert not lazyckpt.diff(view, out) and not list(tmp_path.glob(".*"))
