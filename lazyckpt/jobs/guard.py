"""Folders that nobody else can write to: how they are made, recognised, opened and walked.

A staging folder has a name that anybody can guess, in a folder where others may write. So it is made for its owner
alone (mode 0700). One that is there already is used only if it is a folder, not a link, belongs to whoever owns what
this process makes there, and lets nobody else write. What is below it is reached by descriptors, without following
links, so that a name that is exchanged meanwhile leads nowhere else.

This needs `dir_fd` and `O_NOFOLLOW` of POSIX, as the locks of this package do.
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
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR)  # opening a link or a file as a folder


class Owner(NamedTuple):
    """Who owns a folder, and the bits of its mode that let others write to it."""

    uid: int
    others: int

    def accepts(self, info: os.stat_result) -> bool:
        """Whether a folder has this owner, and lets no more people write."""
        return info.st_uid == self.uid and not info.st_mode & _OTHERS & ~self.others


def own_folder(path: Path) -> tuple[int, Owner]:
    """Open a folder that only its owner can write to; it is made if it is not there, its parent has to be there.

    Returns the descriptor, and the owner for `enter`. Raises DestinationError if what is there is a link or a file,
    somebody else's, or writable by others; OSError if it cannot be made.
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
    """The descriptor of a folder below ``root``, which has to be ``owner``'s; ``make``: folders below the root that
    are missing are made. Raises DestinationError, OSError."""
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
    """The descriptor of a folder, which has to be ``owner``'s. Raises DestinationError, OSError."""
    if owner is None:
        return os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    fd = _open(Path(root))
    if not owner.accepts(os.fstat(fd)):
        os.close(fd)
        raise _refused(Path(root), "it is not the folder that the export began with")
    return fd


def is_own(path: Path) -> bool:
    """Whether a folder is there that belongs to whoever owns what this process makes beside it."""
    info = os.stat(path, follow_symlinks=False)
    return stat.S_ISDIR(info.st_mode) and (info.st_uid == os.geteuid() or info.st_uid == _usual(path.parent).st_uid)


def ignores_case(folder: str, name: str) -> bool:
    """Whether a file of that name, which is there, is found under its name in upper case, too."""
    return os.path.exists(os.path.join(folder, name.upper()))


def usual_mode(path: Path) -> int:
    """Return the mode that a new folder in this one gets."""
    return stat.S_IMODE(_usual(path, 0o777).st_mode)


def _usual(parent: Path | int, mode: int = 0o700) -> os.stat_result:
    """What a folder that is made here with a mode becomes: some file systems keep no owners or modes, or give what
    root makes to nobody."""
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
        f"{path}: unfinished files are kept there, and {why}: what is in it cannot be trusted. Nothing was written. "
        "Remove it, or choose another destination"
    )


# -- Paths of users.


def local_path(dest: str | os.PathLike[str]) -> Path:
    """A path of the user's, without ``..``, which means something else behind a link than it says. Raises
    DestinationError for a URL, for what no path can be, and for what the system does not look up."""
    text = os.fspath(dest)
    if not text:
        raise DestinationError("the destination is an empty text: name a file or a folder ('.' is the current one)")
    if is_url(text):
        raise DestinationError(f"{text}: writing to a URL is not supported: write to a local path and upload that")
    if "\0" in text:
        raise DestinationError(f"{text!r} is no path: it has a null character in it")
    path = Path(os.path.expanduser(text))
    if path.name == "..":
        path = Path(os.path.realpath(path))
    elif ".." in path.parts:
        path = Path(os.path.realpath(path.parent), path.name)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is to be made
    except OSError as e:  # a name too long, links in a circle, a folder without the right to look into it
        raise DestinationError(f"{text}: {e.strerror or e}. Nothing was written") from e
    return path


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; which of them were not there."""
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
    """The destination, or what it leads to if it is a link: a folder cannot be renamed onto a link. Raises
    DestinationError for a link that belongs to somebody else, who may have made it lead anywhere."""
    if not dest.is_symlink():
        return dest
    owner = os.lstat(dest).st_uid
    if owner not in (os.geteuid(), 0) and owner != _usual(dest.parent).st_uid:
        raise DestinationError(
            f"{dest} is a link that belongs to another user: name the place that it leads to, {os.readlink(dest)}, if "
            "that is the one you mean"
        )
    return Path(os.path.realpath(dest))
