"""Open directories, whose entries are accessed without following links."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .system import DIRECTORY, NOFOLLOW, NONBLOCK, OPEN, PLAIN, POSIX, lock, lock_directory


class Directory:
    """An open directory, whose entries are accessed without following links.

    On POSIX it is a descriptor: replacing a part of its path with a link has no effect. Elsewhere it is a path, whose
    entries are checked for links before they are opened.

    Parameters
    ----------
    path
        Path of the directory; its name, if ``above`` is given.
    above
        The directory that contains it.
    follow
        Whether the path may be a link.

    Raises
    ------
    OSError
        The directory does not exist, or is a link (ELOOP) or a file (ENOTDIR).
    """

    __slots__ = ("_at", "fd", "path")

    path: str

    def __init__(self, path: str | Path, above: Directory | None = None, follow: bool = False) -> None:
        self.path = os.fspath(path) if above is None else os.path.join(above.path, path)
        self.fd: int | None = None
        if POSIX:
            flags = DIRECTORY if follow else DIRECTORY | NOFOLLOW
            self.fd = os.open(path, flags, dir_fd=None if above is None else above.fd)
            self._at = os.fstat(self.fd)
            return
        self._at = os.stat(self.path)
        if not follow and _is_link(self.path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)
        if not stat.S_ISDIR(self._at.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def status(self) -> os.stat_result:
        """Return the status of the directory that was opened."""
        return self._at if self.fd is None else os.fstat(self.fd)

    def inner(self, name: str, make: bool = False) -> Directory:
        """Open a directory in this one; ``make`` creates it if it is missing."""
        try:
            return Directory(name, self)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):
            self.mkdir(name)
        return Directory(name, self)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a file and return its descriptor. Raises OSError, also for a link (ELOOP)."""
        if not POSIX and _is_link(self._name(path)):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._name(path))
        return os.open(self._name(path), flags | PLAIN | NOFOLLOW | NONBLOCK, mode, dir_fd=self.fd)

    def mkdir(self, name: str, mode: int = 0o777) -> None:
        os.mkdir(self._name(name), mode, dir_fd=self.fd)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of an entry itself, not of a link's target."""
        return os.stat(self._name(name), dir_fd=self.fd, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        os.unlink(self._name(name), dir_fd=self.fd)

    def rmdir(self, name: str) -> None:
        os.rmdir(self._name(name), dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with its contents. Links in it are removed, their targets are not."""
        if stat.S_ISDIR(self.stat(name).st_mode) and not _is_junction(self.stat(name)):
            shutil.rmtree(self._name(name), dir_fd=self.fd)
        else:
            self.unlink(name)

    def replace(self, name: str, to: str) -> None:
        """Rename a file within the directory, replacing an existing file."""
        os.replace(self._name(name), self._name(to), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def move(self, name: str, to: Path) -> None:
        """Move a file to a path on the same file system, replacing an existing file."""
        os.replace(self._name(name), to, src_dir_fd=self.fd)

    def become(self, name: str, to: Path) -> None:
        """Move a directory to a path on the same file system, which may be that of an empty directory."""
        _free(to)
        os.rename(self._name(name), to, src_dir_fd=self.fd)

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return os.listdir(self.path if self.fd is None else self.fd)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield all entries below this directory that are not directories: (path from here, status)."""
        if self.fd is None:
            for folder, _, found in os.walk(self.path):
                for name in found:
                    path = os.path.join(folder, name)
                    yield os.path.relpath(path, self.path).replace(os.sep, "/"), os.lstat(path)
            return
        for where, _, found, at in os.fwalk(".", dir_fd=self.fd):
            for name in found:
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                yield os.path.normpath(os.path.join(where, name)), status

    def _name(self, name: str) -> str:
        return name if self.fd is not None else os.path.join(self.path, name)


def rename_directory(path: str | Path, to: Path) -> None:
    """Rename a directory to a path that is free or that of an empty directory."""
    _free(to)
    os.rename(path, to)


def open_unfollowed(path: str | Path) -> int:
    """Open a file for reading, but not a link, and return its descriptor. Raises OSError."""
    if not POSIX and _is_link(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    return os.open(path, OPEN | NOFOLLOW)


def _free(path: Path) -> None:
    if not POSIX and path.is_dir():  # Windows renames nothing onto a directory, not even onto an empty one
        path.rmdir()


def _is_link(path: str | Path) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode) or _is_junction(status)


def _is_junction(status: os.stat_result) -> bool:
    return getattr(status, "st_reparse_tag", 0) == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1)


@contextmanager
def alone_in(path: str | Path) -> Iterator[Directory]:
    """Wait until no other process is in such a block for the directory, and yield it, open. On file systems without
    locks, do not wait.

    The lock is on the directory itself and ends with the process. Where directories cannot be locked, a file in the
    folder for temporary files is locked instead; its name derives from the directory's path.
    """
    with Directory(path, follow=True) as directory:
        if directory.fd is not None and lock_directory(directory.fd):
            yield directory
            return
        name = hashlib.sha256(os.path.normcase(os.path.realpath(path)).encode("utf-8", "surrogatepass")).hexdigest()
        fd = os.open(os.path.join(tempfile.gettempdir(), f"lazyckpt-{name[:32]}.lock"), os.O_RDWR | os.O_CREAT | PLAIN)
        try:
            with suppress(OSError):
                _wait_for(fd)
            yield directory
        finally:
            os.close(fd)


def _wait_for(fd: int) -> None:
    while True:
        try:
            return lock(fd)
        except BlockingIOError:
            time.sleep(0.02)
