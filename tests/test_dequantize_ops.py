"""The operations on codes and scales: the whole as torch computes it, each part equal to the whole bit for bit."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.core.dtypes import bits_of, dtype_of
from lazyckpt.core.expr import computed, make, operand, wanted
from lazyckpt.core.ops.packed import words_of
from lazyckpt.core.ops.small_floats import float32_of
from lazyckpt.core.select import Selection
from lazyckpt.core.specs import Expr, Input
from lazyckpt.errors import CorruptError, DataError
from lazyckpt.io.pool import run
from lazyckpt.io.reading.compute import tasks
from lazyckpt.lazy import LazyArray

from .algebra import index, keys
from .lanes import rounds

some = settings(max_examples=rounds(60), deadline=None)
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(bits_of(tensor.itemsize))


def same_bits(a: torch.Tensor, b: torch.Tensor, about: Any = "") -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), about
    assert torch.equal(bits(a), bits(b)), about


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal bit for bit, but for the bits of NaN."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.isnan(), b.isnan())
    same_bits(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0))


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if prod(shape) else torch.empty(shape, dtype=dtype)


def array(folder: Path, tensors: dict[str, torch.Tensor], expression: Any) -> LazyArray:
    path = folder / f"{len(list(folder.iterdir()))}.pt"
    torch.save(tensors, path)
    view = lazyckpt.open(path, cache=False)
    operands = {name: operand(view.specs[name]) for name in tensors}
    return LazyArray(view._store, computed("t", expression(operands)))


def check_parts(t: LazyArray, draw: st.DrawFn) -> None:
    whole = t[...]
    for block in (1, 5, 64):
        reads = Selection.all(t.spec.shape).reads()
        out = torch.empty(t.shape, dtype=t.dtype)
        run(tasks(t.store, t.spec, reads, out, block))
        same_bits(out, whole, block)
    key = draw(keys(tuple(t.shape)))
    expected = torch.from_numpy(np.array(index(bits(whole).numpy(), key)))
    assert torch.equal(bits(t[key]), expected.view(bits(t[key]).shape)), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codes")


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_is_what_torch_converts(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    same(float32_of(codes.clone()), codes.to(torch.float32))
    same(float32_of(codes[1:8].clone()), codes[1:8].to(torch.float32))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("code", [None, 0x7C, 0x7D, 0x7F, 0xFC, 0xFD, 0xFF])
def test_one_special_code_among_many(dtype: torch.dtype, code: int | None) -> None:
    """More codes than are decoded at a time, of both signs, and one that may be infinite or NaN."""
    codes = torch.arange(300 * 1024, dtype=torch.int32) % 0x7C
    codes = (codes | codes % 2 << 7).to(torch.uint8)
    if code is not None:
        codes[200_000] = code
    codes = codes.view(dtype)
    same(float32_of(codes.clone()), codes.to(torch.float32))


@some
@given(data=st.data())
def test_scales(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    block = tuple(draw(st.integers(1, n + 2)) for n in shape)
    counts = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    kind = draw(st.sampled_from([*FLOAT8, torch.int8, torch.uint8, torch.bfloat16]))
    codes = random_bytes(shape, kind, draw(st.integers(0, 99)))
    of = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]))
    scales = (torch.randn(counts, dtype=torch.float64) * 3).to(of)
    zeros = torch.randint(-8, 8, counts, dtype=torch.int8) if draw(st.booleans()) else None
    divide = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, None]))
    dtype = torch.float32 if dtype is None and of is torch.float8_e4m3fn else dtype
    within = torch.float64 if of is torch.float64 else torch.float32

    def over(one: torch.Tensor) -> torch.Tensor:
        for d, (n, b) in enumerate(zip(shape, block, strict=True)):
            one = one.repeat_interleave(b, d).narrow(d, 0, n)
        return one

    def expression(o: dict[str, Expr | Input]) -> Expr:
        named = None if dtype is None else dtype_of(dtype)
        return make("dequantize.scaled", *o.values(), block=block, dtype=named, divide=divide)

    tensors = {"codes": codes, "scales": scales} | ({} if zeros is None else {"zeros": zeros})
    t = array(folder, tensors, expression)
    value = codes.to(within)
    if zeros is not None:
        value = value - over(zeros.to(within))
    by = over(scales.to(within))
    value = value / by if divide else value * by
    same(t[...], value.to(of if dtype is None else dtype))
    check_parts(t, draw)
    key = draw(keys(shape))
    need = {one.spec.name: want for one, want in wanted(t.spec, t._sel[key].reads().want)}
    if need:
        for axis, size, scale in zip(need["codes"], block, need["scales"], strict=True):
            assert len(scale) == len({i // size for i in axis})


@some
@given(data=st.data())
def test_floats_of_four_and_six_bits(folder: Path, data: st.DataObject) -> None:
    lead = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    six = data.draw(st.booleans())
    n = data.draw(st.integers(1, 6)) * (3 if six else 1)
    packed = random_bytes((*lead, n), torch.uint8, data.draw(st.integers(0, 99)))
    sign = data.draw(st.booleans())
    op, params = ("dequantize.fp6", {}) if six else ("dequantize.fp4", {"negative_zero": sign})
    t = array(folder, {"codes": packed}, lambda o: make(op, o["codes"], **params))
    expected = []
    for row in packed.reshape(-1, n).tolist():
        if six:
            number = sum(byte << 8 * i for i, byte in enumerate(row))
            codes = [number >> 6 * i & 63 for i in range(n // 3 * 4)]
            values = [_float(c & 31, 3) * (-1 if c & 32 else 1) for c in codes]
        else:
            codes = [c for byte in row for c in (byte & 15, byte >> 4)]
            values = [0.0 if c == 8 and not sign else _float(c & 7, 1) * (-1 if c & 8 else 1) for c in codes]
        expected += values
    same_bits(t[...], torch.tensor(expected, dtype=torch.bfloat16).view(t.shape))
    check_parts(t, data.draw)


def _float(code: int, mantissa: int) -> float:
    """A float of two bits of exponent with bias 1."""
    exponent, rest = code >> mantissa, code & ((1 << mantissa) - 1)
    part = rest / (1 << mantissa)
    return part if not exponent else (1 + part) * 2.0 ** (exponent - 1)


@some
@given(data=st.data())
def test_integers_in_words(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    count, dense = draw(st.integers(1, 8)), draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    axis = draw(st.integers(0, len(shape)))
    size = draw(st.integers(1, 70))
    full = (*shape[:axis], size, *shape[axis:])
    codes = torch.randint(0, 1 << count, full, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    rows = codes.movedim(axis, -1).reshape(-1, size).tolist()
    words = words_of(size, count, dense)
    packed = torch.zeros(len(rows), words, dtype=torch.int64)
    for r, row in enumerate(rows):
        for i, code in enumerate(row):
            bit = i * count if dense else i // (32 // count) * 32 + i % (32 // count) * count
            for k in range(count):
                if code >> k & 1:
                    packed[r, (bit + k) // 32] |= 1 << (bit + k) % 32
    lead = [n for d, n in enumerate(full) if d != axis]
    stored = torch.from_numpy(packed.numpy().astype(np.uint32).view(np.int32)).view(*lead, words).movedim(-1, axis)
    params = {"axis": axis, "bits": count, "size": size, "dense": dense}
    t = array(folder, {"words": stored.contiguous()}, lambda o: make("dequantize.bits", o["words"], **params))
    same_bits(t[...], (codes - (1 << (count - 1))).to(torch.int8))
    check_parts(t, draw)


def test_powers_of_two(folder: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    t = array(folder, {"codes": codes}, lambda o: make("dequantize.e8m0", o["codes"]))
    expected = torch.tensor([2.0 ** (n - 127) for n in range(256)], dtype=torch.float64).to(torch.float32)
    same_bits(t[...], expected)
    e8m0 = codes.view(torch.float8_e8m0fnu)
    u = array(folder, {"codes": e8m0}, lambda o: make("dequantize.e8m0", o["codes"]))
    same(u[...], e8m0.to(torch.float32))


@some
@given(data=st.data())
def test_columns_by_index(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    rows, groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    order = torch.arange(groups * size) // size
    given_order = draw(st.booleans())
    index = order[torch.randperm(len(order))] if given_order else torch.full_like(order, -1)
    values = torch.randn(rows, groups)
    tensors = {"values": values, "index": index.to(torch.int32)}
    t = array(folder, tensors, lambda o: make("dequantize.by_index", *o.values(), size=size))
    same_bits(t[...], values[:, index if given_order else order])
    check_parts(t, draw)
    bad = array(
        folder,
        tensors | {"index": index.to(torch.int32) + groups + 1},
        lambda o: make("dequantize.by_index", *o.values()),
    )
    with pytest.raises(DataError, match="not among"):
        bad[...]


@some
@given(data=st.data())
def test_sparse(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    two_of_four = draw(st.booleans())
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)) * 4 if two_of_four else draw(st.integers(1, 20)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dense = torch.randn(shape, generator=generator).to(draw(st.sampled_from([torch.bfloat16, torch.float8_e4m3fn])))
    if two_of_four:
        mask = torch.zeros(prod(shape) // 4, 4).scatter_(
            1, torch.rand(prod(shape) // 4, 4, generator=generator).topk(2).indices, 1
        )
        mask = mask.view(shape).bool()
    else:
        mask = torch.rand(shape, generator=generator) > 0.6
    values = bits(dense)[mask].view(dense.dtype)
    packed = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
    if two_of_four:
        tensors = {"values": values.view(shape[0], shape[1] // 2), "bits": packed}
        t = array(folder, tensors, lambda o: make("dequantize.sparse24", *o.values(), shape=shape))
    else:
        starts = tuple((mask.sum(1).cumsum(0) - mask.sum(1)).tolist())
        tensors = {"values": values, "bits": packed}
        t = array(folder, tensors, lambda o: make("dequantize.bitmask", *o.values(), shape=shape, starts=starts))
    same_bits(t[...], torch.where(mask, bits(dense), 0).view(dense.dtype))
    check_parts(t, draw)


@some
@given(data=st.data())
def test_marlin24(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    bits_, tiles, outputs = draw(st.sampled_from([4, 8])), draw(st.integers(1, 3)), 64 * draw(st.integers(1, 2))
    words = random_bytes((tiles, outputs * 16 * bits_ // 32), torch.int32, draw(st.integers(0, 99)))
    pairs = torch.tensor([a | b << 2 for a in range(4) for b in range(a + 1, 4)])
    picked = pairs[torch.randint(len(pairs), (tiles, 2 * outputs, 4))]
    meta = (picked << torch.tensor([0, 4, 8, 12])).sum(-1).to(torch.int16)
    t = array(folder, {"words": words, "meta": meta}, lambda o: make("dequantize.marlin24", *o.values(), bits=bits_))
    assert t.shape == (outputs, tiles * 32) and ((t[...].view(outputs, -1, 4) != 0).sum(-1) <= 2).all()
    check_parts(t, draw)


@some
@given(data=st.data())
def test_marlin(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    tiles, outputs = draw(st.integers(1, 3)), 64 * draw(st.integers(1, 3))
    words = random_bytes((tiles, outputs * 2), torch.int32, draw(st.integers(0, 99)))
    t = array(folder, {"words": words}, lambda o: make("dequantize.marlin", o["words"]))
    codes = torch.stack([words >> 4 * n & 15 for n in range(8)], -1).view(-1, 16, 8)  # 16 words of a thread and column
    # a thread has rows of tensor cores' fragments: two of each half, of two columns that are 8 apart
    row = torch.tensor([0, 1, 8, 9])[:, None] + torch.zeros(2, dtype=torch.int64)
    expected = torch.zeros(tiles * 16, outputs, dtype=torch.int8)
    for n, block in enumerate(codes.view(tiles, outputs // 64, 8, 4, 4, 8).unbind(2)):  # the columns n and n + 8
        for thread in range(4):
            for quarter in range(4):
                one = block[:, :, thread, quarter].view(tiles, -1, 2, 4).transpose(2, 3).reshape(tiles, -1, 8)
                for k, (a, column) in enumerate(zip((row + 2 * thread).T.ravel().tolist(), [n] * 4 + [n + 8] * 4)):
                    expected.view(tiles, 16, -1, 4, 16)[:, a, :, quarter, column] = (one[..., k] - 8).to(torch.int8)
    same_bits(t[...], expected.T)
    check_parts(t, draw)


def test_marlin24_without_an_order(folder: Path) -> None:
    tensors = {"words": torch.zeros(1, 128, dtype=torch.int32), "meta": torch.zeros(1, 128, dtype=torch.int16)}
    t = array(folder, tensors, lambda o: make("dequantize.marlin24", *o.values(), bits=4))
    with pytest.raises(CorruptError, match="meta"):
        t[...]


def test_operands_that_do_not_fit(folder: Path) -> None:
    tensors = {
        "codes": torch.zeros(4, 6, dtype=torch.int8),
        "scales": torch.ones(4, 2),
        "words": torch.zeros(3, dtype=torch.int32),
    }
    for op, names, params in (
        ("dequantize.scaled", ("codes", "scales"), {"block": (1, 2), "dtype": None}),
        ("dequantize.scaled", ("codes", "scales"), {"block": (1,), "dtype": None}),
        ("dequantize.scaled", ("scales", "codes"), {"block": (1, 1), "dtype": None}),
        ("dequantize.fp4", ("scales",), {}),
        ("dequantize.fp6", ("codes",), {}),
        ("dequantize.e8m0", ("codes",), {}),
        ("dequantize.bits", ("words",), {"axis": 0, "bits": 3, "size": 50, "dense": True}),
        ("dequantize.bits", ("codes",), {"axis": 0, "bits": 3, "size": 50, "dense": True}),
        ("dequantize.sparse24", ("scales", "codes"), {"shape": (4, 4)}),
        ("dequantize.marlin24", ("words", "codes"), {"bits": 4}),
        ("dequantize.marlin24", ("words", "codes"), {"bits": 3}),
        ("dequantize.marlin", ("words",), {}),
        ("dequantize.marlin", ("codes",), {}),
        ("dequantize.bitmask", ("words", "codes"), {"shape": (4, 4), "starts": (0, 0, 0, 0)}),
        ("dequantize.by_index", ("scales", "codes"), {}),
    ):
        with pytest.raises(DataError):
            array(
                folder, tensors, lambda o, op=op, names=names, params=params: make(op, *(o[n] for n in names), **params)
            )
