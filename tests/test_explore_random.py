"""What the explorer computes of random tensors of every dtype, against numpy in float64."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
import lazyckpt.inspect.planes as planes
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.subject import Subject
from lazyckpt.inspect.closeness import closeness, sums_of, sums_of_equal, together
from lazyckpt.inspect.course import differences
from lazyckpt.inspect.diff import Difference
from lazyckpt.inspect.histogram import histogram_of
from lazyckpt.inspect.neighbours import neighbours
from lazyckpt.inspect.norms import norms, outliers
from lazyckpt.inspect.pixels import pooled

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.int32, torch.uint16, torch.bool, torch.complex64)
SHAPES = ((), (1,), (61,), (0, 3), (1, 7), (7, 1), (13, 17), (3, 5, 7), (2, 2, 3, 2, 4))


def numbers(t: torch.Tensor) -> Any:
    return np.abs(t.to(torch.complex128).numpy()) if t.is_complex() else t.to(torch.float64).numpy()


def tensors(count: int) -> Iterator[torch.Tensor]:
    """Yield tensors of random bits, or of numbers that are tiny, huge, close together, or not finite."""
    rng, g = random.Random(0), np.random.default_rng(0)
    for n in range(count):
        dtype, shape = DTYPES[n % len(DTYPES)], rng.choice(SHAPES)
        numel = math.prod(shape)
        if rng.random() < 0.4 and dtype != torch.bool and numel:
            bits = torch.from_numpy(g.integers(0, 256, numel * dtype.itemsize, np.uint8))
            yield bits.view(dtype).reshape(shape)
            continue
        values = g.standard_normal(numel) * rng.choice([1, 1e-42, 1e37, 3]) + rng.choice([0, 0, 1])
        if dtype.is_floating_point and numel:
            values[g.integers(0, numel, 2)] = rng.choice([math.nan, math.inf, -math.inf, 0.0])
            yield torch.from_numpy(values).to(dtype).reshape(shape)
        else:
            yield torch.from_numpy(np.clip(values, 0, 99)).to(dtype).reshape(shape)


def test_random_tensors_equal_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {str(n): t for n, t in enumerate(tensors(44))}
    torch.save(held, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    for name, tensor in held.items():
        monkeypatch.setattr(planes, "_BLOCK", 10 if int(name) % 2 else 1 << 20)
        t, x = view[name], numbers(tensor)
        finite = np.isfinite(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # signaling NaN, and what overflows, are no news
            cells, found, rows = pooled(t, 1, 1), outliers(t, 3, 3), norms(t, 1, 2048)
            even, powers = histogram_of(t, 50), histogram_of(t, 50, log=True)
        good = x[finite]
        assert found.nan == np.isnan(x).sum()
        assert found.posinf + found.neginf == np.isinf(x).sum()
        largest = sorted(np.flatnonzero(finite), key=lambda i: (-abs(x.flat[i]), i))[:3]
        assert found.indices == tuple(tuple(map(int, np.unravel_index(i, x.shape))) for i in largest)
        assert found.values == tuple(x.flat[i] for i in largest)
        assert even.counts.sum() == powers.counts.sum() == len(good)
        np.testing.assert_array_equal(even.counts, np.histogram(good, even.edges)[0])
        if not good.size:
            continue
        assert (cells.low.item(), cells.high.item()) == (good.min(), good.max())
        if np.abs(good).max() < 1e150:
            mean = math.fsum(good) / good.size
            assert cells.mean.item() == pytest.approx(mean, rel=1e-9, abs=1e-12 * np.abs(good).max())
            columns = np.where(finite, x, 0).reshape(-1, x.shape[-1] if x.ndim else 1)
            np.testing.assert_allclose(rows.cols, np.sqrt((columns**2).sum(0)), rtol=1e-9, atol=1e-160)


def test_float32_histograms_count_as_float64_does(tmp_path: Path) -> None:
    g = np.random.default_rng(1)
    values = {"subnormal": g.standard_normal(5000) * 1e-41, "close": 1 + g.random(5000) * 2e-5}
    held = {name: torch.from_numpy(one).float() for name, one in values.items()}
    torch.save(held, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    for name, tensor in held.items():
        found = histogram_of(view[name], 2000)
        np.testing.assert_array_equal(found.counts, np.histogram(tensor.double().numpy(), found.edges)[0])


def test_rows_that_float64_cannot_square_are_no_neighbours(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, 0.0], [1e200, 1e200], [-1.0, 1e-9], [2.0, 1.0]], dtype=torch.float64)
    torch.save({"embed": rows}, tmp_path / "model.pt")
    found = neighbours(lazyckpt.open(tmp_path / "model.pt")["embed"], 0)
    assert [one.row for one in found] == [3, 2]
    assert found[1].cosine >= -1


def test_sums_whose_squares_float64_cannot_hold() -> None:
    x = torch.full((40_000,), 6e151, dtype=torch.float64)
    assert closeness(sums_of(x, -x)).relative == pytest.approx(2)
    half = sums_of(x[:30_000], -x[:30_000])
    assert closeness(together([half, half])).relative == pytest.approx(2)
    rows = [Difference(f"layers.0.experts.{n}.w", "values", "f64[2]", "f64[2]", relative=1e200) for n in range(2)]
    assert differences(rows, "relative").values.item() == pytest.approx(1e200)


def test_complex_pairs_count_whole_or_not_at_all() -> None:
    x = torch.tensor([3 + 4j, complex(math.nan, 7)])
    y = torch.tensor([1j, 2 + 2j])
    assert sums_of(x, y)[:4] == (25, 1, 4, 18)
    assert sums_of_equal(x)[:2] == (25, 25)


def test_sums_have_the_same_digits_on_any_number_of_processors() -> None:
    g = np.random.default_rng(2)
    x, y = (torch.from_numpy(g.standard_normal(100_001)) for _ in range(2))
    threads, found = torch.get_num_threads(), set()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.add(sums_of(x[1:], y[1:]))
            found.add(sums_of(x[1:].clone(), y[1:].clone()))
            assert sums_of_equal(x[1:]).xx == sums_of(x[1:], y[1:]).xx
    finally:
        torch.set_num_threads(threads)
    (sums,) = found
    assert sums.xy == pytest.approx(float(np.dot(x[1:].numpy(), y[1:].numpy())), rel=1e-9)


def test_lines_of_python_open_what_is_shown(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2, 3) / 3}, tmp_path / "b.pt")
    one, two = lazyckpt.open(tmp_path / "a.pt", format="torch"), lazyckpt.open(tmp_path / "b.pt")

    def asked(subject: Subject, path: str, **values: str) -> Any:
        return json.loads(Explorer(subject).answer(path, values).body)

    line = asked(Subject(one), "tensor", name="w")["python"]
    assert line == f"lazyckpt.open({str(tmp_path / 'a.pt')!r}, format='torch')['w']"
    assert torch.equal(eval(line, {"lazyckpt": lazyckpt})[...], one["w"][...])
    half = one.astype(torch.float16)  # no call of `open` returns it
    line = asked(Subject(half), "tensor", name="w")["python"]
    assert eval(line, {"view": half})[...].dtype == torch.float16
    lines = asked(Subject(half, two), "compare")["python"]
    assert lines == ["view", f"lazyckpt.open({str(tmp_path / 'b.pt')!r})"]


def test_pairs_of_4_bit_floats_have_no_spectrum(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "model.pt")
    explorer = Explorer(Subject(lazyckpt.open(tmp_path / "model.pt")))
    assert not json.loads(explorer.answer("tensor", {"name": "w"}).body)["spectrum"]
