"""Where each answer of a store takes its time, what one read has to look up is looked up at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lazyckpt
from lazyckpt.core.extents import Archive
from lazyckpt.core.index import FileInfo
from lazyckpt.io.pool import each
from lazyckpt.io.reading.packed import locate_all
from lazyckpt.io.storage.base import Buffer, Store
from lazyckpt.io.storage.local import split
from lazyckpt.testing.counting import CountingStore, Counts
from lazyckpt.testing.oracle import same

from .writers import Case


class Meter:
    """How many requests are under way, and were at most. Each waits until there have been ``wanted`` at once."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.now = self.most = self.wanted = 0

    def __enter__(self) -> None:
        with self.change:
            self.now += 1
            self.most = max(self.most, self.now)
            self.change.notify_all()
            self.change.wait_for(lambda: self.most >= self.wanted, timeout=60)

    def __exit__(self, *_: object) -> None:
        with self.change:
            self.now -= 1


class SlowStore(CountingStore):
    """Every answer takes its time."""

    def __init__(self, inner: Store, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    def pinned(self, pins: Mapping[str, FileInfo]) -> SlowStore:
        return SlowStore(self.inner.pinned(pins), self.meter)

    def read(self, path: str, offset: int, length: int) -> Buffer:
        with self.meter:
            time.sleep(0.02)
            return super().read(path, offset, length)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """What `lazyckpt.open` reads is slow from now on."""
    meter = Meter()

    def slow(path: Path, io: str = "auto") -> tuple[SlowStore, str]:
        store, name = split(path)
        return SlowStore(store, meter), name

    monkeypatch.setattr("lazyckpt.formats.archives.split", slow)
    return meter


def _saved(folder: Path, state: dict[str, object]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_the_archives_of_many_tensors(tmp_path: Path, meter: Meter) -> None:
    tensors = {f"t{n}": torch.arange(5000.0) + n for n in range(24)}
    view = lazyckpt.open(_saved(tmp_path / "x", {"model": tensors}), cache=False)
    meter.most = 0
    for name, tensor in view.to().items():
        same(tensor, tensors[name], name)
    assert 4 < meter.most <= 8


def test_the_archives_of_one_tensor(dcp_cases: dict[str, Case], meter: Meter) -> None:
    case = dcp_cases["tensor_parallel"]
    view = lazyckpt.open(case.path, cache=False)
    t = max(view.values(), key=lambda t: len(t.fragments))
    assert len(t.fragments) == 4
    meter.most, meter.wanted = 0, 4
    same(t[...], case.truth["weights"][t.name], t.name)
    assert meter.most == 4


@pytest.mark.filterwarnings("ignore")
def test_the_objects_of_a_checkpoint(tmp_path: Path, meter: Meter) -> None:
    options = {f"o{n}": n for n in range(40)}
    folder = _saved(tmp_path / "x", {"model": {"w": torch.zeros(4)}, "options": options})
    view = lazyckpt.open(folder, cache=False)
    assert 4 < meter.most <= 8
    assert view.meta["options"] == options


def test_only_what_a_slice_needs_is_looked_up(dcp_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(dcp_cases["fsdp2_uneven"].path, cache=False)
    t = view["emb.weight"]
    counts = Counts()
    store = CountingStore(t.store, counts)
    lazy = lazyckpt.LazyTensor(store, t.spec)
    lazy[0], lazy[-1]
    assert len(counts.paths) == 2 and len(t.fragments) == 3


def test_the_first_error_is_raised(tmp_path: Path) -> None:
    done = []

    def do(n: int) -> None:
        if n % 2:
            raise ValueError(n)
        done.append(n)

    with pytest.raises(ValueError):
        each(do, range(40))
    each(do, [])
    each(do, [4])
    assert done[-1] == 4
    (tmp_path / "f").write_bytes(b"no archive" * 100)
    store, _ = split(tmp_path)
    wrong = [(Archive("f", n, 100, torch.float32, (1,)), f"t{n}") for n in range(9)]
    with pytest.raises(lazyckpt.CorruptError, match="archive at byte"):
        locate_all(store, wrong)
