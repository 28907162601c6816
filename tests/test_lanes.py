"""What the lanes leave out."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .lanes import LANE, rounds


def _conftest() -> Any:
    spec = importlib.util.spec_from_file_location("root_conftest", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sizes", [(22, 18), (5, 18), (15, 2), (4, 4, 3), (13, 13), (2, 2)])
def test_each_value_of_a_product_stays_in_each_lane(sizes: tuple[int, ...]) -> None:
    products, marks = [], {}
    for values in itertools.product(*map(range, sizes)):
        params = {f"p{n}": value for n, value in enumerate(values)}
        marks[values] = found = []  # type: ignore[var-annotated]
        products.append(
            SimpleNamespace(nodeid="f[...]", callspec=SimpleNamespace(params=params), add_marker=found.append)
        )
    _conftest().thin(products)
    by_default = {values for values, found in marks.items() if "full" not in found}
    fast = {values for values, found in marks.items() if not found}
    assert fast <= by_default < marks.keys()
    for lane in (by_default, fast):
        assert [{values[n] for values in lane} for n in range(len(sizes))] == [set(range(size)) for size in sizes]


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for lane, count in {"all": 100, "default": 34, "fast": 10}.items():
        monkeypatch.setenv(LANE, lane)
        assert rounds(100) == count
    assert rounds(1) == 1
