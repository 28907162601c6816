"""A lazy tensor among torch's functions, numpy and DLPack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

import lazyckpt
from lazyckpt import CheckpointView, LazyTensor
from lazyckpt.testing.oracle import as_ints, same

from .writers import Case


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return {
        "a": torch.randn(4, 6, generator=g),
        "b": torch.randn(4, 6, generator=g),
        "bias": torch.randn(4, generator=g),
        "bf16": torch.randn(3, 5, generator=g).bfloat16(),
        "fp8": torch.randn(3, 5, generator=g).to(torch.float8_e4m3fn),
        "long": torch.arange(12).view(3, 4),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "conj": torch.randn(3, 2, dtype=torch.complex64, generator=g).conj(),
    }


@pytest.fixture
def view(truth: dict[str, torch.Tensor], tmp_path: Path) -> CheckpointView:
    torch.save(truth, tmp_path / "x.pt")
    return lazyckpt.open(tmp_path / "x.pt")


# -- torch


def test_torch_functions(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    a, b, bias = view["a"], view["b"], view["bias"]
    ta, tb, x = truth["a"], truth["b"], torch.randn(2, 6)
    cases: list[tuple[Any, Any]] = [
        (torch.cat([a, b]), torch.cat([ta, tb])),
        (torch.cat([a, tb], dim=1), torch.cat([ta, tb], dim=1)),
        (torch.cat((ta, b)), torch.cat((ta, tb))),
        (torch.stack([a, b]), torch.stack([ta, tb])),
        (x @ a.to().t(), x @ ta.t()),
        (x.t() @ a.to()[:2], x.t() @ ta[:2]),
        (torch.ones(3, 4) @ a, torch.ones(3, 4) @ ta),
        (torch.matmul(torch.ones(3, 4), a), torch.ones(3, 4) @ ta),
        (torch.nn.functional.linear(x, a, bias), torch.nn.functional.linear(x, ta, truth["bias"])),
        (torch.nn.functional.linear(x, weight=a, bias=bias), torch.nn.functional.linear(x, ta, truth["bias"])),
        (torch.add(a, 1), ta + 1),
        (ta + a, ta + ta),
        (ta * b, ta * tb),
        (torch.where(ta > 0, a, b), torch.where(ta > 0, ta, tb)),
        (torch.einsum("ij,kj->ik", a, b), torch.einsum("ij,kj->ik", ta, tb)),
        (torch.sum(a), ta.sum()),
        (torch.sum(a, dim=0, keepdim=True), ta.sum(dim=0, keepdim=True)),
        (torch.max(a, dim=1).indices, ta.max(dim=1).indices),
        (torch.linalg.norm(a), torch.linalg.norm(ta)),
        (torch.clone(a), ta),
        (torch.split(a, 2)[1], ta[2:]),
        (torch.empty_like(a).fill_(3), torch.full((4, 6), 3.0)),
        (torch.flatten(a), ta.flatten()),
    ]
    for n, (got, want) in enumerate(cases):
        assert type(got) is torch.Tensor, n
        same(got, want, n)
    assert torch.equal(a, ta) and torch.equal(ta, a) and not torch.equal(a, b)
    assert torch.allclose(a, ta) and torch.is_tensor(a[...])
    torch.testing.assert_close(a.to(), ta)


def test_torch_writes_into_its_own_tensors(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    out = torch.zeros(4, 6)
    out.copy_(view["a"])
    same(out, truth["a"], "copy_")
    out.add_(view["b"])
    same(out, truth["a"] + truth["b"], "add_")
    torch.add(view["a"], view["b"], out=out)
    same(out, truth["a"] + truth["b"], "out=")
    out[1:3] = view["a"][1:3]
    same(out[1:3], truth["a"][1:3], "part")


def test_gradients_flow_past_it(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    grads: list[torch.Tensor] = []
    for weight in (view["a"], truth["a"]):
        x = torch.ones(3, 4, requires_grad=True)
        (x @ weight).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        grads.append(x.grad)
    same(grads[0], grads[1], "grad")
    assert not view["a"].requires_grad and not view["a"][...].requires_grad


def test_python_values(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    assert view["scalar"].item() == 2.5
    assert view["a"].tolist() == truth["a"].tolist()
    assert view["bias"].lazy[2].item() == truth["bias"][2].item()
    assert len(view["a"]) == 4
    rows = list(view["a"])
    assert len(rows) == 4
    for got, want in zip(rows, truth["a"], strict=True):
        same(got, want, "row")
    with pytest.raises(TypeError):
        list(view["scalar"])
    assert bool(view["scalar"])
    with pytest.raises(RuntimeError):
        bool(view["a"])


def test_shape_and_size(view: CheckpointView) -> None:
    a: LazyTensor = view["a"]
    assert isinstance(a.shape, torch.Size)
    assert (a.size(), a.size(1), a.dim(), a.ndim, a.numel(), a.nbytes) == (torch.Size([4, 6]), 6, 2, 2, 24, 96)


# -- numpy


def test_numpy_has_the_same_bits(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    dtypes = {"a": np.float32, "long": np.int64, "bool": np.bool_, "scalar": np.float64, "conj": np.complex64}
    for name, dtype in (dtypes | {"bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}).items():
        for array in (view[name].numpy(), np.asarray(view[name]), np.array(view[name])):
            assert isinstance(array, np.ndarray)
            assert (array.dtype, array.shape) == (np.dtype(dtype), tuple(truth[name].shape)), name
            assert array.tobytes() == as_ints(truth[name]).contiguous().numpy().tobytes(), name


def test_numpy_of_every_dtype(torch_cases: dict[str, Case]) -> None:
    case = torch_cases["flat"]
    for name, t in lazyckpt.open(case.path).items():
        whole = case.truth["weights"][name]
        if whole.dtype in (torch.complex32, torch.float4_e2m1fn_x2):
            with pytest.raises(lazyckpt.DataError, match="numpy"):
                t.numpy()
        else:
            array = t.numpy()
            assert array.shape == tuple(whole.shape) and array.itemsize == whole.element_size()
            assert array.tobytes() == as_ints(whole).contiguous().numpy().tobytes(), name


def test_numpy_converts_when_asked(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    wide = np.asarray(view["bf16"], dtype=np.float32)
    assert wide.dtype == np.float32 and np.array_equal(wide, truth["bf16"].float().numpy())
    assert np.asarray(view["long"], dtype=np.int8).tolist() == truth["long"].tolist()
    with pytest.raises(ValueError, match="copy"):
        np.asarray(view["a"], copy=False)
    assert np.asarray(view["a"], copy=True).tolist() == truth["a"].tolist()
    assert np.array_equal(
        np.matmul(np.ones((2, 4), np.float32), view["a"]), np.ones((2, 4), np.float32) @ truth["a"].numpy()
    )
    assert np.asarray(view["a"].lazy[::-1, 2]).tolist() == truth["a"].flip(0)[:, 2].tolist()


def test_numpy_arrays_are_yours(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    for name in ("a", "bf16"):
        for array in (view[name].numpy(), np.asarray(view[name])):
            array[...] = 0
            same(view[name][...], truth[name], name)


# -- DLPack


def test_dlpack(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    for name in ("a", "long", "bf16", "scalar"):
        same(from_dlpack(view[name]), truth[name], name)
    assert np.from_dlpack(view["a"]).tolist() == truth["a"].tolist()
    assert np.from_dlpack(view["long"].lazy[1:, ::2]).tolist() == truth["long"][1:, ::2].tolist()
    mine = from_dlpack(view["a"])
    mine.fill_(0)
    same(view["a"][...], truth["a"], "after writing")
    assert view["a"].__dlpack_device__() == torch.zeros(1).__dlpack_device__()
