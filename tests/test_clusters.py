"""Executors of clusters: what is sent to them, how much at a time, and what becomes of a job when they fail."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.cli.workers import target_of_work
from lazyckpt.errors import DataError, WorkerError
from lazyckpt.jobs import batching, sending
from lazyckpt.jobs import executor as job
from lazyckpt.jobs.batching import Task
from lazyckpt.jobs.executor import executor_of, run, workers_of

from .conftest import need
from .holding import files_held

MIB = 1 << 20


class Recorded(Executor):
    """Runs the work when the job looks at its futures, as ``workers`` workers would; counts what is pending and sent.

    Nothing runs before, however slow the machine is: so many futures are pending as the job lets be."""

    def __init__(self, workers: int | None) -> None:
        if workers is not None:
            self.num_workers = workers
        self.pending = self.most = 0
        self.sent: list[bytes] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.pending += 1
        self.most = max(self.most, self.pending)
        self.sent.append(self.record(fn, args))

        def work() -> Any:
            self.pending -= 1
            return fn(*args, **kwargs)

        return _Later(work)

    def record(self, fn: Callable[..., Any], args: Any) -> bytes:
        return pickle.dumps((fn, args))


class _Later(Future[Any]):
    """A future that is done as soon as somebody looks at it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work: Callable[[], Any] | None = work

    def done(self) -> bool:
        work, self._work = self._work, None
        if work is not None and not self.cancelled():
            try:
                self.set_result(work())
            except Exception as e:
                self.set_exception(e)
        return True


def _number(n: int) -> int:
    return n


def _tasks(count: int, nbytes: int) -> Iterator[Task]:
    return (Task(nbytes, 16 * MIB, partial(_number, n)) for n in range(count))


@pytest.mark.parametrize(("workers", "most"), [(1, 2), (4, 8), (64, 128)])
def test_every_worker_has_a_future_that_waits(workers: int, most: int) -> None:
    """64 workers get 128 futures, though their memory together is more than the default limit of one process."""
    executor = Recorded(workers)
    found: set[int] = set()
    run(_tasks(2000, 32 * MIB), lambda task, result: found.add(result), executor)
    assert found == set(range(2000))
    assert executor.most == most


def test_a_memory_limit_holds_for_all_workers_together() -> None:
    executor = Recorded(64)
    run(_tasks(300, 32 * MIB), lambda task, result: None, executor, memory=160 * MIB)
    assert executor.most == 20, "ten that run and ten that wait hold 160 MiB"


@pytest.mark.parametrize("workers", [2, 16])
def test_at_most_one_future_for_256_mib(workers: int) -> None:
    executor = Recorded(workers)
    run(_tasks(4096, 16 * MIB), lambda task, result: None, executor)  # 64 GiB
    assert len(executor.sent) <= 64 * 4


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_all_workers_end_at_the_same_time(workers: int) -> None:
    """The next future goes to the worker that has been given the least, as if all were equally fast."""
    far = job._Far(Recorded(workers), None, ())
    loads = [0] * workers
    for batch in far.batches(_tasks(100 * workers, 16 * MIB)):
        loads[loads.index(min(loads))] += sum(task.nbytes for task in batch)
    assert max(loads) <= 1.05 * sum(loads) / workers


def test_workers_that_join_get_work() -> None:
    executor = Recorded(1)
    workers = job._Far(executor, None, ())
    assert workers.is_full(2, 0)
    executor.num_workers = 3
    workers._asked -= 60
    assert not workers.is_full(5, 0) and workers.is_full(6, 0)


def test_an_executor_that_does_not_tell_its_size() -> None:
    executor = Recorded(None)
    assert workers_of(executor) is None
    found = []
    run(_tasks(500, 64 * MIB), lambda task, result: found.append(result), executor)
    assert len(found) == 500 and executor.most <= 64, "1 GiB in tasks of 16 MiB"


