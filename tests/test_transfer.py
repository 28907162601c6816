"""The way to an accelerator: a ring of host buffers, to a simulated device, and to a GPU if there is one."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.select import Selection
from lazyckpt.errors import DataError
from lazyckpt.io.reading import device as transfer
from lazyckpt.io.reading.device import Piece, PlainDevice, StreamDevice, ring
from lazyckpt.io.storage.base import Fetched
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import indexed, keys, same, same_values, some_keys

from .conftest import complete
from .devices import GPU, Far, QueueDevice, near, simulated
from .writers import Case

_NO_CONVERSION = {torch.float4_e2m1fn_x2}
_BUFFERS = 3  # that a ring has at most
_AHEAD = 2  # that are filled while others are copied


@pytest.fixture(params=[16, 48, 1000, 32 << 20], ids=lambda size: f"{size}B")
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a ring's buffer: from one element of the largest dtype to the real one."""
    monkeypatch.setattr(transfer, "PIECE", request.param)
    size: int = request.param
    return size


@pytest.fixture
def gpu() -> Iterator[QueueDevice]:
    with simulated() as device:
        yield device


# -- values


@pytest.mark.product
@pytest.mark.parametrize("name", ["flat", "views", "legacy", "big_endian", "training"])
def test_every_tensor_arrives_whole(torch_cases: dict[str, Case], name: str, piece: int, gpu: QueueDevice) -> None:
    case = torch_cases[name]
    view = lazyckpt.open(case.path)
    for arrived in (view.to("cuda"), {key: t.to("cuda") for key, t in view.items()}):
        assert arrived.keys() == case.truth["weights"].keys()
        for key, tensor in arrived.items():
            assert tensor.device == GPU
            same(near(tensor), case.truth["weights"][key], key)
    assert not gpu.pending


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("name", ["flat", "views"])
def test_slices_flips_and_lists_arrive(torch_cases: dict[str, Case], name: str, piece: int, gpu: QueueDevice) -> None:
    case = torch_cases[name]
    view = lazyckpt.open(case.path)
    for n, (key, whole) in enumerate(case.truth["weights"].items()):
        chosen = keys(whole.shape, f"{key}") if n % 5 == 0 else some_keys(whole.shape, f"{key} {piece}", 4)
        with ring(GPU) as way:  # one after the other through the same ring
            found = [(item, view[key].lazy[item]._send(way)) for item in chosen]
        for item, got in found:
            same(near(got), indexed(whole, item), (key, item))
            same(near(view[key].lazy[item].to("cuda")), indexed(whole, item), (key, item))


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("name", ["zero2_aligned_round_robin", "zero3_sub_groups"])
def test_fragments_of_many_ranks_arrive(zero_cases: dict[str, Case], name: str, piece: int, gpu: QueueDevice) -> None:
    case = complete(zero_cases[name])
    view = lazyckpt.open(case.path)
    for state, truth in case.truth.items():
        for key, tensor in view.states[state].to("cuda").items():
            same(near(tensor), truth[key], (state, key))
        for key, whole in truth.items():
            for item in some_keys(whole.shape, f"{name} {key}", 1):
                got = view.states[state][key].lazy[item].to("cuda")
                same(near(got), indexed(whole, item), (state, key, item))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_a_dtype_is_converted_on_the_way(
    torch_cases: dict[str, Case], dtype: torch.dtype, piece: int, gpu: QueueDevice
) -> None:
    case = torch_cases["flat"]
    view = lazyckpt.open(case.path)
    for key, whole in case.truth["weights"].items():
        if whole.dtype in _NO_CONVERSION or (not dtype.is_floating_point and whole.is_floating_point()):
            continue  # torch does not convert it, or leaves open what infinity is as an int
        if whole.is_complex() and not dtype.is_complex:
            continue  # discards a part, with a warning
        same_values(near(view[key].to("cuda", dtype)), whole.to(dtype), key)
        if whole.ndim:
            same_values(near(view[key].lazy[::-1].to("cuda", dtype)), whole.to(dtype).flip(0), key)


