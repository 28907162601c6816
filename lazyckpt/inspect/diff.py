"""Compare two checkpoints tensor by tensor, in runs of elements, so that neither side is ever in memory as a whole.

Tensors of the same dtype are compared bit by bit (-0.0 is not 0.0, and a NaN equals only a NaN of the same bits),
others by exact value (2**53 + 1 as int64 is not 2.0**53, although float64 rounds it to that).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, overload

from ..core.dtypes import FROM_NAME, bits_of, dtype_of
from ..errors import DataError, LazyckptError, and_more, printable
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, runner
from ..jobs.progress import Bar
from ..lazy import LazyArray, named
from .closeness import Sums, closeness, sums_of, sums_of_equal, together
from .manifest import StateDigest, TensorDigest
from .packs import Pack, Packs

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

Status: TypeAlias = Literal["equal", "values", "dtype", "shape", "only in a", "only in b", "unreadable"]
_Pair: TypeAlias = tuple[str, LazyArray | None, LazyArray | None]
_PIECE = 1 << 18  # elements compared at a time, so that intermediate results stay in a processor's cache
_RUN = 4 << 20  # elements of a task
_LINES = 20  # rows that a diff shows as text


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of one tensor.

    Attributes
    ----------
    name
        The tensor's name.
    status
        "equal"; "values": elements differ; "dtype": dtypes differ (``count`` says whether values do); "shape": shapes
        differ; "only in a" and "only in b": the other checkpoint lacks the tensor; "unreadable": see ``error``.
    a, b
        Dtype and shape as text, "bf16[4096, 64]"; None if the checkpoint lacks the tensor.
    count
        The number of elements that differ; None if elements were not compared (packed bits are not numbers).
    max_abs
        The largest absolute difference of finite elements; None if there is none.
    at
        The first index that differs, in C order.
    error
        Why the tensor cannot be read.
    state
        The state, if several were compared.
    by_digest
        Whether the digests of manifests were compared, and not the elements.
    relative
        The norm of the difference divided by the norm of ``a``; None if ``a`` is 0 or elements were not compared.
        NaN, infinities and what stands at their places in the other tensor are left out of this and of the following.
    cosine
        The cosine of the angle between the two tensors as vectors; None if one is 0 or elements were not compared.
    norm_a, norm_b
        The norms of the tensors (roots of the sums of squares); None if they are equal, or were not compared.
    """

    name: str
    status: Status
    a: str | None
    b: str | None
    count: int | None = None
    max_abs: float | None = None
    at: tuple[int, ...] | None = None
    error: str | None = None
    state: str | None = None
    by_digest: bool = False
    relative: float | None = None
    cosine: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None

    def __str__(self) -> str:
        return printable(f"{self.label}: {verdict(self)}")

    @property
    def label(self) -> str:
        """The name, after the state if several states were compared."""
        return self.name if self.state is None else f"{self.state}: {self.name}"


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """The comparison of two checkpoints: a sequence of `Difference`s, in the order of the first checkpoint.

    ``pandas.DataFrame(diff)`` is a table of the rows. A diff is true if anything differs.

    Attributes
    ----------
    rows
        A row for each tensor.
    """

    rows: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether both checkpoints have the same tensors, with the same dtypes, shapes and elements."""
        return all(row.status == "equal" for row in self.rows)

    @property
    def digests(self) -> int:
        """The number of tensors whose elements were not read, because manifests have their digests."""
        return sum(row.by_digest for row in self.rows)

    @property
    def differing(self) -> Self:
        """The rows that are not equal."""
        return type(self)(tuple(row for row in self.rows if row.status != "equal"))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain objects."""
        return [asdict(row) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.rows)

    @overload
    def __getitem__(self, key: int) -> Difference: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Difference, ...]: ...
    def __getitem__(self, key: int | slice) -> Difference | tuple[Difference, ...]:
        return self.rows[key]

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return not self.equal

    def __repr__(self) -> str:
        found = self.differing.rows
        lines = [f"{len(self.rows) - len(found):,} of {len(self.rows):,} tensors are equal"]
        if self.digests:
            lines[0] += f" ({self.digests:,} compared by the digests of manifests)"
        lines += map(str, found[:_LINES])
        if len(found) > _LINES:
            lines.append(and_more(len(found) - _LINES))
        return "\n".join(lines)


