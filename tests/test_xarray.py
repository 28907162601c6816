"""Checkpoints as xarray's datasets and trees: the engine, `to_xarray`, lazy indexing, conversion for reductions."""

from __future__ import annotations

import importlib.metadata
import pickle
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import save_file
from torch import Tensor

import lazyckpt
from lazyckpt.core.dtypes import dtype_of, to_numpy, widened
from lazyckpt.engine import LazyckptBackend
from lazyckpt.interop.xarray import to_f32
from lazyckpt.testing.counting import opened

from . import processes
from .writers import Case

ENGINE: Any = LazyckptBackend


def variables(tree: xr.DataTree) -> Iterator[tuple[str, xr.DataArray]]:
    """(name of the tensor, its variable) of the whole tree."""
    for node in tree.subtree:
        for array in node.dataset.data_vars.values():
            yield array.attrs["name"], array


def equal(got: Any, want: Tensor, what: object = "") -> None:
    """Bit for bit, in the dtype that numpy computes with."""
    wanted = to_numpy(want.contiguous().to(widened(dtype_of(want.dtype)).torch))
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
    assert np.asarray(got).tobytes() == wanted.tobytes(), what


# -- the engine


def test_a_tree_of_every_state(case: Case) -> None:
    view = lazyckpt.open(case.path)
    for state in (None, *view.states):
        options = {} if state is None else {"state": state}
        tree = xr.open_datatree(case.path, engine=ENGINE, **options)
        truth = case.truth[state or view.state]
        found = dict(variables(tree))
        assert set(found) == set(truth)
        assert tree.attrs["format"] == view.format and tree.attrs["state"] == (state or view.state)
        assert tree.attrs["states"].splitlines() == list(view.states)
        assert tree.attrs.get("problems", "") == "\n".join(view.problems)
        for name, array in found.items():
            assert array.attrs["state"] == (state or view.state)
            assert tree[name.replace(".", "/")].dims == array.dims
            equal(array.values, truth[name], name)


def test_groups(case: Case) -> None:
    view = lazyckpt.open(case.path)
    name = next(n for n in view if n.count(".") >= 2)
    group, _, last = name.rpartition(".")
    for path in (group.replace(".", "/"), f"/{group.replace('.', '/')}/", group):
        held = xr.open_dataset(case.path, engine=ENGINE, group=path)
        assert set(held.data_vars) == {n.removeprefix(f"{group}.") for n in view if n.startswith(f"{group}.")}
        equal(held[last].values, case.truth[view.state][name], name)
    below = xr.open_datatree(case.path, engine=ENGINE, group=group.split(".")[0])
    assert {n for n, _ in variables(below)} == {n for n in view if n.startswith(group.split(".")[0] + ".")}
    groups = xr.open_groups(case.path, engine=ENGINE)
    assert next(iter(groups)) == "/" and last in groups["/" + group.replace(".", "/")]
    with pytest.raises(lazyckpt.TensorNotFoundError, match="there is no tensor or prefix"):
        xr.open_dataset(case.path, engine=ENGINE, group="no/such/group")
    with pytest.raises(lazyckpt.TensorNotFoundError, match="is a tensor"):
        xr.open_dataset(case.path, engine=ENGINE, group=name.replace(".", "/"))
    with pytest.raises(KeyError, match="no state 'momentum'; there are: "):
        xr.open_dataset(case.path, engine=ENGINE, state="momentum")


def test_inner_paths_resolve_as_in_a_view(huggingface_cases: dict[str, Case]) -> None:
    case = huggingface_cases["llama_sharded"]
    held = xr.open_dataset(case.path, engine=ENGINE, group="layers/1/mlp")
    assert set(held.data_vars) == {f"{part}_proj.weight" for part in ("up", "gate", "down")}
    equal(held["up_proj.weight"].values, case.truth["weights"]["model.layers.1.mlp.up_proj.weight"])
    alone = xr.open_dataset(case.path, engine=ENGINE, group="layers/1/mlp/up_proj", chunks={})
    equal(alone.weight.values, case.truth["weights"]["model.layers.1.mlp.up_proj.weight"])


