"""Encoding of zarr chunks: raw bytes, or a codec of numcodecs.

Array documents use zarr v3's names for zstd, blosc and gzip, and zarr-python's "numcodecs.<id>" for all other codecs
(zarr/codecs/numcodecs). zarr-python 3.1.6 reads all of them, tensorstore only those of zarr v3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ..core.box import Shape
from ..core.dtypes import to_numpy
from ..errors import DataError
from ..formats.zarr.documents import RAW, Json
from ..io.tensors import as_bytes

Codec: TypeAlias = Any  # see `encoding`
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_BLOSC = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "blocksize": 1 << 20}
_MOST = (1 << 31) - 1 - 16  # maximum input bytes of a numcodecs codec


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of an array's chunks.

    ``json`` is the codec list of the array's document, ``config`` the configuration for numcodecs (None for raw bytes).
    ``kind`` says whether the codec maps bytes to bytes ("bytes"), arrays to bytes ("array") or arrays to arrays
    ("filter")."""

    json: tuple[Json, ...]
    config: Json | None = None
    kind: Literal["bytes", "array", "filter"] = "bytes"

    @property
    def raw(self) -> bool:
        return self.config is None

    def encode(self, chunk: torch.Tensor) -> memoryview:
        """Encode a contiguous chunk. Raises DataError if the codec does not support its size or shape."""
        if self.config is None:
            return as_bytes(chunk)
        try:
            found = _codec(self.config).encode(as_bytes(chunk) if self.kind == "bytes" else to_numpy(chunk))
        except Exception as e:  # third-party codecs raise any exception
            what = f"a chunk of {tuple(chunk.shape)} elements of {chunk.dtype}"
            raise DataError(f"the codec {self.config['id']!r} does not take {what}: {e}") from e
        if self.config["id"] == "gzip":  # bytes 4 to 8 are the time: without it the same chunk has the same bytes
            found = bytearray(found)
            found[4:8] = bytes(4)
        return _memory(found) if isinstance(found, np.ndarray) else memoryview(found)

    def decode(self, data: memoryview, shape: Shape, dtype: torch.dtype) -> memoryview:
        """Decode a chunk to the bytes of its elements."""
        if self.config is None:
            return data
        if self.kind == "filter":
            example = to_numpy(torch.zeros(shape, dtype=dtype, device="cpu"))
            like = np.asarray(_codec(self.config).encode(example))
            found = _codec(self.config).decode(np.frombuffer(data, like.dtype).reshape(like.shape))
            if found.dtype != example.dtype:  # zarr readers would convert the numbers
                raise DataError(f"decoding gives {found.dtype} back")
            if example.dtype.itemsize == 1 < like.dtype.itemsize:  # zarr-python 3.1 would ignore the byte order
                raise DataError(f"zarr does not read {like.dtype} in the place of single bytes")
        else:
            found = _codec(self.config).decode(bytes(data))
        return _memory(found) if isinstance(found, np.ndarray) else memoryview(found)


def encoding(codec: Codec | None, dtype: torch.dtype) -> Encoding:
    """Resolve a user's codec: "zstd", "blosc", "gzip", any codec of numcodecs (its id, its configuration or an
    instance), the JSON of zarr v3, {"name": ..., "configuration": {...}}, or None for raw bytes. Raises DataError."""
    if codec is None:
        return Encoding(RAW)
    if isinstance(codec, str):
        codec = {"name": codec} if codec in _OWN else {"id": codec.removeprefix("numcodecs.")}
    if not isinstance(codec, Mapping):
        if not hasattr(codec, "get_config"):
            raise DataError(f"{codec!r} is no codec: pass {_WANTED}")
        codec = codec.get_config()
    if "id" in codec:
        return _numcodec(dict(codec))
    name, given = codec.get("name"), codec.get("configuration") or {}
    if not isinstance(given, Mapping):
        raise DataError(f"the configuration of the codec {name!r} is {given!r}: pass a table of its parameters")
    given = dict(given)
    if isinstance(name, str) and name.startswith("numcodecs."):
        return _numcodec({"id": name.removeprefix("numcodecs."), **given})
    if name not in _OWN:
        raise DataError(f"{dict(codec)!r} is no codec: pass {_WANTED}")
    return _own(name, given, dtype.itemsize)


def check(of: Encoding, dtype: torch.dtype, name: str, nbytes: int) -> None:
    """Test the codec on a small sample. Raises DataError if it does not support the dtype or is lossy. ``name`` is a
    tensor of that dtype, ``nbytes`` the size of its chunks."""
    if of.raw:
        return
    if nbytes > _MOST:
        raise DataError(f"a chunk of {name!r} has {nbytes:,} bytes, a codec takes 2 GiB at most: pass chunk='512MiB'")
    codec = of.json[0]["name"] if of.kind != "bytes" else of.json[-1]["name"]
    generator = torch.Generator().manual_seed(0)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (256 * dtype.itemsize,), generator=generator, device="cpu")
    sample = raw.to(torch.uint8).view(dtype)
    try:
        back = of.decode(of.encode(sample), tuple(sample.shape), dtype)
    except Exception as e:  # third-party codecs raise any exception
        raise DataError(f"the codec {codec!r} does not take {dtype}, which {name!r} is: {e}") from e
    if bytes(back) != bytes(as_bytes(sample)):
        raise DataError(
            f"the codec {codec!r} does not give {dtype}, which {name!r} is, back bit by bit: choose a lossless codec"
        )


_OWN = ("zstd", "blosc", "gzip")
_WANTED = "None, 'zstd', 'blosc', 'gzip', a codec of numcodecs or its configuration, or the JSON of a zarr v3 codec"


def _own(name: str, given: Json, itemsize: int) -> Encoding:
    """Return the encoding with one of zarr v3's own codecs."""
    if name == "blosc":
        given = {**_BLOSC, "typesize": itemsize, **given}
        config = {**given, "id": "blosc", "shuffle": _SHUFFLES.get(given["shuffle"], -2)}
    elif name == "zstd":
        given = {"level": 0, "checksum": False, **given}
        config = {**given, "id": "zstd"}
    else:
        given = {"level": 5, **given}
        config = {**given, "id": "gzip"}
    _codec(config)
    return Encoding((*RAW, {"name": name, "configuration": given}), config)


def _numcodec(config: Json) -> Encoding:
    from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec
    from zarr.registry import get_codec_class

    name = f"numcodecs.{config['id']}"
    try:
        kind = get_codec_class(name)
    except KeyError:
        raise DataError(f"zarr knows no codec {name!r}: pass {_WANTED}") from None
    config = dict(_codec(config).get_config())
    json = {"name": name, "configuration": {k: v for k, v in config.items() if k != "id"}}
    if issubclass(kind, ArrayBytesCodec):
        return Encoding((json,), config, "array")
    if issubclass(kind, ArrayArrayCodec):
        return Encoding((json, *RAW), config, "filter")
    return Encoding((*RAW, json), config)


def _codec(config: Json) -> Any:
    import numcodecs
    from numcodecs.errors import UnknownCodecError

    try:
        return numcodecs.get_codec(dict(config))
    except (UnknownCodecError, TypeError, ValueError, ImportError) as e:
        raise DataError(f"numcodecs has no such codec {config!r}: {e}") from e


def _memory(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
