"""Moves tensors into files: tasks that each write a run of a tensor to its place, piece by piece, with one buffer.

Memory is bounded by the number of tasks in flight, not by the size of a tensor. Runs are planned when their turn comes,
so a million fragments are no list of a million.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CorruptError
from ..io.tensors import as_bytes
from ..lazy import LazyArray
from .destination import check_room, check_unchanged
from .executor import OVERHEAD, Run, Task
from .held import Writable
from .ledger import Done, Ledger
from .places import PIECE, Folder, Target, combined, crc32
from .progress import Bar
from .publish import content, moved, staged

_NEAR = 1 << 20  # the same for what is only copied, if its store has no price for a request: fits a core's own cache
RUN = 16 << 20  # bytes that a task moves, at most
_own = threading.local()


class Placed(NamedTuple):
    """A tensor, and the byte of the file where its elements begin, in C order."""

    offset: int
    tensor: Writable


class Layout(NamedTuple):
    """A file in which everything stands but the tensors' elements. ``finish``: what is to be done with the CRC-32s of
    all tensors' bytes when they stand there; None if nobody asks for them."""

    file: Target
    placed: Sequence[Placed]
    finish: Callable[[list[int]], None] | None = None


class File(NamedTuple):
    """A file that tensors go into. ``key``: where it stands in the folder. ``nbytes``: of its tensors. ``layout``:
    makes it at a path, without their elements; a file of the same call that is there keeps what it has of them."""

    key: str
    nbytes: int
    layout: Callable[[Target], Layout]


@dataclass(slots=True)
class _Filling:
    """A file that is being filled. ``left``: tasks that are not done, and one more until all are given out. ``found``:
    tensor -> (byte, CRC-32, bytes) of its runs, if somebody asks."""

    number: int
    layout: Layout
    left: int = 1
    found: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def add(self, n: int, offset: int, checksum: int, nbytes: int) -> None:
        if self.layout.finish is not None:
            self.found.setdefault(n, []).append((offset, checksum, nbytes))

    def one_less(self) -> None:
        self.left -= 1
        if not self.left and self.layout.finish is not None:
            runs = (sorted(self.found.get(n, [])) for n in range(len(self.layout.placed)))
            self.layout.finish([combined((crc, nbytes) for _, crc, nbytes in of_one) for of_one in runs])
            self.found.clear()


def fill(files: Sequence[File], folder: Folder, ledger: Ledger, run: Run, moved: Callable[[int], None]) -> list[Layout]:
    """Write files, but for runs that are there: the ledger lists them, and their bytes have the checksums that it has.
    Each file is begun when its turn comes. ``moved`` is called with the bytes that each task has moved, and with those
    that are there.

    Raises what reading raises, and OSError of the files.
    """
    filling: dict[int, _Filling] = {}
    layouts: list[Layout] = []
    _keep_intact(files, folder, ledger, run)

    def tasks() -> Iterator[Task]:
        for key, _, begin in files:
            target = Target(folder, key)
            there = ledger.runs(key, target)
            layout = begin(target)
            layouts.append(layout)
            file = _Filling(ledger.begin(key, target.size or 0), layout)
            filling[file.number] = file
            for n, offset, part in _runs(layout):
                known = there.get(offset)
                if known is not None and known.nbytes == part.nbytes:
                    file.add(n, offset, known.checksum, part.nbytes)
                    moved(part.nbytes)
                    continue
                file.left += 1
                about = _Run(file.number, n, offset)
                yield Task(part.nbytes, PIECE + OVERHEAD, partial(_move, layout.file, part, about))
            file.one_less()

    def done(task: Task, result: tuple[_Run, int]) -> None:
        (number, n, offset), checksum = result
        ledger.add(number, offset, task.nbytes, checksum)
        moved(task.nbytes)
        file = filling[number]
        file.add(n, offset, checksum, task.nbytes)
        file.one_less()

    run(tasks(), done)
    return layouts


def _keep_intact(files: Sequence[File], folder: Folder, ledger: Ledger, run: Run) -> None:
    """Strike the runs from the ledger whose bytes are not what was written."""

    def tasks() -> Iterator[Task]:
        for key, _, _ in files:
            target = Target(folder, key)
            for offset, known in list(ledger.runs(key, target).items()):
                yield Task(known.nbytes, PIECE + OVERHEAD, partial(_intact, target, offset, known))

    def done(_: Task, result: tuple[Target, int, bool]) -> None:
        target, offset, intact = result
        if not intact:
            ledger.strike(target.key, offset)

    run(tasks(), done)


def compare(layouts: Sequence[Layout], run: Run, moved: Callable[[int], None]) -> None:
    """Read what `fill` has written, from the disk, and the source again. Raises CorruptError if they differ."""
    for layout in layouts:
        layout.file.folder.forget(layout.file.key)

    def tasks() -> Iterator[Task]:
        for layout in layouts:
            for _, offset, part in _runs(layout):
                yield Task(part.nbytes, 2 * PIECE + OVERHEAD, partial(_compare, layout.file, offset, part))

    run(tasks(), lambda task, _: moved(task.nbytes))


def _runs(layout: Layout) -> Iterator[tuple[int, int, Any]]:
    """(which tensor, byte of the file, a run of its elements) of all that have any."""
    for n, (offset, tensor) in enumerate(layout.placed):
        if tensor.nbytes:
            for ahead, part in tensor.pieces(max(RUN, PIECE)):
                yield n, offset + ahead * tensor.itemsize, part


