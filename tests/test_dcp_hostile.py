"""Hostile and damaged distributed checkpoints: nothing runs, nothing outside is read, errors name the file."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import lazyckpt
from lazyckpt import CheckpointView, LazyckptError
from lazyckpt.formats.dcp.chunks import overlapping
from lazyckpt.formats.dcp.metadata import Chunks
from lazyckpt.io.codecs import unpack_zstd

from .hostility import deadline
from .lanes import rounds

LARGE = 1 << 40


class Runs:
    """Unpickles as a call of os.system that would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def write(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(5)}, "epoch": 3, "lr": [1, 2]}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "ckpt")


def change(folder: Path, edit: Callable[[Metadata], Any]) -> None:
    """Rewrite .metadata after an edit (of the real objects; these files are our own)."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed, 4))


def use(folder: Path) -> CheckpointView:
    """Open it and look at all there is."""
    view = lazyckpt.open(folder, cache=False)
    repr(view), view.explain(), repr(dict(view.meta)), view.problems, list(view.stored)
    return view


def read(view: CheckpointView) -> None:
    for name, t in view.stored.items():
        try:
            t[(slice(0, 2),) * t.ndim] if t.nbytes > 1 << 20 else t[...]
        except LazyckptError as e:
            assert ".distcp" in str(e) or ".metadata" in str(e) or repr(name) in str(e)
            assert len(str(e)) < 1500


def test_nothing_runs(folder: Path, tmp_path: Path) -> None:
    def edit(metadata: Metadata) -> None:
        metadata.storage_meta = Runs(tmp_path / "it_ran")  # type: ignore[assignment]

    change(folder, edit)
    view = use(folder)
    read(view)
    assert not (tmp_path / "it_ran").exists()
    assert any("system" in line for line in view.problems)
    assert torch.equal(view["w"][...], torch.arange(24.0).view(4, 6))


def test_nothing_runs_in_objects(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.zeros(2), "evil": Runs(tmp_path / "it_ran")}
        dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    view = use(tmp_path / "x")
    assert not (tmp_path / "it_ran").exists()
    assert "system" in repr(view.meta["evil"]) and any("system" in line for line in view.problems)


def test_something_else_is_no_metadata(folder: Path, tmp_path: Path) -> None:
    for value in ({"a": 1}, Runs(tmp_path / "it_ran"), [], 3, Metadata({}, None, None), Metadata([], None, {})):  # type: ignore[arg-type]
        (folder / ".metadata").write_bytes(pickle.dumps(value, 4))
        with pytest.raises(lazyckpt.errors.CorruptError, match=r"\.metadata"):
            lazyckpt.open(folder)
    assert not (tmp_path / "it_ran").exists()
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(lazyckpt.errors.CorruptError, match="empty"):
        lazyckpt.open(folder)


def _item(**changes: Any) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.w":
                metadata.storage_data[index] = _StorageInfo(**{**vars(info), "transform_descriptors": None, **changes})

    return edit


@pytest.mark.parametrize(
    "path", ["../secret.distcp", "/etc/passwd", "a/../../secret", "..", ".", "", "a\\b", "c:x", "a\nb", 5, None, b"x"]
)
def test_no_path_leads_outside(folder: Path, path: Any) -> None:
    change(folder, _item(relative_path=path))
    with pytest.raises(lazyckpt.errors.CorruptError, match="outside its folder"):
        lazyckpt.open(folder)


@pytest.mark.parametrize("changes", [{"offset": -1}, {"length": -5}, {"offset": 1.5}, {"length": 1 << 70},
                                     {"transform_descriptors": [1]}, {"transform_descriptors": "x" * 20}])  # fmt: skip
def test_places_that_cannot_be(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, _item(**changes))
    with pytest.raises(lazyckpt.errors.CorruptError, match=r"\.metadata.*model\.w"):
        lazyckpt.open(folder)


@pytest.mark.parametrize("changes", [{"offset": LARGE}, {"length": LARGE}, {"relative_path": "gone.distcp"}])
def test_places_that_are_not_there(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, _item(**changes))
    view = use(folder)
    assert any("model.w" in line for line in view.problems)
    with pytest.raises(lazyckpt.errors.MissingFileError):
        view["w"][...]
    assert torch.equal(view["b"][...], torch.arange(5))


@pytest.mark.parametrize("changes", [{"offset": 0}, {"offset": 7}, {"length": 700}, {"length": 30}, {"length": 1}])
def test_places_where_something_else_is(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, _item(**changes))
    view = use(folder)
    with pytest.raises(lazyckpt.errors.CorruptError, match=r"model\.w|'w'"):
        view["w"][...]


def test_a_length_that_says_safetensors(folder: Path) -> None:
    change(folder, _item(length=96))
    view = use(folder)
    assert any(line.code == "unreadable-file" for line in view.problems)
    with pytest.raises(lazyckpt.errors.MissingFileError):
        view["w"][...]


def _tensor(**changes: Any) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        for key, value in changes.items():
            setattr(metadata.state_dict_metadata["model.w"], key, value)

    return edit


def _chunk(offsets: Any, sizes: Any) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(offsets, sizes)]


@pytest.mark.parametrize(
    "edit",
    [
        _tensor(size=(4, -6)),
        _tensor(size=(1 << 40, 1 << 40)),
        _tensor(size="46"),
        _tensor(size=(4.0, 6)),
        _tensor(size=(4,) * 100),
        _tensor(size=None),
        _tensor(properties=None),
        _tensor(chunks=None),
        _tensor(chunks=[3]),
        _tensor(chunks=_chunk((0,), (4,))),
        _tensor(chunks=_chunk((1, 0), (4, 6))),
        _tensor(chunks=_chunk((-1, 0), (4, 6))),
        _tensor(chunks=_chunk((0, 0), (LARGE, LARGE))),
        _tensor(chunks=_chunk(None, None)),
    ],
)
def test_tensors_that_cannot_be(folder: Path, edit: Callable[[Metadata], None]) -> None:
    change(folder, edit)
    with pytest.raises(lazyckpt.errors.CorruptError, match=r"\.metadata.*model\.w"):
        lazyckpt.open(folder)


@pytest.mark.parametrize("size", [(6, 4), (2, 6), (24,), (4, 6, 1)])
def test_an_archive_of_another_shape(folder: Path, size: tuple[int, ...]) -> None:
    def edit(metadata: Metadata) -> None:
        start = (0,) * len(size)
        _tensor(size=size, chunks=_chunk(start, size))(metadata)
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == "model.w":
                metadata.storage_data[MetadataIndex("model.w", start)] = info

    change(folder, edit)
    view = use(folder)
    with pytest.raises(lazyckpt.errors.CorruptError, match="shape"):
        view["w"][...]


def test_a_huge_empty_claim_costs_nothing(folder: Path) -> None:
    def edit(metadata: Metadata) -> None:
        _tensor(size=(LARGE, 6))(metadata)

    change(folder, edit)
    view = use(folder)
    assert any(line.code == "missing-elements" for line in view.problems)
    assert torch.equal(view["w"][:4], torch.arange(24.0).view(4, 6))
    with pytest.raises(lazyckpt.errors.DataError):
        view["w"][5]


def test_shared_chunks_do_not_multiply(folder: Path) -> None:
    def edit(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.w"]
        entry.chunks *= 20_000  # type: ignore[union-attr]
        metadata.state_dict_metadata |= {f"k{n}": type(entry)(entry.properties, entry.size, entry.chunks)  # type: ignore[union-attr, call-arg]
                                         for n in range(2000)}  # fmt: skip

    change(folder, edit)
    with deadline(), pytest.raises(lazyckpt.errors.CorruptError, match="damaged or hostile"):
        lazyckpt.open(folder)


def test_paths_that_are_not_their_keys(folder: Path) -> None:
    def edit(metadata: Metadata) -> None:
        metadata.planner_data = {"model.w": ("model", "b"), "model.b": ("model", 1 << 60), "epoch": [], "x": ("x",)}

    change(folder, edit)
    view = use(folder)
    assert set(view) == {"model.w", "model.b"}
    change(folder, lambda metadata: setattr(metadata, "planner_data", 7))
    assert set(use(folder)) == {"model.w", "model.b"}


def test_paths_with_absurd_list_positions(folder: Path) -> None:
    def edit(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a.1000000"] = metadata.state_dict_metadata.pop("epoch")
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == "epoch":
                metadata.storage_data[MetadataIndex("a.1000000")] = info
        metadata.planner_data["a.1000000"] = ("a", 1_000_000)

    change(folder, edit)
    assert len(use(folder).meta["a"]) <= 10_001


@pytest.mark.slow
def test_flipped_bytes(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    good = {p.name: p.read_bytes() for p in folder.iterdir()}
    opened = 0
    for n in range(400):
        copy = tmp_path / f"flip{n % 2}"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, data in good.items():
            changed = bytearray(data)
            if (name == ".metadata") == (n % 3 > 0):
                for _ in range(rng.choice((1, 1, 2, 8))):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                if n % 10 == 0:
                    del changed[rng.randrange(len(changed)) :]
            (copy / name).write_bytes(changed)
        with deadline():
            try:
                view = use(copy)
            except LazyckptError as e:
                assert ".metadata" in str(e) or ".distcp" in str(e), e
                continue
            opened += 1
            read(view)
    assert opened > 50


def test_zstd_frames_that_lie() -> None:
    def frame(blocks: bytes, size: int | None = None) -> bytes:
        head = b"\x28\xb5\x2f\xfd" + (b"\x00\x58" if size is None else b"\xc0\x58" + struct.pack("<Q", size))
        return head + blocks

    def block(kind: int, count: int, data: bytes, last: bool = True) -> bytes:
        return (last | kind << 1 | count << 3).to_bytes(3, "little") + data

    good = frame(block(0, 5, b"hello"))
    assert unpack_zstd(good, "x", 5) == b"hello"
    bomb = frame(b"".join(block(1, 128 << 10, b"a", False) for _ in range(2000)) + block(0, 0, b""))
    for bad in (good[:-1], good[:7], b"", good + b"junk", b"junk" * 5, bomb, frame(block(0, 5, b"hello"), 1 << 45),
                frame(block(3, 5, b"hello")), frame(block(2, 5, b"hello"))):  # fmt: skip
        if bad:
            with pytest.raises(lazyckpt.errors.CorruptError, match="x: "):
                unpack_zstd(bad, "x", 100)


def _rows(metadata: Metadata, *rows: tuple[int, int]) -> None:
    """Cut model.w, of shape (4, 6), into chunks of these rows (first, count), all with the bytes of the whole."""
    (index,) = [one for one in metadata.storage_data if one.fqn == "model.w"]
    info = metadata.storage_data.pop(index)
    chunks = [ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([count, 6])) for first, count in rows]
    metadata.state_dict_metadata["model.w"].chunks[:] = chunks  # type: ignore[union-attr]
    metadata.storage_data.update({MetadataIndex("model.w", chunk.offsets): info for chunk in chunks})


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 4), (0, 4)],  # the same twice
        [(0, 2), (1, 2)],  # overlapping, with a gap of the same size
        [(0, 3), (2, 2)],
        [(0, 2), (0, 2)],
    ],
)
def test_overlapping_chunks_are_reported(folder: Path, rows: list[tuple[int, int]]) -> None:
    change(folder, lambda metadata: _rows(metadata, *rows))
    view = use(folder)
    assert [p.path for p in view.problems if p.code == "inconsistent-metadata"] == ["model.w"]
    report = lazyckpt.verify(folder)
    assert any(f.code == "inconsistent-metadata" for f in report.findings)


def test_chunks_in_any_order_are_no_problem(folder: Path) -> None:
    rng = random.Random(1)
    rows = [(n, 1) for n in range(4)]
    rng.shuffle(rows)
    change(folder, lambda metadata: _rows(metadata, *rows))
    assert not [p for p in use(folder).problems if p.code == "inconsistent-metadata"]


class _Twice(dict[Any, Any]):
    """Pickles as a dict in which each key is twice, the second time with another place in the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        again = [(MetadataIndex(k.fqn, k.offset), _StorageInfo("__9_9.distcp", 0, 1)) for k in self]
        return dict, (), None, None, iter([*self.items(), *again])


