"""What the default lane runs of a long list of parameters; ``--lane=all`` runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """The values as parameters, where those not in ``keep`` are marked ``full``: the lane "all" alone runs them.

    Keep at least one value of each kind: of each format, writer, dtype, fault and attack.
    """
    values = list(values)
    if strangers := [value for value in keep if value not in values]:
        raise ValueError(f"not among the values: {strangers}")
    return [value if value in keep else pytest.param(value, marks=pytest.mark.full) for value in values]
