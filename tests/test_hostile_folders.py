"""Folders with bad indexes, lost and broken shards, and things that are no files; and that nothing is ever written."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import CorruptError, FormatError, LazyckptError, MissingFileError

from .hostility import KINDS, attempt, deadline, tree, write_real

INDEX = "model.safetensors.index.json"
posix = pytest.mark.skipif(os.name != "posix", reason="things that only Unix has")


def folder_of(path: Path, weight_map: Any = None, index: bytes | None = None, config: Any = None) -> Path:
    """Two shards, an index that is right or as given, and config.json."""
    path.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, path / "one.safetensors")
    save_file({"c": torch.full((4,), 2.0)}, path / "two.safetensors")
    good = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    made = json.dumps({"metadata": {"total_size": 36}, "weight_map": good if weight_map is None else weight_map})
    (path / INDEX).write_bytes(made.encode() if index is None else index)
    if config is not None:
        (path / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return path


def test_the_good_folder_reads(tmp_path: Path) -> None:
    view = lazyckpt.open(folder_of(tmp_path / "good", config={"architectures": ["LlamaForCausalLM"]}))
    assert view["c"][...].tolist() == [2.0] * 4
    assert not view.problems


OUTSIDE: list[Any] = [
    "../outside.safetensors",
    "sub/../../outside.safetensors",
    "./../outside.safetensors",
    "..",
    "/etc/passwd",
    "//etc/passwd",
    "..\\outside.safetensors",
    "C:\\outside.safetensors",
    "C:/outside.safetensors",
    "\\\\server\\share",
    "s3://bucket/x.safetensors",
    "file:///etc/passwd",
    "",
    "a\0b",
    "\ud800",
    5,
    None,
    ["one.safetensors"],
    {},
]


@pytest.mark.parametrize("target", OUTSIDE, ids=repr)
def test_an_index_that_leads_out_of_its_folder(target: Any, tmp_path: Path) -> None:
    """It is not followed, whatever is there."""
    save_file({"secret": torch.ones(1)}, tmp_path / "outside.safetensors")
    path = folder_of(tmp_path / "model", {"a": "one.safetensors", "secret": target})
    with pytest.raises(CorruptError, match=INDEX) as caught:
        lazyckpt.open(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("target", [".", "sub", "sub/", "one.safetensors/", "x" * 5000, "one.safetensors/x"])
def test_an_index_that_leads_to_no_file(target: str, tmp_path: Path) -> None:
    """The rest reads."""
    path = folder_of(tmp_path / "model", {"a": "one.safetensors", "b": "one.safetensors", "lost": target})
    (path / "sub").mkdir()
    try:
        view = lazyckpt.open(path)
    except CorruptError as e:  # also right: the index cannot mean that
        assert INDEX in str(e)
        return
    assert view["a"][...].tolist() == [1.0, 1.0]
    if "lost" not in view:
        with pytest.raises(LazyckptError, match="lost"):
            _ = view["lost"]
        assert any("lost" in line for line in view.problems)


BAD_INDEXES: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"   \n",
    "not JSON": b"{weight_map: }",
    "cut": b'{"metadata": {}, "weight_map": {"a": "one.safe',
    "a list": b"[]",
    "a number": b"12",
    "null": b"null",
    "no weight_map": b'{"metadata": {}}',
    "an empty weight_map": b'{"weight_map": {}}',
    "a weight_map of lists": b'{"weight_map": ["a"]}',
    "a weight_map null": b'{"weight_map": null}',
    "bad UTF-8": b'{"weight_map": {"\xff": "one.safetensors"}}',
    "UTF-16": '{"weight_map": {"a": "one.safetensors"}}'.encode("utf-16"),
    "nested": b"[" * 300_000,
    "nested objects": b'{"a":' * 300_000,
    "a huge number": b'{"weight_map": {"a": "one.safetensors"}, "metadata": ' + b"9" * 100_000 + b"}",
    "binary": bytes(range(256)) * 20,
    "zeros": bytes(5000),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_bad_indexes_are_refused(name: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model", index=BAD_INDEXES[name])
    for opened in (path, path / INDEX):
        with deadline(), pytest.raises(CorruptError, match=INDEX):
            lazyckpt.open(opened)


def test_every_truncation_of_an_index_is_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model")
    raw = (path / INDEX).read_bytes()
    for n in range(len(raw)):
        (path / INDEX).write_bytes(raw[:n])
        assert attempt(path, INDEX) is None


@pytest.mark.slow
def test_an_index_of_a_hundred_thousand_names(tmp_path: Path) -> None:
    path = folder_of(
        tmp_path / "model", {f"layers.{n}": "one.safetensors" for n in range(100_000)} | {"a": "one.safetensors"}
    )
    with deadline():
        view = lazyckpt.open(path)
        assert view["a"][...].tolist() == [1.0, 1.0]
        with pytest.raises(MissingFileError, match=r"layers\.5.*one\.safetensors"):
            _ = view["layers.5"]
    assert all(len(line) < 500 for line in view.problems)


def test_an_index_that_is_far_too_large(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model")
    with (path / INDEX).open("r+b") as file:
        file.truncate(1 << 33)
    with deadline(), pytest.raises(CorruptError, match=rf"{INDEX}.*8,589,934,592"):
        lazyckpt.open(path)


CONFIGS: list[Any] = [
    {},
    {"architectures": [["x"]]},
    {"architectures": [{}]},
    {"architectures": "x"},
    {"architectures": None},
    {"architectures": [None]},
    {"architectures": [5, "LlamaForCausalLM"], "tie_word_embeddings": True},
    {"text_config": []},
    {"text_config": {"tie_word_embeddings": [1]}},
    {"tie_word_embeddings": "yes"},
    {"vocab_size": 1e999},
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_odd_configs_are_harmless(config: Any, tmp_path: Path) -> None:
    view = lazyckpt.open(folder_of(tmp_path / "model", config=config))
    assert view["a"][...].tolist() == [1.0, 1.0]
    repr(view)


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"\xff", b"[" * 200_000])
def test_broken_config_is_reported(config: bytes, tmp_path: Path) -> None:
    """As an error or as a problem; the weights do not stand on it."""
    try:
        view = lazyckpt.open(folder_of(tmp_path / "model", config=config))
    except CorruptError as e:
        assert "config.json" in str(e)
    else:
        assert any("config.json" in line for line in view.problems)
        assert view["a"][...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "text", "a folder", "a header of junk", "unreadable name"])
def test_the_rest_reads_where_a_shard_is_broken(damage: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model")
    shard = path / "two.safetensors"
    raw = shard.read_bytes()
    shard.unlink()
    match damage:
        case "empty":
            shard.write_bytes(b"")
        case "cut":
            shard.write_bytes(raw[:-1])
        case "text":
            shard.write_text("Not Found")
        case "a folder":
            shard.mkdir()
        case "a header of junk":
            shard.write_bytes(raw[:8] + b"\xff" * (len(raw) - 8))
        case "unreadable name":
            shard.symlink_to("nowhere")
    view = lazyckpt.open(path)
    assert view["a"][...].tolist() == [1.0, 1.0]
    assert view["b"].to("cpu").tolist() == [0.0] * 3
    assert set(view) == {"a", "b"}
    with pytest.raises(MissingFileError, match=r"c.*two\.safetensors") as caught:
        _ = view["c"]
    assert isinstance(caught.value, FileNotFoundError)
    assert any("two.safetensors" in line for line in view.problems)
    assert view.to("cpu").keys() == {"a", "b"}


def test_where_all_shards_are_broken_the_error_says_so(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model")
    for name in ("one", "two"):
        (path / f"{name}.safetensors").write_bytes(b"x")
    with pytest.raises(LazyckptError, match=r"(one|two)\.safetensors"):
        lazyckpt.open(path)


# -- what is no file


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", INDEX, "config.json", "latest"])
def test_a_folder_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model")
    if name == INDEX:
        (path / name).unlink()
    (path / name).mkdir()
    with deadline():
        attempt(path, name)


@posix
@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", INDEX, "config.json", "latest", "two.safetensors"]
)
def test_a_pipe_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    """Opening one to read waits for a writer: for ever."""
    path = folder_of(tmp_path / "model")
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with deadline():
        attempt(path, name)
        attempt(path / name)


@posix
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".json", ""])
def test_special_files_are_refused(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may not be long
    os.mkfifo(f"pipe{suffix}")
    os.symlink("nowhere", f"dangling{suffix}")
    os.symlink(f"loop{suffix}", f"loop{suffix}")
    os.symlink("/dev/zero", f"zeros{suffix}")
    os.symlink("/dev/null", f"null{suffix}")
    with socket.socket(socket.AF_UNIX) as s, deadline():
        s.bind(f"socket{suffix}")
        for name in ("pipe", "dangling", "loop", "zeros", "null", "socket", "nothing"):
            with pytest.raises(LazyckptError, match=name):
                lazyckpt.open(tmp_path / f"{name}{suffix}")
        for name in ("dangling", "loop", "nothing"):
            with pytest.raises(MissingFileError):
                lazyckpt.open(f"{name}{suffix}")


@pytest.mark.parametrize("path", ["", "a" * 5000, "a/" * 3000, "a\0b", "\udcff\udcfe", "nowhere/at/all.pt", "a" * 300])
def test_impossible_paths(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LazyckptError):
        lazyckpt.open(path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="empty folder"):
        lazyckpt.open(tmp_path)


@contextmanager
def nobody() -> Iterator[Path]:
    """Without the rights of root, in a folder that everyone can enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


