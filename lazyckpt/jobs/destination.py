"""Local destinations of exports: files in a folder, a whole folder, or a zip file. `remote` has those behind a URL.

A destination checks whether an export may be written there, and publishes the complete export. Until then it does not
change existing files. (The guarantee covers a crash of the process, not of the machine: caches are not flushed to
disk.)
"""

from __future__ import annotations

import os
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.expr import leaves
from ..core.fragments import fragments_of
from ..errors import ChangedFileError, DestinationError
from ..formats.zarr.documents import JOB
from ..formats.zarr.tree import ROOTS
from ..io.directories import alone_in
from ..io.pool import each
from ..io.storage.access import present
from ..io.storage.base import Store
from ..io.storage.joined import stores_of
from ..io.storage.listed import ABSENT
from ..io.storage.urls import is_url
from ..lazy import LazyArray
from .places import LEDGER, PART, PIECE, Folder
from .publish import check_replaceable, reveal

MARK_OF_MANIFEST = b'"lazyckpt_manifest"'  # among the first bytes of a manifest
_HEAD = 256


class Destination(ABC):
    """A destination in the local file system. The name of the staging directory derives from its path, ``place``."""

    place: Path
    one_by_one = False  # whether files are published one by one, so that a process may be killed in between

    @abstractmethod
    def check(self, there: Set[str] = frozenset()) -> None:
        """Raise DestinationError if the export must not be written. ``there`` are the keys of files that an earlier
        call published."""

    @abstractmethod
    def publish(self, content: Folder) -> None:
        """Move the complete files of a folder to the destination."""

    @abstractmethod
    def path(self, key: str) -> Path:
        """Return the final path of a file."""


@dataclass(frozen=True, slots=True)
class Files(Destination):
    """Files in a folder that may contain other files, or a single file.

    Attributes
    ----------
    place
        The folder, or the file if ``one`` is true.
    keys
        Names of the files, in the order in which they are published. If ``one`` is true, the first one is that of the
        file; others are written beside it.
    tensors
        The tensors that are read.
    overwrite
        Whether existing files are replaced.
    one
        Whether the destination is a single file.
    of_family
        Returns whether a file of this name in the folder would be mistaken for part of the export; None if that is
        impossible.
    index
        Whether the last file is an index of the others.
    manifest
        The name of the manifest among the files. It must not be older than any other file to be used later.
    ending
        The file extension, for an error message.
    apart
        Checks that the place is outside the checkpoint that is read.
    """

    place: Path
    keys: Sequence[str]
    tensors: Sequence[LazyArray]
    overwrite: bool
    one: bool = False
    of_family: Callable[[str], bool] | None = None
    index: bool = False
    manifest: str | None = None
    ending: str = ""
    apart: Callable[[Path, Iterable[LazyArray]], None] | None = None

    one_by_one = True

    def path(self, key: str) -> Path:
        if not self.one or key == self.keys[0]:
            return self.place if self.one else self.place / key
        return self.place.with_name(key)  # beside the file

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
            other = f", or a file that ends with {self.ending}" if self.ending else ""
            raise DestinationError(f"{folder} is a file: name a folder{other}")
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
        with alone_in(self.path(self.keys[0]).parent):
            there = [key for key in self.keys if content.size(key) is not None]
            if self.index and self.keys[-1] in there:
                self.path(self.keys[-1]).unlink(missing_ok=True)  # an old index must not refer to new files
            for key in there:
                content.move(key, self.path(key))
            _renew(self, self.manifest)


