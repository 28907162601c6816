"""What the files contribute to a tensor: a sequence that makes its fragments when they are asked for.

A tensor of a thousand ranks or a million chunks has many fragments, but they follow from few facts. `Fragments` is what
all such sequences have in common. There are three kinds:

- `Blocks` (core/blocks.py): one fragment for each block of a regular grid, or of a table;
- `Flat` (core/flat.py): flat intervals of the tensor's C order;
- `Composed` (core/compose.py): blocks of other tensors, such as the shards of ranks.

A `TensorSpec` may also have a plain sequence, such as a tuple: `fragments_of` takes both.
tests/test_fragments.py checks the contract for each kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, overload

from .box import Box, Shape, span_boxes
from .index import Fragment, Packed, Placement

Selection = tuple[range, ...]


class Fragments(Sequence[Fragment]):
    """Fragments that are made when they are asked for.

    A subclass defines `meeting` and `__iter__`. All else has a default that is right for any sequence; a subclass
    overrides what it knows better, or sooner.
    """

    __slots__ = ()

    @abstractmethod
    def meeting(self, want: Selection) -> Sequence[Fragment]:
        """The fragments that may hold wanted elements, in their order, without making the others.

        Parameters
        ----------
        want
            The selected elements: one ascending range for each dimension of the tensor.

        Returns
        -------
        Every fragment that holds a wanted element; of replicas one is enough. Parts of a fragment that hold no wanted
        element may be left out.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Fragment]: ...

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        return list(self)[n]

    def inside(self, box: Box) -> Sequence[Fragment]:
        """The fragments that hold elements of a block, replicas too where `meeting` does not choose among them. All of
        these fragments where that is all: they may be more compact than a tuple of them."""
        held = self._inside(box)
        return held if len(held) < len(self) else self

    def _inside(self, box: Box) -> tuple[Fragment, ...]:
        near = self.meeting(tuple(map(range, box.start, box.stop))) if box else ()
        return tuple(f for f in near if any(globe & box for _, globe in fragment_boxes(f)))

    def only(self) -> Fragment | None:
        """The one fragment that there is; None if there are others, or if that is not known without making them."""
        return None

    @property
    def intact(self) -> bool:
        """Whether every element of the tensor is known to be in a file that is there; else a plan finds out."""
        return False

    @property
    def cell(self) -> Shape | None:
        """The shape of the blocks if they form a regular grid; None if they do not, or if that is not known."""
        return None

    def packed(self) -> list[Packed]:
        """The archives and chunks that reading the whole tensor has to look up, so that many can be looked up at once.
        Reading finds those that are not listed here by itself."""
        return []

    @property
    def shards(self) -> tuple[Placement, ...]:
        """Where the shards of the ranks lie in the tensor, in the order of the ranks; empty if it is not made of such
        shards."""
        return ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The coordinates of the first dimension, of a tensor that is stacked from the steps of a run; else empty."""
        return ()


class Listed(Fragments):
    """A plain sequence of fragments, with the methods of `Fragments`."""

    __slots__ = ("fragments",)

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = fragments

    def meeting(self, want: Selection) -> Sequence[Fragment]:
        """All of them: planning is as fast as looking for those that are wanted."""
        return self.fragments

    def inside(self, box: Box) -> Sequence[Fragment]:
        held = self._inside(box)
        return held if len(held) < len(self) else self.fragments

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self.fragments)

    def __len__(self) -> int:
        return len(self.fragments)

    def __bool__(self) -> bool:
        return len(self.fragments) > 0

    @overload
    def __getitem__(self, n: int) -> Fragment: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[Fragment]: ...
    def __getitem__(self, n: Any) -> Any:
        return self.fragments[n]

    def only(self) -> Fragment | None:
        return self.fragments[0] if len(self.fragments) == 1 else None

    def packed(self) -> list[Packed]:
        return [f.extent for f in self.fragments if isinstance(f.extent, Packed)]


def fragments_of(fragments: Sequence[Fragment]) -> Fragments:
    """The fragments of a spec, which may be a plain sequence, as `Fragments`."""
    if type(fragments) is tuple:  # sooner than to ask an abstract base class
        return Listed(fragments)
    return fragments if isinstance(fragments, Fragments) else Listed(fragments)


def fragment_boxes(fragment: Fragment) -> Iterator[tuple[Box, Box]]:
    """What a fragment holds: pairs of (block of the rank-local array, the same block in the global tensor)."""
    shape = fragment.local_shape
    held = [Box.of(shape)] if fragment.span is None else span_boxes(shape, *fragment.span)
    for box in held:
        if fragment.parts is None:
            yield box, _turned(box, fragment.axes)
            continue
        for part in fragment.parts:
            local = box & part.local
            if local:
                moved = local.shift([-a for a in part.local.start])
                yield local, _turned(moved, fragment.axes).shift(part.start)


def _turned(box: Box, axes: tuple[int | None, ...] | None) -> Box:
    """A block of a rank-local array in the dimensions of the tensor."""
    if axes is None:
        return box
    return Box(
        tuple(0 if a is None else box.start[a] for a in axes), tuple(1 if a is None else box.stop[a] for a in axes)
    )
