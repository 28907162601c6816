"""Measurements in fresh processes: forks of a process that has done the imports, which are not measured.

``python -m benchmarks.host SETUP`` runs the statements of SETUP once. For each line of its standard input, a program
as JSON, it forks; the fork runs the program and replies with one line of JSON: the seconds, and the counts. Two of them
are of resident memory, in bytes: ``peak``, by how much it grew at most, and ``held``, by how much it is larger at the end.
Pages of files that the process maps count too. A program that measures something itself sets ``seconds`` or ``counts``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .sample import Sample, counters, memory

ROOT = Path(__file__).parents[1]


class Fresh:
    """A program that runs in a new process each time. ``setup`` are the statements before it, which run once."""

    def __init__(self, setup: str, work: str) -> None:
        self.setup, self.work = setup, work
        self._host: subprocess.Popen[str] | None = None

    def __call__(self, calls: int = 1) -> Sample:
        if self._host is None:
            # modules that are imported on first use are compiled once, as after an installation
            env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
            command = [sys.executable, "-m", "benchmarks.host", self.setup]
            self._host = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._host.stdin is not None and self._host.stdout is not None
        self._host.stdin.write(json.dumps(self.work) + "\n")
        self._host.stdin.flush()
        line = self._host.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self._host.wait()}; its program: {self.work}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return Sample(reply["seconds"], reply["counts"])

    def close(self) -> None:
        if self._host is not None:
            assert self._host.stdin is not None
            self._host.stdin.close()
            self._host.wait()
            self._host = None


@contextlib.contextmanager
def fresh(setup: str, work: str) -> Iterator[Fresh]:
    """One program, for the time of the context."""
    program = Fresh(setup, work)
    try:
        yield program
    finally:
        program.close()


def _measure(work: str, names: dict[str, Any]) -> dict[str, Any]:
    code = compile(work, "<benchmark>", "exec")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    rss, before, start = memory("VmRSS"), counters(), time.perf_counter()
    exec(code, names)
    taken = time.perf_counter() - start
    spent = {name: n - before[name] for name, n in counters().items()}
    peak = memory("VmHWM") - rss
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "seconds": names.get("seconds", taken),
        "counts": {**spent, "peak": peak, "held": memory("VmRSS") - rss, **names.get("counts", {})},
    }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the programs print does not get between the replies
    names: dict[str, Any] = {}
    exec(compile(sys.argv[1], "<setup>", "exec"), names)
    for line in sys.stdin:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            reply = _measure(json.loads(line), names)
        except BaseException:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
