"""What must survive a fork, what opening may do to the process, and what a pickle may give away."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.errors import CredentialsWarning
from lazyckpt.io.storage.fsspec import RemoteStore


def _child(do: object) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if do() else 1  # type: ignore[operator]
        finally:
            os._exit(code)
    for _ in range(300):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


@pytest.mark.slow
def test_a_child_that_is_forked_while_threads_open_and_read(tmp_path: Path) -> None:
    for n in range(8):
        torch.save({"w": torch.full((50, 40), n)}, tmp_path / f"x{n}.pt")
    views = [lazyckpt.open(tmp_path / f"x{n}.pt") for n in range(8)]
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            for n, view in enumerate(views):
                lazyckpt.open(tmp_path / f"x{n}.pt")["w"][3]
                view["w"][:, 2]

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert (
                _child(
                    lambda: all(
                        lazyckpt.open(tmp_path / f"x{n}.pt")["w"][3].tolist() == [n] * 40 and views[n]["w"][7, 1] == n
                        for n in range(8)
                    )
                )
                == 0
            )
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_opening_leaves_the_garbage_collector_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyckpt.formats import torch_save as torchsave

    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    seen: list[bool] = []
    reader = torchsave.READER
    read = reader.read
    watched = type(reader)(
        reader.name, reader.what, reader.recognises, lambda s: (seen.append(gc.isenabled()), read(s))[1], reader.tags
    )
    monkeypatch.setattr(torchsave, "READER", watched)
    before = gc.get_threshold()
    lazyckpt.open(tmp_path / "x.pt", cache=False)
    assert seen == [True] and gc.get_threshold() == before


@pytest.mark.parametrize("options", [{"token": "abc"}, {"client_kwargs": {"headers": {"Authorization": "x"}}}])
def test_a_pickle_with_credentials_says_so(options: dict[str, object]) -> None:
    store = RemoteStore("memory://somewhere", options)
    with pytest.warns(CredentialsWarning) as told:
        pickle.dumps(store)
    assert "abc" not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(RemoteStore("memory://somewhere", {"anon": True}))


def test_a_folder_with_a_link_to_itself_opens_or_fails_quickly(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    for name in ("loop",):
        (tmp_path / name).symlink_to(".")
    began = time.monotonic()
    assert lazyckpt.open(tmp_path)["w"].tolist() == [0, 0, 0]
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("loop",):
        (empty / name).symlink_to(".")
    with pytest.raises(lazyckpt.LazyckptError):
        lazyckpt.open(empty)
    assert time.monotonic() - began < 30
