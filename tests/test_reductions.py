"""numpy, Dask and xarray compute with every dtype as float64 would, within the documented tolerance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import xarray as xr

import lazyckpt
from lazyckpt.engine import LazyckptBackend
from lazyckpt.interop.xarray import to_f32
from lazyckpt.testing.counting import opened

ENGINE: Any = LazyckptBackend
TOLERANCE = 1e-5  # of the sum of magnitudes: docs/how-to/xarray.md

NARROW = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
OTHERS = {
    "f32": torch.float32, "f64": torch.float64, "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "bool": torch.bool,
}  # fmt: skip


def _held() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    held = {}
    for name, dtype in {**NARROW, **OTHERS}.items():
        whole = torch.randn(600, 40, generator=g) * 3 + 2
        held[f"layer.{name}"] = (whole.abs() if name == "u8" else whole).to(dtype)
    held["layer.large"] = torch.full((5000,), 60.0, dtype=torch.float16)  # whose sum is no float16
    held["layer.ones"] = torch.ones(3000, dtype=torch.bfloat16)  # whose sum stops at 256 in bf16
    return held


HELD = _held()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reductions") / "x.pt"
    torch.save(HELD, path)
    return path


@pytest.fixture
def view(path: Path) -> lazyckpt.CheckpointView:
    return lazyckpt.open(path)


def exact(name: str) -> np.ndarray[Any, Any]:
    return HELD[name].to(torch.float64).numpy()


def close(got: Any, want: Any, scale: float, what: object) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, what
    worst = np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0.0)
    assert worst <= TOLERANCE * max(scale, 1.0), (what, worst, scale)


def powers(a: np.ndarray[Any, Any]) -> float:
    return float((a * a).sum())


Reduction = tuple[Callable[[Any], Any], Callable[[np.ndarray[Any, Any]], float]]
REDUCTIONS: dict[str, Reduction] = {
    "mean": (np.mean, lambda a: np.abs(a).max()),
    "std": (np.std, lambda a: np.abs(a).max()),
    "var": (np.var, lambda a: np.abs(a).max() ** 2),
    "sum": (np.sum, lambda a: np.abs(a).sum()),
    "sum of rows": (lambda t: np.sum(t, axis=0), lambda a: np.abs(a).sum()),
    "mean of columns": (lambda t: np.mean(t, axis=-1), lambda a: np.abs(a).max()),
    "nansum": (np.nansum, lambda a: np.abs(a).sum()),
    "norm": (np.linalg.norm, lambda a: np.sqrt(powers(a))),
    "dot": (lambda t: np.vdot(t, t), powers),
    "tensordot": (lambda t: np.tensordot(t, t, t.ndim), powers),
    "cumsum": (np.cumsum, lambda a: np.abs(a).sum()),
    "median": (np.median, lambda a: np.abs(a).max()),
    "quantile": (lambda t: np.quantile(t, 0.3), lambda a: np.abs(a).max()),
    "average": (np.average, lambda a: np.abs(a).max()),
    "max": (np.max, lambda a: np.abs(a).max()),
    "add.reduce": (lambda t: np.add.reduce(t, axis=None), lambda a: np.abs(a).sum()),
    "add.accumulate": (np.add.accumulate, lambda a: np.abs(a).sum()),
    "multiply": (lambda t: np.multiply(t, 2).sum(), lambda a: np.abs(a).sum() * 2),
    "square": (lambda t: np.square(t).sum(), powers),
    "histogram": (lambda t: np.histogram(t, bins=8, range=(-8, 8))[0], lambda a: 1.0),
    "concatenate and sum": (lambda t: np.sum(np.stack([np.abs(t), np.abs(t)])), lambda a: np.abs(a).sum() * 2),
}


@pytest.mark.parametrize("what", REDUCTIONS)
@pytest.mark.parametrize("name", HELD)
def test_numpy_on_a_lazy_tensor(view: lazyckpt.CheckpointView, name: str, what: str) -> None:
    t, want = view[name], exact(name)
    reduce, scale = REDUCTIONS[what]
    if HELD[name].dtype == torch.bool and what in ("quantile", "histogram"):
        pytest.skip("numpy has none of bools")
    if HELD[name].dtype not in NARROW.values():  # what numpy makes of the array itself
        got, here = reduce(t), reduce(HELD[name].numpy())
        assert np.asarray(got).dtype == np.asarray(here).dtype
        assert np.array_equal(got, here)
        return
    close(reduce(t), reduce(want), float(scale(want)), (name, what))


def test_the_numbers_of_the_report(tmp_path: Path) -> None:
    w = (torch.randn(4096, 512, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    torch.save({"w": w}, tmp_path / "w.pt")
    t = lazyckpt.open(tmp_path / "w.pt")["w"]
    assert np.std(t) == pytest.approx(0.02, rel=0.01)
    assert float((t.to_dask() ** 2).sum() ** 0.5) == pytest.approx(float(w.double().norm()), rel=1e-5)


def test_operators_of_arrays(view: lazyckpt.CheckpointView) -> None:
    for name in ("layer.bf16", "layer.f16", "layer.e4m3"):
        t, want = view[name], exact(name)
        for got, wanted in (
            (np.ones(40) + t, 1 + want),
            (np.float32(2) * t, 2 * want),
            (np.full((600, 40), 2, np.int64) ** t, 2.0**want),
            (t.numpy().astype(np.float32) - np.asarray(t, np.float32), 0 * want),
        ):
            assert np.allclose(got.astype(np.float64), wanted, rtol=1e-6)
        assert np.asarray(np.ones((600, 40)) < t).dtype == bool


def test_functions_that_move_elements_keep_the_dtype(view: lazyckpt.CheckpointView) -> None:
    t, array = view["layer.bf16"], view["layer.bf16"].numpy()
    for move in (np.transpose, np.ravel, np.copy, np.flipud, lambda t: np.concatenate([t, t])):
        assert move(t).dtype == ml_dtypes.bfloat16
        assert move(t).tobytes() == np.asarray(move(array)).tobytes()
    assert np.asarray(t).dtype == ml_dtypes.bfloat16


def test_numpy_asks_for_shapes_without_reading(path: Path) -> None:
    view, counts = opened(path)
    counts.clear()
    t = view["layer.bf16"]
    assert (np.shape(t), np.ndim(t), np.size(t)) == ((600, 40), 2, 24_000)
    assert np.zeros_like(t).dtype == ml_dtypes.bfloat16 and np.result_type(t) == ml_dtypes.bfloat16
    assert counts.requests == 0


def test_numpy_does_not_write_to_lazy_tensors(view: lazyckpt.CheckpointView) -> None:
    t, ones = view["layer.f32"], np.ones((600, 40), np.float32)
    for write in (
        lambda: np.copyto(t, ones),
        lambda: np.add(ones, ones, out=t),
        lambda: np.sum(ones, axis=0, out=t),
        lambda: np.add(ones, ones, t),
        lambda: np.mean(ones, 0, None, t),
        lambda: np.clip(ones, 0, 1, t),
        lambda: np.add.at(t, 0, 1),
        lambda: np.fill_diagonal(t, 0),
    ):
        with pytest.raises(TypeError):
            write()


# -- Dask and xarray


OF_ARRAYS: dict[str, Reduction] = {
    "mean": (lambda a: a.mean(), lambda a: np.abs(a).max()),
    "std": (lambda a: a.std(), lambda a: np.abs(a).max()),
    "var": (lambda a: a.var(), lambda a: np.abs(a).max() ** 2),
    "sum": (lambda a: a.sum(), lambda a: np.abs(a).sum()),
    "norm": (lambda a: (a**2).sum() ** 0.5, lambda a: np.sqrt(powers(a))),
    "doubled": (lambda a: (a * 2 - 1).sum(), lambda a: 2 * np.abs(a).sum()),
    "max": (lambda a: a.max(), lambda a: np.abs(a).max()),
    "cumsum": (lambda a: a.cumsum(0 if isinstance(a, np.ndarray) or not hasattr(a, "dims") else a.dims[0]),
               lambda a: np.abs(a).sum()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", OF_ARRAYS)
def test_dask(view: lazyckpt.CheckpointView, what: str) -> None:
    pytest.importorskip("dask")
    reduce, scale = OF_ARRAYS[what]
    for name in HELD:
        want = exact(name)
        for array in (view[name].to_dask(), view[name].to_dask(chunks=128)):
            got = reduce(array).compute(scheduler="sync")
            if HELD[name].dtype in NARROW.values():
                close(got, reduce(want), float(scale(want)), (name, what))
            else:
                assert np.allclose(got, reduce(HELD[name].numpy()), rtol=1e-5), (name, what)


def test_dask_keeps_bits_where_that_is_asked_for(view: lazyckpt.CheckpointView) -> None:
    pytest.importorskip("dask")
    for name, whole in HELD.items():
        array = view[name].to_dask(widen=False)
        assert array.dtype == view[name].numpy().dtype == array._meta.dtype
        assert array.compute(scheduler="sync").tobytes() == view[name].numpy().tobytes()
        if whole.dtype not in NARROW.values():
            assert view[name].to_dask().dtype == array.dtype


def trees(path: Path) -> list[tuple[str, Any]]:
    """Every way in which a checkpoint becomes an xarray object: lazily and eagerly, with and without Dask."""
    view = lazyckpt.open(path)
    found = [("engine", xr.open_datatree(path, engine=ENGINE)), ("view", view.to_xarray())]
    found += [("loaded", xr.open_datatree(path, engine=ENGINE).load())]
    found += [("flat", xr.open_dataset(path, engine=ENGINE, group="layer"))]
    found += [("to_f32", to_f32(view.to_xarray(widen=False)))]
    try:
        import dask  # noqa: F401
    except ImportError:
        return found
    return [*found, ("chunks", xr.open_datatree(path, engine=ENGINE, chunks={})), ("dask", view.to_xarray(chunks={}))]


@pytest.mark.slow
@pytest.mark.parametrize("what", OF_ARRAYS)
def test_xarray(path: Path, what: str) -> None:
    reduce, scale = OF_ARRAYS[what]
    for made, tree in trees(path):
        for name, whole in HELD.items():
            array, want = tree[name.partition(".")[2] if made == "flat" else name.replace(".", "/")], exact(name)
            got = reduce(array).values
            if whole.dtype in NARROW.values():
                assert array.dtype == np.float32
                assert made == "to_f32" or array.attrs["stored_dtype"] == str(whole.dtype).removeprefix("torch.")
                close(got, reduce(want), float(scale(want)), (made, name, what))
            else:
                assert array.dtype == whole.numpy().dtype and "stored_dtype" not in array.attrs
                assert np.allclose(got, reduce(whole.numpy()), rtol=1e-5), (made, name, what)


@pytest.mark.slow
def test_groups_and_windows_of_xarray(path: Path) -> None:
    for made, tree in trees(path):
        for name in ("layer.bf16", "layer.f16", "layer.e4m3"):
            array = tree[name.partition(".")[2] if made == "flat" else name.replace(".", "/")]
            want, (rows, columns) = exact(name), array.dims
            parity = xr.DataArray(np.arange(600) % 2, dims=rows, name="parity")
            sums = [want[0::2].sum(), want[1::2].sum()]
            close(array.groupby(parity).sum().sum(columns), sums, np.abs(want).sum(), made)
            windows = np.lib.stride_tricks.sliding_window_view(want, 5, 0).sum(-1)
            close(array.rolling({rows: 5}).sum()[4:], windows, 5 * np.abs(want).max(), made)
            close(array.weighted(parity).mean(), want[1::2].mean(), np.abs(want).max(), made)


def test_torch_rounds_results_only(view: lazyckpt.CheckpointView) -> None:
    for name, eps in (("layer.bf16", 2**-8), ("layer.f16", 2**-10)):
        want = exact(name)
        for of_torch, number in (
            (torch.std, want.std(ddof=1)), (torch.mean, want.mean()), (torch.norm, np.linalg.norm(want)),
        ):  # fmt: skip
            assert float(of_torch(view[name])) == pytest.approx(float(number), rel=eps)
    for name in ("layer.e4m3", "layer.e5m2"):
        with pytest.raises((NotImplementedError, RuntimeError)):
            torch.std(view[name])


# -- netCDF


def test_attributes_are_what_netcdf_takes(path: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "c": torch.zeros(2, dtype=torch.complex32)}, tmp_path / "odd.pt")
    for file in (path, tmp_path / "odd.pt"):
        held = [xr.open_dataset(file, engine=ENGINE), *xr.open_groups(file, engine=ENGINE).values()]
        held += [node.dataset for node in lazyckpt.open(file).to_xarray().subtree]
        for one in held:
            attributes = [one.attrs, *(v.attrs for v in one.variables.values())]
            assert all(type(value) is str for found in attributes for value in found.values())


@pytest.mark.parametrize(("engine", "module"), [("netcdf4", "netCDF4"), ("h5netcdf", "h5netcdf"), ("scipy", "scipy")])
def test_to_netcdf(path: Path, tmp_path: Path, engine: Any, module: str) -> None:
    pytest.importorskip(module)
    held = xr.open_dataset(path, engine=ENGINE).drop_vars(["layer.u8"] if engine == "scipy" else [])
    held.to_netcdf(tmp_path / "x.nc", engine=engine)
    with xr.open_dataset(tmp_path / "x.nc", engine=engine) as again:
        assert again.attrs == held.attrs
        for name in held:
            assert np.array_equal(again[name].values, held[name].values)
