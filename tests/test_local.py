"""What reading costs the machine, counted in pages of its cache, and files that change under an open view."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import LazyTensor
from lazyckpt.io import system
from lazyckpt.testing.oracle import indexed, same

from . import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts pages with posix_fadvise and mincore")

PAGE = mmap.PAGESIZE
SHAPE = (3000, 2500)


def drop(path: Path) -> None:
    """Out of the page cache with it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def resident(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    state = ctypes.create_string_buffer(-(-len(mapped) // PAGE))
    try:
        if libc.mincore(ctypes.addressof(view), len(mapped), state):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        del view
        mapped.close()
    return int((np.frombuffer(state.raw, dtype=np.uint8) & 1).sum())


def need_a_droppable_cache(path: Path) -> None:
    drop(path)
    if resident(path):
        pytest.skip(f"the file system of {path} keeps its pages: nothing to count")


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(SHAPE)


@pytest.fixture(scope="module", params=["torch", "safetensors"])
def big(request: pytest.FixtureRequest, matrix: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 MiB in one tensor, between two others."""
    folder = tmp_path_factory.mktemp("big")
    tensors = {"a.before": torch.zeros(5000), "m": matrix, "z.after": torch.zeros(5000)}
    if request.param == "torch":
        torch.save(tensors, folder / "big.pt")
        return folder / "big.pt"
    save_file(tensors, folder / "big.safetensors")
    return folder / "big.safetensors"


KEYS = {
    "a row": 7,
    "rows": slice(100, 200),
    "many rows": slice(500, 2900),
    "the last row": -1,
    "part of a row": (1234, slice(10, 20)),
    "an element": (2999, 2499),
    "a column": (slice(None), 5),
    "columns": (slice(None), slice(100, 120)),
    "a block": (slice(5, 60), slice(7, 2000)),
    "rows apart": slice(None, None, 64),
    "rows apart, backwards": slice(None, 100, -50),
    "listed rows": [3, 2000, 1000, 1000],
    "listed rows and a few columns": ([30, 20, 1000], slice(0, 3)),
    "every third element of a row": (77, slice(None, None, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_a_slice_reads_its_own_pages(big: Path, matrix: torch.Tensor, name: str) -> None:
    need_a_droppable_cache(big)
    view = lazyckpt.open(big, cache=False)
    t, key = view["m"], KEYS[name]
    wanted_bytes = t.fragments[0].extent.offset + 4 * indexed(torch.arange(matrix.numel()).view(SHAPE), key).flatten()
    wanted = len((wanted_bytes // PAGE).unique())
    drop(big)
    before = resident(big)
    same(t[key], indexed(matrix, key), name)
    read = resident(big) - before
    assert before == 0, "the index alone keeps no page mapped"
    assert wanted <= read <= wanted * 1.05 + 2, f"{read} pages for {wanted}"


def test_the_whole_reads_every_page_once_and_no_more(big: Path, matrix: torch.Tensor) -> None:
    need_a_droppable_cache(big)
    t = lazyckpt.open(big, cache=False)["m"]
    drop(big)
    same(t[...], matrix, "m")
    pages = t.nbytes // PAGE
    assert pages <= resident(big) <= pages * 1.05 + 2


@pytest.mark.skipif(system.PORTABLE, reason="read-ahead cannot be turned off")
@pytest.mark.parametrize("count", [1, 2000])
def test_opening_a_gigabyte_touches_less_than_a_hundredth(tmp_path: Path, count: int) -> None:
    path = tmp_path / "sparse.pt"
    with torch.serialization.skip_data():
        torch.save({f"layers.{n}.weight": torch.empty((1 << 28) // count) for n in range(count)}, path)
    if os.stat(path).st_blocks * 512 > 1 << 24:
        pytest.skip("this file system writes no sparse files")
    need_a_droppable_cache(path)
    view = lazyckpt.open(path, cache=False)
    assert len(view) == count and view.nbytes == (1 << 28) // count * count * 4
    assert repr(view) and view.explain()
    assert resident(path) < 0.01 * view.nbytes / PAGE
    opened = resident(path)
    assert view[f"layers.{count - 1}.weight"][1000:1010].tolist() == [0.0] * 10
    assert resident(path) - opened <= 3
    path.unlink()


# -- files that change


_READS: dict[str, Callable[[LazyTensor], Any]] = {
    "a row": lambda t: t[3],
    "rows": lambda t: t[10:900],
    "all": lambda t: t[...],
    "a column": lambda t: t[:, 7],
    "listed": lambda t: t[[5, 3]],
    "to": lambda t: t.to("cpu", torch.float32),
    "mapped": lambda t: t.to(copy=False),
    "numpy": lambda t: t.numpy(),
    "lazily": lambda t: t.lazy[5:9][...],
}
_WHOLE = torch.arange(1000 * 700, dtype=torch.int32).view(1000, 700)


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _rewrite(path: Path) -> None:
    torch.save({"w": -_WHOLE}, path)
    os.utime(path, ns=(1, 1))


def _cut(path: Path) -> None:
    os.truncate(path, os.stat(path).st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("read", _READS)
@pytest.mark.parametrize("change", [_touch, _rewrite, _cut, _empty, _grow])
@pytest.mark.parametrize("used", [False, True])
def test_a_changed_file_is_refused(tmp_path: Path, change: Callable[[Path], None], read: str, used: bool) -> None:
    path = tmp_path / "changing.pt"
    torch.save({"w": _WHOLE}, path)
    view = lazyckpt.open(path)
    t = view["w"]
    if used:  # descriptors and mappings are there already
        for do in _READS.values():
            do(t)
    change(path)
    with pytest.raises(lazyckpt.ChangedFileError) as error:
        _READS[read](t)
    assert isinstance(error.value, OSError)
    assert str(path) in str(error.value) and "again" in str(error.value)
    with pytest.raises(lazyckpt.ChangedFileError):
        view.to()
    assert t.shape == (1000, 700) and repr(t) and t.to("meta").is_meta, "what is known stays known"


@pytest.mark.parametrize("read", _READS)
@pytest.mark.parametrize("used", [False, True])
def test_a_replaced_file_is_refused_or_the_old_one_is_read(tmp_path: Path, read: str, used: bool) -> None:
    path = tmp_path / "replaced.pt"
    torch.save({"w": _WHOLE}, path)
    t = lazyckpt.open(path)["w"]
    want = _READS[read](t) if used else _READS[read](lazyckpt.open(path)["w"])
    torch.save({"w": -_WHOLE}, tmp_path / "new.pt")
    os.utime(tmp_path / "new.pt", ns=(1, 1))
    os.replace(tmp_path / "new.pt", path)
    try:
        got = _READS[read](t)
    except lazyckpt.ChangedFileError:
        return
    assert used, "nothing was held open, so the new file should have been noticed"
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(want))


@pytest.mark.parametrize("read", _READS)
def test_a_file_that_is_gone(tmp_path: Path, read: str) -> None:
    path = tmp_path / "gone.pt"
    torch.save({"w": _WHOLE}, path)
    t = lazyckpt.open(path)["w"]
    path.unlink()
    with pytest.raises(lazyckpt.MissingFileError) as error:
        _READS[read](t)
    assert isinstance(error.value, FileNotFoundError) and str(path) in str(error.value)


def test_a_changed_file_is_opened_anew(tmp_path: Path) -> None:
    """The index that this process keeps is that of a file, not of a path."""
    path = tmp_path / "x.pt"
    for value in range(3):
        torch.save({"w": torch.full((3,), value)}, path)
        os.utime(path, ns=(value + 1, value + 1))
        for cache in (True, True, False):
            assert lazyckpt.open(path, cache=cache)["w"].tolist() == [value] * 3
    torch.save({"other": torch.zeros(2)}, path)
    assert list(lazyckpt.open(path)) == ["other"]
    path.unlink()
    with pytest.raises(lazyckpt.MissingFileError):
        lazyckpt.open(path)


# -- descriptors and processes


def _shards(folder: Path, count: int) -> None:
    for n in range(count):
        save_file({f"t{n}": torch.full((4, 3), n)}, folder / f"model-{n:05d}.safetensors")
    index = {"metadata": {}, "weight_map": {f"t{n}": f"model-{n:05d}.safetensors" for n in range(count)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
@pytest.mark.parametrize("views", ["one view", "several views"])
def test_more_files_than_descriptors(tmp_path: Path, views: str) -> None:
    """1,200 files under the usual limit of 1,024 descriptors, read in every way; whatever was read stays alive."""
    count = 1200
    _shards(tmp_path, count)
    code = f"""if True:
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        import lazyckpt
        kept = []
        reads = (lambda t: t[0], lambda t: t[:, 1], lambda t: t[...], lambda t: t[[2, 0]], lambda t: t.to(copy=False))
        for read in reads:
            if not kept or {views == "several views"}:
                kept.append(view := lazyckpt.open({str(tmp_path)!r}))
            assert len(view) == {count}
            for turn in range(2):
                for name, t in view.items():
                    kept.append(read(t))
                    assert kept[-1].eq(int(name[1:])).all(), name
        for copy in (True, False):
            kept.append(whole := view.to(copy=copy))
            assert all(whole[f"t{{n}}"].eq(n).all() for n in range({count}))
        assert len(os.listdir("/proc/self/fd")) < 1000
    """
    done = processes.run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_descriptors_are_released(tmp_path: Path) -> None:
    torch.save({"w": _WHOLE}, tmp_path / "x.pt")

    def use() -> None:
        view = lazyckpt.open(tmp_path / "x.pt")
        for read in _READS.values():
            read(view["w"])

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_links_are_followed(tmp_path: Path) -> None:
    """As the cache of the Hugging Face hub lays a model out: names that point to blobs elsewhere."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.arange(5)}, tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0a1b")
    for path in (tmp_path / "snapshot", tmp_path / "snapshot" / "model.safetensors"):
        assert lazyckpt.open(path)["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_forked_child_reads_too(tmp_path: Path) -> None:
    """As data loaders do: the parent has read with threads, which a fork does not copy."""
    whole = torch.arange(6 << 20, dtype=torch.int32).view(6, -1)
    torch.save({"w": whole}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    same(view["w"][...], whole, "in the parent")
    pid = os.fork()
    if not pid:  # no assert may get out of here: pytest would go on twice
        ok = False
        try:  # numpy compares: torch's own threads do not survive a fork either
            again = lazyckpt.open(tmp_path / "x.pt")
            reads = (view["w"][...], again["w"][...], again.to()["w"])
            ok = all(np.array_equal(t.numpy(), whole.numpy()) for t in reads)
            ok = ok and np.array_equal(view["w"][2, 5:9].numpy(), whole[2, 5:9].numpy())
        finally:
            os._exit(0 if ok else 1)
    for _ in range(300):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
