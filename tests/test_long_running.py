"""A process that works for weeks: opening, reading, exporting and failing leave nothing behind.

Each test runs a program in a process of its own, which does the same work again and again. After a warm-up nothing may
grow with the number of repetitions: file descriptors, mappings, threads, Python objects, and memory.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.testing.oracle import same

from . import processes
from .conftest import complete
from .lanes import LANE, sampled
from .writers import Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc lists")]

MIB = 1 << 20


def often(count: int) -> int:
    """How often a test repeats: ``count`` times in the lane "all", a sixteenth otherwise."""
    return count if os.environ.get(LANE) == "all" else -(-count // 16)


_PROGRAM = """
import ctypes, gc, json, os, sys, tempfile, threading, tracemalloc, warnings
import torch, lazyckpt

class MallInfo(ctypes.Structure):  # struct mallinfo2 of glibc
    names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keep"
    _fields_ = [(name, ctypes.c_size_t) for name in names]

torch.set_num_threads(1)
warnings.simplefilter("ignore")
times, warm_up, watched = map(int, sys.argv[1:4])
paths = sys.argv[4:]
libc = ctypes.CDLL(None)

def kib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

def allocated():
    look = getattr(libc, "mallinfo2", None)  # from glibc 2.33 on
    if look is None:
        return 0
    look.restype = MallInfo
    found = look()
    return found.used + found.hblkhd

def counts():
    gc.collect()
    libc.malloc_trim(0)
    with open("/proc/self/maps") as maps:
        lines = sum(1 for _ in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "maps": lines, "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()), "blocks": sys.getallocatedblocks(), "memory": allocated(),
        "resident": kib("VmRSS") << 10,
    }

%s

for path in paths:
    for n in range(warm_up):
        cycle(path)
def repeat(times):
    before = counts()
    for path in paths:
        for n in range(times):
            cycle(path)
    after = counts()
    return {name: after[name] - before[name] for name in before}

