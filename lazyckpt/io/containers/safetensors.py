"""The index of a safetensors file, from its header.

The checks are those of the reference implementation (safetensors 0.8 src/tensor.rs `Metadata::validate`): no gaps, no
overlaps, no bytes after the last tensor.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.box import Shape, fits
from ...core.columns import Extents, Kind
from ...core.dtypes import F4_E2M1FN_X2, FROM_SAFETENSORS, U8
from ...core.index import FileInfo
from ...errors import CorruptError, Problem
from ..storage.base import Store
from ..storage.streams import StoreFile

MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
# bits per element; the 4- and 6-bit dtypes are packed, so their shape differs from that of torch's tensor
_BITS = {name: dtype.itemsize * 8 for name, dtype in FROM_SAFETENSORS.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class SafetensorsFile(NamedTuple):
    """The index of one file: ``extents`` by name in data order, the header's ``__metadata__``, and ``notes`` about
    tensors that torch cannot represent."""

    path: str
    info: FileInfo
    extents: Extents
    metadata: dict[str, str]
    notes: list[Problem]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied tensors that are stored only under another name, from the header's metadata: alias -> stored name
        (bindings/python/py_src/safetensors/torch.py `save_model`)."""
        return {
            a: name
            for a, name in self.metadata.items()
            if name in self.extents and a not in self.extents and a != "format"  # its value is "pt", "tf", ...
        }


def is_safetensors(head: bytes, size: int) -> bool:
    """Return whether a file of ``size`` bytes with these first bytes can be safetensors: a length, then JSON."""
    if len(head) < 9 or head[8:9] not in (b"{", b" "):
        return False
    return int.from_bytes(head[:8], "little") < 1 << 40 or size < 16


def read_safetensors(store: Store, path: str, start: int = 0) -> SafetensorsFile:
    """Index a safetensors file, or the part of a file from byte ``start`` on. Raises CorruptError, MissingFileError."""
    file = StoreFile(store, path)
    if start:
        file = StoreFile(store, path, window=(start, max(0, file.size - start)))
    where = file.where
    if file.size < 8:
        raise CorruptError(
            f"{where}: {file.size} bytes, a safetensors file begins with 8 for its header's length: truncated?"
        )
    length = int.from_bytes(file.at(0, 8), "little")
    if length > MAX_HEADER:
        file.refuse_pointer(file.at(0, min(file.size, 64)))
        raise CorruptError(
            f"{where}: the header claims {length:,} bytes, more than the {MAX_HEADER:,} that the format allows"
        )
    if 8 + length > file.size:
        raise CorruptError(f"{where}: the header claims {length:,} bytes, the file has {file.size:,}: truncated?")
    size = file.size - 8 - length
    header = _header(where, file.at(8, length))
    metadata = {} if header.metadata is None else header.metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{where}: __metadata__ is not an object of strings")
    ends = header.ends
    if (ends > size).any():
        n = int(np.flatnonzero(ends > size)[0])
        raise CorruptError(
            f"{where}: {header.names[n]!r} ends at byte {ends[n]:,} of the data, which has {size:,}: truncated?"
        )
    notes: list[Problem] = []
    kinds, unsupported = _kinds(header)
    for n, name in enumerate(header.names) if unsupported else ():
        if header.numbers[n] in unsupported:
            kind, shape = header.kinds[header.numbers[n]]
            line = f"{name!r} is {kind} of shape {list(shape)}, which torch cannot hold: read as its packed bytes"
            notes.append(Problem("unsupported-tensor", line, name))
    order = _order(where, header, size)
    names, numbers, begins = header.names, header.numbers, header.begins
    if order is not None:
        names, numbers, begins = [names[n] for n in order], numbers[order], begins[order]
    offsets = array("q", (begins + (file.start + 8 + length)).tobytes())
    rows = dict(zip(names, range(len(names)), strict=True))
    return SafetensorsFile(
        path, file.info, Extents(path, rows, offsets, array("I", numbers.tobytes()), kinds), metadata, notes
    )


class Header(NamedTuple):
    """The entries of a header as columns, in the order of the header. ``kinds`` are the different (dtype, shape) pairs,
    ``numbers`` the number of each tensor's kind."""

    metadata: Any
    names: Sequence[str]
    numbers: NDArray[np.uintc]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    kinds: Sequence[tuple[str, Shape]]


