"""Tables of results: a row for each tensor, looked up by number or name, shown as text and HTML."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any, Protocol, Self, TypeVar, overload

from ..core.names import shortened
from ..core.units import columns_of, padded
from ..errors import TensorNotFoundError, and_more
from ..markup import cell, page, table

_ROWS = 40  # rows that a repr prints
_LONG = 80  # characters of text that a table in HTML breaks into lines


class Row(Protocol):
    """A row of a table: a dataclass of results for one tensor."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    def as_dict(self) -> dict[str, Any]:
        """Return the columns as plain objects."""


R = TypeVar("R", bound=Row, covariant=True)


class Rows(Sequence[R]):
    """A sequence of rows.

    Parameters
    ----------
    rows
        The rows.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[R]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[R]:
        return iter(self._rows)

    @overload
    def __getitem__(self, key: int | str) -> R: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | str | slice) -> R | Self:
        if isinstance(key, str):
            for one in self._searched():
                if one.name == key:
                    return one
            raise TensorNotFoundError(f"there is no row {key!r} among {len(self):,}")
        return type(self)(self._rows[key]) if isinstance(key, slice) else self._rows[key]

    def _searched(self) -> Iterator[R]:
        """Yield the rows in the order in which a name is looked up."""
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._rows,)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain objects (`as_dict` of each)."""
        return [one.as_dict() for one in self._rows]

    @abstractmethod
    def lines(self, limit: int | None = None) -> list[tuple[str, ...]]:
        """Return header and rows as text, padded to columns.

        Parameters
        ----------
        limit
            Show only the first and last rows if there are more than this number.

        Returns
        -------
        list of tuple of str
            A tuple of cells for each line.
        """

    def _shown(self, limit: int | None, cells: Callable[[R], tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return the cells of the rows; of more than ``limit``, those of the first and the last ones, and how many lie
        between them."""
        if limit is None or len(self) <= limit:
            return [cells(one) for one in self._rows]
        half = limit // 2
        first, last = ([cells(one) for one in some] for some in (self._rows[:half], self._rows[-half:]))
        return [*first, (and_more(len(self) - 2 * half), ""), *last]

    def _text(self, limit: int | None) -> str:
        return "\n".join("  ".join(cells).rstrip() for cells in self.lines(limit))

    def __str__(self) -> str:
        return self._text(None)

    def __repr__(self) -> str:
        return self._text(_ROWS)

    def _repr_html_(self) -> str:
        head, *lines = self.lines(_ROWS)
        titles = [cell.strip() for cell in head]
        shown = [list(self._html(titles, line)) for line in lines]
        total = shown.pop() if shown and self._has_total else ()
        return page([table([(title, self._css(title, "")) for title in titles], shown, total)])

    @property
    def _has_total(self) -> bool:
        """Whether the last line is a total of the others."""
        return False

    def _html(self, titles: Sequence[str], line: Sequence[str]) -> Iterator[str]:
        """Yield the cells of a line as HTML. The last of fewer cells than titles takes the place of the rest."""
        for c, one in enumerate(line):
            if c == len(line) - 1 and len(line) < len(titles):
                yield cell(escape(one.strip()), "w", len(titles) - c)
            else:
                css = self._css(titles[c], one)
                yield cell(self._inside(titles[c], one), "w" if css == "l" and len(one.strip()) > _LONG else css)

    def _inside(self, title: str, cell: str) -> str:
        """Return a cell of a column as HTML."""
        return escape(cell.strip())

    @abstractmethod
    def _css(self, title: str, cell: str) -> str:
        """Return the class of a cell of a column, or of its title (""): "l" for text, "bad" for what stands out."""


def aligned(lines: Sequence[Sequence[str]], left: Iterable[str]) -> list[tuple[str, ...]]:
    """Return lines with their cells padded to columns.

    Parameters
    ----------
    lines
        The cells of each line. The first line has the titles. The last of fewer cells than titles is not padded.
    left
        The titles of the columns that are aligned to the left.
    """
    head = lines[0]
    padded_lines = [line if len(line) == len(head) else line[:-1] for line in lines]
    widths = [max(columns_of(line[c]) for line in padded_lines if c < len(line)) for c in range(len(head))]
    sides = [title not in set(left) for title in head]
    return [
        (
            *(padded(cell, width, right) for right, cell, width in zip(sides, line, widths, strict=False)),
            *whole[len(line) :],
        )
        for line, whole in zip(padded_lines, lines, strict=True)
    ]


def printed(name: str) -> str:
    """Return a name for a cell: shortened, and quoted if it is empty or has outer spaces or characters that terminals
    do not print."""
    name = shortened(name)
    return name if name and name.isprintable() and name == name.strip() else repr(name)