# what leaks grows in both halves; a table of the interpreter, as that of interned strings, is enlarged once
halves = repeat(times // 2), repeat(times - times // 2)
grown = {name: min(half[name] for half in halves) for name in halves[0]}
tracemalloc.start()
def traced():
    for path in paths:
        for n in range(watched):
            cycle(path)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
after = [traced() for _ in range(3)]
grown["traced"] = min(after[1] - after[0], after[2] - after[1])
print(json.dumps(grown))
"""


class Grown(NamedTuple):
    """By how much a process has grown in that half of the cycles in which it has grown less: numbers, and bytes.

    ``blocks`` are Python's small ones; ``memory`` is what else was allocated and not freed. ``resident`` also contains
    what lies free between blocks in use, which differs from run to run. ``traced`` is Python's, of up to 20 cycles, the
    less of two times.
    """

    descriptors: int
    maps: int
    threads: int
    objects: int
    blocks: int
    memory: int
    resident: int
    traced: int


def grown(work: str, times: int, *paths: Path, warm_up: int | None = None) -> Grown:
    """Run ``times`` cycles for each path, after ``warm_up`` others. ``work`` defines ``cycle(path)``.

    Those that tracemalloc watches take several times as long as others: they are few by default.
    """
    everything = os.environ.get(LANE) == "all"
    warm_up = warm_up or (20 if everything else 10)
    watched = min(times, 20 if everything else 3)
    done = processes.run("-c", _PROGRAM % work, str(times), str(warm_up), str(watched), *paths, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return Grown(**json.loads(done.stdout.splitlines()[-1]))


def check(found: Grown, memory: int = MIB, resident: int = 16 * MIB, threads: int = 0) -> None:
    """Nothing has grown; a few objects and pages belong to caches of Python and of the C library. ``threads``: those of
    a pool of another package, which starts them when it needs them."""
    assert found.descriptors <= 0, found
    assert found.threads <= threads, found
    assert found.maps <= 8, found
    assert found.objects <= 200, found
    assert found.blocks <= 2000, found
    assert found.memory <= memory, found
    assert found.resident <= resident, found
    assert found.traced <= (128 << 10 if os.environ.get(LANE) == "all" else 64 << 10), found  # of 20 or 3 cycles


@pytest.fixture
def small(tmp_path: Path) -> Path:
    torch.save({"l.0.w": torch.arange(4096.0).view(64, 64), "l.0.b": torch.ones(64)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


# -- opening and closing

_OPEN = """
def cycle(path):
    with lazyckpt.open(path, cache={cache}) as view:
        for name in list(view)[:1]:
            view[name][:1]
"""


@pytest.mark.parametrize("cache", [False, True])
def test_ten_thousand_opens_of_a_file(small: Path, cache: bool) -> None:
    check(grown(_OPEN.format(cache=cache), 10_000, small))


@pytest.mark.parametrize("times", sampled([500, 10_000], keep=[500]))
def test_opens_of_a_checkpoint_of_many_ranks(zero_cases: Mapping[str, Case], times: int) -> None:
    check(grown(_OPEN.format(cache=False), times, zero_cases["zero3_sub_groups"].path))


_LOOK = """
def cycle(path):
    with lazyckpt.open(path, cache=False) as view:
        repr(view), view.tree(2), len(view.files), view.problems
        for state in view.states:
            for name, t in list(view.states[state].items())[:6]:
                t.explain(), t.fragments, t[...], t[:1] if t.ndim else t[()], t.lazy[..., None].to(torch.float64)
"""
# of each family, the checkpoints whose ways of storing differ
_FORMATS = {
    "torch": ("torch_cases", ("views", "training", "legacy", "big_endian")),
    "zero": ("zero_cases", ("zero1_fp16_dp3", "zero2_aligned_round_robin", "bf16_optimizer_dp3")),
    "dcp": ("dcp_cases", ("flat", "fsdp2_uneven", "zstd", "odd", "file_per_item", "hub_ranks")),
    "huggingface": ("huggingface_cases", ("llama_sharded", "bin_sharded")),
    "ranks": ("rank_cases", ("verl_fsdp1_flat", "verl_hsdp", "tensor_parallel", "accelerate_local")),
    "kinds": ("kinds", ("pipe_zero1_dp2", "moe_zero2", "autotp_zero1", "megatron_3d.universal")),
    "megatron": ("megatron_cases", ("tp2_pp2_distopt_tied",)),
    "trainers": ("trainer_cases", ("trainer_llama", "accelerate_fsdp1", "lightning_fsdp", "torchtitan")),
}


def _paths(request: pytest.FixtureRequest, family: str) -> list[Path]:
    fixture, names = _FORMATS[family]
    cases: Mapping[str, Case] = request.getfixturevalue(fixture)
    return [cases[name].path for name in names]


@pytest.mark.parametrize("family", sampled(_FORMATS, keep=["torch", "zero", "huggingface", "megatron"]))
def test_opening_and_reading_every_format(request: pytest.FixtureRequest, family: str) -> None:
    check(grown(_LOOK, often(80), *_paths(request, family)))


_UNCLOSED = """
def cycle(path):
    view = lazyckpt.open(path, cache=False)
    t = next(iter(view.values()))
    t[:1], t[...], t.to(copy=False)
    view.states, view.stored
    if cycle.count % 10 == 0:
        gc.collect()
    cycle.count += 1
cycle.count = 0
"""


def test_views_that_nobody_closes(request: pytest.FixtureRequest, small: Path) -> None:
    """They end with their last reference, or with the next collection."""
    check(grown(_UNCLOSED, often(160), small, _paths(request, "zero")[0], *_paths(request, "dcp")[:3]))


_FAILING = """
def cycle(path):
    try:
        lazyckpt.open(path, cache=False)
    except lazyckpt.LazyckptError:
        return
    raise AssertionError(path)
"""


def test_opens_that_fail(small: Path, tmp_path: Path, zero_cases: Mapping[str, Case]) -> None:
    whole = small.read_bytes()
    save_file({"w": torch.zeros(30)}, tmp_path / "whole.safetensors")
    header = (tmp_path / "whole.safetensors").read_bytes()
    bad = {
        "cut.pt": whole[:-500],
        "start.pt": whole[:100],
        "empty.pt": b"",
        "flipped.pt": whole.replace(b"FloatStorage", b"FloatStorbge"),
        "pickle.pt": b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        "noise.bin": bytes(range(256)) * 40,
        "cut.safetensors": header[:40],
        "long.safetensors": (1 << 60).to_bytes(8, "little") + header[8:],
        "json.safetensors": header[:8] + b"[" + header[9:],
        "cut.gguf": b"GGUF\x03\x00\x00\x00" + b"\xff" * 16,
    }
    (tmp_path / "bad").mkdir()
    for name, data in bad.items():
        (tmp_path / "bad" / name).write_bytes(data)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x04}q\x00")
    paths = [*(tmp_path / "bad" / name for name in bad), tmp_path / "nothing", tmp_path / "dcp", tmp_path / "no.pt"]
    check(grown(_FAILING, 200, *paths))


# -- one view for long


_READS = """
import random
views, count = {}, 0

def cycle(path):
    global count
    view = views.get(path) or views.setdefault(path, lazyckpt.open(path))
    names = list(view)
    count += 1
    t = view[names[count % len(names)]]
    n = t.shape[0] if t.ndim else 0
    t[...]
    if n:
        t[count % n], t[count % n :], t[::2], t[[0, n - 1]], t[torch.arange(n) % 2 == 0], t.lazy[::-1][...]
    names[0] in view, view.get("no such name"), view.prefix(names[0].rpartition(".")[0]) if "." in names[0] else 0
    if count % 20 == 0:
        view.to(), view.select("*"), sum(t.numel() for t in view.values()), [repr(t) for t in view.values()]
"""


def test_slices_of_one_view(request: pytest.FixtureRequest, small: Path) -> None:
    paths = [small, *_paths(request, "zero"), *_paths(request, "dcp")]
    check(grown(_READS, 300, *paths, warm_up=200))


_HANDLES = """
import dask, numpy, xarray, zarr
from lazyckpt.interop.zarr_store import ViewStore
dask.config.set(scheduler="synchronous")

def cycle(path):
    with lazyckpt.open(path, cache=False) as view:
        group = zarr.open_group(ViewStore(view), mode="r")
        for _, array in list(group["weights"].arrays())[:2]:
            array[...]
        t = next(iter(view.values()))
        t.to_dask().sum().compute(), numpy.asarray(t)
        view.to_frame() if hasattr(view, "to_frame") else None
    with xarray.open_datatree(path, engine="lazyckpt") as tree:
        for node in list(tree.subtree)[:3]:
            [variable.values for variable in node.variables.values()]
"""


def test_handles_of_zarr_dask_and_xarray(small: Path, zero_cases: Mapping[str, Case]) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("dask")
    pytest.importorskip("xarray")
    check(grown(_HANDLES, often(160), small, zero_cases["zero2_aligned_round_robin"].path), 4 * MIB, threads=8)


_EXPORT = """
import shutil
folder = tempfile.mkdtemp()

def cycle(path):
    with lazyckpt.open(path, cache=False) as view:
        dest = os.path.join(folder, "out{ending}")
        view.{method}(dest, overwrite=True)
"""
_EXPORTS = {
    "to_safetensors": "", "to_torch": ".pt", "to_dcp": "", "to_zarr": "", "to_universal": "", "to_virtual": ".json",
}  # fmt: skip


@pytest.mark.parametrize("method", sampled(_EXPORTS, keep=["to_safetensors", "to_torch", "to_zarr"]))
def test_exports_again_and_again(small: Path, zero_cases: Mapping[str, Case], method: str) -> None:
    work = _EXPORT.format(method=method, ending=_EXPORTS[method])
    path = small if method == "to_zarr" else zero_cases["zero2_aligned_round_robin"].path  # many arrays are many files
    check(grown(work, often(200), path), 4 * MIB)


_LOOKS_AT_VALUES = """
def cycle(path):
    with lazyckpt.open(path, cache=False) as view:
        [t.stats() for t in list(view.values())[:2]]
        view.stats(), view.to_frame(), str(lazyckpt.diff(view, view)), view.tree(), view.explain()
"""


def test_statistics_and_differences(small: Path, zero_cases: Mapping[str, Case]) -> None:
    check(grown(_LOOKS_AT_VALUES, often(160), small, zero_cases["zero2_aligned_round_robin"].path), 4 * MIB)


# -- threads


def test_sixty_four_threads_on_one_view(
    zero_cases: Mapping[str, Case], dcp_cases: Mapping[str, Case], torch_cases: Mapping[str, Case]
) -> None:
    """Each reads slices and whole tensors of all states, in an order of its own, and gets what is there."""
    for case in (complete(zero_cases["zero3_sub_groups"]), dcp_cases["zstd"], torch_cases["views"]):
        view = lazyckpt.open(case.path, cache=False)
        wanted = [(s, name, whole) for s, names in case.truth.items() for name, whole in names.items()]
        wrong: list[object] = []
        ready = threading.Barrier(64)

        def work(
            seed: int, view: Any = view, wanted: Any = wanted, wrong: Any = wrong, ready: threading.Barrier = ready
        ) -> None:
            chosen = random.Random(seed).sample(wanted, min(len(wanted), 12))
            try:
                ready.wait(60)
                for state, name, whole in chosen:
                    same(view.states[state][name][...], whole, (seed, name))
                    if whole.ndim:
                        row = seed % len(whole) if len(whole) else 0
                        same(view.states[state][name][row : row + 2], whole[row : row + 2], (seed, name))
            except BaseException as e:
                wrong.append(e)

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a deadlock"
        assert not wrong, wrong[:3]
        view.close()
