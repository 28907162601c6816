"""Statistics: against numpy's float64, over dtypes, pieces and whatever may stand in a tensor."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.core.dtypes import to_numpy
from lazyckpt.errors import DataError, MissingFileError
from lazyckpt.inspect import moments, packs, stats
from lazyckpt.inspect.histogram import histogram_of
from lazyckpt.inspect.norms import norms
from lazyckpt.inspect.table import Histogram, Stats, Table
from lazyckpt.testing.counting import opened

from . import processes
from .conftest import need
from .lanes import rounds
from .writers import Case

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.complex32]


def random(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, odd: float, scale: float, shift: float
) -> torch.Tensor:
    """Numbers of a dtype; a part ``odd`` of them NaN, infinite or zero."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        bits = dtype.itemsize * 8
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=g, dtype=torch.uint8)
        if bits == 64:
            raw[..., 6:] = 0  # below 2**48: float64 holds these
        return raw.view(dtype).view(shape)
    numbers = torch.randn(shape, generator=g, dtype=torch.float64) * scale + shift
    which = torch.rand(shape, generator=g)
    for n, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
        numbers = torch.where((which >= n * odd / 5) & (which < (n + 1) * odd / 5), value, numbers)
    if dtype.is_complex:
        return torch.complex(numbers, numbers.flip(0) if shape else numbers).to(dtype)
    return numbers.to(torch.float32).to(dtype) if dtype.itemsize == 1 else numbers.to(dtype)


def doubles(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """What the statistics are of, by numpy alone."""
    if t.is_complex():
        return np.abs(t.to(torch.complex128).numpy()).ravel()
    return to_numpy(t).astype(np.float64).ravel()


def truth(t: torch.Tensor) -> dict[str, float]:
    x = doubles(t)
    good = x[np.isfinite(x)]
    some = good.size > 0
    return {
        "count": x.size,
        "nan": int(np.isnan(x).sum()),
        "posinf": int((x == np.inf).sum()),
        "neginf": int((x == -np.inf).sum()),
        "zeros": int((x == 0).sum()),
        "mean": good.mean() if some else math.nan,
        "std": good.std() if some else math.nan,
        "min": good.min() if some else math.nan,
        "max": good.max() if some else math.nan,
        "absmax": np.abs(good).max() if some else math.nan,
        "l1": np.abs(good).sum(),
        "l2": np.sqrt(np.square(good).sum()),
    }


def alike(found: Stats, t: torch.Tensor) -> None:
    """Counts and extremes exactly, moments as far as numpy's own float64 goes."""
    want = truth(t)
    x = doubles(t)
    size = float(np.abs(x[np.isfinite(x)]).max(initial=0))
    for key, value in want.items():
        got = getattr(found, key)
        if key in ("mean", "std"):
            assert got == pytest.approx(value, rel=1e-11, abs=1e-14 * size, nan_ok=True), key
        elif key in ("l1", "l2"):
            assert got == pytest.approx(value, rel=1e-11), key
        else:
            assert got == value or (math.isnan(got) and math.isnan(value)), key
    assert found.shape == tuple(t.shape) and found.dtype == str(t.dtype).removeprefix("torch.")


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> lazyckpt.CheckpointView:
    torch.save(tensors, folder / "model.pt")
    return lazyckpt.open(folder / "model.pt", cache=False)


def pieces(piece: int, run: int, block: int) -> Any:
    """Everything cut in small parts, so that small tensors have many."""
    return mock.patch.multiple(stats, PIECE=piece, RUN=run), mock.patch.object(moments, "BLOCK", block)


# -- numbers


@pytest.mark.slow
@settings(max_examples=rounds(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(FLOATS + INTS + OTHERS),
    shape=st.lists(st.integers(0, 12), max_size=4).map(tuple),
    seed=st.integers(0, 99),
    odd=st.sampled_from([0.0, 0.0, 0.1, 0.7, 1.0]),
    scale=st.sampled_from([1.0, 1e-3, 1e4]),
    shift=st.sampled_from([0.0, 3.0, -1e4]),
    piece=st.sampled_from([16, 64, 1000, 4096]),
    block=st.sampled_from([3, 64, 1000]),
    bins=st.sampled_from([None, 1, 7, [-2.0, -0.5, 0.0, 3.0]]),
)
def test_equals_numpy(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], seed: int, odd: float, scale: float,
                      shift: float, piece: int, block: int, bins: Any) -> None:  # fmt: skip
    t = random(dtype, shape, seed, odd, scale, shift)
    view = saved(tmp_path, {"w": t})
    one, two = pieces(piece, piece * 3, block)
    with one, two:
        found = view["w"].stats(bins=bins, progress=False)
    alike(found, t)
    assert (found.histogram is None) == (bins is None)
    if found.histogram is not None:
        x = doubles(t)
        good = x[np.isfinite(x)]
        counts, edges = np.histogram(good, bins)
        assert found.histogram.edges == tuple(edges)
        assert found.histogram.counts == tuple(counts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32], ids=str)
