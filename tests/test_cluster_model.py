"""The simulation of many nodes: its limits are those that arithmetic gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cluster import Costs, measured, simulate, table

from .conftest import need

TB = 10**12
FAST = Costs(task=0, ledger=0, payload=0, copy=1e15, start=0, network=1e15, reads=1e15, writes=1e15)


@pytest.mark.parametrize(
    ("resource", "change", "seconds"),
    [
        ("reads of the file system", {"reads": 10e9}, 100.0),
        ("writes of the file system", {"writes": 5e9}, 200.0),
        ("network of the nodes", {"network": 1e9}, 1000.0 / 8),
        ("processors", {"copy": 0.1e9}, 10_000.0 / (8 * 16)),
        ("scheduler and ledger", {"task": 0.1}, 0.1 * TB / (256 << 20)),
    ],
)
def test_one_slow_resource_decides(resource: str, change: dict[str, float], seconds: float) -> None:
    found = simulate(TB, 8, replace(FAST, **change))  # type: ignore[arg-type]
    assert found.limit == resource
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    assert found.busy[resource] == pytest.approx(1, rel=0.05)


def test_more_nodes_help_until_something_saturates() -> None:
    costs = replace(FAST, copy=1e9, reads=40e9)
    times = [simulate(TB, nodes, costs).seconds for nodes in (1, 2, 4, 8)]
    assert times[0] / times[1] == pytest.approx(2, rel=0.05)
    assert times[2] == pytest.approx(times[3], rel=0.05), "40 workers read all that there is"


def test_the_start_of_workers_is_counted() -> None:
    assert simulate(0, 1, replace(FAST, start=7.0)).seconds == pytest.approx(7)


@pytest.mark.slow
def test_costs_are_measured() -> None:
    need("distributed")
    costs = measured(32 << 20, 20)
    assert min(costs.task, costs.ledger, costs.payload, costs.copy, costs.start) > 0
    assert costs.payload < 64 << 10, "the descriptions of tensors are not sent with each task"
    found = [simulate(TB, nodes, costs) for nodes in (1, 2)]
    assert table(found, costs, TB).count("\n| ") == 3
