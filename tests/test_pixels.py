"""Pictures, norms, outliers, bits and histograms of tensors, against numpy."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt import demo
from lazyckpt.errors import MissingFileError
from lazyckpt.inspect import planes
from lazyckpt.inspect.bits import bits_of
from lazyckpt.inspect.histogram import histogram_of
from lazyckpt.inspect.norms import norms, outliers
from lazyckpt.inspect.pixels import pooled
from lazyckpt.lazy import LazyArray
from lazyckpt.show.layout import boxes
from lazyckpt.testing import opened

from .lanes import rounds

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.uint16]
FP4 = torch.float4_e2m1fn_x2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks and blocks, also for small tensors."""
    monkeypatch.setattr(planes, "PIECE", 192)
    monkeypatch.setattr(planes, "RUN", 500)
    monkeypatch.setattr(planes, "_BLOCK", 13)


def saved(tensor: torch.Tensor, folder: Path) -> LazyArray:
    torch.save({"w": tensor}, folder / "w.pt")
    return lazyckpt.open(folder / "w.pt", cache=False).tensor("w")


def numbers_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The truth: float64, absolute values of complex numbers, two numbers of a byte of packed 4-bit floats."""
    if tensor.dtype == FP4:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = tensor.view(torch.uint8).numpy()
        both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        found: np.ndarray[Any, Any] = np.where(both & 8, -1, 1) * table[both & 7]
        return found
    if tensor.is_complex():
        sizes: np.ndarray[Any, Any] = np.abs(tensor.to(torch.complex128).numpy())
        return sizes
    wide: np.ndarray[Any, Any] = tensor.to(torch.float64).numpy()
    return wide


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> torch.Tensor:
    values = rng.standard_normal(shape) * 3
    if odd and values.size and dtype.is_floating_point:
        flat = values.reshape(-1)
        flat[rng.integers(0, values.size, 3)] = [np.nan, np.inf, -np.inf]
    if dtype == FP4:
        return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).view(FP4)
    if dtype == torch.uint16:
        return torch.from_numpy(rng.integers(0, 1 << 16, shape, dtype=np.uint16))
    if dtype == torch.complex64:
        return torch.complex(torch.from_numpy(values), torch.from_numpy(rng.standard_normal(shape))).to(dtype)
    return torch.from_numpy(np.abs(values) if dtype == torch.uint8 else values).to(dtype)


def cells(plane: np.ndarray[Any, Any], row_edges: Any, col_edges: Any) -> dict[tuple[int, int], Any]:
    """The elements of each cell of an array of (rows, columns, pooled)."""
    spans = itertools.product(
        enumerate(itertools.pairwise(row_edges.tolist())), enumerate(itertools.pairwise(col_edges.tolist()))
    )
    return {(i, j): plane[a:b, c:d] for (i, (a, b)), (j, (c, d)) in spans}


def compare(found: Any, plane: np.ndarray[Any, Any]) -> None:
    assert found.exact
    for (i, j), some in cells(plane, found.row_edges, found.col_edges).items():
        some = some[some != PAD]
        good = some[np.isfinite(some)]
        assert found.count[i, j] == some.size
        assert (0 if found.nan is None else found.nan[i, j]) == np.isnan(some).sum()
        assert (0 if found.inf is None else found.inf[i, j]) == np.isinf(some).sum()
        if good.size:
            assert found.low[i, j] == good.min()
            assert found.high[i, j] == good.max()
            assert math.isclose(found.mean[i, j], good.mean(), rel_tol=1e-12, abs_tol=1e-12)
        else:
            assert math.isnan(found.low[i, j])
            assert math.isnan(found.mean[i, j])


PAD = 1e300  # stands for no element


@st.composite
def drawings(draw: Any) -> Any:
    ndim = draw(st.integers(2, 4))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim)))
    dtype = draw(st.sampled_from([*FLOATS, *OTHERS, FP4]))
    logical = (*shape[:-1], 2 * shape[-1]) if dtype == FP4 else shape
    row, col, *rest = draw(st.permutations(range(ndim)))
    at = {d: draw(st.integers(0, logical[d] - 1)) for d in rest if draw(st.booleans())}
    window = []
    for d in (row, col):
        a, b = sorted((draw(st.integers(0, logical[d])), draw(st.integers(0, logical[d]))))
        window.append((a, b))
    grid = draw(st.integers(1, 10)), draw(st.integers(1, 10))
    whole = draw(st.booleans())
    return (
        shape,
        dtype,
        (row, col),
        at,
        None if whole else tuple(window),
        grid,
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@settings(max_examples=rounds(60), deadline=None)
@given(drawings())
def test_pooling_equals_numpy(case: Any) -> None:
    shape, dtype, dims, at, window, grid, odd, seed = case
    tensor = random_tensor(np.random.default_rng(seed), shape, dtype, odd)
    with tempfile.TemporaryDirectory() as folder:
        found = pooled(saved(tensor, Path(folder)), *grid, dims=dims, at=at, window=window)
        sides = norms(saved(tensor, Path(folder)), *grid, dims=dims, at=at, window=window)
    truth = numbers_of(tensor)
    key = tuple(slice(at[d], at[d] + 1) if d in at else slice(None) for d in range(truth.ndim))
    truth = np.moveaxis(truth[key], dims, (0, 1))
    truth = truth.reshape(*truth.shape[:2], -1)
    compare(found, truth)
    (a, b), (c, d) = window or ((0, truth.shape[0]), (0, truth.shape[1]))
    assert (len(found.row_edges) - 1, len(found.col_edges) - 1) == (min(grid[0], b - a), min(grid[1], d - c))
    squares = np.where(np.isfinite(truth), truth, 0)[a:b, c:d] ** 2
    for side, edges, sums in (
        (sides.rows, sides.row_edges - a, squares.sum((1, 2))),
        (sides.cols, sides.col_edges - c, squares.sum((0, 2))),
    ):
        truths = [math.sqrt(sums[i:j].mean()) for i, j in itertools.pairwise(edges.tolist())]
        np.testing.assert_allclose(side, truths, rtol=1e-12)


def test_lost_elements_are_left_out(tmp_path: Path) -> None:
    demo.write(tmp_path)
    sound = lazyckpt.open(tmp_path / "zero3")
    truth = {name: t[...].double().numpy() for name, t in sound.items() if "1.mlp" in name or "layers" not in name}
    (tmp_path / "zero3/global_step300/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    view = lazyckpt.open(tmp_path / "zero3")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        t, x = view[name], truth[name]
        held = np.ones(x.shape, bool)
        for block in boxes(t):
            held[block.box.slices] &= not block.holder.missing
        wrap = 5 if t.ndim == 1 else None
        flat = x if wrap is None else np.append(x, np.full(-len(x) % wrap, np.nan)).reshape(-1, wrap)
        mask = held if wrap is None else np.append(held, np.zeros(-len(x) % wrap, bool)).reshape(-1, wrap)
        found = pooled(t, *flat.shape, wrap=wrap, lost=True)
        np.testing.assert_array_equal(found.mean, np.where(mask, flat, np.nan))
        coarse = pooled(t, 3, 2, wrap=wrap, lost=True)
        assert coarse.lost is not None and coarse.count.sum() == held.sum() == coarse.read
        assert coarse.lost.sum() == (~held).sum() > 0
        assert (coarse.low[coarse.count > 0].min(), np.nanmax(coarse.high)) == (x[held].min(), x[held].max())
    with pytest.raises(MissingFileError):
        pooled(view["model.embed_tokens.weight"])


def test_a_window_behind_the_end_of_a_wrapped_tensor_is_empty(tmp_path: Path) -> None:
    found = pooled(saved(torch.ones(49), tmp_path), 1, 1, wrap=48, window=((1, 2), (1, 2)))
    assert found.count.tolist() == [[0]] and np.isnan(found.mean).all() and found.read == 0


@settings(max_examples=rounds(40), deadline=None)
@given(
    st.integers(1, 200), st.data(), st.sampled_from([torch.float32, torch.bfloat16, FP4]), st.booleans(),
    st.integers(1, 12), st.integers(1, 12),
)  # fmt: skip
def test_a_wrapped_tensor_equals_numpy(
    count: int, data: Any, dtype: torch.dtype, odd: bool, rows: int, cols: int
) -> None:
    pack = 2 if dtype == FP4 else 1
    tensor = random_tensor(np.random.default_rng(count), (count,), dtype, odd)
    truth = numbers_of(tensor)
    wrap = pack * data.draw(st.integers(1, count))
    height = -(-len(truth) // wrap)
    r0, r1 = sorted(data.draw(st.tuples(st.integers(0, height), st.integers(0, height))))
    c0, c1 = sorted(data.draw(st.tuples(st.integers(0, wrap), st.integers(0, wrap))))
    with tempfile.TemporaryDirectory() as folder:
        found = pooled(saved(tensor, Path(folder)), rows, cols, wrap=wrap, window=((r0, r1), (c0, c1)))
    padded = np.full(height * wrap, PAD)
    padded[: len(truth)] = truth
    compare(found, padded.reshape(height, wrap, 1))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4, 2), (1,)])
def test_small_and_empty_tensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.full(shape, 2.5)
    t = saved(tensor, tmp_path)
    found = pooled(t, 4, 4)
    assert found.read == tensor.numel()
    assert (found.mean == 2.5).all() or not tensor.numel()
    assert outliers(t).values == (2.5,) * min(20, tensor.numel())
    assert len(norms(t).rows) == found.plane.height
    assert histogram_of(t).counts.sum() == tensor.numel()


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS, FP4], ids=str)
def test_outliers_and_histograms_equal_numpy(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(np.random.default_rng(1), (7, 4, 11), dtype, True)
    t, truth = saved(tensor, tmp_path), numbers_of(tensor)
    found = outliers(t, 30, 5)
    flat = truth.reshape(-1)
    sizes = np.where(np.isfinite(flat), np.abs(flat), -1)
    order = [n for n in np.lexsort((np.arange(flat.size), -sizes))[:30] if sizes[n] >= 0]
    assert found.indices == tuple(tuple(map(int, np.unravel_index(n, truth.shape))) for n in order)
    assert found.values == tuple(flat[order].tolist())
    bad = np.flatnonzero(~np.isfinite(flat))
    assert found.odd_indices == tuple(tuple(map(int, np.unravel_index(n, truth.shape))) for n in bad[:5])
    assert (found.nan, found.posinf, found.neginf) == (
        np.isnan(flat).sum(), (flat == np.inf).sum(), (flat == -np.inf).sum(),
    )  # fmt: skip
    good = flat[np.isfinite(flat)]
    for log in (False, True):
        one = histogram_of(t, 20, log)
        assert one.exact
        assert one.counts.sum() == good.size
        assert (one.moments.low, one.moments.high) == (good.min(), good.max())
        np.testing.assert_allclose(one.moments.l2, np.linalg.norm(good), rtol=1e-12)
        if not log:
            np.testing.assert_array_equal(one.counts, np.histogram(good, one.edges)[0])
        else:
            above = [((good >= a) & (good < b)).sum() for a, b in itertools.pairwise(one.edges) if a > 0]
            below = [((good > a) & (good <= b)).sum() for a, b in itertools.pairwise(one.edges) if b < 0]
            middle = [good.size - sum(above) - sum(below)]
            assert one.counts.tolist() == [*below, *middle, *above]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, FP4], ids=str
)
def test_bits_equal_numpy(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(np.random.default_rng(2), (9, 31), dtype, False)
    found = bits_of(saved(tensor, tmp_path))
    raw = tensor.view(torch.uint8).numpy().reshape(-1)
    if dtype == FP4:
        codes = np.concatenate([raw & 15, raw >> 4])
    else:
        codes = raw.view(np.uint16) if dtype.itemsize == 2 else raw
    width = 4 if dtype == FP4 else 8 * dtype.itemsize
    assert found.layout.width == width
    assert found.count == codes.size
    np.testing.assert_allclose(found.ones, [(codes >> n & 1).mean() for n in reversed(range(width))])
    patterns, counts = np.unique(codes, return_counts=True)
    assert (found.patterns.tolist(), found.counts.tolist()) == (patterns.tolist(), counts.tolist())
    if dtype == torch.bfloat16:
        fields = codes >> 7 & 255
        assert found.exponents is not None
        np.testing.assert_array_equal(found.exponents, np.bincount(fields, minlength=256))
    assert np.isfinite(found.entropy)


def test_a_window_reads_its_own_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(64, 256), "v": torch.randn(4096)}, tmp_path / "w.pt")
    view, counts = opened(tmp_path / "w.pt")
    view["w"][0], view["v"][0]  # the archive is located
    counts.clear()
    found = pooled(view.tensor("w"), 8, 8, window=((10, 30), (100, 200)))
    assert (found.read, counts.bytes) == (2000, 8000)
    counts.clear()
    pooled(view.tensor("v"), 4, 4, wrap=64, window=((2, 6), (10, 20)))
    assert counts.bytes == 160
    counts.clear()
    pooled(view.tensor("w"), 8, 8)
    assert counts.bytes == view.tensor("w").nbytes


def test_a_sample_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "SAMPLE", 4000)
    torch.save({"w": torch.randn(100, 3, 40), "v": torch.arange(20_000.0)}, tmp_path / "w.pt")
    view, counts = opened(tmp_path / "w.pt")
    view["w"][0], view["v"][0]
    counts.clear()
    found = pooled(view.tensor("w"), 5, 5, dims=(0, 2), exact=False)
    assert not found.exact
    assert found.read == found.count.sum() == counts.bytes / 4
    assert 2000 <= counts.bytes <= 9000
    counts.clear()
    one = histogram_of(view.tensor("v"), exact=False)
    assert one.exact  # one row of 16,384: nothing is left out
    flat = pooled(view.tensor("v"), 5, 5, wrap=100, exact=False)
    assert not flat.exact
    assert flat.read < 2500
    assert flat.low[0, 0] >= 0
    assert (np.diff(flat.mean[:, 0]) > 0).all()


@pytest.mark.parametrize("across", [False, True])
def test_a_sample_has_some_columns_of_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, across: bool) -> None:
    monkeypatch.setattr(planes, "SAMPLE", 40_000)
    values = torch.arange(150_000.0).reshape(3, 50_000)
    torch.save({"w": values.T.contiguous() if across else values}, tmp_path / "w.pt")
    view, counts = opened(tmp_path / "w.pt")
    view["w"][0, 0]
    counts.clear()
    found = pooled(view.tensor("w"), 3, 5, dims=(1, 0) if across else None, exact=False)
    assert not found.exact
    assert found.read == found.count.sum() and (found.count > 0).all()
    assert counts.bytes <= 2 * 40_000
    parts = values.reshape(3, 5, 10_000).double()
    least, most, mean = (one.numpy() for one in (parts.amin(2), parts.amax(2), parts.mean(2)))
    assert (found.low >= least).all() and (found.high <= most).all()
    assert np.abs(found.mean - mean).max() < 500  # of 10,000 in a cell
    assert not histogram_of(view.tensor("w"), exact=False).exact


def test_work_ends_when_nobody_waits(tmp_path: Path) -> None:
    class NotWanted(Exception):
        pass

    left = 3

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise NotWanted

    t = saved(torch.randn(64, 64), tmp_path)
    for work in (pooled, norms, outliers, bits_of, histogram_of):
        left = 3
        one = saved(torch.randn(64, 64).bfloat16(), tmp_path) if work is bits_of else t
        if work is bits_of:
            left = 0
        with pytest.raises(NotWanted):
            work(one, check=check)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    t = saved(torch.randn(4, 6, 2), tmp_path)
    wrong: list[dict[str, Any]] = [
        {"dims": (0, 3)}, {"dims": (1, 1)}, {"at": {0: 4}}, {"at": {2: 0}}, {"wrap": 2}, {"rows": 0},
        {"window": ((0, 7), (0, 1))}, {"window": ((3, 2), (0, 1))},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(lazyckpt.DataError):
            pooled(t, **options)
    with pytest.raises(lazyckpt.DataError, match="packed bits"):
        pooled(saved(torch.zeros(3, dtype=torch.bits8) if hasattr(torch, "bits8") else torch.zeros(3), tmp_path))
    with pytest.raises(lazyckpt.DataError, match="8 and 16 bits"):
        bits_of(t)


def test_digits_do_not_depend_on_threads(tmp_path: Path) -> None:
    t = saved(torch.randn(50, 70), tmp_path)
    first = pooled(t, 3, 3)
    for _ in range(5):
        again = pooled(t, 3, 3)
        assert np.array_equal(first.mean, again.mean)
