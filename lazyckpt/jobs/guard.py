"""Folders that no other user can write to: creation, verification and access through descriptors.

A staging directory has a predictable name, in a folder where others may be able to write. It is therefore created with
mode 0700. An existing one is used only if it is a folder and not a link, belongs to the owner of files that this
process creates there, and is not writable by anybody else. Files below it are accessed through `Directory`, without
following links. On POSIX, replacing a name with a link therefore has no effect.
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
from ..formats.archives import check_outside
from ..io.directories import Directory
from ..io.storage.credentials import without_secrets
from ..io.storage.urls import is_url, without_protocol
from ..io.system import user_id

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR)  # errors from opening a link or a file as a folder


class Owner(NamedTuple):
    """The required owner of a folder, and the mode bits for other writers that are tolerated."""

    uid: int
    others: int

    def accepts(self, info: os.stat_result) -> bool:
        """Return whether a folder has this owner and is not writable by more users."""
        return info.st_uid == self.uid and not info.st_mode & _OTHERS & ~self.others


def own_folder(path: Path) -> tuple[Directory, Owner]:
    """Open a folder that only its owner can write to, and create it if it is missing. Its parent must exist.

    Returns the folder, and the owner for `entered`. Raises DestinationError if the path is a link or a file, belongs to
    another user, or is writable by others; OSError if the folder cannot be created.
    """
    with Directory(path.parent, follow=True) as above:
        with suppress(FileExistsError):
            above.mkdir(path.name, 0o700)
        folder = _open(path, above)
        try:
            return folder, _checked(folder, above, path)
        except BaseException:
            folder.close()
            raise


@contextmanager
def entered(root: str, owner: Owner | None, below: Sequence[str] = (), make: bool = False) -> Iterator[Directory]:
    """Open a folder below ``root``, which must belong to ``owner``, and yield it. ``make`` creates missing folders
    below the root. Raises DestinationError, OSError."""
    at = opened(root, owner)
    try:
        for name in below:
            inner = at.inner(name, make)
            at.close()
            at = inner
        yield at
    finally:
        at.close()


def opened(root: str, owner: Owner | None) -> Directory:
    """Open a folder that must belong to ``owner``. Raises DestinationError, OSError."""
    if owner is None:
        return Directory(root, follow=True)
    folder = _open(Path(root))
    if not owner.accepts(folder.status()):
        folder.close()
        raise _refused(Path(root), "it is not the folder that the export began with")
    return folder


def is_own(path: Path) -> bool:
    """Return whether the path is a folder with the owner that new folders of this process beside it have."""
    info = os.stat(path, follow_symlinks=False)
    return stat.S_ISDIR(info.st_mode) and (info.st_uid == user_id() or info.st_uid == _usual(path.parent).st_uid)


def ignores_case(folder: str, name: str) -> bool:
    """Return whether an existing file is also found under its upper-case name."""
    return os.path.exists(os.path.join(folder, name.upper()))


def usual_mode(path: Path) -> int:
    """Return the mode that a new folder in this one gets."""
    return stat.S_IMODE(_usual(path, 0o777).st_mode)


def _usual(parent: Path | Directory, mode: int = 0o700) -> os.stat_result:
    """Return the status of a new folder created here with a mode: some file systems do not store owners or modes, or
    assign root's files to the user nobody."""
    if isinstance(parent, Path):
        with Directory(parent, follow=True) as above:
            return _usual(above, mode)
    name = f".{uuid4().hex}"
    parent.mkdir(name, mode)
    try:
        return parent.stat(name)
    finally:
        parent.rmdir(name)


def _open(path: Path, above: Directory | None = None) -> Directory:
    try:
        return Directory(path if above is None else path.name, above)
    except OSError as e:
        if e.errno in _NOT_OURS:
            raise _refused(path, "it is a link or a file") from None
        raise


def _checked(folder: Directory, above: Directory, path: Path) -> Owner:
    info = folder.status()
    owner = Owner(user_id(), 0)
    if owner.accepts(info):
        return owner
    usual = _usual(above)
    owner = Owner(usual.st_uid, usual.st_mode & _OTHERS)
    if not owner.accepts(info):
        theirs = info.st_uid != owner.uid
        raise _refused(path, "it belongs to another user" if theirs else "other users can write to it")
    return owner


def _refused(path: Path, why: str) -> DestinationError:
    return DestinationError(
        f"{path}: unfinished files are kept there, and {why}: its content cannot be trusted. Nothing was written. "
        "Remove it, or choose another destination"
    )


# -- Paths that users pass.


def local_path(dest: str | os.PathLike[str]) -> Path:
    """Convert a user's path, or ``file://`` URL, to a Path without ``..``, which does not mean the parent after a link.
    Raises DestinationError for another URL, for text that cannot be a path, and for a path that cannot be looked up."""
    text = without_protocol(os.fspath(dest))
    if not text:
        raise DestinationError("the destination is an empty text: name a file or a folder ('.' is the current one)")
    if is_url(text):
        shown = without_secrets(text, {})
        raise DestinationError(f"{shown}: writing to a URL is not supported: write to a local path and upload that")
    if "\0" in text:
        raise DestinationError(f"{text!r} is not a path: it contains a null character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise DestinationError(f"{text!r} is not a path: it contains characters that file names cannot have") from None
    check_outside(text)
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
    if owner not in (user_id(), 0) and owner != _usual(dest.parent).st_uid:
        raise DestinationError(
            f"{dest} is a link that belongs to another user: if you mean its target, name {os.readlink(dest)}"
        )
    return Path(os.path.realpath(dest))
