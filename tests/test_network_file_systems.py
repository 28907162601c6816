"""Files of network file systems are read by few large requests, and never mapped. The type of the file system is
injected; tests/test_fuse.py reads through a real mount."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt import LazyTensor, testing
from lazyckpt.errors import ChangedFileError, DataError, MissingFileError
from lazyckpt.io import system
from lazyckpt.io.reading.device import PlainDevice, ring
from lazyckpt.io.storage import mounts
from lazyckpt.io.storage.local import LocalStore, remote_files
from lazyckpt.testing.oracle import same

from .conftest import complete
from .writers import Case

MIB = 1 << 20


class Calls:
    """The system calls for files of a folder: those of `system.File`, and `os.stat`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = str(folder)
        self.reads: list[tuple[str, int, int, str]] = []  # file, offset, bytes, thread
        self.opened: Counter[str] = Counter()
        self.looked: Counter[str] = Counter()
        self.advised: list[str] = []
        self._paths: dict[int, str] = {}
        own, lock = system.File, threading.Lock()
        calls = self

        class File(own):  # type: ignore[misc, valid-type]
            __slots__ = ("name",)

            def __init__(self, path: str) -> None:
                super().__init__(path)
                self.name = os.path.relpath(path, calls.folder)
                calls.opened[self.name] += 1

            def read_at(self, offset: int, target: memoryview) -> int:
                with lock:
                    calls.reads.append((self.name, offset, len(target), threading.current_thread().name))
                return super().read_at(offset, target)

            def read_vector(self, offset: int, targets: list[memoryview]) -> int:
                with lock:
                    size = sum(map(len, targets))
                    calls.reads.append((self.name, offset, size, threading.current_thread().name))
                return super().read_vector(offset, targets)

            def without_read_ahead(self) -> None:
                calls.advised.append(self.name)
                super().without_read_ahead()

        def looked(path: Any, *args: Any, **options: Any) -> os.stat_result:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if isinstance(text, str) and text.startswith(calls.folder):
                calls.looked[os.path.relpath(text, calls.folder)] += 1
            return stat(path, *args, **options)

        stat = os.stat
        patch.setattr("lazyckpt.io.storage.local.File", File)
        patch.setattr("lazyckpt.io.storage.local.os.stat", looked)

    def clear(self) -> None:
        self.reads.clear()
        self.opened.clear()
        self.looked.clear()
        self.advised.clear()


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every folder is on NFS. The list has the paths whose file system was looked up."""
    asked: list[str] = []

    def type_of(path: str, device: int) -> str:
        asked.append(path)
        return "nfs4"

    monkeypatch.setattr(mounts, "_accesses", {})
    monkeypatch.setattr(mounts, "type_of", type_of)
    yield asked


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 small tensors, one of 19 MiB, twelve of 2.7 MiB."""
    folder = tmp_path_factory.mktemp("model")
    some = torch.Generator().manual_seed(0)
    tensors = {f"a.{n:05d}": torch.randn(64, 48, generator=some) for n in range(2000)}
    tensors["big"] = torch.randn(5000, 1000, generator=some)
    tensors.update((f"m.{n}", torch.randn(700, 1000, generator=some)) for n in range(12))
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


# -- which file systems


