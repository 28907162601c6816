"""Grouping the tasks of a job into futures, and futures of the same source file on the same worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ..core.box import Box
from ..core.fragments import Listed, fragment_boxes, fragments_of
from ..lazy import LazyArray

_EACH = 64 << 10  # a task costs as much as moving so many bytes
_AHEAD = 1 << 10, 1 << 14  # tasks that are looked at together: first, and at most
_PLAIN = 64  # fragments of a plain sequence up to which the one with the first element is looked for


class Task(NamedTuple):
    """A unit of work.

    ``nbytes`` is the number of tensor bytes that it moves, for the progress bar; ``memory`` is the number of bytes that
    it holds while it runs. ``do`` is the function to call; for other processes it must be picklable (a
    `functools.partial` of a module-level function). ``reads`` is what it reads, if that is known."""

    nbytes: int
    memory: int
    do: Callable[[], Any]
    reads: LazyArray | None = None


def in_turn(tasks: Iterable[Task], nbytes: int, count: int) -> Iterator[list[Task]]:
    """Group consecutive tasks into batches, each closed when it reaches ``nbytes`` bytes or ``count`` tasks."""
    batch: list[Task] = []
    size = 0
    for task in tasks:
        batch.append(task)
        size += task.nbytes
        if size >= nbytes or len(batch) >= count:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def by_file(tasks: Iterable[Task], nbytes: Callable[[int], int], count: int) -> Iterator[list[Task]]:
    """Group tasks into batches of the same source file, as far as one can look ahead.

    Parameters
    ----------
    tasks
        The tasks, in any order. At most 16,384 of them are looked at together.
    nbytes
        Returns the bytes of a batch for the bytes that are left, as far as one can look ahead. The batch may have half
        as many, if another file follows, or half more, if they are the last ones of the file.
    count
        Largest number of tasks in a batch.
    """
    stream, (ahead, most) = iter(tasks), _AHEAD
    batch: list[Task] = []
    size = 0
    while some := list(islice(stream, ahead)):
        found, ahead = ahead, min(4 * ahead, most)
        groups: dict[str | None, list[Task]] = {}
        for task in some:
            groups.setdefault(source_of(task), []).append(task)
        total = left = size + sum(map(_cost, some))
        last = len(some) < found
        wanted = nbytes(left)
        for group in groups.values():
            rest = sum(map(_cost, group))  # of the file
            if 2 * size >= wanted:
                yield batch
                batch, size, left = [], 0, left - size
                wanted = nbytes(left if last else total)
            for task in group:
                batch.append(task)
                size += _cost(task)
                rest -= _cost(task)
                if (size >= wanted and not 0 < 2 * rest < wanted) or len(batch) >= count:
                    yield batch
                    batch, size, left = [], 0, left - size
                    wanted = nbytes(left if last else total)
    if batch:
        yield batch


def _cost(task: Task) -> int:
    return task.nbytes + _EACH


def source_of(task: Task) -> str | None:
    """Return the file, with its folder, that holds the first element that a task reads; None if it is not known."""
    tensor = task.reads
    if tensor is None or not tensor.numel():
        return None
    if tensor.spec.expr is not None:
        one, selection = next(tensor._needed(tensor._sel), (None, None))
        return None if one is None else source_of(task._replace(reads=type(one)(one.store, one.spec, selection)))
    fragments = fragments_of(tensor.spec.fragments)
    fragment = fragments.only()
    if fragment is None and not (isinstance(fragments, Listed) and len(fragments) > _PLAIN):
        first = Box(tensor._sel.hull.start, tuple(n + 1 for n in tensor._sel.hull.start))
        near = fragments.meeting(tuple(map(range, first.start, first.stop)))
        fragment = next((f for f in near if any(globe & first for _, globe in fragment_boxes(f))), None)
    return None if fragment is None else f"{tensor.store.root}/{fragment.extent.path}"


class Placer:
    """Which worker reads which file: every file has one, and new files go to the worker with the least to do."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._bytes: dict[str, int] = {}

    def worker(self, batch: Sequence[Task], workers: Iterable[str]) -> str | None:
        """Return the worker for a batch of `by_file`; None if its file is not known, or there are no workers."""
        loads = {name: self._bytes.get(name, 0) for name in workers}
        source = source_of(batch[0])
        if source is None or not loads:
            return None
        name = self._of.get(source, "")
        if name not in loads:  # a new file, or the worker has gone
            name = self._of[source] = min(loads, key=loads.__getitem__)
        loads[name] += sum(task.nbytes for task in batch)
        self._bytes = loads
        return name
