"""Checkpoints in TensorFlow's format, made of bytes by the published format: TensorFlow itself is too large to install
for the tests. What only TensorFlow could show (that it writes nothing else) is not tested with these.

Sources: leveldb/doc/table_format.md; tensorflow/core/util/tensor_bundle/tensor_bundle.proto, tensor_bundle.cc.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

KINDS = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "complex64": 8, "int64": 9, "bool": 10,
    "bfloat16": 14, "uint16": 17, "complex128": 18, "float16": 19, "uint32": 22, "uint64": 23, "float8_e5m2": 24,
    "float8_e4m3fn": 25,
}  # fmt: skip


def varint(n: int) -> bytes:
    found = bytearray()
    while n > 127:
        found.append(n & 127 | 128)
        n >>= 7
    return bytes((*found, n))


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def shape_of(shape: tuple[int, ...]) -> bytes:
    return b"".join(field(2, field(1, n)) for n in shape)


def entry(
    array: np.ndarray[Any, Any], shard: int, offset: int, kind: int | None = None, crc: int | None = None
) -> bytes:
    """A BundleEntryProto. Fields with the value 0 are left out, as protocol buffers do."""
    found = field(1, KINDS[array.dtype.name] if kind is None else kind) + field(2, shape_of(array.shape))
    found += b"".join(field(n, value) for n, value in ((3, shard), (4, offset), (5, array.nbytes)) if value)
    checksum = masked(google_crc32c.value(array.tobytes())) if crc is None else crc
    return found + varint(6 << 3 | 5) + checksum.to_bytes(4, "little")


def sliced(shape: tuple[int, ...], kind: int, slices: list[list[tuple[int, int] | None]]) -> bytes:
    """The entry of a partitioned variable."""
    found = field(1, kind) + field(2, shape_of(shape))
    for extents in slices:
        parts = [b"" if e is None else (field(1, e[0]) if e[0] else b"") + field(2, e[1]) for e in extents]
        found += field(7, b"".join(field(1, part) for part in parts))
    return found


def masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def block(entries: list[tuple[bytes, bytes]], interval: int = 16) -> bytes:
    data, restarts, last = bytearray(), [], b""
    for n, (key, value) in enumerate(entries):
        shared = 0
        if n % interval == 0:
            restarts.append(len(data))
        else:
            while shared < min(len(last), len(key)) and last[shared] == key[shared]:
                shared += 1
        data += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return bytes(data) + b"".join(r.to_bytes(4, "little") for r in restarts) + len(restarts).to_bytes(4, "little")


def table(entries: dict[bytes, bytes], of_block: int = 7) -> bytes:
    """A table with ``of_block`` entries in each block."""
    data, handles, ordered = bytearray(), [], sorted(entries.items())

    def add(content: bytes) -> bytes:
        handle = varint(len(data)) + varint(len(content))
        data.extend(content + b"\0" + masked(google_crc32c.value(content + b"\0")).to_bytes(4, "little"))
        return handle

    for n in range(0, len(ordered), of_block):
        part = ordered[n : n + of_block]
        handles.append((part[-1][0], add(block(part))))
    meta = add(block([]))
    footer = meta + add(block(handles, 1))
    return bytes(data) + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def header(shards: int = 1, big: bool = False) -> bytes:
    return field(1, shards) + (field(2, 1) if big else b"") + field(3, field(1, 1))


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]], shards: int = 1, big: bool = False) -> None:
    """Write a checkpoint with the arrays, in turn into each of the data files."""
    data = [bytearray() for _ in range(shards)]
    entries = {b"": header(shards, big)}
    for n, (name, array) in enumerate(sorted(arrays.items())):
        held = data[n % shards]
        entries[name.encode()] = entry(array, n % shards, len(held))
        held += array.astype(array.dtype.newbyteorder(">")).tobytes() if big else array.tobytes()
    for n, held in enumerate(data):
        Path(f"{path}.data-{n:05}-of-{shards:05}").write_bytes(held)
    Path(f"{path}.index").write_bytes(table(entries))
