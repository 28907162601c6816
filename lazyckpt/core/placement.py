"""Where the blocks of an array lie in a larger array, and which rank of which mesh holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .box import Box, Shape


class Rank(NamedTuple):
    """The coordinates of a rank in the mesh that trained the model."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """The parallel degrees that a checkpoint was written with."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The distribution of a model's layers over pipeline stages.

    A stage may have several model chunks (virtual stages). The pipeline visits chunk 0 of all stages, then chunk 1 of
    all stages, and so on: position ``n`` is chunk ``n // stages`` of stage ``n % stages``.

    Attributes
    ----------
    stages
        The number of stages.
    chunks
        The number of model chunks on each stage.
    layers
        The number of layers of every chunk, by position. None: all chunks have the same number.
    further
        The position of the chunk that predicts further tokens (MTP). None: the last one; -1: there is none.
    """

    stages: int = 1
    chunks: int = 1
    layers: tuple[int, ...] | None = None
    further: int | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a model among ranks.

    Attributes
    ----------
    mesh
        The parallel degrees.
    etp
        The number of ranks that cut an expert's tensors; ``mesh.tp`` cut all others.
    pipeline
        The layers on the pipeline stages.
    vocab_multiple
        The number that the rows of a vocabulary on each tensor-parallel rank are padded to a multiple of. None: the one
        in the source's arguments, else 1.
    """

    mesh: Mesh
    etp: int
    pipeline: Pipeline
    vocab_multiple: int | None = None


class Place(NamedTuple):
    """A rank's place in a division.

    Attributes
    ----------
    rank
        The rank's coordinates in the mesh.
    etp
        The index of the rank among those that cut an expert's tensors.
    """

    rank: Rank
    etp: int


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a rank-local array, and the position of its first element in the global tensor.

    Attributes
    ----------
    local
        The block, in indices of the rank-local array.
    start
        The index of the block's first element in the global tensor.
    """

    local: Box
    start: Shape


@dataclass(frozen=True, slots=True)
class Placement:
    """The positions of an array's blocks in a larger array, such as a shard in its tensor or a tensor in a stack.

    Attributes
    ----------
    shape
        The array's shape, in elements.
    parts
        The array's blocks and their positions in the larger array. Elements outside all blocks (padding) are not in
        the larger array. None: the array is the whole larger array.
    axes
        For each dimension of the larger array the dimension of the array, as in `Fragment`.
    """

    shape: Shape
    parts: tuple[Part, ...] | None = None
    axes: tuple[int | None, ...] | None = None

    @staticmethod
    def of(shape: Shape, block: Box, start: Shape, axes: tuple[int | None, ...] | None = None) -> Placement:
        """Return the placement of one block of an array, at index ``start`` of the larger array.

        Parameters
        ----------
        shape
            The array's shape, in elements.
        block
            The block, in indices of the array.
        start
            The index of the block's first element in the larger array.
        axes
            For each dimension of the larger array the dimension of the array, as in `Fragment`.
        """
        return Placement(shape, (Part(block, start),), axes)

    @staticmethod
    def at(shape: Shape, start: Shape, axes: tuple[int | None, ...] | None = None) -> Placement:
        """Return the placement of a whole array, at index ``start`` of the larger array.

        Parameters
        ----------
        shape
            The array's shape, in elements.
        start
            The index of the array's first element in the larger array.
        axes
            For each dimension of the larger array the dimension of the array, as in `Fragment`.
        """
        return Placement(shape, (Part(Box.of(shape), start),), axes)

    @property
    def blocks(self) -> tuple[Part, ...]:
        """`parts`, or one part for the whole array if `parts` is None."""
        return self.parts if self.parts is not None else (Part(Box.of(self.shape), (0,) * len(self.shape)),)

    @property
    def numel(self) -> int:
        """The number of the array's elements that are in a block."""
        return sum(part.local.numel for part in self.blocks)

    def target(self, part: Part) -> Box:
        """Return the block of the larger array that one of `blocks` fills.

        Parameters
        ----------
        part
            One of `blocks`.
        """
        sizes = part.local.shape
        if self.axes is not None:
            sizes = tuple(1 if a is None else sizes[a] for a in self.axes)
        return Box(part.start, tuple(s + n for s, n in zip(part.start, sizes, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Placement):
    """The placement of a rank's array in a tensor.

    Attributes
    ----------
    source
        The name of the tensor.
    whole
        The tensor's shape, in elements.
    flat
        The interval of the array's C-order ravel, in elements, that the rank holds, as a 1-d tensor. None: the whole
        array, in its shape.
    """

    source: str
    whole: Shape
    flat: tuple[int, int] | None = None
