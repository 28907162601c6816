"""Tensors composed of blocks of others: a layer of a stack, q of a fused qkv, a stack of experts. No I/O.

Moving a block from one tensor to another gives the fragments that hold it new parts and reads no bytes. So a tensor
that is split and joined again reads as the original does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, overload

from ..errors import LazyckptError
from .box import Box, Selection, Shape, remainder
from .dtypes import DType
from .expr import as_expr, cast, make, op_of, operand, parallel, relocated, wanted
from .extents import Hole, Packed, from_folder
from .fragments import Find, Fragments, fragment_boxes, fragments_of
from .placement import Part, Placement
from .plan import earlier_overlaps, plan
from .specs import Expr, Fragment, Input, TensorSpec
from .table import Table, joined


def compose(
    name: str, shape: Shape, pieces: Sequence[tuple[TensorSpec, Placement]], rule: str = "", stored_as: str = ""
) -> TensorSpec:
    """Return the spec of a tensor made of others, each with its placement.

    Pieces that are computed in the same way, such as by a conversion to the same dtype, are computed together: what is
    composed are their operands.

    Raises ValueError if the pieces differ in dtype, if one does not fit, or if there are none.
    """
    dtypes: set[DType] = {source.dtype for source, _ in pieces}
    if len(dtypes) != 1:
        raise ValueError(
            f"{name!r} is made of {len(pieces)} pieces of {len(dtypes)} dtypes: {sorted(map(str, dtypes))}"
        )
    for source, placement in pieces:
        for part in placement.blocks:
            if not _fits(shape, source.shape, placement, part):
                raise ValueError(f"{name!r} of shape {shape}: {part.local} of {source.name!r} does not fit")
    placements = tuple(placed for _, placed in pieces)
    if all(source.expr is None for source, _ in pieces):
        fragments = Composed(tuple(source.fragments for source, _ in pieces), placements)
        return TensorSpec(name, shape, dtypes.pop(), fragments, rule=rule, stored_as=stored_as)

    def of_files(specs: Sequence[TensorSpec]) -> TensorSpec:
        fragments = Composed(tuple(spec.fragments for spec in specs), placements)
        return TensorSpec(name, shape, specs[0].dtype, fragments)

    node = _together([operand(source) for source, _ in pieces], shape, placements, of_files)
    return TensorSpec(name, shape, dtypes.pop(), (), rule=rule, stored_as=stored_as, expr=as_expr(node))


def _together(
    nodes: Sequence[Expr | Input],
    shape: Shape,
    placements: tuple[Placement, ...],
    of_files: Callable[[Sequence[TensorSpec]], TensorSpec],
    **about: Any,
) -> Expr | Input:
    """Return tensors at their places in one of ``shape``: a tensor in files, a computation of such, or "place".

    ``of_files`` makes the spec of tensors in files. ``about``: further parameters of "place".
    """
    first = nodes[0]
    if isinstance(first, Input):
        if all(isinstance(one, Input) and (one.source, one.dtype) == (first.source, first.dtype) for one in nodes):
            return Input(of_files([one.spec for one in nodes if isinstance(one, Input)]), first.source)
    elif op_of(first.op).parts:
        exprs = [one for one in nodes if isinstance(one, Expr)]
        alike = len(exprs) == len(nodes) and all(_like(one, first) for one in exprs)
        if alike and all(len({one.dtype for one in row}) == 1 for row in zip(*(e.inputs for e in exprs), strict=True)):
            rows = zip(*(one.inputs for one in exprs), strict=True)
            inputs = tuple(_together(row, shape, placements, of_files, **about) for row in rows)
            return Expr(first.op, inputs, first.params, shape, first.dtype)
    return make("place", *nodes, shape=shape, placements=placements, **about)


def _like(one: Expr, other: Expr) -> bool:
    """Return whether two tensors are computed by the same operation, with the same parameters."""
    return (one.op, len(one.inputs), one.dtype) == (other.op, len(other.inputs), other.dtype) and (
        dict(one.params) == dict(other.params)
    )


def averaged(name: str, shape: Shape, dtype: DType, replicas: Sequence[Sequence[Fragment]], rule: str) -> TensorSpec:
    """Return the spec of the mean of replicas.

    An element is the mean of the replicas that files hold: those in lost files do not count.

    Parameters
    ----------
    name, shape, dtype
        The tensor.
    replicas
        The fragments of each replica, each of the whole tensor.
    rule
        See `TensorSpec`.
    """
    inputs = [Input(TensorSpec(name, shape, dtype, fragments)) for fragments in replicas]
    regions: list[tuple[Box, tuple[int, ...]]] = [(Box.of(shape), tuple(range(len(inputs))))]
    for n, one in enumerate(inputs):
        for lost in lost_boxes(one.spec):
            found = []
            for box, held in regions:
                hit = box & lost
                if not hit:
                    found.append((box, held))
                    continue
                found.append((hit, tuple(m for m in held if m != n)))
                found += [(rest, held) for rest in remainder(box, [hit])]
            regions = found
    if len(regions) == 1:
        whole = [inputs[m] for m in regions[0][1]] or inputs[:1]
        return TensorSpec(name, shape, dtype, (), rule=rule, expr=make("mean", *whole))
    parts: list[Expr | Input] = []
    for box, held in regions:
        inside = Placement(shape, (Part(box, (0,) * len(shape)),))
        some = [inputs[m].spec for m in held] or [inputs[0].spec]
        parts.append(make("mean", *(Input(compose(name, box.shape, [(spec, inside)])) for spec in some)))
    places = tuple(Placement.at(box.shape, box.start) for box, _ in regions)
    return TensorSpec(name, shape, dtype, (), rule=rule, expr=make("place", *parts, shape=shape, placements=places))


def lost_boxes(spec: TensorSpec) -> list[Box]:
    """Return the blocks of a tensor that are in lost files only, disjoint."""
    if fragments_of(spec.fragments).intact:
        return []
    holes = [f for f in spec.fragments if isinstance(f.extent, Hole)]
    if not holes:
        return []
    held = [box for f in spec.fragments if not isinstance(f.extent, Hole) for _, box in fragment_boxes(f)]
    found: list[Box] = []
    for box in (box for f in holes for _, box in fragment_boxes(f)):
        rest = [box]
        for other in [*held, *found]:
            rest = [piece for part in rest for piece in (part.minus(other) if part & other else (part,))]
        found += rest
    return found


def held(spec: TensorSpec) -> Sequence[Fragment]:
    """Return the fragments that hold the elements of a tensor at their places: its own, or those of the operands of
    operations on elements. All of them are read. Empty for other operations."""
    if spec.expr is None:
        return spec.fragments
    found = parallel(spec)
    if len(found) < 2:
        return found[0].fragments if found else ()
    return Composed(tuple(one.fragments for one in found), (Placement(spec.shape),) * len(found), is_mean(spec))


def is_mean(spec: TensorSpec) -> bool:
    """Return whether a tensor is the mean of replicas, perhaps converted."""
    node: Expr | Input | None = spec.expr
    while isinstance(node, Expr) and node.op == "cast":
        node = node.inputs[0]
    return isinstance(node, Expr) and node.op == "mean"


def _fits(shape: Shape, source: Shape, placement: Placement, part: Part) -> bool:
    """Return whether a block is inside both tensors, and has length 1 in each dimension that the placement drops."""
    kept = range(len(source)) if placement.axes is None else placement.axes
    if placement.shape != source or any(n != 1 for d, n in enumerate(part.local.shape) if d not in kept):
        return False
    target = placement.target(part)
    return not part.local or (Box.of(shape) & target == target and Box.of(source) & part.local == part.local)


@dataclass(frozen=True, slots=True)
class Composed(Fragments):
    """The fragments of a tensor that is composed of others.

    ``sources`` holds the fragments of each source tensor, ``placements`` its placement. ``merged`` says that the
    sources are the shards of all ranks, in rank order, and together hold all elements of the tensor.
    """

    sources: tuple[Sequence[Fragment], ...]
    placements: tuple[Placement, ...]
    merged: bool = False

    def meeting(self, want: Selection) -> list[Fragment]:
        return self._meeting(want, lambda source, wanted: source.meeting(wanted))

    def replicas(self, want: Selection) -> list[Fragment]:
        return self._meeting(want, lambda source, wanted: source.replicas(wanted))

    def _meeting(self, want: Selection, of: Callable[[Fragments, Selection], Sequence[Fragment]]) -> list[Fragment]:
        if not all(map(len, want)):
            return []
        found: list[Fragment] = []
        for n, (source, placement) in enumerate(zip(self.sources, self.placements, strict=True)):
            wanted = want if placement.parts is None else _wanted(placement, want)
            if wanted is not None:
                found += self._placed(n, of(fragments_of(source), wanted))
        return found

    def packed(self) -> list[Packed]:
        return [f.extent for f in self if isinstance(f.extent, Packed)]

    def table(self, want: Selection, find: Find | None = None) -> Table | None:
        """Return the tables of the sources, moved to their places, if each is one block and all have a table."""
        tables: list[Table] = []
        blocks: list[Box] = []
        for n, (source, placement) in enumerate(zip(self.sources, self.placements, strict=True)):
            wanted = want if placement.parts is None else _wanted(placement, want)
            if wanted is None:
                continue
            found = fragments_of(source).table(wanted, find) if self._is_straight(n) else None
            if found is None:
                return None
            blocks.append(Box.of(placement.shape) if placement.parts is None else placement.target(placement.parts[0]))
            if placement.parts is not None:
                found = found.moved(placement.parts[0].local, placement.parts[0].start)
            tables.append(found)
        if not tables or any(earlier_overlaps(blocks)):
            return None
        return joined(tables)

    def _is_straight(self, n: int) -> bool:
        """Return whether a source is one block of the tensor, with the same dimensions in the same store."""
        placement = self.placements[n]
        return placement.axes is None and (placement.parts is None or len(placement.parts) == 1)

    def __iter__(self) -> Iterator[Fragment]:
        for n in range(len(self.sources)):
            yield from self._placed(n, self._held(n))

    def __len__(self) -> int:
        return sum(map(self._count, range(len(self.sources))))

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> list[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return list(self)[n]
        at = range(len(self))[n]
        for which, source in enumerate(self.sources):
            count = self._count(which)
            if at < count:
                chosen = [source[at]] if self._is_whole(which) else self._held(which)
                found = list(self._placed(which, chosen))
                return found[0 if self._is_whole(which) else at]
            at -= count
        raise IndexError(n)

    def only(self) -> Fragment | None:
        """Return the only fragment of the only source, if that source is the whole tensor."""
        if len(self.sources) != 1 or self.placements[0].parts is not None:
            return None
        found = fragments_of(self.sources[0]).only()
        return None if found is None else next(self._placed(0, [found]))

    @property
    def intact(self) -> bool:
        """Whether the shards of a merged tensor are all intact; the merge has checked that they cover the tensor."""
        return self.merged and all(fragments_of(source).intact for source in self.sources)

    @property
    def shards(self) -> tuple[Placement, ...]:
        return self.placements if self.merged else ()

    def _is_whole(self, n: int) -> bool:
        """Return whether the whole source, and so each of its fragments, is in the tensor."""
        placement = self.placements[n]
        return placement.parts is None or 0 < prod(placement.shape) == placement.numel

    def _count(self, n: int) -> int:
        return len(self.sources[n]) if self._is_whole(n) else sum(1 for _ in self._placed(n, self._held(n)))

    def _held(self, n: int) -> Sequence[Fragment]:
        """Return the fragments of a source that may have a part in the tensor."""
        if self._is_whole(n):
            return self.sources[n]
        blocks = [part.local for part in self.placements[n].blocks if part.local]
        return fragments_of(self.sources[n]).meeting(_hull(blocks)) if blocks else ()

    def _placed(self, n: int, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        """Yield fragments of a source as fragments of the tensor."""
        placement = self.placements[n]
        if placement.parts is None:
            yield from fragments
            return
        is_whole = self._is_whole(n)
        for fragment in fragments:
            if fragment.parts is None and fragment.axes is None:
                yield replace(fragment, parts=placement.parts, axes=placement.axes)
                continue
            parts = tuple(_parts(placement, fragment))
            if parts or is_whole:
                yield replace(fragment, parts=parts, axes=_axes(placement, fragment))


def _wanted(placement: Placement, want: Selection) -> Selection | None:
    """Return the part of the placed array inside the bounding box of the selection; None if it is empty."""
    box = Box(tuple(int(r[0]) for r in want), tuple(int(r[-1]) + 1 for r in want))
    found = []
    for part in placement.blocks:
        hit = box & placement.target(part)
        if not hit:
            continue
        start, stop = list(part.local.start), list(part.local.stop)
        for d, axis in enumerate(range(len(start)) if placement.axes is None else placement.axes):
            if axis is not None:
                ahead = part.local.start[axis] - part.start[d]
                start[axis], stop[axis] = hit.start[d] + ahead, hit.stop[d] + ahead
        found.append(Box(tuple(start), tuple(stop)))
    return _hull(found) if found else None


def _hull(boxes: Sequence[Box]) -> Selection:
    """Return the bounding box of the boxes."""
    if len(boxes) == 1:
        return tuple(map(range, boxes[0].start, boxes[0].stop))
    return tuple(
        range(min(b.start[d] for b in boxes), max(b.stop[d] for b in boxes)) for d in range(len(boxes[0].start))
    )


def _axes(placement: Placement, fragment: Fragment) -> tuple[int | None, ...] | None:
    if fragment.axes is None or placement.axes is None:
        return fragment.axes if placement.axes is None else placement.axes
    return tuple(None if axis is None else fragment.axes[axis] for axis in placement.axes)


def _parts(placement: Placement, fragment: Fragment) -> Iterator[Part]:
    """Yield the fragment's parts, cropped to the placed blocks, with their positions in the tensor."""
    origin = (0,) * len(placement.shape)
    turned = tuple(range(len(origin))) if placement.axes is None else placement.axes
    axes = tuple(range(len(origin))) if fragment.axes is None else fragment.axes
    for block, to in ((part.local, part.start) for part in placement.blocks):
        for part in fragment.parts if fragment.parts is not None else (Part(Box.of(fragment.local_shape), origin),):
            start, stop = list(part.local.start), list(part.local.stop)
            at = []  # the start of the cropped part in the source
            for d, axis in enumerate(axes):
                width = 1 if axis is None else part.local.stop[axis] - part.local.start[axis]
                lo, hi = max(part.start[d], block.start[d]), min(part.start[d] + width, block.stop[d])
                if lo >= hi:
                    break
                at.append(lo)
                if axis is not None:
                    start[axis] += lo - part.start[d]
                    stop[axis] -= part.start[d] + width - hi
            else:
                yield Part(
                    Box(tuple(start), tuple(stop)),
                    tuple(s if a is None else s + at[a] - block.start[a] for s, a in zip(to, turned, strict=True)),
                )


