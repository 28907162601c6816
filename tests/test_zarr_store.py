"""A view as a zarr store: what zarr, xarray and Dask read through it is what the writer held."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

import lazyckpt
from lazyckpt.core.dtypes import to_numpy
from lazyckpt.formats.zarr.documents import NAMES, component, paths
from lazyckpt.interop.zarr_store import ViewStore
from lazyckpt.io.plain_json import decode
from lazyckpt.testing.contract import open_case
from lazyckpt.testing.counting import opened

from .conftest import DCP_FEW, DCP_NAMES, TORCH, TORCH_FEW, ZERO_FEW, ZERO_KINDS, complete
from .lanes import sampled
from .writers import Case

DCP = ("ddp_dp4_adamw", "fsdp2_dp3_uneven")


def nodes(view: lazyckpt.CheckpointView) -> dict[str, lazyckpt.LazyTensor]:
    """Path in the hierarchy -> tensor."""
    found = {}
    for state, part in view.states.items():
        tensors, _ = part.once()
        tensors = {name: t for name, t in tensors.items() if t.spec.dtype in NAMES}
        found |= {f"{component(state)}/{path}": tensors[name] for name, path in paths(tensors).items()}
    return found


def equal(got: Any, want: torch.Tensor, what: object) -> None:
    array, truth = np.asarray(got), to_numpy(want)
    assert (array.dtype, array.shape) == (truth.dtype, truth.shape), what
    assert array.tobytes() == truth.tobytes(), what


def check(case: Case) -> None:
    """Every array of every state, through zarr; some through xarray and Dask."""
    import dask.array
    import xarray

    view = open_case(case)
    store = ViewStore(view)
    root = zarr.open(store)
    about = root.attrs["lazyckpt"]
    assert (about["format"], about["states"], about["state"]) == (view.format, list(view.states), view.state)
    assert (
        about["mesh"] == view.mesh.__dict__ if hasattr(view.mesh, "__dict__") else about["mesh"]["tp"] == view.mesh.tp
    )
    assert decode(about["meta"]).keys() == view.meta.keys()
    assert about["aliases"].items() <= dict(view.aliases).items()
    there = nodes(view)
    told = {path: node.attrs["lazyckpt"]["name"] for path, node in root.members(None) if isinstance(node, zarr.Array)}
    assert told == {path: t.name for path, t in there.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xarray.open_datatree(store, engine="zarr")
        lazy = xarray.open_datatree(store, engine="zarr", chunks={})
    for n, (path, t) in enumerate(there.items()):
        truth = case.truth[path.split("/")[0]][t.name]
        equal(root[path][...], truth, path)
        if t.ndim:
            equal(root[path][1::2], truth[1::2], path)
        equal(tree[path].values, truth, path)
        if n % 5 == 0:
            equal(lazy[path].values, truth, path)
            equal(dask.array.from_zarr(root[path]).compute(), truth, path)


@pytest.mark.slow
@pytest.mark.parametrize("torch_save_case", sampled(TORCH, TORCH_FEW), indirect=True)
def test_files_of_torch(torch_save_case: Case) -> None:
    pytest.importorskip("dask")
    check(torch_save_case)


@pytest.mark.slow
@pytest.mark.parametrize("zero_kind", sampled(ZERO_KINDS, ZERO_FEW), indirect=True)
def test_deepspeed(zero_kind: Case) -> None:
    check(complete(zero_kind))


@pytest.mark.slow
@pytest.mark.parametrize("dcp_case", sampled(DCP_NAMES, DCP_FEW), indirect=True)
def test_distributed_checkpoints(dcp_case: Case) -> None:
    check(dcp_case)


@pytest.mark.slow
def test_hugging_face(huggingface_case: Case) -> None:
    check(huggingface_case)


@pytest.mark.slow
def test_megatron(megatron_kind: Case) -> None:
    check(megatron_kind)


# -- the store itself


@pytest.fixture
def view(tmp_path: Path) -> lazyckpt.CheckpointView:
    """Two states, a tied name, an edge chunk, an array beside tensors below it, a scalar, an empty tensor."""
    torch.manual_seed(0)
    model = {
        "up.weight": torch.randn(70, 5).bfloat16(),
        "up.weight.scale": torch.randn(3).to(torch.float8_e4m3fn),
        "a.c.0": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "big": torch.randn(1500, 1000, dtype=torch.float64),
        "odd": torch.zeros(2, dtype=torch.complex32),
    }
    model["tied"] = model["big"]
    torch.save(model, tmp_path / "m.pt")
    return lazyckpt.open(tmp_path / "m.pt")


def get(store: ViewStore, key: str, wanted: Any = None) -> bytes | None:
    found = asyncio.run(store.get(key, default_buffer_prototype(), wanted))
    return None if found is None else found.to_bytes()


def listed(iterator: Any) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in iterator]

    return asyncio.run(collect())


def test_keys_ranges_and_sizes(view: lazyckpt.CheckpointView) -> None:
    store = ViewStore(view)
    keys = listed(store.list())
    assert len(set(keys)) == len(keys)
    assert {"zarr.json", "weights/zarr.json", "weights/a/c/0/c", "weights/up/weight/%/zarr.json"} <= set(keys)
    assert not any(key.startswith("weights/none/c") for key in keys)
    for key in keys:
        whole = get(store, key)
        assert whole is not None and asyncio.run(store.exists(key)) and asyncio.run(store.getsize(key)) == len(whole)
        assert get(store, key, RangeByteRequest(1, 4)) == whole[1:4]
        assert get(store, key, OffsetByteRequest(2)) == whole[2:]
        assert get(store, key, SuffixByteRequest(3)) == whole[-3:]
        assert get(store, key, SuffixByteRequest(len(whole) + 9)) == whole
        folder, _, name = key.rpartition("/")
        assert name in listed(store.list_dir(folder)) and key in listed(store.list_prefix(folder))
    pieces = [key for key in keys if key.startswith("weights/big/c/")]
    assert len(pieces) > 1, "no chunk takes more than 4 MiB"
    assert len({len(get(store, key) or b"") for key in pieces}) == 1, "the last one is filled up"
    wrong = ("", "weights", "nothing/zarr.json", "weights/big/c/99/0", "weights/big/c/0", "weights/big/c/00/0", "c/0")
    for key in (*wrong, "weights/none/c/0/0", "weights/big/c/0/0/0", "weights/big/c/-1/0", "weights/flags/c"):
        assert get(store, key) is None and not asyncio.run(store.exists(key)), key
        with pytest.raises(FileNotFoundError):
            asyncio.run(store.getsize(key))
    assert listed(store.list_dir("nothing")) == listed(store.list_dir("weights/big/c/99")) == []
    got = asyncio.run(store.get_partial_values(default_buffer_prototype(), [("zarr.json", None), ("x", None)]))
    assert got[0] is not None and got[1] is None


def test_values_and_what_is_left_out(view: lazyckpt.CheckpointView) -> None:
    root = zarr.open_group(ViewStore(view), mode="r")
    for path, t in nodes(view).items():
        equal(root[path][...], t[...], path)
    assert root["weights/up/weight/%"].dtype.name == "bfloat16"
    assert "weights/odd" not in root
    assert any("odd" in line and "complex32" in line for line in root.attrs["lazyckpt"]["problems"])
    assert root.attrs["lazyckpt"]["aliases"] == {"tied": "big"}


def test_parts_and_other_states(torch_cases: dict[str, Case]) -> None:
    case = torch_cases["training"]
    view = open_case(case)
    moments = zarr.open_group(ViewStore(view.states["exp_avg"]), mode="r")
    assert list(moments) == ["exp_avg"]
    name = next(iter(case.truth["exp_avg"]))
    equal(moments[f"exp_avg/{name.replace('.', '/')}"][...], case.truth["exp_avg"][name], name)
    part = zarr.open_group(ViewStore(view.select(name)), mode="r")
    assert sorted(part) == sorted(view.states)
    assert len([n for _, n in part["weights"].members(None) if isinstance(n, zarr.Array)]) == 1
    stored = zarr.open_group(ViewStore(view.stored), mode="r")
    assert list(stored) == ["stored"]


def test_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    names = ["z", "b.w", "a", "b.c.w", "b.a"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "m.pt")
    root = zarr.open_group(ViewStore(lazyckpt.open(tmp_path / "m.pt")), mode="r")
    assert list(root["weights"]) == ["z", "b", "a"] and list(root["weights/b"]) == ["w", "c", "a"]


def test_it_is_for_reading_only(view: lazyckpt.CheckpointView) -> None:
    store = ViewStore(view)
    assert store.read_only and not store.supports_writes and store.supports_listing
    with pytest.raises(ValueError, match="read"):
        zarr.open_group(store, mode="r")["weights/flags"][0] = False
    buffer = default_buffer_prototype().buffer.from_bytes(b"x")
    for do in (store.set("zarr.json", buffer), store.delete("zarr.json"), store.delete_dir("")):
        with pytest.raises(ValueError, match="for reading only"):
            asyncio.run(do)
    with pytest.raises(ValueError, match="read-only"):
        store.with_read_only(False)
    assert store.with_read_only(True) == store


def test_it_pickles_compares_and_shows(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    from dask.base import tokenize

    store = ViewStore(view)
    again = pickle.loads(pickle.dumps(store))
    assert again == store and hash(again) == hash(store)
    other = ViewStore(lazyckpt.open(tmp_path / "m.pt", cache=False))
    assert other == store and other is not store
    assert ViewStore(view.select("up.*")) != store and store != "x"
    assert str(tmp_path) in repr(store) and "arrays" in repr(store)
    assert tokenize(store) == tokenize(again)
    array = pickle.loads(pickle.dumps(zarr.open_group(store, mode="r")["weights/big"]))
    equal(array[3:5], view["big"][3:5], "an array travels, too")


def test_any_number_of_threads(view: lazyckpt.CheckpointView) -> None:
    array = zarr.open_group(ViewStore(view), mode="r")["weights/big"]
    truth = view["big"].numpy()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: np.array_equal(array[n::7], truth[n::7]), range(16)))


@pytest.mark.slow
def test_another_process(view: lazyckpt.CheckpointView) -> None:
    """What Dask's workers do: the store travels, the bytes are read there."""
    import dask.array
    import dask.config

    array = dask.array.from_zarr(zarr.open_group(ViewStore(view), mode="r")["weights/big"])
    with dask.config.set(scheduler="processes", num_workers=2):
        assert float(array.sum().compute()) == pytest.approx(float(view["big"][...].sum()))


