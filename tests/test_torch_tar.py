"""Tar files of torch 0.1: torch reads what the writer of the tests wrote, and lazyckpt reads the same."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, testing

from .writers import bit_equal
from .writers.torch_tar import write_tar


def tree() -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    whole = torch.arange(24.0).reshape(4, 6)
    part = torch.arange(100, dtype=torch.int64)[10:30]
    state = OrderedDict(
        [
            ("conv.weight", whole),
            ("conv.row", whole[2]),
            ("turned", whole.t()),
            ("part", part),
            ("half", torch.randn(3, 2).half()),
            ("bytes", torch.arange(5, dtype=torch.uint8)),
            ("double", torch.randn(7).double()),
        ]
    )
    state["tied"] = state["double"]
    return {"state_dict": state, "epoch": 3, "arch": "resnet"}, (part,)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    held, parts = tree()
    return write_tar(tmp_path / "model.pth.tar", held, parts=parts)


def test_torch_reads_what_is_written(written: Path) -> None:
    theirs = torch.load(written, weights_only=False)
    held, _ = tree()
    assert theirs["epoch"] == 3
    assert all(
        torch.equal(theirs["state_dict"][k].float(), t.float())
        for k, t in held["state_dict"].items()
        if k not in ("half", "double", "tied")
    )
    view = lazyckpt.open(written)
    assert view.format == "torch"
    assert set(view) == set(theirs["state_dict"])
    for name, tensor in theirs["state_dict"].items():
        assert bit_equal(view[name][...], tensor), name
    assert (view.meta["epoch"], view.meta["arch"]) == (3, "resnet")
    assert dict(view.aliases) == {"tied": "double"} and not view.problems


@pytest.mark.parametrize("check", testing.CHECKS[::3], ids=lambda check: check.__name__)  # as of other files of torch
def test_contract(check: testing.Check, written: Path) -> None:
    theirs = torch.load(written, weights_only=False)
    check(testing.Case(written, {"weights": dict(theirs["state_dict"])}, {"tied": {"tied": "double"}}))


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "model", "model.tar"])
def test_any_name(name: str, written: Path) -> None:
    path = written.rename(written.with_name(name))
    assert bit_equal(lazyckpt.open(path)["conv.row"][...], torch.arange(12.0, 18.0))


@pytest.mark.parametrize("protocol", [0, 1, 3, 4])
def test_pickle_protocols(protocol: int, tmp_path: Path) -> None:
    held, parts = tree()
    path = write_tar(tmp_path / "m.tar", held, protocol, parts)
    assert bit_equal(lazyckpt.open(path)["part"][...], torch.arange(10, 30))


def test_scan_and_verify(written: Path) -> None:
    assert lazyckpt.scan(written).ok and lazyckpt.verify(written, progress=False).ok


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive.getmembers()}  # type: ignore[union-attr]


def packed(path: Path, held: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:") as archive:
        for name, data in held.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["storages", "tensors", "pickle"])
def test_truncated_members_are_refused(name: str, written: Path, tmp_path: Path) -> None:
    held = members(written)
    for size in (0, 10, len(held[name]) // 2, len(held[name]) - 1):
        path = packed(tmp_path / "x.pt", held | {name: held[name][:size]})
        with pytest.raises(CorruptError):
            lazyckpt.open(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("storages", pickle.dumps(-1, 2)),
        ("storages", pickle.dumps(1 << 40, 2)),
        ("storages", pickle.dumps("many", 2)),
        ("tensors", pickle.dumps(1, 2) + pickle.dumps((1, 2, 3), 2)),
        ("tensors", pickle.dumps(1, 2) + pickle.dumps((7, None, 3), 2) + b"\xff" * 8),
        ("tensors", pickle.dumps(0, 2)),  # the object refers to tensors that are not there
        ("pickle", pickle.dumps({}, 2) + b"more"),
    ],
)
def test_what_cannot_be_right_is_refused(name: str, data: bytes, written: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptError):
        lazyckpt.open(packed(tmp_path / "x.pt", members(written) | {name: data}))


def test_other_tars_are_told(tmp_path: Path) -> None:
    path = packed(tmp_path / "folder.pt", {"a.txt": b"1"})
    with pytest.raises(FormatError, match=r"\.tar"):
        lazyckpt.open(path)


def test_dangerous_names_in_every_member_are_told(written: Path, tmp_path: Path) -> None:
    held = members(written)
    bad = held["storages"].replace(b"ctorch\nFloatStorage", b"cos\nsystem")
    with pytest.raises(CorruptError):
        lazyckpt.open(packed(tmp_path / "x.pt", held | {"storages": bad}))
    bad = held["tensors"].replace(b"ctorch\nHalfTensor", b"cposix\nsystem")
    assert bad != held["tensors"]
    view = lazyckpt.open(packed(tmp_path / "y.pt", held | {"tensors": bad}))
    assert "unsafe-pickle" in {p.code for p in view.problems}
