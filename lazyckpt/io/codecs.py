"""Decompression of array chunks, with numcodecs and the standard library.

A few hostile bytes can expand to gigabytes, so every codec has an output limit: zlib, bz2 and lzma stop at the limit;
for the others, the declared size is checked before memory is allocated.
Sources: numcodecs (blosc.pyx, lz4.pyx, checksum32.py, ...); the c-blosc header, README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ..core.extents import Codec
from ..errors import CorruptError, DataError
from .storage.base import Buffer

# -- Zstandard frames, with a limit on the decompressed size.

_MAGIC = 0xFD2FB528
_BLOCK = 128 << 10  # maximum decompressed bytes of a block
_LOOSE = 64 << 20  # bytes; tolerance, because blocks may decompress to less than the maximum


def unpack_zstd(data: bytes, where: str, limit: int, out: memoryview | None = None) -> bytes | memoryview:
    """Decompress zstd frames, into ``out`` if the frames declare a total size of ``len(out)``.

    Raises CorruptError if the frames are damaged or may expand to far more than ``limit`` bytes.
    """
    try:
        most, declared = _most(data)
    except IndexError:
        raise CorruptError(f"{where}: its zstd frame is truncated") from None
    if most is None:
        raise CorruptError(f"{where}: this is not a zstd frame, or it is damaged")
    if most > 4 * limit + _LOOSE:
        raise CorruptError(
            f"{where}: its zstd frame unpacks to up to {most:,} bytes, where {limit:,} are all that can be needed: "
            "damaged or hostile"
        )
    into = out if declared and out is not None and len(out) == most else None
    from numcodecs import zstd  # slow to import and rarely needed

    try:
        found: bytes = zstd.decompress(data, into)
    except (RuntimeError, MemoryError, ValueError) as e:
        raise CorruptError(f"{where}: its zstd frame cannot be unpacked ({e}): the file is damaged") from None
    return found if into is None else into


def frame_size(head: bytes) -> int | None:
    """Return how many bytes a zstd frame holds, from its first 18 bytes; None if it is no frame or does not say."""
    try:
        if _number(head, 0, 4) != _MAGIC:
            return None
        descriptor = _number(head, 4, 1)
        single = bool(descriptor & 0x20)
        at = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        width = (int(single), 2, 4, 8)[descriptor >> 6]
        return _number(head, at, width) + (256 if width == 2 else 0) if width else None
    except IndexError:
        return None


def _most(data: bytes) -> tuple[int | None, bool]:
    """Return the maximum decompressed size in bytes, from frame and block headers (None if the data are not zstd
    frames), and whether every frame declares its size. Raises IndexError past the end."""
    at, total, all_declared = 0, 0, True
    while at < len(data):
        magic = _number(data, at, 4)
        if 0x184D2A50 <= magic <= 0x184D2A5F:  # a skippable frame
            at += 8 + _number(data, at + 4, 4)
            continue
        if magic != _MAGIC:
            return None, False
        descriptor = _number(data, at + 4, 1)
        single = bool(descriptor & 0x20)
        at += 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        width = (int(single), 2, 4, 8)[descriptor >> 6]
        declared = _number(data, at, width) + (256 if width == 2 else 0) if width else None
        at += width
        size, last = 0, False
        while not last:
            header = _number(data, at, 3)
            last, kind, count = bool(header & 1), header >> 1 & 3, header >> 3
            size += count if kind < 2 else _BLOCK
            at += 3 + (1 if kind == 1 else count)
        at += 4 * bool(descriptor & 4)
        all_declared = all_declared and declared is not None
        total += size if declared is None else declared  # zstd allocates the declared size before it reads a block
    return (total if at == len(data) else None), all_declared


def _number(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + width], "little")


# -- Chains of codecs.

Config = dict[str, Any]
_WIDENING = 16  # maximum output bytes of a filter per input byte: 8-bit integers to complex128
WRONG_CHECKSUM = "the checksum does not match"  # part of the error's message
_SLACK = 1 << 10  # bytes for checksums, headers and incompressible data


def decode(codecs: Sequence[Codec], data: Buffer, where: str, nbytes: int, out: memoryview | None = None) -> Buffer:
    """Apply the codecs one after another to decompress ``data`` to ``nbytes`` bytes.

    The last codec may write its result into ``out``, memory of ``nbytes`` bytes. Raises DataError for an unknown
    codec, CorruptError for damaged data and for output above the limit.
    """
    unknown = [codec.name for codec in codecs if codec.name not in KNOWN]
    if unknown:
        raise DataError(
            f"{where}: packed with {', '.join(f'{name!r:.60}' for name in unknown)}, which lazyckpt cannot unpack (it "
            f"can: {', '.join(KNOWN)}). Write the array again without it."
        )
    filtered = any(codec.name in _FILTERS for codec in codecs)
    for n, codec in enumerate(codecs):
        last = n == len(codecs) - 1
        limit = nbytes if last else nbytes * (_WIDENING if filtered else 1) + nbytes // 64 + _SLACK
        config = _config(codec.config)
        try:
            if codec.name in _FILTERS:
                data = _filter(codec)(data)
            else:
                into = out if last else None
                if codec.name in _INTO:
                    data = _INTO[codec.name](memoryview(data), where, limit, into)
                else:
                    data = _UNPACK[codec.name](memoryview(data), config, where, limit)
        except (CorruptError, DataError):
            raise
        except Exception as e:  # each library raises its own exceptions for damaged data
            raise CorruptError(f"{where}: {codec.name} cannot unpack it ({e!r:.120}): damaged") from None
    return data


@lru_cache(256)
def _config(text: str) -> Config:
    config = json.loads(text)
    return config if isinstance(config, dict) else {}


def _too_large(where: str, limit: int, found: str) -> CorruptError:
    return CorruptError(
        f"{where}: it unpacks to {found} bytes, where {limit:,} are all there can be: damaged or hostile"
    )


def _stream(make: Callable[[], Any], data: memoryview, where: str, limit: int) -> bytes:
    """Decompress concatenated streams, which gzip, bz2 and lzma allow, to at most ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    rest: Any = data
    while len(rest):
        stream = make()
        parts.append(stream.decompress(rest, limit - size + 1))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(where, limit, f"more than {limit:,}")
        if not stream.eof:
            raise CorruptError(f"{where}: the compressed data is truncated")
        rest = stream.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _gzip(data: memoryview, config: Config, where: str, limit: int) -> bytes:
    return _stream(lambda: zlib.decompressobj(31), data, where, limit)


