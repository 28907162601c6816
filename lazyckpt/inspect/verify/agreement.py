"""Checks that read several places of the same values: steps, replicas, fp32 weights beside those of 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.fragments import fragments_of
from ...core.plan import UncoveredError, overlaps
from ...core.units import plural
from ...errors import LazyckptError, some
from ...io.reading.gather import alone
from ...io.reading.packed import locate
from ...io.storage.joined import stores_of
from ...jobs.batching import Task
from ...jobs.executor import OVERHEAD, Run
from ...jobs.progress import Bar
from ...jobs.together import read_together
from ...lazy import LazyArray, shape_of
from ..codes import Severity
from ..report import Finding
from .sweep import Target

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_PIECE = 4 << 20  # bytes
_STEPS = 100_000  # scalars that are read


def steps(states: Mapping[str, Mapping[str, LazyArray]], meta: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> number of steps of each parameter, and "" -> that of the checkpoint, as far as it is recorded."""
    found: dict[str, float] = {}
    for name in ("iteration", "global_steps", "global_step", "step"):
        value = meta.get(name)
        if type(value) is int and value >= 0:
            found[""] = float(value)
            break
    scalars = {name: t for name, t in islice(states.get("step", {}).items(), _STEPS) if t.numel() == 1}
    return found | _read(scalars)