@dataclass(frozen=True, slots=True)
class Whole(Destination):
    """A folder that is published as a whole and may replace an older one of the same kind.

    ``other`` returns why a folder with files of these names is of another kind, or None if it is of this kind. ``hint``
    completes the error message for a file with other possible destinations. ``beside`` is the name of a file, a
    manifest, that is published beside the folder, because its readers do not expect it inside."""

    place: Path
    tensors: Sequence[LazyArray]
    overwrite: bool
    other: Callable[[Sequence[str]], str | None]
    hint: str = ""
    beside: str | None = None

    def path(self, key: str) -> Path:
        return self.place.with_name(key) if key == self.beside else self.place / key

    def check(self, there: Set[str] = frozenset()) -> None:
        place = self.place
        check_apart(place, self.tensors)
        check_replaceable(place)
        _check_beside(self)
        if place.exists() and not place.is_dir():
            raise DestinationError(f"{place} is a file: name a folder{self.hint}")
        names = os.listdir(place) if place.is_dir() else []
        if names and (why := self.other(names)) is not None:
            raise DestinationError(f"{place} is not empty, {why}: choose another folder")
        if names and not self.overwrite:
            raise _taken(place)

    def publish(self, content: Folder) -> None:
        _publish_beside(self, content)
        reveal(content, self.place)
        _renew(self, self.beside)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of folder, for `Whole`: its name, and the files or folders that identify it (``marks``)."""

    name: str
    marks: tuple[str, ...]

    def __call__(self, names: Sequence[str]) -> str | None:
        return None if set(self.marks) <= set(names) else f"and no {self.name}"


@dataclass(frozen=True, slots=True)
class Zip(Destination):
    """An uncompressed zip file of all files, which zarr's ZipStore can read."""

    place: Path
    tensors: Sequence[LazyArray]
    overwrite: bool
    beside: str | None = None

    def path(self, key: str) -> Path:
        return self.place.with_name(key) if key == self.beside else self.place

    def check(self, there: Set[str] = frozenset()) -> None:
        check_apart(self.place, self.tensors)
        check_paths([self.place], set(), self.overwrite)
        _check_beside(self)

    def publish(self, content: Folder) -> None:
        _publish_beside(self, content)
        complete = {key: size for key, size in content.find().items() if key not in (JOB, LEDGER)}
        packed = f"packed{PART}"
        with (
            open(content.open(packed, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        ):
            for key in sorted(complete):
                info = entry_of(key, complete[key])
                with open(content.open(key, os.O_RDONLY), "rb") as source, archive.open(info, "w") as target:
                    shutil.copyfileobj(source, target, PIECE)
        content.move(packed, self.place)


def entry_of(name: str, nbytes: int) -> zipfile.ZipInfo:
    """Return the description of a file in a zip."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o644 << 16
    info.file_size = nbytes  # zipfile decides by it whether the entry needs zip64
    return info


def _check_beside(dest: Whole | Zip) -> None:
    """Raise DestinationError for a file in the place of the manifest that is none."""
    path = None if dest.beside is None else dest.path(dest.beside)
    if path is not None and os.path.lexists(path):
        with suppress(OSError), open(path, "rb") as file:
            if MARK_OF_MANIFEST in file.read(_HEAD):
                return  # of an earlier export, perhaps of one that was killed before it was published
        raise DestinationError(f"{path} exists already and is no manifest: remove it, or choose another place")


def _renew(dest: Destination, manifest: str | None) -> None:
    """Make the manifest newer than the files that were renamed after it."""
    if manifest is not None:
        with suppress(OSError):  # then the manifest is not used, and the files are read
            os.utime(dest.path(manifest))


def _publish_beside(dest: Whole | Zip, content: Folder) -> None:
    if dest.beside is not None and content.size(dest.beside) is not None:
        content.move(dest.beside, dest.path(dest.beside))


@dataclass(frozen=True, slots=True)
class Session:
    """A transaction that the caller commits. ``write`` writes everything into it."""

    write: Callable[[], None]


def source_files(tensors: Iterable[LazyArray]) -> set[Path]:
    """Return the files of the checkpoints that the tensors belong to."""
    return {path for store in stores_of_all(tensors) for path in _files(store)}


def stores_of_all(tensors: Iterable[LazyArray]) -> list[Store]:
    """Return the stores that tensors are read from; those of the operands of computed ones."""
    joined = {id(t.store): t.store for t in tensors}.values()
    return list({id(store): store for one in joined for store in stores_of(one)}.values())


def _files(store: Store) -> set[Path]:
    return {Path(os.path.realpath(os.path.join(store.root, path))) for path in store.pins}


def check_apart(dest: Path, tensors: Iterable[LazyArray]) -> None:
    """Raise DestinationError if ``dest`` is inside of the checkpoint that is read, or contains it."""
    real = Path(os.path.realpath(dest))
    for store in stores_of_all(tensors):
        if is_url(store.root):
            continue
        root = Path(os.path.realpath(store.root))
        if any(real in (source, *source.parents) for source in _files(store)):
            raise DestinationError(f"{dest} holds the checkpoint that is read: choose another place")
        # an opened folder is the checkpoint; the folder of an opened file may contain anything
        folder = len(store.pins) > 1 or any(name in store.pins for name in ROOTS)
        if folder and root in real.parents:
            raise DestinationError(f"{dest} is inside of the checkpoint that is read, {root}: choose another place")


def check_inside(dest: Path, tensors: Iterable[LazyArray]) -> None:
    """Raise DestinationError if ``dest`` is below a folder with files that are read. A checkpoint of a single file does
    not count, because its folder may contain anything."""
    real = Path(os.path.realpath(dest))
    for store in stores_of_all(tensors):
        if len(store.pins) < 2 or is_url(store.root):
            continue
        sources = _files(store)
        inside = {source.parent for source in sources} & set(real.parents)
        if inside and real not in sources:
            raise DestinationError(
                f"{dest} is inside of the checkpoint that is read, {inside.pop()}: choose another place"
            )


def check_unchanged(tensors: Iterable[LazyArray]) -> None:
    """Raise ChangedFileError or MissingFileError if a source file of the tensors changed since it was opened. (Reads
    detect that, too, but not after the last read.)"""
    files: dict[tuple[int, str], Store] = {}
    for tensor in tensors:
        stores = stores_of(tensor.store)
        for one in leaves(tensor._held):
            for path in fragments_of(one.spec.fragments).file_paths():
                files[id(stores[one.source]), path] = stores[one.source]

    def check(item: tuple[tuple[int, str], Store]) -> None:
        (_, path), store = item
        pin = store.pins.get(path)
        if pin is None:
            return
        now = (present(store, path) or ABSENT) if pin == ABSENT else store.stat(path)
        if not pin.may_be(now):
            raise ChangedFileError(
                f"{store.root}/{path} was written to while it was read: the export is discarded. Open the "
                "checkpoint again when nobody writes to it"
            )

    each(check, list(files.items()))


def check_paths(paths: Iterable[Path], sources: set[Path], overwrite: bool) -> None:
    """Raise DestinationError for a path that is a source file or a folder, or that exists (unless ``overwrite``)."""
    for path in paths:
        if Path(os.path.realpath(path)) in sources:
            raise DestinationError(f"{path} is a file of the checkpoint that is read: choose another place")
        if path.is_dir():
            raise DestinationError(f"{path} is a folder: choose another name")
        if path.exists() and not overwrite:
            raise _taken(path)


def _taken(path: Path) -> DestinationError:
    return DestinationError(f"{path} exists already: remove it, choose another place, or pass overwrite=True")


def check_room(folder: Path, total: int) -> None:
    """Raise DestinationError if the file system of ``folder`` has less than ``total`` bytes free."""
    free = shutil.disk_usage(folder).free
    if total > free:
        raise DestinationError(f"{folder}: {total:,} bytes are to be written, {free:,} are free there")
