"""The files that are packed in a tar or a zip, as a folder: every read is a read of a range of the archive.

The archive is pinned when its table of members is read (`io.containers.tar`, `io.containers.packed_folder`), and this
pin is what reads check. The state of a member is derived from that of its archive, so asking for it takes no request.
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.index import FileInfo
from ...core.requests import Ints, Request
from ...errors import CorruptError, DataError, MissingFileError
from ..tasks import Fetch, Task
from .access import guarded
from .base import Entry, Fetched, Guard, Store, Stored, changed, closed_error
from .cache import BlockCache
from .held import take
from .listed import portable
from .members import Member, Tree
from .remote import Remote

_ABSENT = FileInfo(0, 0)


def _restored(
    inner: Store, archive: str, tree: Tree, folder: str, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]
) -> Store:
    return guarded(archive_store(inner, archive, tree, folder, pins), guards)


def archive_store(
    inner: Store, archive: str, tree: Tree, folder: str = "", pins: Mapping[str, FileInfo] | None = None, mark: str = ""
) -> ArchiveStore:
    """Return the store of a folder in an archive. ``inner`` is the store of the archive, which pins it."""
    if isinstance(inner, Remote):
        return RemoteArchive(inner, archive, tree, folder, pins, mark)
    return ArchiveStore(inner, archive, tree, folder, pins, mark)


class ArchiveStore(Store):
    """A folder in an archive.

    Parameters
    ----------
    inner, archive
        The store that has the archive, pinned, and the archive's path in it.
    tree
        The members of the archive.
    folder
        The folder in the archive.
    pins
        See `Store`.
    mark
        What tells this archive from another one that this process reads at the same path.
    """

    def __init__(
        self,
        inner: Store,
        archive: str,
        tree: Tree,
        folder: str = "",
        pins: Mapping[str, FileInfo] | None = None,
        mark: str = "",
    ) -> None:
        self._inner = inner
        super().__init__(pins=pins)
        self._archive, self._tree, self._folder, self._mark = archive, tree, folder, mark
        self._state_of_archive = inner.pins[archive]
        self._unpacked: dict[str, bytes] = {}
        self.io = inner.io

    def close(self) -> None:
        super().close()
        self._inner.close()

    def __reduce__(self) -> tuple[Any, ...]:
        tree, folder = self._tree, self._folder
        if self.pins:  # a tensor needs few of the members
            tree = tree.only(self._full(path) for path in self.pins)
        return _restored, (self._inner, self._archive, tree, folder, portable(self.pins), dict(self.guards))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    @property
    def root(self) -> str:
        return "/".join(part for part in (self._inner.root, self._archive, self._folder) if part)

    @property
    def options(self) -> Mapping[str, Any]:
        return self._inner.options

    @property
    def gap(self) -> int:
        return self._inner.gap

    @property
    def width(self) -> int:
        return self._inner.width

    @property
    def key(self) -> str:
        return repr((self._inner.key, self._archive, tuple(self._state_of_archive), self._mark, self._folder))

    def below(self, folder: str) -> ArchiveStore:
        return archive_store(self._another(), self._archive, self._tree, self._full(folder), mark=self._mark)

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        listed = self._tree.listed(self._full(folder))
        return {name: Entry(_ABSENT if file is None else self._info(file), file is None) for name, file in listed}

    def _with(self, pins: Mapping[str, FileInfo]) -> ArchiveStore:
        return archive_store(self._another(), self._archive, self._tree, self._folder, pins, self._mark)

    def _another(self) -> Store:
        """Return a store of the archive that can be closed apart from this one's."""
        return self._inner.pinned(self._inner.pins)

    def _compare(self, pins: Mapping[str, FileInfo]) -> None:
        super()._compare(pins)
        for path, pin in pins.items():
            file = self._tree.file(self._full(path))
            now = _ABSENT if file is None else self._info(file)
            if not now.may_be(pin):
                raise changed(self.root, path, pin, now)

    def _stat(self, path: str) -> FileInfo:
        return self._info(self._member(path))

    def verify(self, path: str) -> None:
        self._inner.verify(self._archive)

    def outside(self, path: str, offset: int) -> tuple[str, str, int]:
        member = self._member(path)
        if member.stored is not None:
            raise DataError(f"{self.root}/{path} is compressed in its archive: only lazyckpt finds its bytes")
        return self._inner.outside(self._archive, member.offset + offset)

    def _stored(self, path: str, offset: int, length: int) -> Stored | None:
        member = self._part(path, offset, length)
        return None if member.stored is not None else self._inner._stored(self._archive, member.offset + offset, length)

    # -- reads

    def request(self, path: str, offset: int, target: memoryview) -> None:
        member = self._part(path, offset, len(target))
        if path not in self.pins:
            self._remember(path, self._info(member))
        if member.stored is not None:
            target[:] = self._inflated(path, member)[offset : offset + len(target)]
        else:
            self._inner.unguarded(self._archive, member.offset + offset, target)

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        member = self._member(path)
        count = max(0, min(len(target), member.size - offset))
        self.request(path, offset, target[:count])
        return count, self._info(member)

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        if self.closed:
            raise closed_error(self.root)
        member = self._member(path)
        if path not in self.pins:
            self._remember(path, self._info(member))
        if member.stored is not None:
            for offset, target in pieces:
                self.request(path, offset, target)
            return
        for offset, target in pieces:
            self._part(path, offset, len(target))
        self._inner._fetch_pieces(self._archive, [(member.offset + offset, target) for offset, target in pieces])

    def _full(self, path: str) -> str:
        return "/".join(part for part in (self._folder, path) if part)

    def _info(self, member: Member) -> FileInfo:
        size, mtime, version = self._state_of_archive
        return FileInfo(member.size, mtime, f"{version or mtime}+{size}" if version or mtime else "")

    def _member(self, path: str) -> Member:
        """Return the member at a path. Raises MissingFileError if there is none."""
        full = self._full(path)
        found = self._tree.file(full)
        if found is not None:
            return found
        target = self._tree.links.get(full)
        why = "the archive has no such file"
        if target is not None:
            why = f"it is a link to {target[:200]!r}, which the archive does not have. Pack files, not links (tar -h)"
        elif self._tree.real(full) in self._tree.folders:
            raise CorruptError(f"{self.root}/{path} is a folder")
        error = MissingFileError(f"{self.root}/{path}: {why}")
        error.errno = errno.ENOENT
        raise error

    def _part(self, path: str, offset: int, length: int) -> Member:
        """Return the member at a path. Raises CorruptError if it does not have these bytes."""
        member = self._member(path)
        if offset + length > member.size:
            raise CorruptError(
                f"{self.root}/{path}: expected {length:,} bytes from {offset:,} on, it has {member.size:,}: truncated? "
                "Copy it again from its source, and pack it again."
            )
        return member

    def _inflated(self, path: str, member: Member) -> bytes:
        """Return the content of a deflated member, which is small."""
        full = self._full(path)
        data = self._unpacked.get(full)
        if data is None:
            assert member.stored is not None
            packed = bytearray(member.stored)
            self._inner.unguarded(self._archive, member.offset, memoryview(packed))
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                data = stream.decompress(packed, member.size + 1)
            except zlib.error as e:
                raise CorruptError(f"{self.root}/{path} cannot be unpacked ({e}): the zip is damaged") from None
            if len(data) != member.size or zlib.crc32(data) != member.crc:
                raise CorruptError(f"{self.root}/{path} fails its checksum in the zip: damaged, copy it again")
            self._unpacked[full] = data
        return data