def _read(scalars: Mapping[str, LazyArray], check: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return the values of tensors of one element, without those that cannot be read: `sweep` reports them. ``check``
    is called before each read; what it raises ends the work."""
    found = {}
    with read_together(scalars.values()):
        for name, tensor in scalars.items():
            check()
            with suppress(LazyckptError, OSError):
                found[name] = float(tensor[...].reshape(()))
    return found


def differing_steps(found: Mapping[str, float]) -> Iterator[Finding]:
    """Yield a finding if parameters have made different numbers of steps; a note if the others have made none."""
    own = {name: step for name, step in found.items() if name}
    counted = Counter(own.values())
    if len(counted) > 1:
        usual, times = counted.most_common(1)[0]
        odd = [name for name, step in own.items() if step != usual]
        text = f"{times:,} parameters have made {usual:,.0f} steps, {len(odd):,} another number: " + some(
            f"{name} {own[name]:,.0f}" for name in odd
        )
        unused = all(own[name] == 0 for name in odd)  # no gradient has reached them
        yield Finding(
            "differing-steps", text, None, odd[0] if len(odd) == 1 else None, "note" if unused else None,
            details={"tensors": odd[:1000]},
        )  # fmt: skip


def differing_ranks(
    view_format: str, stored: Callable[[], Mapping[str, LazyArray]], check: Callable[[], None] = lambda: None
) -> Iterator[Finding]:
    """Yield a finding if ranks of DeepSpeed have made different numbers of steps: the view has that of the first rank.

    ``stored`` returns the tensors of all files under their raw names; ``check`` is called before each read.
    """
    if not view_format.startswith("deepspeed"):
        return
    made: dict[float, dict[str, None]] = {}
    tensors = stored()
    named = ((name, tensors[name]) for name in islice((name for name in tensors if name.endswith(".step")), _STEPS))
    scalars = {name: tensor for name, tensor in named if tensor.numel() == 1}
    for name, step in _read(scalars, check).items():
        made.setdefault(step, {})[scalars[name].fragments[0].extent.path] = None
    if len(made) > 1:
        usual = max(made, key=lambda step: len(made[step]))
        odd = [(path, step) for step, paths in made.items() if step != usual for path in paths]
        text = f"{plural(len(made[usual]), 'file')} of ranks record step {usual:,.0f}, {len(odd):,} another: " + some(
            f"{path} {step:,.0f}" for path, step in odd
        )
        severity: Severity = "note" if all(step == 0 for _, step in odd) else "error"
        file = odd[0][0] if len({path for path, _ in odd}) == 1 else None
        details = {"files": [path for path, _ in odd][:1000]}
        yield Finding("differing-steps", text, file, severity=severity, details=details)


class _Pair(NamedTuple):
    """What comparing some elements found."""

    number: int
    differ: int
    largest: float
    where: tuple[tuple[str, str], ...]
    why: str | None = None


def compared(
    targets: Sequence[Target],
    states: Mapping[str, Mapping[str, LazyArray]],
    ties: Sequence[tuple[str, str]],
    known: Container[int],
    run: Run,
    progress: bool | None,
) -> list[Finding]:
    """Compare all replicas of the same elements, tied weights, and the fp32 weights with those of 16 bits.

    Reads the replicas; and both kinds of weights, once more.

    Parameters
    ----------
    targets, states
        The tensors, as a list and by state.
    ties
        Pairs of names of the first state whose tensors should be equal.
    known
        The numbers of the targets that cannot be read, which was reported.
    run, progress
        See `sweep`.
    """
    jobs: list[tuple[str, Target]] = []
    totals: dict[int, _Pair] = {}
    findings: list[Finding] = []

    def tasks() -> Iterator[Task]:
        for n, target in enumerate(targets):
            if n not in known and len(target.tensor.fragments) > 1:
                jobs.append(("replicas", target))
                work = partial(_replicas, target.tensor, len(jobs) - 1)
                yield Task(target.tensor.nbytes, 2 * _PIECE + OVERHEAD, work, target.tensor)
        names = list(states)
        narrow = states[names[0]] if names else {}
        for name, other in ties:
            a, b = narrow[name], narrow[other]
            if a.dtype == b.dtype and shape_of(a) == shape_of(b):
                jobs.append((name, Target(names[0], other, b)))
                yield Task(b.nbytes, 3 * _PIECE + OVERHEAD, partial(_tied, a, b, len(jobs) - 1), b)
        for name, wide in states.get("fp32", {}).items() if names and names[0] != "fp32" else ():
            own = narrow.get(name) if name in narrow else None
            if own is None or own.dtype == wide.dtype or shape_of(own) != shape_of(wide):
                continue
            if not own.dtype.is_floating_point or own.dtype.itemsize > 2:
                continue
            jobs.append(("rounding", Target("fp32", name, wide)))
            yield Task(wide.nbytes, 3 * _PIECE + OVERHEAD, partial(_rounded, own, wide, len(jobs) - 1), wide)

    with Bar(sum(t.tensor.nbytes for t in targets), "compare", progress) as bar:

        def done(task: Task, result: _Pair) -> None:
            totals[result.number] = result
            bar.add(task.nbytes)

        run(tasks(), done)
    for number, (kind, target) in enumerate(jobs):
        pair = totals.get(number)
        if pair is None or not (pair.differ or pair.why):
            continue
        shown = target.name if kind == "rounding" else f"{target.state}: {target.name}"
        if pair.why:
            findings.append(Finding("unreadable-file", f"{shown} cannot be compared: {pair.why}", tensor=target.name))
        elif kind not in ("replicas", "rounding"):
            text = (
                f"{target.name}: {pair.differ:,} elements differ from {kind}, which config.json ties it to, by up to "
                f"{pair.largest:.3g}"
            )
            details = {"other": kind, "elements": pair.differ, "largest": pair.largest}
            findings.append(Finding("differing-replicas", text, tensor=target.name, details=details))
        elif kind == "replicas":
            files = sorted({path for both in pair.where for path in both})
            text = (
                f"{shown}: {pair.differ:,} elements differ between its copies in {some(files)}, by up to "
                f"{pair.largest:.3g}"
            )
            details = {"files": files, "elements": pair.differ, "largest": pair.largest}
            findings.append(Finding("differing-replicas", text, None, target.name, "error", details=details))
        else:
            text = (
                f"{shown}: {pair.differ:,} elements are not the fp32 weights, rounded; they differ by up to "
                f"{pair.largest:.3g}"
            )
            details = {"elements": pair.differ, "largest": pair.largest}
            findings.append(Finding("rounding-mismatch", text, tensor=target.name, details=details))
    return findings


def _replicas(tensor: LazyArray, number: int) -> _Pair:
    """Compare the copies of the same elements, a piece at a time."""
    store, spec = stores_of(tensor.store)[0], replace(tensor.spec, fragments=tensor.fragments, expr=None)
    find = partial(locate, store, name=tensor.name)
    differ, largest, where = 0, 0.0, dict[tuple[str, str], None]()
    try:
        if not fragments_of(spec.fragments):
            return _Pair(number, 0, 0.0, ())
        for _, piece in tensor.pieces(_PIECE):
            want = piece._sel.reads().want
            for first, second in overlaps(spec, want, find):
                a, b = alone(store, first), alone(store, second)
                if torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
                    continue
                count, gap = _gap(a, b)
                differ, largest = differ + count, max(largest, gap)
                where[first.extent.path, second.extent.path] = None
    except (LazyckptError, OSError) as e:
        return _Pair(number, differ, largest, tuple(where), _why(e))
    return _Pair(number, differ, largest, tuple(where))


def _tied(first: LazyArray, second: LazyArray, number: int) -> _Pair:
    """Compare two tensors that should be equal."""
    differ, largest = 0, 0.0
    try:
        for (_, a), (_, b) in zip(first.pieces(_PIECE), second.pieces(_PIECE), strict=True):
            x, y = a[...], b[...]
            if not torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)):
                count, gap = _gap(x, y)
                differ, largest = differ + count, max(largest, gap)
    except (LazyckptError, OSError) as e:
        return _Pair(number, differ, largest, (), _why(e))
    return _Pair(number, differ, largest, ())


def _why(error: Exception) -> str | None:
    """Return why something cannot be compared; None if it is lost, which the view or `sweep` reports."""
    return None if isinstance(error, FileNotFoundError | UncoveredError) else " ".join(str(error).split())


def _gap(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return how many elements differ in their bits, and the largest difference of their values."""
    size = a.itemsize
    bits = torch.stack([x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]).view(2, -1, size)
    odd = (bits[0] != bits[1]).any(1)
    if not (a.dtype.is_floating_point or a.dtype.is_complex) or a.element_size() < 1:
        return int(odd.sum()), 0.0
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    gaps = (a.reshape(-1)[odd].to(wide) - b.reshape(-1)[odd].to(wide)).abs()
    gaps = gaps[torch.isfinite(gaps)]
    return int(odd.sum()), float(gaps.max()) if len(gaps) else 0.0


def _rounded(own: LazyArray, wide: LazyArray, number: int) -> _Pair:
    """Compare 16-bit weights with the fp32 weights, rounded to the nearest."""
    differ, largest = 0, 0.0
    try:
        for (_, a), (_, b) in zip(
            own.pieces(_PIECE // 2), wide.pieces(_PIECE // 2 * wide.itemsize // own.itemsize), strict=True
        ):
            have, exact = a[...], b[...]
            want = exact.to(have.dtype)
            odd = (have != want) & ~(have.isnan() & want.isnan())
            count = int(odd.sum())
            if count:
                differ += count
                gaps = (have[odd].double() - exact[odd].double()).abs()
                gaps = gaps[torch.isfinite(gaps)]
                largest = max(largest, float(gaps.max()) if len(gaps) else 0.0)
    except (LazyckptError, OSError) as e:
        return _Pair(number, differ, largest, (), _why(e))
    return _Pair(number, differ, largest, ())
