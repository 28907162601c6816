"""Small requests that make small requests of their own."""

from __future__ import annotations

import threading
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import lazyckpt
from lazyckpt.io.pool import each


def _within(seconds: float, work: object) -> None:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for itself"


def test_requests_within_requests_end() -> None:
    found: list[int] = []
    lock = threading.Lock()

    def outer(n: int) -> None:
        def inner(m: int) -> None:
            with lock:
                found.append(n * 20 + m)

        each(inner, range(20))

    _within(30, lambda: each(outer, range(20)))
    assert sorted(found) == list(range(400))


@pytest.mark.filterwarnings("ignore")
def test_many_archives_over_a_network_are_looked_up(tmp_path: Path) -> None:
    """Each is a zip whose headers are requests of their own."""
    state = {f"w{n}": torch.full((300, 300), float(n)) for n in range(40)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "x", no_dist=True)
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path / 'x'}/", "/nested-lookups/", recursive=True)
    read: dict[str, torch.Tensor] = {}
    _within(60, lambda: read.update(lazyckpt.open("memory://nested-lookups").to()))
    memory.rm("/nested-lookups", recursive=True)
    assert {name: tensor[0, 0].item() for name, tensor in read.items()} == {f"w{n}": float(n) for n in range(40)}
