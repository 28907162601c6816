"""The chunks and items of a large `.metadata` as columns, without an object for each.

A save of two thousand ranks lists millions of chunks, each as a record of some seventy bytes that torch's classes and
Python's pickler (protocols 4 and 5) determine. `Columns` finds the records with exactly these bytes by comparing all of
them at once, and the pickle machine steps over runs of them. Names, paths and Sizes may be in the record or refer to
the memo. Everything else is left to the machine: other spellings, the first record of each class, records that a frame
of the pickle cuts in two.

The result is that of the machine alone: a run stands in for its records in the list or dict that they are put into. If
the pickle does anything else with the records, `Changes` is raised, and the machine parses the pickle alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...io.containers.pickle.memo import Changes
from ...io.containers.pickle.values import Size, size

Ints = NDArray[np.int64]
DIMS = 4  # dimensions of the tensors whose records are recognised
_BLOCK = 4 << 20  # bytes that are searched at a time
_PAD = 1024  # bytes behind a block, more than a record has
_LARGEST = 1 << 31  # bytes of a pickle whose positions and memo entries fit into 32 bits
_MADE = b")\x81\x94}\x94("  # an object without arguments, its dict of attributes, and the mark of their values
_NUMBERS = np.isin(np.arange(256), (0x4B, 0x4D, 0x4A, 0x8A))  # BININT1, BININT2, BININT, LONG1


class _Cursor:
    """Positions in many records at once. Records that differ from the expected bytes are dropped; ``columns`` has the
    values of the others."""

    def __init__(self, raw: NDArray[np.uint8], at: Ints, limit: int) -> None:
        self._raw = raw
        self._words = np.ndarray((len(raw) - 7,), "<u8", raw.data, strides=(1,))
        self._limit = limit  # references to the memo are smaller
        self.at = at
        self.columns: dict[str, NDArray[Any]] = {"start": at}

    def keep(self, which: NDArray[np.bool_]) -> None:
        if not which.all():
            self.at = self.at[which]
            self.columns = {name: column[which] for name, column in self.columns.items()}

    def exactly(self, text: bytes) -> None:
        word = int.from_bytes(text, "little")
        mask = (1 << 8 * len(text)) - 1
        self.keep(self._words[self.at] & np.uint64(mask) == np.uint64(word))
        self.at = self.at + len(text)

    def _reference(self) -> tuple[NDArray[np.bool_], Ints, Ints]:
        """Return which records have a reference to the memo here, its number, and the number of its bytes."""
        word = self._words[self.at]
        op = (word & np.uint64(0xFF)).astype(np.int64)
        long = op == 0x6A
        value = ((word >> np.uint64(8)) & np.where(long, np.uint64(0xFFFFFFFF), np.uint64(0xFF))).astype(np.int64)
        return (long | (op == 0x68)) & (value < self._limit), value, np.where(long, 5, 2)

    def get(self, name: str) -> None:
        """Read a reference to the memo."""
        found, value, width = self._reference()
        self.columns[name] = value
        self.at = self.at + width
        self.keep(found)

    def _number(self) -> tuple[NDArray[np.bool_], Ints, Ints]:
        """Return which records have a number here, the number, and the number of its bytes."""
        word = self._words[self.at]
        op = (word & np.uint64(0xFF)).astype(np.int64)
        found = _NUMBERS[op]
        rest = word >> np.uint64(8)
        bits = np.select([op == 0x4B, op == 0x4D, op == 0x4A], [8, 16, 32], 0).astype(np.uint64)
        value = (rest & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
        found &= ~((op == 0x4A) & (value >= 1 << 31))
        width = 1 + (bits >> np.uint64(3)).astype(np.int64)
        long = op == 0x8A
        if long.any():
            count = (rest & np.uint64(0xFF)).astype(np.int64)
            fits = long & (count > 0) & (count < 8)
            shown = np.where(fits, count, 1).astype(np.uint64) * np.uint64(8)
            large = self._words[np.where(fits, self.at + 2, 0)] & ((np.uint64(1) << shown) - np.uint64(1))
            value = np.where(fits, large.astype(np.int64), value)
            width = np.where(fits, 2 + count, width)
            found &= ~long | (fits & (large >> (shown - np.uint64(1)) == 0))
        return found, value, width

    def number(self, name: str) -> None:
        found, value, width = self._number()
        self.columns[name] = value
        self.at = self.at + width
        self.keep(found)

    def hint(self) -> None:
        """Step over a number or None, which is not needed."""
        found, _, width = self._number()
        none = self._raw[self.at] == 0x4E
        self.at = self.at + np.where(none, 1, width)
        self.keep(found | none)

    def text(self, name: str) -> None:
        """Read a short text with its memo entry, or a reference: ``name`` is -1 for a text, at ``name_at``."""
        inline = self._raw[self.at] == 0x8C
        length = self._raw[self.at + 1].astype(np.int64)
        begin = self.at + 2
        self.columns[f"{name}_at"], self.columns[f"{name}_length"] = begin, length
        found, value, width = self._reference()
        self.columns[name] = np.where(inline, -1, value)
        fine = np.where(inline, self._raw[begin + length] == 0x94, found)
        self.at = self.at + np.where(inline, length + 3, width)
        self.keep(fine)

    def sizes(self, name: str) -> None:
        """Read a torch.Size with its memo entries, whose ``name_ref`` is -1, or a reference to one."""
        found, value, width = self._reference()
        self.columns[f"{name}_class"] = value
        self.at = self.at + width
        self.keep(found)
        op = self._raw[self.at]
        marked = op == 0x28  # a tuple of four
        full = _NUMBERS[op] | marked
        self.at = self.at + marked
        active, dims = full, np.zeros(len(self.at), np.int64)
        values = np.zeros((len(self.at), DIMS), np.int64)
        for dim in range(DIMS):
            if not active.any():
                break
            found, value, width = self._number()
            active = active & found
            values[active, dim] = value[active]
            self.at = self.at + np.where(active, width, 0)
            dims += active
        closing = np.where(marked, 0x74, 0x84 + dims).astype(np.uint64)  # TUPLE, or TUPLE1 to TUPLE3
        closed = (self._words[self.at] & np.uint64(0xFFFFFFFFFFFF)) == (np.uint64(0x94529485_9400) | closing)
        closed &= np.where(marked, dims == 4, (dims > 0) & (dims < 4))
        self.columns[name], self.columns[f"{name}_dims"] = values, dims
        self.columns[f"{name}_ref"] = np.where(full, -1, self.columns[f"{name}_class"])
        self.at = self.at + np.where(full, 6, 0)
        self.keep(closed | ~full)


def _chunks(cursor: _Cursor) -> None:
    cursor.get("made")
    cursor.exactly(_MADE)
    cursor.get("k0")
    cursor.sizes("offset")
    cursor.get("k1")
    cursor.sizes("size")
    cursor.exactly(b"ub")


def _key(cursor: _Cursor) -> None:
    cursor.get("made")
    cursor.exactly(_MADE)
    cursor.get("k0")
    cursor.text("key")
    cursor.get("k1")
    cursor.hint()


def _pairs(cursor: _Cursor) -> None:
    _key(cursor)
    cursor.get("k2")
    cursor.sizes("start_of")
    cursor.exactly(b"ub")
    _place(cursor)


def _objects(cursor: _Cursor) -> None:
    """As `_pairs`, of an object, whose index has no offset (torch/distributed/checkpoint/metadata.py
    `MetadataIndex.__init__`)."""
    _key(cursor)
    cursor.exactly(b"ub")
    _place(cursor)


def _place(cursor: _Cursor) -> None:
    cursor.get("made2")
    cursor.exactly(_MADE)
    cursor.get("k3")
    cursor.text("path")
    cursor.get("k4")
    cursor.number("offset")
    cursor.get("k5")
    cursor.number("length")
    cursor.exactly(b"ub")


_WIDE = frozenset(("offset", "size", "start_of", "length"))  # columns of numbers that may be large


class Table:
    """Records of one kind as columns, and runs of them, which follow each other and refer to the same objects.

    Attributes
    ----------
    refs
        What each run refers to: a dict from the first record's number to the numbers of the memo entries.
    runs
        A dict from the first byte of each run to the numbers of its records.
    memo
        The first memo entry of each record, once it is used; else -1.
    slots
        Of each text and Size the number of its memo entry within the record; -1 where it is a reference.
    counts
        The number of memo entries of each record.
    latest
        The last memo entry that the texts and Sizes of each record refer to; -1 if all are in the record.
    """

    def __init__(
        self, blocks: list[dict[str, NDArray[Any]]], same: tuple[str, ...], parts: tuple[tuple[str, int], ...]
    ) -> None:
        names = list(blocks[0]) if blocks else []
        self.columns = {name: np.concatenate([block.pop(name) for block in blocks]) for name in names}
        self._keep_common([name for name in names if name.endswith("_class")])
        start, end = self.pop("start"), self["end"]
        breaks = np.ones(len(start) + 1, bool)
        refs = [self.pop(name) for name in same]
        if len(start):
            breaks[1:-1] = start[1:] != end[:-1]
            for column in refs:
                breaks[1:-1] |= column[1:] != column[:-1]
        edges = np.flatnonzero(breaks)
        first, stop = edges[:-1], edges[1:].tolist()
        begins, rows = start[first].tolist() if len(start) else [], first.tolist()
        self.runs: dict[int, tuple[int, int]] = dict(zip(begins, zip(rows, stop, strict=False), strict=True))
        held = [column[first].tolist() for column in refs] if len(start) else []
        self.refs = dict(zip(rows, zip(*held, strict=True), strict=False))
        self.memo = np.full(len(start), -1, np.int64)
        self.slots: dict[str, NDArray[np.int8]] = {}
        self.counts = np.zeros(len(start), np.int8)
        for name, entries in parts:  # in the order of the memo; a Size has three entries, its own is the last
            if not name:
                self.counts += np.int8(entries)
                continue
            inline = self.references(name) < 0
            self.slots[name] = np.where(inline, self.counts + (entries - 1), -1).astype(np.int8)
            self.counts += inline.astype(np.int8) * np.int8(entries)
        self.latest = np.full(len(start), -1, np.int64)
        for name in self.slots:
            np.maximum(self.latest, self.references(name), out=self.latest)

    def _keep_common(self, names: list[str]) -> None:
        """Keep the records whose Sizes are of the class that most records refer to."""
        columns = {name: self.columns.pop(name) for name in names}
        full = {name: self[name.replace("_class", "_ref")] < 0 for name in names}
        numbers, counts = np.unique(
            np.concatenate([columns[name][full[name]] for name in names] or [np.zeros(0, np.int64)]),
            return_counts=True,
        )
        self.size_class = int(numbers[counts.argmax()]) if len(numbers) else -1
        if len(numbers) > 1:
            fine = np.logical_and.reduce([(columns[name] == self.size_class) | ~full[name] for name in names])
            self.columns = {name: column[fine] for name, column in self.columns.items()}

    def __getitem__(self, name: str) -> Ints:
        column: Ints = self.columns[name] if self.columns else np.zeros(0, np.int64)
        return column

    def references(self, name: str) -> Ints:
        """Return the memo entries that a text or a Size refers to; -1 where it is in the record."""
        return self[f"{name}_ref" if f"{name}_ref" in self.columns else name]

    @property
    def sizes(self) -> list[str]:
        """The names of the columns of Sizes."""
        return [name for name in self.slots if f"{name}_dims" in self.columns]

    def pop(self, name: str) -> Ints:
        column: Ints = self.columns.pop(name, np.zeros(0, np.int64))
        return column


class Run:
    """Rows ``first`` to ``stop`` of a table; stands in for their records in a list or a dict."""

    __slots__ = ("first", "stop", "table")

    def __init__(self, table: Table, first: int, stop: int) -> None:
        self.table, self.first, self.stop = table, first, stop

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def rows(self) -> slice:
        return slice(self.first, self.stop)


class Skipping(dict[int, Any]):
    """A memo that finds the texts and sizes of the records that the machine stepped over. Its length is that of the
    entries that the machine itself has made."""

    def __init__(self, find: Callable[[int], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, n: int) -> Any:
        return self._find(n)


class Columns:
    """The records of one pickle. ``chunk``, ``key`` and ``item`` are the classes that the machine makes of them."""

    def __init__(self, data: bytes, chunk: Any, key: Any, item: Any) -> None:
        self._data = data
        found: tuple[list[Any], ...] = ([], [], [])
        for low in range(0, len(data) if len(data) < _LARGEST else 0, _BLOCK):
            _search(data, low, found)
        self.chunks = Table(found[0], ("made", "k0", "k1"), (("", 2), ("offset", 3), ("size", 3)))
        same: tuple[str, ...] = ("made", "k0", "k1", "k2", "made2", "k3", "k4", "k5")
        parts = (("", 2), ("key", 1), ("start_of", 3), ("", 2), ("path", 1))
        self.pairs = Table(found[1], same, parts)
        same = ("made", "k0", "k1", "made2", "k3", "k4", "k5")
        self.objects = Table(found[2], same, (("", 2), ("key", 1), ("", 2), ("path", 1)))
        self.tables = (self.chunks, self.pairs, self.objects)
        self._expected = {
            id(self.chunks): (chunk, "offsets", "sizes"),
            id(self.pairs): (key, "fqn", "index", "offset", item, "relative_path", "offset", "length"),
            id(self.objects): (key, "fqn", "index", item, "relative_path", "offset", "length"),
        }
        self._used: list[tuple[int, Run]] = []  # (first memo entry, run), in the order of the entries
        self.memo = Skipping(self._found)
        self.skipped = 0  # entries of the records that the machine stepped over
        self.starts = {at: (table, *bounds) for table in self.tables for at, bounds in table.runs.items()}

    def at(self, i: int, frame: int) -> tuple[list[Any], int, int] | None:
        """Return what the run of records at byte ``i`` puts on the stack, its end, and the number of its objects.

        None if no run begins there. Raises Changes if a record refers to what comes after it."""
        found = self.starts.get(i)
        if found is None:
            return None
        table, first, stop = found
        if frame:
            stop = first + int(np.searchsorted(table["end"][first:stop], frame, "right"))
        if stop == first or not self._refers(table, first):
            return None
        run = Run(table, first, stop)
        base = len(self.memo) + self.skipped
        ends = base + table.counts[run.rows].cumsum(dtype=np.int64)
        table.memo[first] = base
        table.memo[first + 1 : stop] = ends[:-1]
        # (most runs refer only to what was there before them)
        if table.latest[run.rows].max() >= base and (table.latest[run.rows] >= table.memo[run.rows]).any():
            raise Changes
        self._used.append((base, run))
        total = int(ends[-1]) - base
        self.skipped += total
        return [run] if table is self.chunks else [run, run], int(table["end"][stop - 1]), 7 * len(run) + total // 2

    def _refers(self, table: Table, first: int) -> bool:
        """Return whether a run refers to the expected classes and names of attributes."""
        try:
            if table.size_class >= 0 and self.memo[table.size_class] is not size:
                return False
            return all(map(self._is, map(self.memo.__getitem__, table.refs[first]), self._expected[id(table)]))
        except KeyError:
            return False

    @staticmethod
    def _is(value: Any, what: Any) -> bool:
        return bool(value == what) if type(what) is str and type(value) is str else value is what

    def _found(self, n: int) -> Any:
        """Return a memo entry of a record that the machine stepped over. Raises Changes for one that is mutable."""
        at = bisect_right(self._used, n, key=lambda used: used[0]) - 1
        if at < 0:
            raise KeyError(n)
        run = self._used[at][1]
        table = run.table
        row = run.first + int(np.searchsorted(table.memo[run.rows], n, "right")) - 1
        slot = n - int(table.memo[row])
        if slot >= table.counts[row]:
            raise KeyError(n)
        name = next((name for name, slots in table.slots.items() if slots[row] == slot), None)
        if name is None:
            raise Changes
        if name in table.sizes:
            return Size(table[name][row][: int(table[f"{name}_dims"][row])].tolist())
        begin, length = int(table[f"{name}_at"][row]), int(table[f"{name}_length"][row])
        return _decoded(self._data[begin : begin + length])

    def close(self) -> None:
        """Free the memory of the records; the memo refers to this object, and the object to the memo."""
        self.memo.clear()
        del self.memo, self.chunks, self.pairs, self.objects, self.tables, self.starts, self._used

    # -- the result

    def check(self, runs: list[Run]) -> None:
        """Raise Changes unless each run that the machine stepped over is in the result exactly once. Then look up the
        Sizes that records refer to."""
        if sorted(map(id, runs)) != sorted(id(run) for _, run in self._used):
            raise Changes
        if not runs:
            return
        real = np.fromiter(self.memo, np.int64, len(self.memo))
        first = np.array([base for base, _ in self._used], np.int64)
        ends = [run.table.memo[run.stop - 1] + run.table.counts[run.stop - 1] for _, run in self._used]
        at = np.searchsorted(first, real, "right") - 1
        if ((at >= 0) & (real < np.array(ends, np.int64)[at])).any():
            raise Changes
        for table in self.tables:
            for name in table.sizes:
                self._look_up(table, name)

    def _look_up(self, table: Table, name: str) -> None:
        """Put the Sizes that are references into their column. Raises Changes for a reference to anything else."""
        refs = table[f"{name}_ref"]
        named = np.flatnonzero((refs >= 0) & (table.memo >= 0))
        wanted, where = np.unique(refs[named], return_inverse=True)
        values, dims = np.zeros((len(wanted), DIMS), np.int64), np.full(len(wanted), -1, np.int64)
        for other in self.tables:
            used = np.flatnonzero(other.memo >= 0)
            if not len(used):
                continue
            at = np.searchsorted(other.memo[used], wanted, "right") - 1
            rows = used[np.maximum(at, 0)]
            slots = np.where(at < 0, -2, wanted - other.memo[rows])
            for part in other.sizes:
                right = slots == other.slots[part][rows]
                values[right], dims[right] = other[part][rows[right]], other[f"{part}_dims"][rows[right]]
        for n in np.flatnonzero(dims < 0).tolist():  # a Size that the machine itself has parsed
            value = self.memo[int(wanted[n])]
            if type(value) is not Size or not 0 < len(value) <= DIMS or not all(0 <= m < 1 << 62 for m in value):
                raise Changes
            values[n, : len(value)], dims[n] = value, len(value)
        table[name][named], table[f"{name}_dims"][named] = values[where], dims[where]

    def texts(self, table: Table, name: str, numbers: Texts) -> Ints:
        """Return the number of each used record's text. New texts are added to ``numbers``."""
        used = table.memo >= 0
        refs = table[name][used]
        found = np.zeros(len(refs), np.int64)
        inline = refs < 0
        begin = table[f"{name}_at"][used][inline].astype(np.int64)
        ends = begin + table[f"{name}_length"][used][inline]
        data = self._data
        found[inline] = [numbers[data[a:b]] for a, b in zip(begin.tolist(), ends.tolist(), strict=True)]
        unique, inverse = np.unique(refs[~inline], return_inverse=True)
        found[~inline] = np.array([numbers.of(self.memo[n]) for n in unique.tolist()], np.int64)[inverse]
        return found


