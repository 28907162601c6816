"""Numbers of tensors that take reading: norms of a checkpoint, differences of two. A thread computes them in turn."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf, nan, sqrt
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..core.units import human_bytes
from ..errors import LazyckptError
from ..lazy import LazyArray
from .subject import Pair, Subject, same_shape

if TYPE_CHECKING:
    from ..inspect.diff import Difference
    from ..inspect.table import Stats
    from ..show.outline import Outline
    from .rows import Row

_EVERY = 0.1  # seconds between updates of the screen
AT_ONCE = 2 << 30  # bytes of a comparison that are read without being asked for


class _Job(NamedTuple):
    """What is measured of a tensor, and how many bytes that reads."""

    name: str
    nbytes: int
    work: Callable[[ThreadPoolExecutor], Any]


class Numbers:
    """The numbers of the tensors of an outline, by name, and of rows of its names or of some of them.

    Sums over many names are those of an array, which has the places of the names."""

    def __init__(self, outline: Outline) -> None:
        self.found: dict[str, Stats | Difference] = {}
        self.outline = outline
        self._keys = np.full((2, len(outline.names)), nan)  # squares of norms, or `farness`; NaN: not measured

    def put(self, name: str, one: Stats | Difference) -> None:
        """Keep the numbers of a tensor."""
        self.found[name] = one  # before its key, by which other threads find it
        self._keys[:, bisect_left(self.outline.names, name)] = _key(one)

    def norm(self, row: Row) -> float | None:
        """Return the norm of the tensors of a row, as far as they have been measured."""
        sums = [known.sum() for _, keys in self._of(row) if (known := keys[0][~np.isnan(keys[0])]).size]
        return sqrt(sum(sums)) if sums else None

    def worst(self, row: Row) -> Difference | None:
        """Return the difference of the tensor of a row that differs most, as far as they have been compared."""
        best, at = (-inf, -inf), -1
        for places, (far, most) in self._of(row):
            known = np.flatnonzero(~np.isnan(far))
            if known.size:
                first = known[far[known] == far[known].max()]
                n = int(first[most[first].argmax()])
                if (key := (far[n], most[n])) > best:
                    best, at = key, places.start + n if isinstance(places, range) else int(places[n])
        return cast("Difference", self.found[self.outline.names[at]]) if at >= 0 else None

    def farness(self, row: Row) -> float | None:
        """Return the largest relative difference of the tensors of a row."""
        from ..show.differences import farness

        worst = self.worst(row)
        return None if worst is None else farness(worst)[0]

    def each(self, outline: Outline) -> NDArray[np.float64]:
        """Return a number for each name of an outline, by which its tensor is ordered among others: of norms their
        squares, of differences the relative ones. NaN: it has none."""
        if (outline.whole or outline) is not self.outline:
            return np.full(len(outline.names), np.nan)
        found: NDArray[np.float64] = self._keys[0] if outline.places is None else self._keys[0][outline.places]
        return found

    def _of(self, row: Row) -> Iterator[tuple[Any, NDArray[np.float64]]]:
        """Yield the places of the tensors of a row in the whole list of names, and their keys, range by range."""
        of = row.node.outline
        if not self.found or (of.whole or of) is not self.outline:
            return
        within = of.places
        for node in row.nodes:
            for low, high in row.ranges(node):
                places = range(low, high) if within is None else within[low:high]
                yield places, self._keys[:, low:high] if within is None else self._keys[:, places]

    def of(self, row: Row) -> Iterator[Stats | Difference]:
        """Yield the numbers of the tensors of a row."""
        found = self.found
        if found:
            yield from (found[name] for name in row.names() if name in found)


def _key(one: Stats | Difference) -> tuple[float, float]:
    from ..inspect.diff import Difference
    from ..show.differences import farness

    if isinstance(one, Difference):
        return farness(one)
    return nan if one.l2 is None else one.l2 * one.l2, 0.0


class Measures:
    """The numbers so far, by name. ``changed`` is called on the thread of the screen when there are more."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.numbers: Numbers | None = None  # of the subject that is shown
        self.total = self.read = 0  # bytes
        self._changed = changed
        self._executor: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        return self._executor is not None

    @property
    def progress(self) -> str:
        """How much has been read, as text."""
        return f"read {human_bytes(self.read)} of {human_bytes(self.total)}"

    def of(self, outline: Outline) -> Numbers:
        """Return the numbers of an outline: those so far if they are of it, else new ones."""
        numbers = self.numbers
        return numbers if numbers is not None and numbers.outline is outline else Numbers(outline)

    def show(self, numbers: Numbers) -> None:
        """Stop, and keep the next numbers here."""
        self.stop()
        self.numbers = numbers

    def start(
        self,
        subject: Subject,
        names: Iterable[str],
        most: int | None = None,
        refused: Callable[[], None] | None = None,
    ) -> None:
        """Measure the tensors of these names that have no numbers yet.

        If that reads more than ``most`` bytes, nothing is read, and ``refused`` is called on the thread of the
        screen."""
        self.stop()
        self.total = self.read = 0
        executor = self._executor = ThreadPoolExecutor(thread_name_prefix="lazyckpt-browse")
        loop = asyncio.get_running_loop()
        args = (subject, names, executor, loop, most, refused)
        Thread(target=self._run, args=args, daemon=True).start()
        self._changed()

    def _jobs(self, subject: Subject, names: Iterable[str]) -> Iterator[_Job]:
        for name in names:
            if self.numbers is not None and name in self.numbers.found:
                continue
            if isinstance(subject, Pair):
                pair = subject.both(name)
                size = sum(t.nbytes for t in pair if t is not None) if same_shape(pair) else 0
                yield _Job(name, size, partial(compared, name, pair))
            else:
                t = subject.tensor(name)
                yield _Job(name, t.nbytes, partial(measured, t))

    def _run(
        self,
        subject: Subject,
        wanted: Iterable[str],
        executor: ThreadPoolExecutor,
        loop: asyncio.AbstractEventLoop,
        most: int | None,
        refused: Callable[[], None] | None,
    ) -> None:
        def tell(what: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the program has ended and its loop is closed
                loop.call_soon_threadsafe(what)

        numbers = self.numbers
        assert numbers is not None  # a subject is shown
        jobs, total = [], 0
        for job in self._jobs(subject, wanted):
            jobs.append(job)
            total += job.nbytes
            if self._executor is not executor or (most is not None and total > most):
                break
        if most is not None and total > most:
            jobs, total = [], 0
            if refused is not None:
                tell(refused)
        self.total, last = total, monotonic()
        for job in jobs:
            try:
                found = job.work(executor)
            except (LazyckptError, OSError, RuntimeError):
                found = None  # stopped, or it cannot be read: its own pane says why
            if self._executor is not executor:
                return
            if found is not None:
                numbers.put(job.name, found)
            self.read += job.nbytes
            if monotonic() - last > _EVERY:
                last = monotonic()
                tell(self._changed)
        if self._executor is executor:
            self._executor = None
            executor.shutdown(wait=False)
            tell(self._changed)

    def stop(self) -> bool:
        """Stop measuring. Return whether that was in progress."""
        executor, self._executor = self._executor, None
        if executor is None:
            return False
        executor.shutdown(wait=False, cancel_futures=True)
        self._changed()
        return True


def measured(t: LazyArray, executor: ThreadPoolExecutor | None = None) -> Stats:
    """Return the statistics of a tensor. Raises what reading raises."""
    from ..inspect.stats import stats_of

    return stats_of(t, None, executor, None, progress=False)


def compared(
    name: str, pair: tuple[LazyArray | None, LazyArray | None], executor: ThreadPoolExecutor | None = None
) -> Difference:
    """Return the difference of two tensors. Raises what reading raises."""
    from ..inspect.diff import diff

    a, b = ({name: t} if t is not None else {} for t in pair)
    return diff(a, b, executor=executor, progress=False)[0]
