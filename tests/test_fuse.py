"""Reads through a real mount of FUSE, whose server (fuse_server.py) counts the requests of the kernel. Skipped where
this process may not mount."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.errors import ChangedFileError, MissingFileError
from lazyckpt.io.storage import mounts
from lazyckpt.testing.oracle import same

from .test_network_file_systems import zero

SERVER = Path(__file__).with_name("fuse_server.py")


class Sent(NamedTuple):
    """A request of the kernel to the server."""

    kind: str
    path: str
    offset: int
    nbytes: int


class Mount:
    """A folder that is mounted at ``path``; ``source`` is the folder itself."""

    def __init__(self, source: Path, path: Path) -> None:
        self.source, self.path = source, path
        command = [sys.executable, "-I", "-S", str(SERVER), str(source), str(path)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        self.mounted = self.process.stdout.readline() == "mounted\n"

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def report(self) -> list[Sent]:
        """Return the requests since the last call."""
        return [Sent(*one) for one in json.loads(self.ask("report"))]

    def forget(self, name: str) -> None:
        """Drop a file from the page cache."""
        fd = os.open(self.path / name, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        self.report()

    def end(self) -> str:
        _, said = self.process.communicate()
        return said


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    if sys.platform != "linux" or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    source, path = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    path.mkdir()
    mount = Mount(source, path)
    if not mount.mounted:
        pytest.skip(f"this process may not mount: {mount.end()[-200:]}")
    yield mount
    mount.end()


def model(mount: Mount) -> dict[str, torch.Tensor]:
    some = torch.Generator().manual_seed(0)
    tensors = {f"a.{n:03d}": torch.randn(64, 48, generator=some) for n in range(300)}
    tensors["big"] = torch.randn(5000, 1000, generator=some)
    save_file(tensors, mount.source / "model.safetensors")
    return load_file(mount.source / "model.safetensors")


def test_it_is_found_to_be_a_network(mount: Mount, tmp_path: Path) -> None:
    model(mount)
    assert mounts.type_of(str(mount.path), os.stat(mount.path).st_dev) == "fuse.test"
    view = lazyckpt.open(mount.path / "model.safetensors", cache=False)
    assert not view._store.maps_files
    assert lazyckpt.open(mount.source, cache=False)._store.maps_files


def test_every_byte_is_read_once_and_nothing_is_mapped(mount: Mount) -> None:
    truth = model(mount)
    view = lazyckpt.open(mount.path, cache=False)
    mount.forget("model.safetensors")
    for name, tensor in view.to().items():
        same(tensor, truth[name], name)
    sent = [one for one in mount.report() if one.kind == "read"]
    size = (mount.source / "model.safetensors").stat().st_size
    assert sum(one.nbytes for one in sent) <= 1.02 * size
    assert len(sent) <= 1.2 * size / (128 << 10), "as large as the kernel lets requests be"
    for key in (3, slice(None, None, 50), (slice(None), 7), ([9, 4, 4000],), slice(10, 20)):
        for _ in range(3):
            same(view["big"][key], truth["big"][key], key)
    same(view["big"].to(copy=False), truth["big"], "not mapped")
    assert f"{mount.path}/model.safetensors" not in Path("/proc/self/maps").read_text()


def test_a_file_takes_one_lookup_and_one_open(mount: Mount) -> None:
    shutil.copytree(zero(mount.source.parent / "zero"), mount.source / "run")
    view = lazyckpt.open(mount.path / "run", cache=False)
    sent = Counter((one.kind, one.path) for one in mount.report() if one.path.endswith(".pt"))
    assert {path for _, path in sent} == {f"run/{path}" for path in view.files if path.endswith(".pt")}
    for kind in ("lookup", "open"):
        assert [count for (one, _), count in sent.items() if one == kind] == [1] * 5, kind
    assert not [one for one, _ in sent if one == "getattr"]
    view.to()
    more = Counter((one.kind, one.path) for one in mount.report() if one.path.endswith(".pt"))
    assert max(count for (kind, _), count in more.items() if kind == "open") == 1


def test_a_server_that_fails(mount: Mount) -> None:
    truth = model(mount)
    view = lazyckpt.open(mount.path, cache=False)
    mount.forget("model.safetensors")
    mount.ask(f"fail {errno.ETIMEDOUT}")
    with pytest.raises(MissingFileError, match="the file server or the disk failed"):
        view["big"].to()
    mount.ask(f"fail {errno.ESTALE}")
    with pytest.raises(ChangedFileError, match="the file server has no longer"):
        view["big"].to()
    mount.ask("fail 0")
    same(view["big"].to(), truth["big"], "after the server is back")


def test_a_server_that_is_gone(mount: Mount) -> None:
    model(mount)
    view = lazyckpt.open(mount.path, cache=False)
    mount.forget("model.safetensors")
    mount.process.kill()
    mount.process.wait()
    with pytest.raises(MissingFileError, match="the file server or the disk failed"):
        view["big"].to()
    subprocess.run(["umount", "-l", str(mount.path)], check=True)


def test_an_export_needs_no_more_requests_than_a_copy(mount: Mount, tmp_path: Path) -> None:
    """Small tensors are read one by one, but the system reads ahead for them."""
    truth = model(mount)
    view = lazyckpt.open(mount.path, cache=False)
    mount.forget("model.safetensors")
    view.to_safetensors(tmp_path / "out.safetensors")
    sent = [one for one in mount.report() if one.kind == "read"]
    size = (mount.source / "model.safetensors").stat().st_size
    assert sum(one.nbytes for one in sent) <= 1.02 * size
    assert len(sent) <= 1.5 * size / (128 << 10)
    for name, tensor in load_file(tmp_path / "out.safetensors").items():
        same(tensor, truth[name], name)