def test_large_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of several runs, pieces and blocks, as these are."""
    tensors = {
        f"{odd}": random(dtype, (3, 1000, 1500 // dtype.itemsize * 2 + 1), 1, odd, 1.0, 0.1) for odd in (0.0, 1e-4)
    }
    for name, t in saved(tmp_path, tensors).items():
        alike(t.stats(), tensors[name])


@pytest.mark.parametrize(
    ("dtype", "mean", "spread"),
    [(torch.float32, 1e4, 1.0), (torch.float64, 1e9, 1.0), (torch.float64, -1e12, 1e3), (torch.int32, 2e9, 10.0)],
)
def test_a_mean_far_from_zero_costs_no_digits(tmp_path: Path, dtype: torch.dtype, mean: float, spread: float) -> None:
    g = torch.Generator().manual_seed(0)
    t = (torch.randn(300_000, generator=g, dtype=torch.float64) * spread + mean).to(dtype)
    found = saved(tmp_path, {"w": t})["w"].stats()
    x = t.double().numpy() - mean  # exact
    assert found.std == pytest.approx(float(x.std()), rel=1e-7)
    assert found.std is not None and abs(found.std - x.std()) <= 1e-15 * abs(mean) + 1e-12 * x.std()


def test_constants_have_no_deviation(tmp_path: Path) -> None:
    value = 0.1
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    view = saved(tmp_path, {str(d): torch.full((1000, 333), value, dtype=d) for d in dtypes})
    for t in view.values():
        found = t.stats(bins=4)
        assert found.std is not None and found.std <= 1e-15 and found.min == found.max
        assert found.histogram is not None and sum(found.histogram.counts) == t.numel()


def test_extremes_of_float64(tmp_path: Path) -> None:
    big = torch.finfo(torch.float64).max
    view = saved(tmp_path, {"w": torch.tensor([-big, big, 0.0, 1.0], dtype=torch.float64)})
    found = view["w"].stats(bins=2)
    assert (found.min, found.max, found.absmax, found.zeros, found.l2) == (-big, big, big, 1, math.inf)
    assert found.histogram == Histogram((-big, 0.0, big), (1, 3))


@pytest.mark.parametrize("exponent", [-1000, -700, 700, 1000])
def test_squares_beyond_float64(tmp_path: Path, exponent: int) -> None:
    w = torch.randn(60, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-4, 4)
    w = (w * 1024).round() / 1024  # with the exponent they are still normal numbers
    unit = 2.0 ** (exponent / 2)
    far = w * unit * unit
    mixed = torch.cat([torch.zeros(3, 40, dtype=torch.float64), w[:30], far, w[30:]])
    apart = {f"row {n}": far[n].clone() for n in range(4)}
    view = saved(tmp_path, {"near": w, "far": far, "mixed": mixed, "long": far.repeat(20, 1), **apart})
    near, far_, long = (view[name].stats() for name in ("near", "far", "long"))
    for column in ("mean", "std", "l2", "l1", "max"):
        assert getattr(far_, column) == math.ldexp(getattr(near, column), exponent), column
    assert long.std == pytest.approx(far_.std) and long.l2 == pytest.approx(far_.l2 * math.sqrt(20))
    table = view.select("row *").stats()
    assert table.total.l2 == pytest.approx(math.ldexp(float(w[:4].norm()), exponent))
    assert [one.l2 for one in table] == pytest.approx([math.ldexp(float(w[n].norm()), exponent) for n in range(4)])
    # the smaller numbers are too small to change the total
    assert view["mixed"].stats().l2 == pytest.approx(far_.l2 if exponent > 0 else near.l2)
    assert histogram_of(view["far"]).as_dict()["l2"] == far_.l2
    sides = norms(view["far"], 7, 40), norms(view["near"], 7, 40)
    for side in ("rows", "cols"):
        of_far, of_near = (getattr(one, side) for one in sides)
        np.testing.assert_array_equal(of_far, np.ldexp(of_near, exponent))
    rows = norms(view["mixed"]).rows
    np.testing.assert_allclose(rows[33:93], np.ldexp(w.norm(dim=1).numpy(), exponent), rtol=1e-14)
    np.testing.assert_allclose(rows[3:33], w[:30].norm(dim=1).numpy(), rtol=1e-14)
    found = stats.singular_values(view["far"])
    np.testing.assert_allclose(found, np.ldexp(stats.singular_values(view["near"]), exponent), rtol=1e-9)


def test_bins_between_neighbouring_numbers(tmp_path: Path) -> None:
    low = 1e16
    view = saved(
        tmp_path, {"w": torch.tensor([low, low + 4], dtype=torch.float64), "v": torch.full((5,), 1e18).double()}
    )
    found = view["w"].stats(bins=100).histogram
    assert found is not None and found.edges == (low, low + 2, low + 4) and found.counts == (1, 1)
    alone = view["v"].stats(bins=8).histogram
    assert alone is not None and sum(alone.counts) == 5


def test_no_negative_zero(tmp_path: Path) -> None:
    view = saved(tmp_path, {"a": torch.full((3,), -0.0), "b": torch.full((3,), -0.0).bfloat16()})
    for t in view.values():
        found = t.stats()
        assert found.zeros == 3
        assert [math.copysign(1, x or 0.0) for x in (found.min, found.max)] == [1, 1]


# -- how it is done


@pytest.mark.slow
def test_every_byte_is_read_once(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3000, 2000), "b": torch.randn(5000, 999).bfloat16(), "c": torch.arange(7)}
    saved(tmp_path, tensors)
    view, counts = opened(tmp_path / "model.pt")
    counts.clear()
    view.stats()
    assert counts.bytes == view.nbytes
    counts.clear()
    view.stats(bins=[-1, 0, 1])
    assert counts.bytes == view.nbytes
    counts.clear()
    view.stats(bins=10)  # the range of wide types is not known before they are read
    assert counts.bytes == 2 * (view["a"].nbytes + view["c"].nbytes) + view["b"].nbytes
    counts.clear()
    view["a"].lazy[10:20].stats()
    assert counts.bytes == 10 * 2000 * 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_bounded(tmp_path: Path, dtype: torch.dtype) -> None:
    nbytes = 320 << 20
    path = tmp_path / "model.safetensors"
    header = json.dumps(
        {
            "w": {
                "dtype": {4: "F32", 2: "BF16"}[dtype.itemsize],
                "shape": [nbytes // dtype.itemsize],
                "data_offsets": [0, nbytes],
            }
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)  # a hole on the disk, which reads as zeros
    program = f"""
