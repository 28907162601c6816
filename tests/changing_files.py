"""Reads a file in every way while it changes. Run as a program, so that a signal that kills is seen:
``python -m tests.changing_files PATH CHANGE``; exits with 0 if every read gave the old bytes or ChangedFileError.
In place of CHANGE: ``touch`` or ``fault``, and ``faulthandler`` to have that enabled."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lazyckpt

torch.set_num_threads(1)

ROWS, COLUMNS = 600, 1100
OLD = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)
READS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda t: t[3],
    "an element": lambda t: t[-1, -1],
    "rows": lambda t: t[10:500],
    "all": lambda t: t[...],
    "a column": lambda t: t[:, 7],
    "columns": lambda t: t[:, 7:9],
    "strided": lambda t: t[::2, ::3],
    "backwards": lambda t: t[::-5],
    "listed": lambda t: t[[599, 3]],
    "to": lambda t: t.to(),
    "to a dtype": lambda t: t.to(torch.float64),
    "numpy": lambda t: t.numpy(),
    "lazily": lambda t: t.lazy[5:9][...],
}


def save(path: Path, value: torch.Tensor) -> None:
    torch.save({"w": value}, path)


def replace(path: Path) -> None:
    save(path.with_suffix(".new"), -OLD)
    os.replace(path.with_suffix(".new"), path)


def rewrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = bytes(data).index(OLD[0, :16].numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write((-OLD).numpy().tobytes())


def rewrite_quietly(path: Path) -> None:
    before = path.stat()
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def save_again(path: Path) -> None:
    save(path, -OLD)


CHANGES = {f.__name__: f for f in (replace, rewrite, rewrite_quietly, truncate, cut, save_again)}


def right(read: Callable[[Any], Any], t: Any, want: torch.Tensor) -> bool:
    """Whether it gave the old bytes; False if the change was noticed. Anything else is an error."""
    try:
        got = read(t)
    except lazyckpt.ChangedFileError:
        return False
    assert np.array_equal(np.asarray(got), np.asarray(want)), "other numbers"
    return True


def main(path: Path, change: str) -> None:
    wants = {"backwards": OLD.flip(0)[::5], "to": OLD, "to a dtype": OLD.double(), "numpy": OLD, "lazily": OLD[5:9]}
    wants |= {name: read(OLD) for name, read in READS.items() if name not in wants}
    for used in (False, True):
        path.unlink(missing_ok=True)
        save(path, OLD)
        t = lazyckpt.open(path)["w"]
        if used or change == "rewrite_quietly":
            for name, read in READS.items():
                assert right(read, t, wants[name])
        CHANGES[change](path)
        for name, read in READS.items():
            assert not right(read, t, wants[name]) or change == "replace", name
    for n in range(3):
        path = path.with_stem(f"x{n}")  # a file of its own: what is shown of the last one does not matter here
        save(path, OLD)
        while_threads_read(path, CHANGES[change], wants)


def while_threads_read(path: Path, change: Callable[[Path], None], wants: dict[str, torch.Tensor]) -> None:
    """Small slices, columns, and whole tensors, each in a thread's tight loop, until all have met the change twice."""
    view = lazyckpt.open(path)
    changed, started, stop = threading.Event(), threading.Barrier(5, timeout=60), time.monotonic() + 60

    def loop(names: tuple[str, ...]) -> None:
        after = 0
        for n, name in enumerate(cycle(names)):
            right(READS[name], view["w"], wants[name])
            if n == 0:
                started.wait()
            after += changed.is_set()
            if after > 2 * len(names) or time.monotonic() > stop:
                return

    loops = [("a row", "an element"), ("a column", "columns", "listed"), ("strided", "rows"), ("all", "to")]
    with ThreadPoolExecutor(len(loops)) as pool:
        running = [pool.submit(loop, names) for names in loops]
        started.wait()
        change(path)
        changed.set()
        for future in running:
            future.result()


def touch(path: Path) -> None:
    """A tensor that stays mapped raises in the thread that touches it, each time, and the process lives."""
    save(path, OLD)
    view = lazyckpt.open(path)
    tensors = [view["w"].to(copy=False), view.to(copy=False)["w"]]
    assert all(torch.equal(t, OLD) for t in tensors)
    other = lazyckpt.open(path.rename(path.with_stem("renamed")))["w"].to(copy=False)
    os.truncate(path.with_stem("renamed"), 0)

    def noticed(t: torch.Tensor, row: int) -> bool:
        try:
            assert t[row].sum() is not None
        except lazyckpt.ChangedFileError as e:
            return str(path.parent) in str(e)
        return False

    for t in [*tensors, other]:
        for _ in range(2):
            assert noticed(t, 300), "in this thread"
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(noticed, t, 500).result(), "in another thread"
    save(path, OLD)
    assert torch.equal(lazyckpt.open(path)["w"].to(copy=False), OLD)


def fault(path: Path) -> None:
    """A fault in somebody else's mapping ends the process, also where lazyckpt had the same addresses before."""
    save(path, OLD)
    lazyckpt.open(path)["w"].to(copy=False)
    gc.collect()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        os.truncate(path, 0)
        mapped[5000]


if __name__ == "__main__":
    if sys.argv[2] in CHANGES:
        main(Path(sys.argv[1]), sys.argv[2])
    else:
        if "faulthandler" in sys.argv:
            faulthandler.enable()
        {"touch": touch, "fault": fault}[sys.argv[2]](Path(sys.argv[1]))