def _zlib(data: memoryview, config: Config, where: str, limit: int) -> bytes:
    return _stream(zlib.decompressobj, data, where, limit)


def _deflate(data: memoryview, config: Config, where: str, limit: int) -> bytes:
    found = _stream(lambda: zlib.decompressobj(-15), data, where, limit)
    if "crc" in config and zlib.crc32(found) != config["crc"]:
        raise CorruptError(f"{where}: {WRONG_CHECKSUM} of the zip's directory: the bytes were changed")
    return found


def _bz2(data: memoryview, config: Config, where: str, limit: int) -> bytes:
    return _stream(bz2.BZ2Decompressor, data, where, limit)


def _lzma(data: memoryview, config: Config, where: str, limit: int) -> bytes:
    form, filters = config.get("format", lzma.FORMAT_XZ), config.get("filters")
    memory = None if form == lzma.FORMAT_RAW else (128 << 20) + 4 * limit  # bytes for the dictionary
    raw = filters if form == lzma.FORMAT_RAW else None
    return _stream(lambda: lzma.LZMADecompressor(form, memory, raw), data, where, limit)


def _zstd(data: memoryview, where: str, limit: int, out: memoryview | None) -> Buffer:
    return unpack_zstd(bytes(data), where, limit, out)


def _lzf(data: memoryview, config: Config, where: str, limit: int) -> bytes:
    """Unpack LibLZF, h5py's own filter (h5py/lzf/lzf/lzf_d.c)."""
    packed, found, at = bytes(data), bytearray(), 0
    while at < len(packed):
        control = packed[at]
        at += 1
        if control < 32:  # literal bytes
            found += packed[at : at + control + 1]
            at += control + 1
        else:  # a copy of earlier bytes
            length = control >> 5
            if length == 7:
                length += packed[at]
                at += 1
            back = len(found) - ((control & 31) << 8) - packed[at] - 1
            at += 1
            if back < 0:
                raise CorruptError(f"{where}: it refers to bytes before its start: damaged")
            length += 2
            if back + length <= len(found):
                found += found[back : back + length]
            else:
                piece = found[back:]
                found += (piece * (length // len(piece) + 1))[:length]
        if len(found) > limit:
            raise _too_large(where, limit, f"more than {limit:,}")
    if at != len(packed):
        raise CorruptError(f"{where}: the compressed data is truncated")
    return bytes(found)


def _blosc(data: memoryview, where: str, limit: int, out: memoryview | None) -> Any:
    from numcodecs import blosc  # slow to import and not always needed

    size, packed = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
    if size > limit:
        raise _too_large(where, limit, f"{size:,}")
    if packed != len(data):
        raise CorruptError(f"{where}: its blosc header declares {packed:,} bytes, there are {len(data):,}: truncated")
    if out is None or len(out) != size:
        return blosc.decompress(data)
    blosc.decompress(data, out)
    return out


def _lz4(data: memoryview, where: str, limit: int, out: memoryview | None) -> Any:
    from numcodecs import lz4

    size = int.from_bytes(data[:4], "little")
    if size > limit:
        raise _too_large(where, limit, f"{size:,}")
    if out is None or len(out) != size:
        return lz4.decompress(data)
    lz4.decompress(data, out)
    return out


def _crc32c(data: memoryview, config: Config, where: str, limit: int) -> memoryview:
    import google_crc32c

    return _checked(data, lambda body: google_crc32c.value(bytes(body)), config.get("location", "end"), where)


def _crc32(data: memoryview, config: Config, where: str, limit: int) -> memoryview:
    return _checked(data, zlib.crc32, config.get("location", "start"), where)


def _adler32(data: memoryview, config: Config, where: str, limit: int) -> memoryview:
    return _checked(data, zlib.adler32, config.get("location", "start"), where)


def _checked(data: memoryview, checksum: Callable[[memoryview], int], location: str, where: str) -> memoryview:
    stored, body = (data[:4], data[4:]) if location == "start" else (data[-4:], data[:-4])
    if len(data) < 4 or int.from_bytes(stored, "little") != checksum(body):
        raise CorruptError(f"{where}: {WRONG_CHECKSUM}: the bytes were changed, or are truncated")
    return body


_UNPACK: dict[str, Callable[[memoryview, Config, str, int], Buffer]] = {
    "gzip": _gzip,
    "zlib": _zlib,
    "zip-deflate": _deflate,
    "bz2": _bz2,
    "lzma": _lzma,
    "lzf": _lzf,
    "crc32c": _crc32c,
    "crc32": _crc32,
    "adler32": _adler32,
}
# Codecs that can decompress directly into given memory.
_INTO: dict[str, Callable[[memoryview, str, int, memoryview | None], Buffer]] = {
    "zstd": _zstd,
    "blosc": _blosc,
    "lz4": _lz4,
}
# Codecs whose output has at most _WIDENING times the size of their input. They keep the order of elements.
_FILTERS = (
    "shuffle",
    "delta",
    "fixedscaleoffset",
    "astype",
    "quantize",
    "bitround",
    "packbits",
    "fletcher32",
    "jenkins_lookup3",
)
KNOWN = (*_UNPACK, *_INTO, *_FILTERS)


@lru_cache(256)
def _made(codec: Codec) -> Any:
    import numcodecs
    import numpy as np

    config = _config(codec.config)
    for key in ("dtype", "astype", "encode_dtype", "decode_dtype"):
        dtype = np.dtype(config.get(key) or "u1")
        if dtype.kind not in "biufc" or dtype.itemsize > _WIDENING:
            raise CorruptError(f"{codec.name}: {key} is {dtype}, which is not numeric or is too wide")
    return numcodecs.get_codec({**config, "id": codec.name})


def _filter(codec: Codec) -> Callable[[Buffer], memoryview]:
    import numpy as np

    made = _made(codec)

    def undone(data: Buffer) -> memoryview:
        found: np.ndarray[Any, Any] = np.ascontiguousarray(np.asarray(made.decode(np.frombuffer(data, np.uint8))))
        return found.reshape(-1).view(np.uint8).data

    return undone
