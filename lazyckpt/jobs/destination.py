"""Files that appear together: written under temporary names beside their places, renamed when all are complete.

Whatever happens before that leaves what was there as it was. (It outlives the process, not the machine: the system is
not asked to flush its cache to the disk.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ..errors import ChangedFileError, DestinationError, LazyckptError
from ..formats.zarr.tree import ROOTS
from ..io.pool import each
from ..io.storage.base import Store
from ..io.storage.fsspec import is_url
from ..lazy import LazyArray


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


def source_files(tensors: Iterable[LazyArray]) -> set[Path]:
    """The files that the tensors' checkpoints stand on."""
    return {path for store in {id(t.store): t.store for t in tensors}.values() for path in _files(store)}


def _files(store: Store) -> set[Path]:
    return {Path(os.path.realpath(os.path.join(store.root, path))) for path in store.pins}


def check_apart(dest: Path, tensors: Iterable[LazyArray]) -> None:
    """Raise DestinationError if what is written there would be in the checkpoint that is read, or in its place."""
    real = Path(os.path.realpath(dest))
    stores = {id(t.store): t.store for t in tensors}.values()
    for store in stores:
        if is_url(store.root):
            continue
        root = Path(os.path.realpath(store.root))
        if any(real in (source, *source.parents) for source in _files(store)):
            raise DestinationError(f"{dest} holds the checkpoint that is read: choose another place")
        # a file was opened in a folder that may hold anything; a folder that was opened is the checkpoint
        folder = len(store.pins) > 1 or any(name in store.pins for name in ROOTS)
        if folder and root in real.parents:
            raise DestinationError(f"{dest} is inside of the checkpoint that is read, {root}: choose another place")


def check_inside(dest: Path, tensors: Iterable[LazyArray]) -> None:
    """Raise DestinationError if a folder of files that are read has ``dest`` in it, itself or further below; unless
    only one file of it is read: that may lie in a folder with anything."""
    real = Path(os.path.realpath(dest))
    for store in {id(t.store): t.store for t in tensors}.values():
        if len(store.pins) < 2 or is_url(store.root):
            continue
        sources = _files(store)
        inside = {source.parent for source in sources} & set(real.parents)
        if inside and real not in sources:
            raise DestinationError(
                f"{dest} is inside of the checkpoint that is read, {inside.pop()}: choose another place"
            )


def check_unchanged(tensors: Iterable[LazyArray]) -> None:
    """Raise ChangedFileError or MissingFileError if a file that the tensors are read from is not what it was when it
    was opened. (Reading finds that too, but not if it happens after the last read.)"""
    files: dict[tuple[int, str], Store] = {}
    for tensor in tensors:
        for path in {fragment.extent.path for fragment in tensor.held.fragments}:
            files[id(tensor.store), path] = tensor.store

    def check(item: tuple[tuple[int, str], Store]) -> None:
        (_, path), store = item
        if path in store.pins and store.stat(path) != store.pins[path]:
            raise ChangedFileError(
                f"{store.root}/{path} was written to while it was read: what was made of it is not kept. Open the "
                "checkpoint again when nobody writes to it"
            )

    each(check, list(files.items()))


def check_paths(paths: Iterable[Path], sources: set[Path], overwrite: bool) -> None:
    """Raise DestinationError for a path that is a source's or a folder, or that is taken (unless ``overwrite``)."""
    for path in paths:
        if Path(os.path.realpath(path)) in sources:
            raise DestinationError(f"{path} is a file of the checkpoint that is read: choose another place")
        if path.is_dir():
            raise DestinationError(f"{path} is a folder: choose another name")
        if path.exists() and not overwrite:
            raise DestinationError(f"{path} exists already: remove it, choose another place, or pass overwrite=True")


@contextmanager
def appearing(sizes: Mapping[Path, int], check: Callable[[], None]) -> Iterator[dict[Path, Path]]:
    """Path -> the temporary path to write it at; all are renamed, in order, at the end of the block.

    ``sizes``: the bytes that each file, all in one folder, is going to have; the folder is made as needed. ``check``
    raises DestinationError if the files must not appear there. It is called first, and again before they do: somebody
    else may have written there meanwhile.
    Raises DestinationError if there is no room or no right to write; the block's OSErrors become DestinationErrors too.
    """
    folder = next(iter(sizes)).parent
    made: list[Path] = []
    temporary: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        check()
        made = make_folder(folder)
        check_room(folder, sum(sizes.values()))
        for path in sizes:
            temporary[path] = path.parent / f".{path.name}.{uuid4().hex}.incomplete"
        yield temporary
        with alone(folder):
            check()
            for path, part in temporary.items():
                os.replace(part, path)
                placed.append(path)
    except BaseException as e:
        for part in temporary.values():
            with suppress(OSError):
                part.unlink()
        for path in reversed(made):
            with suppress(OSError):  # somebody put a file there meanwhile
                path.rmdir()
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            done = f"Only {', '.join(p.name for p in placed)} is written" if placed else "Nothing was written"
            raise DestinationError(f"{e.filename or folder}: {e.strerror or e}. {done}") from e
        raise


@contextmanager
def folder_appearing(place: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to write in, which gets its name at the end of the block; otherwise as `appearing`."""
    part = place.parent / f".{place.name}.{uuid4().hex}.incomplete"
    made: list[Path] = []
    try:
        check()
        made = make_folder(part.parent)
        part.mkdir()
        yield part
        check()
        os.rename(part, place)
    except BaseException as e:
        shutil.rmtree(part, ignore_errors=True)
        for path in reversed(made):
            with suppress(OSError):  # somebody put a file there meanwhile
                path.rmdir()
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            raise DestinationError(f"{e.filename or place}: {e.strerror or e}. Nothing was written") from e
        raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While files are renamed in a folder, no other export does: shards of two would be mixed."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then two exports at once are the user's to avoid
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


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


def check_room(folder: Path, total: int) -> None:
    """Raise DestinationError if there is no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if total > free:
        raise DestinationError(f"{folder}: {total:,} bytes are to be written, {free:,} are free there")
