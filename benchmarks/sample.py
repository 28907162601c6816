"""One measurement: the seconds of a call, and what it cost in bytes, system calls and page faults."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_IO = {"rchar": "bytes", "syscr": "read calls", "syscw": "write calls", "read_bytes": "disk bytes"}


class Sample(NamedTuple):
    """What one call took. ``counts`` holds everything but the time, by name."""

    seconds: float
    counts: Mapping[str, float]

    def quantity(self, name: str) -> float:
        return self.seconds if name == "seconds" else self.counts[name]


Sampler = Callable[[int], Sample]  # its argument: the number of calls to divide by


def counters() -> dict[str, float]:
    """What this process has read, called and faulted so far; only what the system counts."""
    found: dict[str, float] = {}
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found = {"minor faults": usage.ru_minflt, "major faults": usage.ru_majflt}
    io = Path("/proc/self/io")
    if io.exists():
        values = dict(line.split(": ") for line in io.read_text().splitlines())
        found |= {name: int(values[key]) for key, name in _IO.items()}
    return found


def _overhead() -> dict[str, float]:
    """What `counters` itself adds between two calls of it."""
    counters()
    before = counters()
    return _difference(counters(), before)


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


class Timed:
    """A call in this process, after ``before``, which is not measured and gives the call its argument, if any."""

    def __init__(self, do: Callable[..., Any], before: Callable[[], tuple[Any, ...]] | None = None) -> None:
        self.do, self.before = do, before
        self.own = _overhead()

    def __call__(self, calls: int = 1) -> Sample:
        arguments = self.before() if self.before is not None else ()
        do, times = self.do, range(calls)
        before, start = counters(), time.perf_counter()
        for _ in times:
            result = do(*arguments)
        taken = time.perf_counter() - start
        spent = _difference(counters(), before)
        del result  # freeing the last result is not what is measured
        return Sample(taken / calls, {name: max(0, n - self.own[name]) / calls for name, n in spent.items()})


class Cold:
    """A call whose files are not in the system's cache. It adds the count ``resident``: bytes that came into the cache.

    ``prepare`` opens anew for each call: pages that a process maps would stay in the cache.
    """

    def __init__(self, files: Iterable[Path], prepare: Callable[[], Any], do: Callable[[Any], Any]) -> None:
        self.files, self.prepare = list(files), prepare
        self.timed = Timed(do, lambda: (self.handle,))

    def __call__(self, calls: int = 1) -> Sample:
        self.handle = None
        gc.collect()
        self.handle = self.prepare()
        for path in self.files:
            drop_cache(path)
        before = sum(map(resident_bytes, self.files))
        sample = self.timed(1)
        grown = sum(map(resident_bytes, self.files)) - before
        self.handle = None
        return sample._replace(counts={**sample.counts, "resident": grown})


def drop_cache(path: Path) -> None:
    """Remove the file's pages from the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path, anew: bool = False) -> None:
    """Bring a file, or the files of a folder, into the system's cache.

    With ``anew``, pages that are there are dropped first, so that the cache is the same whatever was read before.
    """
    for one in [path] if path.is_file() else path.rglob("*"):
        if one.is_file():
            if anew:
                drop_cache(one)
            with one.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def resident_bytes(path: Path) -> int:
    """Bytes of the file that are in the system's cache (whole pages)."""
    if not path.stat().st_size:
        return 0
    access = {"prot": mmap.PROT_READ | mmap.PROT_WRITE, "flags": mmap.MAP_PRIVATE}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, **access) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        state = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), state) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        del start
        return sum(s & 1 for s in state) * mmap.PAGESIZE


def memory(field: str) -> int:
    """A line of /proc/self/status, in bytes: "VmRSS" (now) or "VmHWM" (the peak)."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
