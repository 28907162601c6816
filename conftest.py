"""The lanes of the test suite: ``--lane=fast``, ``default`` or ``all``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

import hypothesis
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


def pytest_configure(config: pytest.Config) -> None:
    os.environ["LAZYCKPT_TEST_LANE"] = config.getoption("lane")  # tests/lanes.py asks for it
    # A busy machine fails no property test. A change has the same examples everywhere; "all" looks for new ones.
    hypothesis.settings.register_profile(
        "lanes",
        deadline=None,
        derandomize=config.getoption("lane") != "all",
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("lanes")
    gc.disable()  # until all tests are collected: what is imported and collected stays


def pytest_collection_finish() -> None:
    """Let collections of garbage not look at torch's and pytest's objects, which live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule as xdist does with ``--dist loadgroup``, in time that does not grow with the tests that have ended."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]  # xdist is not installed everywhere
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]  # else it is counted again after each test

    return Scheduling(config, log)


def thin(products: Iterable[pytest.Function]) -> None:
    """Mark most of each product of parameters full, and most of what stays slow.

    The values of each parameter are numbered. What stays by default has numbers whose sum is a multiple of six, in
    the fast lane of twelve; of fewer where the parameters have fewer values. So each value of each parameter stays.
    """
    by_function: dict[str, list[pytest.Function]] = {}
    for item in products:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for items in by_function.values():
        seen: dict[str, list[object]] = {}
        totals = []
        for item in items:
            total = 0
            for name, value in item.callspec.params.items():
                values = seen.setdefault(name, [])
                if value not in values:
                    values.append(value)
                total += values.index(value)
            totals.append(total)
        least = sorted(map(len, seen.values()))[-2]  # of the two parameters with the most values
        few = min(6, least)
        fewer = few * max(1, min(12, least) // few)
        for item, total in zip(items, totals, strict=True):
            if total % few:
                item.add_marker("full")
            elif total % fewer:
                item.add_marker("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin(item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("product"))
    marks = LANES[config.getoption("lane")]
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
