"""Long jobs: on threads, processes and a cluster; what becomes of them when workers or the whole process are killed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lazyckpt
from lazyckpt.errors import DataError, DestinationError, WorkerError
from lazyckpt.io import system
from lazyckpt.jobs import executor as job
from lazyckpt.jobs.batching import Task
from lazyckpt.jobs.executor import run
from lazyckpt.jobs.places import Folder, Sized

from . import processes
from .conftest import need
from .holding import files_held
from .writers import bit_equal

# -- reserved blocks


def _blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.skipif(sys.platform != "linux" or system.PORTABLE, reason="reserves blocks on Linux only")
def test_blocks_are_reserved_and_content_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"lazy")
    with open(path, "r+b") as file:
        system.preallocate(file.fileno(), 4 << 20)
        assert path.stat().st_size == 4 << 20
        assert file.read(8) == b"lazy\0\0\0\0"
        if _blocks(path) < 4 << 20:
            pytest.skip("this file system reserves no blocks")


@pytest.mark.skipif(sys.platform != "linux" or system.PORTABLE, reason="reserves blocks on Linux only")
def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file, pytest.raises(OSError):
        system.preallocate(file.fileno(), 1 << 62)


def test_files_that_have_no_blocks_are_left_alone() -> None:
    read, write = os.pipe()
    try:
        system.preallocate(write, 4 << 20)
    finally:
        os.close(read)
        os.close(write)


def test_room_that_a_file_does_not_need_is_returned(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    size = folder.put("a/b", Sized([b"x" * 100, b"y" * 50], 8 << 20))
    assert size == 150 and (tmp_path / "a/b").read_bytes() == b"x" * 100 + b"y" * 50
    assert _blocks(tmp_path / "a/b") <= 1 << 16


# -- the engine


def _nothing(task: Task, result: Any) -> None: ...


def _square(n: int) -> int:
    return n * n


def _fails(n: int) -> None:
    raise ValueError(f"task {n}")


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor(3)], ids=["own", "threads"])
def test_results_come_with_their_tasks(executor: Executor | None) -> None:
    found: dict[int, int] = {}
    tasks = [Task(n << 16, n, partial(_square, n)) for n in range(500)]
    run(iter(tasks), lambda task, result: found.update({task.memory: result}), executor)
    assert found == {n: n * n for n in range(500)}


def test_memory_limits_tasks_in_flight() -> None:
    lock, held, most, alone = threading.Lock(), 0, 0, 0

    def work(memory: int) -> None:
        nonlocal held, most, alone
        with lock:
            held += memory
            most = max(most, held)
            alone = max(alone, held if memory == 500 else 0)
        time.sleep(0.002)
        with lock:
            held -= memory

    sizes = [10, 30, 50, 500, 20, 40] * 8
    run((Task(64 << 20, m, partial(work, m)) for m in sizes), _nothing, ThreadPoolExecutor(8), memory=100)
    assert most == 500 and alone == 500  # what is larger than the limit runs by itself
    most = 0
    run((Task(64 << 20, m, partial(work, m)) for m in sizes if m < 100), _nothing, ThreadPoolExecutor(8), memory=100)
    assert 50 < most <= 100


def test_tasks_are_consumed_lazily() -> None:
    done = made = ahead = 0

    def tasks() -> Any:
        nonlocal made, ahead
        for _ in range(2000):
            made += 1
            ahead = max(ahead, made - done)
            yield Task(64 << 20, 1 << 20, partial(_square, 1))

    def count(task: Task, result: Any) -> None:
        nonlocal done
        done += 1

    run(tasks(), count, memory=20 << 20)
    assert done == made == 2000 and ahead <= 22


def test_first_error_cancels_tasks_that_have_not_started() -> None:
    ran = []
    work: list[Callable[[], Any]] = [*(partial(ran.append, n) for n in range(3)), partial(_fails, 3)]
    later: list[int] = []

    def wait(number: int) -> None:
        later.append(number)
        time.sleep(0.01)

    work += [partial(wait, n) for n in range(500)]
    with pytest.raises(ValueError, match="task 3"):
        run([Task(64 << 20, 1, do) for do in work], _nothing, ThreadPoolExecutor(2))
    assert len(ran) == 3 and len(later) < 250


def test_error_in_the_iterable_waits_for_running_tasks() -> None:
    started, finished = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        time.sleep(0.1)
        finished.set()

    def tasks() -> Any:
        yield Task(64 << 20, 1, slow)
        started.wait()
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        run(tasks(), _nothing)
    assert finished.is_set()


def test_an_executor_that_is_shut_down() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(WorkerError, match="does not take work"):
        run([Task(1, 1, partial(_square, 1))], _nothing, executor)


# -- processes and a cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    state = {f"layers.{n}.w": torch.randn(256, 128 + n, generator=g) for n in range(8)}
    state |= {"b": torch.randn(1000, generator=g).bfloat16(), "step": torch.tensor(7)}
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(state | {"tied": state["b"]}, path)
    return path, state


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class _Watched(Executor):
    """Counts the bytes that are sent to the workers."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.sent, self.calls = executor, 0, 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sent += len(pickle.dumps((fn, args, kwargs)))
        self.calls += 1
        return self.executor.submit(fn, *args, **kwargs)


