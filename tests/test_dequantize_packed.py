"""Packed formats (GPTQ, AWQ, bitsandbytes, HQQ, MLX, torchao): recorded checkpoints, and what their writers compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import CheckpointView
from lazyckpt.core.expr import make, wanted
from lazyckpt.core.select import Selection
from lazyckpt.testing import opened

from . import recordings
from .conftest import Cases
from .lanes import rounds
from .test_dequantize_ops import array, check_parts
from .writers import Case

GROUPS = (
    "quantized_gptq", "quantized_awq", "quantized_bitsandbytes", "quantized_hqq", "quantized_mlx",
    "quantized_torchao", "quantized_torchao_v1",
)  # fmt: skip
CASES = [(group, name) for group in GROUPS for name in recordings.GROUPS[group].names]

Recorded = Callable[[str, str], Case]


@pytest.fixture(scope="session")
def recorded(checkpoints: Callable[[str], Path]) -> Recorded:
    return lambda group, name: Cases(group, checkpoints(group))[name]


@pytest.fixture(params=CASES, ids="/".join)
def case(request: pytest.FixtureRequest, recorded: Recorded) -> Case:
    return recorded(*request.param)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def indexed(whole: torch.Tensor, key: Any) -> torch.Tensor:
    """A slice as numpy takes it, which has negative steps, too."""
    return torch.from_numpy(whole.view(torch.int16).numpy()[key].copy()).view(whole.dtype)


def computed(view: CheckpointView) -> list[str]:
    return [name for name in view if view[name].spec.expr is not None]


# -- recorded checkpoints


def test_equals_its_own_library(case: Case) -> None:
    truth = case.truth["weights"]
    stored = lazyckpt.open(case.path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        view = stored.dequantize(dtype)
        assert view.problems == stored.problems
        assert set(view) == set(truth)
        done = computed(view)
        assert len(done) >= 4
        for name, t in truth.items():
            if name not in done and view.aliases.get(name) not in done:
                assert same(view[name][...], t), name
            elif t.dtype in (dtype, torch.float32):
                assert same(view[name][...], t.to(dtype)), name


def test_slices_equal_the_whole(case: Case) -> None:
    view = lazyckpt.open(case.path).dequantize()
    for name in computed(view)[:7]:
        t, whole = view[name], view[name][...]
        if t.ndim == 3:  # stacked experts
            for inner in ((1,), (slice(None, None, 2), slice(3, 9), slice(5, 40, 3)), (..., 7), ([0, 2], 4)):
                assert same(t[inner], whole[inner]), (name, inner)
            continue
        rows, columns = t.shape
        some = torch.randperm(rows)[: rows // 3 + 1].tolist()
        for key in (
            0, rows - 1, slice(1, rows, 3), (slice(None), 5), (slice(3, 9), slice(columns - 7, None)), (..., 1), some,
            (slice(None, None, -2), slice(2, None, 7)), (some, 3), (slice(5, 5), slice(None)),
        ):  # fmt: skip
            assert same(t[key], indexed(whole, key)), (name, key)
        assert t[rows // 2, columns // 2] == whole[rows // 2, columns // 2]


def test_reads_what_a_slice_needs(case: Case) -> None:
    view, counts = opened(case.path)
    view = view.dequantize()
    for name in computed(view)[:3]:
        t = view[name]
        _ = t[0]  # reads once what all rows share
        for key in ((1,), (slice(None), 2), (slice(2, 5), slice(3, 20))):
            counts.clear()
            _ = t[key]
            parts = wanted(t.spec, Selection.all(t.shape)[key].reads().want)
            assert counts.bytes == sum(prod(map(len, want)) * one.dtype.itemsize for one, want in parts), (name, key)


def test_opening_reads_only_states(case: Case) -> None:
    view, counts = opened(case.path)
    counts.clear()
    view.dequantize()
    states = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".weight_format")
    hqq = (".shape", ".axis", ".group_size", ".packing", ".compute_dtype", ".quant_zero", ".quant_scale")
    inside = {request for request in counts.log if request.path.endswith((".safetensors", ".pt"))}
    assert sum(one.length for one in inside) == sum(t.nbytes for name, t in view.items() if name.endswith(states + hqq))


# -- sizes that are multiples of nothing, against plain arithmetic

some = settings(max_examples=rounds(40), deadline=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


def packed(codes: torch.Tensor, bits: int, word: torch.dtype) -> torch.Tensor:
    """Codes as a stream of bits along the first dimension, in words."""
    size = word.itemsize * 8
    columns = []
    for column in codes.T.tolist():
        number = sum(code << n * bits for n, code in enumerate(column))
        data = number.to_bytes(-(-len(column) * bits // size) * word.itemsize, "little")
        columns.append(torch.frombuffer(bytearray(data), dtype=word))
    return torch.stack(columns, 1)


def drawn(draw: st.DrawFn) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))


@some
@given(data=st.data())
def test_gptq_of_any_sizes(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    g = drawn(draw)
    bits, rows, columns = draw(st.integers(2, 8)), draw(st.integers(1, 40)), draw(st.integers(1, 70))
    size = draw(st.integers(1, columns + 3))
    count = -(-columns // size)
    stored = draw(st.sampled_from(["z", "z-1"]))
    word = draw(st.sampled_from([torch.int32, torch.int64, torch.uint8]))
    codes = torch.randint(0, 1 << bits, (columns, rows), generator=g)
    zeros = torch.randint(0, 1 << bits, (count, rows), generator=g)
    scales = torch.randn(count, rows, generator=g).to(draw(st.sampled_from([torch.float16, torch.bfloat16])))
    order = torch.randint(0, count, (columns,), generator=g, dtype=torch.int32) if draw(st.booleans()) else None
    number = torch.arange(columns) // size if order is None else order.long()
    tensors = {
        "qweight": packed(codes, bits, word),
        "qzeros": packed((zeros.T - int(stored == "z-1")) % (1 << bits), bits, word).T.contiguous(),
        "scales": scales,
    } | ({} if order is None else {"g_idx": order})
    group = size if order is None else None
    params = {"bits": bits, "inputs": columns, "group_size": group, "zeros": stored, "planar": False}
    t = array(folder, tensors, lambda o: make("dequantize.gptq", *o.values(), **params, dtype="float32"))
    expected = ((codes - zeros[number]).to(torch.float32) * scales[number].to(torch.float32)).T
    assert same(t[...], expected.contiguous())
    check_parts(t, draw)


@some
@given(data=st.data())
def test_awq_of_any_sizes(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    g = drawn(draw)
    layout = draw(st.sampled_from(["gemm", "gemv", "gemv_fast"]))
    rows = draw(st.integers(1, 5)) * (8 if layout == "gemm" else 4)
    columns = draw(st.integers(1, 3)) * (64 if layout == "gemv_fast" else 8)
    size = draw(st.integers(1, columns + 3))
    count = -(-columns // size)
    padded = count if layout == "gemm" else -(-count // 8) * 8
    scales = torch.randn(padded, rows, generator=g).to(torch.float16)
    if layout == "gemm":
        shapes = (columns, rows // 8), (count, rows // 8)
    else:
        shapes = (rows, columns // 8), (rows, padded // 8)
    words = [torch.randint(-(1 << 31), 1 << 31, one, generator=g).to(torch.int32) for one in shapes]
    if layout == "gemv_fast":
        half = torch.randint(-(1 << 15), 1 << 15, (rows // 4, columns), generator=g).to(torch.int16)
        words = [half, torch.randn(padded, rows, generator=g).to(torch.float16)]
    tensors = {"a": words[0], "b": words[1], "c": scales.T.contiguous() if layout == "gemv" else scales}
    params = {"layout": layout, "inputs": columns, "outputs": rows, "group_size": size, "dtype": "float32"}
    t = array(folder, tensors, lambda o: make("dequantize.awq", *o.values(), **params))
    assert t.shape == (rows, columns)
    if layout == "gemv":
        codes, zeros = ((one.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15).flatten(1) for one in words)
        number = torch.arange(columns) // size
        expected = (codes - zeros[:, number]).to(torch.float32) * scales.T[:, number].to(torch.float32)
        assert same(t[...], expected)
    check_parts(t, draw)


@some
@given(data=st.data())
def test_bitsandbytes_of_any_sizes(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    g = drawn(draw)
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    size, inner = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    count = prod(shape)
    blocks = -(-count // size)
    codes = torch.randint(0, 16, (count + count % 2,), generator=g, dtype=torch.uint8)
    tensors = {"data": (codes[::2] << 4 | codes[1::2]).unsqueeze(1), "absmax": torch.rand(blocks, generator=g)}
    scales = tensors["absmax"]
    params: dict[str, Any] = {"shape": shape, "blocksize": size, "quant_type": "nf4"}
    if draw(st.booleans()):
        tensors["absmax"] = torch.randint(0, 256, (blocks,), generator=g, dtype=torch.uint8)
        tensors["nested"] = torch.rand(-(-blocks // inner), generator=g)
        tensors["map"] = torch.randn(256, generator=g)
        scales = tensors["map"][tensors["absmax"].long()] * tensors["nested"].repeat_interleave(inner)[:blocks] + 0.25
        params |= {"nested_blocksize": inner, "nested_offset": 0.25}
    t = array(folder, tensors, lambda o: make("dequantize.bnb_4bit", *o.values(), **params, dtype="float32"))
    expected = torch.tensor(NF4)[codes[:count].long()] * scales.repeat_interleave(size)[:count]
    assert same(t[...], expected.view(shape))
    check_parts(t, draw)


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@some
@given(data=st.data())
def test_hqq_of_any_sizes(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    g = drawn(draw)
    per, bits, top, word = draw(
        st.sampled_from([(1, 8, 0, 1), (2, 4, 4, 1), (4, 2, 6, 1), (8, 1, 7, 1), (10, 3, 27, 4)])
    )
    name = {1: "8bit_u8", 2: "4bit_u8", 4: "2bit_u8", 8: "1bit_u8", 10: "3bit_32"}[per]
    axis, size, count = draw(st.integers(0, 1)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    if per != 10:
        size, count = (size * per, count) if axis == 0 else (size, count * per)
    grid = (count, size) if axis == 1 else (size, count)
    codes = torch.randint(0, 1 << bits, grid, generator=g)
    step = -(-grid[0] // per)
    rest = torch.zeros(step * per - grid[0], grid[1], dtype=torch.int64)
    runs = torch.cat([codes, rest]).view(per, step, grid[1])
    words = sum(run << top - n * bits for n, run in enumerate(runs))
    assert isinstance(words, torch.Tensor)
    values = (grid[0], 1) if axis == 1 else (1, grid[1])
    tensors = {
        "W_q": words.to(torch.uint8 if word == 1 else torch.int32),
        "zero": torch.randn(values, generator=g).to(torch.float16),
        "scale": torch.randn(values, generator=g).to(torch.float16),
    }
    shape = draw(st.sampled_from([(size, count), (count, size), (size * count, 1)]))
    params = {"shape": shape, "packing": name, "axis": axis, "group_size": size, "compute_dtype": "float16"}
    t = array(folder, tensors, lambda o: make("dequantize.hqq", *o.values(), **params, dtype="float16"))
    assert same(t[...], ((codes.to(torch.float16) - tensors["zero"]) * tensors["scale"]).view(shape))
    check_parts(t, draw)


# -- bytes


def folder_of(path: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any] | None) -> Path:
    path.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    config = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": dict(quantization)})
    (path / "config.json").write_text(json.dumps(config))
    return path


def gptq(rows: int, columns: int, size: int, lead: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {
        "a.qweight": torch.randint(-(1 << 31), 1 << 31, (*lead, columns // 8, rows)).to(torch.int32),
        "a.qzeros": torch.randint(-(1 << 31), 1 << 31, (*lead, columns // size, rows // 8)).to(torch.int32),
        "a.scales": torch.rand(*lead, columns // size, rows).to(torch.float16),
        "a.g_idx": (torch.arange(columns) // size).to(torch.int32),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "checkpoint_format": "gptq_v2"}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_row_of_gptq_reads_its_codes_and_scales(tmp_path: Path, ordered: bool) -> None:
    said = GPTQ | {"desc_act": ordered}
    view, counts = opened(folder_of(tmp_path / "m", gptq(64, 4096, 128), said))
    t = view.dequantize()["a.weight"]
    _ = t[0]
    counts.clear()
    _ = t[9]
    codes, scales, zeros = 4096 // 2, 32 * 2, 32 * 4  # zero points of eight rows are in a word
    assert counts.bytes == codes + scales + zeros <= 1.1 * (codes + scales + 32 // 2)


def test_a_row_of_nf4_reads_its_codes_and_scales(tmp_path: Path) -> None:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 4096]}
    nested = state | {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
    tensors = {}
    for name, known in {"a": state, "b": nested}.items():
        tensors[f"{name}.weight"] = torch.randint(0, 256, (32 * 2048, 1), dtype=torch.uint8)
        tensors[f"{name}.weight.absmax"] = torch.rand(32 * 64)
        tensors[f"{name}.weight.quant_map"] = torch.tensor(NF4)
        text = json.dumps(known).encode()
        tensors[f"{name}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    tensors["b.weight.absmax"] = torch.randint(0, 256, (32 * 64,), dtype=torch.uint8)
    tensors["b.weight.nested_absmax"] = torch.rand(8)
    tensors["b.weight.nested_quant_map"] = torch.randn(256)
    view, counts = opened(folder_of(tmp_path / "m", tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True}))
    view = view.dequantize()
    for name, scales in {"a": 64 * 4, "b": 64 + 4}.items():
        _ = view[f"{name}.weight"][0]
        counts.clear()
        _ = view[f"{name}.weight"][5]
        assert counts.bytes == 2048 + scales


def test_a_block_of_gptq_rows_reads_long_runs(tmp_path: Path) -> None:
    view, counts = opened(folder_of(tmp_path / "m", gptq(1024, 2048, 128), GPTQ))
    t = view.dequantize()["a.weight"]
    counts.clear()
    _ = t[...]
    parts = [one for one in t.operands if not one.name.endswith("g_idx")]
    assert counts.bytes <= 1.01 * sum(one.nbytes for one in parts)
    assert counts.bytes / counts.requests >= 512


def test_fused_experts_are_each_expert(tmp_path: Path) -> None:
    fused = gptq(40, 256, 128, (3,))
    view = lazyckpt.open(folder_of(tmp_path / "m", fused, GPTQ)).dequantize()
    assert view["a.weight"].shape == (3, 40, 256)
    for n in range(3):
        alone = {name: t[n] if t.ndim == 3 else t for name, t in fused.items()}
        one = lazyckpt.open(folder_of(tmp_path / f"m{n}", alone, GPTQ)).dequantize()["a.weight"]
        assert same(view["a.weight"][n], one[...])
        assert same(view["a.weight"][n, 3:30:4, 100:], one[3:30:4, 100:])


# -- contradictions


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (GPTQ | {"bits": 8}, "contradicting-quantization"),
        (GPTQ | {"group_size": 7, "desc_act": True}, None),  # g_idx decides
        (GPTQ | {"checkpoint_format": "marlin"}, "contradicting-quantization"),
        (GPTQ | {"is_marlin_format": True}, "contradicting-quantization"),
        (GPTQ | {"checkpoint_format": "bitblas"}, "undecided-quantization"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "contradicting-quantization"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "undecided-quantization"),
        (None, "undecided-quantization"),
    ],
)
def test_what_configurations_contradict(tmp_path: Path, said: Mapping[str, Any] | None, code: str | None) -> None:
    view = lazyckpt.open(folder_of(tmp_path / "m", gptq(64, 256, 128), said)).dequantize()
    assert (code in {problem.code for problem in view.problems}) if code else not view.problems
    assert ("a.qweight" in set(view)) is (code is not None)
    assert ("a.weight" in set(view)) is (code is None)


@pytest.mark.parametrize("said", ["bitblas", "gptq_bitblas"])
def test_layouts_that_are_not_read_are_named(tmp_path: Path, said: str) -> None:
    stored = {"a.B": torch.zeros(4, 64, dtype=torch.int32), "a.s": torch.ones(1, 64, dtype=torch.float16)}
    config: dict[str, Any] = {"quant_method": said, "bits": 4, "group_size": -1}
    view = lazyckpt.open(folder_of(tmp_path / "plain", stored, config)).dequantize()
    (problem,) = [one for one in view.problems if one.code == "undecided-quantization"]
    assert repr(said) in str(problem) and set(view) == set(stored)
    config = {"quant_method": "gptq", "checkpoint_format": said, "bits": 4, "group_size": -1}
    view = lazyckpt.open(folder_of(tmp_path / "gptq", stored, config)).dequantize()
    (problem,) = [one for one in view.problems if one.code == "undecided-quantization"]
    assert repr(said) in str(problem) and set(view) == set(stored)


def test_marlin_that_contradicts_its_configuration(tmp_path: Path) -> None:
    stored = {"a.B": torch.zeros(16, 512, dtype=torch.int32), "a.s": torch.ones(2, 256, dtype=torch.float16)}
    good: dict[str, Any] = {"quant_method": "marlin", "group_size": 128}
    view = lazyckpt.open(folder_of(tmp_path / "good", stored, good)).dequantize()
    assert set(view) == {"a.weight"} and not view.problems and view["a.weight"].shape == (256, 256)
    assert (view["a.weight"][...] == -8).all()
    for n, (config, name, other) in enumerate(
        [
            (good | {"bits": 8}, None, None),
            (good | {"group_size": -1}, None, None),
            (good, "a.s", torch.ones(4, 256, dtype=torch.float16)),
            (good, "a.s", torch.ones(0, 256, dtype=torch.float16)),
            (good, "a.s", torch.ones(256, dtype=torch.float16)),
            (good, "a.B", torch.zeros(16, 500, dtype=torch.int32)),
            (good, "a.B", torch.zeros(0, 512, dtype=torch.int32)),
            (good, "a.B", torch.zeros(16, 512, dtype=torch.int64)),
        ]
    ):
        tensors = stored | ({name: other} if name is not None else {})
        view = lazyckpt.open(folder_of(tmp_path / str(n), tensors, config)).dequantize()
        assert [one.code for one in view.problems] == ["contradicting-quantization"], (config, name)
        assert set(view) == set(stored)


def test_gptq_without_its_order_is_not_guessed(tmp_path: Path) -> None:
    tensors = gptq(64, 256, 128)
    del tensors["a.g_idx"]
    view = lazyckpt.open(folder_of(tmp_path / "m", tensors, GPTQ | {"desc_act": True})).dequantize()
    assert "contradicting-quantization" in {problem.code for problem in view.problems}
    assert "a.weight" not in view


def test_orders_out_of_bounds_are_errors(tmp_path: Path) -> None:
    tensors = gptq(64, 256, 128)
    tensors["a.g_idx"][7] = 2
    view = lazyckpt.open(folder_of(tmp_path / "m", tensors, GPTQ | {"desc_act": True})).dequantize()
    with pytest.raises(lazyckpt.LazyckptError, match="g_idx"):
        view["a.weight"][...]


def test_gemm_needs_a_group_size_that_fits(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.zeros(64, 4, dtype=torch.int32),
        "a.qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "a.scales": torch.ones(2, 32, dtype=torch.float16),
    }
    said = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    view = lazyckpt.open(folder_of(tmp_path / "m", tensors, said)).dequantize()
    assert view.problems[0].code == "contradicting-quantization"
    view = lazyckpt.open(tmp_path / "m").dequantize(config=said | {"group_size": 32})
    assert view.problems == () and view["a.weight"].shape == (32, 64)


def test_awq_by_the_file_of_autoawq(tmp_path: Path, recorded: Recorded) -> None:
    """quant_config.json alone, which AutoAWQ wrote before transformers knew AWQ."""
    case = recorded("quantized_awq", "gemm_one_group")
    config = json.loads((case.path / "config.json").read_text())
    said = config.pop("quantization_config")
    beside = {"zero_point": True, "q_group_size": said["group_size"], "w_bit": 4, "version": "GEMM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quant_config.json").write_text(json.dumps(beside))
    (tmp_path / "model.safetensors").write_bytes((case.path / "model.safetensors").read_bytes())
    view = lazyckpt.open(tmp_path).dequantize(torch.float32)
    assert view.problems == () and set(view) == set(case.truth["weights"])


def test_awq_of_llm_awq(tmp_path: Path, recorded: Recorded) -> None:
    """llm-awq calls the zero points of the layout gemv_fast ``scaled_zeros``."""
    case = recorded("quantized_awq", "gemv_fast")
    tensors = {name.replace("qzeros", "scaled_zeros"): t for name, t in lazyckpt.open(case.path).to("cpu").items()}
    said = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "llm-awq"}
    view = lazyckpt.open(folder_of(tmp_path / "m", tensors, said)).dequantize(torch.float32)
    assert view.problems == ()
    for name in computed(view):
        assert same(view[name][...], case.truth["weights"][name])


@pytest.mark.parametrize(
    "state",
    [
        b"{", b"[]", b'{"quant_type": "nf4"}', b'{"quant_type": "nf4", "shape": [4, 4], "blocksize": 0}',
        b'{"quant_type": "fp4", "shape": [4, 4], "blocksize": 64}',
        b'{"quant_type": "nf4", "shape": [4, 5], "blocksize": 64}',
        b'{"quant_type": "nf4", "shape": [4, -4], "blocksize": 64}', b"[" * 100_000, b"\xff",
    ],
)  # fmt: skip
def test_damaged_states_of_bitsandbytes(tmp_path: Path, state: bytes) -> None:
    tensors = {
        "a.weight": torch.zeros(8, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.ones(1),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    view = lazyckpt.open(folder_of(tmp_path / "m", tensors, None)).dequantize()
    assert "contradicting-quantization" in {problem.code for problem in view.problems}
    assert view["a.weight"].shape == (8, 1)


@pytest.mark.parametrize(("layout", "code"), [(0, None), (2, "undecided-quantization")])
def test_int8_layouts(tmp_path: Path, layout: int, code: str | None) -> None:
    tensors = {
        "a.weight": torch.randint(-127, 128, (8, 6), dtype=torch.int8),
        "a.SCB": torch.rand(8),
        "a.weight_format": torch.tensor(layout, dtype=torch.uint8),
    }
    view = lazyckpt.open(folder_of(tmp_path / "m", tensors, {"quant_method": "bitsandbytes"})).dequantize(torch.float32)
    assert (view["a.weight"].dtype == torch.float32) is (code is None)
    assert (code in {problem.code for problem in view.problems}) if code else view.problems == ()


def test_hqq_without_its_shape_is_not_guessed(tmp_path: Path, recorded: Recorded) -> None:
    path = recorded("quantized_hqq", "w3_axis0").path
    view = lazyckpt.open(path)
    tensors = {name: t for name, t in view.to("cpu").items() if not name.endswith("q_proj.shape")}
    found = lazyckpt.open(folder_of(tmp_path / "m", tensors, {"quant_method": "hqq"})).dequantize()
    (problem,) = (one for one in found.problems if one.code == "contradicting-quantization")
    assert "q_proj" in str(problem)
    assert any(name.endswith("q_proj.W_q") for name in found)
    assert any(name.endswith("k_proj.weight") for name in found)


def test_hqq_states_of_older_versions(tmp_path: Path, recorded: Recorded) -> None:
    """Until 0.1.7, hqq kept everything but the codes in ``meta``."""
    case = recorded("quantized_hqq", "w4_nested_pt")
    modules = torch.load(case.path / "qmodel.pt", weights_only=True)
    for module, state in modules.items():
        if "W_q" in state:
            meta = {key: value for key, value in state.items() if key not in ("W_q", "bias")}
            modules[module] = {"W_q": state["W_q"], "bias": state.get("bias"), "meta": meta}
    torch.save(modules, tmp_path / "qmodel.pt")
    (tmp_path / "config.json").write_bytes((case.path / "config.json").read_bytes())
    view = lazyckpt.open(tmp_path).dequantize(torch.float16)
    assert view.problems == () and set(view) == set(case.truth["weights"])
    for name in computed(view):
        assert same(view[name][...], case.truth["weights"][name])


JSON = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3) | st.lists(st.integers())


@some
@given(
    said=st.dictionaries(
        st.sampled_from(
            ["bits", "group_size", "desc_act", "checkpoint_format", "dynamic", "meta", "version", "w_bit", "rotation"]
        ),
        JSON | st.dictionaries(st.sampled_from(["quantizer", "a"]), JSON),
    ),
    method=st.sampled_from(["gptq", "awq", "bitsandbytes", "hqq"]),
)
def test_no_configuration_is_an_error(folder: Path, said: dict[str, Any], method: str) -> None:
    """Whatever config.json says, the view opens: with the weights, or with the stored tensors and a problem."""
    path = folder / "model"
    if not path.exists():
        folder_of(path, gptq(16, 64, 32), None)
    view = lazyckpt.open(path).dequantize(config={"quantization_config": {"quant_method": method, **said}})
    assert ("a.weight" in set(view)) or view.problems


@some
@given(data=st.data())
def test_operands_that_do_not_fit_are_errors(folder: Path, data: st.DataObject) -> None:
    draw = data.draw
    op = draw(st.sampled_from(["gptq", "awq", "bnb_4bit", "bnb_int8", "hqq"]))
    dtypes = [torch.int32, torch.uint8, torch.int8, torch.float16, torch.float32, torch.int16]
    tensors = {
        str(n): torch.zeros(draw(st.lists(st.integers(0, 4), max_size=3)), dtype=draw(st.sampled_from(dtypes)))
        for n in range(2 if op == "bnb_int8" else draw(st.sampled_from([2, 4])) if op == "bnb_4bit" else 3)
    }
    number = st.integers(1, 9)
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=2)))
    params = {
        "gptq": {"bits": draw(st.integers(2, 8)), "inputs": draw(number), "group_size": draw(number), "zeros": "z"},
        "awq": {
            "layout": draw(st.sampled_from(["gemm", "gemv", "gemv_fast", "other"])), "inputs": draw(number),
            "outputs": draw(number), "group_size": draw(number),
        },
        "bnb_4bit": {"shape": shape, "quant_type": "nf4", "blocksize": draw(number), "nested_blocksize": draw(number)},
        "bnb_int8": {},
        "hqq": {
            "shape": shape, "axis": draw(st.integers(0, 1)), "group_size": draw(st.none() | number),
            "packing": draw(st.sampled_from([None, "4bit_u8", "3bit_32", "other"])), "compute_dtype": "float16",
        },
    }[op]  # fmt: skip
    try:
        t = array(
            folder,
            tensors,
            lambda o: make(f"dequantize.{op}", *o.values(), **params, nested_offset=0.0, dtype="float32"),
        )
    except lazyckpt.DataError:
        return
    assert t[...].shape == t.shape