# -- what a slice touches


@pytest.mark.slow
@pytest.mark.parametrize("dcp_case", sampled(DCP_NAMES, DCP_FEW), indirect=True)
def test_a_slice_touches_its_own_files_only(dcp_case: Case) -> None:
    view, counts = opened(dcp_case.path)
    store = ViewStore(view)
    root = zarr.open_group(store, mode="r")
    for path, t in nodes(view).items():
        if not t.numel() or t.ndim == 0:
            continue
        array = root[path]
        t[...]  # where archives lie is looked up once
        for start in {0, t.shape[0] // 2, t.shape[0] - 1}:
            counts.clear()
            t[start]
            least = counts.paths
            counts.clear()
            array[start]
            assert counts.paths == least, (path, start)


def test_opening_and_listing_read_nothing(dcp_cases: dict[str, Case]) -> None:
    view, counts = opened(next(c for n, c in dcp_cases.items() if n != "unknown_codec").path)
    counts.clear()
    root = zarr.open_group(ViewStore(view), mode="r")
    assert [node.shape for _, node in root.members(None) if isinstance(node, zarr.Array)]
    assert counts.requests == 0


@pytest.mark.slow
def test_missing_file_is_an_error_not_zeros(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    import dask.array
    import xarray

    case = zero_cases["zero3_fp32_dp4"]
    shutil.copytree(case.path, tmp_path / "ckpt")
    (lost,) = (tmp_path / "ckpt").rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    lost.unlink()
    view = lazyckpt.open(tmp_path / "ckpt")
    store = ViewStore(view)
    root = zarr.open_group(store, mode="r")
    tree = xarray.open_datatree(store, engine="zarr")
    fine = broken = 0
    for path, t in nodes(view).items():
        truth = case.truth.get(path.split("/")[0], {}).get(t.name)
        if truth is None or not t.ndim:
            continue
        for n in range(len(t)):
            try:
                want = t[n]
            except lazyckpt.MissingFileError:
                broken += 1
                with pytest.raises(lazyckpt.MissingFileError, match="rank_1"):
                    root[path][n]
                with pytest.raises(lazyckpt.MissingFileError):
                    tree[path][n].values  # noqa: B018
                with pytest.raises(lazyckpt.MissingFileError):
                    dask.array.from_zarr(root[path])[n].compute()
                break
            # a chunk may reach into the next rank's rows; far from them everything reads
            try:
                equal(root[path][n], want, (path, n))
                fine += 1
            except lazyckpt.MissingFileError:
                assert len(t) > 64 or t.ndim > 1
    assert fine > 10 and broken > 1


def test_documents_are_what_zarr_writes(view: lazyckpt.CheckpointView) -> None:
    store = ViewStore(view)
    for path in nodes(view):
        document = json.loads(get(store, f"{path}/zarr.json") or b"")
        array = zarr.open_group(store, mode="r")[path]
        assert array.metadata.dimension_names == tuple(document["dimension_names"])
        assert array.metadata.to_dict()["shape"] == tuple(document["shape"])


def test_one_element_of_many() -> None:
    """Torch calls it contiguous, whatever its stride: then its bytes are no view of it."""
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        for part in (torch.ones(3, 4).to(dtype)[1::2, :1], torch.ones(2).to(dtype)[1::2]):
            assert to_numpy(part).shape == tuple(part.shape)


def test_no_key_begins_with_a_slash(view: lazyckpt.CheckpointView) -> None:
    store = ViewStore(view)
    for key in ("/zarr.json", "//zarr.json", "/weights/zarr.json", "/weights/a/c/0/c", "weights//zarr.json"):
        assert get(store, key) is None and not asyncio.run(store.exists(key)), key
        with pytest.raises(FileNotFoundError):
            asyncio.run(store.getsize(key))


def test_store_interface_of_zarr(view: lazyckpt.CheckpointView) -> None:
    store = ViewStore(view)
    again = pickle.loads(pickle.dumps(store))
    assert store == again and store.read_only and not store.supports_writes and not store.supports_deletes
    keys = listed(store.list())
    assert not any(key.startswith("/") for key in keys) and len(set(keys)) == len(keys)
    assert set(keys) == set(listed(store.list_prefix("")))
    for prefix in ("weights/", "weights/a", "weights/up/weight", "none/"):
        assert set(listed(store.list_prefix(prefix))) == {key for key in keys if key.startswith(prefix)}, prefix
    for folder in ("", "weights", "weights/", "weights/up"):
        start = f"{folder.strip('/')}/" if folder else ""
        wanted = {key[len(start) :].split("/")[0] for key in keys if key.startswith(start)}
        found = listed(store.list_dir(folder))
        assert set(found) == wanted and len(found) == len(wanted), folder
    with pytest.raises(ValueError, match="read-only"):
        store.with_read_only(False)
    with store:
        assert asyncio.run(store.is_empty("nothing")) and not asyncio.run(store.is_empty(""))
