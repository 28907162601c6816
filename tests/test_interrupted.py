"""Ctrl-C while a bucket is read or written: it takes effect soon, and leaves nothing that stays unnoticed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

import lazyckpt
from lazyckpt.io import pool
from lazyckpt.io.cancelling import pause
from lazyckpt.io.storage import uploads
from lazyckpt.io.storage.uploads import uploads_of
from lazyckpt.io.tasks import Task

from .servers.fixtures import Cloud, s3

__all__ = ["s3"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")]
SOON = 8.0  # seconds; without the check for it, the first test takes a minute, the second one a half


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in a process that was started to ignore it; and not in a callback of the
    garbage collector, which Hypothesis has: Python only prints what is raised there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def interrupted(do: Callable[[], object], when: Callable[[], bool]) -> float:
    """Call a function, press Ctrl-C when a condition holds; return how many seconds that took to end the call."""
    pressed: list[float] = []

    def press() -> None:
        while not when():
            time.sleep(0.01)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        do()
    return time.monotonic() - pressed[0]


@pytest.mark.parametrize("run", [pool.run, lambda tasks: pool.each(lambda task: task[1](), list(tasks))])
def test_a_signal_that_another_thread_was_handed(run: Callable[[list[Task]], None]) -> None:
    """The main thread, which alone raises KeyboardInterrupt, is not woken then."""

    def press() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def task() -> None:
        for _ in range(300):
            pause(0.1)

    threading.Thread(target=press, daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run([(1 << 30, task)] * 4)
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "block cache"])
def test_a_read_ends_soon(s3: Cloud, tmp_path: Path, cached: bool) -> None:
    tensors = {f"w{n}": torch.randint(0, 1 << 30, (1 << 20,), dtype=torch.int32) for n in range(8)}
    url = s3.put("model.safetensors", save(tensors))
    options = {**s3.options, "requests": {"smallest": 4 << 20}}
    view = lazyckpt.open(url, cache=tmp_path / "cache" if cached else False, storage_options=options)
    s3.server.set_fault("trickle", seconds=0.06, size=4096, method="GET")  # a request takes a minute
    before = s3.server.counts().sent
    assert interrupted(lambda: view.to(), lambda: s3.server.counts().sent > before + (1 << 20)) < SOON
    s3.server.clear_faults()
    found = view.to()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_read_that_is_repeated_ends_soon(s3: Cloud) -> None:
    url = s3.put("model.safetensors", save({f"w{n}": torch.zeros(1 << 20) for n in range(4)}))
    options = {**s3.options, "requests": {"timeout": 4}}  # obstore cannot be interrupted while it waits for an answer
    view = lazyckpt.open(url, cache=False, storage_options=options)
    s3.server.set_fault("status", status=503, method="GET")
    assert interrupted(lambda: view.to(), lambda: view.io.retries > 12) < SOON
    s3.server.clear_faults()
    assert not view["w3"][:].any()


def test_an_upload_is_gone_on_with_or_leaves_nothing(
    s3: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PART", 5 << 20)
    save_file({f"w{n}": torch.full((1 << 20,), float(n)) for n in range(8)}, tmp_path / "in.safetensors")
    view, place, url = (
        lazyckpt.open(tmp_path / "in.safetensors"),
        uploads_of(s3.url, s3.options),
        s3.at("m.safetensors"),
    )
    s3.server.set_fault("slow", method="PUT", skip=2, seconds=0.3)  # the marker and a part are written
    s3.server.reset()

    def write() -> None:
        view.to_safetensors(url, storage_options=s3.options)

    assert interrupted(write, lambda: s3.server.counts().methods.get("PUT", 0) > 2) < SOON
    s3.server.clear_faults()
    begun, there = list(place.begun()), place.list()  # type: ignore[attr-defined]
    assert "m.safetensors" not in there
    assert bool(begun) == bool(there), "an upload without the marker of its job"
    view.to_safetensors(url, storage_options=s3.options)
    assert place.list().keys() == {"m.safetensors"} and not list(place.begun())  # type: ignore[attr-defined]
    found = lazyckpt.open(url, storage_options=s3.options, cache=False)
    assert all(torch.equal(found[name][:], tensor[:]) for name, tensor in view.items())
