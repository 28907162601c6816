"""What asks a lazy tensor for a truth value, one element or a comparison: it answers as torch, or refuses unread."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.testing.counting import Counts, opened

from . import processes

HELD = {
    "f32": torch.arange(12.0).view(3, 4),
    "bf16": torch.linspace(-1, 1, 12).view(3, 4).bfloat16(),
    "f8": torch.linspace(-1, 1, 12).view(3, 4).to(torch.float8_e4m3fn),
    "i64": torch.arange(12).view(3, 4),
    "one": torch.tensor([[5.0]]),
    "zero": torch.tensor(0.0),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def held(tmp_path: Path) -> tuple[lazyckpt.CheckpointView, Counts]:
    save_file(HELD, tmp_path / "x.safetensors")
    view, counts = opened(tmp_path / "x.safetensors")
    counts.clear()
    return view, counts


def test_many_elements_are_refused_unread(held: tuple[lazyckpt.CheckpointView, Counts]) -> None:
    view, counts = held
    for name in ("f32", "bf16", "none"):
        for ask in (bool, lazyckpt.LazyTensor.item, operator.not_):
            with pytest.raises(lazyckpt.DataError) as error:
                ask(view[name])
            assert isinstance(error.value, RuntimeError), "as torch's"
    assert counts.requests == 0


def test_one_element_is_read_alone(held: tuple[lazyckpt.CheckpointView, Counts]) -> None:
    view, counts = held
    assert view["one"].item() == 5 and bool(view["one"]) and not view["zero"]
    assert counts.bytes == 3 * 4
    counts.clear()
    assert view["f32"].lazy[2, 3].item() == 11
    assert counts.bytes == 4


@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge])
def test_comparisons_are_of_elements(held: tuple[lazyckpt.CheckpointView, Counts], compare: Any) -> None:
    view, _ = held
    for name in ("f32", "bf16", "f8", "i64", "one", "none"):
        t, whole = view[name], HELD[name]
        wide = whole.float() if name == "f8" else whole
        others = [0, True, 0.5, torch.zeros(()), torch.full(whole.shape, 2), np.float32(0.5), [0], np.ones(whole.shape)]
        for other in others:
            want = compare(wide, torch.as_tensor(other) if isinstance(other, list | np.ndarray | np.generic) else other)
            got = compare(t, other)
            assert got.dtype == torch.bool and torch.equal(got, want), (name, other)
        assert torch.equal(compare(t, t), compare(wide, wide))
        assert torch.equal(compare(t, view["one"]), compare(wide, HELD["one"]))
    assert torch.equal(compare(0, view["f32"]), compare(0, HELD["f32"]))
    assert np.array_equal(compare(np.ones((3, 4)), view["f32"]), compare(np.ones((3, 4)), HELD["f32"].numpy()))
    narrow = np.asarray(view["bf16"])
    assert narrow.dtype == ml_dtypes.bfloat16
    assert torch.equal(compare(view["bf16"], narrow), compare(HELD["bf16"], HELD["bf16"]))


def test_what_cannot_be_compared_is_refused_unread(held: tuple[lazyckpt.CheckpointView, Counts]) -> None:
    view, counts = held
    with pytest.raises(lazyckpt.DataError):
        _ = view["f32"] == view["f32"].lazy[:2]
    assert view["f32"] not in (None, "f32") and view["f32"] != "f32"
    with pytest.raises(TypeError):
        _ = view["f32"] < "f32"
    assert counts.requests == 0


def test_tensors_are_found_as_the_objects_that_they_are(held: tuple[lazyckpt.CheckpointView, Counts]) -> None:
    view, counts = held
    a, b = view["f32"], view["bf16"]
    assert {a: 1, b: 2}[b] == 2 and len({a, b, a}) == 2 and hash(a) == hash(a)
    assert a in [a, b] and a in (a,) and [a, b].index(a) == 0
    assert view["f32"] is a
    assert counts.requests == 0
    assert 11.0 in a and 12.0 not in a


@pytest.mark.slow
def test_shapes_that_numpy_has_not(tmp_path: Path) -> None:
    """Without elements a dimension may be of any length: in torch, not in numpy."""
    shapes = {"a": (0, 1 << 59), "b": (1 << 40, 0, 1 << 20)}
    torch.save({name: torch.empty(shape) for name, shape in shapes.items()}, tmp_path / "x.pt")
    code = f"""
import lazyckpt, numpy as np, resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
view = lazyckpt.open({str(tmp_path / "x.pt")!r})
view.stats(), view.stats(bins=4), view.to_xarray(), repr(view), view.to()
for t in view.values():
    assert t.stats().count == 0 and t.stats(bins=3).count == 0 and tuple(t[...].shape) == tuple(t.shape)
    for make in (t.numpy, lambda: np.asarray(t), lambda: np.sum(t), lambda: t.to_dask().shape):
        try:
            make()
        except lazyckpt.LazyckptError:
            pass
"""
    done = processes.run("-c", code)
    assert done.returncode == 0, done.stderr
    save_file({"x": torch.zeros(0, 1)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes().replace(b'"shape":[0,1]', b'"shape":[0,2305843009213693952]')
    start = data.index(b"{")
    header = data[start:].rstrip()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    t = lazyckpt.open(tmp_path / "x.safetensors")["x"]
    assert t.stats().count == 0
    with pytest.raises(lazyckpt.LazyckptError):
        t.numpy()


def test_dtypes_that_torch_cannot_convert_are_refused_unread(tmp_path: Path) -> None:
    held = {
        "bits8": torch.arange(64, dtype=torch.uint8).view(torch.bits8),
        "bits16": torch.arange(64, dtype=torch.uint8).view(torch.bits16),
        "c32": torch.ones(4, dtype=torch.complex64).to(torch.complex32) * (1 + 2j),
        "u16": torch.tensor([1, 60000], dtype=torch.uint16),
        "u64": torch.tensor([1, 60000], dtype=torch.uint64),
    }
    torch.save(held, tmp_path / "x.pt")
    view, counts = opened(tmp_path / "x.pt")
    counts.clear()
    for name in ("bits8", "bits16"):
        for convert in (
            lambda t: t.to(torch.float32), lambda t: t.to(dtype=torch.float32), lambda t: t.to("cpu", torch.uint8),
            lambda t: t.to(torch.float32, copy=False), lambda t: t.astype(torch.float32),
        ):  # fmt: skip
            with pytest.raises(lazyckpt.DataError):
                convert(view[name])
    assert counts.requests == 0
    assert view["bits8"].to(torch.bits8).view(torch.uint8).tolist() == list(range(64))
    with pytest.raises(lazyckpt.DataError) as error:
        view["c32"].numpy()
    assert "complex64" in str(error.value) and "float32" not in str(error.value), "float32 has no imaginary part"
    assert view["c32"].to(torch.complex64).numpy().tolist() == [1 + 2j] * 4
    with pytest.raises(lazyckpt.DataError) as error:
        view["bits8"].numpy()
    assert "float32" not in str(error.value), "that is refused as well"
    for compare in (lambda: view["bits8"] == 0, lambda: view["c32"] < 1, lambda: view["u64"] < 2):
        with pytest.raises(lazyckpt.DataError):
            compare()
    assert (view["u16"] > 1).tolist() == [False, True] and (view["u64"] == 60000).tolist() == [False, True]
