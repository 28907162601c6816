"""Lazy tensors as Dask arrays: equal on every scheduler, in chunks of their files, never read by the client."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.dtypes import dtype_of, to_numpy, widened
from lazyckpt.core.extents import Extent
from lazyckpt.core.index import FileInfo
from lazyckpt.core.placement import Rank
from lazyckpt.core.specs import TensorSpec
from lazyckpt.formats.shared.flat import FlatFragments, Partition
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import indexed, same

from .writers import Case

dask = pytest.importorskip("dask")
pytest.importorskip("distributed")

pytestmark = pytest.mark.slow


def tensors(case: Case, view: lazyckpt.CheckpointView) -> Iterator[tuple[lazyckpt.LazyTensor, torch.Tensor]]:
    for state, part in view.states.items():
        for name in part:
            yield part[name], case.truth[state][name]


def equal(got: Any, want: torch.Tensor, what: object) -> None:
    """Bit for bit, in the dtype that numpy computes with."""
    wanted = to_numpy(want.contiguous().to(widened(dtype_of(want.dtype)).torch))
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
    assert np.asarray(got).tobytes() == wanted.tobytes(), what


# -- one process


def test_equal_and_lazy(case: Case) -> None:
    view, counts = opened(case.path)
    counts.clear()
    arrays = [(t, t.to_dask(), whole) for t, whole in tensors(case, view)]
    assert counts.requests == 0, "describing has read"
    assert len({array.name for _, array, _ in arrays}) == len({(t.name, t.spec.fragments[0]) for t, _, _ in arrays})
    with dask.config.set(scheduler="threads"):
        for t, array, whole in arrays:
            assert (array.shape, array.dtype, array._meta.dtype) == (tuple(t.shape), array._meta.dtype, array.dtype)
            equal(array.compute(), whole, t.name)
            if t.ndim:
                equal(t.to_dask(chunks=2)[1:].compute(), whole[1:], t.name)
                equal(t.lazy[::-2].to_dask().compute(), indexed(whole, slice(None, None, -2)), t.name)
                equal(t.lazy[1:].to_dask().compute(), whole[1:], t.name)


def test_chunks_follow_the_ranks_and_a_slice_reads_one(dcp_cases: dict[str, Case]) -> None:
    case = dcp_cases["fsdp2_uneven"]
    view, counts = opened(case.path)
    name = next(n for n in view if len(view[n].fragments) > 1 and view[n].ndim == 2)
    t, whole = view[name], case.truth["weights"][name]
    rows = tuple(f.local_shape[0] for f in t.fragments)
    array = t.to_dask()
    assert array.chunks == (rows, (t.shape[1],))
    t[...]  # the archives have been looked up
    counts.clear()
    with dask.config.set(scheduler="sync"):
        equal(array[: rows[0]].compute(), whole[: rows[0]], name)
        assert counts.paths == {t.fragments[0].extent.path}
        counts.clear()
        equal(array[-1, :2].compute(), whole[-1, :2], name)
        assert counts.bytes == 2 * t.itemsize, "a slice of a chunk is a slice of the tensor"
    inner = t.lazy[1:].to_dask()
    assert inner.chunks[0] == (rows[0] - 1, *rows[1:]), "a part is cut where the whole is"


def test_odd_shapes(tmp_path: Path) -> None:
    held = {"scalar": torch.tensor(3.5).to(torch.bfloat16), "none": torch.empty(0, 4), "f8": torch.ones(4, 6)}
    held["f8"] = held["f8"].to(torch.float8_e4m3fn)
    save_file(held, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors")
    for name, whole in held.items():
        equal(view[name].to_dask().compute(scheduler="sync"), whole, name)
    torch.save({"half": torch.zeros(3, dtype=torch.complex32)}, tmp_path / "c.pt")
    with pytest.raises(lazyckpt.DataError, match="numpy has no"):
        lazyckpt.open(tmp_path / "c.pt")["half"].to_dask()


def test_a_hole_is_an_error_of_its_chunks(dcp_hole: tuple[lazyckpt.CheckpointView, Case]) -> None:
    view, case = dcp_hole
    name = next(n for n in view if len(view[n].fragments) > 1)
    t, whole = view[name], case.truth["weights"][name]
    rows = t.fragments[0].local_shape[0]
    array = t.to_dask()
    equal(array[:rows].compute(scheduler="threads"), whole[:rows], name)
    with pytest.raises(lazyckpt.MissingFileError, match="__1_0"):
        array.compute(scheduler="threads")


# -- descriptions that travel


def test_tokens_are_the_same_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2, 3)}, path)
    code = f"""
