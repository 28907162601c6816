"""The ledger of an export's finished work: an append-only text file.

It has a line for each written run of bytes in a file, and a line for each file that one task writes as a whole. The
coordinating process appends the line of a run after the run is written. It buffers lines for a moment, so a killed
process loses that much work. The worker that writes a whole file appends its line (`places.Folder.put`) before it
renames the file to its final name. A truncated line and all lines after it are ignored.

The next call verifies the runs and keeps those whose bytes still match the recorded checksum: the disk may have damaged
them, or a crash of the machine may have lost cached writes. The record that all files were complete is valid only until
the next boot.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..io.directories import open_unfollowed
from .places import LEDGER, Folder, Target

_WHOLE = -1  # the number of files that were written as a whole
_HELD = 0.5  # seconds for which lines are buffered
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # on Linux: a new id after each boot


class Done(NamedTuple):
    """A written run: its number of bytes and their CRC-32."""

    nbytes: int
    checksum: int


@dataclass(slots=True)
class _File:
    """A file in the ledger: its ``size`` in bytes, and its ``runs`` by byte offset."""

    number: int
    size: int
    runs: dict[int, Done] = field(default_factory=dict)


@dataclass(slots=True)
class LedgerState:
    """The content of a ledger.

    ``files`` are by key; ``count`` is the next file number. ``moving`` is not None if all files were complete and being
    published; it is True if they had been verified. ``length`` is the number of bytes of the valid lines."""

    files: dict[str, _File] = field(default_factory=dict)
    count: int = 0
    moving: bool | None = None
    length: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of all runs."""
        return sum(run.nbytes for file in self.files.values() for run in file.runs.values())


def read_ledger(path: Path) -> LedgerState:
    """Read a ledger; return an empty state if there is none."""
    try:
        fd = open_unfollowed(path)
    except OSError:
        return LedgerState()
    with os.fdopen(fd, "rb") as file:
        return _read(file)


def _read(file: IO[bytes]) -> LedgerState:
    found, by_number, boot, now = LedgerState(), dict[int, _File](), "", _boot()
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        for line in file:
            match _parsed(line):
                case ["boot", str(boot)]:
                    pass
                case ["file", int(number), str(key), int(size)]:
                    found.files[key] = by_number[number] = _File(number, size)
                    found.count = max(found.count, number + 1)
                case [int(number), int(offset), int(nbytes), int(checksum)] if number in by_number:
                    by_number[number].runs[offset] = Done(nbytes, checksum)
                case ["whole", str(key), int(size), int(checksum)]:
                    found.files[key] = _File(_WHOLE, size, {0: Done(size, checksum)})
                case ["moving", bool(verified)]:
                    found.moving = verified if now and boot == now else None
                case ["anew"]:
                    found.moving = None
                case _:
                    break
            found.length += len(line)
    return found


def _parsed(line: bytes) -> Any:
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # lost cached writes can leave any bytes
        return None


def _boot() -> str:
    """Return an id that changes with each boot, or "" if the system does not provide one."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


class Ledger:
    """A ledger open for writing. Not thread-safe."""

    def __init__(self, folder: Folder) -> None:
        self._file = os.fdopen(folder.open(LEDGER, os.O_RDWR | os.O_CREAT | os.O_APPEND), "rb+", buffering=0)
        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
            self._state = _read(file)
        self._file.truncate(self._state.length)
        self._lines: list[str] = []
        self._since = time.monotonic()
        self._add("boot", _boot())

    @property
    def nbytes(self) -> int:
        """Number of bytes of all recorded runs."""
        return self._state.nbytes

    @property
    def keys(self) -> list[str]:
        """Keys of the recorded files."""
        return list(self._state.files)

    def whole(self, key: str) -> int | None:
        """Return the size of a file that was written as a whole; None for other files, and after `strike`."""
        file = self._state.files.get(key)
        return file.size if file is not None and file.number == _WHOLE and file.runs else None

    def runs(self, key: str, target: Target) -> dict[int, Done]:
        """Return the written runs of a file by byte offset. A file that is not recorded, or has another size than the
        recorded one, is removed."""
        file = self._state.files.get(key)
        if file is not None and file.size == target.size:
            return file.runs
        self._state.files.pop(key, None)
        target.folder.remove(key)
        return {}

    def strike(self, key: str, offset: int) -> None:
        """Forget a run whose bytes are damaged, so that it is written again."""
        del self._state.files[key].runs[offset]

    def begin(self, key: str, size: int) -> int:
        """Record a file that exists without its runs; return its number."""
        file = self._state.files.get(key)
        if file is None:
            file = self._state.files[key] = _File(self._state.count, size)
            self._state.count += 1
            self._add("file", file.number, key, size)
        return file.number

    def add(self, number: int, offset: int, nbytes: int, checksum: int) -> None:
        """Record that a run is written."""
        self._add(number, offset, nbytes, checksum)

    def anew(self) -> None:
        """Record that files are no longer complete, before the first one is written again."""
        if self._state.moving is not None:
            self._add("anew")
            self.flush()

    def move(self, verified: bool) -> None:
        """Record that all files are complete and are being published."""
        self._add("moving", verified)
        self.flush()

    def flush(self) -> None:
        data = memoryview("".join(self._lines).encode("utf-8", "surrogatepass"))
        self._lines.clear()
        self._since = time.monotonic()
        while data:
            data = data[self._file.write(data) or 0 :]

    def _add(self, *values: object) -> None:
        self._lines.append(f"{json.dumps(values)}\n")
        if time.monotonic() - self._since >= _HELD:
            self.flush()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # on a full disk, unrecorded work is repeated
            self.flush()
        self._file.close()