def _header(where: str, raw: bytes) -> Header:
    """Return the entries of a header. Raises CorruptError."""
    found = _usual(where, raw)
    if found is not None:
        return found
    header = _json(where, raw)
    metadata = header.pop("__metadata__", None)
    entries = [_entry(where, name, entry) for name, entry in header.items()]
    kinds: dict[tuple[str, Shape], int] = {}
    numbers = np.array([kinds.setdefault((kind, shape), len(kinds)) for kind, shape, _, _ in entries], np.uintc)
    begins, ends = (np.array([e[n] for e in entries], np.int64) for n in (2, 3))
    return Header(metadata, list(header), numbers, begins, ends, list(kinds))


# -- Headers of the usual spelling: no escapes, the entries' keys in the order of the reference implementation.

_METADATA = '{"__metadata__":'
_PIECE = 1 << 18  # characters that are split at a time, so that what is not a name is freed again
_TEXTS = 10  # texts of an entry between quotation marks


class _Spelling:
    """Headers with a ``gap`` behind every comma and colon: none, or a space."""

    def __init__(self, gap: str) -> None:
        number = r"(?:0|[1-9]\d{0,17})"
        self.gap = gap
        self.shape = re.compile(rf":{gap}\[({number}(?:,{gap}{number})*)?\],{gap}", re.ASCII)
        self.offsets = re.compile(rf"(?:,{gap}:{gap}\[{number},{gap}{number}\]\}})+", re.ASCII)
        self.between = f",{gap}:{gap}["  # of the offsets of an entry and those of the next one
        # the texts that all entries have, by their number; the others are the name (1), dtype (5), shape (8), offsets
        self.fixed = {2: f":{gap}{{", 3: "dtype", 4: f":{gap}", 6: f",{gap}", 7: "shape", 9: "data_offsets"}


_SPELLINGS = {gap: _Spelling(gap) for gap in ("", " ")}  # the reference implementation's, and that of Python's json


