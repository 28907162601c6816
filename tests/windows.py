"""Make this process resemble one on Windows, as far as files are concerned: call `pretend` before lazyckpt is imported.

- What POSIX has and Windows lacks is removed from `os`; there is no fcntl, but a msvcrt with its locks.
- Directories cannot be opened, and nothing is renamed onto a directory.
- What this process has open cannot be renamed, replaced or removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # noqa: F401  before anything is taken away: it looks for it when it is imported

LACKING = (
    "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "preadv", "pwritev", "pread", "pwrite", "posix_fadvise",
    "copy_file_range", "sendfile", "register_at_fork", "fork", "geteuid", "getuid", "fwalk", "memfd_create", "uname",
    "sched_getaffinity", "mkfifo",
)  # fmt: skip


def pretend() -> None:
    # modules that ask for POSIX when they are imported
    import asyncio
    import multiprocessing
    import platform
    import shutil
    import subprocess

    import fsspec
    import zarr
    from tqdm import auto

    platform.uname()
    assert all((asyncio, multiprocessing, shutil, subprocess, fsspec, zarr, auto))
    msvcrt: Any = ModuleType("msvcrt")
    msvcrt.LK_NBLCK = 2
    msvcrt.locking = _locking
    sys.modules["msvcrt"], sys.modules["fcntl"] = msvcrt, None  # type: ignore[assignment]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    os.environ["LAZYCKPT_PORTABLE"] = "1"  # no C library
    for name in LACKING:
        if hasattr(os, name):
            delattr(os, name)
    os.supports_dir_fd.clear()
    os.supports_fd.clear()
    opens, rename, replace = os.open, os.rename, os.replace

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return opens(path, flags, *args, **options)

    def rename_file(source: Any, to: Any, **options: Any) -> None:
        if os.path.lexists(to):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", os.fspath(to))
        _check_closed(source)
        rename(source, to, **options)

    def replace_file(source: Any, to: Any, **options: Any) -> None:
        if os.path.isdir(to):
            raise PermissionError(errno.EACCES, "Access is denied", os.fspath(to))
        _check_closed(source)
        _check_closed(to)
        replace(source, to, **options)

    os.open, os.rename, os.replace = open_file, rename_file, replace_file
    os.unlink, os.remove, os.rmdir = map(_closed_only, (os.unlink, os.remove, os.rmdir))


def _closed_only(call: Callable[..., None]) -> Any:
    def checked(path: Any, **options: Any) -> None:
        _check_closed(path)
        call(path, **options)

    return checked


def _check_closed(path: Any) -> None:
    real = os.path.abspath(os.fspath(path))
    for number in os.listdir("/proc/self/fd"):
        try:
            held = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if held == real or held.startswith(f"{real}/"):
            raise PermissionError(errno.EACCES, f"it is open ({held})", real)


def _locking(fd: int, mode: int, nbytes: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, nbytes, os.lseek(fd, 0, os.SEEK_CUR))


if __name__ == "__main__":  # run a script as on Windows: python -m tests.windows SCRIPT [ARGUMENT...]
    pretend()
    script, sys.argv = sys.argv[1], sys.argv[1:]
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
