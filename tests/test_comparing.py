"""Comparing a lazy tensor with arrays of numpy: exact for every byte order, and false for what is no number."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import lazyckpt


@pytest.fixture
def view(tmp_path: Path) -> lazyckpt.CheckpointView:
    large = torch.tensor([2**53, 2**53 + 1, 2**53 + 2])
    torch.save({"large": large, "narrow": torch.tensor([1.5, 2.0]).bfloat16()}, tmp_path / "x.pt")
    return lazyckpt.open(tmp_path / "x.pt")


@pytest.mark.parametrize("order", ["<i8", ">i8"])
def test_large_integers_are_compared_exactly_in_any_byte_order(view: lazyckpt.CheckpointView, order: str) -> None:
    wrong = np.full(3, 2**53, order)
    assert (view["large"] == wrong).tolist() == [True, False, False]
    assert (view["large"] != wrong).tolist() == [False, True, True]


def test_arrays_of_narrow_floats_are_compared_by_value(view: lazyckpt.CheckpointView) -> None:
    assert (view["narrow"] == np.array([1.5, 3.0], ml_dtypes.bfloat16)).tolist() == [True, False]


@pytest.mark.parametrize("other", ["1.5", ["a", "b"], np.array(["a", "b"]), [None, None]])
def test_a_tensor_is_equal_to_no_text_and_no_object(view: lazyckpt.CheckpointView, other: object) -> None:
    assert not np.any(view["narrow"] == other)