import re, lazyckpt
def kib(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
view = lazyckpt.open({str(path)!r})
view["w"].lazy[:1000].stats()
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
found = view["w"].stats(memory="64MB")
print(kib("VmHWM") - before, found.zeros)
"""
    done = processes.run("-c", program)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak")
    assert done.returncode == 0, done.stderr
    grown, zeros = map(int, done.stdout.split())
    assert zeros == nbytes // dtype.itemsize
    assert grown << 10 <= 64 << 20


def test_small_tensors_together_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        f"{dtype}.{n}.{seed}": random(
            dtype, (n,), seed, 0.02 * (seed % 3), 10.0 ** (seed % 5), float(seed % 7 == 0) * 1e6
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
        for n in (0, 1, 7, 61, 1000)
        for seed in range(12)
    }
    torch.save(tensors, tmp_path / "x.pt")
    other = {name: t.clone() for name, t in tensors.items()}
    for name in list(other)[::5]:
        other[name][-1:] = 1
    torch.save(other, tmp_path / "y.pt")

    def found() -> str:
        a, b = lazyckpt.open(tmp_path / "x.pt"), lazyckpt.open(tmp_path / "y.pt")
        tables = a.stats(progress=False), a.stats(bins=[-1, 0, 1], progress=False)
        rows = [one.as_dict() for table in tables for one in table]
        return repr((rows, lazyckpt.diff(a, b, progress=False).as_dicts()))  # repr: NaN is not equal to itself

    together = found()
    monkeypatch.setattr(packs, "SMALL", 0)
    assert together == found()


@pytest.mark.slow
def test_the_same_digits_wherever_it_runs(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(9_000_000, generator=g), "b": torch.randn(3_000_000, generator=g).half() ** 3}
    tensors["c"] = torch.tensor([1.0, math.nan])
    view = saved(tmp_path, tensors)
    here = view.stats(bins=5)
    assert pickle.loads(pickle.dumps(here)).as_dicts()[0] == here.as_dicts()[0]
    with ThreadPoolExecutor(1) as alone:
        assert view.select("[ab]").stats(bins=5, executor=alone) == here[:2]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert view.select("[ab]").stats(bins=5, executor=pool) == here[:2]


# -- of views


def test_rows_are_those_of_the_view(tmp_path: Path) -> None:
    w = torch.randn(20, 10)
    view = saved(tmp_path, {"b.w": w, "a.x": torch.ones(3), "b.tied": w, "a.y": torch.zeros(2)})
    table = view.stats()
    assert [row.name for row in table] == ["b.w", "a.x", "a.y"]  # in the file's order, tied names once
    assert [row.name for row in view["a"].stats()] == ["x", "y"]
    assert [row.name for row in view.select("*.y").stats()] == ["a.y"]
    assert [row.name for row in view.select("b.tied").stats()] == ["b.tied"]
    assert table["a.x"] == table[1] == view["a.x"].stats()
    assert table[1:] == Table([table[1], table[2]])
    with pytest.raises(KeyError, match="no row 'nope'"):
        table["nope"]
    assert len(view.select("nothing").stats()) == 0


def test_the_total_is_that_of_all_elements(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    tensors = {f"{n}": torch.randn(100, n, generator=g) * n + n for n in range(1, 30)}
    tensors["odd"] = torch.tensor([math.nan, math.inf, 0.0])
    tensors["half"] = torch.randn(100, generator=g).half()
    tensors["empty"] = torch.empty(0)
    tensors["none"] = torch.tensor([math.nan])
    total = saved(tmp_path, tensors).stats(bins=[-10, 0, 10]).total
    every = torch.cat([t.double().flatten() for t in tensors.values()])
    want = truth(every)
    for key, value in want.items():
        assert getattr(total, key) == pytest.approx(value, rel=1e-12), key
    assert total.finite == every.numel() - 3 and total.name == "total" and total.error is None
    x = every.numpy()
    assert total.histogram is not None
    assert total.histogram.counts == tuple(np.histogram(x[np.isfinite(x)], [-10, 0, 10])[0])
    assert Table([]).total.count == 0


@pytest.mark.slow
def test_what_cannot_be_read_is_a_row(dcp_hole: tuple[lazyckpt.CheckpointView, Case]) -> None:
    view, case = dcp_hole
    table = view.stats()
    assert [row.name for row in table] == list(view.once()[0])
    lost = [row for row in table if row.error is not None]
    read = [row for row in table if row.error is None]
    assert lost and read
    for row in read:
        alike(row, case.truth[view.state][row.name])
    for row in lost:
        assert "__1_0.distcp" in str(row.error) and row.mean is None and row.count == view[row.name].numel()
        with pytest.raises(MissingFileError, match=r"__1_0\.distcp"):
            view[row.name].stats()
    total = table.total
    assert total.count == sum(row.count for row in read)
    assert total.error == f"{len(lost)} of {len(table)} tensors could not be read"
    assert "cannot be read: " in str(table) and "cannot be read: " in table._repr_html_()
    assert "could not be read" in str(table)


def test_a_truncated_file_is_a_row(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False)
    with (tmp_path / "m.safetensors").open("r+b") as file:
        file.truncate(5000)
    table = view.stats()
    assert all("m.safetensors" in str(row.error) for row in table)


def test_packed_elements_have_no_statistics(tmp_path: Path) -> None:
    view = saved(tmp_path, {"w": torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "v": torch.ones(2)})
    with pytest.raises(DataError, match="packed bits, no numbers"):
        view["w"].stats()
    packed, plain = view.stats()
    assert "packed bits" in str(packed.error) and plain.mean == 1


@pytest.mark.parametrize(
    "bins",
    [0, -3, 10**9, [], [1.0], [1.0, 1.0], [2.0, 1.0], [0.0, math.nan], [0.0, math.inf], [[1, 2]], "ab", [0, 1j]],
)
def test_bins_that_are_none(tmp_path: Path, bins: Any) -> None:
    view = saved(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(DataError, match="bins="):
        view.stats(bins=bins)


def test_a_run(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        torch.save({"w": torch.full((4, 5), float(step)), "b": torch.zeros(2)}, tmp_path / f"step_{step}.pt")
    run = lazyckpt.open_run(tmp_path)
    table = run.stats()
    assert table["w"].shape == (3, 4, 5) and table["w"].mean == pytest.approx(2)
    assert run["w"].lazy[1].stats().mean == 2
    assert [run["w"].lazy[n].stats().max for n in range(3)] == [1, 2, 3]


# -- as a table


@pytest.fixture
def odd_table(tmp_path: Path) -> Table:
    tensors = {"<b>w</b>": torch.tensor([1.0, math.nan, math.inf, -math.inf]), "x\x1b[31m": torch.arange(2000)}
    return saved(tmp_path, tensors | {"h": torch.ones(4, 5).half()}).stats()


def test_as_text(odd_table: Table) -> None:
    lines = repr(odd_table).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "name dtype shape mean std min max L2 norm zeros NaN Inf"
    assert words[1] == "<b>w</b> f32 [4] 1 0 1 1 1 0 1 2"
    assert words[3] == "h f16 [4, 5] 1 0 1 1 4.472 0 0 0"
    assert lines[4].split()[0] == "total" and len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    assert "\x1b" not in str(odd_table)
    many = Table([odd_table[2]] * 100)
    assert len(repr(many).splitlines()) == 43 and "60 more" in repr(many)
    assert len(str(many).splitlines()) == 102


def test_as_html(odd_table: Table) -> None:
    text = odd_table._repr_html_()
    assert "<b>" not in text and "&lt;b&gt;w&lt;/b&gt;" in text
    assert text.count('class="bad"') == 4  # NaN and Inf, of the row and of the total
    assert text.count("<tr") == 5


def test_bars_as_html_keep_their_gaps(tmp_path: Path) -> None:
    """HTML shows one of several spaces, and breaks lines at them; notebooks typeset what is between two "$"."""
    text = saved(tmp_path, {"a$b$": torch.tensor([0.0, 10.0])}).stats(bins=6)._repr_html_()
    assert f">0&nbsp;|█{'&nbsp;' * 4}█|&nbsp;10</code></td>" in text
    assert "tex2jax_ignore" in text.partition("a$b$")[0]


def test_one_as_text(tmp_path: Path) -> None:
    found = saved(tmp_path, {"w": torch.tensor([0.0, 1.0, 1.0, 3.0]).bfloat16()})["w"].stats(bins=3)
    assert repr(found) == (
        "w: bf16 [4], 4 elements\n  mean 1.25, std 1.09\n  min 0, max 3, absmax 3\n  L1 norm 5, L2 norm 3.317\n"
        "  1 zeros, 0 NaN, 0 +Inf, 0 -Inf\n  0 |▄█▄| 3"
    )


def test_as_plain_objects(odd_table: Table) -> None:
    rows = odd_table.as_dicts()
    assert [row["name"] for row in rows] == [row.name for row in odd_table]
    assert rows[2]["shape"] == [4, 5] and "histogram" not in rows[2]
    json.dumps(rows)


def test_pandas(odd_table: Table) -> None:
    need("pandas")
    import pandas as pd

    frame = pd.DataFrame(odd_table)
    assert list(frame.columns) == list(Stats.__dataclass_fields__)
    assert frame["nan"].tolist() == [1, 0, 0] and frame["mean"].dtype == np.float64
    assert frame.set_index("name").loc["h", "l2"] == odd_table["h"].l2


def test_polars(odd_table: Table) -> None:
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame(odd_table)
    assert frame.columns == list(Stats.__dataclass_fields__)
    assert frame["zeros"].to_list() == [0, 1, 0] and frame["mean"].dtype == pl.Float64


# -- from the shell


def shell(*args: str | Path) -> str:
    result = CliRunner().invoke(cli.app, ["stats", *map(str, args)])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert "\x1b" not in result.stdout
    return result.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    a = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    tensors = {"a.w": a, "a.b": torch.arange(2000), "c": torch.full((4, 5), -3.0), "x\x1b[31m": torch.ones(1)}
    saved(tmp_path, tensors | {"tied": a})
    return tmp_path / "model.pt"


def test_shell_table(model: Path) -> None:
    view = lazyckpt.open(model)
    assert shell(model) == f"{view.stats()}\n"
    assert shell(model, "a") == f"{view['a'].stats()}\n"
    assert shell(model, "a.w", "--bins", "4") == f"{view.select('a.w').stats(bins=4)}\n"
    assert [line.split()[0] for line in shell(model, "*.?").splitlines()] == ["name", "a.w", "a.b", "total"]
    result = CliRunner().invoke(cli.app, ["stats", str(model), "nothing*"])
    assert result.exit_code == 2 and "matches none of 5 names" in result.stderr


def test_shell_sorted(model: Path) -> None:
    def names(*args: str) -> list[str]:
        return [line.split()[0] for line in shell(model, "[ac]*", *args).splitlines()[1:-1]]

    assert names() == ["a.w", "a.b", "c"]
    assert names("--sort", "mean") == ["a.b", "a.w", "c"]
    assert names("--sort", "name") == ["a.b", "a.w", "c"]
    assert names("--sort", "nan")[0] == "a.w"
    result = CliRunner().invoke(cli.app, ["stats", str(model), "--sort", "size"])
    assert result.exit_code == 2 and "no column 'size'" in result.stderr


def test_shell_prints_the_column_it_sorts_by(model: Path) -> None:
    for column, title, first in (("absmax", "absmax", "1999"), ("l1", "norm", "1.999e+06"), ("neginf", "-Inf", "1")):
        head, line = (one.split() for one in shell(model, "--sort", column).splitlines()[:2])
        head = " ".join(head).replace("L1 norm", "norm", column == "l1").replace("L2 norm", "l2").split()
        assert line[head.index(title) - len(head)] == first


def test_shell_folds_repeated_layers(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.{what}": torch.full((2, 3), float(n)) for n in range(40) for what in "abc"}
    tensors["layers.30.b"][0, 0] = math.nan
    tensors["layers.7.c"] = torch.full((2, 4), 100.0)
    saved(tmp_path, tensors | {"norm": torch.ones(2)})
    lines = shell(tmp_path / "model.pt").splitlines()
    names = {"layers.{0-39}.a", "layers.{0-39}.b", "layers.{0-6,8-39}.c", "layers.7.c", "norm"}
    assert {line.split()[0] for line in lines[1:-2]} == names
    by_name = {line.split()[0]: line for line in lines}
    whole = torch.stack([tensors[f"layers.{n}.a"] for n in range(40)])
    mean, std, least, most, norm = by_name["layers.{0-39}.a"].split()[4:9]
    assert [mean, std] == [f"{whole.mean():.4g}", f"{whole.std(correction=0):.4g}"]
    assert [least, most, norm] == ["0", "39", f"{whole.norm():.4g}"]
    assert by_name["layers.{0-39}.a"].endswith("largest at layers 39")
    assert by_name["layers.{0-39}.b"].endswith("NaN at layers 30")
    assert by_name["total"].split() == str(lazyckpt.open(tmp_path / "model.pt").stats()).splitlines()[-1].split()
    assert len(shell(tmp_path / "model.pt", "--all").splitlines()) == len(tensors) + 3
    assert len(shell(tmp_path / "model.pt", "--sort", "l2").splitlines()) == len(tensors) + 3


def test_shell_tells_of_names_without_a_row_and_folds_them_in_ls(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file({"\u65e5\u672c": torch.ones(2), " b": torch.ones(2)}, tmp_path / "m/model-00001-of-00002.safetensors")
    names = {f"lost.{n}": "model-00002-of-00002.safetensors" for n in range(50)}
    held = dict.fromkeys(("\u65e5\u672c", " b"), "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": held | names}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    head, first, second, _, note = shell(tmp_path / "m").splitlines()
    assert note.startswith("50 tensors without a row")
    at = head.index("dtype")
    assert first[:at].rstrip() == "' b'" and first.index("f32") == at
    assert second.index("f32") == at - 2  # two characters of two columns each
    listed = CliRunner().invoke(cli.app, ["ls", str(tmp_path / "m")]).stdout.splitlines()
    assert len(listed) < 8 and any("and 47 more" in line for line in listed)


def test_shell_json_and_csv(model: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    view = lazyckpt.open(model)
    found = json.loads(shell(model, "--json", "--bins", "3"), parse_constant=refuse)
    table = view.stats(bins=3)
    assert found["tensors"] == table.as_dicts() and found["total"]["nan"] == 1
    torch.save({"w": torch.tensor([math.nan]), "v": torch.tensor([1.5e308, 1.5e308], dtype=torch.float64)}, model)
    nothing, large = json.loads(shell(model, "--json"), parse_constant=refuse)["tensors"]
    assert nothing["mean"] is None and large["l2"] == "Infinity"
    lines = shell(model, "--csv").splitlines()
    assert lines[0].split(",")[:4] == ["name", "dtype", "shape", "count"]
    assert lines[2].startswith("v,float64,2,2,0,0,0,0,1.5e+308,")


@pytest.mark.slow
def test_shell_colours(model: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS")}
    done = processes.run("-m", "lazyckpt", "stats", model, env=env | {"FORCE_COLOR": "1"})
    assert "\x1b[1;31m" in done.stdout  # NaN and Inf
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert plain == shell(model)


@pytest.mark.parametrize("length", [2, 3, 32_703, 32_704, 32_705, 300_001])
@pytest.mark.parametrize("span", [1, 3, 300, 40_000, 1 << 16])
def test_patterns_are_counted_in_any_range(length: int, span: int) -> None:
    rng = np.random.default_rng(length * span)
    least = rng.integers(0, (1 << 16) - span + 1)
    wide = rng.integers(least, least + span, length).astype(np.uint16)
    assert np.array_equal(moments.count(torch.from_numpy(wide.view(np.int16))), np.bincount(wide, minlength=1 << 16))
    narrow = rng.integers(0, 256, length).astype(np.uint8)
    assert np.array_equal(moments.count(torch.from_numpy(narrow)), np.bincount(narrow, minlength=256))
