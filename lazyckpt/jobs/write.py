"""The engine of exports: executes a write plan, from the first check to publishing.

There are two kinds of tasks: one writes a run of a tensor to its place in a file, piece by piece, with one buffer; the
other writes a whole file (a zarr chunk). Memory is bounded by the number of tasks in flight, not by the size of a
tensor. Tasks are created lazily, so a million fragments or chunks do not become a list of a million tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..core.merkle import Leaves
from ..formats.zarr.documents import JOB
from ..io import system
from ..io.system import preallocate, read_at, write_at
from .batching import Task
from .destination import Destination, Session, Zip, check_room, check_unchanged
from .executor import OVERHEAD, Run
from .ledger import Done, Ledger
from .passing import Cut, Passed, Passing, cuts
from .pieces import contents, differs, read_piece
from .places import LEDGER, PART, PIECE, Folder, Place, Target, combined, crc32
from .plan import File, Layout, Part, Text, WritePlan
from .progress import Bar
from .publish import content, moved, staged

RUN = 16 << 20  # maximum bytes that a task moves


# -- the runs of files


@dataclass(slots=True)
class _Filling:
    """A file that is being written. ``left`` is the number of unfinished tasks, plus one until all tasks are submitted.
    ``found`` has the (offset, CRC-32, number of bytes) of each tensor's runs if the layout needs them."""

    number: int
    target: Target
    layout: Layout
    left: int = 1
    found: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def add(self, n: int, offset: int, checksum: int, nbytes: int) -> None:
        if self.layout.checksums:
            self.found.setdefault(n, []).append((offset, checksum, nbytes))

    def one_less(self) -> None:
        self.left -= 1
        if self.left or not self.layout.checksums:
            return
        known = {n: combined((crc, nbytes) for _, crc, nbytes in sorted(runs)) for n, runs in self.found.items()}
        _finish(self.target, self.layout, known)
        self.found.clear()


def _finish(target: Target, layout: Layout, known: Mapping[int, int]) -> None:
    """Write the checksums of a file. ``known`` has the CRC-32s of tensors that are not empty, by number."""
    _put_around(target, [(offset, known.get(n, 0).to_bytes(4, "little")) for offset, n in layout.checksums])


class Laid(NamedTuple):
    """A file that exists, and its content."""

    target: Target
    layout: Layout


def fill(
    files: Sequence[File],
    folder: Folder,
    ledger: Ledger,
    run: Run,
    moved: Callable[[int], None],
    passed: Passed,
    algorithm: str | None = None,
) -> list[Laid]:
    """Write files, except for the runs that are listed in the ledger and therefore intact (see `keep_intact`). Files
    are created lazily. ``moved`` is called with the number of bytes of each run, written or already present. With an
    ``algorithm``, ``passed`` gets the hashes of what is written.

    Raises what reading raises, and OSError for the written files.
    """
    filling: dict[int, _Filling] = {}
    laid: list[Laid] = []

    def tasks() -> Iterator[Task]:
        for key, _, content_of in files:
            target = Target(folder, key)
            there = ledger.runs(key, target)
            layout = content_of()
            _create(target, layout)
            laid.append(Laid(target, layout))
            file = _Filling(ledger.begin(key, layout.size), target, layout)
            filling[file.number] = file
            for cut in _runs(layout, algorithm):
                known, nbytes = there.get(cut.offset), cut.nbytes
                if known is not None and known.nbytes == nbytes:
                    file.add(cut.number, cut.offset, known.checksum, nbytes)
                    moved(nbytes)
                    continue
                file.left += 1
                about = _Run(file.number, cut.number, cut.offset)
                work = partial(_move, target, cut.parts[0], about)
                if cut.passing is not None:
                    work = partial(_pass, target, cut.parts, about, cut.passing)
                yield Task(nbytes, PIECE + OVERHEAD, work, cut.parts[0])
            file.one_less()

    def done(task: Task, result: _Moved) -> None:
        (number, n, offset), checksum, leaves = result
        ledger.add(number, offset, task.nbytes, checksum)
        moved(task.nbytes)
        file = filling[number]
        if leaves is not None:
            passed.add(file.target.key, offset, task.nbytes, *leaves)
        file.add(n, offset, checksum, task.nbytes)
        file.one_less()

    run(tasks(), done)
    return laid


def _create(target: Target, layout: Layout) -> None:
    """Create a file with its size and everything but the tensors; bytes of tensors that are there already stay."""
    _put_around(target, layout.texts)
    fd = target.descriptor(os.O_RDWR)
    try:
        os.ftruncate(fd, layout.size)
        preallocate(fd, layout.size)
    finally:
        os.close(fd)


def _put_around(target: Target, texts: Iterable[tuple[int, bytes]]) -> None:
    """Write bytes around the tensors of a file, which is created if it does not exist."""
    fd = target.descriptor(os.O_RDWR | os.O_CREAT)
    try:
        for offset, text in texts:
            system.write_at(fd, text, offset)
    finally:
        os.close(fd)


