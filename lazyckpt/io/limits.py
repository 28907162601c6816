"""The resource policy: limits on the cost of parsing a file, as a function of the file's size.

Every parser of checkpoint files (pickles, JSON, zip directories, Zarr documents, indexes) takes a `Budget` for its
file and charges to it what it creates. A hostile file of a few kilobytes can describe gigabytes; honest files stay
far below these limits. All of the constants are in this module.
"""

from __future__ import annotations

import time
from typing import Any

from ..errors import CorruptError

OBJECTS, OBJECTS_PER_BYTE = 1 << 18, 0.25  # containers and records that a file may create
CHARACTERS, CHARACTERS_PER_BYTE = 1 << 24, 16  # characters of names and texts that are built from a file's content
INFLATED, INFLATED_PER_BYTE = 64 << 20, 32  # decompressed bytes of a compressed document
STEPS, STEPS_PER_BYTE = 1 << 22, 8  # elements that are copied or hashed again because of references to them
SECONDS, SECONDS_PER_BYTE = 60.0, 20e-6  # of parsing; the other limits are reached first unless a parser has a bug
CHILD_MEMORY, CHILD_SERVED = 256 << 20, 64 << 20  # bytes: memory of a process that parses a file; what it may read
CHILD_SERVED_PER_BYTE = 64  # small pieces are read in blocks, some of them several times
CHILD_PROCESSOR = (
    2  # seconds of a processor, and SECONDS_PER_BYTE; where the system cannot limit it, SECONDS by the clock
)
CALLED = 16 << 20  # elements or bytes that one call in a pickle may make, past the length of the pickle
LEVELS = 100  # of lists and objects in a JSON document, one within the other; honest documents have about ten
RANKS, RANKS_PER_FILE = 4096, 64  # ranks that names or records may claim: for any number of files, and per file


def check_ranks(where: str, count: int, files: int) -> None:
    """Raise CorruptError if a name or record claims far more ranks (``count``) than there are ``files``."""
    if count > max(RANKS, RANKS_PER_FILE * files):
        raise CorruptError(
            f"{where}: {short_number(count)} ranks are claimed, {files:,} files are here: most of the checkpoint is "
            "missing, or the number is wrong"
        )


def check_levels(where: str, value: Any) -> None:
    """Raise CorruptError if parsed JSON is nested deeper than `LEVELS`: what uses it later may recurse."""
    level = [value]
    for _ in range(LEVELS):
        inner: list[Any] = []
        for one in level:
            inner.extend(v for v in (one.values() if isinstance(one, dict) else one) if isinstance(v, dict | list))
        if not inner:
            return
        level = inner
    raise CorruptError(f"{where}: its JSON is nested deeper than {LEVELS} levels: the file is damaged or hostile")


def short_number(n: int) -> str:
    """Format a number for a message; cap numbers that may have thousands of digits."""
    return f"{n:,}" if n < 10**18 else "more than 10**18"


class ExcessError(CorruptError):
    """A file describes more than a file of its size plausibly can; the message names the file."""


class Budget:
    """The remaining cost that parsing one file may cause.

    Parameters
    ----------
    where
        The file, as messages name it.
    size
        The file's size in bytes.
    """

    __slots__ = ("_characters", "_deadline", "_inflated", "_objects", "_steps", "size", "where")

    def __init__(self, where: str, size: int) -> None:
        self.where = where
        self.size = size
        self._objects = OBJECTS + int(size * OBJECTS_PER_BYTE)
        self._characters = CHARACTERS + size * CHARACTERS_PER_BYTE
        self._inflated = INFLATED + size * INFLATED_PER_BYTE
        self._steps = STEPS + size * STEPS_PER_BYTE
        self._deadline = time.monotonic() + SECONDS + size * SECONDS_PER_BYTE

    def objects(self, count: int = 1) -> None:
        """Charge ``count`` containers or records. Raises CorruptError past the limit."""
        self._objects -= count
        if self._objects < 0:
            raise self._refused("objects")

    def characters(self, count: int) -> None:
        """Charge ``count`` characters of text that is built, not merely read. Raises CorruptError past the limit."""
        self._characters -= count
        if self._characters < 0:
            raise self._refused("characters of text")

    def inflated(self, nbytes: int) -> None:
        """Charge ``nbytes`` bytes of unpacked data. Raises CorruptError past the limit."""
        self._inflated -= nbytes
        if self._inflated < 0:
            raise self._refused("unpacked bytes")

    def steps(self, count: int) -> None:
        """Charge ``count`` elements that are copied, hashed or visited because of a reference to them. Raises
        CorruptError past the limit."""
        self._steps -= count
        if self._steps < 0:
            raise self._refused("references to follow")

    @property
    def spent(self) -> int:
        """Number of containers and records charged so far."""
        return OBJECTS + int(self.size * OBJECTS_PER_BYTE) - self._objects

    @property
    def left(self) -> tuple[int, int, int, int]:
        """What may still be charged: objects, characters, unpacked bytes, steps."""
        return self._objects, self._characters, self._inflated, self._steps

    def charge(self, cost: tuple[int, int, int, int]) -> None:
        """Charge again what was charged between two values of ``left``. Raises CorruptError past a limit."""
        objects, characters, inflated, steps = cost
        self.objects(objects)
        self.characters(characters)
        self.inflated(inflated)
        self.steps(steps)

    @property
    def inflated_left(self) -> int:
        """Number of bytes that may still be decompressed."""
        return self._inflated

    def time(self) -> None:
        """Raise CorruptError if parsing takes longer than a file of this size can need."""
        if time.monotonic() > self._deadline:
            raise self._refused("seconds")

    def _refused(self, what: str) -> ExcessError:
        return ExcessError(
            f"{self.where}: its {self.size:,} bytes describe more {what} than any honest file of that size: "
            "it is damaged or hostile. Copy it again from its source, or do not trust it."
        )
