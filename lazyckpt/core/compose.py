"""Tensors made of blocks of others: one layer of a stack, q of a fused q, k and v, experts stacked again. Pure.

A block goes from one tensor to a place in another by giving the fragments that hold it new parts; no bytes are looked
at. So a tensor that is taken apart and put together again reads as the original does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from ..errors import LazyckptError
from .box import Box, Shape
from .dtypes import DType
from .index import Fragment, Hole, Part, TensorSpec, from_folder
from .plan import OnDemand, Selection, fragments_near, plan

Axes = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """``block`` of ``source`` stands from ``start`` on in another tensor. ``axes``: for each dimension of that tensor
    the source's dimension that it is, or None for a new one of size 1; a dimension of the source that is left out has
    to have one index in the block. None: the same dimensions."""

    source: TensorSpec
    block: Box
    start: Shape
    axes: Axes | None = None

    @property
    def turned(self) -> Axes:
        return tuple(range(len(self.block.start))) if self.axes is None else self.axes

    @property
    def target(self) -> Box:
        """Where it stands in the tensor."""
        sizes = self.block.shape
        return Box(
            self.start, tuple(s + (1 if a is None else sizes[a]) for s, a in zip(self.start, self.turned, strict=True))
        )


def whole_of(source: TensorSpec, start: Shape, axes: Axes | None = None) -> Piece:
    """All of a tensor."""
    return Piece(source, Box.of(source.shape), start, axes)


def compose(name: str, shape: Shape, pieces: Sequence[Piece], rule: str = "", stored_as: str = "") -> TensorSpec:
    """A tensor of these pieces. Raises ValueError if they differ in dtype or in how replicas count, if one does not
    fit, or if there is none."""
    dtypes: set[DType] = {piece.source.dtype for piece in pieces}
    combines: set[Literal["first", "mean"]] = {piece.source.combine for piece in pieces}
    if len(dtypes) != 1 or len(combines) != 1:
        raise ValueError(
            f"{name!r} is made of {len(pieces)} pieces of {len(dtypes)} dtypes: {sorted(map(str, dtypes))}"
        )
    for piece in pieces:
        kept = {a for a in piece.turned if a is not None}
        lost = [n for d, n in enumerate(piece.block.shape) if d not in kept and n != 1]
        inside = (
            Box.of(shape) & piece.target == piece.target and Box.of(piece.source.shape) & piece.block == piece.block
        )
        if lost or not (inside or not piece.block):
            raise ValueError(f"{name!r} of shape {shape}: {piece.block} of {piece.source.name!r} does not fit")
    return TensorSpec(
        name, shape, dtypes.pop(), ComposedFragments(tuple(pieces)), combines.pop(), rule=rule, stored_as=stored_as
    )


@dataclass(frozen=True, slots=True, eq=False)
class ComposedFragments(OnDemand):
    """The fragments of the pieces, each with the parts of it that lie in the piece. Made on demand. ``placed``: none of
    them is the tensor as it is."""

    placed: ClassVar[bool] = True
    pieces: tuple[Piece, ...]

    def near(self, want: Selection) -> list[Fragment]:
        """Those that may hold wanted elements."""
        if any(not r for r in want):
            return []
        box = Box(tuple(r[0] for r in want), tuple(r[-1] + 1 for r in want))
        found: list[Fragment] = []
        for piece in self.pieces:
            hit = box & piece.target
            if hit:
                found += _moved(piece, fragments_near(piece.source.fragments, _back(piece, hit)))
        return found

    def __iter__(self) -> Iterator[Fragment]:
        for piece in self.pieces:
            yield from _moved(piece, fragments_near(piece.source.fragments, _back(piece, piece.target)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)


def _back(piece: Piece, box: Box) -> Selection:
    """A block of the tensor within the piece's target, in the source's dimensions."""
    wanted = [range(a, b) for a, b in zip(piece.block.start, piece.block.stop, strict=True)]
    for d, axis in enumerate(piece.turned):
        if axis is not None:
            ahead = piece.block.start[axis] - piece.start[d]
            wanted[axis] = range(box.start[d] + ahead, box.stop[d] + ahead)
    return tuple(wanted)


def _moved(piece: Piece, fragments: Iterable[Fragment]) -> list[Fragment]:
    found = []
    for fragment in fragments:
        inner = fragment.axes
        parts = tuple(_parts(piece, fragment))
        if not parts:
            continue
        axes: Axes | None = piece.axes
        if inner is not None:
            axes = tuple(None if a is None else inner[a] for a in piece.turned)
        found.append(replace(fragment, parts=parts, axes=axes))
    return found


def _parts(piece: Piece, fragment: Fragment) -> Iterator[Part]:
    """The fragment's parts, cropped to the piece's block, with their places in the tensor."""
    origin = (0,) * len(piece.block.start)
    for part in fragment.parts if fragment.parts is not None else (Part(Box.of(fragment.local_shape), origin),):
        axes = tuple(range(len(origin))) if fragment.axes is None else fragment.axes
        start, stop = list(part.local.start), list(part.local.stop)
        at = []  # where the cropped part begins, in the source
        for d, axis in enumerate(axes):
            width = 1 if axis is None else part.local.stop[axis] - part.local.start[axis]
            lo, hi = max(part.start[d], piece.block.start[d]), min(part.start[d] + width, piece.block.stop[d])
            if lo >= hi:
                break
            at.append(lo)
            if axis is not None:
                start[axis] += lo - part.start[d]
                stop[axis] -= part.start[d] + width - hi
        else:
            yield Part(
                Box(tuple(start), tuple(stop)),
                tuple(
                    s if a is None else s + at[a] - piece.block.start[a]
                    for s, a in zip(piece.start, piece.turned, strict=True)
                ),
            )


# -- One tensor from several checkpoints, stacked along a new first dimension. Pure.


class Layer(NamedTuple):
    """The tensor at one ``step``; its files lie in ``folder`` ("" for the store's own)."""

    step: int
    folder: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class StackedFragments(ComposedFragments):
    """The fragments of all layers; ``steps``: the coordinates along the first dimension."""

    steps: tuple[int, ...] = ()


def stack(name: str, layers: Sequence[Layer], dtype: DType) -> TensorSpec:
    """The tensors (of one shape, one at least) as one of shape (layers, ...), converted to ``dtype``. Raises ValueError
    if they differ in shape, or in whether replicas are averaged."""
    pieces: list[Piece] = []
    shape = layers[0].spec.shape
    for n, layer in enumerate(layers):
        spec = replace(layer.spec, dtype=dtype, fragments=_Moved(layer.spec.fragments, layer.folder))
        pieces.append(whole_of(spec, (n, *(0 for _ in shape)), (None, *range(len(shape)))))
    spec = compose(name, (len(layers), *shape), pieces, rule=f"stacked from {len(layers)} steps")
    return replace(spec, fragments=StackedFragments(tuple(pieces), tuple(layer.step for layer in layers)))


def readable(spec: TensorSpec) -> bool:
    """Whether all of its elements stand in files that are there."""
    if getattr(spec.fragments, "intact", False) or not spec.numel:
        return True
    if spec.fragments and not any(isinstance(f.extent, Hole) for f in spec.fragments):
        return True
    try:  # what one file lacks, another may hold
        plan(spec, tuple(map(range, spec.shape)))
    except LazyckptError:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class _Moved(OnDemand):
    """Fragments whose files are named from further up, made on demand."""

    fragments: Sequence[Fragment]
    folder: str

    def near(self, want: Selection) -> list[Fragment]:
        return [self._moved(f) for f in fragments_near(self.fragments, want)]

    def __iter__(self) -> Iterator[Fragment]:
        return map(self._moved, self.fragments)

    def __len__(self) -> int:
        return len(self.fragments)

    def _moved(self, fragment: Fragment) -> Fragment:
        if not self.folder:
            return fragment
        return replace(fragment, extent=from_folder(self.folder, fragment.extent))
