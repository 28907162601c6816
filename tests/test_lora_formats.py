"""Adapters in models that were never converted: ZeRO-3, DCP and Megatron; and the operations of adapters, in parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.dtypes import dtype_of
from lazyckpt.core.expr import make
from lazyckpt.testing import opened

from .lanes import rounds
from .test_dequantize_ops import array, check_parts
from .writers import Case

RANK, ALPHA = 3, 5.0
SCALE = ALPHA / RANK


def adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write an adapter of PEFT for these matrices, by the names of their modules; return B and A."""
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    state: dict[str, torch.Tensor] = {}
    for module, (rows, columns) in shapes.items():
        b, a = torch.randn(rows, RANK, generator=generator), torch.randn(RANK, columns, generator=generator)
        pairs[module] = b, a
        state |= {f"base_model.model.{module}.lora_B.weight": b, f"base_model.model.{module}.lora_A.weight": a}
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return pairs


def check(view: lazyckpt.CheckpointView, folder: Path) -> None:
    """The whole, and slices, of every second matrix with an adapter; the other tensors are those of the base."""
    owners = [name for name in view if name.endswith(".weight") and name not in view.aliases]
    matrices = [name for name in owners if view[name].ndim == 2][::2]
    assert matrices
    pairs = adapter(folder, {name.removesuffix(".weight"): tuple(view[name].shape) for name in matrices})
    changed = lazyckpt.apply_lora(view, folder)
    assert set(changed) == set(view) and changed.problems == view.problems
    for name, t in view.items():
        base, found = t[...], changed[name][...]
        owner = view.aliases.get(name, name)
        if owner not in matrices:
            assert torch.equal(found, base), name
            continue
        b, a = pairs[owner.removesuffix(".weight")]
        expected = base.double() + SCALE * (b.double() @ a.double())
        near = 1e-5 if base.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), expected, rtol=near, atol=near, msg=name)
        assert found.dtype == base.dtype
        for key in (0, (slice(1, None, 2), slice(3)), (..., -1), ([0, 2], slice(None))):
            assert torch.equal(changed[name][key], found[key]), (name, key)


@pytest.mark.parametrize("name", ["zero3_sub_groups", "zero3_fp32_dp4", "zero2_aligned_round_robin"])
def test_zero(name: str, zero_cases: Mapping[str, Case], tmp_path: Path) -> None:
    check(lazyckpt.open(zero_cases[name].path), tmp_path / "adapter")


@pytest.mark.parametrize("name", ["flat", "fsdp2_uneven", "tensor_parallel", "hsdp"])
def test_dcp(name: str, dcp_cases: Mapping[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(dcp_cases[name].path)
    inner = view.get("model", view)
    assert isinstance(inner, lazyckpt.CheckpointView)
    check(inner, tmp_path / "adapter")


@pytest.mark.parametrize("name", ["tp2_gelu_tied", "tp2_pp2_distopt_tied", "pp2_vpp2"])
@pytest.mark.parametrize("renamed", [False, True])
def test_megatron(name: str, renamed: bool, megatron_cases: Mapping[str, Case], tmp_path: Path) -> None:
    """Under Megatron's names, and under those of transformers, which adapters of PEFT have."""
    view = lazyckpt.open(megatron_cases[name].path)
    if renamed:
        try:
            view = view.rename("hf")
        except lazyckpt.errors.DataError as e:
            pytest.skip(f"not a model of transformers: {e}")
    check(view, tmp_path / "adapter")


def test_a_row_of_zero3_reads_its_part(zero_cases: Mapping[str, Case], tmp_path: Path) -> None:
    base = lazyckpt.open(zero_cases["zero3_sub_groups"].path)
    name = next(name for name in base if name.endswith(".weight") and base[name].ndim == 2)
    adapter(tmp_path / "adapter", {name.removesuffix(".weight"): tuple(base[name].shape)})
    view, counts = opened(zero_cases["zero3_sub_groups"].path)
    t = lazyckpt.apply_lora(view, tmp_path / "adapter")[name]
    counts.clear()
    t[1]
    row = base[name].shape[1] * base[name].dtype.itemsize
    assert 0 < counts.bytes <= 3 * row  # neighbours of a row that lies in several ranks may be read, too


# -- the operations: slices equal the whole, bit for bit

some = settings(max_examples=rounds(60), deadline=None)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operands")


@some
@given(data=st.data())
def test_low_rank_updates_in_parts(folder: Path, data: st.DataObject) -> None:
    """w + s * B @ A, and DoRA of it."""
    draw = data.draw
    rows, columns, rank = (draw(st.integers(1, n)) for n in (9, 9, 4))
    kind, own = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS))
    scale, dora, axis = draw(st.sampled_from([1.0, 0.3, -2.0])), draw(st.booleans()), draw(st.integers(0, 1))
    torch.manual_seed(draw(st.integers(0, 99)))
    w, b, a = torch.randn(rows, columns).to(kind), torch.randn(rows, rank).to(own), torch.randn(rank, columns).to(own)
    magnitude = torch.rand((rows, columns)[axis]).to(own) + 0.5
    result = dtype_of(draw(st.sampled_from([torch.float32, torch.float64]) if dora else st.just(kind)))

    def update(o: dict[str, object]) -> object:
        total = make("linear", o["w"], make("product", o["b"], o["a"]), weights=(1, scale), dtype=result)  # type: ignore[arg-type]
        return make("lora.dora", total, o["m"], axis=axis, dtype=result) if dora else total  # type: ignore[arg-type]

    t = array(folder, {"w": w, "b": b, "a": a, "m": magnitude}, update)
    expected = w.double() + scale * (b.double() @ a.double())
    if dora:
        norms = expected.norm(dim=1 - axis, keepdim=True)
        expected = expected * magnitude.double().view(norms.shape) / norms
    torch.testing.assert_close(t[...].double(), expected, rtol=2e-2, atol=2e-2)
    check_parts(t, draw)


@some
@given(data=st.data())
def test_products_in_parts(folder: Path, data: st.DataObject) -> None:
    """LoHa's products of elements, and LoKr's Kronecker products."""
    draw = data.draw
    n = draw(st.integers(1, 3))
    first, second = (tuple(draw(st.integers(1, 4)) for _ in range(n)) for _ in range(2))
    kinds = [draw(st.sampled_from(FLOATS)) for _ in range(2)]
    torch.manual_seed(draw(st.integers(0, 99)))
    kron = draw(st.booleans())
    shapes = (first, second) if kron else (first, first)
    x, y = (torch.randn(prod(shape)).view(shape).to(kind) for shape, kind in zip(shapes, kinds, strict=True))
    t = array(folder, {"x": x, "y": y}, lambda o: make("kron" if kron else "multiply", *o.values()))
    wide = torch.float64 if torch.float64 in kinds else torch.float32
    expected = torch.kron(x.to(wide), y.to(wide)) if kron else x.to(wide) * y.to(wide)
    assert torch.equal(t[...], expected)
    check_parts(t, draw)
