"""The helpers for state dicts and devices, against huggingface_hub, safetensors and torch."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazyckpt
from lazyckpt.core.dtypes import FROM_SAFETENSORS, dtype_of
from lazyckpt.distributed import (
    empty_cache,
    get_device_type,
    get_dtype_size,
    get_shard_info,
    save_state_dict,
    synchronize,
)
from lazyckpt.testing.oracle import same

from .conftest import need
from .writers import Case
from .writers.dcp_contents import odd_tensors

# -- sizes of dtypes


def test_every_dtype_of_torch() -> None:
    dtypes = {name: d for name, d in vars(torch).items() if isinstance(d, torch.dtype)}
    for name, dtype in dtypes.items():
        small = str(dtype).removeprefix("torch.").removeprefix("u").removeprefix("int")
        if small in set("1234567"):
            size: float = int(small) / 8
        elif dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4):
            size = dtype.itemsize
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                size = torch.empty(1, dtype=dtype).element_size()
        assert get_dtype_size(dtype) == get_dtype_size(name) == get_dtype_size(f"torch.{name}") == size, name


def test_names_of_safetensors() -> None:
    for name, dtype in FROM_SAFETENSORS.items():
        assert get_dtype_size(name) == dtype.itemsize
    assert (get_dtype_size("F4"), get_dtype_size("F6_E3M2")) == (0.5, 0.75)
    assert isinstance(get_dtype_size("int8"), int) and get_dtype_size(torch.bool) == 1


@pytest.mark.parametrize("name", ["float31", "", "BF17", "numpy.float32", "torch.nn"])
def test_what_is_no_dtype(name: str) -> None:
    with pytest.raises(lazyckpt.DataError, match="is no dtype"):
        get_dtype_size(name)


# -- the plan of shards


def _models() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tied = nn.Linear(30, 20)
    sizes = [10, 300, 40, 7, 1000, 0, 64, 64, 1, 5]
    return {
        "mixed": {f"t{n}": torch.zeros(size, dtype=torch.int16) for n, size in enumerate(sizes)},
        "dtypes": {name: t.clone() for name, t in odd_tensors().items() if t.numel()},
        "tied": {"a": tied.weight, "b": torch.zeros(900), "c": torch.ones(50), "head": tied.weight, "z": tied.bias},
        "large": {"a": torch.zeros(10), "b": torch.zeros(5000), "c": torch.zeros(10), "d": torch.zeros(10)},
        "meta": {"a": torch.zeros(100, device="meta"), "b": torch.zeros(200, device="meta")},
        "empty": {},
    }


@pytest.mark.parametrize("model", _models())
@pytest.mark.parametrize("limit", [100, 700, 2000, "4KB", "5GB"])
@pytest.mark.parametrize("safe", [True, False])
def test_the_plan_is_that_of_huggingface_hub(model: str, limit: int | str, safe: bool) -> None:
    need("huggingface_hub")
    from huggingface_hub import split_torch_state_dict_into_shards

    state = _models()[model]
    pattern = "model{suffix}.safetensors" if safe else "pytorch_model{suffix}.bin"
    theirs = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=limit)
    sharded, total, places = get_shard_info(state, shard_size=limit, safe_serialization=safe)
    assert (sharded, total) == (theirs.is_sharded, theirs.metadata["total_size"])
    assert places == theirs.tensor_to_filename
    assert list(places) == list(state)


def test_another_dtype_to_save_in() -> None:
    state = {"w": torch.zeros(100), "ids": torch.zeros(10, dtype=torch.int64)}
    assert get_shard_info(state, "bfloat16").total_size == get_shard_info(state, torch.bfloat16).total_size == 280
    assert get_shard_info(state, torch.float64, 800).is_sharded and not get_shard_info(state, None, 800).is_sharded


def test_views_of_one_storage_are_tensors_of_their_own() -> None:
    base = torch.zeros(6, 4)
    state = {"q": base[:2], "k": base[2:4], "t": base.t(), "again": base[:2]}
    assert get_shard_info(state).total_size == 32 + 32 + 96


def test_the_plan_of_a_view(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    for case in (dcp_cases["fsdp2"], dcp_cases["odd"]):
        view = lazyckpt.open(case.path)
        truth = case.truth["weights"]
        for state in (view, dict(view), view.to("meta")):
            info = get_shard_info(state, shard_size=500)
            assert info.total_size == sum(t.numel() * t.itemsize for t in truth.values())
            assert info == get_shard_info({name: truth[name].clone() for name in view}, shard_size=500)
    base = nn.Linear(3, 3)
    torch.save({"a": base.weight, "b": base.weight, "c": base.bias}, tmp_path / "tied.pt")
    view = lazyckpt.open(tmp_path / "tied.pt")
    assert get_shard_info(view).total_size == get_shard_info(dict(view)).total_size == 36 + 12


def test_what_is_no_tensor_has_no_place() -> None:
    with pytest.raises(lazyckpt.DataError, match="'step' is a int"):
        get_shard_info({"step": 3})
    with pytest.raises(lazyckpt.DataError, match="holds nothing"):
        get_shard_info({}, shard_size=0)


# -- one file of a state dict


def _memory() -> dict[str, torch.Tensor]:
    base = torch.arange(3000.0).view(60, 50)
    return odd_tensors() | {
        "parameter": nn.Parameter(base.clone()),
        "sliced": base[5:50:3, ::7],
        "flipped": base.t(),
        "large": torch.randn(1500, 1100).t(),
        "large8": torch.randn(1100, 1500).to(torch.float8_e4m3fn).t(),
    }


def test_safetensors_of_memory(tmp_path: Path) -> None:
    need("safetensors")
    from safetensors import safe_open
    from safetensors.torch import load_file

    state = {name: t for name, t in _memory().items() if dtype_of(t.dtype).safetensors}
    del state["tied.two"]
    path = save_state_dict(state, tmp_path / "model.safetensors")
    read = load_file(path)
    assert set(read) == set(state)
    for name, tensor in state.items():
        same(read[name], tensor.detach().resolve_conj().resolve_neg(), name)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    need("safetensors")
    from safetensors.torch import load_model

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 30), nn.Linear(30, 40, bias=False)
            self.head.weight = self.embed.weight

    net = Net()
    for ending, safe in (("safetensors", True), ("bin", False)):
        path = save_state_dict(net.state_dict(), tmp_path / f"m.{ending}", safe)
        assert path.stat().st_size < 2 * 40 * 30 * 4
        view = lazyckpt.open(path)
        assert view.aliases == {"head.weight": "embed.weight"}
        same(view["head.weight"][...], net.embed.weight.detach(), ending)
    other = Net()
    load_model(other, tmp_path / "m.safetensors")
    same(other.head.weight.detach(), net.embed.weight.detach(), "as safetensors loads it")
    read = torch.load(tmp_path / "m.bin")
    assert read["head.weight"].data_ptr() == read["embed.weight"].data_ptr()


def test_torch_files_of_memory(tmp_path: Path) -> None:
    state = _memory()
    path = save_state_dict(OrderedDict(state), str(tmp_path / "model.bin"), safe_serialization=False)
    read = torch.load(path)
    for name, tensor in state.items():
        same(read[name], tensor.detach().resolve_conj().resolve_neg(), name)
    assert path.stat().st_size < sum(t.numel() * t.itemsize for t in state.values()) + 1024 * len(state)


@pytest.mark.parametrize("safe", [True, False])
def test_lazy_tensors_and_views(dcp_cases: dict[str, Case], tmp_path: Path, safe: bool) -> None:
    case = dcp_cases["tensor_parallel"]
    view = lazyckpt.open(case.path)
    truth = case.truth["weights"]
    mixed = {**view.select("*.weight"), "row": view["emb.weight"].lazy[2:4], "mine": torch.ones(3)}
    for state in (view, dict(view), mixed):
        path = save_state_dict(state, tmp_path / "x", safe)
        read = lazyckpt.open(path)
        assert set(read) == set(state)
        for name in state:
            expected = {"row": truth["emb.weight"][2:4], "mine": torch.ones(3)}.get(name, truth.get(name))
            same(read[name][...], expected, name)


@pytest.mark.parametrize("safe", [True, False])
def test_never_half_a_file(tmp_path: Path, safe: bool) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"what was there")
    for state, error in (
        ({"a": torch.ones(3), "b": torch.zeros(2, device="meta")}, lazyckpt.DataError),
        ({"a": torch.ones(3), "b": torch.eye(3).to_sparse()}, lazyckpt.DataError),
        ({"a": torch.ones(3), "b": 3}, lazyckpt.DataError),
        ({"a": torch.ones(3), "b\udc00": torch.ones(3)}, lazyckpt.DataError),
    ):
        with pytest.raises(error):
            save_state_dict(state, path, safe)
    with (
        mock.patch("lazyckpt.jobs.write.write_at", side_effect=OSError(28, "No space left on device")),
        pytest.raises(lazyckpt.DestinationError, match="No space left"),
    ):
        save_state_dict({"a": torch.ones(3)}, path, safe)
    assert path.read_bytes() == b"what was there" and os.listdir(tmp_path) == ["model"]
    save_state_dict({"a": torch.ones(3)}, path, safe)
    view = lazyckpt.open(path)
    with pytest.raises(lazyckpt.DestinationError, match="is read"):
        save_state_dict(view, path, safe)
    with pytest.raises(lazyckpt.DestinationError, match="folder"):
        save_state_dict(view, tmp_path, safe)
    same(view["a"][...], torch.ones(3), "still there")


def test_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.DataError, match="complex128"):
        save_state_dict({"a": torch.ones(3, dtype=torch.complex128)}, tmp_path / "x.safetensors")


@pytest.fixture(params=[1, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one of so many ranks, the others of which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def test_dtensors(ranks: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.randn(8, 5)
    same_everywhere = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    part = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
    assert get_shard_info({"s": part, "t": part, "r": same_everywhere}).total_size == (ranks + 1) * whole.nbytes
    save_state_dict({"r": same_everywhere}, tmp_path / "x.safetensors")
    same(lazyckpt.open(tmp_path / "x.safetensors")["r"][...], whole, "replicated")
    if ranks == 1:
        save_state_dict({"s": part}, tmp_path / "y.safetensors")
        same(lazyckpt.open(tmp_path / "y.safetensors")["s"][...], whole, "on one rank")
    else:
        with pytest.raises(lazyckpt.DataError, match=r"'s' is a DTensor spread over \(4,\).*gather"):
            save_state_dict({"s": part}, tmp_path / "y.safetensors")
        assert not (tmp_path / "y.safetensors").exists()


# -- devices


def test_nothing_happens_on_the_cpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    assert get_device_type() == "cpu"
    synchronize(), empty_cache()


@pytest.mark.parametrize("known", [True, False])
def test_whatever_accelerator_there_is(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    calls: list[str] = []
    fake: Any = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: calls.append("synchronize"),
        empty_cache=lambda: calls.append("empty_cache"),
    )
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: known)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device_type() == "npu"
    synchronize(), empty_cache()
    assert calls == ["synchronize", "empty_cache"]
    del fake.empty_cache
    empty_cache()
