"""Chunk grids: how to cut a tensor for formats whose chunks all have the same shape. No I/O.

If the fragments of a tensor form a regular grid, the chunks follow it: a fragment becomes one or several chunks, or
several fragments become one chunk. So each chunk reads as few files as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .box import Box, Shape
from .expr import outline
from .fragments import fragment_boxes, fragments_of
from .specs import TensorSpec

FEW = 16  # up to this many chunks of a tensor are not joined, however small they are


def fragment_grid(spec: TensorSpec) -> Shape | None:
    """Return the shape of the cells if the tensor's fragments form a regular grid, else None.

    The end of the tensor may cut off the last cells. Replicas count once, and the fragments of missing files count too.
    """
    whole = Box.of(spec.shape)
    if not whole:
        return None
    fragments = outline(spec)
    regular = fragments_of(fragments).cell
    if regular is not None:
        return tuple(map(min, regular, spec.shape))
    cell = list(spec.shape)
    boxes: set[Box] = set()
    # All blocks that end before the tensor does have to be equally long, so the first few flat spans decide.
    for box in (globe & whole for fragment in fragments for _, globe in fragment_boxes(fragment)):
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
    """Return the shape of a tensor's chunks, in elements; no dimension is 0.

    If the fragments form a grid, its cells are the chunks: a cell of more than ``most`` bytes is cut evenly, and many
    cells of less than ``least`` bytes are joined. Otherwise a chunk is rows of at most ``most`` bytes, and there are
    at least ``pieces`` chunks if the tensor has that many rows.

    >>> from lazyckpt.core.extents import Extent
    >>> from lazyckpt.core.specs import whole
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
    """Return the number of chunks in each dimension (0 where the tensor is empty)."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def chunk_box(place: Sequence[int], shape: Sequence[int], chunk: Sequence[int]) -> Box:
    """Return the block of the tensor that the chunk at ``place`` in the grid holds, cut off by the tensor's end."""
    start = tuple(p * c for p, c in zip(place, chunk, strict=True))
    return Box(start, tuple(min(a + c, n) for a, c, n in zip(start, chunk, shape, strict=True)))


def _count(shape: Shape, chunk: Shape) -> int:
    return prod(grid_of(shape, chunk))


def _rows(cell: Shape, shape: Shape, size: int, most: int, pieces: int) -> Shape:
    """Cut a cell along its first dimensions until it has at most ``most`` bytes.

    In a dimension with several cells the cuts are even: the edges of the chunks then include the edges of the cells.
    """
    chunk = list(cell)
    for d, n in enumerate(cell):
        wanted = max(-(-prod(chunk) * size // max(most, size)), pieces)
        if wanted <= 1:
            break
        if n == shape[d]:
            rows = max(1, n // wanted)  # an upper limit
            chunk[d] = -(-n // -(-n // rows))
        else:
            chunk[d] = n // next((k for k in range(min(n, wanted), n + 1) if n % k == 0), n)
        pieces = -(-pieces // -(-n // chunk[d]))
    return tuple(chunk)


def _joined(cell: Shape, shape: Shape, size: int, least: int) -> Shape:
    """Join neighbouring cells, along the last dimensions first, until they have ``least`` bytes."""
    chunk = list(cell)
    for d in reversed(range(len(cell))):
        times = -(-least // (prod(chunk) * size))
        if times <= 1:
            break
        chunk[d] = min(cell[d] * times, -(-shape[d] // cell[d]) * cell[d])
    return tuple(min(c, n) for c, n in zip(chunk, shape, strict=True))
