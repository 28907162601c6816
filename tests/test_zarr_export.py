"""Views written as zarr: what zarr-python, xarray and tensorstore find, and what happens if something is in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.core.box import Box
from lazyckpt.core.dtypes import I32, to_numpy
from lazyckpt.core.extents import Extent
from lazyckpt.core.placement import Part
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.errors import ChangedFileError, CorruptError, DataError, DestinationError, MissingFileError
from lazyckpt.export import chunks
from lazyckpt.export import zarr as export
from lazyckpt.formats.zarr.documents import NAMES
from lazyckpt.interop import zarr_dtypes
from lazyckpt.io import system
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.jobs import destination, places
from lazyckpt.tensor import LazyTensor

from .conftest import need
from .lanes import rounds
from .writers import Case, bit_equal

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr")
zarr_dtypes.register()

CODECS: list[Any] = [
    None,
    "zstd",
    "blosc",
    "gzip",
    {"name": "zstd", "configuration": {"level": 9, "checksum": True}},
    {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle"}},
    {"id": "bz2", "level": 1},
    numcodecs.LZ4(),
    "numcodecs.lzma",
]


def _state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a.w": torch.randn(300, 70, generator=g),
        "a.w.scale": torch.randn(7, generator=g),
        "a.b": torch.randn(333, generator=g).bfloat16(),
        "x/y": torch.randn(5, 4, 3, generator=g).half(),
        "f8": torch.randn(33, 17, generator=g).to(torch.float8_e4m3fn),
        "i": torch.arange(11),
        "bool": torch.rand(9, generator=g) > 0.5,
        "c": torch.randn(6, dtype=torch.complex64, generator=g),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = _state()
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "state.pt"
    torch.save(state | {"tied": state["a.w"]}, path)
    return path, state


PATHS = {"a.w": "a/w/%", "a.w.scale": "a/w/scale", "x/y": "x%2Fy"}


def _check(root: Any, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        array = root["weights/" + PATHS.get(name, name.replace(".", "/"))]
        got = np.asarray(array[...])
        assert array.shape == tensor.shape and got.tobytes() == to_numpy(tensor).tobytes(), name
        assert array.attrs["lazyckpt"]["name"] == name
    about = root.attrs["lazyckpt"]
    assert about["aliases"] == {"tied": "a.w"} and about["format"] == "torch" and about["states"] == ["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, 20_000], ids=["chunks", "shards"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zarr_reads_what_was_written(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, codec: Any, shard: int | None
) -> None:
    path, state = saved
    out = tmp_path / "out.zarr"
    lazyckpt.open(path).to_zarr(out, codec=codec, chunk=4000, shard=shard, verify=True)
    root = zarr.open_group(out, mode="r")
    assert root.metadata.consolidated_metadata is not None
    _check(root, state)
    array = root["weights/a/w/%"]
    assert array.chunks == (14, 70) and (array.shards == (70, 70) if shard else array.shards is None)
    _check(zarr.open_group(out, mode="r", use_consolidated=False), state)
    assert sorted(os.listdir(tmp_path)) == ["in", "out.zarr"]


@pytest.mark.parametrize("codec", CODECS[:6], ids=str)
@pytest.mark.parametrize("shard", [None, True], ids=["chunks", "shards"])
def test_tensorstore_reads_what_was_written(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, codec: Any, shard: bool | None
) -> None:
    need("tensorstore")
    import tensorstore

    path, state = saved
    lazyckpt.open(path).to_zarr(tmp_path / "out", codec=codec, chunk=4000, shard=shard)
    for name, tensor in state.items():
        place = str(tmp_path / "out" / "weights" / PATHS.get(name, name.replace(".", "/")))
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": place}}
        got = tensorstore.open(spec).result().read().result()
        assert got.dtype == to_numpy(tensor).dtype and got.tobytes() == to_numpy(tensor).tobytes(), name


def test_xarray_reads_what_was_written(tmp_path: Path) -> None:
    need("xarray")
    import xarray

    state = {"a.w": torch.randn(8, 6), "a.b": torch.randn(6), "c.b": torch.randn(6).bfloat16()}
    torch.save(state, tmp_path / "m.pt")
    lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "out.zarr", codec="blosc")
    with xarray.open_datatree(tmp_path / "out.zarr", engine="zarr") as tree:
        node = tree["weights/a"]
        assert node["w"].dims == ("d8", "d6") and np.array_equal(node["w"], state["a.w"].numpy())
        assert np.array_equal(tree["weights/c"]["b"], to_numpy(state["c.b"]))


@pytest.mark.parametrize("dtype", [d.torch for d in NAMES], ids=str)
@pytest.mark.parametrize("codec", [None, "blosc", {"id": "lz4"}], ids=str)
def test_every_dtype(dtype: torch.dtype, codec: Any, tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (480,), dtype=torch.uint8)
    tensor = raw.bool() if dtype == torch.bool else raw.view(dtype)
    torch.save({"t": tensor}, tmp_path / "t.pt")
    lazyckpt.open(tmp_path / "t.pt").to_zarr(tmp_path / "t.zarr", codec=codec, verify=True)
    array = zarr.open_array(tmp_path / "t.zarr" / "weights" / "t", mode="r")
    assert np.asarray(array[...]).tobytes() == raw.numpy().tobytes()


@settings(max_examples=rounds(60), deadline=None)
@given(data=st.data())
def test_any_grid(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Chunks, shards, edges and pieces of all sizes, of tensors in fragments."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("grid")
    fragments = []
    cell = data.draw(st.integers(1, 4))
    rows = range(0, shape[0], cell) if shape else [0]
    for at in rows:
        part = whole[at : at + cell] if shape else whole
        (folder / f"{at}").write_bytes(part.contiguous().numpy().tobytes())
        strides = tuple(int(s) for s in part.contiguous().stride())
        extent = Extent(f"{at}", 0, torch.int32, tuple(part.shape), strides)
        parts = (Part(Box.of(part.shape), (at, *(0 for _ in shape[1:]))),) if shape else None
        fragments.append(Fragment(extent, tuple(part.shape), parts))
    tensor = LazyTensor(LocalStore(folder), TensorSpec("t", shape, torch.int32, tuple(fragments)))
    chunk = tuple(data.draw(st.integers(1, max(1, n + 2))) for n in shape)
    times = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    shard = tuple(c * n for c, n in zip(chunk, times, strict=True)) if data.draw(st.booleans()) and shape else None
    codec = data.draw(st.sampled_from([None, "zstd"]))
    cut = chunks.Cut(chunk, shard, export.encoding(codec, torch.int32))
    place = places.Folder(str(folder / "out"))
    os.mkdir(place.root)
    item = export.Item(tensor, "t", cut)
    document = export.array("t", shape, I32, cut.file, cut.codecs)
    place.put("t/zarr.json", [json.dumps(document).encode()])
    with mock.patch.object(chunks, "PIECE", data.draw(st.sampled_from([4, 12, 40, 4 << 20]))):
        for key, block, _ in item.files():
            chunks.write(place, key, block, cut)
            chunks.check(place, key, block, cut)
            written = Path(place.root, key)
            good = bytearray(written.read_bytes())
            at = data.draw(st.integers(0, len(good) - 1))
            bad = good[:]
            bad[at] ^= 0x10
            written.write_bytes(bad)
            if codec is None:
                with pytest.raises(CorruptError, match="do not hold"):
                    chunks.check(place, key, block, cut)
            written.write_bytes(good)
    array = zarr.open_array(Path(place.root, "t"), mode="r")
    assert np.array_equal(array[...], whole.numpy())


def test_a_zip_file(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    out = tmp_path / "out.zip"
    view = lazyckpt.open(path)
    view.to_zarr(out, chunk=4000, codec="zstd", verify=True)
    with zarr.storage.ZipStore(out, mode="r") as store:
        _check(zarr.open_group(store, mode="r"), state)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None and {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    assert sorted(os.listdir(tmp_path)) == ["in", "out.zip"]
    with pytest.raises(DestinationError, match="exists already"):
        view.to_zarr(out)
    view.select("i").to_zarr(out, overwrite=True)
    with zarr.storage.ZipStore(out, mode="r") as store:
        assert list(zarr.open_group(store, mode="r")["weights"]) == ["i"]


def test_an_object_store(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    import fsspec

    path, state = saved
    view = lazyckpt.open(path)
    fs = fsspec.filesystem("memory")
    url = "memory://export/out.zarr"
    view.to_zarr(url, chunk=4000, verify=True)
    _check(zarr.open_group(url, mode="r"), state)
    with pytest.raises(DestinationError, match="exists already"):
        view.to_zarr(url)
    view.select("i").to_zarr(url, overwrite=True)
    assert list(zarr.open_group(url, mode="r")["weights"]) == ["i"]
    assert not any("a/w" in name for name in fs.find("/export"))
    fs.pipe("/export/other/file", b"x")
    with pytest.raises(DestinationError, match="no zarr hierarchy"):
        view.to_zarr("memory://export/other", overwrite=True)
    assert fs.find("/export/other") == ["/export/other/file"]
    with pytest.raises(DestinationError, match=r"nosuch"):
        view.to_zarr("nosuch://x/y")


def test_an_object_store_that_fails_midway(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    path, state = saved
    view = lazyckpt.open(path)
    url, fs = "memory://export/midway.zarr", fsspec.filesystem("memory")
    put: list[str] = []
    real = MemoryFileSystem.mv

    def mv(self: Any, part: str, name: str, **options: Any) -> Any:
        put.append(name)
        if failing and len(put) == 10:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return real(self, part, name, **options)

    failing = True
    with mock.patch.object(MemoryFileSystem, "mv", mv):
        with pytest.raises(DestinationError, match=r"Connection reset.*call again to go on"):
            view.to_zarr(url, chunk=4000, executor=ThreadPoolExecutor(1))
        assert not fs.exists("/export/midway.zarr/zarr.json")
        there = set(fs.find("/export/midway.zarr"))
        assert len(there) == 8  # the marker was written twice
        with pytest.raises(DestinationError, match="unfinished export of something else"):
            view.to_zarr(url, chunk=5000)
        failing = False
        put.clear()
        view.to_zarr(url, chunk=4000)
    # all of the chunks but those that are there, and what tells that it is complete comes last
    assert {name for name in there if "/c/" in name or name.endswith("/c")}.isdisjoint(put)
    assert put[-1] == "/export/midway.zarr/zarr.json"
    _check(zarr.open_group(url, mode="r"), state)
    assert not any(name.endswith("-job") for name in fs.find("/export/midway.zarr"))


# -- states and parts


def test_states_of_a_training(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = zero_cases["zero2_client_state"]
    view = lazyckpt.open(case.path)
    before = {p: p.stat().st_mtime_ns for p in case.path.rglob("*")}
    view.to_zarr(tmp_path / "out", codec="zstd", verify=True)
    root = zarr.open_group(tmp_path / "out", mode="r")
    about = root.attrs["lazyckpt"]
    assert about["states"] == list(view.states) and about["state"] == view.state and about["meta"]
    assert about["mesh"] == {"tp": 1, "pp": 1, "dp": 2, "ep": 1}
    for state, part in view.states.items():
        for name, tensor in part.once()[0].items():
            got = np.asarray(root[f"{state}/{name.replace('.', '/')}"][...])
            assert got.tobytes() == to_numpy(tensor[...]).tobytes(), (state, name)
    view.to_zarr(tmp_path / "some", states=["exp_avg"])
    assert list(zarr.open_group(tmp_path / "some", mode="r")) == ["exp_avg"]
    view.states["fp32"].to_zarr(tmp_path / "fp32")
    assert list(zarr.open_group(tmp_path / "fp32", mode="r")) == ["fp32"]
    for states, why in (["nope"], "no state 'nope'"), ("nope", "no state 'nope'"), ([], "nothing to write"):
        with pytest.raises(DataError, match=why):
            view.to_zarr(tmp_path / "nope", states=states)
    # a lost file is told before anything is written
    broken = shutil.copytree(case.path, tmp_path / "broken")
    next(broken.glob("*/*zero_pp_rank_1_*")).unlink()
    with pytest.raises(MissingFileError, match="zero_pp_rank_1_"):
        lazyckpt.open(broken).to_zarr(tmp_path / "holes")
    with pytest.raises(DestinationError, match="inside of the checkpoint"):
        view.to_zarr(case.path / "out.zarr")
    with pytest.raises(DestinationError, match="holds the checkpoint"):
        view.to_zarr(case.path, overwrite=True)
    assert before == {p: p.stat().st_mtime_ns for p in case.path.rglob("*")}
    assert sorted(os.listdir(tmp_path)) == ["broken", "fp32", "out", "some"]


# -- what cannot be done


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        ("nonsense", "knows no codec"),
        (3, "is no codec"),
        ({"name": "snappy"}, "is no codec"),
        ({"name": "blosc", "configuration": {"cname": "nope"}}, "does not take"),
        ({"name": "zstd", "configuration": {"wrong": 1}}, "no such codec"),
        ({"name": "zstd", "configuration": 5}, "a table of its parameters"),
        (numcodecs.Delta(dtype="f4"), "does not take|back bit by bit"),
        (numcodecs.Quantize(digits=1, dtype="f4"), "does not take|back bit by bit"),
        (numcodecs.BitRound(keepbits=3), "does not take|back bit by bit"),
    ],
    ids=str,
)
def test_unsupported_codecs(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, codec: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        lazyckpt.open(saved[0]).to_zarr(tmp_path / "out", codec=codec)
    assert os.listdir(tmp_path) == ["in"]


def test_arrays_as_they_are_stored_come_back(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    stored = lazyckpt.open(zero_cases["zero2_client_state"].path).stored
    stored.to_zarr(tmp_path / "out")
    back = lazyckpt.open(tmp_path / "out")
    assert list(back) == list(stored) and back.state == "weights"
    for name in stored:
        assert to_numpy(back[name][...]).tobytes() == to_numpy(stored[name][...]).tobytes(), name


def test_an_export_is_not_written_into(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    lazyckpt.open(saved[0]).to_zarr(tmp_path / "out")
    view = lazyckpt.open(tmp_path / "out")
    for dest in (tmp_path / "out", tmp_path / "out" / "weights" / "more"):
        with pytest.raises(DestinationError, match="the checkpoint that is read"):
            view.to_zarr(dest, overwrite=True)
        with pytest.raises(DestinationError, match="the checkpoint that is read"):
            view.to_virtual(dest)
    assert not (tmp_path / "out" / "weights" / "more").exists()


def test_a_link_to_a_folder(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for overwrite in (False, True):  # it leads nowhere, then to a hierarchy
        lazyckpt.open(saved[0]).to_zarr(tmp_path / "out", overwrite=overwrite)
        assert (tmp_path / "out").is_symlink()
        _check(zarr.open_group(tmp_path / "disk", mode="r"), saved[1])
    assert sorted(os.listdir(tmp_path)) == ["disk", "in", "out"]


def test_a_filter_of_integers(tmp_path: Path) -> None:
    torch.save({"ids": torch.arange(1000, 3000).reshape(40, 50)}, tmp_path / "m.pt")
    lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "out", codec=numcodecs.Delta(dtype="i8"), verify=True)
    got = zarr.open_array(tmp_path / "out" / "weights" / "ids", mode="r")[...]
    assert np.array_equal(got, np.arange(1000, 3000).reshape(40, 50))


def test_filter_that_changes_the_dtype_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(40).to(torch.float8_e5m2), "i": torch.arange(6, dtype=torch.int32)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    for name, delta in (("w", "u1"), ("i", "i2")):  # zarr would take its numbers for those of the array
        with pytest.raises(DataError, match=f"give.*{name}|{name}.*back"):
            view.select(name).to_zarr(tmp_path / "out", codec=numcodecs.Delta(dtype=delta))
    torch.save({"b": torch.arange(6, dtype=torch.int8)}, tmp_path / "m.pt")
    with pytest.raises(DataError, match="single bytes"):
        lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "out", codec=numcodecs.AsType("f8", "i1"))
    assert os.listdir(tmp_path) == ["m.pt"]


def test_a_codec_that_does_not_take_a_chunk(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3, dtype=torch.int8)}, tmp_path / "m.pt")
    with pytest.raises(DataError, match="'shuffle' does not take a chunk"):
        lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "out", codec=numcodecs.Shuffle(elementsize=2))
    assert os.listdir(tmp_path) == ["m.pt"]


def test_too_little_memory(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    big = TensorSpec("w", (1 << 30,), torch.float32, ())
    cut = chunks.Cut((1 << 28,), None, export.encoding("zstd", torch.float32))
    assert export.memory_of(cut, 4, False) > 3 << 30 and big.nbytes
    with pytest.raises(DataError, match="memory=100,000,000 bytes are too few"):
        export._check_memory(cut, 4, 100_000_000, False, "w")
    with pytest.raises(DataError, match="size 'much' is not understood"):
        lazyckpt.open(saved[0]).to_zarr(tmp_path / "out", memory="much")


def test_destinations_that_are_taken(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    view = lazyckpt.open(path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("y")
    (tmp_path / "empty").mkdir()
    for name, why in (("file", "is a file"), ("full", "is not empty, and no zarr"), ("file/below", "Not a directory")):
        for overwrite in (False, True):
            with pytest.raises(DestinationError, match=why):
                view.to_zarr(tmp_path / name, overwrite=overwrite)
    view.to_zarr(tmp_path / "empty")
    _check(zarr.open_group(tmp_path / "empty", mode="r"), state)
    with pytest.raises(DestinationError, match="exists already"):
        view.to_zarr(tmp_path / "empty")
    view.select("i").to_zarr(tmp_path / "empty", overwrite=True)
    assert list(zarr.open_group(tmp_path / "empty", mode="r")["weights"]) == ["i"]
    view.to_zarr(tmp_path / "new" / "deep" / "x.zarr")
    assert (tmp_path / "full" / "mine").read_text() == "y" and (tmp_path / "file").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full", "in", "new"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_right_to_write(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(DestinationError, match="Permission denied"):
        lazyckpt.open(saved[0]).to_zarr(tmp_path / "locked" / "x")


def test_no_room(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 100

    monkeypatch.setattr(destination.shutil, "disk_usage", lambda _: Full)
    with pytest.raises(DestinationError, match="100 are free"):
        lazyckpt.open(saved[0]).to_zarr(tmp_path / "out" / "deep")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("name", ["x.zarr", "x.zip"])
def test_resume_after_a_failure(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, error: BaseException, name: str
) -> None:
    path, state = saved
    view = lazyckpt.open(path)
    out, calls = tmp_path / name, 0
    real = places._write

    def write(fd: int, data: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise error
        real(fd, data)

    raised = DestinationError if isinstance(error, OSError) else KeyboardInterrupt
    with mock.patch.object(places, "_write", write), pytest.raises(raised, match=r"No space.*is kept in|^$"):
        view.to_zarr(out, chunk=4000, executor=ThreadPoolExecutor(1))
    staging = tmp_path / f".{name}.incomplete"
    assert sorted(os.listdir(tmp_path)) == sorted(["in", staging.name])
    content = staging if system.POSIX else next(p for p in staging.iterdir() if p.is_dir())
    kept = {p.relative_to(content): p.stat().st_mtime_ns for p in staging.rglob("*") if "/c" in str(p) and p.is_file()}
    assert len(kept) == 8
    written = 0

    def count(place: Any, key: str, *rest: Any) -> int:
        nonlocal written
        written += 1
        assert Path(key) not in kept
        return plain(place, key, *rest)

    plain = chunks.write
    with mock.patch.object(chunks, "write", count):
        view.to_zarr(out, chunk=4000)
    assert written
    if name == "x.zarr":
        _check(zarr.open_group(out, mode="r"), state)
        assert all((out / key).stat().st_mtime_ns == stamp for key, stamp in kept.items())
    else:
        with zarr.storage.ZipStore(out, mode="r") as store:
            _check(zarr.open_group(store, mode="r"), state)
    assert sorted(os.listdir(tmp_path)) == ["in", name]


def _interrupted(view: Any, out: Path, **options: Any) -> None:
    with mock.patch.object(destination, "reveal", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        view.to_zarr(out, **options)


def test_another_job_starts_anew(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """What an interrupted export left is used by the same one only: same files, tensors, grid and codec."""
    path, state = saved
    out = tmp_path / "out"
    staging = tmp_path / ".out.incomplete"

    def went_on() -> bool:
        with mock.patch.object(chunks, "write", side_effect=chunks.write) as write:
            lazyckpt.open(path).to_zarr(out, overwrite=True)
        return not write.called

    _interrupted(lazyckpt.open(path), out)
    assert went_on()
    _interrupted(lazyckpt.open(path), out, codec="zstd", overwrite=True)
    assert staging.exists() and not went_on()
    _interrupted(lazyckpt.open(path), out, chunk=4000, overwrite=True)
    assert not went_on()
    _interrupted(lazyckpt.open(path).select("a*"), out, overwrite=True)
    assert not went_on()
    _interrupted(lazyckpt.open(path), out, overwrite=True)
    torch.save({**state, "i": torch.arange(11) + 1, "tied": state["a.w"]}, path)
    assert not went_on()
    assert zarr.open_array(out / "weights" / "i", mode="r")[0] == 1
    assert not staging.exists()


def test_two_at_once(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    view = lazyckpt.open(saved[0])
    begun, go_on = threading.Event(), threading.Event()
    plain = chunks.write

    def slow(*args: Any) -> int:
        begun.set()
        assert go_on.wait(60)
        return plain(*args)

    with mock.patch.object(chunks, "write", slow), ThreadPoolExecutor(1) as other:
        first = other.submit(view.to_zarr, tmp_path / "out")
        begun.wait(60)
        with pytest.raises(DestinationError, match="another export is writing there"):
            view.to_zarr(tmp_path / "out")
        go_on.set()
        first.result()
    _check(zarr.open_group(tmp_path / "out", mode="r"), saved[1])


def test_a_source_that_changes_meanwhile(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, _ = saved
    plain, calls = chunks.write, 0

    def write(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.utime(path, ns=(1, 1))
        return plain(*args)

    with mock.patch.object(chunks, "write", write), pytest.raises(ChangedFileError, match="is not the file"):
        lazyckpt.open(path).to_zarr(tmp_path / "out", chunk=4000)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("to", ["x.zarr", "memory://export/verify.zarr", "x.safetensors", "x.pt"])
def test_verify_finds_wrong_bytes(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, to: str) -> None:
    from lazyckpt.jobs import write as stream

    view = lazyckpt.open(saved[0]).select("a.*")
    flipped = False

    def flip(data: Any) -> bytes:
        nonlocal flipped
        flipped = True
        return bytes([data[0] ^ 1]) + bytes(data[1:])

    real_content, real_write = chunks.content, stream.write_at
    with (
        mock.patch.object(chunks, "write", lambda p, k, t, c: p.put(k, (flip(x) for x in real_content(t, c)))),
        mock.patch.object(stream, "write_at", lambda fd, data, at: real_write(fd, flip(data), at)),
        pytest.raises(CorruptError, match="do not hold what the source holds"),
    ):
        if to.endswith("zarr"):
            view.to_zarr(to if "://" in to else tmp_path / to, verify=True)
        else:
            (view.to_torch if to.endswith("pt") else view.to_safetensors)(tmp_path / to, verify=True)
    assert flipped and os.listdir(tmp_path) == ["in"]
    if "://" in to:
        view.to_zarr(to, verify=True)  # nothing of it was kept


def test_one_slice_of_a_shard_is_the_source(tmp_path: Path) -> None:
    """Bits of NaNs and of signed zeros too."""
    raw = torch.randint(-(1 << 31), 1 << 31, (64, 64), dtype=torch.int64).to(torch.int32)
    torch.save({"w": raw.view(torch.float32)}, tmp_path / "m.pt")
    lazyckpt.open(tmp_path / "m.pt").to_zarr(tmp_path / "o", chunk=1024, shard=4096, codec="blosc", verify=True)
    got = zarr.open_array(tmp_path / "o" / "weights" / "w", mode="r")[10:20, 3:5]
    assert bit_equal(torch.from_numpy(np.ascontiguousarray(got)), raw.view(torch.float32)[10:20, 3:5].contiguous())


@pytest.mark.parametrize("name", ["x.zarr", "x.zip"])
def test_the_file_that_a_killed_worker_left(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, name: str
) -> None:
    class Workers(ThreadPoolExecutor):
        """A worker is killed while it writes a chunk; another one writes the chunk again."""

        def submit(self, *args: Any, **options: Any) -> Any:
            (staging,) = tmp_path.glob(".*.incomplete")
            (staging / "weights").mkdir(exist_ok=True)
            (staging / "weights" / "0.28b64860.part").write_bytes(b"half")
            return super().submit(*args, **options)

    path, state = saved
    lazyckpt.open(path).to_zarr(tmp_path / name, chunk=4000, executor=Workers(1))
    if name == "x.zarr":
        found = [str(p) for p in (tmp_path / name).rglob("*")]
        _check(zarr.open_group(tmp_path / name, mode="r"), state)
    else:
        with zipfile.ZipFile(tmp_path / name) as archive:
            found = archive.namelist()
    assert found and not [p for p in found if p.endswith(".part")]
