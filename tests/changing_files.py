"""Reads a file in every way while it changes. Run as a program, so that a signal that kills is seen:
``python -m tests.changing_files PATH CHANGE``; exits with 0 if every read gave the old bytes or ChangedFileError."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lazyckpt

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
    for _ in range(6):
        path.unlink(missing_ok=True)
        save(path, OLD)
        while_threads_read(path, CHANGES[change], wants)


def while_threads_read(path: Path, change: Callable[[Path], None], wants: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open(path)
    go, stop = threading.Event(), threading.Event()

    def loop(number: int) -> None:
        while not stop.is_set():
            for name, read in list(READS.items())[number:] + list(READS.items())[:number]:
                right(read, view["w"], wants[name])
                go.set()

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(loop, 2 * n) for n in range(6)]
        go.wait(30)
        change(path)
        stop.wait(0.05)
        stop.set()
        for future in running:
            future.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