def verdict(row: Difference) -> str:
    """Return the differences of a row as text, without the name."""
    if row.status == "equal":
        return "equal"
    if row.status in ("only in a", "only in b"):
        return f"{row.status} ({row.a or row.b})"
    if row.status == "unreadable":
        return f"cannot be read: {row.error}"
    pieces = [] if row.a == row.b else [f"{row.a} and {row.b}"]
    if row.by_digest:
        pieces += ["the digests differ"] if row.status == "values" else []
    elif row.count:
        differ = f"{row.count:,} elements differ, the first" if row.count > 1 else "1 element differs,"
        pieces.append(f"{differ} at {list(row.at or ())}")
        if row.max_abs is not None:
            pieces.append(f"by {row.max_abs:.3g} at most")
    elif row.count == 0:
        pieces.append("the same numbers")
    elif row.status == "dtype":
        pieces.append("not compared, as packed bits are no numbers")
    return ", ".join(pieces)


def diff(
    a: Mapping[str, LazyArray],
    b: Mapping[str, LazyArray],
    *,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
    same: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Diff:
    """Compare the tensors of the same names. A tensor that cannot be read gets a row that says so. Those of the names
    ``same`` are known to be equal, by their digests, and not read.

    ``executor``, ``memory``, ``progress``: see `WriteOptions`. ``check`` is called between runs of elements; what it
    raises ends the work. Raises DataError if ``memory`` is not a size, and WorkerError if workers died.
    """
    pairs: list[_Pair] = [(name, t, named(b, name)) for name, t in a.items()]
    listed = set(a)  # a tied name of one checkpoint may be a tensor of its own in the other
    pairs += [(name, named(a, name), t) for name, t in b.items() if name not in listed]
    there = [n for n, (_, x, y) in enumerate(pairs) if x is not None and y is not None and x.shape == y.shape]
    compared = [n for n in there if pairs[n][0] not in same]
    found: dict[int, list[_Run]] = {n: [] for n in compared}

    packs = Packs()

    def packed(a: Pack, b: Pack) -> Task:
        held = _PIECE * (2 * 2 * a.dtype.itemsize + 64) + 2 * OVERHEAD
        return Task(a.nbytes + b.nbytes, held, partial(_compared_packs, a, b), a.tensors[0])

    def tasks() -> Iterator[Task]:
        for n in compared:
            x, y = pairs[n][1:]
            assert x is not None and y is not None  # `compared` are those
            full = packs.add(n, x, y) if x.spec.dtype is y.spec.dtype else None
            if full is not None:
                check()
                if full:
                    yield packed(*full)
                continue
            size = x.itemsize + y.itemsize
            try:
                for (ahead, p), (_, q) in zip(x.pieces(_RUN * x.itemsize), y.pieces(_RUN * y.itemsize), strict=True):
                    check()
                    held = _PIECE * (2 * size + 64) + 2 * OVERHEAD  # both sides, as wider numbers, and masks
                    yield Task(p.nbytes + q.nbytes, held, partial(_compared, n, ahead, p, q), p)
            except DataError as e:
                found[n].append(_Run(None, error=str(e)))
        for full in packs.rest():
            yield packed(*full)

    def done(task: Task, result: list[tuple[int, _Run]]) -> None:
        for n, of_run in result:
            found[n].append(of_run)
        bar.add(task.nbytes)

    def rest() -> Iterator[Task]:
        """Yield the tasks that read the equal pieces of tensors that differ elsewhere: their norms need them."""
        for n in compared:
            x = pairs[n][1]
            assert x is not None
            if not any(r.sums for r in found[n]) or any(r.error for r in found[n]):
                continue
            equal = {at for r in found[n] for at in r.equal}
            for ahead, p in x.pieces(_RUN * x.itemsize) if equal else ():
                wanted = frozenset(at for at in equal if ahead <= at < ahead + p.numel())
                if wanted:
                    check()
                    held = _PIECE * (x.itemsize + 16) + OVERHEAD
                    yield Task(p.nbytes, held, partial(_norms, n, ahead, p, wanted), p)

    def added(task: Task, result: tuple[int, _Run]) -> None:
        found[result[0]].append(result[1])

    total = sum(t.nbytes for n in compared for t in pairs[n][1:] if t is not None)
    run = runner(executor, memory)
    with Bar(total, "diff", progress) as bar:
        run(tasks(), done, tensors=(t for n in compared for t in pairs[n][1:] if t is not None))
        run(rest(), added, tensors=(t for n in compared if (t := pairs[n][1]) is not None))
    return Diff(
        tuple(
            replace(_row(*pair, [_Run()]), by_digest=True) if pair[0] in same else _row(*pair, found.get(n))
            for n, pair in enumerate(pairs)
        )
    )


def equal_names(
    a: Mapping[str, LazyArray], b: Mapping[str, LazyArray], of_a: StateDigest, of_b: StateDigest
) -> set[str]:
    """Return the names whose digests say that the tensors are equal."""
    names = {name for name, one in of_a.items() if one.digest is not None and of_b.get(name) == one}
    for name in list(names):
        x, y, one = named(a, name), named(b, name), of_a[name]
        if any(t is None or (t.spec.dtype.name, tuple(t.shape)) != (one.dtype, one.shape) for t in (x, y)):
            names.discard(name)
    return names


def diff_digests(
    a: Mapping[str, TensorDigest], b: Mapping[str, TensorDigest], state: str | None = None
) -> tuple[Difference, ...]:
    """Compare the digests of the tensors of the same names."""
    rows = []
    for name in (*a, *(name for name in b if name not in a)):
        x, y = a.get(name), b.get(name)
        texts = _described(x), _described(y)
        status: Status
        error = None
        if x is None or y is None:
            status = "only in a" if y is None else "only in b"
        elif x.digest is None or y.digest is None:
            status, error = "unreadable", x.error or y.error
        elif x.shape != y.shape:
            status = "shape"
        else:
            status = "dtype" if x.dtype != y.dtype else "equal" if x.digest == y.digest else "values"
        rows.append(Difference(name, status, *texts, error=error, state=state, by_digest=True))
    return tuple(rows)


def _described(one: TensorDigest | None) -> str | None:
    if one is None or not one.dtype:
        return None
    known = FROM_NAME.get(one.dtype)
    return f"{one.dtype if known is None else known.short}{list(one.shape)}"


class _Run(NamedTuple):
    """The comparison of a run of elements. ``differing``: the number of elements that differ, None if they cannot be
    compared. ``first``: the flat index of the first of them in the whole tensor. ``sums``: of the pieces that differ.
    ``equal``: the flat indices at which the equal pieces begin."""

    differing: int | None = 0
    max_abs: float | None = None
    first: int | None = None
    error: str | None = None
    sums: Sums | None = None
    equal: tuple[int, ...] = ()


def _row(name: str, a: LazyArray | None, b: LazyArray | None, runs: list[_Run] | None) -> Difference:
    texts = _text(a), _text(b)
    if a is None or b is None:
        return Difference(name, "only in a" if b is None else "only in b", *texts)
    if runs is None:
        return Difference(name, "shape", *texts)
    whole = _together(runs)
    if whole.error is not None:
        return Difference(name, "unreadable", *texts, error=whole.error)
    count, first = whole.differing, whole.first
    status: Status = "dtype" if a.dtype != b.dtype else "values" if count else "equal"
    row = Difference(name, status, *texts, count, whole.max_abs, None if first is None else _index(first, a.shape))
    if count == 0:
        return replace(row, relative=0.0, cosine=1.0)
    return row if whole.sums is None else replace(row, **closeness(whole.sums)._asdict())


def _together(runs: list[_Run]) -> _Run:
    counts = [r.differing for r in runs if r.differing is not None]
    return _Run(
        sum(counts) if len(counts) == len(runs) else None,
        max((r.max_abs for r in runs if r.max_abs is not None), default=None),
        min((r.first for r in runs if r.first is not None), default=None),
        next((r.error for r in runs if r.error is not None), None),
        together(sums) if (sums := [r.sums for r in runs if r.sums is not None]) else None,
        tuple(at for r in runs for at in r.equal),
    )


def _text(t: LazyArray | None) -> str | None:
    return None if t is None else f"{t.spec.dtype.short}{list(t.shape)}"


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    where = []
    for n in reversed(shape):
        flat, at = divmod(flat, n)
        where.append(at)
    return tuple(reversed(where))


def _compared(n: int, ahead: int, a: LazyArray, b: LazyArray) -> list[tuple[int, _Run]]:
    """Compare a run of both tensors that starts at the flat index ``ahead``."""
    if a.dtype != b.dtype and not (_numbers(a.dtype) and _numbers(b.dtype)):
        return [(n, _Run(None))]
    try:
        pieces = zip(a.pieces(_PIECE * a.itemsize), b.pieces(_PIECE * b.itemsize), strict=True)
        found = [_of_piece(ahead + at, p[...].reshape(-1), q[...].reshape(-1)) for (at, p), (_, q) in pieces]
    except (LazyckptError, OSError) as e:
        return [(n, _Run(error=" ".join(str(e).split())))]
    return [(n, _together(found))]


def _compared_packs(a: Pack, b: Pack) -> list[tuple[int, _Run]]:
    """Compare the tensors of two packs of the same dtype, each with the one in its place."""
    try:
        p, q = a.read(), b.read()
    except (LazyckptError, OSError):  # perhaps only one of them cannot be read
        apart = zip(a.numbers, a.tensors, b.tensors, strict=True)
        return [one for n, x, y in apart for one in _compared(n, 0, x, y)]
    bits = bits_of(min(8, a.dtype.itemsize))  # of complex128 the halves
    differ = (p.view(bits) != q.view(bits)).any(1).tolist()
    return [(number, _of_piece(0, p[n], q[n]) if differ[n] else _Run(equal=(0,))) for n, number in enumerate(a.numbers)]


def _norms(n: int, ahead: int, a: LazyArray, wanted: frozenset[int]) -> tuple[int, _Run]:
    """Return the sums of the equal pieces of a run that begin at the flat indices ``wanted``."""
    try:
        pieces = a.pieces(_PIECE * a.itemsize)
        sums = [sums_of_equal(p[...]) for at, p in pieces if ahead + at in wanted]
    except (LazyckptError, OSError) as e:
        return n, _Run(error=" ".join(str(e).split()))
    return n, _Run(sums=together(sums))


def _of_piece(ahead: int, x: torch.Tensor, y: torch.Tensor) -> _Run:
    differ = _differing(x, y)
    count = 0 if differ is None else int(differ.count_nonzero())
    if differ is None or not count:
        return _Run(equal=(ahead,))
    first = ahead + int(differ.view(torch.uint8).argmax())  # argmax finds the first 1
    if not _numbers(x.dtype):
        return _Run(count, None, first)
    apart = _apart(x, y).nan_to_num_(nan=-1, posinf=-1).masked_fill_(~differ, -1)
    largest = min(2 * float(apart.max()), sys.float_info.max)  # JSON has no infinity
    return _Run(count, largest if largest >= 0 else None, first, sums=sums_of(x, y))


def _numbers(dtype: torch.dtype) -> bool:
    """Return whether elements are numbers to torch, which packed bits are not."""
    return dtype_of(dtype).is_number


def _differing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of the elements that differ, in bits or, for two dtypes, in value; None if none differs."""
    if x.dtype != y.dtype:
        return _unequal(x, y)
    if x.dtype == torch.complex128:  # no integer is as wide
        x, y = (t.view(torch.int64).view(-1, 2) for t in (x, y))
        return None if torch.equal(x, y) else (x != y).any(1)
    bits = bits_of(x.dtype.itemsize)
    x, y = x.view(bits), y.view(bits)
    return None if torch.equal(x, y) else x != y


def _unequal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are different numbers, for any dtypes. All NaNs are equal."""
    if x.is_complex() or y.is_complex():
        (a, b), (c, d) = _plane(x), _plane(y)
        return _unequal(a, c) | _unequal(b, d)
    if _long(x) or _long(y):  # at least one side has integers, so NaN differs from all of them
        (a, b), (c, d) = _halves(x), _halves(y)
        return (a != c) | (b != d)
    x, y = x.to(torch.float64), y.to(torch.float64)
    return (x != y) & ~((x != x) & (y != y))


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return half of the absolute differences, which does not overflow; inf or NaN for elements that are not finite."""
    if x.is_complex() or y.is_complex():
        return x.to(torch.complex128).mul(0.5).sub_(y.to(torch.complex128), alpha=0.5).abs()
    if _long(x) or _long(y):
        (a, b), (c, d) = _halves(x), _halves(y)
        return a.sub_(c).mul_(2.0**32).add_(b.sub_(d)).mul_(0.5).abs_()
    return x.to(torch.float64).mul(0.5).sub_(y.to(torch.float64), alpha=0.5).abs_()


def _long(x: torch.Tensor) -> bool:
    """Return whether float64 cannot hold all numbers of the dtype."""
    return x.dtype in (torch.int64, torch.uint64)


def _plane(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the real and the imaginary parts."""
    if not x.is_complex():
        return x, torch.zeros(x.shape, dtype=torch.float32, device="cpu")
    if x.dtype == torch.complex32:
        x = x.to(torch.complex64)
    return x.real, x.imag


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers as high * 2**32 + low, both float64, because one float64 would round 64-bit integers."""
    if x.is_floating_point():
        x = x.to(torch.float64)
        high = (x * 2.0**-32).floor()
        return high, x - high * 2.0**32
    bits = x.view(torch.int64) if _long(x) else x.to(torch.int64)
    high = bits >> 32
    return (high & 0xFFFFFFFF if x.dtype == torch.uint64 else high).to(torch.float64), (bits & 0xFFFFFFFF).to(
        torch.float64
    )
