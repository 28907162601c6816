"""Which tensors a report shows first, and what it holds of each: pictures, histograms, values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from ..errors import DataError, LazyckptError
from ..inspect.architecture import layer_and_kind
from ..inspect.bits import has_bits
from ..inspect.numbers import number_shape
from ..inspect.pixels import row_length
from ..inspect.planes import SAMPLE
from ..inspect.stats import LIMIT
from ..lazy import LazyArray
from ..show.layout import holders
from ..show.outline import outline
from .subject import AUTO, MORE, REST, TENSORS, Subject, View, Wanted

_MANY = 20_000  # tensors, beyond which there is no room for a second state
_CELLS = 64  # rows and columns of a picture
_FRACTION = 11  # bits of the fraction of a mean: three digits
_BITS = 16 << 20  # bytes of the tensors whose bits are counted
_SPECTRUM = 16 << 20  # bytes of the matrices whose singular values are computed
_SIDE = 512  # the shorter side of such a matrix
_ROWS, _COLS = 60, 12  # values in the table
_BESIDE = 16  # further names of a tied tensor that a report holds together with the tensor; the rest come last
_NAMED = ("tensor", "python")  # paths whose answers differ for the names of a tied tensor


def by_use(view: View) -> Iterator[tuple[str, bool]]:
    """Yield the names of a view, the most useful in a report first, and whether each is the first of its kind.

    The first tensor of each kind comes first, the kinds with the most bytes before others; then the other tensors, the
    largest first. A tied tensor has one of its names. Nothing is read.
    """
    found = outline(view)
    sizes = [int(b) - int(a) for a, b in zip(found.nbytes, found.nbytes[1:], strict=False)]
    kinds: dict[str, tuple[int, int, int]] = {}  # kind -> bytes of all, first layer, its number
    counted = (found.marks >= 0).tolist()
    for n, name in enumerate(found.names):
        if counted[n]:
            layer, kind = layer_and_kind(view.full_name(name))
            nbytes, *first = kinds.get(kind, (0, layer or 0, n))
            number, at = min(tuple(first), (layer or 0, n))
            kinds[kind] = nbytes + sizes[n], number, at
    firsts = [n for _, _, n in sorted(kinds.values(), key=lambda kind: -kind[0])]
    for n in firsts:
        yield found.names[n], True
    seen = set(firsts)
    for n in sorted((n for n, yes in enumerate(counted) if yes and n not in seen), key=lambda n: (-sizes[n], n)):
        yield found.names[n], False


def spread(steps: Sequence[int]) -> list[int]:
    """Return the steps of a run before the last one, the most useful in a report first: the first one, then the one in
    the middle of the widest gap.

    >>> spread([0, 10, 20, 30, 40])
    [0, 20, 10, 30]
    """
    found = list(steps[:1]) if len(steps) > 1 else []
    gaps = [(0, len(steps) - 1)]  # places of neighbours among the chosen ones and the last one
    for low, high in gaps:  # each gap that is divided appends two, of half its width: the widest come first
        if high - low > 1:
            middle = (low + high) // 2
            found.append(steps[middle])
            gaps += [(low, middle), (middle, high)]
    return found


def of_steps(subject: Subject, early: int) -> Iterator[Wanted]:
    """Yield what a report holds of the steps of a run before the last one, by level: names, what is known without
    elements, and a picture of the first tensor of each kind; then pictures of all other tensors.

    Parameters
    ----------
    subject
        The run.
    early
        How many steps are as useful as what pages of the last step show on demand.
    """
    assert subject.run is not None
    steps = spread(subject.run.steps)
    for place, step in enumerate(steps):
        level = MORE if place < early else TENSORS
        for path in ("tree", "about", "tree/marks", "tree/totals", "architecture", "architecture/memory", "ranks"):
            yield Wanted(path, {"step": str(step)}, level=level)
        yield from _at_step(subject, step, True, level)
    for step in steps:
        yield from _at_step(subject, step, False, REST)


def _at_step(subject: Subject, step: int, firsts: bool, level: int) -> Iterator[Wanted]:
    """Yield what a report holds of the first tensors of each kind, or of the others, at a step of a run."""
    try:
        view = subject.at(step)
    except (LazyckptError, OSError):
        return  # the answers to other requests say so
    others = _other_names(view)
    for name, first in by_use(view):
        if first == firsts:
            yield from _with_others(_of_one(view, name, {"step": str(step)}, level), others.get(name, ())[:_BESIDE])


def picture_values(name: str, t: LazyArray) -> dict[str, str] | None:
    """Return the parameters of the picture that a report holds of a tensor; None if its elements are no numbers."""
    try:
        shape = number_shape(t)
    except DataError:
        return None
    if not prod(shape):
        return None
    values = {"name": name, "rows": str(_CELLS), "cols": str(_CELLS), "exact": "auto", "how": "mean"}
    wrap = row_length(shape)
    return values | {"fraction": str(_FRACTION)} | ({} if wrap is None else {"wrap": str(wrap)})


def of_tensors(views: Sequence[tuple[View, Mapping[str, str]]]) -> Iterator[Wanted]:
    """Yield what a report holds of tensors, by level: the first of each kind, all others, and further values of all.

    Parameters
    ----------
    views
        States of checkpoints, the most useful first, each with the parameters that name it (``state``, ``side``).
    """
    if len(views[0][0]) > _MANY:
        views = views[:1]
    orders = [(view, common, list(by_use(view)), _other_names(view)) for view, common in views]
    for level in (MORE, TENSORS):
        for view, common, order, others in orders:
            for name, first in order:
                if first == (level == MORE):
                    yield from _with_others(_of_one(view, name, common, level), others.get(name, ())[:_BESIDE])
    for view, common, order, others in orders:
        for name, first in order:
            yield from _with_others(_more_of_one(view, name, common, first), others.get(name, ())[:_BESIDE])
    for view, common, order, others in orders:
        for name, first in order:
            if len(others.get(name, ())) > _BESIDE:
                again = chain(_of_one(view, name, common, REST), _more_of_one(view, name, common, first))
                yield from _with_others(again, others[name][_BESIDE:])


def _other_names(view: View) -> dict[str, list[str]]:
    """Return the further names of tied tensors, by the name that `by_use` yields."""
    found = outline(view)
    if not found.tied:
        return {}
    shown: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    for name, _ in sorted(zip(found.names, found.marks.tolist(), strict=True), key=lambda pair: pair[1] < 0):
        owner = found.tied.get(name) or view.full_name(name)
        if shown.setdefault(owner, name) != name:
            others.setdefault(shown[owner], []).append(name)
    return others


def _with_others(wanted: Iterable[Wanted], others: Sequence[str]) -> Iterator[Wanted]:
    """Yield what is wanted of a tensor, and the same for its other names: pictures and values are held once."""
    for one in wanted:
        yield one
        for name in others:
            values = {**one.values, "name": name}
            if one.path in _NAMED:
                yield Wanted(one.path, values, level=one.level)
            else:
                yield Wanted(one.path, values, level=one.level, same=one.values)


def _of_one(view: View, name: str, common: Mapping[str, str], level: int) -> Iterator[Wanted]:
    t = view.exact(name)
    if t is None:
        return
    yield Wanted("tensor", {"name": name, **common}, level=level)
    yield Wanted("python", {"page": "tensor", "name": name, **common}, level=level)
    values = picture_values(name, t)
    if values is None:
        return
    asked = {"name": name, **common}
    reads = t.nbytes if t.nbytes <= AUTO else SAMPLE
    yield Wanted("tensor/tile", {**values, **common}, reads, level)
    reads *= 1 if has_bits(t.spec.dtype) else 2  # `histogram_of` reads wide numbers twice
    yield Wanted("tensor/histogram", {**asked, "bins": "100", "scale": "linear", "exact": "auto"}, reads, level)


def _more_of_one(view: View, name: str, common: Mapping[str, str], first: bool) -> Iterator[Wanted]:
    t = view.exact(name)
    values = None if t is None else picture_values(name, t)
    if t is None or values is None:
        return
    asked = {"name": name, **common}
    shape = number_shape(t)
    if any(len(holders(one)) > 1 for one in t.operands):
        yield Wanted("tensor/layout", asked, level=REST)
    if len(shape) <= 2:
        wrap = {"wrap": values["wrap"]} if "wrap" in values else {}
        width = int(wrap["wrap"]) if wrap else shape[-1] if shape else 1
        height = -(-prod(shape) // width)
        corner = {"r0": "0", "r1": str(min(_ROWS, height)), "c0": "0", "c1": str(min(_COLS, width))}
        yield Wanted("tensor/values", {**asked, **wrap, **corner}, min(t.nbytes, _ROWS * width * 8), REST)
    yield Wanted("tensor/outliers", {**asked, "count": "50"}, t.nbytes, REST)
    if has_bits(t.spec.dtype) and t.nbytes <= _BITS:
        yield Wanted("tensor/bits", asked, t.nbytes, REST)
    if first and len(shape) == len(t.shape) == 2 and min(shape) <= min(_SIDE, LIMIT) and t.nbytes <= _SPECTRUM:
        yield Wanted("tensor/spectrum", asked, t.nbytes, REST)
