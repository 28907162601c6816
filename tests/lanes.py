"""What the default lane runs of long lists of parameters and of random examples; ``--lane=all`` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["LANE", "rounds", "sampled"]

LANE = "LAZYCKPT_TEST_LANE"  # the environment variable with the lane: parameters are listed before options are at hand


def sampled(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """The values as parameters (a tuple: of several arguments); those not in ``keep`` run in the lane "all" alone.

    Keep at least one value of each kind: of each format, writer, dtype, fault and attack.
    """
    values = list(values)
    if strangers := [value for value in keep if value not in values]:
        raise ValueError(f"not among the values: {strangers}")
    return [value if value in keep else _full(value) for value in values]


def rounds(count: int) -> int:
    """How many random examples a test takes: ``count`` in the lane "all", a third by default, a tenth in "fast"."""
    part = {"all": 1, "fast": 10}.get(os.environ.get(LANE, ""), 3)
    return -(-count // part)


def _full(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