def _usual(where: str, raw: bytes) -> Header | None:
    """Return the entries of a valid header of a usual spelling; None for any other, which `_json` has to parse."""
    codes = np.frombuffer(raw, np.uint8)
    if (codes < 0x20).any() or (codes == 0x5C).any():
        return None
    try:
        text = raw.decode("utf-8").rstrip(" ")
    except UnicodeDecodeError:
        return None
    colon = text.find('":')
    spelling = _SPELLINGS[" " if text[colon + 2 : colon + 3] == " " else ""]
    at, metadata, lead = 1, None, f",{spelling.gap}"
    if text.startswith(_METADATA):
        try:
            metadata, at = _decoder(where).raw_decode(text, len(_METADATA + spelling.gap))
        except (ValueError, RecursionError, CorruptError):
            return None
        lead = ""
    end = len(text) - 1
    if not text.startswith("{") or text[end:] != "}" or at >= end:
        return None
    names: list[str] = []
    numbered: dict[tuple[str, str], int] = {}
    numbers, offsets = [], []
    while at < end:
        stop = text.find("},", at + _PIECE, end) + 1 or end
        found = _entries(lead + text[at:stop], spelling, names, numbered)
        if found is None:
            return None
        numbers.append(found[0])
        offsets.append(found[1])
        at, lead = stop, ""
    unique = set(names)
    if len(unique) < len(names) or "__metadata__" in unique:
        return None
    kinds = []
    for dtype, text in numbered:
        shape = spelling.shape.fullmatch(text)
        if shape is None:
            return None
        kinds.append((dtype, tuple(map(int, shape[1].split(","))) if shape[1] else ()))
    if not all(dtype in _BITS and len(shape) <= 64 and fits(shape, 1) for dtype, shape in kinds):
        return None
    bits = [prod(shape) * _BITS[dtype] for dtype, shape in kinds]
    if any(n % 8 or n >= 1 << 62 for n in bits):
        return None
    kind, (begins, ends) = np.concatenate(numbers), np.concatenate(offsets).T
    if not np.array_equal(ends - begins, np.array(bits, np.int64)[kind] // 8):
        return None
    return Header(metadata, names, kind, begins, ends, kinds)


def _entries(
    text: str, spelling: _Spelling, names: list[str], numbered: dict[tuple[str, str], int]
) -> tuple[NDArray[np.uintc], NDArray[np.int64]] | None:
    """Return the numbers of the entries' kinds and their offsets [entries, 2], and add the names and new kinds."""
    parts = text.split('"')
    count, rest = divmod(len(parts) - 1, _TEXTS)
    if rest or any(parts[n::_TEXTS].count(fixed) != count for n, fixed in spelling.fixed.items()):
        return None
    places = "".join(parts[::_TEXTS])
    if spelling.offsets.fullmatch(places) is None:
        return None
    digits = places.replace(spelling.between, ",").replace("]}", "")
    numbers = [
        numbered.setdefault(kind, len(numbered)) for kind in zip(parts[5::_TEXTS], parts[8::_TEXTS], strict=True)
    ]
    names += parts[1::_TEXTS]
    return np.array(numbers, np.uintc), np.fromstring(digits[1:], np.int64, sep=",").reshape(count, 2)


def _kinds(header: Header) -> tuple[list[Kind], set[int]]:
    """Return the kinds of tensors as torch holds them, and the numbers of those that it cannot hold."""
    found: list[Kind] = []
    unsupported = set()
    for n, (kind, shape) in enumerate(header.kinds):
        dtype = FROM_SAFETENSORS.get(kind)
        if dtype is not None:
            found.append((shape, dtype))
        elif kind == "F4" and shape and shape[-1] % 2 == 0:
            found.append(((*shape[:-1], shape[-1] // 2), F4_E2M1FN_X2))
        else:
            unsupported.add(n)
            found.append(((prod(shape) * _BITS[kind] // 8,), U8))
    return found, unsupported


def _decoder(where: str) -> json.JSONDecoder:
    """Return a decoder that rejects an object with a repeated key, and numbers that are not JSON."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CorruptError(f"{where}: the header names {twice!r} twice")
        return table

    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=_no_constant)


def _json(where: str, raw: bytes) -> dict[str, Any]:
    try:
        header = _decoder(where).decode(raw.decode("utf-8"))
    except CorruptError:
        raise
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where}: the header is not valid JSON ({str(e)[:120]}): the file is damaged") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{where}: the header is not a JSON object")
    return header


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _entry(where: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CorruptError(f"{where}: the entry of {name!r} lacks dtype, shape or data_offsets") from None
    numbers = [begin, end, *shape] if isinstance(shape, list) else [None]
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers) or len(shape) > 64:
        raise CorruptError(
            f"{where}: {name!r} has shape {str(shape)[:80]} and offsets [{str(begin)[:40]}, {str(end)[:40]}]"
        )
    if not isinstance(kind, str) or kind not in _BITS:
        raise CorruptError(f"{where}: {name!r} has the dtype {str(kind)[:40]!r}, which safetensors does not know")
    if not fits(shape, 1) or any("\ud800" <= c <= "\udfff" for c in name):
        raise CorruptError(f"{where}: {name[:80]!r} has the shape {str(shape)[:80]}: no such tensor, or no such name")
    bits = prod(shape) * _BITS[kind]
    if begin > end or bits != (end - begin) * 8:
        raise CorruptError(
            f"{where}: {name!r} is {kind} of shape {shape}, {bits // 8:,} bytes, but its offsets span {end - begin:,}"
        )
    return kind, tuple(shape), begin, end


def _order(where: str, header: Header, size: int) -> list[int] | None:
    """Return the tensors in data order, None if they are in it. Raises CorruptError for gaps and overlaps."""
    begins, ends = header.begins, header.ends
    follows = len(begins) > 0 and np.array_equal(begins, np.append(0, ends[:-1])) and ends[-1] == size
    if follows and (begins < ends).all():
        return None
    spans = sorted(zip(begins.tolist(), ends.tolist(), header.names, range(len(begins)), strict=True))
    at = 0
    for begin, end, name, _ in spans:
        if begin != at:
            raise CorruptError(
                f"{where}: {name!r} begins at byte {begin:,} of the data, but the one before it ends at {at:,}: "
                f"{'they overlap' if begin < at else 'a gap'}"
            )
        at = end
    if at != size:
        raise CorruptError(
            f"{where}: the tensors end at byte {at:,} of the data, which has {size:,}: the file is damaged"
        )
    return [n for _, _, _, n in spans]
