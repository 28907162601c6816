"""What the default lane runs of a long list of parameters; ``--lane=all`` runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """The values as parameters (a tuple: of several arguments); those not in ``keep`` run in the lane "all" alone.

    Keep at least one value of each kind: of each format, writer, dtype, fault and attack.
    """
    values = list(values)
    if strangers := [value for value in keep if value not in values]:
        raise ValueError(f"not among the values: {strangers}")
    return [value if value in keep else _full(value) for value in values]


def _full(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
