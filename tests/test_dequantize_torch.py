"""Quantized tensors of torch: `view.dequantize()` has what `Tensor.dequantize` has, bit for bit, also of a part."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import lazyckpt

from .writers import bit_equal

CODES = (torch.qint8, torch.quint8, torch.qint32)


@pytest.fixture(scope="module")
def held() -> dict[str, torch.Tensor]:
    x = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0))
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        for kind in CODES:
            zero = 0 if kind is torch.qint8 else 3
            found[f"{kind}.tensor"] = torch.quantize_per_tensor(x, 0.0371, zero, kind)
            for axis in range(3):
                n = x.shape[axis]
                scales, zeros = torch.linspace(0.011, 0.093, n, dtype=torch.float64), torch.arange(n) % 3
                found[f"{kind}.channel{axis}"] = torch.quantize_per_channel(x, scales, zeros, axis, kind)
    return found


@pytest.mark.parametrize("outer", [False, True])
def test_values_are_those_of_torch(outer: bool, held: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tree = {"model": {"plain": torch.ones(3), **held}} if outer else {"plain": torch.ones(3), **held}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(tree, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    assert all(bit_equal(view[name][...], tensor.int_repr()) for name, tensor in held.items())
    values = view.dequantize(torch.float32)
    assert set(values) == set(tree["model"] if outer else tree)
    half = view.dequantize(torch.bfloat16)
    for name, tensor in held.items():
        assert bit_equal(values[name][...], tensor.dequantize()), name
        assert bit_equal(values[name][1:5:2, 3, -4:], tensor.dequantize()[1:5:2, 3, -4:]), name
        assert bit_equal(half[name][...], tensor.dequantize().bfloat16()), name


def test_packed_weights_of_torchscript(tmp_path: Path) -> None:
    """What the modules hold, which pack the scales of linear layers as float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv, linear = torch.ao.nn.quantized.Conv2d(3, 4, 2), torch.ao.nn.quantized.Linear(5, 6)
        for module, shape in ((conv, (4, 3, 2, 2)), (linear, (6, 5))):
            scales, zeros = torch.linspace(0.01, 0.05, shape[0]).double(), torch.zeros(shape[0], dtype=torch.int64)
            module.set_weight_bias(
                torch.quantize_per_channel(torch.randn(shape), scales, zeros, 0, torch.qint8), torch.randn(shape[0])
            )
        torch.jit.save(torch.jit.script(torch.nn.Sequential(conv, torch.nn.Flatten(), linear)), tmp_path / "m.pt")
    values = lazyckpt.open(tmp_path / "m.pt").dequantize(torch.float32)
    assert bit_equal(values["0.weight"][...], conv.weight().dequantize())
    assert bit_equal(values["2._packed_params._packed_params.0"][...], linear.weight().dequantize())
    assert bit_equal(values["0.bias"][...], conv.bias().detach())
