"""The folder of a run that is pruned: on a disk, or below a prefix of a bucket."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from ..errors import CorruptError, DestinationError, MissingFileError
from ..formats.archives import check_outside, is_archive, only_read
from ..formats.zarr.documents import JOB
from ..io.directories import Directory, alone_in
from ..io.storage.base import Store
from ..io.storage.local import LocalStore
from ..io.storage.uploads import Uploads, uploads_of
from ..io.storage.urls import split_url
from ..jobs.guard import local_path
from ..jobs.unfinished import Record, record_of, remove_all

_HIDDEN = re.compile(r"\..+\.[0-9a-f]{8}\.pruned")
_PRUNED = Record("pruned", {}, owns=True)  # of a checkpoint that is being removed
_TEXT = 4096  # bytes of a pointer, at most
_PIECE = 8 << 20  # bytes of a file that are sent and compared at a time


class RunFolder(ABC):
    """The entries of a run's folder, by name, and their removal."""

    store: Store
    options: Mapping[str, Any] | None = None
    """``storage_options`` for opening its checkpoints."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def path(self, name: str) -> str:
        """Return the path or URL of an entry."""

    @abstractmethod
    def is_link(self, name: str) -> bool:
        """Return whether an entry is a link."""

    @abstractmethod
    def links(self) -> Iterator[tuple[str, str]]:
        """Yield the links, each with the entry that it leads to."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a small file; empty if there is none."""

    @abstractmethod
    def files(self, name: str) -> list[str]:
        """Return the names of all files in an entry, without their folders; of a file, none."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Return the size of all files of an entry in bytes."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return the entries that an interrupted prune has left hidden."""

    @abstractmethod
    def remove(self, names: list[str], leftovers: list[str]) -> dict[str, str]:
        """Remove entries and leftovers; return those that could not be removed, with a sentence. A name without a
        sentence is still what it was."""

    # -- The files of one entry, for thinning. Paths are relative to the entry.

    @abstractmethod
    def is_file(self, name: str) -> bool:
        """Return whether an entry is a single file."""

    @abstractmethod
    def having(self, path: str) -> list[str]:
        """Return the names of the entries that have a file with this path now."""

    @abstractmethod
    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes in bytes of all files in an entry, as they are now, by path."""

    @abstractmethod
    def scratch(self, name: str) -> AbstractContextManager[Path]:
        """Return a folder on a disk for the new files of an entry; what is in it is removed at the end."""

    @abstractmethod
    def tidy(self, name: str) -> None:
        """Remove what a process that was stopped has left in the scratch folder of an entry."""

    @abstractmethod
    def read_file(self, name: str, path: str) -> bytes:
        """Return the content of a small file in an entry; empty if there is none."""

    @abstractmethod
    def write_file(self, name: str, path: str, text: str) -> None:
        """Write a small file in an entry, at once."""

    @abstractmethod
    def fill(self, name: str, source: Path, paths: Sequence[str]) -> None:
        """Put files of a scratch folder into an entry, in this order, replacing those with the same paths. Each is
        there as a whole or not at all, and its bytes are those of the scratch folder."""

    @abstractmethod
    def add(self, name: str, source: Path, paths: Sequence[str]) -> None:
        """Make a new entry of files of a scratch folder, which nobody opens before it is complete."""

    @abstractmethod
    def drop(self, name: str, paths: Sequence[str]) -> None:
        """Remove files of an entry, and the folders that are then empty; those that do not exist are ignored. With the
        path "", the entry is a single file."""

    def text(self, name: str) -> str:
        """Return the text of a pointer; "" if there is none."""
        return self.read(name)[:_TEXT].decode("utf-8", "replace").strip()


class LocalFolder(RunFolder):
    """A folder on a disk. What is removed is renamed to a hidden name first, atomically."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(local_path(path)))
        if self.root.is_file() and is_archive(self.root.name):
            raise only_read(str(self.root))
        if not self.root.is_dir():
            kind = "is a file, not a folder of checkpoints" if self.root.exists() else "no such folder"
            raise MissingFileError(f"{self.root}: {kind}")
        self.store = LocalStore(self.root)
        self.opened: Directory | None = None
        """The folder while it is pruned, so that nothing outside of it is removed if the path is replaced."""

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> str:
        return str(self.root / name)

    def is_link(self, name: str) -> bool:
        return (self.root / name).is_symlink()

    def links(self) -> Iterator[tuple[str, str]]:
        real = os.path.realpath(self.root)
        for name in sorted(os.listdir(self.root)):
            if self.is_link(name):
                yield name, os.path.relpath(os.path.realpath(self.root / name), real).partition(os.sep)[0]

    def read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return b""

    def files(self, name: str) -> list[str]:
        return [each for _, _, names in os.walk(self.root / name) for each in names]

    def nbytes(self, name: str) -> int:
        path = self.root / name
        if path.is_symlink():
            return 0
        paths = [path] if path.is_file() else [Path(folder, n) for folder, _, names in os.walk(path) for n in names]
        total = 0
        for each in paths:
            with suppress(FileNotFoundError):  # another process removes it meanwhile
                info = each.lstat()
                total += info.st_size if stat.S_ISREG(info.st_mode) else 0
        return total

    def leftovers(self) -> list[str]:
        return [n for n in sorted(os.listdir(self.root)) if _HIDDEN.fullmatch(n) and not self.is_link(n)]

    def remove(self, names: list[str], leftovers: list[str]) -> dict[str, str]:
        """Hide everything, then remove it. Raises DestinationError if the path is another folder by now."""
        assert self.opened is not None
        failed: dict[str, str] = {}
        hidden = [(name, name) for name in leftovers]
        for name in names:
            place = f".{name[:200]}.{uuid4().hex[:8]}.pruned"
            self._check_same(self.opened)
            try:
                os.rename(self.root / name, self.root / place)
            except FileNotFoundError:  # another process has removed it
                continue
            except OSError as e:
                failed[name] = f"{name}: {e.strerror or e}"
                continue
            hidden.append((name, place))
        for name, place in hidden:
            try:
                self.opened.remove(place)
            except FileNotFoundError:  # somebody else has removed it
                continue
            except OSError as e:
                failed[place] = f"{name} (now {place}): {e.strerror or e}: {e.filename}"
        return failed

    def is_file(self, name: str) -> bool:
        return (self.root / name).is_file()

    def having(self, path: str) -> list[str]:
        return [name for name in sorted(os.listdir(self.root)) if (self.root / name / path).is_file()]

    def sizes(self, name: str) -> dict[str, int]:
        place = self.root / name
        return {p.relative_to(place).as_posix(): p.stat().st_size for p in sorted(place.rglob("*")) if p.is_file()}

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        try:
            yield self._hidden(name)
        except Exception:
            shutil.rmtree(self._hidden(name), ignore_errors=True)
            raise
        self.tidy(name)

    def tidy(self, name: str) -> None:
        hidden = self._hidden(name)
        if hidden.is_dir() and not hidden.is_symlink():
            shutil.rmtree(hidden)

    def _hidden(self, name: str) -> Path:
        return self.root / f".{name}.thin"  # of the same file system, so that files can be moved

    def read_file(self, name: str, path: str) -> bytes:
        try:
            return (self.root / name / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def write_file(self, name: str, path: str, text: str) -> None:
        place = self.root / name / path
        part = place.with_name(f"{place.name}.part")
        part.write_text(text)
        os.replace(part, place)

    def fill(self, name: str, source: Path, paths: Sequence[str]) -> None:
        place = self.root / name
        for path in paths:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(source / path, place / path)

    def add(self, name: str, source: Path, paths: Sequence[str]) -> None:
        os.rename(source, self.root / name)

    def drop(self, name: str, paths: Sequence[str]) -> None:
        place = self.root / name
        for path in paths:
            if not path or _inside(place, path):
                (place / path).unlink(missing_ok=True)
        for above in sorted({parent for path in paths for parent in PurePosixPath(path).parents}, reverse=True):
            with suppress(OSError):  # not empty, or removed already
                if str(above) not in ("", ".") and _inside(place, str(above)):
                    (place / above).rmdir()

    def _check_same(self, folder: Directory) -> None:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.root), folder.status()):
                return
        raise DestinationError(
            f"{self.root}: the folder was replaced by another one while it was pruned: prune it again"
        )


