"""What differs between two checkpoints, tensor by tensor, run by run: neither side is ever held as a whole.

Equal means: bit by bit, where both have the same dtype (-0.0 is not 0.0, and each NaN only itself); where they have
not, the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch

from ..core.dtypes import BITS, converts, short_name
from ..errors import LazyckptError
from ..export.job import OVERHEAD, Task, runner
from ..io.progress import Bar
from ..tensor import LazyTensor

Status: TypeAlias = Literal["equal", "values", "dtype", "shape", "only in a", "only in b", "unreadable"]
_Pair: TypeAlias = tuple[str, LazyTensor | None, LazyTensor | None]
_PIECE = 1 << 20  # elements compared at a time
_RUN = 4 << 20  # elements of a task
_LINES = 20  # rows that a diff shows as text


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of two checkpoints.

    ``status``: "equal"; "values": some elements differ; "dtype": the dtypes do (``count`` then tells whether the
    numbers do); "shape"; "only in a", "only in b"; "unreadable": ``error`` says why. ``a``, ``b``: dtype and shape as
    text, "bf16[4096, 64]". Where elements were compared: ``count`` of those that differ, ``max_abs`` the largest
    difference of two that are finite (None if there is none), ``at`` the first index that differs, in C order.
    ``state``: of the checkpoint, where several were compared.
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

    def __str__(self) -> str:
        return f"{self.label}: {_told(self)}"

    @property
    def label(self) -> str:
        """The name, behind the state where several were compared."""
        return self.name if self.state is None else f"{self.state}: {self.name}"


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """All tensors of two checkpoints, in the order of the first. A sequence of `Difference`s; `pandas.DataFrame(diff)`
    is a table of it."""

    rows: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors, with the same dtypes, shapes and elements."""
        return all(row.status == "equal" for row in self.rows)

    @property
    def differing(self) -> Diff:
        """The rows that are not equal."""
        return Diff(tuple(row for row in self.rows if row.status != "equal"))

    def as_dicts(self) -> list[dict[str, Any]]:
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
        """Whether anything differs."""
        return not self.equal

    def __repr__(self) -> str:
        found = self.differing.rows
        lines = [f"{len(self.rows) - len(found):,} of {len(self.rows):,} tensors are equal"]
        lines += map(str, found[:_LINES])
        if len(found) > _LINES:
            lines.append(f"... and {len(found) - _LINES:,} more")
        return "\n".join(lines)


def _told(row: Difference) -> str:
    if row.status == "equal":
        return "equal"
    if row.status in ("only in a", "only in b"):
        return f"{row.status} ({row.a or row.b})"
    if row.status == "unreadable":
        return f"cannot be read: {row.error}"
    pieces = [] if row.a == row.b else [f"{row.a} and {row.b}"]
    if row.count:
        differ = f"{row.count:,} elements differ, the first" if row.count > 1 else "1 element differs,"
        pieces.append(f"{differ} at {list(row.at or ())}")
        if row.max_abs is not None:
            pieces.append(f"by {row.max_abs:.3g} at most")
    elif row.count == 0:
        pieces.append("the same numbers")
    return ", ".join(pieces)


