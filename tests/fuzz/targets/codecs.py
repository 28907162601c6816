"""Packed chunks: each codec over damaged data. The first byte of an input chooses the codecs."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib

import google_crc32c
import numcodecs
import numpy as np

from lazyckpt.core.extents import Codec
from lazyckpt.io.codecs import KNOWN, decode

from ..contract import DifferenceError, Target

NBYTES = 4096
_CONFIGS = {
    "shuffle": {"elementsize": 4}, "delta": {"dtype": "<i4"},
    "astype": {"encode_dtype": "<f4", "decode_dtype": "<f8"},
    "fixedscaleoffset": {"offset": 0, "scale": 10, "dtype": "<f8", "astype": "<u1"},
    "quantize": {"digits": 3, "dtype": "<f4"}, "bitround": {"keepbits": 7}, "jenkins_lookup3": {"initval": 0},
}  # fmt: skip
CHAINS = [(name,) for name in KNOWN] + [("crc32c", "gzip"), ("zstd", "shuffle"), ("blosc", "delta"), ("zlib", "crc32")]


def chain(data: bytes) -> None:
    """Unpack data with the codecs of a number."""
    if not data:
        return
    names = CHAINS[data[0] % len(CHAINS)]
    codecs = [Codec(name, json.dumps(_CONFIGS.get(name, {}))) for name in names]
    out = memoryview(bytearray(NBYTES))
    alone = bytes(decode(codecs, data[1:], "fuzz", NBYTES))
    into = decode(codecs, data[1:], "fuzz", NBYTES, out)
    if alone != bytes(into):
        raise DifferenceError("unpacked into given memory, the bytes are others")


def seeds() -> list[bytes]:
    raw = np.arange(NBYTES // 4, dtype="<i4").tobytes()
    packed = {
        "gzip": gzip.compress(raw, mtime=0), "zlib": zlib.compress(raw), "zip-deflate": zlib.compress(raw)[2:-4],
        "bz2": bz2.compress(raw), "lzma": lzma.compress(raw), "zstd": numcodecs.Zstd().encode(raw),
        "blosc": numcodecs.Blosc().encode(raw), "lz4": numcodecs.LZ4().encode(raw),
        "crc32": numcodecs.CRC32().encode(raw), "adler32": numcodecs.Adler32().encode(raw),
        "crc32c": raw + google_crc32c.value(raw).to_bytes(4, "little"),
        "fletcher32": numcodecs.Fletcher32().encode(raw),
    }  # fmt: skip
    found = [bytes([n]) + bytes(packed.get(names[0], raw)) for n, names in enumerate(CHAINS)]
    for name in ("zstd", "lz4", "blosc"):
        short = {"zstd": numcodecs.Zstd(), "lz4": numcodecs.LZ4(), "blosc": numcodecs.Blosc(cname="zstd")}[name]
        found.append(bytes([CHAINS.index((name,))]) + bytes(short.encode(b"abc" * 9)))
    return found


TARGETS = (Target("codecs.chain", chain, seeds, "packed"),)
