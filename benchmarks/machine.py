"""The machine and the versions, as part of every result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PEERS = ("torch", "safetensors", "deepspeed", "zarr", "numcodecs", "transformers", "fastsafetensors", "instanttensor")


def describe(folder: Path) -> dict[str, Any]:
    """The processor, memory, kernel, the file system of ``folder``, Python, and the versions of the peers."""
    return {
        "processor": _line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(folder),
        "accelerator": _accelerator(),
        "Python": platform.python_version(),
        "versions": {name: version for name in PEERS if (version := _version(name))},
    }


def revision() -> dict[str, Any]:
    """The commit that is measured, whether files differ from it, and the time."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no", "lazyckpt")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _line(file: str, key: str) -> str:
    if not Path(file).exists():
        return ""
    lines = (line.partition(":") for line in Path(file).read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _file_system(folder: Path) -> str:
    """The type of the file system that holds the folder: that of the longest mount point above it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return ""
    here, found = str(folder.resolve()), ("", "")
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        if (here + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