def diff(
    a: Mapping[str, LazyTensor],
    b: Mapping[str, LazyTensor],
    *,
    executor: Executor | None = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Diff:
    """Compare the tensors of the same names. What cannot be read is a row of its own, the others are compared.

    ``executor``, ``memory``, ``progress``: as of `to_safetensors`. Raises DataError (a size that is not understood),
    WorkerError (workers died).
    """
    pairs: list[_Pair] = [(name, t, _named(b, name)) for name, t in a.items()]
    listed = set(a)  # a tied name of one may be a tensor of its own in the other
    pairs += [(name, _named(a, name), t) for name, t in b.items() if name not in listed]
    compared = [n for n, (_, x, y) in enumerate(pairs) if x is not None and y is not None and x.shape == y.shape]
    found: dict[int, list[_Run]] = {n: [] for n in compared}

    def tasks() -> Iterator[Task]:
        for n in compared:
            x, y = pairs[n][1:]
            assert x is not None and y is not None  # `compared` are those
            size = x.itemsize + y.itemsize
            for (ahead, p), (_, q) in zip(x.pieces(_RUN * x.itemsize), y.pieces(_RUN * y.itemsize), strict=True):
                # both sides, their bits apart or as the wider of two dtypes, and the mask
                held = _PIECE * (2 * size + 24) + 2 * OVERHEAD
                yield Task(p.nbytes + q.nbytes, held, partial(_compared, n, ahead, p, q))

    def done(task: Task, result: tuple[int, _Run]) -> None:
        n, of_run = result
        found[n].append(of_run)
        bar.add(task.nbytes)

    total = sum(t.nbytes for n in compared for t in pairs[n][1:] if t is not None)
    with Bar(total, "diff", progress) as bar:
        runner(executor, memory)(tasks(), done)
    return Diff(tuple(_row(*pair, found.get(n)) for n, pair in enumerate(pairs)))


def _named(tensors: Mapping[str, LazyTensor], name: str) -> LazyTensor | None:
    """Views take inner paths for names, too; those are not asked for here."""
    return tensors[name] if name in tensors else None  # noqa: SIM401


class _Run(NamedTuple):
    """What a run of two tensors has shown. ``first``: the first element that differs, counted from the tensor's."""

    differing: int = 0
    max_abs: float | None = None
    first: int | None = None
    error: str | None = None


def _row(name: str, a: LazyTensor | None, b: LazyTensor | None, runs: list[_Run] | None) -> Difference:
    texts = _text(a), _text(b)
    if a is None or b is None:
        return Difference(name, "only in a" if b is None else "only in b", *texts)
    if runs is None:
        return Difference(name, "shape", *texts)
    errors = [r.error for r in runs if r.error is not None]
    if errors:
        return Difference(name, "unreadable", *texts, error=errors[0])
    count = sum(r.differing for r in runs)
    status: Status = "dtype" if a.dtype != b.dtype else "values" if count else "equal"
    largest = max((r.max_abs for r in runs if r.max_abs is not None), default=None)
    first = min((r.first for r in runs if r.first is not None), default=None)
    return Difference(name, status, *texts, count, largest, None if first is None else _index(first, a.shape))


def _text(t: LazyTensor | None) -> str | None:
    return None if t is None else f"{short_name(t.dtype)}{list(t.shape)}"


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    where = []
    for n in reversed(shape):
        flat, at = divmod(flat, n)
        where.append(at)
    return tuple(reversed(where))


def _compared(n: int, ahead: int, a: LazyTensor, b: LazyTensor) -> tuple[int, _Run]:
    """Compare a run of both tensors, whose first element is the tensors' element ``ahead``."""
    count, largest, first = 0, None, None
    try:
        pieces = zip(a.pieces(_PIECE * a.itemsize), b.pieces(_PIECE * b.itemsize), strict=True)
        for (at, p), (_, q) in pieces:
            x, y = p[...].reshape(-1), q[...].reshape(-1)
            differ = _differing(x, y)
            if differ is None:
                continue
            where = differ.nonzero().reshape(-1)
            if not len(where):
                continue
            count += len(where)
            if first is None:
                first = ahead + at + int(where[0])
            apart = _apart(x[where], y[where])
            if apart is not None:
                largest = apart if largest is None else max(largest, apart)
    except LazyckptError as e:
        return n, _Run(error=" ".join(str(e).split()))
    return n, _Run(count, largest, first)


def _differing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """A mask of the elements that differ; None if none does, or torch cannot tell (bits against numbers)."""
    if x.dtype == y.dtype:
        bits = BITS[x.dtype.itemsize]
        x, y = x.view(bits), y.view(bits)
        if x.dtype == torch.complex128:  # 16 bytes: no integer is as wide, and NaNs are to equal themselves
            x, y = (t.view(torch.int64).view(-1, 2) for t in (x, y))
            return None if torch.equal(x, y) else (x != y).any(1)
        return None if torch.equal(x, y) else x != y
    if not all(converts(t.dtype, _wide(t)) for t in (x, y)):
        return None
    x, y = _same_numbers(x, y)
    return (x != y) & ~((x != x) & (y != y))  # a NaN of another dtype has other bits


def _same_numbers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in a dtype that holds the numbers of both, as far as there is one."""
    complex_ = x.is_complex() or y.is_complex()
    if x.is_floating_point() or y.is_floating_point() or complex_:
        wide = torch.complex128 if complex_ else torch.float64
    else:
        wide = torch.int64  # of unsigned ones of 64 bits: their bits
    return x.to(wide), y.to(wide)


def _apart(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """The largest absolute difference of elements that are finite; None also where torch cannot tell (bits)."""
    if not all(converts(t.dtype, _wide(t)) for t in (x, y)):
        return None
    x, y = x.to(_wide(x)), y.to(_wide(y))
    apart = (x - y).abs()
    apart = apart[apart.isfinite()]
    return float(apart.max()) if len(apart) else None


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.complex128 if t.is_complex() else torch.float64