@pytest.mark.slow
def test_processes(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = model
    view = lazyckpt.open(path)
    view.to_zarr(tmp_path / "want.zarr", chunk="16KB", codec="zstd")
    view.to_torch(tmp_path / "want.pt")
    monkeypatch.setattr(job, "_TOGETHER", 8)
    with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
        watched = _Watched(executor)
        view.to_zarr(tmp_path / "out.zarr", chunk="16KB", codec="zstd", executor=watched, verify=True)
        assert _content(tmp_path / "out.zarr") == _content(tmp_path / "want.zarr")
        (file,) = view.to_safetensors(tmp_path / "out", executor=watched, memory="100MB", verify=True)
        assert all(bit_equal(t, state[name]) for name, t in load_file(file).items())
        (file,) = view.to_torch(tmp_path / "out.pt", executor=watched, verify=True)
        assert file.read_bytes() == (tmp_path / "want.pt").read_bytes()  # with the checksums of the pieces
        assert watched.calls > 10 and watched.sent < view.nbytes / 4, "descriptions, no tensor bytes"
        with pytest.raises(DestinationError, match="memory of this process"):
            view.to_zarr("memory://jobs/out.zarr", executor=executor)
        with pytest.raises(DataError, match="cannot be sent to other processes"):
            run([Task(1, 1, lambda: None)], _nothing, executor)
        # what a worker raises arrives
        with pytest.raises(ValueError, match="task 5"):
            run([Task(1, 1, partial(_fails, 5))], _nothing, executor)
        # a killed worker breaks the pool; what is finished stays
        monkeypatch.setattr(job, "_TOGETHER", 1)
        killer = threading.Thread(target=_kill_when_begun, args=(tmp_path, lambda: next(iter(executor._processes))))
        killer.start()
        with pytest.raises(WorkerError, match=r"lost workers.*is kept in"):
            view.to_zarr(tmp_path / "killed.zarr", chunk="4KB", codec="zstd", executor=executor)
        killer.join()
    assert not (tmp_path / "killed.zarr").exists()
    finished = _finished(tmp_path / ".killed.zarr.incomplete")
    assert finished
    view.to_zarr(tmp_path / "killed.zarr", chunk="4KB", codec="zstd")
    after = _finished(tmp_path / "killed.zarr")
    assert {key: after[key] for key in finished} == finished, "finished chunks are not written again"
    view.to_zarr(tmp_path / "small.zarr", chunk="4KB", codec="zstd")
    assert _content(tmp_path / "killed.zarr") == _content(tmp_path / "small.zarr")


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("distributed")
    from distributed import Client, LocalCluster

    path, state = model
    view = lazyckpt.open(path)
    view.to_zarr(tmp_path / "want.zarr", chunk="16KB", codec="zstd")
    monkeypatch.setattr(job, "_TOGETHER", 2)
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with LocalCluster(**options, local_directory=str(tmp_path / "dask")) as cluster, Client(cluster) as client:
        pids = client.run(os.getpid)
        executor = client.get_executor()
        client.run(files_held(4, tmp_path / "go"))
        killed = threading.Event()
        pid = next(iter(pids.values()))
        killer = threading.Thread(target=_kill_when_begun, args=(tmp_path, lambda: pid, killed))
        killer.start()
        view.to_zarr(tmp_path / "out.zarr", chunk="16KB", codec="zstd", executor=executor, verify=True)
        killer.join()
        assert killed.is_set() and pid not in client.run(os.getpid).values()
        assert _content(tmp_path / "out.zarr") == _content(tmp_path / "want.zarr")
        # the same again: Dask must not take it for what it has done already
        view.to_zarr(tmp_path / "again.zarr", chunk="16KB", codec="zstd", executor=executor)
        assert _content(tmp_path / "again.zarr") == _content(tmp_path / "want.zarr")
        (file,) = view.to_safetensors(tmp_path / "out", executor=executor)
        assert all(bit_equal(t, state[name]) for name, t in load_file(file).items())


def _kill_when_begun(folder: Path, pid: Callable[[], int], killed: threading.Event | None = None) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(len(_finished(staging)) > 3 for staging in folder.glob(".*.incomplete")):
            os.kill(pid(), signal.SIGKILL)
            if killed is not None:
                killed.set()
            (folder / "go").touch()
            return
        time.sleep(0.002)


# -- kill -9 of all of it

_EXPORTS = """
import itertools, os, random, signal, sys, threading, time
from pathlib import Path
import torch
import lazyckpt
from lazyckpt.export import chunks
from lazyckpt.jobs.places import Folder

source, folder, target, kills = sys.argv[1:]
folder, rng = Path(folder), random.Random(1)
staging, out = folder / f".{target}.incomplete", folder / target


def finished(where):
    found = {}
    for base, _, files in os.walk(where):
        for f in files:
            path = os.path.join(base, f)
            try:
                if not f.endswith((".part", ".lazyckpt-job", ".lazyckpt-ledger")):
                    found[os.path.relpath(path, where)] = (os.stat(path).st_ino, os.stat(path).st_mtime_ns)
            except FileNotFoundError:
                pass
    return found


def export(most):
    view = lazyckpt.open(source)
    real, begun = Folder.put, itertools.count()

    def slow(self, key, content):
        if next(begun) >= most:  # it is to be killed
            threading.Event().wait()

        def pieces():
            for piece in content:
                time.sleep(0.02)
                yield piece
        return real(self, key, pieces())

    Folder.put = slow
    view.to_zarr(out, chunk="4KB", progress=False, overwrite="overwrite" in sys.argv)


before, kept = {}, 0
for turn in range(int(kills) + 1):
    last, enough = turn == int(kills), max(0, len(before) + rng.randint(-5, 60))
    child = os.fork()
    if child == 0:
        try:
            export(float("inf") if last else enough - len(before) + 8)
        except BaseException as e:
            print(type(e).__name__, e, flush=True)
            os._exit(1)
        os._exit(0)
    if not last:
        while not staging.exists() or len(finished(staging)) < enough:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not out.exists(), "a reader must not see half of it"
        now = finished(staging)
        assert all(now.get(key) == stamp for key, stamp in before.items()), "finished chunks are not done again"
        before = now
        print("killed with", len(now), flush=True)
    else:
        status = os.waitpid(child, 0)[1]
        assert status == 0, status
        now = finished(out)
        assert all(now.get(key) == stamp for key, stamp in before.items())
        assert not staging.exists() and len(os.listdir(folder)) == 1, os.listdir(folder)
print("done", len(before), "of", len(now))
"""


@pytest.mark.slow
def test_resume_after_a_kill_at_any_moment(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, _ = model
    folder = tmp_path / "out"
    folder.mkdir()
    done = processes.run("-c", _EXPORTS, path, folder, "x.zarr", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.split("\n")[-2].split()
    assert 20 < int(last[1]) < int(last[3]), done.stdout
    lazyckpt.open(path).to_zarr(tmp_path / "want.zarr", chunk="4KB")
    assert _content(folder / "x.zarr") == _content(tmp_path / "want.zarr")


def _finished(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for base, _, files in os.walk(folder):
        for name in files:
            if not name.endswith((".part", ".lazyckpt-job", ".lazyckpt-ledger")):
                with suppress(FileNotFoundError):  # the folder has just been renamed
                    stat = os.stat(os.path.join(base, name))
                    found[os.path.relpath(os.path.join(base, name), folder)] = (stat.st_ino, stat.st_mtime_ns)
    return found


_MEASURED = """
import sys
import torch
import lazyckpt

def kib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

path, out, codec, memory = sys.argv[1:]
torch.ones(1000, 1000).sum()
view = lazyckpt.open(path)
import numcodecs
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = kib("VmRSS")
if codec == "safetensors":
    view.to_safetensors(out, memory=memory)
else:
    view.to_zarr(out, codec=None if codec == "none" else codec, memory=memory)
print((kib("VmHWM") - before) << 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc")
def test_peak_memory_of_exports_stays_within_the_limit(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(2048, 8192) for n in range(4)}  # 64 MiB each
    torch.save(state, tmp_path / "m.pt")
    del state
    allowed = {"none": 128, "safetensors": 128, "zstd": 192}
    for codec, mib in allowed.items():
        done = processes.run("-c", _MEASURED, tmp_path / "m.pt", tmp_path / codec, codec, "64MiB")
        if "clear_refs" in done.stderr:
            pytest.skip("this system does not let a process reset its peak")
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < mib << 20, codec
