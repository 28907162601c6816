"""The way to an accelerator: pieces through a ring of host buffers, walked on the CPU, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.core.select import Selection
from lazyckpt.io.reading import device as transfer
from lazyckpt.io.reading.device import Ring
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import indexed, keys, same, same_values, some_keys

from .conftest import complete
from .writers import Case

CPU = torch.device("cpu")
_NO_CONVERSION = {torch.float4_e2m1fn_x2}


@pytest.fixture(params=[16, 48, 1000, 32 << 20], ids=lambda size: f"{size}B")
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a ring's buffer: from one element of the largest dtype to the real one."""
    monkeypatch.setattr(transfer, "PIECE", request.param)
    size: int = request.param
    return size


@pytest.mark.product
@pytest.mark.parametrize("name", ["flat", "views", "legacy", "big_endian", "training"])
def test_every_tensor_arrives_whole(torch_cases: dict[str, Case], name: str, piece: int) -> None:
    case = torch_cases[name]
    view, ring = lazyckpt.open(case.path), Ring(CPU)
    arrived = {key: t._read_through(ring) for key, t in view.items()}
    ring.finish()
    for key, tensor in arrived.items():
        same(tensor, case.truth["weights"][key], key)


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("name", ["flat", "views"])
def test_slices_flips_and_lists_arrive(torch_cases: dict[str, Case], name: str, piece: int) -> None:
    case = torch_cases[name]
    view, ring = lazyckpt.open(case.path), Ring(CPU)
    for n, (key, whole) in enumerate(case.truth["weights"].items()):
        chosen = keys(whole.shape, f"{key}") if n % 5 == 0 else some_keys(whole.shape, f"{key} {piece}", 4)
        for item in chosen:
            got = view[key].lazy[item]._read_through(ring)
            ring.finish()
            same(got, indexed(whole, item), (key, item))


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("name", ["zero2_aligned_round_robin", "zero3_sub_groups"])
def test_fragments_of_many_ranks_arrive(zero_cases: dict[str, Case], name: str, piece: int) -> None:
    case = complete(zero_cases[name])
    view, ring = lazyckpt.open(case.path), Ring(CPU)
    for state, truth in case.truth.items():
        for key, whole in truth.items():
            t = view.states[state][key]
            for item in (..., *some_keys(whole.shape, f"{name} {key}", 1)):
                got = t.lazy[item]._read_through(ring)
                ring.finish()
                same(got, indexed(whole, item), (state, key, item))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_a_dtype_is_converted_on_the_way(torch_cases: dict[str, Case], dtype: torch.dtype, piece: int) -> None:
    case = torch_cases["flat"]
    view, ring = lazyckpt.open(case.path), Ring(CPU)
    for key, whole in case.truth["weights"].items():
        if whole.dtype in _NO_CONVERSION or (not dtype.is_floating_point and whole.is_floating_point()):
            continue  # torch does not convert it, or leaves open what infinity is as an int
        if whole.is_complex() and not dtype.is_complex:
            continue  # discards a part, with a warning
        got = view[key]._read_through(ring, dtype)
        ring.finish()
        same_values(got, whole.to(dtype), key)
        if not whole.ndim:
            continue
        got = view[key].lazy[::-1]._read_through(ring, dtype)
        ring.finish()
        same_values(got, whole.to(dtype).flip(0), key)


def test_no_host_buffer_is_larger_than_a_piece(torch_cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", 1000)
    case = torch_cases["views"]
    view, counts = opened(case.path)
    ring = Ring(CPU)
    for key, t in view.items():
        counts.clear()
        same(t._read_through(ring), case.truth["weights"][key], key)
        assert max((request.length for request in counts.log), default=0) <= 1000, f"{key}: {counts}"
        assert counts.bytes <= t.nbytes, f"{key}: {counts}"


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


def test_a_buffer_is_filled_again_only_when_its_piece_has_passed(
    torch_cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE", 1000)
    events: list[tuple[str, int]] = []
    sent = 0

    class Watched(Ring):
        def send(self, shape: Any, dtype: Any, fill: Callable[[torch.Tensor], None], target: torch.Tensor) -> None:
            nonlocal sent
            number = sent
            sent += 1

            def watched(host: torch.Tensor) -> None:
                events.append(("filled", number))
                fill(host)

            super().send(shape, dtype, watched, target)

        def _event(self) -> Callable[[], Any]:
            number = sent - 1
            return lambda: events.append(("passed", number))

    ring = Watched(CPU)
    case = torch_cases["views"]
    same(lazyckpt.open(case.path)["base"]._read_through(ring), case.truth["weights"]["base"], "base")
    assert sent == 30, "two rows a piece"
    filled = [n for what, n in events if what == "filled"]
    assert filled == list(range(sent))
    for n in range(2, sent):
        assert events.index(("passed", n - 2)) < events.index(("filled", n)), "its buffer was still on the way"
    assert events.index(("filled", 1)) < events.index(("passed", 0)), "one travels while the next is read"
    ring.finish()
    assert {n for what, n in events if what == "passed"} == set(range(sent)), "finish waits for the last ones"


def test_errors_come_through(zero_cases: dict[str, Case], tmp_path: Any) -> None:
    torch.save({"w": torch.zeros(1000, 10)}, tmp_path / "x.pt")
    t = lazyckpt.open(tmp_path / "x.pt")["w"]
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(lazyckpt.ChangedFileError):
        t._read_through(Ring(CPU))


# -- devices


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
def test_cuda(torch_cases: dict[str, Case], name: str) -> None:
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
