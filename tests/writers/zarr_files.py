"""Zarr hierarchies by other hands: zarr-python and tensorstore, with the codecs, orders and byte orders that they have.

`export` writes the layout of lazyckpt's own exports from its documents, as the exporter does.
"""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numcodecs
import numpy as np
import torch

from lazyckpt.core.chunking import chunk_box, grid_of
from lazyckpt.core.dtypes import dtype_of
from lazyckpt.formats.zarr import documents
from lazyckpt.formats.zarr import documents as nodes
from lazyckpt.io.plain_json import encode

from . import Case

Arrays = dict[str, torch.Tensor]

LIKE = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Values that pack, but not to nothing."""
    rng = np.random.default_rng([seed, *shape])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(kind)
    if kind.kind in "iu":
        return rng.integers(0, 100, shape).astype(kind)
    values = rng.integers(-40, 40, shape) / 8
    return (values + 1j * values[::-1] if kind.kind == "c" else values).astype(kind)


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape))


def _put(group: Any, truth: Arrays, path: str, array: np.ndarray[Any, Any], **options: Any) -> None:
    made = group.create_array(path, shape=array.shape, dtype=array.dtype, **options)
    made[...] = array
    truth[path.replace("/", ".")] = tensor(array)


def v2(path: Path) -> Arrays:
    import zarr

    truth: Arrays = {}
    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    group.attrs["title"] = "two"
    cube = data((23, 19, 5), "f4")
    options: dict[str, dict[str, Any]] = {
        "raw": {"compressors": None},
        "default": {},
        "slash": {"chunk_key_encoding": {"name": "v2", "separator": "/"}, "compressors": numcodecs.Zlib()},
        "order_f": {"order": "F", "compressors": numcodecs.LZ4()},
        "raw_f": {"order": "F", "compressors": None},
        "blosc": {"compressors": numcodecs.Blosc("zstd", 3, numcodecs.Blosc.SHUFFLE)},
        "bitshuffle": {"compressors": numcodecs.Blosc("lz4", 3, numcodecs.Blosc.BITSHUFFLE)},
        "gzip": {"compressors": numcodecs.GZip()},
        "bz2": {"compressors": numcodecs.BZ2()},
        "lzma": {"compressors": numcodecs.LZMA()},
        "zstd": {"compressors": numcodecs.Zstd()},
        "shuffled": {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.Zlib()},
        "summed": {"filters": [numcodecs.CRC32(), numcodecs.Adler32()], "compressors": None},
        "fletcher": {"filters": [numcodecs.Fletcher32()], "compressors": None},
        "crc32c": {"filters": [numcodecs.checksum32.CRC32C()], "compressors": numcodecs.Zstd()},
        "rounded": {"filters": [numcodecs.BitRound(23)], "compressors": None},
    }
    for name, given in options.items():
        _put(group, truth, f"layer/{name}", cube, chunks=(10, 7, 3), **given)
    whole = np.arange(1000, dtype="i4")
    delta = [numcodecs.Delta("i4", "i2")]
    _put(group, truth, "delta", whole, chunks=(300,), filters=delta, compressors=numcodecs.Zlib())
    _put(group, truth, "narrow", whole % 100, chunks=(300,), filters=[numcodecs.AsType("i1", "i4")], compressors=None)
    scaled = [numcodecs.FixedScaleOffset(0, 8, "f8", "i2")]
    _put(group, truth, "scaled", data((50, 3), "f8"), chunks=(20, 3), filters=scaled, compressors=numcodecs.Zstd())
    bits = [numcodecs.PackBits()]
    _put(group, truth, "bits", data((77,), "?"), chunks=(30,), filters=bits, compressors=None)
    for dtype in ("<f2", ">f4", ">f8", ">i8", "<u2", ">u4", "|i1", "|u1", "|b1", "<c8", ">c16"):
        _put(group, truth, f"dtype/{dtype[1:]}", data((13, 6), dtype), chunks=(5, 4))
    _put(group, truth, "raw_big", data((13, 6), ">f4"), chunks=(5, 6), compressors=None)
    _put(group, truth, "scalar", np.array(2.5, "f4"))
    _put(group, truth, "empty", np.zeros((0, 4), "f4"), chunks=(1, 4))
    return truth


def v3(path: Path) -> Arrays:
    import zarr
    from zarr import codecs

    truth: Arrays = {}
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    group.attrs["title"] = "three"
    cube = data((23, 19, 6), "f4")
    big = codecs.BytesCodec(endian="big")
    turned = [codecs.TransposeCodec(order=(2, 0, 1))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from zarr.codecs import numcodecs as more

        options: dict[str, dict[str, Any]] = {
            "raw": {"compressors": None},
            "default": {},
            "v2_keys": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
            "dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
            "big": {"serializer": big, "compressors": None},
            "big_packed": {"serializer": big, "compressors": [codecs.GzipCodec()]},
            "turned": {"filters": turned, "compressors": None},
            "turned_packed": {"filters": turned, "serializer": big, "compressors": [codecs.ZstdCodec()]},
            "blosc": {"compressors": [codecs.BloscCodec(cname="zstd", shuffle="shuffle")]},
            "checked": {"compressors": [codecs.Crc32cCodec()]},
            "both": {"compressors": [codecs.GzipCodec(), codecs.Crc32cCodec()]},
            "bz2": {"compressors": [more.BZ2()]},
            "lz4": {"compressors": [more.LZ4()]},
            "shuffled": {"compressors": [more.Shuffle(elementsize=4), more.Zlib()]},
            "rounded": {"filters": [more.BitRound(keepbits=23)]},
        }
        for name, given in options.items():
            _put(group, truth, f"layer/{name}", cube, chunks=(10, 7, 3), **given)
        _put(group, truth, "delta", np.arange(999, dtype="i4"), chunks=(300,), filters=[more.Delta(dtype="<i4")])
        shards: dict[str, dict[str, Any]] = {
            "packed": {},
            "raw": {"compressors": None},
            "turned": {"filters": turned, "compressors": None},
        }
        for name, given in shards.items():
            _put(group, truth, f"shard/{name}", cube, chunks=(5, 4, 3), shards=(20, 8, 6), **given)
        nested = codecs.ShardingCodec(
            chunk_shape=(10, 4, 6),
            codecs=[codecs.ShardingCodec(chunk_shape=(5, 4, 2), codecs=[big], index_location="start")],
        )
        _put(group, truth, "shard/nested", cube, chunks=(20, 8, 6), serializer=nested, compressors=None)
        start = codecs.ShardingCodec(chunk_shape=(5, 4, 3), codecs=[big, codecs.ZstdCodec()], index_location="start")
        _put(group, truth, "shard/start", data((12, 8, 6), "f8"), chunks=(10, 8, 6), serializer=start, compressors=None)
    for dtype in ("float16", "float64", "int8", "int64", "uint8", "uint16", "bool", "complex64", "complex128"):
        _put(group, truth, f"dtype/{dtype}", data((13, 6), dtype), chunks=(5, 4))
    _put(group, truth, "scalar", np.array(2.5, "f4"))
    _put(group, truth, "scalar_raw", np.array(7, "i8"), compressors=None)
    _put(group, truth, "empty", np.zeros((0, 4), "f4"), chunks=(1, 4))
    return truth


def consolidated(path: Path) -> None:
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(str(path))


def zipped(
    write: Callable[[Path], Arrays], method: int = zipfile.ZIP_STORED, top: str = ""
) -> Callable[[Path], Arrays]:
    """The same, packed into a zip."""

    def pack(path: Path) -> Arrays:
        folder = path.with_suffix(".folder")
        truth = write(folder)
        with zipfile.ZipFile(path, "w", method) as z:
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                z.write(file, top + file.relative_to(folder).as_posix())
        shutil.rmtree(folder)
        return truth

    return pack


def by_tensorstore(path: Path) -> Arrays:
    """Both versions, the dtypes that zarr-python has not; arrays without groups, as JAX writes parameters."""
    import tensorstore as ts

    truth: Arrays = {}

    def put(name: str, array: np.ndarray[Any, Any], driver: str, metadata: Mapping[str, Any]) -> None:
        spec = {
            "driver": driver,
            "kvstore": {"driver": "file", "path": f"{path}/{name}"},
            "metadata": {"shape": list(array.shape), **metadata},
            "dtype": array.dtype.name,
        }
        made = ts.open(spec, create=True).result()
        made[...] = array
        exact = torch.from_numpy(array.view(np.uint8).copy())
        like = {np.dtype(v): k for k, v in LIKE.items()}.get(array.dtype)
        truth[name] = exact.view(like).view(array.shape) if like is not None else tensor(array)

    for dtype in LIKE.values():
        name, array = np.dtype(dtype).name, data((14, 10), "f4").astype(dtype)
        put(f"params.{name}.two", array, "zarr", {"chunks": [5, 10], "compressor": {"id": "zstd", "level": 1}})
        put(f"params.{name}.raw", array, "zarr", {"chunks": [5, 10], "compressor": None, "order": "F"})
        grid = {"name": "regular", "configuration": {"chunk_shape": [5, 10]}}
        put(f"params.{name}.three", array, "zarr3", {"chunk_grid": grid})
    inner = [
        {"name": "transpose", "configuration": {"order": [1, 0]}},
        {"name": "bytes", "configuration": {"endian": "big"}},
    ]
    shards = {
        "chunk_shape": [2, 3],
        "codecs": [*inner, {"name": "gzip", "configuration": {"level": 3}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "big"}}],
        "index_location": "start",
    }
    turned = [
        {"name": "transpose", "configuration": {"order": [1, 0]}},
        {"name": "sharding_indexed", "configuration": shards},
    ]
    metadata = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [12, 4]}}, "codecs": turned}
    put("params.turned_shards", data((29, 11), "f4"), "zarr3", metadata)
    return truth


def export(path: Path, compressor: Mapping[str, Any] | None = None) -> Case:
    """The layout of an export, with names of all kinds, tied ones, several states, meta and a mesh."""
    generator = torch.Generator().manual_seed(3)
    truth: dict[str, Arrays] = {}
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float16)
    names = ("embed.weight", "layers.0.up.weight", "layers.0.up.weight.scale", "a/b..c", "50%", "é: x", "__x")
    for state in ("weights", "fp32", "exp/avg"):
        truth[state] = {}
        for n, name in enumerate(names):
            values = torch.randint(0, 2, (11 + n, 7, 4)[: 1 + n % 3], generator=generator)
            truth[state][name] = values.to(dtypes[n % len(dtypes)] if state == "weights" else torch.float32)
        truth[state]["step"] = torch.tensor(3.0)
        truth[state]["none"] = torch.zeros(0, 4)
    meta = {"step": 3, "args": {"lr": float("inf"), "betas": (0.9, 0.95)}, 7: b"x", "dtype": torch.bfloat16}
    arrays: dict[str, Any] = {}
    path.mkdir(parents=True)
    for state, table in truth.items():
        placed = nodes.paths(table)
        for name, whole in table.items():
            node = f"{nodes.component(state)}/{placed[name]}"
            chunk = tuple(max(1, -(-n // 2)) for n in whole.shape)
            codecs = [*documents.RAW, *([compressor] if compressor else [])]
            if whole.element_size() == 1:
                codecs[0] = {"name": "bytes"}
            arrays[node] = documents.array(name, tuple(whole.shape), dtype_of(whole.dtype), chunk, codecs)
            _chunks(path / node, whole, chunk, compressor)
    about = {
        "format": "deepspeed-zero2",
        "mesh": {"tp": 2, "pp": 1, "dp": 4, "ep": 1},
        "state": "weights",
        "states": list(truth),
        "aliases": {"head.weight": "embed.weight"},
        "meta": encode(meta),
        "problems": ["a line"],
    }
    for node, document in documents.hierarchy(arrays, about, map(nodes.component, truth)).items():
        (path / node).mkdir(parents=True, exist_ok=True)
        (path / node / "zarr.json").write_text(json.dumps(document))
    for state in ("weights", "fp32"):
        truth[state]["head.weight"] = truth[state]["embed.weight"]
    return Case(
        path, truth, {"tied": {"head.weight": "embed.weight"}, "meta": meta, "archives": compressor is not None}
    )


def _chunks(folder: Path, whole: torch.Tensor, chunk: tuple[int, ...], compressor: Mapping[str, Any] | None) -> None:
    for place in itertools.product(*map(range, grid_of(whole.shape, chunk))):
        box = chunk_box(place, whole.shape, chunk)
        full = torch.zeros(chunk, dtype=whole.dtype)
        full[tuple(slice(0, n) for n in box.shape)] = whole[box.slices]
        packed = full.reshape(-1).view(torch.uint8).numpy().tobytes()
        if compressor is not None:
            packed = numcodecs.Blosc("zstd", 3, 1).encode(np.frombuffer(packed, np.uint8))
        file = folder.joinpath("c", *map(str, place))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(packed)