def test_items_that_are_listed_twice_are_reported(folder: Path) -> None:
    def edit(metadata: Metadata) -> None:
        metadata.storage_data = _Twice(metadata.storage_data)

    change(folder, edit)
    lines = [p for p in use(folder).problems if p.code == "inconsistent-metadata"]
    assert any("listed twice" in line for line in lines)


@pytest.mark.parametrize("seed", range(6))
def test_overlaps_are_found_exactly(seed: int) -> None:
    """Random partitions of a box, and the same with one block moved."""
    rng = random.Random(seed)
    for _ in range(rounds(60)):
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(rng.randrange(1, 9)):
            start, sizes = boxes.pop(rng.randrange(len(boxes)))
            dim = rng.randrange(len(shape))
            cut = rng.randrange(1, max(2, sizes[dim]))
            left, right = min(cut, sizes[dim]), sizes[dim] - min(cut, sizes[dim])
            boxes.append((start, (*sizes[:dim], left, *sizes[dim + 1 :])))
            if right:
                moved = (*start[:dim], start[dim] + left, *start[dim + 1 :])
                boxes.append((moved, (*sizes[:dim], right, *sizes[dim + 1 :])))
        rng.shuffle(boxes)
        for move in (0, rng.choice((-1, 1))):
            n, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
            start, sizes = boxes[n]
            at = max(0, min(shape[dim] - sizes[dim], start[dim] + move))
            boxes[n] = (*start[:dim], at, *start[dim + 1 :]), sizes
            times = torch.zeros(shape, dtype=torch.int)
            for start, sizes in boxes:
                times[tuple(slice(a, a + size) for a, size in zip(start, sizes, strict=True))] += 1
            columns = Chunks(np.array([b[0] for b in boxes]), np.array([b[1] for b in boxes]))
            expected = bool((times != 1).any())
            assert overlapping(shape, boxes) == overlapping(shape, columns) == expected
