"""Zarr hierarchies that are damaged or hostile, and zips that are none: what is said, and what it costs."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError
from lazyckpt.errors import LazyckptError

from .hostility import deadline

zarr = pytest.importorskip("zarr")


def changed(path: Path, **about: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | about))


def peak(do: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of the processor that a call takes, and the most bytes of Python's memory."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        do()
        return time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- zips that are no hierarchies


def test_a_zip_of_anything_is_not_an_empty_hierarchy(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "policy.pth")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", b"{}")
        archive.write(tmp_path / "policy.pth", "policy.pth")
    assert list(lazyckpt.open(tmp_path / "model.zip")) == ["w"], "it is a folder with one checkpoint"
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for entry in ("photo1.jpg", "photo2.jpg"):
            archive.writestr(entry, b"\xff\xd8")
    with pytest.raises(FormatError) as raised:
        lazyckpt.open(tmp_path / "photos.zip")
    assert all(entry in str(raised.value) for entry in ("photo1.jpg", "photo2.jpg")), "it says what is in it"
    with zarr.storage.ZipStore(tmp_path / "empty.zip", mode="w") as store:
        zarr.create_group(store)
    assert list(lazyckpt.open(tmp_path / "empty.zip")) == [], "a hierarchy without arrays stays one"


# -- one array among others


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_size_zero_are_empty_tensors(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=version)
    group.create_array("a", shape=(4,), dtype="f4")[...] = 1
    group.create_array("none", shape=(0, 3), dtype="f4")
    document = tmp_path / "z" / "none" / ("zarr.json" if version == 3 else ".zarray")
    if version == 3:
        changed(document, chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0, 3]}})
    else:
        changed(document, chunks=[0, 3])
    view = lazyckpt.open(tmp_path / "z")
    assert view["none"][...].shape == (0, 3) and view["none"].dtype == torch.float32
    assert torch.equal(view["a"][...], torch.ones(4)) and not view.problems


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, None])
def test_one_damaged_array_does_not_spoil_the_others(tmp_path: Path, version: Any, text: str | None) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=version)
    for name in ("a", "deep/b", "deep/c"):
        group.create_array(name, shape=(4,), dtype="f4")[...] = 1
    document = tmp_path / "z/deep/b" / ("zarr.json" if version == 3 else ".zarray")
    if text is None:
        changed(document, shape=[-1])
    else:
        document.write_text(text)
    view = lazyckpt.open(tmp_path / "z")
    assert set(view) == {"a", "deep.c"} and list(view.unreadable) == ["deep.b"]
    assert any("b" in line for line in view.problems)
    assert torch.equal(view["deep.c"][...], torch.ones(4))
    with pytest.raises(LazyckptError):
        view.to_safetensors(tmp_path / "out")  # it does not vanish in silence


# -- what must cost little


def test_links_in_circles_are_named_and_not_followed(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
    group.create_array("deep/a", shape=(4,), dtype="f4")[...] = 1
    for n in range(4):
        os.symlink(".", tmp_path / f"z/l{n}")
        os.symlink("..", tmp_path / f"z/deep/l{n}")
    with deadline():
        view = lazyckpt.open(tmp_path / "z")
    assert list(view) == ["deep.a"] and len(view.unreadable) == 8


@pytest.mark.slow
@pytest.mark.parametrize("filler", [b" ", b'{"a":1},'])
def test_a_document_that_inflates_to_a_gigabyte(tmp_path: Path, filler: bytes) -> None:
    """Of a zip of a megabyte: it is not unpacked as a whole."""
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("zarr.json", "w") as entry:
        entry.write(b'{"zarr_format": 3, "node_type": "group", "attributes": {}, "a": [')
        block = filler * ((1 << 20) // len(filler))
        for _ in range(400):
            entry.write(block)
        entry.write(b"1]}")
    assert path.stat().st_size < 2 << 20

    def refuse() -> None:
        with pytest.raises(CorruptError):
            lazyckpt.open(path, cache=False)

    with deadline():
        _, memory = peak(refuse)
    assert memory < 400 << 20


def test_document_of_many_empty_objects_is_refused_before_parsing(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    many = b"[" + b"{}," * (4 << 20) + b"{}]"
    (tmp_path / "z/zarr.json").write_bytes(
        b'{"zarr_format": 3, "node_type": "group", "attributes": {"a": ' + many + b"}}"
    )

    def refuse() -> None:
        with pytest.raises(CorruptError):
            lazyckpt.open(tmp_path / "z", cache=False)

    _, memory = peak(refuse)
    assert memory < 100 << 20


def absent(folder: Path, shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any) -> None:
    array = zarr.create_array(str(folder), shape=shape, chunks=chunks, dtype="f4", fill_value=7, **more)
    array[(slice(0, 1),) * len(shape)] = 3
    array[(slice(shape[0] - 1, None),) + (slice(0, 1),) * (len(shape) - 1)] = 4


LAYOUTS: dict[str, dict[str, Any]] = {
    "one dimension": {"shape": (1 << 24,), "chunks": (1,)},
    "two dimensions": {"shape": (1 << 12, 1 << 12), "chunks": (1, 1)},
    "with dots": {
        "shape": (1 << 12, 1 << 12),
        "chunks": (1, 1),
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
    },
    "in shards": {"shape": (1 << 12, 1 << 12), "chunks": (1, 1), "shards": (16, 16)},
    "version 2": {"shape": (1 << 12, 1 << 12), "chunks": (1, 1), "zarr_format": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_absent_chunks_cost_nothing(tmp_path: Path, layout: str, packed: bool) -> None:
    path = tmp_path / "z"
    absent(path, **LAYOUTS[layout])
    truth = torch.full(LAYOUTS[layout]["shape"], 7.0)
    truth.view(truth.shape[0], -1)[0, 0] = 3
    truth.view(truth.shape[0], -1)[-1, 0] = 4
    if packed:
        with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(path))
        path = tmp_path / "z.zip"

    def whole() -> None:
        view = lazyckpt.open(path, cache=False)
        assert torch.equal(view["array"][...], truth)
        assert torch.equal(view["array"][::2], truth[::2]) and torch.equal(view["array"][5:-7:300], truth[5:-7:300])
        assert torch.equal(view.to()["array"], truth)
        assert len(list(view.files)) < 16_384

    with deadline():
        _, memory = peak(whole)
    assert memory < 100 << 20, "Python's objects; the elements themselves are torch's"


@pytest.mark.slow
def test_sparse_arrays_read_as_zarr_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = zarr.create_array(str(tmp_path / "z"), shape=(130, 47, 9), chunks=(3, 4, 2), dtype="i4", fill_value=-1)
    for _ in range(40):
        a, b, c = (int(rng.integers(0, n)) for n in array.shape)
        array[a : a + 4, b : b + 5, c] = rng.integers(0, 1000, array[a : a + 4, b : b + 5, c].shape)
    t = lazyckpt.open(tmp_path / "z")["array"]
    want = torch.from_numpy(array[...])
    for key in (
        ...,
        slice(3, 120),
        (slice(None), slice(5, 40, 3)),
        (slice(1, 130, 7), slice(None), 4),
        (slice(None, None, 50),),
    ):
        assert torch.equal(t[key], want[key])


# -- damage that other packages have errors of their own for


@pytest.mark.parametrize("packer", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED])
def test_damaged_documents_in_zips(tmp_path: Path, packer: int) -> None:
    path = tmp_path / "z.zip"
    document = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {str(n): n for n in range(999)}})
    with zipfile.ZipFile(path, "w", packer) as archive:
        archive.writestr("zarr.json", document)
    plain = path.read_bytes()
    for at in range(39, 200, 7):
        path.write_bytes(plain[:at] + bytes([plain[at] ^ 0x55]) + plain[at + 1 :])
        with pytest.raises(LazyckptError):
            lazyckpt.open(path, cache=False)["a"]


HEADER = {"method": 8, "crc": 14, "size": 22, "length of the name": 26, "length of the extra field": 28, "name": 30}


@pytest.mark.parametrize("field", HEADER)
@pytest.mark.parametrize("name", ["a/c/0", "a/zarr.json"])
@pytest.mark.parametrize("packer", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_headers_in_zips_that_contradict_the_directory_are_refused(
    tmp_path: Path, packer: int, name: str, field: str
) -> None:
    """Readers that go by an entry's own header would see other bytes."""
    path = tmp_path / "z.zip"
    with zarr.storage.ZipStore(path, mode="w", compression=packer) as store:
        zarr.create_array(store, name="a", data=np.arange(64.0), chunks=(64,), compressors=None)
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo(name).header_offset + HEADER[field]
    assert torch.equal(lazyckpt.open(path, cache=False)["a"][...], torch.arange(64.0, dtype=torch.float64))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"z\.zip"):
        lazyckpt.open(path, cache=False)["a"][...]