def _search(data: bytes, low: int, found: tuple[list[Any], ...]) -> None:
    """Append the columns of the records that begin in a block."""
    raw = np.frombuffer(data, np.uint8, min(_BLOCK + _PAD, len(data) - low), low)
    count = min(_BLOCK, len(raw))
    if len(raw) < _BLOCK + _PAD:
        raw = np.append(raw, np.zeros(_PAD, np.uint8))
    at = np.flatnonzero(raw[:count] == 0x81)
    at = at[at > 6]  # a record that begins before the block is left to the machine
    at = at[(raw[at - 1] == 0x29) & (raw[at + 1] == 0x94) & (raw[at + 2] == 0x7D)]
    starts = at - np.where(raw[at - 6] == 0x6A, 6, 3)
    for parse, blocks in zip((_chunks, _pairs, _objects), found, strict=True):
        cursor = _Cursor(raw, starts, len(data))
        parse(cursor)
        columns = {**cursor.columns, "end": cursor.at}
        for name, column in columns.items():
            if name in ("start", "end") or name.endswith("_at"):
                column = column + low
            if name.endswith("_dims"):
                column = column.astype(np.int8)
            elif name not in _WIDE:
                column = column.astype(np.int32)
            columns[name] = column
        blocks.append(columns)


class Texts(dict[bytes, int]):
    """Numbers of texts, by their bytes in the pickle. ``numbers`` has them by the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def of(self, text: Any) -> int:
        if type(text) is not str:
            raise Changes
        return self.numbers.setdefault(text, len(self.numbers))

    def __missing__(self, raw: bytes) -> int:
        number = self[raw] = self.of(_decoded(raw))
        return number


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Changes from None
