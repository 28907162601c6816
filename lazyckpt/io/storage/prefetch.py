"""Reading ahead while a checkpoint behind a network is opened: what readers read next is requested concurrently.

Readers stay sequential: they announce the files that they are about to parse (`expect`), and parse one after another.
Threads request the first and the last bytes of these files meanwhile. Every file of a group teaches how many bytes the
next ones need, because ranks write files that are alike.

Nothing is requested twice during one opening, and a small read is extended: 64 KiB take hardly longer than 30 bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Generic

from ...core.index import FileInfo
from ..pool import LOOK
from ..system import after_fork
from .announced import SMALL, E, File, Group, Layout, Needs, Pending, Requesting

THREADS = 64  # requests at the same time
_UNREAD = 64 << 20  # bytes that are requested before a reader has taken them
_KEPT = 128 << 20  # bytes that are kept for a second read
_LARGE = 4 << 20  # bytes; a larger read is not kept
_ROUNDS = 4  # times that a file's needs are looked at


class Ahead(Generic[E]):
    """The bytes that are held of the files of a store during one opening, and its listings.

    Parameters
    ----------
    store
        The store that requests are sent to.
    """

    def __init__(self, store: Requesting[E]) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._files: dict[str, File] = {}
        self._groups: list[Group] = []
        self._group_of: dict[str, Group] = {}
        self._listings: dict[str, Mapping[str, E]] = {}
        self._wanted: deque[tuple[str, int, int]] = deque()  # path, start, stop
        self._running = 0  # files whose requests are under way
        self._unread = self._held = 0  # bytes
        self._taken: deque[File] = deque()
        self.closed = False

    # -- listings

    def listed(self, folder: str) -> Mapping[str, E]:
        """Return the listing of a folder. Each folder is listed once."""
        found = self._listings.get(folder)
        if found is None:
            found = self._listings[folder] = self._store.list(folder)
        return found

    def list_all(self, folders: Iterable[str]) -> None:
        """List these folders concurrently, except those that are known."""
        with self._lock:
            new = [folder for folder in folders if folder not in self._listings and not self.closed]

        def one(folder: str) -> None:
            with suppress(Exception):  # `listed` asks again and raises the error
                self.know({folder: self._store.list(folder)})

        if len(new) > 1:
            wait([_threads().submit(one, folder) for folder in new])

    def know(self, listings: Mapping[str, Mapping[str, E]]) -> None:
        """Use listings that the caller has already."""
        for folder, entries in listings.items():
            self._listings.setdefault(folder, entries)

    def state(self, path: str) -> FileInfo | None:
        """Return the state that a file had when it was first asked for, else that of its folder's listing; None if
        neither is known."""
        first = self._store.pins.get(path) or self._store.seen.get(path)
        if first is not None and first.size and (first.version or first.mtime_ns):
            return first
        folder, _, name = path.rpartition("/")
        entries = self._listings.get(folder)
        entry = None if entries is None else entries.get(name)
        if entry is None or entry.is_dir or not (entry.info.version or entry.info.mtime_ns):
            return None
        return entry.info

    # -- announcements

    def expect(self, paths: Iterable[str], layout: Layout) -> None:
        """Request what opening these files takes. Readers take the files in about this order."""
        with self._lock:
            new = deque(path for path in dict.fromkeys(paths) if path not in self._files and path not in self._group_of)
            if self.closed or not new:
                return
            group = Group(layout, new, layout.first, learned=layout.needs is None)
            self._groups.append(group)
            self._group_of.update(dict.fromkeys(new, group))
            self._pump()

    def _pump(self) -> None:
        """Start the next files, as far as the limits allow."""
        while not self.closed and self._running < min(THREADS, self._store.width):
            if self._wanted and self._held < _KEPT:
                self._submit(*self._wanted.popleft())
                continue
            group = next((g for g in self._groups if g.waiting and (g.learned or not g.started)), None)
            if group is None or self._unread > _UNREAD:
                return
            self._start(group, group.waiting.popleft())

    def _start(self, group: Group, path: str) -> None:
        file = self._files[path] = File(path, done=threading.Event())
        group.started += 1
        self._running += 1
        file.open = 1
        _threads().submit(self._begin, group, file)

    def _begin(self, group: Group, file: File) -> None:
        """Request what the group's earlier files needed of a file."""
        try:
            size = (self._store.pins.get(file.path) or self._store.stat(file.path)).size
        except Exception as e:  # raised when the file is read
            size, file.error = 0, e
        with self._lock:
            file.size = size
            whole = size <= max(SMALL if group.layout.needs is not None else 0, sum(group.guess))
            ranges = self._ranges(file, Needs(size) if whole else group.guess)
            file.open += max(0, len(ranges) - 1)
        for start, stop in ranges[1:]:
            _threads().submit(self._request, group, file, start, stop)
        self._request(group, file, *(ranges[0] if ranges else (0, 0)))

    def _ranges(self, file: File, needs: Needs) -> list[tuple[int, int]]:
        head, tail = min(file.size, needs.head), max(0, file.size - needs.tail)
        if head >= tail:
            return file.missing(0, file.size)
        return [*file.missing(0, head), *file.missing(tail, file.size)]

    def _request(self, group: Group, file: File, start: int, stop: int) -> None:
        """Request a range in a thread. The last request of a file looks at what is still missing of it."""
        data = bytearray(stop - start)
        error: Exception | None = None
        try:
            if data and not self.closed:
                self._store.request(file.path, start, memoryview(data))
        except Exception as e:  # raised when the file is read
            error = e
        more: list[tuple[int, int]] = []
        with self._lock:
            if error is not None:
                file.error = error
            elif data and not self.closed:
                self._keep(file, start, bytes(data))
            file.open -= 1
            if file.open:
                return
            if file.error is None and not self.closed:
                try:
                    more = self._more(group, file)
                except Exception as e:  # raised when the file is read, rather than never saying that it is complete
                    file.error = e
            file.open = len(more)
            if not more:
                group.learned = True
                self._running -= 1
                assert file.done is not None
                file.done.set()
                self._pump()
                return
        for one in more[1:]:
            _threads().submit(self._request, group, file, *one)
        self._request(group, file, *more[0])

    def _more(self, group: Group, file: File) -> list[tuple[int, int]]:
        """Return what is missing of a file, and learn from its needs."""
        needs = group.layout.needs
        if needs is None or file.rounds == _ROUNDS:
            return []
        file.rounds += 1
        found = needs(file.size, file.held)
        known = group.guess if group.learned else Needs()
        # a little more than this file needs: the others' numbers have more digits, and headers of records are near
        margins = (n + n // 32 + 1024 if n else 0 for n in found)
        group.guess = Needs(*map(max, known, margins))
        return self._ranges(file, found)

    def _keep(self, file: File, start: int, data: bytes) -> None:
        file.add(start, data)
        self._held += len(data)
        if not file.taken:
            self._unread += len(data)

    def want(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Request ranges (path, offset, length) of files, near ones of a file together."""
        with self._lock:
            if self.closed:
                return
            last: tuple[str, int, int] | None = None
            for path, start, length in sorted(ranges):
                if last is not None and last[0] == path and start <= last[2] + self._store.gap:
                    last = path, last[1], max(last[2], start + length)
                    self._wanted[-1] = last
                elif length:
                    last = path, start, start + length
                    self._wanted.append(last)
            self._pump()

    def _submit(self, path: str, start: int, stop: int) -> None:
        file = self._files.setdefault(path, File(path))
        for lo, hi in file.missing(start, stop):
            one = Pending(lo, hi)
            file.pending.append(one)
            self._running += 1
            _threads().submit(self._bring, file, one)

    def _bring(self, file: File, one: Pending) -> None:
        with suppress(Exception):  # the reader's own request raises the error
            self._ask(file, one)
        with self._lock:
            self._running -= 1
            self._pump()

    def _ask(self, file: File, one: Pending) -> None:
        """Request a pending range on this thread."""
        data = bytearray(one.stop - one.start)
        try:
            if not self.closed:
                self._store.request(file.path, one.start, memoryview(data))
        except BaseException:
            data = bytearray()
            raise
        finally:
            with self._lock:
                file.pending.remove(one)
                if data and not self.closed:
                    file.add(one.start, bytes(data))
                    self._held += len(data)
            one.done.set()

    # -- reads

    def read(self, path: str, offset: int, target: memoryview, pin: FileInfo | None = None) -> bool:
        """Fill ``target`` with bytes of a file. Request those that are not held, and more around them if they are few.

        Return False if the caller has to read the file itself: after `close`, for large reads, and if the bytes held
        may be those of another state of the file than ``pin``. Raises what `Store.request` raises."""
        length = len(target)
        if length > _LARGE:
            return False
        while True:
            with self._lock:
                if self.closed:
                    return False
                file = self._file(path)
                waiting = file.done
                if waiting is None or waiting.is_set():
                    if file.error is not None:
                        raise file.error
                    self._take(file)
                    found = file.held(offset, length)
                    if found is not None:
                        break
                    under_way = [one for one in file.pending if one.start < offset + length and offset < one.stop]
                    if under_way:
                        waiting = under_way[0].done
                    else:
                        waiting = None
                        mine = [Pending(*one) for one in file.missing(*self._extended(file, offset, length))]
                        file.pending += mine
            if waiting is not None:
                while not waiting.wait(LOOK):
                    pass
                continue
            for n, one in enumerate(mine):
                try:
                    self._ask(file, one)
                except BaseException:
                    with self._lock:
                        for other in mine[n + 1 :]:
                            file.pending.remove(other)
                            other.done.set()
                    raise
        if pin is not None and pin != self._store.pins.get(path):
            first = self._store.seen.get(path)
            if first is None or not first.may_be(pin):
                return False
        target[:] = found
        return True

    def ends(self, path: str, size: int) -> tuple[bytes | None, bytes | None]:
        """Return the first and the last bytes of a file of this size if they were announced, as far as they are held;
        None if they are not. Errors are left to `read`."""
        with self._lock:
            if self.closed or (path not in self._files and path not in self._group_of):
                return None, None
            done = self._file(path).done
        while done is not None and not done.wait(LOOK):  # so that Ctrl-C is noticed
            pass
        with self._lock:
            file = self._files.get(path)
            if file is None or file.error is not None or not file.runs or file.size != size:
                return None, None
            self._take(file)
            (first, head), (last, tail) = file.runs[0], file.runs[-1]
            return None if first else head, tail if last and last + len(tail) == size else None

    def held(self, path: str, offset: int, length: int) -> bytes | None:
        """Return bytes of a file if they are held or under way; None if they are not. Requests nothing. Errors are left
        to `read`."""
        while True:
            with self._lock:
                file = self._files.get(path)
                if self.closed or file is None or file.error is not None:
                    return None
                found = file.held(offset, length)
                if found is not None:
                    return found
                under_way = [one for one in file.pending if one.start < offset + length and offset < one.stop]
            if not under_way:
                return None
            while not under_way[0].done.wait(LOOK):
                pass

    def take(self, path: str, offset: int, target: memoryview, pin: FileInfo | None = None) -> bool:
        """Fill ``target`` as `read` does if some of its bytes are held, or under way; else return False."""
        with self._lock:
            file = self._files.get(path)
            if self.closed or file is None:
                return False
            ready = file.done is None or file.done.is_set()
            if ready and file.missing(offset, offset + len(target)) == [(offset, offset + len(target))]:
                return False
        return self.read(path, offset, target, pin)

    def _file(self, path: str) -> File:
        """Return a file. One that was announced and has not been requested is requested before all others."""
        file = self._files.get(path)
        if file is None:
            group = self._group_of.get(path)
            if group is None:
                file = self._files[path] = File(path)
            else:
                group.waiting.remove(path)
                self._start(group, path)
                file = self._files[path]
        return file

    def _take(self, file: File) -> None:
        """Count a file as read: its bytes make room for others."""
        if not file.taken:
            file.taken = True
            self._taken.append(file)
            self._unread -= file.nbytes
            self._pump()
        while self._held > _KEPT and len(self._taken) > 1:
            old = self._taken.popleft()
            if old is file:
                self._taken.append(old)
                continue
            self._held -= old.nbytes
            old.runs.clear()

    def _extended(self, file: File, offset: int, length: int) -> tuple[int, int]:
        """Return the range to request for a small read: 64 KiB, but nothing that is under way."""
        start, stop = offset, offset + length
        if file.size < 0:
            state = self.state(file.path)  # the answer has to be of this state, too
            if state is not None and file.path not in self._store.pins:
                self._store.stat(file.path)
            file.size = -1 if state is None else state.size
        if length >= SMALL or file.size < stop:
            return start, stop
        if file.size <= SMALL:
            start, stop = 0, file.size
        elif file.size - offset <= SMALL:
            start, stop = file.size - SMALL, file.size
        else:
            stop = offset + SMALL
        if any(one.start < stop and start < one.stop for one in file.pending):
            return offset, offset + length
        return start, stop

    def close(self) -> None:
        """Free the bytes, and request nothing more."""
        with self._lock:
            self.closed = True
            self._files.clear()
            self._groups.clear()
            self._group_of.clear()
            self._wanted.clear()
            self._taken.clear()
            self._listings.clear()


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lazyckpt-ahead")
        return _pool


def _forget() -> None:
    """Reset the pool in a forked child, which has none of its threads."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


after_fork(_forget)
