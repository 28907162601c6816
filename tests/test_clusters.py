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
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.cli.workers import target_of_work
from lazyckpt.errors import DataError, WorkerError
from lazyckpt.jobs import executor as job
from lazyckpt.jobs.executor import Task, executor_of, run, workers_of

from .conftest import need

MIB = 1 << 20


class Recorded(Executor):
    """Runs the work at the next look at its future, as ``workers`` workers would; counts what is pending and sent."""

    def __init__(self, workers: int | None) -> None:
        if workers is not None:
            self.num_workers = workers
        self.pending = self.most = 0
        self.sent: list[bytes] = []
        self._pool = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._lock:
            self.pending += 1
            self.most = max(self.most, self.pending)
        self.sent.append(pickle.dumps((fn, args)))

        def work() -> Any:
            try:
                time.sleep(0.002)
                return fn(*args, **kwargs)
            finally:
                with self._lock:
                    self.pending -= 1

        return self._pool.submit(work)


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


def test_at_most_one_future_for_256_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Recorded(2)
    run(_tasks(4096, 16 * MIB), lambda task, result: None, executor)  # 64 GiB
    assert len(executor.sent) <= 64 * 4 + 2 * 2


def test_workers_that_join_get_work() -> None:
    executor = Recorded(1)
    window = job._Window(executor, False, None)
    assert window.is_full(2, 0)
    executor.num_workers = 3
    window._asked -= 60
    assert not window.is_full(5, 0) and window.is_full(6, 0)


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


def test_large_work_is_compressed() -> None:
    work = [partial(_number, n) for n in range(20_000)]
    packed = job._pickled(work)
    assert len(packed) < len(pickle.dumps(work)) / 2 and zlib.decompress(packed)
    assert job._unpickled(packed, "") == list(range(20_000)) == job._unpickled(pickle.dumps(work), "")


# -- what travels


def test_what_travels_of_a_thousand_ranks(tmp_path: Path) -> None:
    """All of a layer of 405B over 1,024 ranks, to a cluster of 64 workers."""
    from benchmarks.sparse_zero import write_zero3

    write_zero3(tmp_path, layers=8)
    view = lazyckpt.open(tmp_path, cache=False)
    part = view["layers.1"]
    whole, layer = len(pickle.dumps(view)), len(pickle.dumps(part))
    assert whole < MIB and layer < MIB
    assert len(part) < len(view) and list(pickle.loads(pickle.dumps(part))) == list(part)


# -- real clusters


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({f"layers.{n}": torch.randn(256, 512) for n in range(24)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
        assert workers_of(client.get_executor()) == 2
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
def test_a_restarted_scheduler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job fails with one error that says how to go on, and the next call goes on from what is finished."""
    need("distributed")
    from distributed import Client, LocalCluster

    monkeypatch.setattr(job, "_TOGETHER", 2)
    view = lazyckpt.open(source)
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    staging = tmp_path / ".out.zarr.incomplete"
    with LocalCluster(**options, local_directory=str(tmp_path / "dask")) as cluster, Client(cluster) as client:

        def restart() -> None:
            deadline = time.monotonic() + 60
            while len(list(staging.rglob("*"))) < 10 and time.monotonic() < deadline:
                time.sleep(0.005)
            client.restart()

        thread = threading.Thread(target=restart)
        thread.start()
        with pytest.raises(WorkerError, match=r"lost workers.*is kept in"):
            view.to_zarr(tmp_path / "out.zarr", chunk="2KB", executor=client)
        thread.join()
        finished = {path: path.stat().st_ino for path in staging.rglob("*") if path.parent.name.isdecimal()}
        view.to_zarr(tmp_path / "out.zarr", chunk="2KB", executor=client)
    assert finished
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
setsid bash "$1" >"$1.log" 2>&1 & echo "$!" >> "$JOBS_FILE"
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
