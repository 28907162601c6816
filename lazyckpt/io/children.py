"""Programs of their own that parse one file each, because a library for it cannot be interrupted, and may crash.

Such a program is a new Python interpreter, not a fork: it imports little, and no lock of other threads is copied. It
talks through its pipes: it writes frames (`Frame`), and reads what it asked for. It ends with the `Child`, always.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..errors import CorruptError, FormatError
from .system import PORTABLE

_LENGTHS = struct.Struct("<IQ")  # of a frame's JSON, and of the bytes behind it
_LARGEST = 64 << 20  # bytes of a frame
_LOOK = 1.0  # seconds from one look whether the program lives to the next
_NOTHING_ELSE = {"OPENBLAS_NUM_THREADS": "1", "HDF5_PLUGIN_PRELOAD": "::"}  # no threads and no plug-ins in it
POLL = None if PORTABLE else getattr(select, "poll", None)


class Frame(NamedTuple):
    """What a program says: an object of JSON, and bytes."""

    said: dict[str, Any]
    data: bytes


class Child:
    """A program that runs while this is entered.

    Parameters
    ----------
    program
        The path of a Python file that imports nothing of lazyckpt.
    where
        The file that it parses, for messages.
    about
        What its first line of input says, besides the path of imports.

    Raises
    ------
    FormatError
        No interpreter can be started.
    CorruptError
        From `frame`: the program crashed, or its time is over.
    """

    def __init__(self, program: Path, where: str, about: dict[str, Any]) -> None:
        self.where, self._about = where, about
        if not can_start(program):
            raise FormatError(
                f"{where} is parsed by a process of its own, and there is no Python interpreter to start here: open it "
                "in a program that python runs"
            )
        self._command = [sys.executable, "-I", "-S", str(program)]
        self._late = False

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | _NOTHING_ELSE,
            start_new_session=True,  # the Ctrl-C of a terminal is for this process
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        try:
            self.write(json.dumps({"path": sys.path} | self._about).encode() + b"\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self._process.kill()
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process.wait()

    def write(self, data: bytes) -> None:
        """Give bytes to the program. One that has ended takes none: the next `frame` tells why."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) or 0 :]
        except OSError:  # a broken pipe
            pass

    def frame(self, seconds: float) -> Frame:
        """Return the next frame, if it comes within ``seconds``."""
        end = time.monotonic() + seconds
        lengths = self._read(_LENGTHS.size, end)
        size, nbytes = _LENGTHS.unpack(lengths)
        if size + nbytes > _LARGEST:
            raise self.wrong()
        text, data = self._read(size, end), self._read(nbytes, end)
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            raise self.wrong() from None
        if not isinstance(said, dict):
            raise self.wrong()
        return Frame(said, data)

    def wrong(self) -> CorruptError:
        """Return the error for an answer that the program does not give by itself: the file may control it."""
        return CorruptError(
            f"{self.where}: the process that parses it gave an answer that makes no sense: the file is hostile, or "
            "damaged. Copy it again from its source, or do not trust it."
        )

    def _read(self, size: int, end: float) -> bytes:
        found = bytearray(size)
        target = memoryview(found)
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if POLL is None:  # Windows, where no fork keeps the pipes of a process that has ended
            timer = threading.Timer(max(0.0, end - time.monotonic()), self._stop)
            timer.daemon = True
            timer.start()
            try:
                while target:
                    target = target[self._some(fd, target) :]
            finally:
                timer.cancel()
            return bytes(found)
        poll = POLL()
        poll.register(fd, select.POLLIN)
        while target:
            left = end - time.monotonic()
            if left <= 0:
                self._stop()
                raise self._ended()
            if poll.poll(1000 * min(left, _LOOK)):
                target = target[self._some(fd, target) :]
            elif self._process.poll() is not None:
                raise self._ended()
        return bytes(found)

    def _some(self, fd: int, target: memoryview) -> int:
        data = os.read(fd, min(len(target), 1 << 20))
        if not data:
            raise self._ended()
        target[: len(data)] = data
        return len(data)

    def _stop(self) -> None:
        self._late = True
        self._process.kill()

    def _ended(self) -> CorruptError:
        """Return the error of a program that ended too early, or was ended."""
        code = self._process.wait()
        late = self._late or code == -getattr(signal, "SIGXCPU", 0)
        if late:
            why = "takes more time than a file of its size can need"
        elif code < 0:
            why = f"makes the library that parses it crash (signal {-code})"
        else:
            why = f"makes the process that parses it end (status {code})"
        return CorruptError(f"{self.where} {why}: it is damaged or hostile. Copy it again, or do not trust it.")


def can_start(program: Path) -> bool:
    """Return whether a Python file can be run by the interpreter that runs this."""
    named = re.search("python|pypy", os.path.basename(sys.executable or "").lower()) is not None
    return named and not hasattr(sys, "frozen") and program.is_file()