class RemoteFolder(RunFolder):
    """A prefix of a bucket. A checkpoint gets the marker of an unfinished export first, so that nobody opens half of
    it, and loses it last."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self.options = options
        self._place = uploads_of(url.rstrip("/"), options)
        self._url = url.rstrip("/")
        check_outside(url, options)
        self.store, name = split_url(url, options)
        if is_archive(name):
            raise only_read(str(self._place))
        if name:
            raise MissingFileError(f"{self._place} is a file, not a folder of checkpoints")

    def __str__(self) -> str:
        return str(self._place)

    @cached_property
    def _sizes(self) -> dict[str, dict[str, int]]:
        """The sizes of all objects, by entry and key."""
        found: dict[str, dict[str, int]] = {}
        for key, size in self._place.list().items():
            found.setdefault(key.partition("/")[0], {})[key] = size
        return found

    def path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def is_link(self, name: str) -> bool:
        return False

    def links(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def read(self, name: str) -> bytes:
        return self._place.get(name) if name in self._sizes.get(name, ()) else b""

    def files(self, name: str) -> list[str]:
        return [key.rpartition("/")[2] for key in self._sizes.get(name, ()) if key != name]

    def nbytes(self, name: str) -> int:
        return sum(self._sizes.get(name, {}).values())

    def leftovers(self) -> list[str]:
        marked = [name for name, keys in self._sizes.items() if f"{name}/{JOB}" in keys]
        return [name for name in marked if record_of(self._of(name), JOB) == _PRUNED]

    def remove(self, names: list[str], leftovers: list[str]) -> dict[str, str]:
        failed: dict[str, str] = {}
        for name in (*names, *leftovers):
            try:
                there = self._place.list(name)
                if name in there:
                    self._place.remove([name])
                inside = [key.removeprefix(f"{name}/") for key in there if key.startswith(f"{name}/")]
                if inside:
                    place = self._of(name)
                    place.put(JOB, [_PRUNED.text()])
                    remove_all(place, inside, keep=JOB)
                    place.remove([JOB])
            except OSError as e:
                failed[name] = f"{name}: {e.strerror or e}"
        return failed

    def is_file(self, name: str) -> bool:
        return name in self._place.list(name)

    def having(self, path: str) -> list[str]:
        self._forget()
        return [name for name, keys in self._sizes.items() if f"{name}/{path}" in keys]

    def sizes(self, name: str) -> dict[str, int]:
        return self._of(name).list()

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="lazyckpt-thin-") as folder:
            yield Path(folder) / "delta"

    def tidy(self, name: str) -> None:
        pass  # a temporary folder of the system

    def read_file(self, name: str, path: str) -> bytes:
        try:
            return self._of(name).get(path)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def write_file(self, name: str, path: str, text: str) -> None:
        self._of(name).put(path, [text.encode()])
        self._forget()

    def fill(self, name: str, source: Path, paths: Sequence[str]) -> None:
        place = self._of(name)
        for path in paths:
            with open(source / path, "rb") as file:
                place.put(path, iter(lambda: file.read(_PIECE), b""))
            with open(source / path, "rb") as file:
                at = 0
                while piece := file.read(_PIECE):
                    if place.get(path, at, len(piece)) != piece:
                        raise CorruptError(f"{place.at(path)}: the object does not hold the bytes that were sent")
                    at += len(piece)
            if place.forget(path) != at:
                raise CorruptError(f"{place.at(path)}: the object has other bytes than were sent")
        self._forget()

    def add(self, name: str, source: Path, paths: Sequence[str]) -> None:
        place = self._of(name)
        place.put(JOB, [_PRUNED.text()])
        self.fill(name, source, paths)
        place.remove([JOB])
        self._forget()

    def drop(self, name: str, paths: Sequence[str]) -> None:
        if list(paths) == [""]:
            self._place.remove([name])
        elif paths:
            self._of(name).remove([path for path in paths if path])
        self._forget()

    def _forget(self) -> None:
        self.__dict__.pop("_sizes", None)

    def _of(self, name: str) -> Uploads:
        return uploads_of(self.path(name), self.options)


def _inside(place: Path, path: str) -> bool:
    """Return whether a path is below a folder, also when links are followed."""
    real = Path(os.path.realpath(place))
    return real in Path(os.path.realpath(place / path)).parents


def alone(folder: LocalFolder) -> Any:
    """Return a context in which no other prune works in the folder; its value is the open folder."""
    return alone_in(folder.root)  # a lock file would be among the checkpoints, which trainers count
