"""The chunks and items of a large `.metadata` as columns, without an object for each.

A save of two thousand ranks lists millions of chunks, each as a record of some seventy bytes that torch's classes and
Python's pickler (protocol 4) determine. `Columns` finds the records with exactly these bytes by comparing all of them
at once, and the pickle machine steps over runs of them. Everything else is left to the machine: other spellings, the
first record of each class, records that a frame of the pickle cuts in two.

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
DIMS = 3  # dimensions of the tensors whose records are recognised
_BLOCK = 4 << 20  # bytes that are searched at a time
_PAD = 1024  # bytes behind the end of the pickle, more than a record has
_MADE = b")\x81\x94}\x94("  # an object without arguments, its dict of attributes, and the mark of their values
_NUMBERS = np.isin(np.arange(256), (0x4B, 0x4D, 0x4A, 0x8A))  # BININT1, BININT2, BININT, LONG1
_CHUNK_MEMO = 8  # memo entries of a chunk: the object, its dict, twice a tuple, its arguments, its Size


class _Cursor:
    """Positions in many records at once. Records that differ from the expected bytes are dropped; ``columns`` has the
    values of the others."""

    def __init__(self, raw: NDArray[np.uint8], at: Ints) -> None:
        self._raw = raw
        self._words = np.ndarray((len(raw) - 7,), "<u8", raw.data, strides=(1,))
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

    def get(self, name: str) -> None:
        """Read a reference to the memo."""
        word = self._words[self.at]
        op = (word & np.uint64(0xFF)).astype(np.int64)
        long = op == 0x6A
        value = ((word >> np.uint64(8)) & np.where(long, np.uint64(0xFFFFFFFF), np.uint64(0xFF))).astype(np.int64)
        self.columns[name] = value
        self.at = self.at + np.where(long, 5, 2)
        self.keep(long | (op == 0x68))

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

    def text(self, name: str) -> None:
        """Read a short text with its memo entry, or a reference: ``name`` is -1 for a text, at ``name_at``."""
        inline = self._raw[self.at] == 0x8C
        length = self._raw[self.at + 1].astype(np.int64)
        begin = self.at + 2
        ends = begin + length
        self.columns[f"{name}_at"], self.columns[f"{name}_length"] = begin, length
        word = self._words[self.at]
        op = self._raw[self.at]
        long = op == 0x6A
        value = ((word >> np.uint64(8)) & np.where(long, np.uint64(0xFFFFFFFF), np.uint64(0xFF))).astype(np.int64)
        self.columns[name] = np.where(inline, -1, value)
        fine = np.where(inline, self._raw[ends] == 0x94, long | (op == 0x68))
        self.at = np.where(inline, ends + 1, self.at + np.where(long, 5, 2))
        self.keep(fine)

    def sizes(self, name: str, refers: bool) -> None:
        """Read a torch.Size with its memo entries; with ``refers`` also a reference to one (``name_ref``, else -1)."""
        self.get(f"{name}_class")
        full = _NUMBERS[self._raw[self.at]]
        if not refers:
            self.keep(full)
            full = full[full]
        active, dims = full, np.zeros(len(self.at), np.int64)
        values = np.zeros((len(self.at), DIMS), np.int64)
        for dim in range(DIMS):
            found, value, width = self._number()
            active = active & found
            values[active, dim] = value[active]
            self.at = self.at + np.where(active, width, 0)
            dims += active
        word = self._words[self.at]
        closed = (word & np.uint64(0xFFFFFFFFFFFF)) == (np.uint64(0x94529485_9400) | (dims + 0x84).astype(np.uint64))
        self.columns[name], self.columns[f"{name}_dims"] = values, dims
        if refers:
            self.columns[f"{name}_ref"] = np.where(full, -1, self.columns[f"{name}_class"])
        self.at = self.at + np.where(full, 6, 0)
        self.keep(np.where(full, closed & (dims > 0), True))


def _chunks(cursor: _Cursor) -> None:
    cursor.get("made")
    cursor.exactly(_MADE)
    cursor.get("k0")
    cursor.sizes("offset", False)
    cursor.get("k1")
    cursor.sizes("size", False)
    cursor.exactly(b"ub")


def _pairs(cursor: _Cursor) -> None:
    cursor.get("made")
    cursor.exactly(_MADE)
    cursor.get("k0")
    cursor.text("key")
    cursor.get("k1")
    cursor.number("index")
    cursor.get("k2")
    cursor.sizes("start_of", True)
    cursor.exactly(b"ub")
    cursor.get("made2")
    cursor.exactly(_MADE)
    cursor.get("k3")
    cursor.text("path")
    cursor.get("k4")
    cursor.number("offset")
    cursor.get("k5")
    cursor.number("length")
    cursor.exactly(b"ub")


class Table:
    """Records of one kind as columns, and runs of them, which follow each other and refer to the same objects."""

    def __init__(self, blocks: list[dict[str, NDArray[Any]]], same: tuple[str, ...]) -> None:
        self.columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]} if blocks else {}
        start, end = self["start"], self["end"]
        breaks = np.ones(len(start) + 1, bool)
        if len(start):
            breaks[1:-1] = start[1:] != end[:-1]
            for name in same:
                breaks[1:-1] |= self[name][1:] != self[name][:-1]
        edges = np.flatnonzero(breaks)
        first, stop = edges[:-1].tolist(), edges[1:].tolist()
        self.runs: dict[int, tuple[int, int]] = {}
        if len(start):
            self.runs = dict(zip(start[edges[:-1]].tolist(), zip(first, stop, strict=True), strict=True))
        self.memo = np.full(len(start), -1, np.int64)  # the first memo entry of each record, once it is used
        self.columns.pop("index", None)  # a hint, which is not needed

    def __getitem__(self, name: str) -> Ints:
        column: Ints = self.columns[name] if self.columns else np.zeros(0, np.int64)
        return column


class Run:
    """Rows ``first`` to ``stop`` of a table; stands in for their records in a list or a dict."""

    __slots__ = ("first", "stop", "table")

    def __init__(self, table: Table, first: int, stop: int) -> None:
        self.table, self.first, self.stop = table, first, stop

    def __len__(self) -> int:
        return self.stop - self.first


class Skipping(dict[int, Any]):
    """A memo that counts the entries of the records that the machine stepped over, and finds their texts and sizes."""

    def __init__(self, find: Callable[[int], Any]) -> None:
        super().__init__()
        self.skipped = 0
        self._find = find

    def __len__(self) -> int:
        return dict.__len__(self) + self.skipped

    def __missing__(self, n: int) -> Any:
        return self._find(n)


class Columns:
    """The records of one pickle. ``chunk``, ``key`` and ``item`` are the classes that the machine makes of them."""

    def __init__(self, data: bytes, chunk: Any, key: Any, item: Any) -> None:
        self._data = data
        raw = np.frombuffer(data + bytes(_PAD), np.uint8)
        found: tuple[list[Any], list[Any]] = ([], [])
        for low in range(0, len(data), _BLOCK):
            at = low + np.flatnonzero(raw[low : min(low + _BLOCK, len(data))] == 0x81)
            at = at[(at > 6)]
            at = at[(raw[at - 1] == 0x29) & (raw[at + 1] == 0x94) & (raw[at + 2] == 0x7D)]
            long = raw[at - 6] == 0x6A
            starts = (at - np.where(long, 6, 3)).astype(np.int64)
            for parse, blocks in zip((_chunks, _pairs), found, strict=True):
                cursor = _Cursor(raw, starts)
                parse(cursor)
                blocks.append({**cursor.columns, "end": cursor.at})
        shared = ("made", "k0", "k1", "offset_class", "size_class")
        self.chunks = Table(found[0], shared)
        refs = ("made", "k0", "k1", "k2", "made2", "k3", "k4", "k5")
        self.pairs = Table(found[1], refs)
        self._chunk = (
            (chunk, "made"),
            ("offsets", "k0"),
            (size, "offset_class"),
            ("sizes", "k1"),
            (size, "size_class"),
        )
        self._pair = (
            (key, "made"), ("fqn", "k0"), ("index", "k1"), ("offset", "k2"),
            (item, "made2"), ("relative_path", "k3"), ("offset", "k4"), ("length", "k5"),
        )  # fmt: skip
        self._used: list[tuple[int, Run]] = []  # (first memo entry, run), in the order of the entries
        self.memo = Skipping(self._found)
        self._chunk_rows: Ints = np.zeros(0, np.int64)
        self._sorted: Ints | None = None

    def at(self, i: int, frame: int) -> tuple[list[Any], int, int] | None:
        """Return what the run of records at byte ``i`` puts on the stack, its end, and the number of its objects.

        None if no run begins there."""
        for table, expected in ((self.chunks, self._chunk), (self.pairs, self._pair)):
            bounds = table.runs.get(i)
            if bounds is None:
                continue
            first, stop = bounds
            if frame:
                stop = first + int(np.searchsorted(table["end"][first:stop], frame, "right"))
            if stop == first or not self._refers(table, first, expected):
                return None
            run = Run(table, first, stop)
            if table is self.pairs and not self._sizes_known(run):
                return None
            base = len(self.memo)
            counts = self._counts(run)
            table.memo[first:stop] = base + np.append(0, counts.cumsum()[:-1])
            self._used.append((base, run))
            total = int(counts.sum())
            self.memo.skipped += total
            return [run] if table is self.chunks else [run, run], int(table["end"][stop - 1]), 7 * len(run) + total // 2
        return None

    def _refers(self, table: Table, row: int, expected: tuple[tuple[Any, str], ...]) -> bool:
        try:
            return all(self._is(self.memo[int(table[name][row])], what) for what, name in expected)
        except KeyError:
            return False

    @staticmethod
    def _is(value: Any, what: Any) -> bool:
        return bool(value == what) if type(what) is str and type(value) is str else value is what

    def _sizes_known(self, run: Run) -> bool:
        """Return whether the Sizes of the records in full name the class torch.Size."""
        part = slice(run.first, run.stop)
        named = self.pairs["start_of_class"][part][self.pairs["start_of_ref"][part] < 0]
        return all(self.memo.get(n) is size for n in np.unique(named).tolist())

    def _counts(self, run: Run) -> Ints:
        """Return the number of memo entries of each record."""
        if run.table is self.chunks:
            return np.full(len(run), _CHUNK_MEMO, np.int64)
        part = slice(run.first, run.stop)
        texts = (self.pairs["key"][part] < 0).astype(np.int64) + (self.pairs["path"][part] < 0)
        return 4 + texts + 3 * (self.pairs["start_of_ref"][part] < 0)

    def _place(self, n: int) -> tuple[Table, int, int]:
        """Return the record that a memo entry belongs to, and the number of the entry in the record."""
        at = bisect_right(self._used, n, key=lambda used: used[0]) - 1
        if at >= 0:
            run = self._used[at][1]
            row = run.first + int(np.searchsorted(run.table.memo[run.first : run.stop], n, "right")) - 1
            slot = n - int(run.table.memo[row])
            if row >= run.first and slot < int(self._counts(Run(run.table, row, row + 1))[0]):
                return run.table, row, slot
        raise KeyError(n)

    def _found(self, n: int) -> Any:
        """Return a memo entry of a record that the machine stepped over. Raises Changes for one that is mutable."""
        table, row, slot = self._place(n)
        if table is self.chunks and slot in (4, 7):
            name = "offset" if slot == 4 else "size"
            return Size(table[name][row][: int(table[f"{name}_dims"][row])].tolist())
        if table is self.pairs:
            inline = self.pairs["key"][row] < 0
            if inline and slot == 2:
                return self._text("key", row)
            full = self.pairs["start_of_ref"][row] < 0
            if full and slot == 4 + int(inline):
                return Size(self.pairs["start_of"][row][: int(self.pairs["start_of_dims"][row])].tolist())
            if self.pairs["path"][row] < 0 and slot == 4 + int(inline) + 3 * int(full):
                return self._text("path", row)
        raise Changes

    def _text(self, name: str, row: int) -> str:
        begin, length = int(self.pairs[f"{name}_at"][row]), int(self.pairs[f"{name}_length"][row])
        return self._data[begin : begin + length].decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Free the memory of the records; the memo refers to this object, and the object to the memo."""
        self.memo.clear()
        del self.memo, self.chunks, self.pairs, self._used

    # -- the result

    def check(self, runs: list[Run]) -> None:
        """Raise Changes unless each run that the machine stepped over is in the result exactly once."""
        if sorted(map(id, runs)) != sorted(id(run) for _, run in self._used):
            raise Changes
        real = np.fromiter(self.memo, np.int64, dict.__len__(self.memo))
        first = np.array([base for base, _ in self._used], np.int64)
        counts = [int(self._counts(Run(run.table, run.stop - 1, run.stop))[0]) for _, run in self._used]
        last = np.array([int(run.table.memo[run.stop - 1]) for _, run in self._used], np.int64) + counts
        at = np.searchsorted(first, real, "right") - 1
        if ((at >= 0) & (real < last[at])).any():
            raise Changes

    def starts(self, run: Run) -> tuple[Ints, Ints]:
        """Return the offsets of the chunks of a run of items, and the numbers of their dimensions."""
        part = slice(run.first, run.stop)
        values, dims = self.pairs["start_of"][part], self.pairs["start_of_dims"][part]
        refs = self.pairs["start_of_ref"][part]
        named = np.flatnonzero(refs >= 0)
        if len(named):
            values, dims = values.copy(), dims.copy()
            rows = np.searchsorted(self._chunk_memo(), refs[named], "right") - 1
            order = self._chunk_rows[rows]
            right = (rows >= 0) & (refs[named] - self.chunks.memo[order] == 4)
            values[named[right]] = self.chunks["offset"][order[right]]
            dims[named[right]] = self.chunks["offset_dims"][order[right]]
            for at in named[~right].tolist():  # a Size that the machine itself has parsed
                value = self.memo[int(refs[at])]
                if (
                    not isinstance(value, Size)
                    or not 0 < len(value) <= DIMS
                    or not all(0 <= n < 1 << 62 for n in value)
                ):
                    raise Changes
                values[at, : len(value)], dims[at] = value, len(value)
        return values, dims

    def _chunk_memo(self) -> Ints:
        if self._sorted is None:
            used = np.flatnonzero(self.chunks.memo >= 0)
            order = used[np.argsort(self.chunks.memo[used], kind="stable")]
            self._chunk_rows, self._sorted = order, self.chunks.memo[order]
        return self._sorted

    def texts(self, name: str, run: Run, numbers: Texts) -> Ints:
        """Return the number of each record's text. New texts are added to ``numbers``."""
        part = slice(run.first, run.stop)
        refs = self.pairs[name][part]
        inline = np.flatnonzero(refs < 0)
        if len(inline):
            begin = self.pairs[f"{name}_at"][part][inline]
            spans = zip(begin.tolist(), (begin + self.pairs[f"{name}_length"][part][inline]).tolist(), strict=True)
            data = self._data
            found = np.zeros(len(refs), np.int64)
            found[inline] = [numbers[data[a:b]] for a, b in spans]
            if len(inline) == len(refs):
                return found
            others = np.flatnonzero(refs >= 0)
            found[others] = self._referred(refs[others], numbers)
            return found
        return self._referred(refs, numbers)

    def _referred(self, refs: Ints, numbers: Texts) -> Ints:
        unique, inverse = np.unique(refs, return_inverse=True)
        found: Ints = np.array([numbers.of(self.memo[n]) for n in unique.tolist()], np.int64)[inverse]
        return found


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
        number = self[raw] = self.of(raw.decode("utf-8", "surrogatepass"))
        return number
