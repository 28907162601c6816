"""Opens files one by one, each in a forked child with a limit on memory and time, and tells what became of it.

Run as ``python -m tests.bomb_range`` with paths on the standard input; writes a JSON line per path. The parent has
imported everything beforehand and starts no threads, so a child costs milliseconds and its memory can be measured.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import torch

import lazyckpt

SECONDS = 10  # of the processor's time; a busy machine must not fail a test
MEMORY = 3 << 30  # bytes of address space beyond what the imports take: over this, allocations fail


def use(path: str) -> None:
    """All that a user would do with it at once."""
    view = lazyckpt.open(path)
    repr(view), view.tree(), view.explain(), view.problems
    try:
        repr(dict(view.meta))
    except ValueError as e:  # Python itself refuses to print an int of thousands of digits
        assert "integer string conversion" in str(e), e
    for name in list(view)[:100]:
        try:
            view[name][...]
        except lazyckpt.LazyckptError as e:
            assert view[name].nbytes > 1 << 30, e  # it opened, so all but the largest must read
    del view
    gc.collect()


def prepare() -> None:
    """Import what using a file imports: a child then imports nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"w": torch.ones(2)}, Path(folder) / "harmless.pt")
            use(str(Path(folder) / "harmless.pt"))
        with open(writing, "w") as pipe:
            pipe.write("\n".join(sys.modules))
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        names = pipe.read().split()
    os.waitpid(pid, 0)
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(ImportError):  # some are made by other modules
                importlib.import_module(name)
    gc.freeze()  # the collections of a child need not look through all that was imported


def child(path: str, out: int) -> None:
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    try:
        use(path)
        result = ["view", ""]
    except lazyckpt.LazyckptError as e:
        result = ["LazyckptError", str(e)[:2000]]
    except BaseException as e:
        result = [type(e).__name__, str(e)[:200]]
    os.write(out, json.dumps(result).encode())
    os._exit(0)


def explode(path: str) -> dict[str, object]:
    """-> outcome ("view", the name of an error, "signal 11"), message, seconds of the
    processor, peak memory of the child in bytes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        child(path, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    outcome, message = json.loads(answer) if answer else (f"signal {os.waitstatus_to_exitcode(status)}", "")
    seconds = usage.ru_utime + usage.ru_stime
    return {"outcome": outcome, "message": message, "seconds": seconds, "memory": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    prepare()
    for line in sys.stdin:
        print(json.dumps(explode(line.strip())), flush=True)