def keep_intact(folder: Folder, ledger: Ledger, run: Run) -> None:
    """Strike the runs from the ledger whose bytes do not match their checksums."""

    def tasks() -> Iterator[Task]:
        for key in ledger.keys:
            target = Target(folder, key)
            for offset, known in list(ledger.runs(key, target).items()):
                yield Task(known.nbytes, PIECE + OVERHEAD, partial(_intact, target, offset, known))

    def done(_: Task, result: tuple[Target, int, bool]) -> None:
        target, offset, intact = result
        if not intact:
            ledger.strike(target.key, offset)

    run(tasks(), done)


def compare(laid: Sequence[Laid], run: Run, moved: Callable[[int], None]) -> None:
    """Compare the files that `fill` wrote, read from the disk, with the source. Raises CorruptError if they differ."""
    for target, _ in laid:
        target.folder.forget(target.key)

    def tasks() -> Iterator[Task]:
        for target, layout in laid:
            for _, offset, (part,), _ in _runs(layout):
                yield Task(part.nbytes, 2 * PIECE + OVERHEAD, partial(_compare, target, offset, part), part)

    run(tasks(), lambda task, _: moved(task.nbytes))


def _runs(layout: Layout, algorithm: str | None = None) -> Iterator[Cut]:
    """Yield the runs of all tensors that are not empty."""
    return cuts(layout.placed, max(RUN, PIECE), algorithm)


class _Run(NamedTuple):
    """A run: the numbers of its file and of the tensor within the file, and the byte offset in the file."""

    file: int
    tensor: int
    offset: int


class _Moved(NamedTuple):
    """A run that is written: its CRC-32 and, if it was hashed, what was hashed with the hashes."""

    about: _Run
    checksum: int
    leaves: tuple[Passing, Leaves] | None


def _move(target: Target, tensor: Any, about: _Run) -> _Moved:
    """Write one run into an existing file."""
    return _Moved(about, _written(target, [tensor], about.offset), None)


def _pass(target: Target, parts: Sequence[Any], about: _Run, passing: Passing) -> _Moved:
    """Write one run into an existing file, and hash it."""
    hasher = passing.hasher()
    checksum = _written(target, parts, about.offset, hasher.update)
    return _Moved(about, checksum, (passing, hasher.leaves()))


def _written(
    target: Target, parts: Sequence[Any], offset: int, seen: Callable[[memoryview], None] | None = None
) -> int:
    """Write parts of a tensor one after the other, and return their CRC-32. ``seen`` is called with their bytes."""
    fd = target.descriptor(os.O_WRONLY)
    try:
        crc = 0
        for part in parts:
            for at, memory in contents(part):
                write_at(fd, memory, offset + at)
                crc = crc32(memory, crc)
                if seen is not None:
                    seen(memory)
            offset += part.nbytes
    finally:
        os.close(fd)
    return crc


def _intact(target: Target, offset: int, known: Done) -> tuple[Target, int, bool]:
    """Return the run's file and offset, and whether its bytes still match the recorded checksum."""
    crc, end = 0, offset + known.nbytes
    fd = target.descriptor(os.O_RDONLY)
    try:
        for at in range(offset, end, PIECE):
            crc = crc32(read_at(fd, min(PIECE, end - at), at), crc)
    finally:
        os.close(fd)
    return target, offset, crc == known.checksum


def _compare(target: Target, offset: int, tensor: Any) -> None:
    fd = target.descriptor(os.O_RDONLY)
    try:
        for ahead, piece in tensor.pieces(PIECE):
            at = offset + ahead * tensor.itemsize
            written = read_at(fd, piece.nbytes, at)
            if written != bytes(read_piece(piece)):
                raise differs(str(target), f"bytes {at:,} to {at + piece.nbytes:,}")
    finally:
        os.close(fd)


# -- from the first check to publishing


def write(plan: WritePlan, *, verify: bool, progress: bool | None, run: Run) -> int:
    """Execute a plan and return the size of the files in bytes. The files are published after all are complete. The
    destination is checked at the start and again before publishing, because others may write there meanwhile.

    Raises DestinationError, CorruptError (``verify``: a written file differs from the source), ChangedFileError (a
    source file changed meanwhile), and what reading raises.
    """
    if isinstance(plan.destination, Session):
        plan.destination.write()
        return 0
    progress = progress if plan.nbytes else False
    run = partial(run, tensors=plan.tensors)
    assert isinstance(plan.destination, Destination), "objects are written by `upload`"
    return _write(plan, plan.destination, verify, progress, run)


