"""What must survive a fork, what opening may do to the process, and what a pickle may give away."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import current_process, get_context
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils.data
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.errors import CredentialsWarning
from lazyckpt.io.parcels import unpacked
from lazyckpt.io.storage.fsspec import FsspecStore
from lazyckpt.jobs import publish
from lazyckpt.jobs.sending import Descriptions

from .hostility import deadline
from .lanes import sampled
from .workers import Rows, options_of, rows


def _child(do: object) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if do() else 1  # type: ignore[operator]
        finally:
            os._exit(code)
    for _ in range(1200):
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


@pytest.mark.slow
def test_a_child_of_a_closed_view(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(2000).view(50, 40)}, tmp_path / "x.pt")
    view, other = lazyckpt.open(tmp_path / "x.pt"), lazyckpt.open(tmp_path / "x.pt")
    t = view["w"]
    t[3], other["w"][...]
    view.close()

    def closed() -> bool:
        try:
            t[3]
        except lazyckpt.DataError:
            return other["w"][3, 1] == 121 and lazyckpt.open(tmp_path / "x.pt")["w"][3, 1] == 121
        return False

    assert _child(closed) == 0

    def closes() -> bool:
        other.close()
        return True

    assert _child(closes) == 0
    assert other["w"][3, 1] == 121, "a child closes its own copy"


@pytest.mark.slow
def test_a_child_that_is_forked_during_an_export(tmp_path: Path) -> None:
    """A thread of the parent may be entering or leaving its table of running exports. The child has no such thread."""
    torch.save({"w": torch.arange(2000).view(50, 40)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    dest = tmp_path / "y.safetensors"
    with publish._of_this_process(publish.staging_path(dest)), publish._lock:  # as that thread leaves them
        assert _child(lambda: view.to_safetensors(dest).paths and torch.equal(lazyckpt.open(dest)["w"][...], W)) == 0
    with pytest.raises(lazyckpt.DestinationError), publish._of_this_process(publish.staging_path(dest)):
        view.to_safetensors(dest, overwrite=True)  # in the process itself it is busy


W = torch.arange(2000).view(50, 40)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_of_an_executor_read_a_view(tmp_path: Path, method: str) -> None:
    """While threads of this process read it."""
    torch.save({"w": W, "p.q": torch.arange(3)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.01):  # the processes that start have the processor, too
            view["w"][7:9], view["w"][...]

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with ProcessPoolExecutor(2, get_context(method)) as pool:
            found = [pool.submit(rows, view, [n, 49 - n]) for n in range(10)]
            for n, future in enumerate(found):
                assert future.result(timeout=120) == [W[n].tolist(), W[49 - n].tolist(), [0, 1, 2]]
            part = pool.submit(len, view.prefix("p"))
            assert part.result(timeout=120) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    sampled(
        product(["torch", "safetensors", "dcp"], ["spawn", "fork"]),
        keep=[("torch", "spawn"), ("safetensors", "fork"), ("dcp", "fork")],
    ),
)
def test_workers_of_a_data_loader_read_a_view(tmp_path: Path, method: str, kind: str) -> None:
    path = tmp_path / {"torch": "x.pt", "safetensors": "x.safetensors", "dcp": "x"}[kind]
    if kind == "torch":
        torch.save({"w": W}, path)
    elif kind == "safetensors":
        save_file({"w": W}, path)
    else:
        dcp.save({"w": W}, checkpoint_id=path, no_dist=True)
    with lazyckpt.open(path) as view:
        assert torch.equal(view["w"][...], W)
        loader = torch.utils.data.DataLoader(
            Rows(view), batch_size=8, num_workers=2, multiprocessing_context=method, timeout=120
        )
        for _ in range(2):  # each time with new workers
            assert torch.equal(torch.cat(list(loader)), W)


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


@pytest.mark.parametrize(
    "options", [{"token": "hush-hush"}, {"client_kwargs": {"headers": {"Authorization": "hush-hush"}, "timeout": 3}}]
)
def test_a_pickle_has_no_credentials(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore("memory://somewhere", options)
    with pytest.warns(CredentialsWarning) as told:
        data = pickle.dumps(store)
    assert b"hush-hush" not in data and "hush-hush" not in str(told[0].message)
    assert pickle.loads(data).options == options, "this process can use them"
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    there = pickle.loads(data)
    assert "hush-hush" not in repr(there.options)
    assert there.options.get("client_kwargs", {"timeout": 3}) == {"timeout": 3}, "only credentials are left out"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(pickle.dumps(there)).options == there.options


def test_a_pickle_has_credentials_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"token": "hush-hush", "pickle_credentials": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = pickle.dumps(FsspecStore("memory://somewhere", options))
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    assert pickle.loads(data).options == options


@pytest.mark.parametrize(
    "options", [{"anon": True}, {"skip_signature": True}, {"account_name": "mine"}, {"token": "anon"}, {"token": None}]
)
def test_what_is_no_credential_stays_in_a_pickle(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = pickle.dumps(FsspecStore("memory://somewhere", options))
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    assert pickle.loads(data).options == options


def test_the_tasks_of_a_job_have_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a cluster are started by others, and have to read what this process can read."""
    store = FsspecStore("memory://somewhere", {"token": "hush-hush"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = Descriptions([]).pickled([store.list])
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    assert unpacked(data)[0].__self__.options == store.options
    with pytest.warns(CredentialsWarning):
        pickle.dumps(store)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore::lazyckpt.errors.CredentialsWarning")
def test_workers_on_this_machine_can_use_the_credentials(method: str) -> None:
    store = FsspecStore("memory://somewhere", {"token": "hush-hush"})
    with ProcessPoolExecutor(1, get_context(method)) as pool:
        assert pool.submit(options_of, store).result(timeout=120) == {"token": "hush-hush"}


def test_a_password_in_a_url_is_never_shown() -> None:
    with pytest.raises(lazyckpt.LazyckptError) as refused:
        lazyckpt.open("ftp://me:hush-hush@127.0.0.1:9/run", cache=False)
    raised: BaseException | None = refused.value
    while raised is not None:
        assert "hush-hush" not in str(raised)
        raised = raised.__cause__


def test_a_folder_with_a_link_to_itself_opens_or_fails_quickly(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    for name in ("loop",):
        (tmp_path / name).symlink_to(".")
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("loop",):
        (empty / name).symlink_to(".")
    with deadline():
        assert lazyckpt.open(tmp_path)["w"].tolist() == [0, 0, 0]
        with pytest.raises(lazyckpt.LazyckptError):
            lazyckpt.open(empty)