# -- One tensor from several checkpoints, stacked along a new first dimension.


class Layer(NamedTuple):
    """The tensor at one ``step``. Its files are in ``folder`` ("" for the root of the store)."""

    step: int
    folder: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Stacked(Composed):
    """The fragments of all layers of a stack.

    ``folders`` holds the folder of each layer's files, relative to a common store. ``steps`` holds the coordinates
    along the first dimension.
    """

    folders: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()

    def inside(self, box: Box) -> Stacked:
        """Return all fragments of the layers that have elements of the block."""
        lo, hi = box.start[0], box.stop[0]
        kept = [n for n, placement in enumerate(self.placements) if lo <= placement.blocks[0].start[0] < hi]
        return replace(
            self,
            sources=tuple(self.sources[n] for n in kept),
            placements=tuple(self.placements[n] for n in kept),
            folders=tuple(self.folders[n] for n in kept),
        )

    def _is_straight(self, n: int) -> bool:
        return False  # the files of a layer are in its folder

    def _placed(self, n: int, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        found = Composed._placed(self, n, fragments)
        folder = self.folders[n]
        if not folder:
            return found
        return (replace(f, extent=from_folder(folder, f.extent)) for f in found)


def stack(name: str, layers: Sequence[Layer], dtype: DType) -> TensorSpec:
    """Return the spec of the stacked layers, at least one, of shape (layers, ...) and converted to ``dtype``.

    Raises ValueError if the layers differ in shape.
    """
    shape = layers[0].spec.shape
    axes = (None, *range(len(shape)))
    whole = (len(layers), *shape)
    if any(layer.spec.shape != shape for layer in layers):
        raise ValueError(f"{name!r} has other shapes than {shape} at some steps")
    placements = tuple(Placement.at(shape, (n, *(0 for _ in shape)), axes) for n in range(len(layers)))
    folders, steps = tuple(layer.folder for layer in layers), tuple(layer.step for layer in layers)

    def of_files(specs: Sequence[TensorSpec]) -> TensorSpec:
        fragments = Stacked(tuple(s.fragments for s in specs), placements, folders=folders, steps=steps)
        return TensorSpec(name, whole, specs[0].dtype, fragments)

    nodes = [operand(cast(layer.spec, dtype)) for layer in layers]
    rule = f"stacked from {len(layers)} steps"
    if all(isinstance(node, Input) for node in nodes):
        return replace(of_files([layer.spec for layer in layers]), rule=rule)
    node = _together(nodes, whole, placements, of_files, steps=steps)
    if _places(node):  # operands that are read by themselves
        own = [relocated(layer.spec, layer.folder) if layer.folder else layer.spec for layer in layers]

        def of_places(specs: Sequence[TensorSpec]) -> TensorSpec:
            fragments = Composed(tuple(s.fragments for s in specs), placements)
            return TensorSpec(name, whole, specs[0].dtype, fragments)

        node = _together([operand(cast(one, dtype)) for one in own], whole, placements, of_places, steps=steps)
    return TensorSpec(name, whole, dtype, (), rule=rule, expr=as_expr(node))


def _places(node: Expr | Input) -> bool:
    """Return whether operands are at places in a computed tensor."""
    return isinstance(node, Expr) and (node.op == "place" or any(map(_places, node.inputs)))


def steps_of(spec: TensorSpec) -> tuple[int, ...]:
    """Return the coordinates along the first dimension of a stack."""
    node = operand(spec)
    while isinstance(node, Expr):
        if "steps" in node.params:
            found: tuple[int, ...] = node.params["steps"]
            return found
        node = node.inputs[0]
    return fragments_of(node.spec.fragments).steps


def inside(spec: TensorSpec, box: Box) -> TensorSpec:
    """Return the tensor with only those fragments that may hold elements of a block."""
    node = _inside(operand(spec), box)
    return node.spec if isinstance(node, Input) else replace(spec, expr=node)


def _inside(node: Expr | Input, box: Box) -> Expr | Input:
    if isinstance(node, Input):
        return replace(node, spec=replace(node.spec, fragments=fragments_of(node.spec.fragments).inside(box)))
    if not op_of(node.op).parts:
        return node
    return replace(node, inputs=tuple(_inside(one, box) for one in node.inputs))


def readable(spec: TensorSpec) -> bool:
    """Return whether existing files hold all elements of the tensor."""
    if spec.expr is not None:
        try:
            for one, want in wanted(spec, tuple(map(range, spec.shape))):
                plan(one.spec, want)
        except LazyckptError:
            return False
        return True
    if fragments_of(spec.fragments).intact or not spec.numel:
        return True
    if spec.fragments and not any(isinstance(f.extent, Hole) for f in spec.fragments):
        return True
    try:  # another file may hold the elements of a hole
        plan(spec, tuple(map(range, spec.shape)))
    except LazyckptError:
        return False
    return True
