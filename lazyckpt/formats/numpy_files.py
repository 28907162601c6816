"""Files of numpy: `.npy`, one array, and `.npz`, a zip of them.

Writers: numpy/lib/_npyio_impl.py (`save`, `savez`, `savez_compressed`). Each record of the zip is an array; its name
without ".npy" is the array's name. A stored array is read where it lies, a compressed one is unpacked as a whole at the
first read of it. numpy saves the dtypes of ml_dtypes as raw bytes ("V2"), so that they cannot be told apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ..core.dtypes import U8
from ..core.extents import Chunk, Codec, Extent, ZipEntry
from ..core.index import Index
from ..core.specs import TensorSpec, whole
from ..errors import CorruptError, FormatError, LazyckptError, Problem, only_one, some
from ..io.containers.npy import LEAST, MAGIC, USUAL, NoNumbersError, Npy, header_length, read_header
from ..io.containers.pickle.records import short
from ..io.containers.zip import DEFLATED, ENCRYPTED, STORED, ZIP_MAGIC, read_zip
from ..io.containers.zip_columns import Records
from ..io.containers.zip_offsets import data_offsets
from ..io.limits import Budget
from ..io.storage.streams import StoreFile
from .reader import Reader, Source

ALONE = "array"  # the name of the array of a .npy file, which has none
_PACKED = 4 << 10  # bytes of a compressed array that are read for its header


def _recognises(source: Source) -> bool:
    if not source.path:
        return False
    if source.head.startswith(ZIP_MAGIC):
        length = int.from_bytes(source.head[26:28], "little")
        return source.path.endswith(".npz") or source.head[30 : 30 + length].endswith(b".npy")
    return source.head.startswith(MAGIC) or source.path.endswith((".npy", ".npz"))


def _read(source: Source) -> Index:
    file = StoreFile(source.store, source.path)
    head = source.head
    file.refuse_pointer(head)
    if not head:
        raise CorruptError(f"{file.where} is empty (0 bytes): copy it again from its source")
    if head.startswith(MAGIC):
        return _one(file)
    if head.startswith((ZIP_MAGIC, b"PK\x05\x06")):
        return _several(file)
    raise FormatError(f"{file.where} is no file of numpy (it begins with {head[:8]!r})")


# -- .npy


def _one(file: StoreFile) -> Index:
    where = file.where
    start = file.at(0, min(file.size, USUAL))
    length = header_length(start, where)
    if length > len(start):
        start = file.at(0, min(file.size, length))
    try:
        array = read_header(start, where)
    except NoNumbersError as e:
        raise FormatError(f"{where}: its elements are {e.kind}, so there is no tensor in it") from None
    if array.length + array.nbytes > file.size:
        raise CorruptError(
            f"{where}: an array of {array.nbytes:,} bytes begins at {array.length:,}, the file has {file.size:,}: "
            "truncated? Copy it again from its source"
        )
    problems = _of_raw([(ALONE, array)])
    if behind := file.size - array.length - array.nbytes:
        line = f"{file.path}: {behind:,} bytes behind its array are not read (several calls of numpy.save?)"
        problems.append(Problem("oversized-file", line, file.path))
    tensors = {ALONE: whole(ALONE, _extent(file.path, array, array.length))}
    return _index("npy", file, tensors, problems)


def _extent(path: str, array: Npy, offset: int, within: Chunk | None = None) -> Extent:
    swapped = array.swapped and array.dtype.itemsize > 1
    return Extent(path, offset, array.dtype, array.shape, array.strides, swapped=swapped, within=within)


# -- .npz


def _several(file: StoreFile) -> Index:
    found = read_zip(file)
    entries = sorted(found.entries, key=lambda entry: entry.header)
    offsets = data_offsets(file, found.start, Records.of(entries)).tolist()
    budget = Budget(file.where, file.size)
    others: dict[str, list[str]] = {}
    unreadable: dict[str, str] = {}
    tensors: dict[str, TensorSpec] = {}
    arrays: list[tuple[str, Npy]] = []
    for (entry, offset), start in zip(zip(entries, offsets, strict=True), _starts(file, entries, offsets), strict=True):
        name = entry.name.removesuffix(".npy")
        if name in tensors or name in unreadable:
            raise CorruptError(f"{file.where}: two of its records are called {short(name)} by numpy: made by hand?")
        budget.objects(8)
        try:
            array = _array(file, entry, offset, start)
        except NoNumbersError as e:
            others.setdefault(e.kind, []).append(name)
            continue
        except LazyckptError as e:
            unreadable[name] = str(e)
            continue
        arrays.append((name, array))
        tensors[name] = whole(name, _placed(file, entry, offset, array))
    if unreadable and not tensors:
        raise CorruptError(next(iter(unreadable.values())))
    problems = [
        Problem(
            "unsupported-tensor", f"not in the view, because their elements are {kind}: {some(names)}", only_one(names)
        )
        for kind, names in others.items()
    ]
    problems += _of_raw(arrays)
    problems += [Problem("unreadable-file", why, name) for name, why in unreadable.items()]
    return _index("npz", file, tensors, problems, unreadable)


def _starts(file: StoreFile, entries: Sequence[ZipEntry], offsets: Sequence[int]) -> list[bytes]:
    """Return the first bytes of each record as they are in the file."""
    sizes = [min(entry.stored, USUAL if entry.method == STORED else _PACKED) for entry in entries]
    buffers = [np.empty(size, np.uint8) for size in sizes]
    file.read_pieces([(at, buffer.data) for at, buffer in zip(offsets, buffers, strict=True) if len(buffer)])
    return [buffer.tobytes() for buffer in buffers]


def _array(file: StoreFile, entry: ZipEntry, offset: int, start: bytes) -> Npy:
    """Return the header of the array in a record that begins with ``start``."""
    where = f"{file.where}: the record {short(entry.name)}"
    if entry.flags & ENCRYPTED or entry.method not in (STORED, DEFLATED):
        raise NoNumbersError("encrypted" if entry.flags & ENCRYPTED else "packed by another method than deflate")

    def first(size: int) -> bytes:
        return start if size <= len(start) else file.at(offset, min(size, entry.stored))

    def unpacked(size: int) -> bytes:
        try:
            return zlib.decompressobj(-15).decompress(start, size)
        except zlib.error as e:
            raise CorruptError(f"{where} cannot be unpacked ({e}): damaged") from None

    take: Callable[[int], bytes] = first if entry.method == STORED else unpacked
    data = take(LEAST)
    if not data.startswith(MAGIC):
        raise NoNumbersError("no array of numpy")
    array = read_header(take(header_length(data, where)), where)
    if array.length + array.nbytes != entry.nbytes:
        raise CorruptError(
            f"{where} has {entry.nbytes:,} bytes, its header describes {array.length + array.nbytes:,}: damaged"
        )
    return array


def _placed(file: StoreFile, entry: ZipEntry, offset: int, array: Npy) -> Extent:
    if entry.method == STORED:
        return _extent(file.path, array, offset + array.length)
    codec = Codec("zip-deflate", f'{{"crc": {entry.crc}}}')
    chunk = Chunk(file.path, U8, (entry.nbytes,), (1,), entry.nbytes, (codec,), window=(offset, entry.stored))
    return _extent(file.path, array, array.length, chunk)


# -- both


def _of_raw(arrays: Sequence[tuple[str, Npy]]) -> list[Problem]:
    found: dict[str, list[str]] = {}
    for name, array in arrays:
        if array.raw:
            found.setdefault(array.raw, []).append(name)
    problems = []
    for raw, names in found.items():
        size = int(raw.lstrip("<>|=V"))
        guess = {1: "float8, int4", 2: "bfloat16"}.get(size)
        meaning = f", as numpy saves {guess} of ml_dtypes" if guess else ""
        line = (
            f"saved as raw bytes ({raw}){meaning}; the file does not say which. Read as uint{8 * size}: "
            f"{some(names)}. If you know the dtype, t[...].view(it) has the values"
        )
        problems.append(Problem("unsupported-tensor", line, only_one(names)))
    return problems


def _index(
    format: str,
    file: StoreFile,
    tensors: dict[str, TensorSpec],
    problems: Sequence[Problem],
    unreadable: dict[str, str] | None = None,
) -> Index:
    return Index(
        format=format,
        states={"weights": tensors},
        files={file.path: file.info},
        stored=tensors,
        problems=tuple(problems),
        unreadable=unreadable or {},
    )


READER = Reader("numpy", "numpy's .npz and .npy files", _recognises, _read)