@posix
def test_no_permission(tmp_path: Path) -> None:
    lazyckpt.open(folder_of(tmp_path / "model"))  # what is imported at first use: nobody may not read the sources
    with nobody() as folder:
        path = folder_of(folder / "model")
        lost = path / "two.safetensors"
        lost.chmod(0)
        with pytest.raises(MissingFileError, match=r"two\.safetensors.*[Pp]ermission"):
            lazyckpt.open(lost)
        view = lazyckpt.open(path)
        assert view["a"][...].tolist() == [1.0, 1.0]
        with pytest.raises(MissingFileError, match=r"two\.safetensors"):
            _ = view["c"]
        path.chmod(0o300)  # to be entered, not to be listed
        with pytest.raises(MissingFileError, match=r"model.*[Pp]ermission"):
            lazyckpt.open(path)
        path.chmod(0)
        for opened in (path, path / "one.safetensors", path / INDEX):
            with pytest.raises(MissingFileError, match=r"model.*[Pp]ermission"):
                lazyckpt.open(opened)
        path.chmod(0o700)


# -- nothing is written


def fingerprint(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every name with its content, times and rights; reading a file may change the time of access alone."""
    found = {}
    for path in sorted(folder.rglob("*")):
        s = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(s.st_mode) else ""
        found[str(path.relative_to(folder))] = (content, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_mode, s.st_ino)
    return found


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "folder"])
def test_nothing_is_written_to_a_source(kind: str, writable: bool, tmp_path: Path) -> None:
    """Whatever is done with what was read, and also where nothing could be written."""
    if kind == "folder":
        path = folder_of(tmp_path / "model", config={})
    else:
        path = write_real(tmp_path, kind)
    if not writable:
        for file in tmp_path.rglob("*"):
            file.chmod(0o555 if file.is_dir() else 0o444)
        tmp_path.chmod(0o555)
    before = fingerprint(tmp_path)
    for _ in range(2):
        view = lazyckpt.open(path)
        repr(view), view.tree(), view.explain(), repr(view.meta), dict(view.stored)
        for tensor in view.values():
            read = [tensor[...], tensor[(slice(0, 1),) * tensor.ndim], tensor.to("cpu"), tensor.to("cpu", copy=False)]
            read += [
                tensor.lazy[...].to("cpu"),
                torch.from_numpy(tensor.numpy().copy()) if kind == "folder" else tensor[...],
            ]
            for t in read:
                if t.numel() and t.layout == torch.strided:
                    t.view(torch.uint8 if t.dtype == torch.bool else t.dtype).zero_()
        for found in (*view.to("cpu").values(), *view.to("cpu", copy=False).values()):
            found.zero_()
    assert fingerprint(tmp_path) == before
    reread = {k: v[...] for k, v in lazyckpt.open(path).items()}
    if kind != "folder":
        assert torch.equal(reread["a.weight"], tree()["model"]["a.weight"])
    tmp_path.chmod(0o755)


def test_refusing_writes_nothing_either(tmp_path: Path) -> None:
    for kind in KINDS:
        path = write_real(tmp_path, kind)
        path.write_bytes(path.read_bytes()[:-40])
        before = fingerprint(tmp_path)
        attempt(path)
        assert fingerprint(tmp_path) == before
