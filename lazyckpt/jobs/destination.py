"""Where exports go: files in a folder, a whole folder, a zip file, or a prefix of an object store.

A destination checks that what is written may appear there, and makes what is complete appear. Until then whatever is
there stays as it is. (That outlives the process, not the machine: the system is not asked to flush its cache to the
disk.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ChangedFileError, DestinationError
from ..formats.zarr.documents import JOB
from ..formats.zarr.tree import ROOTS
from ..io.pool import each
from ..io.storage.base import Store
from ..io.storage.fsspec import is_url
from ..lazy import LazyArray
from .places import LEDGER, PART, PIECE, Bucket, Folder
from .publish import check_replaceable, reveal


class Destination(ABC):
    """A place of the local file system. ``place``: its path, which staging folders are named after."""

    place: Path
    one_by_one = False  # whether files appear one after the other, so that a call may be killed between them

    @abstractmethod
    def check(self, there: Set[str] = frozenset()) -> None:
        """Raise DestinationError if what is written must not appear there. ``there``: the keys of files that an earlier
        call has put there already."""

    @abstractmethod
    def publish(self, content: Folder) -> None:
        """Make the files of a folder, which are complete, appear."""

    @abstractmethod
    def path(self, key: str) -> Path:
        """Where a file is going to be."""


@dataclass(frozen=True, slots=True)
class Files(Destination):
    """Files, among others in a folder, or one file.

    ``place``: the folder, or the file if it is one. ``keys``: their names, in the order in which they appear.
    ``tensors``: those that are read. ``of_family``: whether a file of some name in the folder would be mistaken for one
    of these; None where nothing else can be. ``index``: whether the last file says what is in the others. ``ending``:
    that of a file, for an error. ``apart``: checks that the place is not in the checkpoint that is read.
    """

    place: Path
    keys: Sequence[str]
    tensors: Sequence[LazyArray]
    overwrite: bool
    one: bool = False
    of_family: Callable[[str], bool] | None = None
    index: bool = False
    ending: str = ""
    apart: Callable[[Path, Iterable[LazyArray]], None] | None = None

    one_by_one = True

    def path(self, key: str) -> Path:
        return self.place if self.one else self.place / key

    def check(self, there: Set[str] = frozenset()) -> None:
        sources = source_files(self.tensors)
        if self.apart is not None:
            self.apart(self.place, self.tensors)
        if not self.one:
            self._check_folder(sources)
        check_paths([self.path(key) for key in self.keys if key not in there], sources, self.overwrite)

    def _check_folder(self, sources: set[Path]) -> None:
        folder = self.place
        if folder.is_file():
            raise DestinationError(f"{folder} is a file: name a folder, or a file that ends with {self.ending}")
        if self.of_family is None or not folder.is_dir():
            return
        if any(source.parent == Path(os.path.realpath(folder)) for source in sources):
            raise DestinationError(f"{folder} holds the checkpoint that is read: choose another folder")
        others = sorted(name for name in os.listdir(folder) if name not in self.keys and self.of_family(name))
        if others:
            raise DestinationError(
                f"{folder} holds other weights, which would be mistaken for part of these: {', '.join(others[:3])}"
                f"{', ...' if len(others) > 3 else ''}. Remove them or choose another folder"
            )

    def publish(self, content: Folder) -> None:
        if not self.one and not self.place.exists():
            content.become(self.place)
            return
        with alone(self.path(self.keys[0]).parent):
            there = [key for key in self.keys if content.size(key) is not None]
            if self.index and self.keys[-1] in there:
                self.path(self.keys[-1]).unlink(missing_ok=True)  # an old index must not speak of new files
            for key in there:
                content.move(key, self.path(key))


@dataclass(frozen=True, slots=True)
class Whole(Destination):
    """A folder that appears as a whole, in the place of an older one of its kind. ``other``: why a folder with files of
    these names is not one; None if it is. ``hint``: what may be named besides a folder."""

    place: Path
    tensors: Sequence[LazyArray]
    overwrite: bool
    other: Callable[[Sequence[str]], str | None]
    hint: str = ""

    def path(self, key: str) -> Path:
        return self.place / key

    def check(self, there: Set[str] = frozenset()) -> None:
        place = self.place
        check_apart(place, self.tensors)
        check_replaceable(place)
        if place.exists() and not place.is_dir():
            raise DestinationError(f"{place} is a file: name a folder{self.hint}")
        names = os.listdir(place) if place.is_dir() else []
        if names and (why := self.other(names)) is not None:
            raise DestinationError(f"{place} is not empty, {why}: choose another folder")
        if names and not self.overwrite:
            raise _taken(place)

    def publish(self, content: Folder) -> None:
        reveal(content, self.place)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of folder, for `Whole`: what it is called, and the files or folders in it that make it one."""

    name: str
    marks: tuple[str, ...]

    def __call__(self, names: Sequence[str]) -> str | None:
        return None if set(self.marks) <= set(names) else f"and no {self.name}"


@dataclass(frozen=True, slots=True)
class Zip(Destination):
    """A zip file of all files, not compressed, as zarr's ZipStore reads it."""

    place: Path
    tensors: Sequence[LazyArray]
    overwrite: bool

    def path(self, key: str) -> Path:
        return self.place

    def check(self, there: Set[str] = frozenset()) -> None:
        check_apart(self.place, self.tensors)
        check_paths([self.place], set(), self.overwrite)

    def publish(self, content: Folder) -> None:
        complete = {key: size for key, size in content.find().items() if key not in (JOB, LEDGER)}
        packed = f"packed{PART}"
        with (
            open(content.open(packed, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        ):
            for key in sorted(complete):
                info = zipfile.ZipInfo(key, (1980, 1, 1, 0, 0, 0))
                info.external_attr = 0o644 << 16
                info.file_size = complete[key]  # decides whether it needs zip64
                with open(content.open(key, os.O_RDONLY), "rb") as source, archive.open(info, "w") as target:
                    shutil.copyfileobj(source, target, PIECE)
        content.move(packed, self.place)


@dataclass(frozen=True, slots=True)
class Remote:
    """A prefix of an object store, which holds nothing that a reader opens before the last file is there."""

    bucket: Bucket
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Session:
    """A transaction of the caller's, who commits it. ``write`` puts everything into it."""

    write: Callable[[], None]


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
        for path in {fragment.extent.path for fragment in tensor._held.fragments}:
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
            raise _taken(path)


def _taken(path: Path) -> DestinationError:
    return DestinationError(f"{path} exists already: remove it, choose another place, or pass overwrite=True")


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


def check_room(folder: Path, total: int) -> None:
    """Raise DestinationError if there is no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if total > free:
        raise DestinationError(f"{folder}: {total:,} bytes are to be written, {free:,} are free there")
