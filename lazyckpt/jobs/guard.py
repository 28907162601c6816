"""Folders that no other user can write to: creation, verification and access through descriptors.

A staging directory has a predictable name, in a folder where others may be able to write. It is therefore created with
mode 0700. An existing one is used only if it is a folder and not a link, belongs to the owner of files that this
process creates there, and is not writable by anybody else. Files below it are accessed through descriptors, without
following links, so that replacing a name with a link has no effect.

This needs POSIX's `dir_fd` and `O_NOFOLLOW`; the locks of this package need POSIX, too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from ..errors import DestinationError
from ..io.storage.fsspec import is_url

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR)  # errors from opening a link or a file as a folder


class Owner(NamedTuple):
    """The required owner of a folder, and the mode bits for other writers that are tolerated."""

    uid: int
    others: int

    def accepts(self, info: os.stat_result) -> bool:
        """Return whether a folder has this owner and is not writable by more users."""
        return info.st_uid == self.uid and not info.st_mode & _OTHERS & ~self.others


def own_folder(path: Path) -> tuple[int, Owner]:
    """Open a folder that only its owner can write to, and create it if it is missing. Its parent must exist.

    Returns the descriptor, and the owner for `entered`. Raises DestinationError if the path is a link or a file,
    belongs to another user, or is writable by others; OSError if the folder cannot be created.
    """
    above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=above)
        fd = _open(path, above)
        try:
            return fd, _checked(fd, above, path)
        except BaseException:
            os.close(fd)
            raise
    finally:
        os.close(above)


@contextmanager
def entered(root: str, owner: Owner | None, below: Sequence[str] = (), make: bool = False) -> Iterator[int]:
    """Open a folder below ``root``, which must belong to ``owner``, and yield its descriptor. ``make`` creates missing
    folders below the root. Raises DestinationError, OSError."""
    at = opened(root, owner)
    try:
        for name in below:
            inner = _inner(name, at, make)
            os.close(at)
            at = inner
        yield at
    finally:
        os.close(at)


def opened(root: str, owner: Owner | None) -> int:
    """Open a folder that must belong to ``owner`` and return its descriptor. Raises DestinationError, OSError."""
    if owner is None:
        return os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    fd = _open(Path(root))
    if not owner.accepts(os.fstat(fd)):
        os.close(fd)
        raise _refused(Path(root), "it is not the folder that the export began with")
    return fd


def is_own(path: Path) -> bool:
    """Return whether the path is a folder with the owner that new folders of this process beside it have."""
    info = os.stat(path, follow_symlinks=False)
    return stat.S_ISDIR(info.st_mode) and (info.st_uid == os.geteuid() or info.st_uid == _usual(path.parent).st_uid)


def ignores_case(folder: str, name: str) -> bool:
    """Return whether an existing file is also found under its upper-case name."""
    return os.path.exists(os.path.join(folder, name.upper()))


def usual_mode(path: Path) -> int:
    """Return the mode that a new folder in this one gets."""
    return stat.S_IMODE(_usual(path, 0o777).st_mode)


def _usual(parent: Path | int, mode: int = 0o700) -> os.stat_result:
    """Return the status of a new folder created here with a mode: some file systems do not store owners or modes, or
    assign root's files to the user nobody."""
    above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if isinstance(parent, Path) else parent
    name = f".{uuid4().hex}"
    try:
        os.mkdir(name, mode, dir_fd=above)
        try:
            return os.stat(name, dir_fd=above, follow_symlinks=False)
        finally:
            os.rmdir(name, dir_fd=above)
    finally:
        if above is not parent:
            os.close(above)


def _open(path: Path, above: int | None = None) -> int:
    try:
        return os.open(path if above is None else path.name, _FOLDER, dir_fd=above)
    except OSError as e:
        if e.errno in _NOT_OURS:
            raise _refused(path, "it is a link or a file") from None
        raise


def _checked(fd: int, above: int, path: Path) -> Owner:
    info = os.fstat(fd)
    owner = Owner(os.geteuid(), 0)
    if owner.accepts(info):
        return owner
    usual = _usual(above)
    owner = Owner(usual.st_uid, usual.st_mode & _OTHERS)
    if not owner.accepts(info):
        theirs = info.st_uid != owner.uid
        raise _refused(path, "it belongs to another user" if theirs else "other users can write to it")
    return owner


def _inner(name: str, above: int, make: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
    return os.open(name, _FOLDER, dir_fd=above)


def _refused(path: Path, why: str) -> DestinationError:
    return DestinationError(
        f"{path}: unfinished files are kept there, and {why}: its content cannot be trusted. Nothing was written. "
        "Remove it, or choose another destination"
    )


# -- Paths that users pass.


def local_path(dest: str | os.PathLike[str]) -> Path:
    """Convert a user's path to a Path without ``..``, which does not mean the parent after a link. Raises
    DestinationError for a URL, for text that cannot be a path, and for a path that cannot be looked up."""
    text = os.fspath(dest)
    if not text:
        raise DestinationError("the destination is an empty text: name a file or a folder ('.' is the current one)")
    if is_url(text):
        raise DestinationError(f"{text}: writing to a URL is not supported: write to a local path and upload that")
    if "\0" in text:
        raise DestinationError(f"{text!r} is not a path: it contains a null character")
    path = Path(os.path.expanduser(text))
    if path.name == "..":
        path = Path(os.path.realpath(path))
    elif ".." in path.parts:
        path = Path(os.path.realpath(path.parent), path.name)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the export creates it
    except OSError as e:  # the name is too long, links form a loop, or a folder is not searchable
        raise DestinationError(f"{text}: {e.strerror or e}. Nothing was written") from e
    return path


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the ones that were missing."""
    missing = []
    at = folder
    while not at.exists():
        missing.append(at)
        at = at.parent
    if not at.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(at))
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def followed(dest: Path) -> Path:
    """Return the destination, or its target if it is a link, because a folder cannot be renamed onto a link. Raises
    DestinationError for a link of another user, which may lead anywhere."""
    if not dest.is_symlink():
        return dest
    owner = os.lstat(dest).st_uid
    if owner not in (os.geteuid(), 0) and owner != _usual(dest.parent).st_uid:
        raise DestinationError(
            f"{dest} is a link that belongs to another user: if you mean its target, name {os.readlink(dest)}"
        )
    return Path(os.path.realpath(dest))