def test_options(case: Case) -> None:
    view = lazyckpt.open(case.path)
    full = next(n for n in view if n.endswith(".weight"))
    tree = xr.open_datatree(case.path, engine=ENGINE, drop_variables="weight")
    assert {n for n, _ in variables(tree)} == {n for n in view if not n.endswith(".weight") and n != "weight"}
    tree = xr.open_datatree(case.path, engine=ENGINE, drop_variables=[full])
    assert {n for n, _ in variables(tree)} == {*view} - {full}
    with pytest.raises(lazyckpt.FormatError, match="no reader is named"):
        xr.open_datatree(case.path, engine=ENGINE, format="nothing")
    with pytest.raises(TypeError, match="unknown"):
        xr.open_datatree(case.path, engine=ENGINE, unknown=1)


def test_guessing(case: Case, tmp_path: Path) -> None:
    engine = LazyckptBackend()
    assert engine.guess_can_open(case.path)
    xr.Dataset({"a": ("x", [1.0])}).to_zarr(tmp_path / "s", zarr_format=3)
    archive = shutil.make_archive(str(tmp_path / "packed"), "tar", case.path)
    assert engine.guess_can_open(archive)
    (tmp_path / "x.nc").write_bytes(b"CDF\x01 and so on")
    for no in (tmp_path / "s", tmp_path / "x.nc", tmp_path / "missing", "https://example.org/x.nc", 3, b"CDF"):
        assert not engine.guess_can_open(no), no


def test_the_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["xarray.backends"] == {"lazyckpt": "lazyckpt.engine:LazyckptBackend"}
    installed = importlib.metadata.entry_points(group="xarray.backends", name="lazyckpt")
    assert all(point.load() is LazyckptBackend for point in installed)


# -- laziness


def test_opening_reads_nothing_and_a_slice_its_fragments(dcp_cases: dict[str, Case]) -> None:
    case = dcp_cases["fsdp2_uneven"]
    view, counts = opened(case.path)
    counts.clear()
    plain, chunked = view.to_xarray(), view.to_xarray(chunks={})
    for tree in (plain, chunked, to_f32(plain), to_f32(chunked)):
        assert repr(tree) and tree._repr_html_()
        pickle.dumps(tree)
        assert tree.isel(missing_dims="ignore", d5=slice(1, 3)) is not None
    assert counts.requests == 0
    name = next(n for n in view if len(view[n].fragments) > 1 and view[n].ndim == 2)
    t, whole = view[name], case.truth["weights"][name]
    t[...]  # the archives have been looked up
    rows, path = t.fragments[0].local_shape[0], name.replace(".", "/")
    for tree in (plain, chunked, to_f32(plain), to_f32(chunked)):
        counts.clear()
        part = tree[path][:rows, ::2].values
        assert counts.paths == {t.fragments[0].extent.path}
        equal(part.astype(np.float32), whole[:rows, ::2].float())
        assert counts.bytes <= rows * whole.shape[1] * t.itemsize


def test_indexing_is_numpys(case: Case) -> None:
    view, rng = lazyckpt.open(case.path), np.random.default_rng(3)
    for name, array in variables(view.to_xarray()):
        whole = to_numpy(case.truth[view.state][name].contiguous().to(widened(view[name].spec.dtype).torch))
        lists = [rng.integers(-n, n, 4) if n else np.array([], int) for n in whole.shape]
        keys: list[Any] = [(), ..., (slice(None, None, -1),) * whole.ndim, (slice(1, None, 2),) * whole.ndim]
        keys += [(lists[0],), (-1,), (slice(None, None, -2), *lists[1:2])] if whole.ndim and whole.size else []
        for key in keys:
            same(array[key].values, whole[key], name)
        if whole.size:
            same(array[tuple(lists)].values, whole[np.ix_(*lists)] if whole.ndim else whole, name)
            points = {d: xr.DataArray(where, dims="p") for d, where in zip(array.dims, lists, strict=True)}
            same(array.isel(points).values, whole[tuple(lists)], name)
            same(array.T.values, whole.T, name)
        twice = array[tuple(slice(1, None) for _ in whole.shape)]
        same(
            twice[tuple(slice(None, None, -1) for _ in whole.shape)].values,
            whole[(slice(1, None),) * whole.ndim][(slice(None, None, -1),) * whole.ndim],
            name,
        )


