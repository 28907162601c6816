"""The index of a safetensors file, from its header.

The checks are those of the reference implementation (safetensors 0.8 src/tensor.rs `Metadata::validate`): no gaps, no
overlaps, no bytes after the last tensor.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any, NamedTuple

from ...core.box import c_strides, fits
from ...core.dtypes import F4_E2M1FN_X2, FROM_SAFETENSORS, U8
from ...core.index import Extent, FileInfo
from ...errors import CorruptError, Problem
from ..storage.base import Store, StoreFile

MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
# bits per element; the 4- and 6-bit dtypes are packed, so their shape differs from that of torch's tensor
_BITS = {name: dtype.itemsize * 8 for name, dtype in FROM_SAFETENSORS.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class SafetensorsFile(NamedTuple):
    """The index of one file: ``extents`` by name in data order, the header's ``__metadata__``, and ``notes`` about
    tensors that torch cannot represent."""

    path: str
    info: FileInfo
    extents: dict[str, Extent]
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
        raise CorruptError(
            f"{where}: the header claims {length:,} bytes, more than the {MAX_HEADER:,} that the format allows"
        )
    if 8 + length > file.size:
        raise CorruptError(f"{where}: the header claims {length:,} bytes, the file has {file.size:,}: truncated?")
    header = _json(where, file.at(8, length))
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{where}: __metadata__ is not an object of strings")

    begin_data, size = file.start + 8 + length, file.size - 8 - length
    extents: dict[str, Extent] = {}
    notes: list[Problem] = []
    spans = []
    for name, entry in header.items():
        kind, shape, begin, end = _entry(where, name, entry)
        spans.append((begin, end, name))
        if end > size:
            raise CorruptError(f"{where}: {name!r} ends at byte {end:,} of the data, which has {size:,}: truncated?")
        extents[name] = _extent(path, begin_data + begin, kind, shape, end - begin, name, notes)
    _check_cover(where, spans, size)
    ordered = {name: extents[name] for _, _, name in sorted(spans)}
    return SafetensorsFile(path, file.info, ordered, metadata, notes)


def _json(where: str, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CorruptError(f"{where}: the header names {twice!r} twice")
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant)
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


def _extent(
    path: str, at: int, kind: str, shape: tuple[int, ...], nbytes: int, name: str, notes: list[Problem]
) -> Extent:
    dtype = FROM_SAFETENSORS.get(kind)
    if dtype is None:
        if kind == "F4" and shape and shape[-1] % 2 == 0:
            dtype, shape = F4_E2M1FN_X2, (*shape[:-1], shape[-1] // 2)
        else:
            line = f"{name!r} is {kind} of shape {list(shape)}, which torch cannot hold: read as its packed bytes"
            notes.append(Problem("unsupported-tensor", line, name))
            dtype, shape = U8, (nbytes,)
    return Extent(path, at, dtype, shape, c_strides(shape))


def _check_cover(where: str, spans: list[tuple[int, int, str]], size: int) -> None:
    at = 0
    for begin, end, name in sorted(spans):
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
