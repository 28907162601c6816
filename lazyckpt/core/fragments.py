"""Sequences that create the fragments of a tensor on demand.

A tensor of a thousand ranks or a million chunks has many fragments, but a few facts determine them all. `Fragments` is
the base class of all such sequences. There are three kinds:

- `Blocks` (core/blocks.py): one fragment for each block of a regular grid or of a table;
- `Flat` (core/flat.py): flat intervals of the tensor's C order;
- `Composed` (core/compose.py): blocks of other tensors, such as the shards of ranks.

A `TensorSpec` may also have a plain sequence, such as a tuple: `fragments_of` accepts both.
tests/test_fragments.py checks the contract for each kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from .box import Box, Selection, Shape, span_boxes
from .extents import Extent, Packed
from .placement import Placement
from .specs import Fragment
from .table import Table

Find = Callable[[Packed], Extent]


class Fragments(Sequence[Fragment]):
    """A sequence that creates its fragments on demand.

    A subclass defines `meeting` and `__iter__`. All other methods have a default that is correct for any sequence; a
    subclass overrides those that it can answer better or faster.
    """

    __slots__ = ()

    @abstractmethod
    def meeting(self, want: Selection) -> Sequence[Fragment]:
        """Return the fragments that may hold selected elements, in order, without creating the others.

        Parameters
        ----------
        want
            The selected elements: ascending indices for each dimension of the tensor.

        Returns
        -------
        Every fragment that holds a selected element; one replica of each is enough. A fragment may omit parts that hold
        no selected element.
        """

    def replicas(self, want: Selection) -> Sequence[Fragment]:
        """Return what `meeting` returns, with all replicas of each fragment.

        Parameters
        ----------
        want
            The selected elements.
        """
        return self.meeting(want)

    def table(self, want: Selection, find: Find | None = None) -> Table | None:
        """Return the blocks that may hold selected elements as a table, if there are many and they are raw elements of
        one dtype that do not overlap; None: only `meeting` returns them.

        Parameters
        ----------
        want
            The selected elements, at least one.
        find
            A function that looks up where an archive or a chunk holds its elements; see `core.plan.plan`.
        """
        return None

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
        """Return the fragments that hold elements of a block, including the replicas that `meeting` returns.

        Parameters
        ----------
        box
            A block of the tensor.

        Returns
        -------
        ``self`` if all fragments do, since it may be more compact than a tuple.
        """
        held = self._inside(box)
        return held if len(held) < len(self) else self

    def _inside(self, box: Box) -> tuple[Fragment, ...]:
        near = self.meeting(tuple(map(range, box.start, box.stop))) if box else ()
        return tuple(f for f in near if any(globe & box for _, globe in fragment_boxes(f)))

    def only(self) -> Fragment | None:
        """Return the fragment if there is exactly one; None if there are more, or if counting would create them."""
        return None

    @property
    def intact(self) -> bool:
        """Whether every element of the tensor is known to be in an existing file. If False, only a plan can tell."""
        return False

    @property
    def cell(self) -> Shape | None:
        """The shape of the blocks, in elements, if they are known to form a regular grid, else None."""
        return None

    def packed(self) -> list[Packed]:
        """Return the archives and chunks that reading the whole tensor looks up, so that one pass can look up many.

        The list may be incomplete: a read looks up the others itself.
        """
        return []

    def file_paths(self) -> set[str]:
        """Return the paths of the files that hold the fragments."""
        return {fragment.extent.path for fragment in self}

    @property
    def shards(self) -> tuple[Placement, ...]:
        """The placements of the ranks' shards in the tensor, in rank order; empty if the tensor has no such shards."""
        return ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The coordinates of the first dimension of a tensor stacked from the steps of a run, else empty."""
        return ()


class Listed(Fragments):
    """A plain sequence of fragments, with the methods of `Fragments`."""

    __slots__ = ("fragments",)

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = fragments

    def meeting(self, want: Selection) -> Sequence[Fragment]:
        """Return all fragments: selecting some would take as long as planning all."""
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
    """Return the fragments of a spec as `Fragments`; a plain sequence is wrapped."""
    if type(fragments) is tuple:  # faster than isinstance with an abstract base class
        return Listed(fragments)
    return fragments if isinstance(fragments, Fragments) else Listed(fragments)


def fragment_boxes(fragment: Fragment) -> Iterator[tuple[Box, Box]]:
    """Yield what a fragment holds: pairs of (block of the rank-local array, the same block in the global tensor)."""
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
    """Return a block of a rank-local array in the dimensions of the tensor."""
    if axes is None:
        return box
    return Box(
        tuple(0 if a is None else box.start[a] for a in axes), tuple(1 if a is None else box.stop[a] for a in axes)
    )
