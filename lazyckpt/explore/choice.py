"""Which tensors a report shows first, and what it holds of each: pictures, histograms, values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ..errors import DataError
from ..inspect.architecture import layer_and_kind
from ..inspect.bits import has_bits
from ..inspect.numbers import number_shape
from ..inspect.pixels import row_length
from ..inspect.stats import LIMIT
from ..lazy import LazyArray
from ..show.layout import holders
from ..show.outline import outline
from .subject import MORE, REST, TENSORS, View, Wanted

_MANY = 20_000  # tensors, beyond which there is no room for a second state
_CELLS = 64  # rows and columns of a picture
_FRACTION = 11  # bits of the fraction of a mean: three digits
_BITS = 16 << 20  # bytes of the tensors whose bits are counted
_SPECTRUM = 16 << 20  # bytes of the matrices whose singular values are computed
_SIDE = 512  # the shorter side of such a matrix
_ROWS, _COLS = 60, 12  # values in the table


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
    orders = [(view, common, list(by_use(view))) for view, common in views]
    for level in (MORE, TENSORS):
        for view, common, order in orders:
            for name, first in order:
                if first == (level == MORE):
                    yield from _of_one(view, name, common, level)
    for view, common, order in orders:
        for name, first in order:
            yield from _more_of_one(view, name, common, first)


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
    yield Wanted("tensor/tile", {**values, **common}, t.nbytes, level)
    yield Wanted("tensor/histogram", {**asked, "bins": "100", "scale": "linear", "exact": "auto"}, t.nbytes, level)


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
