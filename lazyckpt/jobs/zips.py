"""The bytes of an uncompressed zip file of chunks and texts, from the first one to the last, without a file.

They are the same as those of the zip file that `destination.Zip` makes of a folder.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future

from ..io.pool import stopped, threads
from .destination import entry_of
from .plan import Chunk, Chunks, Text

_AHEAD = 4  # chunks that are read while another one is sent


def zipped(
    chunks: Chunks, texts: Mapping[str, Text], moved: Callable[[int], None] = lambda nbytes: None
) -> Iterator[bytearray]:
    """Yield the bytes of a zip file, a file in it at a time. ``moved`` is called with the size of each chunk's tensor.
    Raises what reading raises."""
    place = _Memory()
    listed = {chunk.key: chunk for chunk in chunks.at(place)}
    window = _Window()
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED) as archive:
        for key, data in _contents(sorted([*listed, *texts]), listed, texts, place):
            with archive.open(entry_of(key, len(data)), "w") as entry:
                entry.write(data)
            moved(listed[key].nbytes if key in listed else 0)
            yield window.taken()
    yield window.taken()


def _contents(
    keys: Iterable[str], listed: Mapping[str, Chunk], texts: Mapping[str, Text], place: _Memory
) -> Iterator[tuple[str, bytes | bytearray]]:
    """Yield the files in order, while the next chunks are read by other threads."""
    ahead: deque[tuple[str, Future[int] | None]] = deque()

    def first() -> tuple[str, bytes | bytearray]:
        key, future = ahead.popleft()
        if future is None:
            text = texts[key]
            return key, text if isinstance(text, bytes) else b"".join(text())
        future.result()
        return key, place.files.pop(key)

    try:
        for key in keys:
            ahead.append((key, threads().submit(listed[key].write) if key in listed else None))
            if len(ahead) > _AHEAD:
                yield first()
        while ahead:
            yield first()
    finally:
        left = [future for _, future in ahead if future is not None]
        for future in left:
            future.cancel()
        stopped(left)


class _Memory:
    """A place in memory for a few files."""

    buffers = False

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def __str__(self) -> str:
        return "the zip file"

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> int:
        data = bytearray()
        for piece in content:
            data += piece
        self.files[key] = data
        return len(data)

    def get(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self.files[key][offset : offset + length])

    def forget(self, key: str) -> int:
        return len(self.files[key])


class _Window(io.RawIOBase):
    """A file that is written from its begin to its end. What was taken cannot be changed any more."""

    def __init__(self) -> None:
        self._begin = self._at = 0
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._begin + len(self._data))[whence]
        return self._at

    def write(self, data: object) -> int:
        more = memoryview(data).cast("B")  # type: ignore[arg-type]
        at = self._at - self._begin
        self._data[at : at + len(more)] = more
        self._at += len(more)
        return len(more)

    def taken(self) -> bytearray:
        """Return what was written since the last call."""
        data, self._data = self._data, bytearray()
        self._begin += len(data)
        return data