def test_only_floating_point_tensors_of_a_view_are_converted(tmp_path: Path, gpu: QueueDevice) -> None:
    truth = {"w": torch.randn(30, 7), "n": torch.arange(5), "h": torch.randn(4).half()}
    torch.save(truth, tmp_path / "x.pt")
    found = lazyckpt.open(tmp_path / "x.pt").to("cuda", torch.float64)
    assert [found[name].dtype for name in truth] == [torch.float64, torch.int64, torch.float64]
    same(near(found["w"]), truth["w"].double(), "w")
    same(near(found["n"]), truth["n"], "n")
    same(near(found["h"]), truth["h"].double(), "h")


def test_tied_tensors_are_sent_once(torch_cases: dict[str, Case], gpu: QueueDevice) -> None:
    view = lazyckpt.open(torch_cases["training"].path)
    found = view.to("cuda")
    for alias, owner in view.aliases.items():
        assert found[alias] is found[owner]


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ((60, 100), ...),
        ((60, 100), slice(None, None, -3)),
        ((60, 100), (slice(2, 50), slice(None, None, 7))),
        ((60, 100), [5, 1, 1, 40]),
        ((3, 1, 5, 9), (..., [8, 0, 1])),
        ((1, 4000), ...),
        ((4000, 1), ...),
        ((7,), [6, 0]),
        ((6, 0), ...),
        ((), ...),
    ],
)
def test_pieces_tile_what_is_read(shape: tuple[int, ...], key: Any, piece: int) -> None:
    reads = Selection.all(shape)[key].reads()
    seen = torch.zeros(reads.shape, dtype=torch.int32)
    for part, box in transfer.pieces(reads, 4):
        assert prod(part.shape) * 4 <= piece and part.shape == box.shape
        assert not part.flips and not part.orders
        seen[box.slices] += 1
    assert seen.eq(1).all(), "every element in exactly one piece"


@pytest.mark.parametrize("to", ["parameters", "columns", "doubles"])
def test_a_module_on_the_device_is_filled(tmp_path: Path, piece: int, gpu: QueueDevice, to: str) -> None:
    """Of any strides and dtype; modules with parameters on the CPU and on the device, too."""
    model = torch.nn.Sequential(torch.nn.Linear(33, 20), torch.nn.Linear(20, 5))
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(truth, tmp_path / "x.safetensors")
    for tensor in model.parameters():
        tensor.data.fill_(torch.nan)
    first = model[0]
    wide = first.weight.double() if to == "doubles" else first.weight
    held = wide.detach().t().contiguous().t() if to == "columns" else wide.detach().clone()
    first.weight = torch.nn.Parameter(held.as_subclass(Far))
    assert first.weight.device == GPU
    found = lazyckpt.open(tmp_path / "x.safetensors").load_into(model)
    assert tuple(found) == ([], [])
    assert gpu.copied and sum(prod(shape) for copy in gpu.copied for _, shape in copy) == 33 * 20
    same(near(first.weight), truth["0.weight"].to(wide.dtype), "0.weight")
    for name, tensor in model.state_dict().items():
        if name != "0.weight":
            same(tensor, truth[name], name)


# -- buffers


def test_no_host_buffer_is_larger_than_a_piece(
    torch_cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, gpu: QueueDevice
) -> None:
    monkeypatch.setattr(transfer, "PIECE", 1000)
    case = torch_cases["views"]
    view, counts = opened(case.path)
    for key, t in view.items():
        counts.clear()
        same(near(t.to("cuda")), case.truth["weights"][key], key)
        assert max((request.length for request in counts.log), default=0) <= 1000, f"{key}: {counts}"
        assert counts.bytes <= t.nbytes, f"{key}: {counts}"
    gc.collect()
    assert gpu.pinned == 0 and gpu.peak <= _BUFFERS * 1000


