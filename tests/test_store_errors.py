"""Errors of the disk and the network, of any store: the file that has one is reported, and the others are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.index import FileInfo
from lazyckpt.errors import ChangedFileError, MissingFileError, cannot_read
from lazyckpt.formats.reader import Source
from lazyckpt.formats.registry import read_index
from lazyckpt.io.storage.access import present
from lazyckpt.io.storage.base import Entry, Fetched, Store
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.storage.streams import StoreFile

from .conftest import need
from .writers import Case

ERRORS = [errno.EIO, errno.ESTALE, errno.EACCES, None]  # None: without a number, as those of network libraries


def raised(number: int | None) -> OSError:
    return OSError(number, os.strerror(number)) if number is not None else OSError("the connection was reset")


class Failing(LocalStore):
    """Raises an error when one file is read; with ``absent``, also when it is looked at."""

    bad = ""
    number: int | None = errno.EIO
    looking = False

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        if path.endswith(self.bad):
            raise raised(self.number)
        return super()._fetch(path, offset, target)

    def _stat(self, path: str) -> FileInfo:
        if self.looking and path.endswith(self.bad):
            raise raised(self.number)
        return super()._stat(path)

    def _fetch_pieces(self, path: str, pieces: Any) -> None:
        Store._fetch_pieces(self, path, pieces)


def failing(root: Path, bad: str, number: int | None, looking: bool = False) -> Failing:
    store = Failing(root)
    store.bad, store.number, store.looking = bad, number, looking
    return store


class Elsewhere(Store):
    """A store of another package, which implements what it must."""

    def __init__(self, inner: LocalStore, pins: Mapping[str, FileInfo] | None = None) -> None:
        super().__init__(pins)
        self.inner = inner

    root = property(lambda self: f"elsewhere:{self.inner.root}")  # type: ignore[assignment]
    gap = property(lambda self: 4096)  # type: ignore[assignment]

    def below(self, folder: str) -> Elsewhere:
        return Elsewhere(self.inner.below(folder))

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return self.inner.list(folder)

    def _with(self, pins: Mapping[str, FileInfo]) -> Elsewhere:
        return Elsewhere(self.inner, pins)

    def _stat(self, path: str) -> FileInfo:
        return self.inner._stat(path)

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        return self.inner._fetch(path, offset, target)


# fixture, case, the file that cannot be read
FILES = [
    ("kinds", "autotp_zero1", "mp_rank_01_model_states.pt"),
    ("kinds", "zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("kinds", "zero2_fp32_dp3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("kinds", "pipe_zero1_dp2", "layer_02-model_states.pt"),
    ("kinds", "moe_zero2", "layer_0_expert_1_mp_rank_00_model_states.pt"),
    ("kinds", "autotp_zero1.universal", "mp_rank_00_model_states.pt"),
    ("huggingface_cases", "llama_sharded", "model-00002-of-00006.safetensors"),
    ("huggingface_cases", "bin_sharded", "pytorch_model-00002-of-00006.bin"),
    ("rank_cases", "verl_fsdp2", "model_world_size_3_rank_1.pt"),
    ("rank_cases", "tensor_parallel", "model_rank01.bin"),
    ("dcp_cases", "as_safetensors", "__1_0.distcp"),
    ("megatron_cases", "tp2_pp2_distopt_tied", "mp_rank_01_001/model_optim_rng.pt"),
    ("trainer_cases", "trainer_llama", "checkpoint-4/optimizer.pt"),
]


@pytest.mark.product
@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize(("fixture", "name", "bad"), FILES)
def test_an_unreadable_file_is_a_problem(
    request: pytest.FixtureRequest, fixture: str, name: str, bad: str, number: int | None, looking: bool
) -> None:
    case: Case = request.getfixturevalue(fixture)[name]
    folder, bad = (
        (case.path / bad).parent if bad.startswith("checkpoint") else case.path,
        bad.removeprefix("checkpoint-4/"),
    )
    store = failing(folder, bad, number, looking)
    assert any(p.as_posix().endswith(bad) for p in folder.rglob("*") if p.is_file()), bad
    for one in (store, Elsewhere(store)):
        index = read_index(Source(one))
        lines = [p for p in index.problems if p.path and p.path.endswith(bad)]
        assert "unreadable-file" in {p.code for p in lines}, index.problems
        assert "missing-file" not in {p.code for p in lines}
        words = "connection was reset" if number is None else os.strerror(number)
        assert any(words in p for p in lines)
        assert any(index.states.values()) or index.stored


@pytest.fixture
def x(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(100.0)}, tmp_path / "x.safetensors")
    return tmp_path


@pytest.mark.parametrize("number", ERRORS)
def test_every_way_to_read_raises_the_same_error(x: Path, number: int | None) -> None:
    store = Elsewhere(failing(x, "x.safetensors", number, looking=True))
    reads = [
        lambda: store.read("x.safetensors", 0, 8),
        lambda: store.read_into("x.safetensors", 0, memoryview(bytearray(8))),
        lambda: store.read_pieces("x.safetensors", [(0, memoryview(bytearray(8)))]),
        lambda: store.stat("x.safetensors"),
        lambda: present(store, "x.safetensors"),
        lambda: StoreFile(store, "x.safetensors"),
    ]
    for read in reads:
        with pytest.raises(MissingFileError) as error:
            read()
        assert error.value.errno == (errno.EIO if number is None else number)
        assert f"{store.root}/x.safetensors cannot be read: " in str(error.value)
        assert isinstance(error.value.__cause__, OSError) and error.value.__cause__ is not error.value
        assert cannot_read("x.safetensors", error.value).code == "unreadable-file"


def test_a_file_that_is_not_there_is_missing(x: Path) -> None:
    for store in (LocalStore(x), Elsewhere(LocalStore(x))):
        with pytest.raises(MissingFileError) as error:
            store.read("y.safetensors", 0, 8)
        assert error.value.errno == errno.ENOENT
        assert cannot_read("y.safetensors", error.value).code == "missing-file"
        assert present(store, "y.safetensors") is None
    assert cannot_read("y", MissingFileError("y is missing")).code == "missing-file"


def test_errors_of_lazyckpt_stay_as_they_are(x: Path) -> None:
    class Changed(LocalStore):
        def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
            raise ChangedFileError("it is another one")

    with pytest.raises(ChangedFileError, match="it is another one") as error:
        Changed(x).read("x.safetensors", 0, 8)
    assert error.value.__cause__ is None


def test_a_local_disk_that_fails(kinds: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the system call."""
    from lazyckpt.io import system

    path, bad = kinds["autotp_zero1"].path, "mp_rank_01_model_states.pt"
    read_at, read_vector = system.File.read_at, system.File.read_vector

    def fails(file: system.File, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file.fd}").endswith(bad):
            raise raised(errno.EIO)
        return (read_at if isinstance(rest[1], memoryview) else read_vector)(file, *rest)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("finds the name of a file through /proc")
    monkeypatch.setattr(system.File, "read_at", fails)
    monkeypatch.setattr(system.File, "read_vector", fails)
    view = lazyckpt.open(path, cache=False)
    codes = {p.code for p in view.problems if p.path and p.path.endswith(bad)}
    assert "unreadable-file" in codes and "missing-file" not in codes
    assert any(t[...].numel() for name, t in view.items() if "norm" in name)


def test_a_file_behind_a_url(kinds: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    need("fsspec")
    import fsspec

    memory = fsspec.filesystem("memory")
    case = kinds["autotp_zero1"]
    for file in case.path.rglob("*"):
        if file.is_file():
            memory.pipe(f"/store_errors/{file.relative_to(case.path).as_posix()}", file.read_bytes())
    cat = type(memory).cat_file

    def fails(fs: Any, path: str, *args: Any, **options: Any) -> bytes:
        if path.endswith("mp_rank_01_model_states.pt"):
            raise PermissionError(errno.EACCES, "the token has expired")
        found: bytes = cat(fs, path, *args, **options)
        return found

    try:
        monkeypatch.setattr(type(memory), "cat_file", fails)
        view = lazyckpt.open("memory://store_errors", cache=False)
        lines = [p for p in view.problems if p.path and p.path.endswith("mp_rank_01_model_states.pt")]
        assert any(p.code == "unreadable-file" and "the token has expired" in p for p in lines), view.problems
    finally:
        memory.rm("/store_errors", recursive=True)