def same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], what: object) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    assert got.tobytes() == np.ascontiguousarray(want).tobytes(), what


def test_assigning_stays_in_memory(case: Case) -> None:
    view = lazyckpt.open(case.path)
    name = next(n for n in view if view[n].ndim == 1)
    for tree in (view.to_xarray(), xr.open_datatree(case.path, engine=ENGINE)):
        array = tree[name.replace(".", "/")]
        array[0] = 7
        assert array[0].item() == 7
    assert torch.equal(view[name][...], case.truth[view.state][name])


def test_a_hole_is_an_error_of_the_slices_that_touch_it(dcp_hole: tuple[lazyckpt.CheckpointView, Case]) -> None:
    view, case = dcp_hole
    name = next(n for n in view if len(view[n].fragments) > 1)
    rows, whole = view[name].fragments[0].local_shape[0], case.truth["weights"][name]
    for tree in (xr.open_datatree(view.root, engine=ENGINE), view.to_xarray(), view.to_xarray(chunks={})):
        array = tree[name.replace(".", "/")]
        equal(array[:rows].values, whole[:rows])
        with pytest.raises(lazyckpt.MissingFileError, match="__1_0"):
            _ = array.values
        assert "__1_0" in tree.attrs["problems"]


# -- Dask


def test_chunks(case: Case) -> None:
    pytest.importorskip("dask")
    view = lazyckpt.open(case.path)
    for name, array in variables(xr.open_datatree(case.path, engine=ENGINE, chunks={})):
        assert not array.ndim or array.chunks == view[name].to_dask().chunks
        equal(array.compute(scheduler="threads").values, case.truth[view.state][name], name)
    for name, array in variables(view.to_xarray(chunks={})):
        assert array.chunks == view[name].to_dask().chunks
    first = next(n for n in view if view[n].ndim == 2)
    size = view[first].shape[0]
    array = view.to_xarray(chunks={f"d{size}": 2})[first.replace(".", "/")]
    assert array.chunks[0][0] == min(2, size)
    equal(array.compute(scheduler="threads").values, case.truth[view.state][first])


# -- dtypes and names


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    held = {
        "scalar": torch.tensor(3.5).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "square": torch.arange(25.0).view(5, 5).to(torch.bfloat16),
        "many": torch.ones(3000, dtype=torch.bfloat16),
        "half": torch.full((3000,), 60.0, dtype=torch.float16),
        "ints": torch.arange(5, dtype=torch.int16),
        "double": torch.ones(3, dtype=torch.float64),
        "a.b/c": torch.ones(2),
        "tied.weight": torch.ones(4, 4),
        "tied.weight.scale": torch.ones(4),
        "__x.": torch.zeros(1),
    }
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        held[str(kind).replace("torch.", "")] = torch.linspace(-4, 4, 9).to(kind)
    torch.save(held | {"c32": torch.zeros(3, dtype=torch.complex32)}, tmp_path / "odd.pt")
    return tmp_path / "odd.pt", held


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_names_and_dtypes(odd: tuple[Path, dict[str, Tensor]]) -> None:
    path, held = odd
    tree = xr.open_datatree(path, engine=ENGINE)
    found = dict(variables(tree))
    assert set(found) == set(held)
    for name, whole in held.items():
        equal(found[name].values, whole, name)
    assert tree["square"].dims == ("d5", "d5_2") and tree["tied/weight/scale"].dims == ("d4",)
    assert "c32: numpy has no" in tree.attrs["left_out"]
    flat = xr.open_dataset(path, engine=ENGINE)
    assert {array.attrs["name"]: name for name, array in flat.data_vars.items()} == {
        **{name: name for name in held},
        "a.b/c": "a.b%2Fc",
        "__x.": "%5F_x.%empty",
    }
    weight = xr.open_dataset(path, engine=ENGINE, group="tied/weight")
    assert sorted(weight.data_vars) == ["%", "scale"]
    equal(weight["%"].values, held["tied.weight"])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("chunks", [None, {}])
