"""Files that appear together: written under temporary names beside their places, renamed when all are complete.

Whatever happens before that leaves what was there as it was. (It outlives the process, not the machine: the system is
not asked to flush its cache to the disk.)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ..errors import DestinationError
from ..io.remote import is_url
from ..tensor import LazyTensor


def local_path(dest: str | os.PathLike[str]) -> Path:
    """A path of the user's. Raises DestinationError for a URL."""
    text = os.fspath(dest)
    if is_url(text):
        raise DestinationError(f"{text}: writing to a URL is not supported: write to a local path and upload that")
    return Path(os.path.expanduser(text))


def source_files(tensors: Iterable[LazyTensor]) -> set[Path]:
    """The files that the tensors' checkpoints stand on."""
    stores = {id(t.store): t.store for t in tensors}
    return {Path(os.path.realpath(os.path.join(s.root, path))) for s in stores.values() for path in s.pins}


@contextmanager
def appearing(sizes: Mapping[Path, int], sources: set[Path], overwrite: bool) -> Iterator[dict[Path, Path]]:
    """Path -> the temporary path to write it at; all are renamed, in order, at the end of the block.

    ``sizes``: the bytes that each file is going to have. Folders are made as needed. ``sources`` are never written to.
    Raises DestinationError if a path is taken (unless ``overwrite``) or a source's, if there is no room or no right to
    write; the block's OSErrors become DestinationErrors too.
    """
    for path in sizes:
        if Path(os.path.realpath(path)) in sources:
            raise DestinationError(f"{path} is a file of the checkpoint that is read: choose another place")
        if path.is_dir():
            raise DestinationError(f"{path} is a folder: choose another name")
        if path.exists() and not overwrite:
            raise DestinationError(f"{path} exists already: remove it, choose another place, or pass overwrite=True")
    made: list[Path] = []
    temporary: dict[Path, Path] = {}
    try:
        for folder in dict.fromkeys(path.parent for path in sizes):
            made += _make(folder)
        _check_room(sizes)
        for path in sizes:
            temporary[path] = path.parent / f".{path.name}.{uuid4().hex[:8]}.incomplete"
        yield temporary
        for path, part in temporary.items():
            os.replace(part, path)
    except BaseException as e:
        for part in temporary.values():
            with suppress(OSError):
                part.unlink()
        for folder in reversed(made):
            with suppress(OSError):  # somebody put a file there meanwhile
                folder.rmdir()
        if isinstance(e, OSError) and not isinstance(e, DestinationError) and type(e).__module__ == "builtins":
            where = e.filename or next(iter(sizes)).parent
            raise DestinationError(f"{where}: {e.strerror or e}. Nothing was written") from e
        raise


def _make(folder: Path) -> list[Path]:
    """Make a folder and its parents; which of them were not there."""
    missing = []
    at = folder
    while not at.exists():
        missing.append(at)
        at = at.parent
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _check_room(sizes: Mapping[Path, int]) -> None:
    total = sum(sizes.values())
    folder = next(iter(sizes)).parent
    free = shutil.disk_usage(folder).free
    if total > free:
        raise DestinationError(f"{folder}: {total:,} bytes are to be written, {free:,} are free there")
