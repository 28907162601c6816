"""Measurements in fresh processes: forks of a process that has done the imports, which are not measured.

``python -m benchmarks.host IMPORTS`` runs these statements once. For each line of its standard input, two programs as
JSON, it forks. The fork runs the first, measures the second, and replies with one line of JSON: the seconds and the
counts. Two counts are of resident memory, in bytes: ``peak``, by how much it grew at most, and ``held``, by how much it
is larger at the end; pages of files that the process maps count too. A program that measures something itself sets
``counts``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from .sample import Sample, counters, memory

ROOT = Path(__file__).parents[1]


# what the programs import: all that have the same share a process, so there are few
LAZYCKPT = """
import os, shutil, torch, lazyckpt, lazyckpt.deepspeed, lazyckpt.export.registry, lazyckpt.formats.registry
list(lazyckpt.formats.registry.builtin())
list(map(lazyckpt.export.registry.writer, lazyckpt.export.registry.NAMES))
"""
DEEPSPEED = """
import argparse, os, shutil, torch
from pathlib import Path
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import zero_to_fp32
"""
_hosts: dict[str, subprocess.Popen[str]] = {}


class Fresh:
    """A program that runs in a new process each time, after ``prepare``, which is not measured.

    ``imports`` run once for all programs that have the same.
    """

    def __init__(self, imports: str, work: str, prepare: str = "") -> None:
        self.imports, self.program = imports, json.dumps([prepare, work])

    def __call__(self, calls: int = 1) -> Sample:
        host = _hosts.get(self.imports) or _start(self.imports)
        assert host.stdin is not None and host.stdout is not None
        host.stdin.write(self.program + "\n")
        host.stdin.flush()
        line = host.stdout.readline()
        if not line:
            del _hosts[self.imports]
            raise RuntimeError(f"the process ended with status {host.wait()}; its program: {self.program}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return Sample(reply["seconds"], reply["counts"])


def _start(imports: str) -> subprocess.Popen[str]:
    # modules that are imported on first use are compiled once, as after an installation
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.host", imports]
    host = _hosts[imports] = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return host


def close() -> None:
    """End the processes that have done the imports."""
    while _hosts:
        _, host = _hosts.popitem()
        assert host.stdin is not None and host.stdout is not None
        host.stdin.close()
        host.wait()
        host.stdout.close()


# -- the process that forks


def _measure(prepare: str, work: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(prepare, "<prepare>", "exec"), names)
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
        "seconds": taken,
        "counts": {**spent, "peak": peak, "held": memory("VmRSS") - rss, **names.get("counts", {})},
    }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the programs print does not get between the replies
    names: dict[str, Any] = {}
    exec(compile(sys.argv[1], "<imports>", "exec"), names)
    for line in sys.stdin:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            reply = _measure(*json.loads(line), names)
        except BaseException:
            reply = {"error": traceback.format_exc()}
        # the exit handlers of what was imported are the host's
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
