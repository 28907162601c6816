"""The lanes of the test suite: ``--lane=fast``, ``default`` or ``all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# What each lane leaves out: tests with one of these marks (pyproject.toml says what they mean).
LANES: dict[str, tuple[str, ...]] = {"fast": ("slow", "full"), "default": ("full",), "all": ()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lane",
        choices=list(LANES),
        default="default",
        help="fast: no test marked slow or full; default: no test marked full; all: every test, on checkpoints that "
        "the installed writers write anew",
    )


def thin(products: Iterable[Any]) -> None:
    """Mark two thirds of each product of parameters slow: those whose numbers, added, are no multiple of 3."""
    seen: dict[tuple[str, str], list[Any]] = {}
    for item in products:
        total = 0
        for name, value in item.callspec.params.items():
            values = seen.setdefault((item.nodeid.partition("[")[0], name), [])
            if value not in values:
                values.append(value)
            total += values.index(value)
        if total % 3:
            item.add_marker("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin(item for item in items if item.get_closest_marker("product"))
    marks = LANES[config.getoption("lane")]
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