import lazyckpt, pickle
v = lazyckpt.open({str(path)!r})
print(v["a"].to_dask().name, v["a"].lazy[1:, [2, 0]].to_dask().name, hash("x") != 0)
"""
    env = os.environ | {"PYTHONHASHSEED": "1"}  # here it is another
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    view = lazyckpt.open(path)
    a, part = view["a"], view["a"].lazy[1:, [2, 0]]
    assert said == f"{a.to_dask().name} {part.to_dask().name} True\n"
    again = pickle.loads(pickle.dumps(part))
    names = [a, part, a.lazy[:1], view["b"], a.astype(torch.float16)]
    assert len({t.to_dask().name for t in names}) == len(names)
    assert again.to_dask().name == part.to_dask().name
    assert pickle.dumps(again) == pickle.dumps(pickle.loads(pickle.dumps(again)))
    os.utime(path, ns=(1, 1))
    assert lazyckpt.open(path)["a"].to_dask().name != a.to_dask().name, "another file"


def wide(stage: int, ranks: int = 1024) -> lazyckpt.LazyTensor:
    """A tensor of a checkpoint of a thousand ranks; there are no files."""
    paths = [f"global_step9/bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)]
    partitions = tuple(
        Partition(Extent(p, 4096, torch.float32, (1 << 22,), (1,)), Rank(dp=r)) for r, p in enumerate(paths)
    )
    shape = (1 << 11, 1 << 11)
    flat = FlatFragments(shape, *((1 << 12, partitions) if stage == 3 else (1 << 22, partitions, 5 << 22)))
    store = LocalStore("/nowhere", {p: FileInfo(1 << 24, n) for n, p in enumerate(paths)})
    return lazyckpt.LazyTensor(store, TensorSpec("w", shape, torch.float32, flat))


def test_a_part_takes_its_own_fragments_along() -> None:
    t = wide(3)
    assert len(t.fragments) == 1024
    part = pickle.dumps(t.lazy[4:12, ::3])
    assert len(part) < 2_000
    again = pickle.loads(part)
    assert again.explain() == t.explain((slice(4, 12), slice(None, None, 3)))
    assert len(again.fragments) == 4
    assert len(pickle.dumps(t.lazy[:0])) < 1_000
    assert len(pickle.dumps(t)) < 200_000
    assert pickle.loads(pickle.dumps(t)).explain() == t.explain()
    few = wide(1)
    assert len(few.fragments) == 1
    assert len(pickle.dumps(few)) < 1_000
    assert pickle.loads(pickle.dumps(few)).explain() == few.explain()


# -- several processes


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    whole = torch.randn(4096, 64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    save_file({"w": whole}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", whole


def test_processes(large: tuple[Path, torch.Tensor]) -> None:
    path, whole = large
    array = lazyckpt.open(path)["w"].to_dask(chunks=(1024, 64))
    equal(array.compute(scheduler="processes", num_workers=2), whole, "processes")


def test_a_cluster_that_loses_a_worker(large: tuple[Path, torch.Tensor]) -> None:
    import cloudpickle
    from distributed import Client, LocalCluster

    path, whole = large
    t = lazyckpt.open(path)["w"]

    go, done = path.with_name("go"), path.with_name("done")
    done.mkdir()

    def held(block: Any, block_info: Any = None) -> Any:
        """When eight blocks are computed, the others wait until a worker has been killed."""
        while len(os.listdir(done)) >= 8 and not go.exists():
            time.sleep(0.01)
        (done / str(block_info[0]["chunk-location"][0])).touch()
        return block

    def reads(*_: object) -> None:
        raise AssertionError("the client reads")

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
        mock.patch.multiple(LocalStore, read=reads, read_into=reads, map=reads),
    ):
        pids = client.run(os.getpid)
        array = t.to_dask(chunks=(64, 64)).map_blocks(held, dtype=np.float32)
        assert len(cloudpickle.dumps(array.dask)) < 50_000, "no bytes of the tensor"
        blocks = client.compute(list(array.to_delayed().ravel()))
        while sum(block.done() for block in blocks) < 8:
            time.sleep(0.02)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        assert not all(block.done() for block in blocks)
        go.touch()
        got = client.gather(blocks)
        equal(np.concatenate(got), whole, "cluster")
        total = client.compute(t.to_dask(chunks=(512, 64)).astype(np.float32).sum()).result()
    same(torch.tensor(float(total)).round(), whole.float().sum().round(), "the sum")
