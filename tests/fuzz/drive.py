"""Runs targets on mutated inputs, in child processes, so that a crash of the interpreter or a hang is recorded, too."""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .contract import SIZE, Crash, Target, attempt
from .mutate import GRAMMARS

REGRESSIONS = Path(__file__).parent / "regressions"
CHUNK = 100  # inputs of one child process
PATIENCE = 60.0  # seconds for one input, after which a child that no signal reaches is killed
ADDRESSES = 8 << 30  # bytes of address space that a child may add: an allocation beyond it fails
Found = Callable[[bytes, Crash], object]
_HEADER = 16  # bytes in the shared memory: the length of the current input, and its number


def inputs(target: Target, seed: int, start: int, count: int) -> Iterator[bytes]:
    """Return inputs number ``start`` and following. Each depends only on the target, the seed and its number."""
    seeds = _seeds(target)
    for n in range(start, start + count):
        if n < len(seeds):
            yield seeds[n]
            continue
        rng = random.Random(f"{target.name} {seed} {n}")
        data = GRAMMARS[target.grammar](rng, seeds)
        yield data[:SIZE]


@functools.cache
def _seeds(target: Target) -> Sequence[bytes]:
    return target.seeds()


def run(target: Target, seed: int, seconds: float, found: Found, least: int = 0, most: int = 1 << 62) -> int:
    """Run a target until the time is over, after at least ``least`` inputs. Call ``found`` for each crash; return the
    number of inputs."""
    end = time.monotonic() + seconds
    at = 0
    while at < most and (at < least or time.monotonic() < end):
        first = at < least  # these inputs are run whatever the time
        count = min(CHUNK, most - at, least - at if first else CHUNK)
        at += _chunk(target, seed, at, count, None if first else end, found)
    return at


def _chunk(target: Target, seed: int, start: int, count: int, end: float | None, found: Found) -> int:
    """Run some inputs in a child; return how many."""
    _seeds(target)  # (before the fork: made once)
    shared = mmap.mmap(-1, _HEADER + SIZE)
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _child(target, seed, start, count, end, shared, writing)
    os.close(writing)
    status, killed = _wait(pid, shared)
    with os.fdopen(reading, "rb") as pipe:
        for line in pipe:
            where, *crash = json.loads(line)
            if where is None:
                raise RuntimeError(f"{target.name}: no input could be made: {crash[0]}")
            data = next(inputs(target, seed, where, 1))
            found(data, Crash(*crash))
    length, done = int.from_bytes(shared[:8], "little"), int.from_bytes(shared[8:16], "little")
    if status and not done and not length:
        raise RuntimeError(f"{target.name}: the process of its first input failed: no input was made")
    if status:
        data = bytes(shared[_HEADER : _HEADER + length])
        kind = "hang" if killed else f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exit"
        found(data, Crash(kind, "", "the process died: run it with --replay in a process of its own"))
    return max(done - start, 0) + 1


def _child(
    target: Target, seed: int, start: int, count: int, end: float | None, shared: mmap.mmap, writing: int
) -> None:
    status = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # libraries print warnings about damaged files
        _limit()
        for n, data in enumerate(inputs(target, seed, start, count), start):
            shared[:_HEADER] = len(data).to_bytes(8, "little") + n.to_bytes(8, "little")
            shared[_HEADER : _HEADER + len(data)] = data
            crash = attempt(target, data)
            if crash is not None:
                os.write(writing, json.dumps([n, *crash]).encode("utf-8", "replace")[:60_000] + b"\n")
            if end is not None and time.monotonic() > end:
                break
        status = 0
    except BaseException:  # of a mutator
        os.write(writing, json.dumps([None, traceback.format_exc()]).encode() + b"\n")
    finally:
        os._exit(status)


def _limit() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def _wait(pid: int, shared: mmap.mmap) -> tuple[int, bool]:
    """Wait for a child; kill it if it does not move on."""
    last, since = b"", time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status, False
        now = bytes(shared[:_HEADER])
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1], True
        time.sleep(0.005)


class Crashers:
    """A folder of crashing inputs: one for each kind and place, ``TARGET/KIND-HASH``, with its trace beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[tuple[str, str, str], int] = {}

    def add(self, target: Target, data: bytes, crash: Crash) -> Path | None:
        """Keep an input, if none of the same target, kind and place is known; return its path."""
        key = (target.name, crash.kind, crash.place)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] > 1:
            return None
        to = self.folder / target.name / f"{crash.kind.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(data)
        about = f"{crash.kind} in {crash.place}\n\n{crash.text}\n"
        to.with_name(to.name + ".txt").write_text(about, "utf-8", "replace")
        return to


def regressions(target: Target) -> Sequence[Path]:
    """The inputs on which a target once failed."""
    return sorted(path for path in (REGRESSIONS / target.name).glob("*") if path.suffix != ".txt")


def shrunk(target: Target, data: bytes, crash: Crash, rounds: int = 400) -> bytes:
    """Return a shorter input with the same crash, as far as cutting pieces goes."""
    step = max(1, len(data) // 2)
    while step and rounds:
        at = 0
        while at < len(data) and rounds:
            rounds -= 1
            shorter = data[:at] + data[at + step :]
            now: Any = attempt(target, shorter)
            if now is not None and (now.kind, now.place) == (crash.kind, crash.place):
                data = shorter
            else:
                at += step
        step //= 2
    return data