def _file(path: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[Path, dict[str, torch.Tensor]]:
    truth = {name: torch.randn(shape, generator=torch.Generator().manual_seed(n))
             for n, (name, shape) in enumerate(shapes.items())}  # fmt: skip
    save_file(truth, path)
    return path, truth


@pytest.mark.parametrize("rows", [1, 3, 50, 1000], ids=lambda rows: f"{rows}rows")
def test_the_buffers_are_bounded_whatever_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: QueueDevice, rows: int
) -> None:
    """Tensors smaller, and many times larger, than a buffer of 4 KiB."""
    monkeypatch.setattr(transfer, "PIECE", 4096)
    path, truth = _file(tmp_path / "x.safetensors", {f"t{n:02}": (rows, 50 + n) for n in range(40)})
    for name, tensor in lazyckpt.open(path).to("cuda").items():
        same(near(tensor), truth[name], name)
    gc.collect()
    assert gpu.pinned == 0 and 0 < gpu.peak <= _BUFFERS * 4096


def test_a_small_tensor_takes_a_small_buffer(tmp_path: Path, gpu: QueueDevice) -> None:
    path, truth = _file(tmp_path / "x.safetensors", {"t": (10, 10)})
    same(near(lazyckpt.open(path)["t"].to("cuda")), truth["t"], "t")
    assert gpu.peak <= 512


def test_many_small_tensors_are_one_transfer_and_few_reads(tmp_path: Path, gpu: QueueDevice) -> None:
    path, truth = _file(tmp_path / "x.safetensors", {f"t{n:03}": (3, 1 + n % 7) for n in range(900)})
    view = lazyckpt.open(path)
    vectors: list[int] = []
    fetch = LocalStore._fetch_pieces

    def counted(store: LocalStore, name: str, wanted: Any) -> None:
        vectors.append(len(wanted))
        fetch(store, name, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "_fetch_pieces", counted)
        found = view.to("cuda")
    assert len(gpu.copied) == 1 and len(gpu.copied[0]) == 900, "one transfer"
    assert vectors == [900], "one vectored read"
    for name, tensor in found.items():
        same(near(tensor), truth[name], name)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "no tensor keeps the memory of others"


def test_small_tensors_of_several_files(tmp_path: Path, gpu: QueueDevice) -> None:
    truth = {}
    for n in range(5):
        _, found = _file(tmp_path / f"model-{n + 1:05}-of-00005.safetensors", {f"t{n}.{k}": (4, 3) for k in range(9)})
        truth |= found
    files = {name: f"model-{int(name[1]) + 1:05}-of-00005.safetensors" for name in truth}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name, tensor in lazyckpt.open(tmp_path).to("cuda").items():
        same(near(tensor), truth[name], name)
    assert len(gpu.copied) == 1


# -- order and overlap