@pytest.mark.parametrize("value", ["dask", 4, {"workers": 4}], ids=str)
def test_what_is_no_executor(value: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    for call in (lambda: view.to_zarr(tmp_path / "out", executor=value), lambda: view.stats(executor=value)):
        with pytest.raises(DataError, match="not an executor"):
            call()
    assert not (tmp_path / "out").exists()


# -- what travels


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> lazyckpt.CheckpointView:
    """Eight layers of 405B over 1,024 ranks, without the tensors' bytes."""
    need("deepspeed")
    from benchmarks.sparse_zero import write_zero3

    folder = tmp_path_factory.mktemp("thousand")
    write_zero3(folder, layers=8)
    return lazyckpt.open(folder, cache=False)


def test_a_part_of_a_thousand_ranks_takes_its_own_tensors_along(thousand: lazyckpt.CheckpointView) -> None:
    part = thousand["model.layers.1"]
    whole, layer = len(pickle.dumps(thousand)), len(pickle.dumps(part))
    assert layer < whole < 128 << 10, "less than 128 bytes a rank"
    again = pickle.loads(pickle.dumps(part))
    assert list(again) == list(part) and len(part) < len(thousand)
    assert {s: list(v) for s, v in again.states.items()} == {s: list(v) for s, v in part.states.items()}
    assert len(again._index.states["exp_avg"]) == len(part)
    assert again["mlp.up_proj.weight"].explain(slice(3)) == part["mlp.up_proj.weight"].explain(slice(3))
    assert again.files == part.files and again.problems == part.problems and list(again.meta) == list(part.meta)


class Far(Recorded):
    """Other processes, as far as what is sent is concerned: only bytes arrive. ``forgets`` after so many calls."""

    def __init__(self, workers: int | None, forgets: int = 0) -> None:
        super().__init__(workers)
        self._calls, self._forgets = 0, forgets

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def work(*given: Any) -> Any:
            self._calls += 1
            if self._calls == self._forgets:
                sending._known.clear()
            return fn(*given)

        return super().submit(work, *args, **kwargs)

    def record(self, fn: Callable[..., Any], args: Any) -> bytes:
        return pickle.dumps(args)


def _explained(tensor: lazyckpt.LazyTensor) -> str:
    return tensor.explain()


@pytest.mark.parametrize("forgets", [0, 3, 40])
def test_descriptions_are_sent_once(
    thousand: lazyckpt.CheckpointView, monkeypatch: pytest.MonkeyPatch, forgets: int
) -> None:
    """13 GiB of a layer, in 800 tasks; also to a worker that joins later and has not got the descriptions."""
    monkeypatch.setattr(sending, "_known", {})
    tensors = list(thousand["model.layers.1"].values())
    parts = [part for tensor in tensors for _, part in tensor.pieces(16 * MIB)]
    executor = Far(2, forgets)
    found: dict[str, int] = {}

    def done(task: Task, result: str) -> None:
        assert task.reads is not None and result == task.reads.explain()
        found[result] = found.get(result, 0) + 1

    tasks = (Task(part.nbytes, 16 * MIB, partial(_explained, part), part) for part in parts)
    run(tasks, done, executor, tensors=tensors)
    assert len(found) == len(parts) and set(found.values()) == {1}
    total = sum(map(len, executor.sent))
    whole = len(sending.Descriptions(tensors).data or b"")
    assert 0 < whole < 64 << 10
    with_descriptions = sum(len(sent) > whole for sent in executor.sent)
    assert with_descriptions <= 4 + 4 * bool(forgets)
    assert total - with_descriptions * whole < 160 * len(parts), "a task names its tensor"


def test_descriptions_that_are_too_many_stay_with_their_tasks(
    thousand: lazyckpt.CheckpointView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_MOST", 1000)
    tensors = list(thousand["model.layers.1"].values())
    descriptions = sending.Descriptions(tensors)
    assert descriptions.data is None and not descriptions.digest
    part = tensors[0].lazy[:2]
    assert sending.perform(descriptions.pickled([partial(_explained, part)]), "", None, "") == [part.explain()]


# -- which tasks go together


def test_tasks_of_a_file_go_together(tmp_path: Path) -> None:
    """Tensors of eight files in turn: every future has tasks of one file."""
    views = []
    for n in range(8):
        torch.save({f"w{k}": torch.zeros(64) for k in range(20)}, tmp_path / f"{n}.pt")
        views.append(lazyckpt.open(tmp_path / f"{n}.pt"))
    reads = [view[f"w{k}"] for k in range(20) for view in views]
    tasks = [Task(16 * MIB, MIB, partial(_number, n), t) for n, t in enumerate(reads)]
    found = list(batching.by_file(iter(tasks), lambda left: 160 * MIB, 100))
    assert sorted(task.do() for batch in found for task in batch) == list(range(160))
    together = [{batching.source_of(task) for task in batch} for batch in found]
    assert all(len(files) == 1 for files in together) and len(found) <= 16
    assert [task.do() for task in next(batching.by_file(iter(tasks[:3]), lambda left: 1 << 40, 100))] == [0, 1, 2]


def test_a_file_is_read_by_one_worker() -> None:
    torch.manual_seed(0)
    placer = batching.Placer()
    named = mock.Mock(side_effect=lambda task: task.do)
    with mock.patch.object(batching, "source_of", named):

        def of(file: str | None, workers: list[str]) -> str | None:
            return placer.worker([Task(100, 1, file)], workers)  # type: ignore[arg-type]

        assert [of("a", ["x", "y"]), of("b", ["x", "y"]), of("a", ["x", "y"]), of("c", ["x", "y"])] == [
            "x",
            "y",
            "x",
            "y",
        ]
        assert of("a", ["y", "z"]) == "z" == of("a", ["x", "y", "z"]), "its worker has gone"
        assert of(None, ["x"]) is None and of("a", []) is None


# -- real clusters


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({f"layers.{n}": torch.randn(256, 512) for n in range(24)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def until(ready: Callable[[], bool]) -> None:
    """Wait for something, a minute at most."""
    deadline = time.monotonic() + 60
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """96 chunks of 4 KiB: more than are written before the work is held."""
    torch.manual_seed(0)
    torch.save({f"layers.{n}": torch.randn(32, 128) for n in range(24)}, tmp_path / "small.pt")
    return tmp_path / "small.pt"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _chunks(folder: Path) -> dict[str, int]:
    """The inodes of the chunks that are finished."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # the folder is being published
            if path.parent.name.isdecimal() and path.name.isdecimal():
                found[str(path.relative_to(folder))] = path.stat().st_ino
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nanny", [True, False], ids=["processes", "threads"])
def test_a_client_of_dask_is_an_executor(source: Path, tmp_path: Path, nanny: bool) -> None:
    need("distributed")
    from distributed import Client, LocalCluster

    view = lazyckpt.open(source)
    view.to_zarr(tmp_path / "want.zarr", codec="zstd")
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    folder = str(tmp_path / "dask")
    with LocalCluster(**options, processes=nanny, local_directory=folder) as cluster, Client(cluster) as client:
        assert sum(workers_of(client.get_executor()).values()) == 2  # type: ignore[union-attr]
        view.to_zarr(tmp_path / "out.zarr", codec="zstd", executor=client, verify=True)
        assert _content(tmp_path / "out.zarr") == _content(tmp_path / "want.zarr")
        assert view.stats(executor=client) == view.stats()
        assert not lazyckpt.diff(view, tmp_path / "out.zarr", executor=client)


@pytest.mark.slow
def test_a_worker_of_less_memory(tmp_path: Path) -> None:
    """A tensor of 512 MiB on workers that are killed above 700 MiB, which torch alone nearly half fills."""
    need("distributed")
    from distributed import Client, LocalCluster

    torch.save({"w": torch.arange(128 * MIB, dtype=torch.int32)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    folder = str(tmp_path / "dask")
    with LocalCluster(**options, memory_limit="700MiB", local_directory=folder) as cluster, Client(cluster) as client:
        pids = client.run(lambda: __import__("os").getpid())
        (file,) = view.to_safetensors(tmp_path / "out", executor=client)
        view.stats(executor=client)
        assert client.run(lambda: __import__("os").getpid()) == pids, "no worker was restarted"
    assert not lazyckpt.diff(view, file)


@pytest.mark.slow
def test_a_restarted_scheduler(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job fails with one error that says how to go on, and the next call goes on from what is finished."""
    need("distributed")
    from distributed import Client, LocalCluster

    monkeypatch.setattr(job, "_TOGETHER", 2)
    view = lazyckpt.open(small)
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    staging = tmp_path / ".out.zarr.incomplete"
    with LocalCluster(**options, local_directory=str(tmp_path / "dask")) as cluster, Client(cluster) as client:

        def restart() -> None:
            until(lambda: len(_chunks(staging)) >= 10)
            client.restart()

        client.run(files_held(8, tmp_path / "never"))  # the workers that come after the restart know nothing of it

        thread = threading.Thread(target=restart)
        thread.start()
        with pytest.raises(WorkerError, match=r"lost workers.*is kept in"):
            view.to_zarr(tmp_path / "out.zarr", chunk="4KB", executor=client)
        thread.join()
        finished = _chunks(staging)
        view.to_zarr(tmp_path / "out.zarr", chunk="4KB", executor=client)
    assert len(finished) >= 10
    after = _chunks(tmp_path / "out.zarr")
    assert {key: after[key] for key in finished} == finished, "finished chunks are not written again"
    assert not lazyckpt.diff(view, tmp_path / "out.zarr")


@pytest.mark.slow
def test_a_scheduler_that_dies(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed. The job fails with one error, and the next call goes on from what is finished."""
    need("distributed")
    import dask
    from distributed import Client

    monkeypatch.setattr(job, "_TOGETHER", 2)
    view = lazyckpt.open(small)
    staging, address = tmp_path / ".out.zarr.incomplete", tmp_path / "scheduler.json"
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard", "--no-nanny"]
    file = ["--scheduler-file", str(address)]
    with (
        subprocess.Popen([*scheduler, *file], cwd=tmp_path, stderr=subprocess.DEVNULL) as master,
        subprocess.Popen([*worker, *file], cwd=tmp_path, stderr=subprocess.DEVNULL) as slave,
        dask.config.set({"distributed.comm.timeouts.connect": "2s"}),
    ):
        try:
            until(address.exists)
            with Client(scheduler_file=str(address), timeout=5) as client:
                client.wait_for_workers(1, timeout=60)

                def kill() -> None:
                    until(lambda: len(_chunks(staging)) >= 10)
                    master.kill()

                client.run(files_held(16, tmp_path / "never"))

                thread = threading.Thread(target=kill)
                thread.start()
                with pytest.raises(WorkerError, match="lost workers"):
                    view.to_zarr(tmp_path / "out.zarr", chunk="4KB", executor=client)
                thread.join()
        finally:
            master.kill()
            slave.kill()
    kept = _chunks(staging)
    view.to_zarr(tmp_path / "out.zarr", chunk="4KB")
    assert len(kept) >= 10
    after = _chunks(tmp_path / "out.zarr")
    assert {key: after[key] for key in kept} == kept, "finished chunks are not written again"
    assert not lazyckpt.diff(view, tmp_path / "out.zarr")


@pytest.mark.slow
def test_mpi(source: Path, tmp_path: Path) -> None:
    need("mpi4py")
    try:
        from mpi4py import MPI  # noqa: F401
    except ImportError as e:
        pytest.skip(f"mpi4py finds no MPI library: {e}")
    if shutil.which("mpiexec") is None:
        pytest.skip("there is no mpiexec")
    program = """
import sys
from mpi4py.futures import MPIPoolExecutor
import lazyckpt

if __name__ == "__main__":
    view = lazyckpt.open(sys.argv[1])
    with MPIPoolExecutor() as executor:
        view.to_zarr(sys.argv[2], codec="zstd", executor=executor)
        print("equal", view.stats(executor=executor) == view.stats(), executor.num_workers)
"""
    (tmp_path / "program.py").write_text(program)
    command = ["mpiexec", "-n", "3", sys.executable, "-m", "mpi4py.futures", tmp_path / "program.py", source]
    command = [*map(str, command), str(tmp_path / "out.zarr")]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert "equal True 2" in done.stdout, done.stdout + done.stderr
    assert not lazyckpt.diff(source, tmp_path / "out.zarr")


@pytest.mark.slow
def test_ray(source: Path, tmp_path: Path) -> None:
    need("ray")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        view = lazyckpt.open(source)
        view.to_zarr(tmp_path / "out.zarr", codec="zstd", executor=ray)
        assert workers_of(executor_of(ray)) == 2  # type: ignore[arg-type]
        assert view.stats(executor=ray) == view.stats()
    finally:
        ray.shutdown()
    assert not lazyckpt.diff(view, tmp_path / "out.zarr")


# -- the command


def _convert(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["convert", *map(str, arguments)])


def test_shares_from_the_shell(source: Path, tmp_path: Path) -> None:
    options = (source, tmp_path / "out", "--to", "safetensors", "--max-shard-size", "1MB")
    for n in (1, 2, 0):
        done = _convert(*options, "--shard-of-work", f"{n}/3")
        assert done.exit_code == 0, done.output
        assert ("the last share publishes" in done.output) == bool(n)
    assert not lazyckpt.diff(source, tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("share", ["3/3", "1", "a/b", "-1/2", "1/0"])
def test_shares_that_are_none(source: Path, tmp_path: Path, share: str) -> None:
    done = _convert(source, tmp_path / "out", "--shard-of-work", share)
    assert done.exit_code == 2 and "share" in done.output + str(done.stderr)


@pytest.mark.parametrize("where", ["dask", "dask://host", "processes:0", "processes:x", "pbs", "tcp://h:1", ""])
def test_clusters_that_are_none(source: Path, tmp_path: Path, where: str) -> None:
    done = _convert(source, tmp_path / "out.zarr", "--cluster", where)
    assert done.exit_code == 2
    assert re.search(r"dask://HOST:PORT.*slurm.*processes:N", " ".join((done.output + str(done.stderr)).split()))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_clusters_from_the_shell(source: Path, tmp_path: Path) -> None:
    need("distributed")
    from distributed import LocalCluster

    done = _convert(source, tmp_path / "two.zarr", "--cluster", "processes:2")
    assert done.exit_code == 0, done.output
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options, local_directory=str(tmp_path / "dask")) as cluster:
        where = cluster.scheduler_address.replace("tcp://", "dask://")
        done = _convert(source, tmp_path / "dask.zarr", "--cluster", where)
    assert done.exit_code == 0, done.output
    assert _content(tmp_path / "two.zarr") == _content(tmp_path / "dask.zarr")


def test_a_scheduler_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    need("distributed")
    monkeypatch.setattr("lazyckpt.cli.workers._CONNECT", "1s")
    with pytest.raises(WorkerError, match="does not answer"), target_of_work(None, "dask://127.0.0.1:9"):
        pass


def test_processes_by_either_option() -> None:
    for where in (target_of_work(2, None), target_of_work(None, "processes:2")):
        with where as executor:
            assert isinstance(executor, ProcessPoolExecutor) and workers_of(executor) == 2
    with target_of_work(None, None) as executor:
        assert executor is None


# -- the scripts of the guide "Convert 405B on 8 nodes", with processes in place of Slurm

SCRIPTS = Path(__file__).parent.parent / "docs" / "how-to" / "scripts"
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=4
for n in 0 1 2 3; do SLURM_PROCID=$n "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit ${failed:-0}
"""
_SBATCH = """#!/bin/bash
cp "$1" "$1.job"  # dask-jobqueue removes the script at once
setsid bash "$1.job" >"$1.log" 2>&1 & echo "$!" >> "$JOBS_FILE"
echo "Submitted batch job $!"
"""
_SCANCEL = """#!/bin/bash
for job in "$@"; do kill -- "-$job" 2>/dev/null; done; exit 0
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of Slurm, which start processes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": _SRUN, "sbatch": _SBATCH, "scancel": _SCANCEL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "lazyckpt").write_text(f'#!/bin/bash\nexec {sys.executable} -m lazyckpt "$@"\n')
    (folder / "lazyckpt").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("JOBS_FILE", str(tmp_path / "jobs"))
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent.parent.parent))
    return folder


def _script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_script_with_srun(source: Path, tmp_path: Path, slurm: Path) -> None:
    done = _script(
        "convert-srun.sh", source, tmp_path / "a folder" / "out", "--to", "safetensors", "--max-shard-size", "1MB"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not lazyckpt.diff(source, tmp_path / "a folder" / "out")
    assert [path.name for path in (tmp_path / "a folder").iterdir()] == ["out"]


@pytest.mark.slow
def test_the_script_with_dask_jobqueue(
    source: Path, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("dask_jobqueue")
    for name, value in {"JOBS": "2", "CORES": "1", "PROCESSES": "1", "MEMORY": "1GiB", "TMPDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    done = _script("convert-dask.sh", source, tmp_path / "out.zarr", "--codec", "zstd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not lazyckpt.diff(source, tmp_path / "out.zarr")
    assert len((tmp_path / "jobs").read_text().split()) == 2, "two jobs were submitted"
