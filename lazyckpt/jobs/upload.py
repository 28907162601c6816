"""The engine of exports to object stores: executes a write plan without a local copy, in bounded memory.

Files are sent in parts of some MiB, each by one task: the worker reads the part's bytes of the source and sends them.
Where a store keeps parts, the next call sends only what is missing; elsewhere a task streams a whole file. Objects of
parts appear when everything is sent. See `remote` for what is at the destination meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import md5
from typing import Any, NamedTuple

from ..errors import CorruptError
from ..io.pool import stopped, waiting_threads
from ..io.storage import uploads
from ..io.storage.uploads import HELD, PartUploads, Sent, Uploads, part_size
from ..lazy import LazyArray
from .batching import Task
from .destination import check_unchanged
from .executor import OVERHEAD, Run
from .parts import FilePart, Filled, Hashed, Sum, Sums, file_parts, filled, streamed, sums_of
from .passing import Passed
from .pieces import differs
from .places import PIECE
from .plan import File, Layout, Text, WritePlan
from .progress import Bar
from .publish import exclusively, is_unique, resumable
from .remote import Remote
from .unfinished import Record, busy, concurrently, prepared, record_of, remove_unfinished
from .write import check_chunks, put_chunks, put_manifests
from .zips import zipped

_AHEAD = 4  # parts of a zip file in flight


@dataclass(slots=True)
class _Sending:
    """A file that is being sent in parts: its key, its upload, the ETags of the parts that are there, the CRC-32s of
    its tensors, and the parts that wait for them."""

    key: str
    upload: str
    etags: dict[int, str]
    sums: Sums
    waiting: list[FilePart] = field(default_factory=list)


def upload(
    plan: WritePlan, dest: Remote, *, verify: bool, progress: bool | None, run: Run, resume: bool, threads: bool
) -> int:
    """Execute a plan and return the size of the objects in bytes. Without ``resume``, what an unfinished export has
    left is removed. ``threads``: whether ``run`` uses threads of this process.

    Raises what `write.write` raises.
    """
    for tensor in plan.tensors:
        tensor._check()
    run = partial(run, tensors=plan.tensors, waits=True)
    with exclusively(str(dest), busy(str(dest))):
        # the parts that are there are those of this job only if they were cut in the same way
        keys = [dest.one, *(m.key for m in plan.manifests)] if dest.packed and dest.one else plan.keys
        with dest.reporting(kept=False):
            record = dest.begin(f"{plan.fingerprint}-{uploads.PART}", keys, resume)
        with dest.reporting():
            try:
                return _Upload(plan, dest, record, verify, run, threads).carry_out(progress if plan.nbytes else False)
            except BaseException as e:
                if is_unique(plan.fingerprint) or not resumable(e):
                    with suppress(OSError):  # the first error says more
                        ours = record_of(dest.place, dest.mark)
                        if ours is not None and ours.fingerprint == record.fingerprint:
                            remove_unfinished(dest.place, dest.mark, ours)
                raise


class _Upload:
    """An export that is being written."""

    def __init__(self, plan: WritePlan, dest: Remote, record: Record, verify: bool, run: Run, threads: bool) -> None:
        self._plan, self._dest, self._record, self._verify, self._run = plan, dest, record, verify, run
        self._threads = threads
        self._place = dest.place
        self._passed = Passed()
        self._parts: dict[str, dict[int, Sent] | None] = {}
        self._sending: dict[str, _Sending] = {}
        self._sizes: dict[str, int] = {}

    def carry_out(self, progress: bool | None) -> int:
        plan, dest, place, run = self._plan, self._dest, self._place, self._run
        keys = [dest.one] if dest.packed and dest.one is not None else [file.key for file in plan.files]
        if isinstance(place, PartUploads):
            self._record, self._parts = prepared(place, self._record, keys)
        else:
            self._record = self._record._replace(uploads=dict.fromkeys(keys, ""))
        marking = partial(place.put, dest.mark, [self._record.text()])
        if dest.packed or not isinstance(place, PartUploads):
            marking()
        there = place.list() if plan.chunks is not None or not place.resumes else {}
        with Bar(plan.nbytes * (1 + self._verify), dest.name, progress) as bar:
            nbytes = 0
            if dest.packed:
                self._pack(keys[0], bar.add)
            else:
                if isinstance(place, PartUploads):
                    self._send(place, marking, bar.add)
                else:
                    self._stream({} if dest.one is not None else there, bar.add)
                nbytes = put_chunks(plan, place, there.get, run, bar.add, self._passed)
            check_unchanged(plan.tensors)
            nbytes += sum(self._sizes.values())
            dest.check_ours(self._record)
            return nbytes + self._publish(bar.add)

    # -- sending

    def _send(self, place: PartUploads, marking: Callable[[], int], moved: Callable[[int], None]) -> None:
        """Write the marker, and send the parts of all files that are missing.

        Threads of this process send the first parts at the same time. Other workers may be forked, which must not
        happen while a thread makes a request."""
        plan, run = self._plan, self._run

        def tasks() -> Iterator[Task]:
            for file in plan.files:
                there = self._parts[file.key]
                layout = file.layout()
                self._sizes[file.key] = layout.size
                sending = _Sending(file.key, (self._record.uploads or {})[file.key], {}, Sums(layout))
                self._sending[file.key] = sending
                if there is None:  # it is complete
                    moved(file.nbytes)
                    continue
                yield from self._first(place, sending, layout, there, moved)

        if self._threads:
            with _beside(marking) as look:
                run(look(tasks()), partial(self._done, moved))
        else:
            marking()
            run(tasks(), partial(self._done, moved))
        while any(sending.waiting for sending in self._sending.values()):
            run(self._ready(place), partial(self._done, moved))

    def _first(
        self,
        place: PartUploads,
        sending: _Sending,
        layout: Layout,
        there: Mapping[int, Sent],
        moved: Callable[[int], None],
    ) -> Iterator[Task]:
        """Yield the tasks of a file: to send the parts that wait for nothing, and to sum up what others wait for."""
        present: list[FilePart] = []
        if not layout.size:
            sending.etags[1] = place.send(sending.key, sending.upload, 1, b"")
        for part in file_parts(layout, self._plan.algorithm):
            sent = there.get(part.number)
            if sent is not None and sent.nbytes == part.nbytes:
                sending.etags[part.number] = sent.etag
                moved(part.in_tensors)
                if part.sums:
                    present.append(part)
            elif part.waits_for:
                sending.waiting.append(part)
                if not all(piece.whole for piece in part.pieces):
                    yield _task(part, partial(_summed, sending.key, part, None), 0)
            else:
                yield _task(part, partial(_sent, place, sending.key, sending.upload, part, {}))
        needed = set().union(*(part.waits_for for part in sending.waiting))
        if self._verify:
            needed = {n for n, _ in enumerate(layout.placed)}
        for part in present:
            if any(piece.number in needed for piece in part.pieces):
                yield _task(part, partial(_summed, sending.key, part, frozenset(needed)), 0)

    def _ready(self, place: PartUploads) -> Iterator[Task]:
        """Yield the tasks to send the parts that have waited and know all checksums."""
        for sending in self._sending.values():
            known = sending.sums.known
            ready = [part for part in sending.waiting if part.waits_for <= set(known)]
            sending.waiting = [part for part in sending.waiting if not part.waits_for <= set(known)]
            for part in ready:
                sums = {n: known[n] for n in part.waits_for}
                yield _task(part, partial(_sent, place, sending.key, sending.upload, part, sums))

    def _done(self, moved: Callable[[int], None], task: Task, result: _Result) -> None:
        sending = self._sending[result.key]
        sending.sums.add([one for one in result.sums if one.number not in sending.sums.known])
        if result.etag is not None:
            sending.etags[result.number] = result.etag
            for offset, nbytes, passing, leaves in result.hashes:
                self._passed.add(result.key, offset, nbytes, passing, leaves)
        moved(task.nbytes)

    def _stream(self, there: Mapping[str, int], moved: Callable[[int], None]) -> None:
        """Stream the files that are missing."""

        def tasks() -> Iterator[Task]:
            for file in self._plan.files:
                layout = file.layout()
                self._sizes[file.key] = layout.size
                if there.get(file.key) == layout.size:
                    moved(file.nbytes)
                    continue
                held = min(layout.size, HELD) if self._place.buffers else 0
                work = partial(_streamed, self._place, file, self._plan.algorithm, self._dest.one is not None)
                yield Task(file.nbytes, held + 2 * part_size(layout.size) + PIECE + OVERHEAD, work)

        def done(task: Task, result: _Whole) -> None:
            for offset, nbytes, passing, leaves in result.hashes:
                self._passed.add(result.key, offset, nbytes, passing, leaves)
            moved(task.nbytes)

        self._run(tasks(), done)

    def _pack(self, key: str, moved: Callable[[int], None]) -> None:
        """Send a zip file of everything, from its begin to its end. Its size is not known before, so an earlier call's
        part is one of this call if its ETag is the MD5 of the same bytes."""
        plan, place = self._plan, self._place
        assert plan.chunks is not None
        pieces = zipped(plan.chunks, plan.texts, moved)
        if not isinstance(place, PartUploads):
            self._sizes[key] = place.put(key, _unchanged(pieces, plan.tensors))
            return
        there = self._parts[key]
        if there is None:
            self._sizes[key] = place.forget(key)
            moved(plan.nbytes)
            return
        sending = self._sending[key] = _Sending(key, (self._record.uploads or {})[key], {}, Sums(Layout(0, (), ())))
        waiting: deque[Future[str]] = deque()
        nbytes = 0
        try:
            for number, data in enumerate(_cut(pieces, part_size(plan.room + 2 * plan.nbytes)), 1):
                nbytes += len(data)
                sent = there.get(number)
                if sent is not None and sent == Sent(len(data), f'"{md5(data, usedforsecurity=False).hexdigest()}"'):
                    sending.etags[number] = sent.etag
                    continue
                if len(waiting) >= _AHEAD:
                    waiting.popleft().result()
                waiting.append(waiting_threads().submit(_put_part, place, sending, number, data))
            while waiting:
                waiting.popleft().result()
        finally:
            stopped(waiting)
        self._sizes[key] = nbytes

    # -- publishing

    def _publish(self, moved: Callable[[int], None]) -> int:
        """Make objects of the parts, then write the other files, the one that completes the checkpoint last; return the
        size of the other files in bytes."""
        plan, dest, place = self._plan, self._dest, self._place
        texts = [] if dest.packed else list(plan.texts.items())
        if isinstance(place, PartUploads):
            if texts and plan.files and not dest.owns:
                place.remove([texts[-1][0]])  # an old index must not refer to new files
            sending = [one for one in self._sending.values() if self._parts[one.key] is not None]
            stamp = self._record.fingerprint
            concurrently(lambda one: place.complete(one.key, one.upload, one.etags, stamp), sending)
        if self._verify:
            self._compare(moved)
        nbytes = sum(concurrently(lambda item: _put(place, *item), texts[:-1]))
        nbytes += sum(_put(place, *item) for item in texts[-1:])
        where = place.beside if dest.beside is not None else place
        nbytes += put_manifests(plan, place.url, where, self._passed, self._run)
        place.remove([dest.mark])
        return nbytes

    def _compare(self, moved: Callable[[int], None]) -> None:
        """Read everything back and compare it with the source. Raises CorruptError if it differs; nothing is kept."""
        plan, place = self._plan, self._place
        if self._dest.packed and self._dest.one is not None and plan.chunks is not None:
            try:
                at = 0
                for data in zipped(plan.chunks, plan.texts, moved):
                    _compare(place, self._dest.one, at, data)
                    at += len(data)
            except CorruptError:
                place.remove([self._dest.one])
                raise
            return

        def tasks() -> Iterator[Task]:
            for file in plan.files:
                sending = self._sending.get(file.key)
                layout = file.layout()
                known = None if sending is None else sending.sums.known
                if known is None or len(known) < len(layout.placed) * bool(layout.checksums):
                    yield Task(file.nbytes, 3 * part_size(layout.size) + OVERHEAD, partial(_same, place, file))
                    continue
                for part in file_parts(layout):
                    sums = {n: known[n] for n in part.waits_for}
                    yield _task(part, partial(_equal, place, file.key, part, sums))

        try:
            self._run(tasks(), lambda task, _: moved(task.nbytes))
            check_chunks(plan, place, self._run, moved)
        except CorruptError:
            place.remove([file.key for file in plan.files])
            raise


@contextmanager
def _beside(ask: Callable[[], object]) -> Iterator[Callable[[Iterable[Task]], Iterator[Task]]]:
    """Make a request beside the tasks of the context; it is complete when the context exits. Yield a function through
    which tasks pass: it raises the error of the request as soon as it is known."""
    future = waiting_threads().submit(ask)

    def look(tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            if future.done():
                future.result()
            yield task

    try:
        yield look
    finally:
        stopped([future])
    future.result()


def _cut(pieces: Iterable[bytearray], nbytes: int) -> Iterator[bytearray]:
    """Yield bytes in parts of the same size, but for the last one."""
    rest = bytearray()
    for piece in pieces:
        rest += piece
        while len(rest) >= nbytes:
            yield rest[:nbytes]
            del rest[:nbytes]
    if rest:
        yield rest


def _put_part(place: PartUploads, sending: _Sending, number: int, data: bytearray) -> str:
    etag = sending.etags[number] = place.send(sending.key, sending.upload, number, data)
    return etag


def _put(place: Uploads, key: str, text: Text) -> int:
    return place.put(key, [text] if isinstance(text, bytes) else text())


def _task(part: FilePart, work: Callable[[], Any], nbytes: int | None = None) -> Task:
    moves = part.in_tensors if nbytes is None else nbytes
    return Task(moves, 2 * part.nbytes + PIECE + OVERHEAD, work, part.tensor)


# -- in a worker


class _Result(NamedTuple):
    """What a task has found: of which file and part, its ETag if it was sent, the CRC-32s of pieces, and hashes."""

    key: str
    number: int
    etag: str | None
    sums: list[Sum]
    hashes: list[Hashed]


class _Whole(NamedTuple):
    key: str
    hashes: list[Hashed]


def _sent(place: PartUploads, key: str, upload: str, part: FilePart, known: Mapping[int, int]) -> _Result:
    """Read the bytes of a part and send them."""
    found: Filled = filled(part, known)
    return _Result(key, part.number, place.send(key, upload, part.number, found.data), found.sums, found.hashes)


def _summed(key: str, part: FilePart, numbers: frozenset[int] | None) -> _Result:
    """Read pieces of a part for their CRC-32s."""
    return _Result(key, part.number, None, sums_of(part, numbers), [])


def _streamed(place: Uploads, file: File, algorithm: str | None, alone: bool) -> _Whole:
    """Write a file as a whole. Readers see one that is ``alone`` when it is complete, before anything else is done."""
    hashes: list[Hashed] = []
    layout = file.layout()
    pieces: Iterable[bytearray] = streamed(layout, hashes, algorithm)
    if alone:
        pieces = _unchanged(pieces, [p.tensor for p in layout.placed if isinstance(p.tensor, LazyArray)])
    place.put(file.key, pieces)
    return _Whole(file.key, hashes)


def _unchanged(pieces: Iterable[bytearray], tensors: Iterable[LazyArray]) -> Iterator[bytearray]:
    """Yield all pieces. Raises ChangedFileError or MissingFileError if a source file changed meanwhile, so that the
    object does not appear."""
    yield from pieces
    check_unchanged(tensors)


def _equal(place: Uploads, key: str, part: FilePart, known: Mapping[int, int]) -> None:
    """Compare a part of an object with the source."""
    _compare(place, key, part.begin, filled(part, known).data)


def _same(place: Uploads, file: File) -> None:
    """Compare an object with the source, part by part."""
    at = 0
    for data in streamed(file.layout(), [], None):
        _compare(place, file.key, at, data)
        at += len(data)


def _compare(place: Uploads, key: str, offset: int, data: bytearray) -> None:
    if place.get(key, offset, len(data)) != data:
        raise differs(place.at(key), f"bytes {offset:,} to {offset + len(data):,}")