def _write(plan: WritePlan, dest: Destination, verify: bool, progress: bool | None, run: Run) -> int:
    def there() -> set[str]:
        return moved(dest.place, plan.fingerprint, plan.keys, verify) if dest.one_by_one else set()

    dest.check(there())
    for tensor in plan.tensors:
        tensor._check()
    with staged(dest.place, plan.fingerprint) as staging, Ledger(staging) as ledger:
        already = there()
        where = content(staging, plan.fingerprint, plain=plan.chunks is not None)
        files = [file for file in plan.files if file.key not in already]
        if not already:
            _prepare(plan, staging, where, ledger)
        keep_intact(where, ledger, run)
        chunked, passed = replace(where, listed=True), Passed()
        with Bar((plan.nbytes - _sum(plan.files) + _sum(files)) * (1 + verify), dest.place.name, progress) as bar:
            laid = fill(files, where, ledger, run, bar.add, passed, plan.algorithm)
            nbytes = put_chunks(plan, chunked, ledger.whole, run, bar.add, passed)
            if plan.chunks is not None:  # a killed worker leaves the file that it was writing
                where.tidy(lambda key: not key.endswith(PART))
            if plan.build is not None:
                plan.build(str(where))
            if verify:
                compare(laid, run, bar.add)
                check_chunks(plan, chunked, run, bar.add)
        nbytes += put_texts(plan, where, already)
        if not already:  # else they are there
            nbytes += put_manifests(plan, str(where), where, passed, run)
        check_unchanged(plan.tensors)
        nbytes += sum(layout.size for _, layout in laid) + sum(dest.path(k).stat().st_size for k in already)
        if plan.build is not None:
            nbytes = sum(where.find().values())
        ledger.move(verify)
        dest.check(already)
        dest.publish(where)
    return dest.place.stat().st_size if isinstance(dest, Zip) else nbytes


def _prepare(plan: WritePlan, staging: Folder, where: Folder, ledger: Ledger) -> None:
    ledger.anew()
    staging.check_distinct(plan.keys)
    where.make()
    keep = {*plan.keys, *ledger.keys, JOB, LEDGER}
    where.tidy(keep.__contains__)
    twice = isinstance(plan.destination, Zip)  # the files, and the zip file
    check_room(Path(staging.root), max(0, plan.room * (1 + twice) - ledger.nbytes))


def put_texts(plan: WritePlan, place: Place, already: Set[str] = frozenset()) -> int:
    """Write the small files of a plan, except for those that are there already; return their size in bytes."""
    return sum(_put(place, key, text) for key, text in plan.texts.items() if key not in already)


def put_manifests(plan: WritePlan, files: str, place: Place, passed: Passed, run: Run) -> int:
    """Write the manifests of a plan, whose files are complete in the folder or at the URL ``files``, to a place; return
    their size in bytes."""
    return sum(place.put(one.key, [one.make(files, passed, run)]) for one in plan.manifests)


def _put(place: Place, key: str, text: Text) -> int:
    return place.put(key, [text] if isinstance(text, bytes) else text())


def put_chunks(
    plan: WritePlan,
    place: Place,
    size_of: Callable[[str], int | None],
    run: Run,
    moved: Callable[[int], None],
    passed: Passed,
) -> int:
    """Write the chunks for which ``size_of`` returns None; return the size of all chunks in bytes."""
    nbytes, algorithm = 0, plan.algorithm

    def tasks() -> Iterator[Task]:
        nonlocal nbytes
        for chunk in plan.chunks.at(place) if plan.chunks is not None else ():
            if (size := size_of(chunk.key)) is not None:
                nbytes += size
                moved(chunk.nbytes)
                continue
            work: Callable[[], Any] = chunk.write
            if algorithm is not None and chunk.part is not None:
                work = partial(_hashed, chunk.part, algorithm)
            yield Task(chunk.nbytes, chunk.memory, work, chunk.tensor)

    def done(task: Task, result: int | _Hashed) -> None:
        nonlocal nbytes
        nbytes += result.size if isinstance(result, _Hashed) else result
        if isinstance(result, _Hashed):
            passed.add_chunk(result.array, result.passing, result.leaves)
        moved(task.nbytes)

    run(tasks(), done)
    return nbytes


class _Hashed(NamedTuple):
    """The size of a chunk of an array in bytes, and the hashes of its elements."""

    size: int
    leaves: Leaves
    array: str
    passing: Passing


def _hashed(part: Part, algorithm: str) -> _Hashed:
    """Write a chunk of an array and hash its elements."""
    passing = Passing(part.whole, part.at, algorithm)
    return _Hashed(*part.write(passing), part.array, passing)


def check_chunks(plan: WritePlan, place: Place, run: Run, moved: Callable[[int], None]) -> None:
    if plan.chunks is not None:
        tasks = (Task(c.nbytes, c.memory, c.check, c.tensor) for c in plan.chunks.at(place))
        run(tasks, lambda task, _: moved(task.nbytes))


def _sum(files: Iterable[File]) -> int:
    return sum(file.nbytes for file in files)
