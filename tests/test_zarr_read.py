"""Zarr hierarchies as checkpoints: lazyckpt's own exports, and what zarr-python and tensorstore write."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numcodecs
import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, DataError, FormatError, MissingFileError
from lazyckpt.core.dtypes import dtype_of
from lazyckpt.core.extents import Extent
from lazyckpt.formats.zarr.metadata import fill_bytes
from lazyckpt.io.reading.keeping import once
from lazyckpt.io.reading.packed import unpack_chunk
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case, zarr_files
from .writers.zarr_files import Arrays

zarr = pytest.importorskip("zarr")
BLOSC = {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "shuffle", "typesize": 1}}


def _written(write: Callable[[Path], Arrays], name: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        truth = write(folder / name)
        return Case(folder / name, {"weights": truth}, {"archives": True})

    return make


def _consolidated(path: Path) -> Arrays:
    truth = zarr_files.v3(path)
    zarr_files.consolidated(path)
    return truth


def _exported_zip(folder: Path) -> Case:
    case = zarr_files.export(folder / "own", BLOSC)
    shutil.make_archive(str(folder / "own"), "zip", folder / "own")
    return Case(folder / "own.zip", case.truth, case.info)


CASES: dict[str, Callable[[Path], Case]] = {
    "own": lambda folder: zarr_files.export(folder / "own"),
    "own_blosc": lambda folder: zarr_files.export(folder / "own", BLOSC),
    "own_zip": _exported_zip,
    "v2": _written(zarr_files.v2, "two.zarr"),
    "v3": _written(_consolidated, "three.zarr"),
    "v3_zip": _written(zarr_files.zipped(zarr_files.v3), "three.zip"),
}
MORE: dict[str, Callable[[Path], Case]] = {
    "v3_alone": _written(zarr_files.v3, "three.zarr"),
    "v2_zip": _written(zarr_files.zipped(zarr_files.v2, zipfile.ZIP_DEFLATED, "top/"), "two.zip"),
}


@pytest.fixture(scope="session")
def zarr_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in {**CASES, **MORE}.items()}


@pytest.mark.product
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(zarr_cases: dict[str, Case], name: str, check: Check) -> None:
    check(zarr_cases[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_places(zarr_cases: dict[str, Case], name: str) -> None:
    contract.names_shapes_dtypes(zarr_cases[name])
    contract.whole_tensors(zarr_cases[name])


def test_arrays_of_tensorstore(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    truth = zarr_files.by_tensorstore(tmp_path / "params")
    view = lazyckpt.open(tmp_path / "params")
    assert set(view) == set(truth)
    for name, whole in truth.items():
        same(view[name][...], whole, name)
        same(view[name][3:8, 2:], whole[3:8, 2:], name)


# -- lazyckpt's own exports


def test_export_round_trip(zarr_cases: dict[str, Case]) -> None:
    case = zarr_cases["own"]
    view, counts = opened(case.path)
    assert counts.paths == {"zarr.json"}, "the root's document tells everything"
    assert list(view.states) == ["weights", "fp32", "exp/avg"]
    assert view.format == "zarr"
    assert view.mesh == lazyckpt.Mesh(tp=2, dp=4)
    assert view.meta == case.info["meta"]
    assert view.problems == ("when it was exported: a line",)
    assert "deepspeed-zero2" in view["embed.weight"].explain()
    assert all(isinstance(f.extent, Extent) and f.extent.raw for f in view["layers.0.up.weight"].fragments)
    counts.clear()
    view["layers.0.up.weight"][3:5, 2]
    assert counts.bytes == 2 * 2, counts
    assert lazyckpt.open(case.path).files["zarr.json"].size == (case.path / "zarr.json").stat().st_size


def test_a_chunk_of_an_export_has_to_be_there(zarr_cases: dict[str, Case], tmp_path: Path) -> None:
    for name in ("own", "own_blosc"):
        path = tmp_path / name
        shutil.copytree(zarr_cases[name].path, path)
        chunk = path / "weights/embed/weight/c/0"
        data = chunk.read_bytes()
        whole = zarr_cases[name].truth["weights"]["embed.weight"]
        chunk.unlink()
        with pytest.raises(MissingFileError, match="weights/embed/weight/c/0"):
            lazyckpt.open(path)["embed.weight"][...]
        same(lazyckpt.open(path)["embed.weight"][6:], whole[6:], "what is there")
        chunk.write_bytes(data[:-3])
        for key in (..., slice(3, None, 2), slice(4, 6)):
            with pytest.raises(CorruptError, match="weights/embed/weight/c/0"):
                lazyckpt.open(path, cache=False)["embed.weight"][key]
        with pytest.raises(CorruptError, match="weights/embed/weight/c/0"):
            lazyckpt.open(path, cache=False)["embed.weight"].to(copy=False)


def test_damaged_exports(zarr_cases: dict[str, Case], tmp_path: Path) -> None:
    path = tmp_path / "own"
    shutil.copytree(zarr_cases["own"].path, path)
    root = json.loads((path / "zarr.json").read_text())
    about = root["attributes"]["lazyckpt"]

    def changed(**changes: Any) -> lazyckpt.CheckpointView:
        told = root | {"attributes": {"lazyckpt": about | changes}}
        (path / "zarr.json").write_text(json.dumps(told))
        return lazyckpt.open(path, cache=False)

    with pytest.raises(FormatError, match="a later one"):
        changed(layout=99)
    for bad in (
        {"layout": "x"}, {"state": 5}, {"states": None}, {"states": "weights"}, {"mesh": {"tp": 0}}, {"mesh": 3},
        {"mesh": {"a": 1}}, {"aliases": {"a": "nothing"}}, {"aliases": {"a": 5}}, {"aliases": [1]}, {"format": 5},
        {"meta": {"$int": "x"}}, {"meta": [1]}, {"problems": [3]}, {"states": ["weights"]},
    ):  # fmt: skip
        with pytest.raises((CorruptError, FormatError)) as error:
            changed(**bad)
        assert "zarr.json" in str(error.value) or "attributes" in str(error.value), bad
    nodes = json.loads(json.dumps(root))
    array = nodes["consolidated_metadata"]["metadata"]["weights/embed/weight"]
    array["shape"][0] -= 1  # the chunks would fit, too
    (path / "zarr.json").write_text(json.dumps(nodes))
    with pytest.raises(CorruptError, match="its dimensions are called"):
        lazyckpt.open(path, cache=False)
    array["dimension_names"][0] = "vocabulary"  # but others may name them
    (path / "zarr.json").write_text(json.dumps(nodes))
    assert lazyckpt.open(path, cache=False)["embed.weight"].shape[0] == array["shape"][0]
    (path / "zarr.json").unlink()
    with pytest.raises(MissingFileError, match="not finished"):
        lazyckpt.open(path)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/.lazyckpt-job").write_text("x")
    with pytest.raises(MissingFileError, match="not finished"):
        lazyckpt.open(tmp_path / "begun")


# -- fill values, absent chunks


@pytest.mark.parametrize(
    ("value", "dtype", "bits"),
    [
        ("NaN", torch.float32, "0000c07f"),
        ("-Infinity", torch.float16, "00fc"),
        ("0x7fc00001", torch.float32, "0100c07f"),
        ("0x3f81", torch.bfloat16, "813f"),
        (1.0, torch.float8_e4m3fn, "38"),
        (True, torch.bool, "01"),
        (2**64 - 1, torch.uint64, "ff" * 8),
        (-2, torch.int16, "feff"),
        ([1.0, "NaN"], torch.complex64, "0000803f0000c07f"),
        (None, torch.float64, "00" * 8),
    ],
)
def test_fill_values(value: Any, dtype: torch.dtype, bits: str) -> None:
    assert fill_bytes(value, dtype_of(dtype), "here").hex() == bits


@pytest.mark.parametrize(
    ("value", "dtype"),
    [("x", torch.float32), (300, torch.uint8), (1.5, torch.int8), ({}, torch.int8), ("0xfffff", torch.float16),
     ([1], torch.complex64), ("NaN", torch.int32), (10**400, torch.float32)],
)  # fmt: skip
def test_invalid_fill_values(value: Any, dtype: torch.dtype) -> None:
    with pytest.raises(CorruptError, match="here"):
        fill_bytes(value, dtype_of(dtype), "here")


@pytest.mark.parametrize("version", [2, 3])
def test_absent_chunks(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=version)
    truth = {}
    fills = {"f4": np.nan, ">f8": -np.inf, "i2": -7, "c8": 1 - 2j, "?": True}
    for n, (dtype, fill) in enumerate(fills.items()):
        for packed in (True, False):
            options: dict[str, Any] = {} if packed else {"compressors": None}
            array = group.create_array(
                f"a{n}{packed}", shape=(9, 8), chunks=(4, 4), dtype=dtype, fill_value=fill, **options
            )
            array[4:8, 4:8] = zarr_files.data((4, 4), dtype)
            truth[f"a{n}{packed}"] = zarr_files.tensor(array[...])
    if version == 3:
        array = group.create_array("shard", shape=(9, 8), chunks=(2, 2), shards=(4, 4), dtype="f4", fill_value=2.0)
        array[5:7, 1:3] = 3.0
        truth["shard"] = zarr_files.tensor(array[...])
    view = lazyckpt.open(tmp_path / "z")
    for name, whole in truth.items():
        same(view[name][...], whole, name)
        same(view[name][1:, ::3], whole[1:, ::3], name)
    assert len(dict(view.files)) == len(view.files)
    (tmp_path / "z" / "a0False").chmod(0)
    try:
        if _forbidden(tmp_path / "z" / "a0False"):
            with pytest.raises(MissingFileError):  # it cannot be told whether it is there: no values are made up
                lazyckpt.open(tmp_path / "z", format="zarr", cache=False)["a0False"][...]
    finally:
        (tmp_path / "z" / "a0False").chmod(0o755)


def test_absent_chunks_of_a_zip(tmp_path: Path) -> None:
    with zarr.storage.ZipStore(tmp_path / "holes.zip", mode="w") as store:
        root = zarr.create_group(store)
        for name, shape, dtype in (("a", (5,), "i4"), ("b", (5,), "f4"), ("c", (4, 5), "i4"), ("d", (), "i2")):
            root.create_array(name, shape=shape, dtype=dtype, chunks=shape, fill_value=ord(name))
    view = lazyckpt.open(tmp_path / "holes.zip")
    for name in "abcd":
        assert bool((view[name][...] == ord(name)).all()), name


def _forbidden(folder: Path) -> bool:
    try:
        list(folder.iterdir())
    except PermissionError:
        return True
    return False  # root may do everything


# -- shards


def test_a_slice_reads_its_chunks_of_a_shard(tmp_path: Path) -> None:
    whole = zarr_files.data((64, 64), "f4")
    array = zarr.create_array(
        str(tmp_path / "z"), shape=(64, 64), chunks=(8, 8), shards=(32, 32), dtype="f4", compressors=None
    )
    array[...] = whole
    view, counts = opened(tmp_path / "z")
    counts.clear()
    same(view["array"][9:12, 40:42], torch.from_numpy(whole[9:12, 40:42]), "a slice")
    table = 16 * 16 + 4
    assert counts.bytes <= table + 3 * 2 * 4 and counts.paths == {"c/0/1"}, counts
    assert "number 5 of its shard" in view["array"].explain((9, 40))


@pytest.mark.parametrize("codec", ["blosc", "zstd", "lz4", "zlib"])
def test_large_chunks_unpack_into_place(tmp_path: Path, codec: str) -> None:
    whole = zarr_files.data((1024, 1024), "f4")
    options: dict[str, Any] = {
        "chunks": (512, 1024),
        "zarr_format": 2,
        "compressors": numcodecs.get_codec({"id": codec}),
    }
    array = zarr.create_array(str(tmp_path / "z"), shape=whole.shape, dtype="f4", **options)
    array[...] = whole
    view: Any = lazyckpt.open(tmp_path / "z")
    for _ in range(2):
        same(view["array"][...], torch.from_numpy(whole), "all")
        same(view["array"][500:600, 7], torch.from_numpy(whole[500:600, 7]), "across")
        same(view["array"][512:], torch.from_numpy(whole[512:]), "one chunk")
    chunk = tmp_path / "z/1.0"
    chunk.write_bytes(chunk.read_bytes()[:-50])
    with pytest.raises(CorruptError, match=r"z/1\.0"):
        lazyckpt.open(tmp_path / "z", cache=False)["array"][...]


def test_a_large_chunk_is_unpacked_once_for_threads_that_keep_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.arange(9 << 8, dtype="f4")[:, None]
    array = zarr.create_array(str(tmp_path / "z"), shape=(9 << 8, 1 << 10), dtype="f4", chunks=(9 << 8, 1 << 10))
    array[...] = np.broadcast_to(rows, array.shape)  # 9 MiB
    view: Any = lazyckpt.open(tmp_path / "z")
    unpacked = []

    def counted(*args: Any, **options: Any) -> Any:
        unpacked.append(args)
        return unpack_chunk(*args, **options)

    monkeypatch.setattr("lazyckpt.io.reading.packed.unpack_chunk", counted)

    def read(n: int) -> bool:
        with once():
            return bool((view["array"][n * 99 : n * 99 + 50, 7] == torch.arange(n * 99, n * 99 + 50)).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(16)))
    assert len(unpacked) == 1


def test_the_order_of_names_is_the_same_each_time(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w")
    for n in range(12):
        group.create_array(f"{n}/weight", shape=(2,), dtype="f4")
    assert {tuple(lazyckpt.open(tmp_path / "z", cache=False)) for _ in range(16)} == {
        tuple(f"{n}.weight" for n in sorted(range(12), key=str))
    }


# -- what is not read


def test_arrays_that_are_not_tensors_are_reported(tmp_path: Path) -> None:
    for version in (2, 3):
        group = zarr.open_group(str(tmp_path / f"z{version}"), mode="w", zarr_format=version)
        group.create_array("ok", shape=(3,), dtype="f4")[...] = 1
        group.create_array("when", shape=(3,), dtype="M8[s]")
        group.create_array("words", shape=(3,), dtype="U5")
        group.create_array("records", shape=(3,), dtype=[("a", "f4"), ("b", "i4")])
        view = lazyckpt.open(tmp_path / f"z{version}")
        assert list(view) == ["ok"]
        for name in ("when", "words", "records"):
            assert any(name in line and line.code == "unsupported-tensor" for line in view.problems), name


def test_an_unknown_codec(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
    for name in ("a", "b"):
        group.create_array(name, shape=(4,), dtype="f4")[...] = 1
    _change(tmp_path / "z/a/zarr.json", codecs=["bytes", {"name": "acme.squeeze"}])
    view = lazyckpt.open(tmp_path / "z")
    assert any("acme.squeeze" in line and "a" in line for line in view.problems)
    with pytest.raises(DataError, match=r"acme\.squeeze"):
        view["a"][...]
    assert view["b"][...].tolist() == [1.0] * 4


# -- damaged and hostile


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


COMPRESSORS = (
    numcodecs.Blosc(), numcodecs.LZ4(), numcodecs.Zstd(), numcodecs.GZip(), numcodecs.Zlib(), numcodecs.BZ2(),
    numcodecs.LZMA(),
)  # fmt: skip


@pytest.mark.parametrize("codec", COMPRESSORS, ids=lambda codec: str(codec.codec_id))
def test_damaged_chunks(tmp_path: Path, codec: Any) -> None:
    array = zarr.create_array(
        str(tmp_path / "z"), shape=(600,), chunks=(300,), dtype="f4", compressors=codec, zarr_format=2
    )
    array[...] = zarr_files.data((600,), "f4")
    chunk = tmp_path / "z/0"
    data = chunk.read_bytes()
    bomb = codec.encode(np.zeros(64 << 20, np.uint8))
    longer = codec.encode(np.zeros(304, "f4"))
    for bad in (
        data[: len(data) // 2],
        b"",
        b"\xff" * 40,
        bytes(bomb),
        bytes(longer),
        data[:4] + b"\xff" * 12 + data[16:],
    ):
        chunk.write_bytes(bad)
        with pytest.raises(CorruptError, match="z/0"):
            lazyckpt.open(tmp_path / "z", cache=False)["array"][...]
    same(lazyckpt.open(tmp_path / "z")["array"][300:], zarr_files.tensor(array[300:]), "the other chunk")


def test_raw_chunks_of_a_wrong_size(tmp_path: Path) -> None:
    array = zarr.create_array(
        str(tmp_path / "z"), shape=(60,), chunks=(30,), dtype="f4", compressors=None, zarr_format=2
    )
    array[...] = 1
    for size in (0, 119, 121):
        (tmp_path / "z/0").write_bytes(bytes(size))
        with pytest.raises(CorruptError, match="z/0"):
            lazyckpt.open(tmp_path / "z", cache=False)["array"][3]


def test_damaged_shards(tmp_path: Path) -> None:
    array = zarr.create_array(str(tmp_path / "z"), shape=(32,), chunks=(4,), shards=(16,), dtype="f4")
    array[...] = zarr_files.data((32,), "f4")
    shard = tmp_path / "z/c/0"
    data = shard.read_bytes()
    table = bytearray(data[-68:-4])
    table[8:16] = (1 << 40).to_bytes(8, "little")
    import google_crc32c

    far = data[:-68] + table + google_crc32c.value(bytes(table)).to_bytes(4, "little")
    for bad in (data[:-1], data[:30], b"", data[:-70] + b"\0" * 70, far, data[4:]):
        shard.write_bytes(bad)
        with pytest.raises(CorruptError, match="c/0"):
            lazyckpt.open(tmp_path / "z", cache=False)["array"][...]


V3 = {
    "shape": [[-1], [1 << 63], ["3"], None, [3, 3], [1.5], {}],
    "chunk_grid": [None, {}, {"name": "regular"}, {"name": "regular", "configuration": {"chunk_shape": [0]}},
                   {"name": "regular", "configuration": {"chunk_shape": [1 << 62, 1 << 62]}}],
    "codecs": [None, [], ["transpose"], [{"name": "transpose", "configuration": {"order": [5]}}, "bytes"], [3],
               [{"name": "bytes", "configuration": {"endian": "x"}}], [{"name": "bytes", "configuration": 5}],
               [{"name": "sharding_indexed", "configuration": {"chunk_shape": [3], "codecs": ["bytes"]}}],
               [{"name": "sharding_indexed", "configuration": {"chunk_shape": ["a"], "codecs": ["bytes"]}}]],
    "fill_value": ["x", [1, 2], {}],
    "node_type": ["thing", None],
    "zarr_format": [2, 4, None],
    "chunk_key_encoding": [5, {"name": "default", "configuration": {"separator": "../"}}],
}  # fmt: skip


@pytest.mark.parametrize("field", V3)
def test_invalid_documents(tmp_path: Path, field: str) -> None:
    zarr.create_array(str(tmp_path / "z"), shape=(4,), chunks=(2,), dtype="f4")[...] = 1
    document = tmp_path / "z/zarr.json"
    plain = document.read_text()
    for bad in V3[field]:
        document.write_text(plain)
        _change(document, **{field: bad})
        with pytest.raises(CorruptError, match=r"zarr\.json"):
            lazyckpt.open(tmp_path / "z", cache=False)


def test_absurd_documents(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
    group.create_array("a", shape=(4,), dtype="f4")[...] = 1
    zarr_files.consolidated(tmp_path / "z")
    root = tmp_path / "z/zarr.json"
    about = json.loads(root.read_text())
    listed = about["consolidated_metadata"]["metadata"]
    for path in ("../a", "/etc/a", "a/../../b", "a//b", "a\0b", "."):
        _change(root, consolidated_metadata={"metadata": {path: listed["a"]}})
        with pytest.raises(CorruptError, match="no path of a node"):
            lazyckpt.open(tmp_path / "z", cache=False)
    for text in ("", "{", "[]", "[" * 100_000, '{"zarr_format": 3}', "\xff"):
        root.write_text(text)
        with pytest.raises(CorruptError, match=r"zarr\.json"):
            lazyckpt.open(tmp_path / "z", cache=False)
    shutil.rmtree(tmp_path / "z")
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
    group.create_group("loop")
    (tmp_path / "z/loop/again").symlink_to(tmp_path / "z", target_is_directory=True)
    with pytest.raises(CorruptError, match="no hierarchy"):
        lazyckpt.open(tmp_path / "z", cache=False)


def test_huge_arrays_cost_nothing(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
    group.create_array("many", shape=(1 << 40,), chunks=(1,), dtype="i1")
    group.create_array("large", shape=(1 << 40, 1 << 20), chunks=(1 << 30, 1 << 20), dtype="i1", compressors=None)
    group.create_array("packed", shape=(1 << 45,), chunks=(1 << 40,), dtype="i1")
    view = lazyckpt.open(tmp_path / "z")
    assert list(view) == ["large"]
    assert len(view.problems) == 2
    assert view["large"][5, :3].tolist() == [0, 0, 0]
    with pytest.raises(DataError):
        view["large"][...]


@pytest.mark.slow
def test_zips_that_cannot_be_read(tmp_path: Path, zarr_cases: dict[str, Case]) -> None:
    data = zarr_cases["v3_zip"].path.read_bytes()
    (tmp_path / "a.zip").write_bytes(data[:-40])
    with pytest.raises(CorruptError, match=r"a\.zip"):
        lazyckpt.open(tmp_path / "a.zip")
    at = data.index(b"PK\x03\x04", 10)  # the entry behind the first
    (tmp_path / "b.zip").write_bytes(data[:at] + b"XX" + data[at + 2 :])
    view: Any
    with pytest.raises(CorruptError, match=r"b\.zip"):
        view = lazyckpt.open(tmp_path / "b.zip")
        view.to()
    zarr_files.zipped(zarr_files.v3, zipfile.ZIP_DEFLATED)(tmp_path / "c.zip")
    view = lazyckpt.open(tmp_path / "c.zip")
    same(view["layer.raw"][...], zarr_cases["v3"].truth["weights"]["layer.raw"], "deflated")
    with pytest.raises(CorruptError, match="ZIP_STORED"):
        view["shard.raw"][...]
    zarr_files.zipped(zarr_files.v2, zipfile.ZIP_BZIP2)(tmp_path / "d.zip")
    with pytest.raises(FormatError, match="ZIP_STORED"):
        lazyckpt.open(tmp_path / "d.zip")


# -- behind a URL


@pytest.mark.slow
def test_behind_a_url(zarr_cases: dict[str, Case]) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for name in ("own_blosc", "v3", "v3_zip"):
            case = zarr_cases[name]
            memory.put(str(case.path), f"/zarr/{name}{case.path.suffix}", recursive=True)
            view = lazyckpt.open(f"memory://zarr/{name}{case.path.suffix}")
            for key, whole in case.truth["weights"].items():
                same(view[key][...], whole, (name, key))
    finally:
        memory.rm("/zarr", recursive=True)


def test_attributes_and_names(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"z{version}"
        group = zarr.open_group(str(path), mode="w", zarr_format=version)
        group.attrs["title"] = "here"
        for name in ("a/b", "a.b"):
            array = group.create_array(name, shape=(3,), dtype="f4")
            array[...] = len(name)
            array.attrs["unit"] = "m"
        view: Any = lazyckpt.open(path)
        assert len(view) == 2 and "a.b" in view
        assert any(line.code == "duplicate-tensor" for line in view.problems)
        assert view.meta["attributes"] == {"": {"title": "here"}, "a/b": {"unit": "m"}, "a.b": {"unit": "m"}}


def test_the_order_is_the_same_at_each_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever document a thread reads first: else two conversions would not have the same bytes."""
    group = zarr.open_group(str(tmp_path), mode="w", zarr_format=3)
    for n in (2, 0, 1):
        group.create_array(f"layers/{n}/w", shape=(3,), dtype="f4")
    monkeypatch.setattr("lazyckpt.formats.zarr.tree.each", lambda do, level: [do(one) for one in reversed(level)])
    view = lazyckpt.open(tmp_path, cache=False)
    assert list(view) == ["layers.0.w", "layers.1.w", "layers.2.w"]
    documents = [path for path in view.files if path.endswith("zarr.json")]
    assert documents == sorted(documents)