class _Watched:
    """The numbers of rows that were asked for in a file, as they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        self.offsets: list[int] = []
        self.change = threading.Condition()
        fetch = LocalStore._fetch

        def watched(store: LocalStore, path: str, offset: int, target: memoryview) -> Fetched:
            found = fetch(store, path, offset, target)
            with self.change:
                self.offsets.append(offset)
                failing = len(self.offsets) - 1 == fail_at
                self.change.notify_all()
            if failing:
                raise OSError(5, "Input/output error")
            return found

        monkeypatch.setattr(LocalStore, "_fetch", watched)

    def wait(self, count: int) -> bool:
        """Wait until so many reads have been made."""
        with self.change:
            return self.change.wait_for(lambda: len(self.offsets) >= count, timeout=120)


ROW = 40 << 10  # bytes of a piece, larger than what is read with others


def _rows(tmp_path: Path, count: int) -> tuple[Path, torch.Tensor]:
    whole = torch.arange(count * ROW // 4, dtype=torch.float32).view(count, -1)
    save_file({"t": whole}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors", whole


def test_the_next_pieces_are_read_while_one_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy does not go on before the reads of the next piece have been made: it waits for them in vain if they wait
    for the copy."""
    monkeypatch.setattr(transfer, "PIECE", ROW)
    count = 12
    path, whole = _rows(tmp_path, count)
    view = lazyckpt.open(path, cache=False)
    seen = _Watched(monkeypatch)
    overlapped: list[bool] = []
    with simulated(lambda number: overlapped.append(seen.wait(min(number + 2, count)))) as gpu:
        same(near(view["t"].to("cuda")), whole, "t")
    assert overlapped == [True] * count
    assert [shape for copy in gpu.copied for _, shape in copy] == [(1, ROW // 4)] * count
    assert gpu.peak <= _BUFFERS << 16, "a buffer for each piece: it is rounded up"


def test_threads_fill_the_next_buffers_while_a_copy_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are large enough for threads: with the first copy held up, the next two buffers are filled."""
    size = 16 << 20
    monkeypatch.setattr(transfer, "PIECE", size)
    whole = torch.arange(6 * size // 4, dtype=torch.int32)
    save_file({"t": whole}, tmp_path / "x.safetensors")
    view = lazyckpt.open(tmp_path / "x.safetensors", cache=False)
    seen = _Watched(monkeypatch)
    reached: list[bool] = []

    def hold(number: int) -> None:
        if number == 0:
            reached.append(seen.wait(2 * (1 + _AHEAD)))  # two reads of 8 MiB a buffer

    with simulated(hold):
        same(near(view["t"].to("cuda")), whole, "t")
    assert reached == [True]


def test_pieces_arrive_in_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", ROW)
    path, truth = _file(tmp_path / "x.safetensors", {f"t{n}": (n, ROW // 4) for n in range(1, 7)})
    view = lazyckpt.open(path, cache=False)
    seen = _Watched(monkeypatch)
    with simulated() as gpu:
        found = view.to("cuda")
    for name, tensor in found.items():
        same(near(tensor), truth[name], name)
    assert seen.offsets == sorted(seen.offsets) and len(seen.offsets) == 21
    assert len(gpu.copied) == 21


def test_a_buffer_is_not_filled_again_before_its_copy_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first copy is held up, the ring reads no more than its other buffers hold."""
    monkeypatch.setattr(transfer, "PIECE", ROW)
    path, whole = _rows(tmp_path, 10)
    view = lazyckpt.open(path, cache=False)
    seen = _Watched(monkeypatch)
    most: list[int] = []
    ahead: list[bool] = []

    def hold(number: int) -> None:
        if number == 0:
            ahead.append(seen.wait(2))  # its own read, and that of the next buffer
            threading.Event().wait(0.2)
            most.append(len(seen.offsets))

    with simulated(hold):
        same(near(view["t"].to("cuda")), whole, "t")
    assert ahead == [True]
    assert most and most[0] <= _BUFFERS


# -- errors


def _nothing_is_left(gpu: QueueDevice, view: Any, whole: torch.Tensor) -> None:
    assert gpu.pending == 0, "a copy is under way"
    gc.collect()
    assert gpu.pinned == 0, "a buffer is kept"
    with simulated():
        same(near(view["t"].to("cuda")), whole, "the next call works")


@pytest.mark.parametrize("fail_at", [0, 1, 5, 11])
def test_an_error_of_a_read_leaves_nothing_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    path, whole = _rows(tmp_path, 12)
    view = lazyckpt.open(path, cache=False)
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "PIECE", ROW)
        _Watched(patch, fail_at)
        slow = threading.Event()
        with simulated(lambda number: slow.wait(0.02)) as gpu:
            with pytest.raises(OSError, match="Input/output error"):
                view.to("cuda")
            assert gpu.sent <= fail_at
            _nothing_is_left(gpu, view, whole)


@pytest.mark.parametrize("fail_at", [0, 1, 5, 11])
def test_an_error_of_a_copy_leaves_nothing_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    monkeypatch.setattr(transfer, "PIECE", ROW)
    path, whole = _rows(tmp_path, 12)
    view = lazyckpt.open(path, cache=False)

    def fail(number: int) -> None:
        if number == fail_at:
            raise RuntimeError("the device is gone")

    with simulated(fail) as gpu:
        with pytest.raises(RuntimeError, match="the device is gone"):
            view["t"].to("cuda")
        _nothing_is_left(gpu, view, whole)


def test_a_device_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes while other pieces are read."""
    monkeypatch.setattr(transfer, "PIECE", ROW)
    path, whole = _rows(tmp_path, 12)
    view = lazyckpt.open(path, cache=False)
    with simulated() as gpu:
        copy = gpu.copy

        def full(host: torch.Tensor, pieces: Any) -> Any:
            if gpu.sent == 3:
                raise RuntimeError("out of memory")
            return copy(host, pieces)

        with monkeypatch.context() as patch:
            patch.setattr(gpu, "copy", full)
            with pytest.raises(RuntimeError, match="out of memory"):
                view["t"].to("cuda")
        _nothing_is_left(gpu, view, whole)


def test_a_file_that_changed_comes_through(tmp_path: Path, gpu: QueueDevice) -> None:
    path, whole = _rows(tmp_path, 3)
    view = lazyckpt.open(path, cache=False)
    path.write_bytes(b"")
    with pytest.raises(lazyckpt.ChangedFileError):
        view["t"].to("cuda")
    with pytest.raises(lazyckpt.ChangedFileError):
        view.to("cuda")
    _rows(tmp_path, 3)
    _nothing_is_left(gpu, lazyckpt.open(path), whole)


def test_a_missing_fragment_comes_through(tmp_path: Path, gpu: QueueDevice) -> None:
    model = torch.nn.Linear(3, 3)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    (tmp_path / "x.pt").unlink()
    with pytest.raises(lazyckpt.LazyckptError):
        view.to("cuda")
    assert gpu.sent == 0


def test_threads_have_rings_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: QueueDevice) -> None:
    monkeypatch.setattr(transfer, "PIECE", 4096)
    path, truth = _file(tmp_path / "x.safetensors", {f"t{n}": (n, 700) for n in range(1, 20)})
    view = lazyckpt.open(path, cache=False)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            found = view.to("cuda") if number % 2 else {name: t.to("cuda") for name, t in view.items()}
            for name, tensor in found.items():
                same(near(tensor), truth[name], name)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong, wrong
    gc.collect()
    assert gpu.pinned == 0 and gpu.peak <= len(threads) * _BUFFERS * 4096


# -- devices


@pytest.mark.parametrize("name", ["flat", "views"])
def test_a_device_whose_copies_are_complete_at_once(torch_cases: dict[str, Case], name: str, piece: int) -> None:
    """As MPS. The same code, on the CPU."""
    case = torch_cases[name]
    for key, t in lazyckpt.open(case.path).items():
        whole = case.truth["weights"][key]
        with ring(PlainDevice(torch.device("cpu"))) as way:
            got = t._send(way)
        same(got, whole, key)
        if whole.dtype not in _NO_CONVERSION and not whole.is_complex():
            with ring(torch.device("cpu")) as way:
                got = t._send(way, torch.float64)
            same_values(got, whole.double(), key)


class _Stream:
    """Stands for a CUDA stream: writes down what happens."""

    def __init__(self, log: list[tuple[Any, ...]], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: _Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Each copy waits for the caller's kernels, is made on the other stream, and is followed by an event. A buffer is
    filled again after the event of its copy."""
    monkeypatch.setattr(transfer, "PIECE", ROW)
    log: list[tuple[Any, ...]] = []
    side, current = _Stream(log, "side"), _Stream(log, "current")
    running: list[_Stream] = [current]

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        running.append(stream)
        yield
        running.pop()

    class Event:
        count = 0

        def __init__(self, blocking: bool) -> None:
            assert blocking, "the threads that read need the processor"
            self.number = Event.count
            Event.count += 1

        def record(self, stream: _Stream) -> None:
            log.append((stream.name, "records", self.number))

        def synchronize(self) -> None:
            log.append(("host", "waits for", self.number))

    monkeypatch.setattr(torch.cuda, "Stream", lambda place: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: running[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(StreamDevice, "_streams", {})

    class Recorded(StreamDevice):
        def buffer(self, nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8)

        def copy(self, host: torch.Tensor, pieces: Any) -> Callable[[], object]:
            log.append(("copy of", host.data_ptr()))
            return super().copy(host, pieces)

    path, whole = _rows(tmp_path, 8)
    cpu = torch.device("cpu")
    with ring(Recorded(cpu)) as way:
        got = lazyckpt.open(path)["t"]._send(way, dtype)
    same(got, whole.to(dtype), "t")
    copies = [entry[1] for entry in log if entry[0] == "copy of"]
    assert len(copies) == 8 and len(set(copies)) == _BUFFERS
    for n in range(8):
        first = log.index(("copy of", copies[n]), 0 if n < _BUFFERS else log.index(("side", "records", n - 1)))
        assert log[first + 1 : first + 3] == [("side", "waits for", "current"), ("side", "records", n)]
        assert log.index(("host", "waits for", n)) > first
        if n >= _BUFFERS:
            assert log.index(("host", "waits for", n - _BUFFERS)) < first, "its buffer was still on the way"
    assert running == [current]
    assert Recorded(cpu)._stream is side, "one stream for a device"


def test_pieces_within_a_buffer() -> None:
    buffer = torch.from_numpy(np.arange(96, dtype=np.uint8))
    part = Piece(64, (2, 4), torch.int32, torch.empty(0))
    assert part.nbytes == 32
    assert part.within(buffer).tolist() == torch.arange(64, 96, dtype=torch.uint8).view(torch.int32).view(2, 4).tolist()


def test_meta(torch_cases: dict[str, Case]) -> None:
    case = torch_cases["views"]
    view = lazyckpt.open(case.path)
    for place in ("meta", torch.device("meta")):
        read = view.to(place, torch.float64)
        assert read.keys() == case.truth["weights"].keys()
        for key, tensor in read.items():
            whole = case.truth["weights"][key]
            assert tensor.is_meta and tensor.shape == whole.shape
            t = view[key].to(place, dtype=torch.int16)
            assert t.is_meta and t.dtype == torch.int16 and t.shape == whole.shape
            part = view[key].lazy[..., None].to(place)
            assert part.is_meta and part.shape == (*whole.shape, 1) and part.dtype == whole.dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", ["flat", "views", "legacy"])
def test_cuda(torch_cases: dict[str, Case], name: str, piece: int) -> None:
    case = torch_cases[name]
    view = lazyckpt.open(case.path)
    read = view.to("cuda")
    for key, tensor in read.items():
        assert tensor.is_cuda
        same(tensor.cpu(), case.truth["weights"][key], key)
    for alias, owner in view.aliases.items():
        assert read[alias] is read[owner]
    for key, t in view.items():
        whole = case.truth["weights"][key]
        for item in keys(whole.shape, key, 3):
            same(t.lazy[item].to("cuda").cpu(), indexed(whole, item), (key, item))
        if whole.dtype not in _NO_CONVERSION and not whole.is_complex():
            same_values(t.to("cuda", torch.float32).cpu(), whole.to(torch.float32), key)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_takes_no_second_copy(tmp_path: Any) -> None:
    whole = torch.randn(192 << 18)  # 192 MiB
    torch.save({"w": whole}, tmp_path / "x.pt")
    t = lazyckpt.open(tmp_path / "x.pt")["w"]
    for dtype in (torch.float32, torch.bfloat16):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = t.to("cuda", dtype)
        assert torch.cuda.max_memory_allocated() - before <= got.nbytes + 4 * transfer.PIECE
        same(got.cpu(), whole.to(dtype), dtype)
        del got


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    missing = "cuda:99"
    for do in (lambda: view.to(missing), lambda: view["a"].to(missing)):
        with pytest.raises(DataError, match="cuda:99") as raised:
            do()
        assert len(str(raised.value).splitlines()) <= 3
