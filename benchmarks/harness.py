"""What the benchmarks share: paired timing, pages of a file in the system's cache, peak memory of a child."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One figure: ours, the peer's, and what their ratio (or the figure itself) should be at most."""

    what: str
    ours: str
    peer: str
    ratio: float
    limit: float

    @property
    def met(self) -> bool:
        return self.ratio <= self.limit


def paired(ours: Callable[[], Any], peer: Callable[[], Any], runs: int = 15) -> tuple[float, float, float]:
    """Median seconds of each, run in turn, and the median of the ratios pair by pair (ours / peer)."""
    ours(), peer()
    a, b = [], []
    for _ in range(runs):
        a.append(seconds(ours))
        b.append(seconds(peer))
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in zip(a, b, strict=True))


def seconds(do: Callable[[], Any]) -> float:
    """What one call takes."""
    start = time.perf_counter()
    result = do()
    taken = time.perf_counter() - start
    del result  # freeing it is not what is measured
    return taken


def show_seconds(s: float) -> str:
    return f"{s * 1e6:.1f} us" if s < 1e-3 else f"{s * 1e3:.1f} ms" if s < 1 else f"{s:.2f} s"


def drop_cache(path: Path) -> None:
    """Put the file's pages out of the system's cache."""
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(path: Path) -> int:
    """Bytes of the file that are in the system's cache (whole pages)."""
    with (
        path.open("rb") as f,
        mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as m,
    ):
        pages = -(-len(m) // mmap.PAGESIZE)
        state = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(m)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(m)), state) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        del start
        return sum(s & 1 for s in state) * mmap.PAGESIZE


class Fresh(NamedTuple):
    """What a piece of work took in a process of its own: seconds, and the bytes by which peak memory grew."""

    seconds: float
    peak: int


def run_fresh(setup: str, work: str) -> Fresh:
    """Run ``work`` in a new Python, after ``setup``, which is not measured. Memory is the peak of the resident memory
    less what was resident before; file pages that the process maps count too."""
    program = f"""
import re, time
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
def now():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
{setup}
open("/proc/self/clear_refs", "w").write("5")
before, start = now(), time.perf_counter()
{work}
taken = time.perf_counter() - start
print(taken, peak() - before)
"""
    # modules that are loaded on first use are compiled once, as after an installation, not in every run
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr)
    seconds, grown = done.stdout.split()[-2:]
    return Fresh(float(seconds), int(grown))


def peak_growth(setup: str, work: str) -> int:
    """The bytes of `run_fresh`."""
    return run_fresh(setup, work).peak


def report(title: str, rows: list[Row]) -> None:
    """Print a table in Markdown."""
    print(f"\n## {title}\n\n| what | lazyckpt | peer | ratio | wanted | |\n|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r.what} | {r.ours} | {r.peer} | {r.ratio:.2f} | <= {r.limit:g} | {'met' if r.met else 'MISSED'} |")
