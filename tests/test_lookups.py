"""Where each answer of a store takes its time, what one read has to look up is looked up at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lazyckpt
from lazyckpt.core.index import Archive, FileInfo
from lazyckpt.io.archives import locate_all
from lazyckpt.io.pool import each

from .counting import CountingStore, Counts
from .oracle import same
from .writers import Case

ANSWER = 0.02  # seconds that every request takes


class SlowStore(CountingStore):
    """Counts how many requests are under way at the same time."""

    def __init__(self, inner: object, counts: Counts | None = None, gap: int = 0) -> None:
        super().__init__(inner, counts, gap)  # type: ignore[arg-type]
        self.lock = threading.Lock()
        self.now = self.most = 0

    def pinned(self, pins: Mapping[str, FileInfo]) -> SlowStore:
        return SlowStore(self.inner.pinned(pins), self.counts, self.gap)

    def read(self, path: str, offset: int, length: int) -> lazyckpt.io.store.Buffer:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(ANSWER)
        try:
            return super().read(path, offset, length)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def split(path: Path) -> tuple[SlowStore, str]:
        store, name = lazyckpt.io.local.split(path)
        return SlowStore(store), name

    monkeypatch.setattr("lazyckpt.view.split", split)
    yield


def _saved(folder: Path, state: dict[str, object]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.usefixtures("slow")
@pytest.mark.filterwarnings("ignore")
def test_the_archives_of_many_tensors(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.arange(5000.0) + n for n in range(24)}
    view = lazyckpt.open(_saved(tmp_path / "x", {"model": tensors}), cache=False)
    store = view["t0"].store
    start = time.perf_counter()
    read = view.to()
    took = time.perf_counter() - start
    for name, tensor in tensors.items():
        same(read[name], tensor, name)
    assert store.most > 4 and took < 24 * 2 * ANSWER / 2, "each is two requests"


@pytest.mark.usefixtures("slow")
def test_the_archives_of_one_tensor(dcp_cases: dict[str, Case]) -> None:
    case = dcp_cases["tensor_parallel"]
    view = lazyckpt.open(case.path, cache=False)
    t = max(view.values(), key=lambda t: len(t.fragments))
    assert len(t.fragments) == 4
    store = t.store
    same(t[...], case.truth["weights"][t.name], t.name)
    assert store.most >= 4


@pytest.mark.usefixtures("slow")
@pytest.mark.filterwarnings("ignore")
def test_the_objects_of_a_checkpoint(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "x", {"model": {"w": torch.zeros(4)}, "options": {f"o{n}": n for n in range(40)}})
    start = time.perf_counter()
    view = lazyckpt.open(folder, cache=False)
    assert time.perf_counter() - start < 40 * ANSWER / 2
    assert view.meta["options"] == {f"o{n}": n for n in range(40)}


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
    store, _ = lazyckpt.io.local.split(tmp_path)
    wrong = [(Archive("f", n, 100, torch.float32, (1,)), f"t{n}") for n in range(9)]
    with pytest.raises(lazyckpt.CorruptError, match="archive at byte"):
        locate_all(store, wrong)
