"""A hash of the contents of tensors that does not depend on files, layout or the order of names.

docs/formats/digest.md specifies it, and `core.merkle` computes it from hashes of runs of 1 MiB. The runs are hashed in
any order, by any number of threads or workers. Small tensors are read together: those of one file as columns of numbers
(`small`), others as a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import merkle
from ..core.merkle import SIZE, Form, Hasher, Leaves, hash_of
from ..core.packs import packed
from ..errors import LazyckptError
from ..io.memory import many_objects
from ..io.storage.access import OneFile
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, Run
from ..jobs.passing import parts_of
from ..jobs.pieces import contents
from ..jobs.places import PIECE
from ..jobs.progress import Bar
from ..lazy import LazyArray, shape_of
from ..namespace import Namespace
from . import small
from .manifest import Digest, StateDigest
from .small import Hashed, Rows

_TASK = 64 << 20  # most bytes of a task, whole runs

Known: TypeAlias = Callable[[LazyArray], Mapping[int, bytes]]


def digest(
    parts: Mapping[str, Namespace[Any]],
    lost: Mapping[str, Mapping[str, str]],
    algorithm: str,
    run: Run,
    progress: bool | None = None,
    known: Known | None = None,
    processes: bool = False,
) -> Digest:
    """Return the digests of all tensors of some states.

    Parameters
    ----------
    parts
        State name -> its tensors.
    lost
        State name -> names whose file is missing, with the reason.
    algorithm, progress
        See `CheckpointView.digest`.
    run
        The engine.
    known
        Returns the hashes of runs of a tensor that are known already, by number. The other runs are read.
    processes
        Whether processes may be started for very many small tensors.
    """
    hash_of(algorithm)  # raises for an unknown one
    with many_objects():
        states = [_State(state, part, lost.get(state, {}), algorithm, known) for state, part in parts.items()]
        with Bar(sum(one.nbytes for one in states), "digest", progress) as bar:
            if processes and algorithm == "sha256":
                for one in states:
                    bar.add(one.hash_many())

            def done(task: Task, results: tuple[int, Sequence[_Result]]) -> None:
                number, found = results
                for result in found:
                    states[number].add(result)
                bar.add(task.nbytes)

            tasks = (task for n, one in enumerate(states) for task in one.tasks(n))
            tensors = [t for one in states for t in one.tensors.values()]
            run(tasks, done, tensors=tensors)
        return Digest(algorithm, {one.name: one.result() for one in states})


class _Read(NamedTuple):
    """The hashes of runs of the tensor in a row; or the error of reading them."""

    row: int
    leaves: Leaves
    error: str | None = None


_Result: TypeAlias = _Read | Hashed


class _State:
    """A state whose digests are computed: a row for each tensor, as columns."""

    def __init__(
        self, name: str, part: Namespace[Any], lost: Mapping[str, str], algorithm: str, known: Known | None
    ) -> None:
        self.name, self.lost, self.algorithm, self.known = name, lost, algorithm, known
        self.errors: dict[int, str] = {}
        self.tensors: dict[int, LazyArray] = {}  # those that are not in columns, by row
        self.aliases: dict[str, str] = {}
        self.left: list[tuple[int, Rows]] = []
        self._open: dict[int, dict[int, bytes]] = {}  # the hashes of runs so far, by row
        self.columns = small.columns_of(part) if known is None else None
        if self.columns is None:
            tensors, self.aliases = part.once()
            self.rows: Mapping[str, int] = {name: n for n, name in enumerate(tensors)}
            self.tensors = dict(enumerate(tensors.values()))
            numbers: dict[Form, int] = {}
            self.marks: Sequence[int] = [numbers.setdefault(_whole(t), len(numbers)) for t in tensors.values()]
            self.kinds = list(numbers)
            self.nbytes = sum(self.kinds[n].nbytes for n in self.marks)
        else:
            self._of_columns(part)
        self.digests = bytearray(SIZE * len(self.rows))

    def _of_columns(self, part: Namespace[Any]) -> None:
        columns = self.columns
        assert columns is not None
        self.rows, self.kinds, self.marks = columns.rows, columns.kinds, columns.marks.tolist()
        sizes = columns.sizes
        self.nbytes = int(sizes.sum())
        few = sizes <= min(small.SMALL, merkle.RUN)
        if not few.all():
            names = list(columns.rows)
            self.tensors = {n: part[names[n]] for n in np.flatnonzero(~few).tolist()}
        order = np.flatnonzero(few)
        self._order = order[np.argsort(columns.offsets[order], kind="stable")]
        heads = [kind.head for kind in columns.kinds]
        self._small = Rows(columns.offsets[self._order], sizes[self._order], columns.marks[self._order], heads)

    def hash_many(self) -> int:
        """Hash the small tensors by processes if there are very many; return their size in bytes, else 0."""
        if self.columns is None:
            return 0
        found = small.by_processes(self.columns.store, self.columns.path, self._small)
        if found is None:
            return 0
        self._put(self._order, found)
        nbytes = int(self._small.sizes.sum())
        self._order, self._small = self._order[:0], self._small.part(0, 0)
        return nbytes

    def _put(self, rows: small.Ints, hashes: bytes) -> None:
        table = np.frombuffer(self.digests, np.uint8).reshape(-1, SIZE)
        table[rows] = np.frombuffer(hashes, np.uint8).reshape(-1, SIZE)

    def tasks(self, number: int) -> Iterator[Task]:
        """Yield the tasks that hash what is not known. ``number`` is the number of this state."""
        if self.columns is not None:
            file = OneFile(self.columns.store, self.columns.path)
            for lo, hi in self._small.cuts():
                part = self._small.part(lo, hi)
                work = partial(_of_state, number, partial(_rows, file, lo, part, self.algorithm))
                nbytes = int(part.sizes.sum())
                yield Task(nbytes, PIECE + OVERHEAD, work)
        for task in self._others():
            yield task._replace(do=partial(_of_state, number, task.do))

    def _others(self) -> Iterator[Task]:
        """Yield the tasks of the tensors that are not in columns."""
        some: list[tuple[int, LazyArray]] = []
        size, kind = 0, None
        for n, t in self.tensors.items():
            known = {} if self.known is None else self.known(t)
            whole = self.kinds[self.marks[n]]
            if known:
                self._add(n, known)
                if n not in self._open:
                    continue
            elif whole.nbytes <= min(small.SMALL, merkle.RUN) and t._selection is None and t.spec.expr is None:
                now = id(t.store), t.spec.dtype
                if some and (now != kind or size >= PIECE):
                    yield self._together(some, size)
                    some, size = [], 0
                some.append((n, t))
                size, kind = size + whole.nbytes, now
                continue
            try:
                yield from _of_large(n, t, whole, known, self.algorithm)
            except (LazyckptError, OSError) as e:
                self.errors[n] = _line(e)
        if some:
            yield self._together(some, size)

    def _together(self, some: Sequence[tuple[int, LazyArray]], size: int) -> Task:
        tensors = [t for _, t in some]
        together = LazyArray(tensors[0].store, packed("", [t.spec for t in tensors]))
        wholes = [(n, self.kinds[self.marks[n]]) for n, _ in some]
        work = partial(_hash_small, together, wholes, self.algorithm, tensors)
        return Task(size, size + PIECE + OVERHEAD, work, together)

    def add(self, result: _Result) -> None:
        """Take the result of a task."""
        if isinstance(result, Hashed):
            count = len(result.hashes) // SIZE
            rows = self._order[result.first : result.first + count]
            self._put(rows, result.hashes)
            self.errors |= {int(self._order[n]): why for n, why in result.errors.items()}
        elif result.error is not None:
            self.errors.setdefault(result.row, result.error)
            self._open.pop(result.row, None)
        else:
            first, hashes, _ = result.leaves
            self._add(result.row, dict(enumerate(hashes, first)))

    def _add(self, row: int, leaves: Mapping[int, bytes]) -> None:
        """Take the hashes of runs of a tensor; if it has all of them, compute its digest."""
        whole = self.kinds[self.marks[row]]
        there = self._open.setdefault(row, {})
        there.update(leaves)
        if len(there) == whole.runs:
            found = whole.digest([there[n] for n in range(whole.runs)], hash_of(self.algorithm))
            self.digests[SIZE * row : SIZE * (row + 1)] = found
            del self._open[row]

    def result(self) -> StateDigest:
        """Return the digests."""
        rows, kinds, marks = self.rows, [(kind.dtype, kind.shape) for kind in self.kinds], self.marks
        digests: bytes | bytearray = self.digests
        if self.aliases or self.lost:
            table = dict(rows) | {name: rows[owner] for name, owner in self.aliases.items()}
            marks = [*marks, *[len(kinds)] * len(self.lost)]
            kinds.append(("", ()))
            for name, why in self.lost.items():
                self.errors[len(digests) // SIZE] = _line(why)
                table[name] = len(digests) // SIZE
                digests = digests + bytes(SIZE)
            rows = table
        return StateDigest(rows, kinds, marks, digests, self.errors, self.aliases)


def _whole(t: LazyArray) -> Form:
    return Form(t.spec.dtype.name, shape_of(t), t.nbytes)


def _of_state(number: int, work: Callable[[], Sequence[_Result]]) -> tuple[int, Sequence[_Result]]:
    return number, work()


def _rows(file: OneFile, first: int, rows: Rows, algorithm: str) -> list[_Result]:
    return [small.hash_rows(file, first, rows, algorithm)]


def _hash_small(
    together: LazyArray, wholes: Sequence[tuple[int, Form]], algorithm: str, tensors: Sequence[LazyArray]
) -> list[_Result]:
    """Hash tensors of one run each."""
    new = hash_of(algorithm)
    found: list[_Result] = []
    memory, at = bytearray(sum(whole.nbytes for _, whole in wholes)), 0
    try:
        for offset, piece in contents(together):
            memory[offset : offset + len(piece)] = piece
    except (LazyckptError, OSError):  # one of them cannot be read
        each = zip(wholes, tensors, strict=True)
        return [result for (n, whole), t in each for result in _hash([t], n, whole, 0, algorithm)]
    data = memoryview(memory)
    heads = {whole: new(whole.head) for whole in {whole for _, whole in wholes}}
    for n, whole in wholes:
        leaf = heads[whole].copy()
        leaf.update(data[at : at + whole.nbytes])
        found.append(_Read(n, Leaves(0, (leaf.digest(),))))
        at += whole.nbytes
    return found


def _of_large(n: int, tensor: LazyArray, whole: Form, known: Mapping[int, bytes], algorithm: str) -> Iterator[Task]:
    """Yield the tasks of a tensor of any size: runs that are not known, as few blocks of the tensor."""
    tensor._check()
    next(tensor.pieces(_TASK), None)  # raises if the tensor is too large to be read
    for lo, hi in _spans(whole, known):
        parts = parts_of(tensor, whole.shape, lo, hi)
        yield Task(hi - lo, PIECE + OVERHEAD, partial(_hash, parts, n, whole, lo, algorithm), parts[0])


def _spans(whole: Form, known: Mapping[int, bytes]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each task: unknown runs that follow one another."""
    run, most = merkle.RUN, max(1, _TASK // merkle.RUN)
    n = 0
    while n < whole.runs:
        if n in known:
            n += 1
            continue
        end = n + 1
        while end < whole.runs and end not in known and end - n < most:
            end += 1
        yield n * run, min(end * run, whole.nbytes)
        n = end


def _hash(parts: Iterable[LazyArray], n: int, whole: Form, at: int, algorithm: str) -> list[_Result]:
    """Hash the runs of parts of a tensor that follow one another, from byte ``at`` on."""
    hasher = Hasher(whole, at, hash_of(algorithm))
    try:
        for part in parts:
            for _, piece in contents(part):
                hasher.update(piece)
    except (LazyckptError, OSError) as e:
        return [_Read(n, Leaves(0, ()), _line(e))]
    return [_Read(n, hasher.leaves())]


def _line(error: object) -> str:
    return " ".join(str(error).split())