@pytest.mark.parametrize(
    ("kind", "maps"),
    [
        *((kind, True) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.ntfs-3g", "")),
        *(
            (kind, False)
            for kind in ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cifs", "smb3")
        ),
        *((kind, False) for kind in ("fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs", "fuse", "fuse.daos", "wekafs", "9p")),
    ],
)
def test_types(kind: str, maps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_accesses", {})
    monkeypatch.setattr(mounts, "type_of", lambda path, device: kind)
    store = LocalStore(tmp_path)
    assert store.maps_files == maps
    assert (store.gap == 0) == maps


def test_a_mounted_bucket_is_further_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gaps = {}
    for kind in ("lustre", "fuse.gcsfuse"):
        monkeypatch.setattr(mounts, "_accesses", {})
        monkeypatch.setattr(mounts, "type_of", lambda path, device, kind=kind: kind)
        gaps[kind] = LocalStore(tmp_path).gap
    assert 0 < gaps["lustre"] < gaps["fuse.gcsfuse"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mountinfo")
def test_the_real_type(tmp_path: Path) -> None:
    told = subprocess.run(
        ["stat", "-f", "-c", "%T", "/proc"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (told, mounts.type_of("/proc", os.stat("/proc").st_dev)) == ("proc", "proc")
    assert mounts.type_of(str(tmp_path), os.stat(tmp_path).st_dev)
    # a device that mountinfo does not list, as those of subvolumes of btrfs
    assert mounts.type_of("/proc/self", os.makedev(4000, 77)) == "proc"
    assert mounts.type_of(str(tmp_path), os.makedev(4000, 77)) == mounts.type_of(
        str(tmp_path), os.stat(tmp_path).st_dev
    )


def test_one_look_for_a_device(model: Path, nfs: list[str]) -> None:
    view = lazyckpt.open(model.parent)
    view["m.0"].to()
    lazyckpt.open(model.parent, cache=False)["big"][3]
    assert len(nfs) == 1


def test_modes(model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not LocalStore(model.parent).maps_files
    assert LocalStore(model.parent, io="map").maps_files
    monkeypatch.setenv("LAZYCKPT_IO", "map")
    assert LocalStore(model.parent).maps_files
    assert lazyckpt.open(model)._store.maps_files
    assert not lazyckpt.open(model, io="network")._store.maps_files
    monkeypatch.setenv("LAZYCKPT_IO", "mmap")
    with pytest.raises(DataError, match=r"LAZYCKPT_IO=mmap: .* auto, map, read, network"):
        lazyckpt.open(model)
    with pytest.raises(DataError, match="io='often'"):
        lazyckpt.open("memory://x", io="often")


def test_read_on_a_local_disk_reads_what_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = lazyckpt.open(model, io="read")
    assert (view._store.maps_files, view._store.gap) == (False, 0)
    calls = Calls(model.parent, monkeypatch)
    row = lazyckpt.open(model, io="read")["big"]
    calls.clear()
    same(row[7], load_file(model)["big"][7], "the same bytes")
    assert [(nbytes) for _, _, nbytes, _ in calls.reads] == [4000]


def test_a_mode_travels_with_a_pickle(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = lazyckpt.open(model, io="network")["big"]
    monkeypatch.setenv("LAZYCKPT_IO", "map")
    again: LazyTensor = pickle.loads(pickle.dumps(tensor))
    assert not again.store.maps_files
    assert pickle.loads(pickle.dumps(lazyckpt.open(model)["big"])).store.maps_files
    same(again[5:9], load_file(model)["big"][5:9], "the same bytes")


def test_a_link_to_another_file_system(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lies on NFS behind a link in a local folder is neither mapped nor sent by the system."""
    (tmp_path / "model.safetensors").symlink_to(model)
    real = os.fstat
    elsewhere = os.makedev(4000, 78)

    def type_of(path: str, device: int) -> str:
        return "lustre" if device == elsewhere else "ext4"

    monkeypatch.setattr(mounts, "_accesses", {})
    monkeypatch.setattr(mounts, "type_of", type_of)
    view = lazyckpt.open(tmp_path)
    monkeypatch.setattr("lazyckpt.io.system.os.fstat", lambda fd: _On(real(fd), elsewhere))
    store = view._store
    assert store.maps_files
    assert store.map("model.safetensors") is None
    assert store.private("model.safetensors") is None
    assert store.stored("model.safetensors", 0, 8) is None
    same(view["big"][3:9], load_file(model)["big"][3:9], "the same bytes")


class _On:
    """A status with another device."""

    def __init__(self, status: os.stat_result, device: int) -> None:
        self._status, self.st_dev = status, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._status, name)


# -- how it is read


def test_a_whole_view_is_read_in_file_order_by_large_reads(
    model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = lazyckpt.open(model, cache=False)
    calls = Calls(model.parent, monkeypatch)
    view._store._forget()
    found = view.to()
    truth = load_file(model)
    for name, tensor in found.items():
        same(tensor, truth[name], name)
    size = model.stat().st_size
    assert sum(nbytes for _, _, nbytes, _ in calls.reads) <= size
    assert max(nbytes for _, _, nbytes, _ in calls.reads) <= 16 * MIB
    assert len(calls.reads) <= 2.5 * size / (8 * MIB), calls.reads
    assert calls.advised == []
    assert len({thread for *_, thread in calls.reads}) > 1, "several threads read ahead"
    for thread in {thread for *_, thread in calls.reads}:  # each goes forward
        offsets = [offset for _, offset, _, one in calls.reads if one == thread]
        assert offsets == sorted(offsets)


def test_a_device_gets_large_reads(model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    view, truth = lazyckpt.open(model, cache=False), load_file(model)
    calls = Calls(model.parent, monkeypatch)
    view._store._forget()
    with ring(PlainDevice(torch.device("cpu"))) as way:
        found = {name: tensor._send(way) for name, tensor in view.items()}
    for name, tensor in found.items():
        same(tensor, truth[name], name)
    assert len(calls.reads) <= 2.5 * model.stat().st_size / (8 * MIB), calls.reads


def test_an_export_reads_by_8_mib(model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    view = lazyckpt.open(model, cache=False).select("big")
    calls = Calls(model.parent, monkeypatch)
    view._store._forget()
    view.to_safetensors(tmp_path / "out.safetensors")
    same(load_file(tmp_path / "out.safetensors")["big"], load_file(model)["big"], "the same bytes")
    sizes = sorted(nbytes for name, _, nbytes, _ in calls.reads if name == model.name)
    assert sum(sizes) == 5000 * 1000 * 4
    assert len(sizes) <= 4
    assert calls.advised == []


def test_an_export_reads_small_tensors_together(
    model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    view, truth = lazyckpt.open(model, cache=False), load_file(model)
    calls = Calls(model.parent, monkeypatch)
    view._store._forget()
    view.to_safetensors(tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == truth.keys()
    for name, tensor in found.items():
        same(tensor, truth[name], name)
    reads = [nbytes for name, _, nbytes, _ in calls.reads if name == model.name]
    assert sum(reads) <= 1.01 * model.stat().st_size
    assert len(reads) <= 40, "for 2,013 tensors"


def test_rows_and_columns_are_joined(model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    view, truth = lazyckpt.open(model, cache=False), load_file(model)
    calls = Calls(model.parent, monkeypatch)
    view._store._forget()
    for key in (slice(0, 5000, 7), (slice(None), 3), ([4, 90, 91, 200],), (slice(2, 9), slice(5, 8))):
        calls.clear()
        same(view["big"][key], truth["big"][key], key)
        assert len(calls.reads) <= 4, (key, calls.reads)
    assert sum(calls.opened.values()) == 0, "the file stays open"


def test_nothing_is_mapped(model: Path, nfs: list[str]) -> None:
    """By what the system says of this process's memory."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc/self/maps")
    truth = load_file(model)
    truth = {name: tensor.clone() for name, tensor in truth.items()}
    local = lazyckpt.open(model, io="map")
    kept = local["big"].to(copy=False)
    assert model.name in Path("/proc/self/maps").read_text(), "the check finds mappings"
    del kept
    local.close()
    del local
    view = lazyckpt.open(model)
    for key in (3, slice(0, 100), slice(0, 5000, 9), ([5, 9, 5],), (slice(None), 7), (2, 3)):
        for _ in range(3):  # windows are made at the second read
            same(view["big"][key], truth["big"][key], key)
    free = view.to(copy=False)
    one = view["m.3"].to(copy=False)
    view.stats()
    same(one, truth["m.3"], "the same bytes")
    for name, tensor in free.items():
        same(tensor, truth[name], name)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(model))]
    assert mapped == []
    one.zero_()  # memory of its own
    same(lazyckpt.open(model)["m.3"][...], truth["m.3"], "the same bytes")


# -- metadata


def zero(folder: Path) -> Path:
    archive = Path(__file__).parent / "golden" / "deepspeed_zero" / "zero1_bf16_dp4.tar.xz"
    with tarfile.open(archive) as found:
        found.extractall(folder, filter="data")
    return folder / "zero1_bf16_dp4" / "ckpt"


def test_each_rank_file_is_looked_at_once(tmp_path: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = zero(tmp_path)
    calls = Calls(path, monkeypatch)
    view = lazyckpt.open(path, cache=False)
    ranks = [name for name in calls.opened if name.endswith(".pt")]
    assert len(ranks) == 5
    assert set(calls.opened.values()) == {1}
    assert [name for name in calls.looked if name.endswith(".pt")] == [], "the listing and the open file tell"
    calls.clear()
    view.to()
    for state in view.states.values():
        state.to()
    assert set(calls.opened.values()) == {1}, "opened once for all reads"
    assert not calls.looked


def test_more_files_stay_open_than_on_a_local_disk(tmp_path: Path, nfs: list[str]) -> None:
    for n in range(300):
        (tmp_path / f"{n}").write_bytes(bytes([n % 256]))
    store = LocalStore(tmp_path)
    for n in range(300):
        assert store.read(f"{n}", 0, 1) == bytes([n % 256])
    assert len(store._files) == min(300, remote_files())
    assert remote_files() >= 128


def test_absent_files_and_folders(tmp_path: Path, nfs: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    store = LocalStore(tmp_path)
    with pytest.raises(MissingFileError) as error:
        store.stat("nothing")
    assert error.value.errno == errno.ENOENT
    with pytest.raises(lazyckpt.CorruptError, match="is a folder"):
        store.stat("folder")
    with pytest.raises(lazyckpt.CorruptError, match="is a folder"):
        store.read("folder", 0, 1)


# -- faults


@pytest.mark.parametrize("name", ["read_at", "stat"])
def test_a_stale_handle_is_a_changed_file(
    name: str, model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = lazyckpt.open(model, cache=False)
    view["big"][0]

    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(system.File, name, stale)
    monkeypatch.setattr(system.File, "read_vector", stale)
    for read in (lambda: view["big"][1], view["m.1"].to, view.to):
        with pytest.raises(ChangedFileError, match=r"model\.safetensors: the file server has no longer"):
            read()


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN])
def test_a_server_that_fails(number: int, model: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    view = lazyckpt.open(model, cache=False)

    def fails(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(system.File, "read_at", fails)
    monkeypatch.setattr(system.File, "read_vector", fails)
    with pytest.raises(MissingFileError, match=r"model\.safetensors: .*the file server or the disk failed") as error:
        view.to()
    assert error.value.errno == number
    assert str(error.value).count("\n") < 3


def test_a_file_that_fails_spoils_no_other(tmp_path: Path, nfs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Although tensors of several files are read together."""
    names = {
        f"{letter}.{n}": f"model-0000{k}-of-00002.safetensors" for k, letter in ((1, "a"), (2, "b")) for n in range(9)
    }
    for file in set(names.values()):
        save_file({name: torch.ones(50) for name, own in names.items() if own == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    view = lazyckpt.open(tmp_path, cache=False)
    vector, single = system.File.read_vector, system.File.read_at

    def fails(file: Any) -> None:
        if os.readlink(f"/proc/self/fd/{file.fd}").endswith("00002-of-00002.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(system.File, "read_vector", lambda file, *args: (fails(file), vector(file, *args))[1])
    monkeypatch.setattr(system.File, "read_at", lambda file, *args: (fails(file), single(file, *args))[1])
    table = view.stats()
    for name in names:
        error = table[name].error
        assert (error is None) == name.startswith("a."), (name, error)
        assert error is None or "the file server or the disk failed" in str(error)


def test_a_replaced_file(model: Path, tmp_path: Path, nfs: list[str]) -> None:
    own = tmp_path / "m.safetensors"
    shutil.copy(model, own)
    view = lazyckpt.open(own)
    other = tmp_path / "other"
    save_file({"big": torch.ones(3)}, other)
    other.replace(own)
    with pytest.raises(ChangedFileError):
        view["big"][0]


def test_a_rewritten_file(model: Path, tmp_path: Path, nfs: list[str]) -> None:
    own = tmp_path / "m.safetensors"
    shutil.copy(model, own)
    view = lazyckpt.open(own)
    view["big"][0]
    before = own.stat()
    with own.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"12345678")
    os.utime(own, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ChangedFileError):
        view.to()


# -- the contract, without mappings


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("mode", ["read", "network"])
@pytest.mark.parametrize(("fixture", "name"), [("zero_cases", "zero1_bf16_dp4"), ("dcp_cases", "fsdp2")])
def test_the_contract(check: testing.Check, mode: str, fixture: str, name: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue(fixture)[name]
    case = complete(case) if fixture == "zero_cases" else case
    check(replace(case, info={**case.info, "open": {**case.info.get("open", {}), "io": mode}}))