class RemoteArchive(ArchiveStore, Remote):
    """A folder in an archive behind a network. What several members need is joined to requests for the archive."""

    _inner: Remote

    def __init__(self, inner: Remote, *args: Any, **options: Any) -> None:
        super().__init__(inner, *args, **options)
        self.policy = inner.policy

    @property
    def cache(self) -> BlockCache | None:
        """The block cache of the archive."""
        return self._inner.cache

    @cache.setter
    def cache(self, cache: BlockCache | None) -> None:
        self._inner.cache = cache

    def forecast(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[tuple[str, Request]]:
        offsets, lengths = [], []
        for path, (starts, sizes) in wanted.items():
            member = self._member(path)
            if member.stored is None:
                offsets.append(starts + member.offset)
                lengths.append(sizes)
        if offsets:
            yield from self._inner.forecast({self._archive: (np.concatenate(offsets), np.concatenate(lengths))})

    def _requests(self, fetches: Sequence[Fetch]) -> Iterator[Task]:
        if self.closed:
            raise closed_error(self.root)
        moved: list[Fetch] = []
        for fetch in fetches:
            if self._taken(fetch):
                continue
            member = self._member(fetch.path)
            if len(fetch.offsets):
                last = int((fetch.offsets + fetch.lengths).argmax())
                self._part(fetch.path, int(fetch.offsets[last]), int(fetch.lengths[last]))
            if member.stored is None:
                moved.append(fetch.moved(self._inner, self._archive, member.offset))
            else:
                yield self._from_memory(fetch, member)
        yield from self._inner.requests(moved)

    def request(self, path: str, offset: int, target: memoryview) -> None:
        if not take(self, path, offset, target):
            super().request(path, offset, target)

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        Remote._fetch_pieces(self, path, pieces)

    def _from_memory(self, fetch: Fetch, member: Member) -> Task:
        """Return the task that fills the memory of a fetch from a member that is deflated."""

        def do() -> None:
            data = memoryview(self._inflated(fetch.path, member))
            memory = fetch.memory()
            for offset, length, at in zip(*(c.tolist() for c in (fetch.offsets, fetch.lengths, fetch.at)), strict=True):
                memory[at : at + length] = data[offset : offset + length]
            fetch.arrived()

        fetch.begin(1)
        return fetch.nbytes, do
