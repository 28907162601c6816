"""Chunk grids: how to cut a tensor for formats whose chunks all have one shape. Pure.

Where the fragments of a tensor form such a grid themselves, the chunks follow it: one fragment is then one chunk, a few
chunks, or a few fragments are one chunk, and a chunk reads no more files than it has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .box import Box, Shape
from .fragments import fragment_boxes, fragments_of
from .index import TensorSpec

FEW = 16  # so many chunks of a tensor are no burden, however small they are


def fragment_grid(spec: TensorSpec) -> Shape | None:
    """The shape of the grid's cells if the blocks that the fragments hold form a regular one, whose last cells may be
    cut off by the end of the tensor; None if they do not. Replicas count once; a missing file has its place, too."""
    whole = Box.of(spec.shape)
    if not whole:
        return None
    regular = fragments_of(spec.fragments).cell
    if regular is not None:
        return tuple(map(min, regular, spec.shape))
    cell = list(spec.shape)
    boxes: set[Box] = set()
    # all that end before the tensor does are equally long: of a thousand ranks' flat spans the first few tell
    for box in (globe & whole for fragment in spec.fragments for _, globe in fragment_boxes(fragment)):
        if not box or box in boxes:
            continue
        boxes.add(box)
        for d, (a, b, n) in enumerate(zip(box.start, box.stop, spec.shape, strict=True)):
            if b < n and cell[d] == n:
                cell[d] = b - a
            elif b < n and cell[d] != b - a:
                return None
    is_regular = len(boxes) == prod(grid_of(spec.shape, cell)) and all(
        a % c == 0 and b == min(a + c, n)
        for box in boxes
        for a, b, c, n in zip(box.start, box.stop, cell, spec.shape, strict=True)
    )
    return tuple(cell) if is_regular else None


def chunk_shape(spec: TensorSpec, least: int, most: int, pieces: int = 1) -> Shape:
    """The shape of a tensor's chunks, in elements, no dimension 0. Where the fragments form a grid it is theirs: cut
    evenly if one takes more than ``most`` bytes, several taken together if they are many and take less than ``least``.
    Elsewhere rows of at most ``most`` bytes, at least ``pieces`` chunks if there are so many rows.

    >>> from .index import Extent, whole
    >>> spec = whole("w", Extent("f", 0, "float32", (100, 1024), (1024, 1)))
    >>> chunk_shape(spec, 1 << 16, 1 << 17)
    (25, 1024)
    """
    shape = tuple(max(1, n) for n in spec.shape)
    size = spec.dtype.itemsize
    cell = fragment_grid(spec)
    if cell is None:
        return _rows(shape, shape, size, most, pieces)
    chunk = _rows(cell, shape, size, most, 1)
    if chunk == cell and prod(cell) * size < least and _count(shape, cell) > FEW:
        return _joined(cell, shape, size, least)
    return chunk


def grid_of(shape: Sequence[int], chunk: Sequence[int]) -> Shape:
    """How many chunks there are in each dimension (none where the tensor is empty)."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def chunk_box(place: Sequence[int], shape: Sequence[int], chunk: Sequence[int]) -> Box:
    """The block of the tensor that the chunk at this place of the grid holds; cut off by the tensor's end."""
    start = tuple(p * c for p, c in zip(place, chunk, strict=True))
    return Box(start, tuple(min(a + c, n) for a, c, n in zip(start, chunk, shape, strict=True)))


def _count(shape: Shape, chunk: Shape) -> int:
    return prod(grid_of(shape, chunk))


def _rows(cell: Shape, shape: Shape, size: int, most: int, pieces: int) -> Shape:
    """Cut a cell along its first dimensions until it takes at most ``most`` bytes. Where the grid has several cells in
    a dimension, only evenly: another cut would not meet their edges."""
    chunk = list(cell)
    for d, n in enumerate(cell):
        wanted = max(-(-prod(chunk) * size // max(most, size)), pieces)
        if wanted <= 1:
            break
        if n == shape[d]:
            rows = max(1, n // wanted)  # at most
            chunk[d] = -(-n // -(-n // rows))
        else:
            chunk[d] = n // next((k for k in range(min(n, wanted), n + 1) if n % k == 0), n)
        pieces = -(-pieces // -(-n // chunk[d]))
    return tuple(chunk)


def _joined(cell: Shape, shape: Shape, size: int, least: int) -> Shape:
    """Take neighbouring cells together, along the last dimensions first, until they have ``least`` bytes."""
    chunk = list(cell)
    for d in reversed(range(len(cell))):
        times = -(-least // (prod(chunk) * size))
        if times <= 1:
            break
        chunk[d] = min(cell[d] * times, -(-shape[d] // cell[d]) * cell[d])
    return tuple(min(c, n) for c, n in zip(chunk, shape, strict=True))