@pytest.mark.parametrize("codec", ["bz2", "lzma", "zlib", "gzip", "zstd", "blosc", "lz4"])
def test_damaged_chunks_of_every_codec(tmp_path: Path, codec: str) -> None:
    import numcodecs

    made = numcodecs.get_codec({"id": codec})
    zarr.create_array(
        str(tmp_path / "z"), shape=(999,), chunks=(999,), dtype="i4", zarr_format=2, compressors=made, filters=None
    )[...] = np.arange(999)
    (chunk,) = (p for p in (tmp_path / "z").rglob("0") if p.is_file())
    plain = chunk.read_bytes()
    for at in range(0, len(plain), max(1, len(plain) // 40)):
        for damaged in (plain[:at] + bytes([plain[at] ^ 0xFF]) + plain[at + 1 :], plain[:at]):
            chunk.write_bytes(damaged)
            with suppress(LazyckptError):
                lazyckpt.open(tmp_path / "z", cache=False)["array"][...]


def test_text_where_an_export_has_objects(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "epoch": 3}, tmp_path / "m.pt")
    lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "z")
    root = tmp_path / "z/zarr.json"
    about = json.loads(root.read_text())
    for bad in (
        {"$numpy.dtype": "no such dtype"},
        {"$numpy.dtype": "," * 100},
        {"$numpy.ndarray": [1]},
        {"$opaque": [3, 4]},
        {"$tuple": 5},
        {"$datetime": "x"},
        {"$decimal": "x"},
        {"$unknown": 1},
    ):
        about["attributes"]["lazyckpt"]["meta"] = {"a": bad}
        root.write_text(json.dumps(about))
        with pytest.raises(CorruptError, match=r"zarr\.json"):
            lazyckpt.open(tmp_path / "z", cache=False)
    for good, value in (({"$numpy.dtype": "O"}, np.dtype("O")), ({"$tuple": [5]}, (5,))):
        about["attributes"]["lazyckpt"]["meta"] = {"a": good}
        root.write_text(json.dumps(about))
        assert lazyckpt.open(tmp_path / "z", cache=False).meta["a"] == value
