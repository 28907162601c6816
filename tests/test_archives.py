"""Checkpoint folders that are packed as a tar or a zip, on a disk and behind servers."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import ChangedFileError, CheckpointView, CorruptError, FormatError, LazyckptError, MissingFileError, cli
from lazyckpt.core.index import FileInfo
from lazyckpt.core.requests import Policy
from lazyckpt.formats import archives, opening
from lazyckpt.formats.archives import locate, opened_archive
from lazyckpt.io.containers.tar import read_tar
from lazyckpt.io.pool import run
from lazyckpt.io.storage.remote import Remote
from lazyckpt.io.storage.streams import StoreFile
from lazyckpt.io.tasks import Fetch
from lazyckpt.testing.remote import Served

from .fuzz.targets.sources import equal, golden
from .servers.fixtures import Cloud, s3

__all__ = ["s3"]

CASES = {
    "huggingface": ("huggingface", "llama_sharded", "ckpt"),
    "bin": ("huggingface", "bin_sharded", "ckpt"),
    "zero": ("deepspeed_zero", "zero2_bf16_dp1", "ckpt"),
    "dcp": ("dcp", "numbered", "ckpt"),
    "megatron": ("megatron", "single", "dist"),
    "megatron-legacy": ("megatron", "single", "legacy"),
    "trainer": ("trainers", "trainer_gpt2", "ckpt"),
    "lightning": ("trainers", "lightning_fsdp", "ckpt"),
    "ranks": ("rank_files", "verl_one", "ckpt"),
}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar_of(folder: Path, path: Path, inside: str = ".", form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        archive.add(folder, inside)
    return path


def zip_of(folder: Path, path: Path, inside: str = "", method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, Path(inside) / file.relative_to(folder))
    return path


def tar_with(
    path: Path, *members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for member in members:
            info, data = member if isinstance(member, tuple) else (member, b"")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def read(view: CheckpointView) -> dict[tuple[str, str], torch.Tensor | str]:
    found: dict[tuple[str, str], torch.Tensor | str] = {}
    for state in view.states.values():
        for name, tensor in state.items():
            try:
                found[state.state, name] = tensor[...]
            except LazyckptError as e:
                found[state.state, name] = type(e).__name__
    return found


def check_equal(packed: CheckpointView, plain: CheckpointView) -> None:
    """Raise AssertionError if the checkpoint in an archive is not the one of the folder, bit for bit."""
    assert packed.format == plain.format
    assert [str(p) for p in packed.problems] == [str(p) for p in plain.problems]
    assert {path: info.size for path, info in packed.files.items()} == {p: i.size for p, i in plain.files.items()}
    assert packed.aliases == plain.aliases
    assert repr(dict(packed.meta)) == repr(dict(plain.meta))
    ours, theirs = read(packed), read(plain)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        other = theirs[name]
        assert (
            equal(value, other)
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
            else value == other
        )
    assert any(isinstance(value, torch.Tensor) for value in ours.values())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with one file of safetensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.arange(5000.0), "b": torch.arange(7)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "filler": "x" * 3000}))
    return folder


# -- as the folder


@pytest.mark.parametrize("name", CASES)
def test_a_packed_folder_is_the_folder(name: str, tmp_path: Path) -> None:
    folder = golden(*CASES[name])
    with lazyckpt.open(folder) as plain:
        paths = [tar_of(folder, tmp_path / f"{form}.tar", "run", number) for form, number in FORMATS.items()]
        paths += [
            tar_of(folder, tmp_path / "dot.tar"),
            zip_of(folder, tmp_path / "a.zip"),
            zip_of(folder, tmp_path / "b.ZIP", "run"),
        ]
        for path in paths:
            with lazyckpt.open(path) as packed:
                assert packed.root.startswith(str(path))
                check_equal(packed, plain)


@pytest.mark.parametrize("name", ["huggingface", "zero", "dcp", "trainer"])
def test_a_packed_folder_in_a_bucket_takes_no_more_requests(name: str, tmp_path: Path, s3: Cloud) -> None:
    folder = golden(*CASES[name])
    plain_url = s3.put_folder(folder, "plain")
    with lazyckpt.open(plain_url, storage_options=s3.options) as plain:
        for path in (tar_of(folder, tmp_path / "run.tar", "run"), zip_of(folder, tmp_path / "run.zip")):
            url = s3.put(path.name, path.read_bytes())
            with lazyckpt.open(url, storage_options=s3.options) as packed:
                # HEADs of the archive instead of a listing, and its table
                assert packed.io.requests <= plain.io.requests + 6
                assert packed.io.bytes <= plain.io.bytes + path.stat().st_size + (64 << 10)
                check_equal(packed, plain)
                first = next(name for name in packed if packed[name].nbytes)
                assert cost(packed, first) == cost(plain, first)


def cost(view: CheckpointView, name: str) -> tuple[int, int]:
    """Return the requests and the bytes that a tensor takes."""
    before = view.io.requests, view.io.bytes
    view[name][...]
    return view.io.requests - before[0], view.io.bytes - before[1]


def test_members_next_to_each_other_are_one_request() -> None:
    served = Served({"run.tar": members(50, 400)}, Policy(gap=4096, over_read=4.0))
    store = opened_archive(served, "run.tar")
    assert isinstance(store, Remote)
    before = store.io.requests
    memory = [bytearray(b"x" * 400) for _ in range(50)]
    run((400, Fetch.of_run(store, f"{n:05}.bin", 0, memoryview(memory[n]))) for n in range(50))
    assert memory == [bytes(400)] * 50
    assert store.io.requests == before + 1
    offsets = np.array([0])
    wanted = {f"{n:05}.bin": (offsets, offsets + 400) for n in range(50)}
    assert [path for path, _ in store.forecast(wanted)] == ["run.tar"]


def test_a_folder_in_memory_of_fsspec(tmp_path: Path) -> None:
    folder = golden(*CASES["zero"])
    fs = fsspec.filesystem("memory")
    try:
        for path in (tar_of(folder, tmp_path / "run.tar", "run"), zip_of(folder, tmp_path / "run.zip")):
            fs.pipe_file(f"/archives/{path.name}", path.read_bytes())
            with lazyckpt.open(folder) as plain, lazyckpt.open(f"memory://archives/{path.name}") as packed:
                check_equal(packed, plain)
                fs.pipe_file(f"/archives/{path.name}", path.read_bytes() + bytes(512))
                with pytest.raises(ChangedFileError, match=r"run\.(tar|zip) is not the file that was opened"):
                    read(packed), next(iter(packed.values()))[...]
    finally:
        fs.rm("/archives", recursive=True)


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_a_run_in_an_archive(pack: Callable[..., Path], tmp_path: Path) -> None:
    folder = golden(*CASES["trainer"])
    path = pack(folder, tmp_path / f"run.{pack.__name__[:3]}", "run")
    with lazyckpt.open_run(folder) as plain, lazyckpt.open_run(path) as packed:
        assert packed.steps == plain.steps == (2, 4)
        check_equal(packed.at(2), plain.at(2))
    with lazyckpt.open(path, tag="checkpoint-2") as one, lazyckpt.open(folder, tag="checkpoint-2") as other:
        check_equal(one, other)


def test_paths_in_archives(tmp_path: Path, s3: Cloud) -> None:
    folder = golden(*CASES["trainer"])
    path = tar_of(folder, tmp_path / "run.tar", "run")
    s3.put("a/run.tar", path.read_bytes())
    for start, options in ((str(path), None), (s3.at("a/run.tar"), s3.options)):
        with lazyckpt.open(f"{start}/run/checkpoint-2/model.safetensors", storage_options=options) as view:
            assert view.root == f"{start}/run/checkpoint-2"
        with lazyckpt.open(f"{start}/run/checkpoint-2", storage_options=options) as view:
            assert view.format == "hf-trainer"
        with pytest.raises(MissingFileError, match=r"run\.tar/run/nope"):
            lazyckpt.open(f"{start}/run/nope", storage_options=options)
    with pytest.raises(MissingFileError, match=r"other\.tar/x"):
        lazyckpt.open(f"{s3.url}/other.tar/x", storage_options=s3.options)
    with pytest.raises(MissingFileError, match=r"other\.tar"):
        lazyckpt.open(tmp_path / "other.tar" / "x")


def test_a_folder_named_as_an_archive_is_a_folder(model: Path, tmp_path: Path, s3: Cloud) -> None:
    shutil.copytree(model, tmp_path / "x.tar" / "sub")
    with lazyckpt.open(tmp_path / "x.tar" / "sub") as view:
        assert len(view) == 2
    s3.put_folder(model, "x.tar/sub")
    with lazyckpt.open(s3.at("x.tar/sub"), storage_options=s3.options) as view:
        assert len(view) == 2


@pytest.mark.parametrize("command", ["ls", "verify", "stats", "scan", "digest"])
def test_commands(command: str, tmp_path: Path) -> None:
    path = tar_of(golden(*CASES["huggingface"]), tmp_path / "run.tar", "run")
    result = CliRunner().invoke(cli.app, [command, str(path)])
    assert result.exit_code == 0, result.output


def test_scan_looks_into_archives(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    torch.save({"a": Evil(), "w": torch.zeros(2)}, tmp_path / "bad" / "model.pt")
    for path in (tar_of(tmp_path / "bad", tmp_path / "bad.tar"), zip_of(tmp_path / "bad", tmp_path / "bad.zip")):
        assert lazyckpt.scan(path).worst == "error"


def test_convert(tmp_path: Path) -> None:
    folder = golden(*CASES["zero"])
    path = zip_of(folder, tmp_path / "run.zip")
    with lazyckpt.open(path) as packed, lazyckpt.open(folder) as plain:
        packed.to_safetensors(tmp_path / "a.safetensors")
        plain.to_safetensors(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_an_export_does_not_replace_the_archive_that_is_read(model: Path, tmp_path: Path) -> None:
    path = tar_of(model, tmp_path / "run.tar")
    before = path.read_bytes()
    with lazyckpt.open(path) as view, pytest.raises(LazyckptError):
        view.to_zarr(path, overwrite=True)
    assert path.read_bytes() == before


def test_references_point_into_the_archive(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    path = tar_of(model, tmp_path / "run.tar", "run")
    with lazyckpt.open(path) as view:
        view.to_virtual(tmp_path / "refs.json")
        wanted = view["a"][...]
    refs = json.loads((tmp_path / "refs.json").read_text())["refs"]
    url, offset, length = refs["weights/a/c/0"]
    assert url == f"file://{path}"
    data = path.read_bytes()[offset : offset + length]
    assert data == wanted.numpy().tobytes()


# -- pins, pickles, closing


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_a_changed_archive_is_noticed(pack: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    path = pack(model, tmp_path / f"run.{pack.__name__[:3]}")
    with lazyckpt.open(path) as view:
        os.utime(path, ns=(1, 1))
        with pytest.raises(ChangedFileError, match=r"run\.(tar|zip) is not the file that was opened"):
            view["a"][...]


def test_an_archive_that_is_replaced_in_a_bucket(model: Path, tmp_path: Path, s3: Cloud) -> None:
    data = tar_of(model, tmp_path / "run.tar").read_bytes()
    url = s3.put("run.tar", data)
    with lazyckpt.open(url, storage_options=s3.options) as view:
        s3.put("run.tar", data[:-1] + b"\1")
        with pytest.raises(ChangedFileError, match=r"run\.tar is not the file that was opened"):
            view["a"][...]


def test_a_rewritten_archive_is_read_anew(model: Path, tmp_path: Path) -> None:
    path = tar_of(model, tmp_path / "run.tar")
    times = path.stat()
    with lazyckpt.open(path) as view:
        assert view["b"][0] == 0
    save_file({"a": torch.arange(5000.0), "b": torch.arange(7) + 1}, model / "model.safetensors")
    data = tar_of(model, tmp_path / "other.tar").read_bytes()
    time.sleep(0.01)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with lazyckpt.open(path) as view:
        assert view["b"][0] == 1


def test_pickles_hold_only_the_members_of_their_tensors(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(golden(*CASES["huggingface"]), "run")
        for n in range(2000):
            archive.addfile(tarfile.TarInfo(f"run/other/{n}"))
    with lazyckpt.open(tmp_path / "run.tar") as view:
        name = next(iter(view))
        data = pickle.dumps(view[name])
        assert len(data) < 4000
        assert equal(pickle.loads(data)[...], view[name][...])
        assert list(pickle.loads(pickle.dumps(view))) == list(view)


def test_closing(model: Path, tmp_path: Path) -> None:
    path = tar_of(model, tmp_path / "run.tar")
    view, other = lazyckpt.open(path), lazyckpt.open(path)
    view.close()
    with pytest.raises(LazyckptError, match="is closed"):
        view["a"][...]
    assert other["b"][3] == 3
    other.close()


# -- tables of many members


def members(count: int, size: int) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for n in range(count):
            info = tarfile.TarInfo(f"{n:05}.bin")
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    return data.getvalue()


@pytest.mark.parametrize(("count", "size", "requests", "share"), [(200, 1 << 17, 210, 0.03), (3000, 100, 8, 2.0)])
def test_requests_for_a_table(count: int, size: int, requests: int, share: float) -> None:
    data = members(count, size)
    rounds = 0

    class Counted(Served):
        def read_pieces(self, path: str, pieces: Any) -> None:
            nonlocal rounds
            rounds += bool(pieces)
            super().read_pieces(path, pieces)

        def _with(self, pins: Any) -> Any:
            store = Counted(self.content, pins=pins)
            store.io = self.io
            return store

    served = Counted({"run.tar": data})
    pinned = served.pinned({"run.tar": served.stat("run.tar")})
    before = served.io.requests
    tree = read_tar(StoreFile(pinned, "run.tar", tail=0))
    assert len(tree.files) == count
    assert served.io.requests - before <= requests
    assert served.io.bytes <= share * len(data)
    assert rounds <= 12  # members of the same size are not looked for one after the other


def test_members_of_other_sizes_cost_few_wrong_guesses() -> None:
    data = io.BytesIO()
    sizes = [200_000, 200_000, 300_000, 300_000, 300_000, 70_000, *range(80_000, 110_000, 1000)]
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for n, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{n:05}.bin")
            info.size = size
            archive.addfile(info, io.BytesIO(bytes([n + 1]) * size))
    served = Served({"run.tar": data.getvalue()})
    store = opened_archive(served, "run.tar")
    assert store is not None
    assert [entry.info.size for entry in store.list().values()] == sizes
    assert store.io.requests <= 2 * len(sizes)
    for n, size in enumerate(sizes):
        assert store.read(f"{n:05}.bin", size - 3, 3) == bytes([n + 1]) * 3


# -- links, names, kinds of members


def test_links_inside_are_followed(model: Path, tmp_path: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    path = tar_with(
        tmp_path / "run.tar",
        (tarfile.TarInfo("blobs/x"), data),
        link("snapshot", "deep/er"),
        link("deep/er/model.safetensors", "../../blobs/x"),
        link("deep/er/hard.safetensors", "blobs/x", tarfile.LNKTYPE),
        link("deep/er/out.safetensors", "../../../x"),
        link("deep/er/absolute.safetensors", "/etc/passwd"),
        link("deep/er/loop", "loop"),
        link("deep/er/up", "../er"),
    )
    with lazyckpt.open(model) as plain:
        for inside in ("snapshot/model.safetensors", "deep/er/up/up/model.safetensors", "deep/er/hard.safetensors"):
            with lazyckpt.open(path / inside) as view:
                assert equal(view["a"][...], plain["a"][...])
    store, _ = locate(str(path))
    assert set(store.list("snapshot")) == {"model.safetensors", "hard.safetensors", "up"}
    with pytest.raises(MissingFileError, match="is a link to '/etc/passwd', which the archive does not have"):
        store.stat("deep/er/absolute.safetensors")
    with pytest.raises(MissingFileError, match="no such file or folder in the archive"):
        lazyckpt.open(path / "deep/er/loop")


def test_links_in_zips_are_followed(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model / "model.safetensors", "blobs/x.safetensors")
        info = zipfile.ZipInfo("snapshot/model.safetensors")
        info.create_system, info.external_attr = 3, 0o120777 << 16
        archive.writestr(info, "../blobs/x.safetensors")
    with lazyckpt.open(path / "snapshot") as view, lazyckpt.open(model) as plain:
        assert equal(view["a"][...], plain["a"][...])


def test_the_last_of_two_members_counts(model: Path, tmp_path: Path) -> None:
    path = tar_of(model, tmp_path / "run.tar")
    save_file({"c": torch.ones(3)}, model / "model.safetensors")
    with tarfile.open(path, "a") as archive:
        archive.add(model / "model.safetensors", "model.safetensors")
    with lazyckpt.open(path) as view:
        assert list(view) == ["c"]


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_long_names(form: str, model: Path, tmp_path: Path) -> None:
    deep = "/".join(["a folder with a long name, ünïcode too"] * 6)
    path = tar_of(model, tmp_path / "run.tar", deep, FORMATS[form])
    with lazyckpt.open(path / deep) as view:
        assert len(view) == 2


def test_sizes_beyond_octal_digits() -> None:
    """Sizes of 8 GiB and more: GNU's binary numbers, and pax's records."""

    class Sparse(Served):
        """A file that is zeros where it has no bytes."""

        def _open(self, path: str, start: int, stop: int) -> Any:
            stop = min(stop, whole)
            found = bytearray(stop - start)
            for at, data in self.parts.items():
                low, high = max(at, start), min(at + len(data), stop)
                if low < high:
                    found[low - start : high - start] = data[low - at : high - at]
            return FileInfo(whole, 1, "x"), [memoryview(found)]

        def _ask_state(self, path: str) -> FileInfo:
            return FileInfo(whole, 1, "x")

        def _with(self, pins: Any) -> Any:
            other = Sparse(self.content, pins=pins)
            other.parts, other.io = self.parts, self.io
            return other

        parts: dict[int, bytes]

    large = 9 << 30
    whole = 512 * 6 + large
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("large.bin")
        info.size = large
        head = info.tobuf(form)
        small = tarfile.TarInfo("small.bin")
        store = Sparse({})
        store.parts = {0: head, len(head) + large: small.tobuf(tarfile.USTAR_FORMAT)}
        found = opened_archive(store, "run.tar")
        assert found is not None
        assert {name: entry.info.size for name, entry in found.list().items()} == {"large.bin": large, "small.bin": 0}
        assert store.io.requests <= 5
        assert store.io.bytes <= 128 << 10


HOSTILE = {
    "parent": (lambda p: tar_with(p, (tarfile.TarInfo("../x"), b"")), "leads out of the archive"),
    "absolute": (lambda p: tar_with(p, (tarfile.TarInfo("/x"), b"")), "absolute"),
    "inner-parent": (lambda p: tar_with(p, (tarfile.TarInfo("a/../../x"), b"")), "leads out of the archive"),
    "both": (
        lambda p: tar_with(p, (tarfile.TarInfo("a"), b""), (tarfile.TarInfo("a/b"), b"")),
        "both a folder and a file",
    ),
    "through-link": (
        lambda p: tar_with(p, link("a", "/etc"), (tarfile.TarInfo("a/b"), b"")),
        "both a folder and a file",
    ),
    "unknown-kind": (lambda p: tar_with(p, link("a", "", b"Q")), "unknown kind"),
    "multi-volume": (lambda p: tar_with(p, link("a", "", b"M")), "a part of a file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tars(name: str, tmp_path: Path) -> None:
    make, message = HOSTILE[name]
    with pytest.raises((CorruptError, FormatError), match=message) as caught:
        lazyckpt.open(make(tmp_path / "run.tar"))
    assert "run.tar" in str(caught.value)
    assert str(caught.value).count("\n") < 3


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("model.safetensors")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "model.safetensors"}
    with tarfile.open(tmp_path / "run.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info)
    with pytest.raises(FormatError, match="is a sparse file, which cannot be read by ranges"):
        lazyckpt.open(tmp_path / "run.tar")


def test_a_truncated_tar_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    path = tar_of(model, tmp_path / "run.tar", "run")
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    whole = -(-end // 512) * 512  # of the last member
    for cut in (whole, whole - 1, whole // 2, 1024, 600, 512):
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptError, match=r"truncated|damaged"):
            lazyckpt.open(path)
    path.write_bytes(data[: whole + 512])
    lazyckpt.open(path).close()


def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path: Path) -> None:
    data = bytearray(members(3, 10))
    data[2 * 1024 + 3] ^= 1  # tarfile would see two members, without an error
    (tmp_path / "run.tar").write_bytes(data)
    with pytest.raises(CorruptError, match="at byte 2,048 is no header of a tar"):
        lazyckpt.open(tmp_path / "run.tar")


def test_many_long_links_take_bounded_work(tmp_path: Path) -> None:
    target = "/".join(["a", ".."] * 600)
    path = tar_with(tmp_path / "run.tar", *(link(f"l{n}", f"l{n + 1}/{target}") for n in range(900)))
    with pytest.raises(CorruptError, match="more references to follow than any honest file"):
        lazyckpt.open(path)


# -- zips


def test_compressed_members_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    path = zip_of(model, tmp_path / "run.zip", method=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"the member 'model.safetensors' is compressed.*Unzip it"):
        lazyckpt.open(path)


def test_compressed_texts_are_read(model: Path, tmp_path: Path, s3: Cloud) -> None:
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model / "model.safetensors", "model.safetensors")
        archive.write(model / "config.json", "config.json", zipfile.ZIP_DEFLATED)
    url = s3.put("run.zip", path.read_bytes())
    with lazyckpt.open(model) as plain, lazyckpt.open(path) as packed:
        check_equal(packed, plain)
    store, _ = locate(url, s3.options)
    text = (model / "config.json").read_bytes()
    assert store.read("config.json", 0, len(text)) == text
    assert store.read("config.json", 5, 10) == text[5:15]
    with pytest.raises(CorruptError, match=r"run\.zip/config\.json: expected 10 bytes"):
        store.read("config.json", len(text) - 5, 10)


def test_a_bomb_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model / "model.safetensors", "model.safetensors")
        for n in range(6):
            archive.writestr(zipfile.ZipInfo(f"{n}.json"), bytes(15 << 20), zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptError, match="more unpacked bytes than any honest file"):
        lazyckpt.open(path)


def test_zips_that_are_checkpoints_themselves(model: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "torch.zip")
    torch.save({"w": torch.ones(3)}, tmp_path / "checkpoint.pth.tar")
    for name in ("torch.zip", "checkpoint.pth.tar"):
        with lazyckpt.open(tmp_path / name) as view:
            assert view.format == "torch"
            assert view.root == str(tmp_path)
    with lazyckpt.open(model) as view:
        view.to_zarr(tmp_path / "export")
    path = zip_of(tmp_path / "export", tmp_path / "zarr.zip")
    with lazyckpt.open(path) as view:
        assert view.format == "zarr"
        assert view.root == str(tmp_path)


@pytest.mark.parametrize(
    ("ending", "mode"), [(".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar.xz", "w:xz"), (".tar.bz2", "w:bz2")]
)
def test_compressed_tars_are_refused(ending: str, mode: Any, model: Path, tmp_path: Path) -> None:
    path = tmp_path / f"run{ending}"
    with tarfile.open(path, mode) as archive:
        archive.add(model, "run")
    with pytest.raises(FormatError, match="is a compressed tar, which cannot be read by ranges: unpack it"):
        lazyckpt.open(path)


def test_errors_name_the_member(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"\xff" * 100)
    path = tar_of(tmp_path / "run", tmp_path / "run.tar", "run")
    with pytest.raises(LazyckptError, match=r"run\.tar/run/model\.safetensors"):
        lazyckpt.open(path)


# -- caches


@pytest.mark.filterwarnings("ignore::lazyckpt.errors.CredentialsWarning")
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_the_block_cache_has_the_bytes_of_archives(pack: Callable[..., Path], tmp_path: Path, s3: Cloud) -> None:
    folder = golden(*CASES["zero"])
    path = pack(folder, tmp_path / f"run.{pack.__name__[:3]}")
    url = s3.put(path.name, path.read_bytes())
    cache = str(tmp_path / "blocks")
    with lazyckpt.open(url, cache=cache, storage_options=s3.options) as first, lazyckpt.open(folder) as plain:
        check_equal(first, plain)
        assert first.io.bytes > 0
        archives._trees.clear()
        with lazyckpt.open(url, cache=cache, storage_options=s3.options) as second:
            check_equal(second, plain)
            assert second.io.bytes == 0
            assert second.io.cache_hits > 0
            name = next(iter(plain))
            copy = pickle.loads(pickle.dumps(second[name]))
            assert equal(copy[...], plain[name][...])
            assert copy.store.io.bytes == 0


def test_the_index_cache_of_an_archive(tmp_path: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYCKPT_CACHE_DIR", str(tmp_path / "cache"))
    folder = golden(*CASES["huggingface"])
    path = tar_of(folder, tmp_path / "run.tar", "run")
    url = s3.put("run.tar", path.read_bytes())
    with lazyckpt.open(url, storage_options=s3.options) as first:
        opening._indexes.clear()
        with lazyckpt.open(url, storage_options=s3.options) as second, lazyckpt.open(folder) as plain:
            assert second.io.requests < first.io.requests
            check_equal(second, plain)
    path = tar_of(golden(*CASES["zero"]), tmp_path / "run.tar", "run")
    s3.put("run.tar", path.read_bytes())
    with lazyckpt.open(url, storage_options=s3.options) as view:
        assert view.format == "deepspeed-zero2"
