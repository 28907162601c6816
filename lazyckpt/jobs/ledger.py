"""What an export has finished: a text with a line for each run of bytes in a file, and for each file that one task has
written as a whole. It only ever grows.

The process that gives out the tasks adds a line when a run is written. Lines are held back for a moment: a process that
is killed loses so much work. The line of a whole file is added by the worker that writes it (`places.Folder.put`),
before the file gets its name. A line that was cut off does not count, and neither does what follows it.

The next call reads the runs again and keeps those whose bytes still have the checksum recorded here: a disk may have
damaged them, or a cache lost them with the machine. That all files were complete is believed only until the machine is
started again.
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

from .places import LEDGER, Folder, Target

_WHOLE = -1  # the number of files that have no runs
_HELD = 0.5  # seconds that lines wait for each other
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux: another one after each start


class Done(NamedTuple):
    """A run that was written: its bytes and their CRC-32."""

    nbytes: int
    checksum: int


@dataclass(slots=True)
class _File:
    """``size``: bytes of the whole file. ``runs``: byte where one begins -> the run."""

    number: int
    size: int
    runs: dict[int, Done] = field(default_factory=dict)


@dataclass(slots=True)
class Told:
    """What stands in a ledger. ``files``: by key. ``moving``: whether the files were complete, for sure, and on their
    way to where they belong; whether they had been verified; None if not. ``length``: bytes of the lines that count."""

    files: dict[str, _File] = field(default_factory=dict)
    count: int = 0
    moving: bool | None = None
    length: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(run.nbytes for file in self.files.values() for run in file.runs.values())


def told(path: Path) -> Told:
    """Read a ledger; nothing if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return Told()
    with os.fdopen(fd, "rb") as file:
        return _read(file)


def _read(file: IO[bytes]) -> Told:
    found, by_number, boot, now = Told(), dict[int, _File](), "", _boot()
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
    except (ValueError, RecursionError):  # a cache that was lost leaves anything
        return None


def _boot() -> str:
    """What differs if the machine was started again; "" where the system does not tell."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


class Ledger:
    """A ledger that is written to. For one thread."""

    def __init__(self, folder: Folder) -> None:
        self._file = os.fdopen(folder.open(LEDGER, os.O_RDWR | os.O_CREAT | os.O_APPEND), "rb+", buffering=0)
        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
            self._told = _read(file)
        self._file.truncate(self._told.length)
        self._lines: list[str] = []
        self._since = time.monotonic()
        self._add("boot", _boot())

    @property
    def nbytes(self) -> int:
        """Bytes of all runs that it tells of."""
        return self._told.nbytes

    @property
    def keys(self) -> list[str]:
        """The files that it lists."""
        return list(self._told.files)

    def whole(self, key: str) -> int | None:
        """The bytes of a file that was written as a whole; None for others, and where `strike` was called."""
        file = self._told.files.get(key)
        return file.size if file is not None and file.number == _WHOLE and file.runs else None

    def runs(self, key: str, target: Target) -> dict[int, Done]:
        """What is there of a file: byte where a run begins -> the run. A file of another size than it had is removed:
        it is none of those that were written."""
        file = self._told.files.get(key)
        if file is not None and file.size == target.size:
            return file.runs
        self._told.files.pop(key, None)
        target.folder.remove(key)
        return {}

    def strike(self, key: str, offset: int) -> None:
        """The bytes of a run are not what was written: it is to be written again."""
        del self._told.files[key].runs[offset]

    def begin(self, key: str, size: int) -> int:
        """The number of a file, of which all but the runs stands there."""
        file = self._told.files.get(key)
        if file is None:
            file = self._told.files[key] = _File(self._told.count, size)
            self._told.count += 1
            self._add("file", file.number, key, size)
        return file.number

    def add(self, number: int, offset: int, nbytes: int, checksum: int) -> None:
        """A run stands in its file."""
        self._add(number, offset, nbytes, checksum)

    def anew(self) -> None:
        """Files are written (again): before the first of them, because they are not complete any more."""
        if self._told.moving is not None:
            self._add("anew")
            self.flush()

    def move(self, verified: bool) -> None:
        """All files are complete and are going to where they belong."""
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
        with suppress(OSError):  # a full disk: what it would tell of is done again
            self.flush()
        self._file.close()
