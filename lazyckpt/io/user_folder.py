"""The user's cache folder: files that only the user can have written.

The index cache and the block cache have a folder each, `index` and `blocks`, in ``LAZYCKPT_CACHE_DIR`` or the user's
cache folder of the operating system. A folder, or a file in it, is used only if the user owns it, if no
one else may write to it, and if it is no link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .directories import Directory
from .system import user_id

OFF = ("0", "false", "no", "off")
ON = ("1", "true", "yes", "on")


class Refused(Exception):
    """A file, or the whole folder, must not be used. The message says why."""


def enabled() -> bool:
    """Return whether the environment allows caches (``LAZYCKPT_CACHE=0`` disables them)."""
    return os.environ.get("LAZYCKPT_CACHE", "").strip().lower() not in OFF


def location() -> Path:
    """Return the parent folder of all caches. Raises Refused if there is none."""
    chosen = os.environ.get("LAZYCKPT_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    from platformdirs import user_cache_path  # not needed by small checkpoints

    found = user_cache_path("lazyckpt", appauthor=False)
    if not found.is_absolute():
        raise Refused("the user has no home folder")
    return found


@contextmanager
def opened(path: Path, make: bool = False) -> Iterator[Directory]:
    """Yield a folder of the cache. ``make`` creates it, closed to other users. Raises Refused if it is not the user's
    own, OSError if it is absent."""
    if make and not path.is_dir():
        _check_home(path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    with Directory(path) as directory:
        check(directory.status(), str(path))
        yield directory


def check(status: os.stat_result, what: str, private: bool = False) -> None:
    """Raise Refused for a file or folder that others than this user may have written; ``private``: or may read.

    Windows has no such numbers: there the user's profile is protected as a whole."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise Refused(f"{what} is no file")
    if os.name == "nt":
        return
    if status.st_uid != user_id():
        raise Refused(f"{what} belongs to another user")
    if status.st_mode & (0o077 if private else 0o022):
        raise Refused(f"{what} is open to others: its permissions are {stat.S_IMODE(status.st_mode):o}")
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise Refused(f"{what} has a second name")


def _check_home(path: Path) -> None:
    """Raise Refused if root, by sudo, would create a folder in the home of a user, who could not use it any more."""
    if os.name != "nt" and user_id() == 0:
        there = next(folder for folder in path.parents if folder.exists())
        if there.stat().st_uid:
            raise Refused(f"{there} belongs to another user")