def test_to_f32(odd: tuple[Path, dict[str, Tensor]], chunks: dict[str, int] | None) -> None:
    path, held = odd
    tree = xr.open_datatree(path, engine=ENGINE, chunks=chunks, widen=False)
    assert tree["square"].dtype == ml_dtypes.bfloat16 and tree["square"].values.tobytes() == bits(held["square"])
    wide = to_f32(tree)
    for name, array in variables(wide):
        whole = held[name]
        narrow = whole.is_floating_point() and whole.itemsize < 4
        assert array.dtype == (np.dtype(np.float32) if narrow else to_numpy(whole).dtype)
        assert (array.chunks is None) == (chunks is None or not array.ndim)
        equal(array.values, whole.float() if narrow else whole, name)
    assert float(wide["many"].sum()) == 3000 and float(wide["half"].sum()) == 180_000
    array = to_f32(tree["square"])
    assert array.name == "square" and array.attrs == tree["square"].attrs
    equal(array[::-2, [3, 1]].values, held["square"].float().flip(0)[::2][:, [3, 1]])
    assert to_f32(tree["ints"]).dtype == np.int16
    assert float(to_f32(tree["square"].variable).mean()) == 12


def bits(tensor: Tensor) -> bytes:
    return to_numpy(tensor.contiguous()).tobytes()


def test_to_f32_of_memory() -> None:
    held = xr.DataArray(np.arange(4).astype(ml_dtypes.bfloat16), dims="x", coords={"x": [1, 2, 3, 4]}, name="n")
    wide = to_f32(held)
    assert wide.dtype == np.float32 and wide.name == "n" and wide.x.values.tolist() == [1, 2, 3, 4]
    assert wide.sel(x=3).item() == 2


def test_parts_and_states_of_a_view(case: Case) -> None:
    view = lazyckpt.open(case.path)
    prefix = next(n for n in view if n.count(".") >= 2).split(".")[0]
    part = view[prefix]
    assert {n for n, _ in variables(part.to_xarray())} == {f"{prefix}.{n}" for n in part}
    name = next(iter(part))
    equal(part.to_xarray()[name.replace(".", "/")].values, case.truth[view.state][f"{prefix}.{name}"])
    for state in view.states:
        tree = view.states[state].to_xarray()
        assert tree.attrs["state"] == state
        assert {n for n, _ in variables(tree)} == set(case.truth[state])


def test_zarr_takes_it(tmp_path: Path) -> None:
    """What the engine opens goes through xarray's own writers: attributes and encodings are plain."""
    save_file({"l.0.w": torch.arange(12.0).view(3, 4), "l.0.b": torch.ones(3)}, tmp_path / "m.safetensors")
    tree = xr.open_datatree(tmp_path / "m.safetensors", engine=ENGINE)
    tree.to_zarr(tmp_path / "copy")
    again = xr.open_datatree(tmp_path / "copy", engine="zarr")
    assert again["l/0/w"].values.tolist() == tree["l/0/w"].values.tolist()
    assert again["l/0/w"].attrs["name"] == "l.0.w"


@pytest.mark.slow
def test_without_dask(tmp_path: Path) -> None:
    """xarray needs it for chunks only, and so do we."""
    save_file({"l.w": torch.arange(12.0).view(3, 4)}, tmp_path / "m.safetensors")
    program = f"""
import sys
sys.modules["dask"] = None
import lazyckpt, xarray as xr
from lazyckpt.engine import LazyckptBackend
view = lazyckpt.open({str(tmp_path / "m.safetensors")!r})
for tree in (view.to_xarray(), xr.open_datatree({str(tmp_path / "m.safetensors")!r}, engine=LazyckptBackend)):
    assert tree["l/w"][1, 2].item() == 6
for make in (lambda: view.to_xarray(chunks={{}}), view["l.w"].to_dask):
    try:
        make()
    except lazyckpt.DataError as e:
        assert "pip install 'lazyckpt[dask]'" in str(e), e
    else:
        raise AssertionError("no error")
"""
    done = processes.run("-c", program)
    assert done.returncode == 0, done.stderr