class _Run(NamedTuple):
    """Which file, which tensor of it, where in the file."""

    file: int
    tensor: int
    offset: int


def _move(target: Target, tensor: Any, about: _Run) -> tuple[_Run, int]:
    """One run, into a file that is there. Returns it and its CRC-32."""
    fd = target.descriptor(os.O_WRONLY)
    try:
        crc = 0
        for at, memory in _contents(tensor):
            write_at(fd, memory, about.offset + at)
            crc = crc32(memory, crc)
    finally:
        os.close(fd)
    return about, crc


def _intact(target: Target, offset: int, known: Done) -> tuple[Target, int, bool]:
    """Whether the bytes of a run have the checksum that they had when they were written."""
    crc, end = 0, offset + known.nbytes
    fd = target.descriptor(os.O_RDONLY)
    try:
        for at in range(offset, end, PIECE):
            crc = crc32(os.pread(fd, min(PIECE, end - at), at), crc)
    finally:
        os.close(fd)
    return target, offset, crc == known.checksum


def _contents(tensor: Any) -> Iterator[tuple[int, memoryview]]:
    """(byte of the tensor, the bytes from there on), in order, in memory of this thread's until the next are asked
    for."""
    runs = tensor.runs()
    if runs is None:
        for ahead, piece in tensor.pieces(PIECE):
            yield ahead * tensor.itemsize, read_piece(piece)
        return
    store = tensor.store
    memory = as_bytes(scratch(PIECE if store.gap else _NEAR))
    at = filled = 0
    for path, offset, nbytes in runs:
        while nbytes:
            part = memory[filled : filled + nbytes]
            store.read_into(path, offset, part)
            filled, offset, nbytes = filled + len(part), offset + len(part), nbytes - len(part)
            if filled == len(memory):
                yield at, memory
                at, filled = at + filled, 0
    if filled:
        yield at, memory[:filled]


def _compare(target: Target, offset: int, tensor: Any) -> None:
    fd = target.descriptor(os.O_RDONLY)
    try:
        for ahead, piece in tensor.pieces(PIECE):
            at = offset + ahead * tensor.itemsize
            written = os.pread(fd, piece.nbytes, at)
            if written != bytes(read_piece(piece)):
                raise differs(str(target), f"bytes {at:,} to {at + piece.nbytes:,}")
    finally:
        os.close(fd)


def differs(path: str, where: str) -> CorruptError:
    return CorruptError(
        f"{path}: {where} do not hold what the source holds: the disk or the memory is faulty, or something else wrote "
        "there. It is not kept"
    )


def read_piece(piece: Any) -> memoryview:
    """The elements of a piece of at most PIECE bytes (or one element), in memory of this thread's, until it asks
    again."""
    return as_bytes(piece.read_into(scratch(piece.nbytes).view(piece.dtype).view(piece.shape)))


def scratch(nbytes: int) -> torch.Tensor:
    """Bytes of this thread's, until it asks again."""
    buffer: torch.Tensor | None = getattr(_own, "buffer", None)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _own.buffer = torch.empty(max(nbytes, PIECE), dtype=torch.uint8, device="cpu")
    return buffer[:nbytes]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of ``data``, from byte ``offset`` of the file on."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


# -- Files that tensors are streamed into, from the first check to their appearance: one road for all that is
# written.

Check = Callable[[Set[str]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``texts``: files that are written whole, after ``files``, in this order. ``fingerprint``: see `staging`.
    ``around``: bytes of a file that no tensor has, about."""

    files: Sequence[File]
    texts: Mapping[str, bytes]
    fingerprint: str
    around: int = 2048

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def room(self) -> int:
        return self.nbytes + self.around * len(self.files) + sum(map(len, self.texts.values()))

    @property
    def keys(self) -> list[str]:
        return [*(file.key for file in self.files), *self.texts]


def write(
    plan: Plan,
    place: Path,
    tensors: Sequence[LazyArray],
    *,
    check: Check,
    reveal: Callable[[Folder], None],
    verify: bool,
    progress: bool | None,
    run: Run,
) -> None:
    """Write the files of a plan, for which ``tensors`` are read. ``check`` raises DestinationError if they must not
    appear at ``place``; it is called first, and again before they do, because somebody else may have written there
    meanwhile; with the keys of what an earlier call has moved there already. ``reveal`` moves them there, from the
    folder in which they are complete.

    Raises DestinationError, CorruptError (``verify``: what was written differs), ChangedFileError (a source was written
    to meanwhile), and what reading raises.
    """
    check(moved(place, plan.fingerprint, plan.keys, verify))
    for tensor in tensors:
        tensor.check()
    with staged(place, plan.fingerprint) as staging, Ledger(staging) as ledger:
        there = moved(place, plan.fingerprint, plan.keys, verify)
        where = content(staging, plan.fingerprint)
        files = [file for file in plan.files if file.key not in there]
        if not there:
            ledger.anew()
            staging.check_distinct(plan.keys)
            where.make()
            where.tidy(set(plan.keys).__contains__)
            check_room(Path(staging.root), max(0, plan.room - ledger.nbytes))
        with Bar(sum(file.nbytes for file in files) * (1 + verify), place.name, progress) as bar:
            layouts = fill(files, where, ledger, run, bar.add)
            if verify:
                compare(layouts, run, bar.add)
        for key, text in plan.texts.items():
            if key not in there:
                where.put(key, [text])
        check_unchanged(tensors)
        ledger.move(verify)
        check(there)
        reveal(where)
