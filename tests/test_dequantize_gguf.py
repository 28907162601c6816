"""GGUF's block types: values as the gguf package computes them, in parts as in the whole, from the blocks needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.core.expr import computed, make, operand, wanted
from lazyckpt.core.ops.ggml import TYPES
from lazyckpt.core.select import Selection
from lazyckpt.errors import DataError
from lazyckpt.lazy import LazyArray
from lazyckpt.testing import opened

from .conftest import Cases
from .lanes import rounds
from .test_dequantize_ops import check_parts
from .writers import Case


@pytest.fixture(scope="module")
def case(checkpoints: Callable[[str], Path]) -> Case:
    return Cases("quantized_gguf", checkpoints("quantized_gguf"))["blocks"]


def weight(view: lazyckpt.CheckpointView, kind: str, dtype: torch.dtype | None = None) -> LazyArray:
    expr = make("dequantize.gguf", operand(view.specs[kind]), type=kind, dtype=dtype)
    return LazyArray(view._store, computed(kind, expr))


def test_every_type_is_recorded(case: Case) -> None:
    assert set(case.truth["weights"]) == set(TYPES) - {"Q8_K"}  # the package does not dequantize Q8_K


@pytest.mark.parametrize("kind", sorted(set(TYPES) - {"Q8_K"}))
def test_equals_the_gguf_package(case: Case, kind: str) -> None:
    view = lazyckpt.open(case.path)
    truth = case.truth["weights"][kind]
    found = weight(view, kind)[...]
    assert found.dtype == torch.float32 and torch.equal(found, truth)
    assert torch.equal(weight(view, kind, torch.bfloat16)[...], truth.to(torch.bfloat16))


def test_q8_k_is_codes_times_a_float32(tmp_path: Path) -> None:
    """ggml-quants.c `dequantize_row_q8_K`; there are sums of codes after the codes, which are not needed."""
    codes = torch.randint(-128, 128, (2, 256), dtype=torch.int8)
    scales = torch.randn(2, 1)
    sums = torch.randint(0, 256, (2, 32), dtype=torch.uint8)
    torch.save({"Q8_K": torch.cat([scales.view(torch.uint8), codes.view(torch.uint8), sums], 1)}, tmp_path / "a.pt")
    assert torch.equal(weight(lazyckpt.open(tmp_path / "a.pt"), "Q8_K")[...], scales * codes.to(torch.float32))


@settings(max_examples=rounds(60), deadline=None)
@given(data=st.data())
def test_parts_equal_the_whole(case: Case, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(set(TYPES) - {"Q8_K"})))
    check_parts(weight(lazyckpt.open(case.path), kind), data.draw)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "IQ2_XXS"])
def test_reads_the_blocks_that_a_slice_needs(case: Case, kind: str) -> None:
    view, counts = opened(case.path)
    t, known = weight(view, kind), TYPES[kind]
    for key, blocks in (((1,), 2), ((0, slice(3, 9)), 1), ((slice(None), slice(known.size - 1, known.size + 1)), 6)):
        counts.clear()
        _ = t[key]
        assert counts.bytes == blocks * known.nbytes
        parts = wanted(t.spec, Selection.all(t.shape)[key].reads().want)
        assert sum(len(want[0]) * len(want[1]) for _, want in parts) == counts.bytes


def test_says_what_does_not_fit(case: Case) -> None:
    view = lazyckpt.open(case.path)
    with pytest.raises(DataError, match="blocks of 34 bytes"):
        make("dequantize.gguf", operand(view.specs["Q4_0"]), type="Q8_0")
    with pytest.raises(DataError, match="no GGUF type 'Q9'"):
        make("dequantize.gguf", operand(view.specs["Q4_0"]), type="Q9")
