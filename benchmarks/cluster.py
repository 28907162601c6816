"""A discrete simulation of a conversion on many nodes: where does it saturate?

`python -m benchmarks.cluster` measures the costs on this machine and simulates 1 to 256 nodes; ``--write`` writes the
table and the plot of docs/how-to/cluster.md. Each resource serves one request after the other, in the order of their
arrival: the coordinator (scheduler and ledger), the network of each node, the reads and the writes of the file system.
A task is a chain of requests for pieces; a worker has one piece under way.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

MIB = 1 << 20
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MARK = "<!-- cluster model -->"
_PAGE = Path(__file__).parent.parent / "docs/how-to/cluster.md"
_PLOT = Path(__file__).parent.parent / "docs/assets/speed/cluster.svg"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, bytes and rates (bytes a second) that the simulation is fed with."""

    task: float = 2e-3
    """Handing out a task and taking its result, on the coordinator."""
    ledger: float = 20e-6
    """Recording a finished run in the ledger."""
    payload: int = 64 << 10
    """Bytes of a task on its way to a worker."""
    copy: float = 1.5e9
    """What one worker reads, checks and writes from and to memory."""
    start: float = 10.0
    """Seconds until a worker has started and imported torch."""
    network: float = 12.5e9
    """Each direction of a node's network."""
    reads: float = 100e9
    """All reads of the file system together."""
    writes: float = 50e9
    """All writes of the file system together."""
    workers: int = 16
    """Workers of a node."""


@dataclass(frozen=True, slots=True)
class Found:
    """The time of a simulated conversion, and the share of it in which each resource is busy."""

    nodes: int
    seconds: float
    busy: dict[str, float]

    @property
    def limit(self) -> str:
        """The resource that is busiest."""
        return max(self.busy, key=self.busy.__getitem__)


class _Server:
    """A resource that serves one request at a time."""

    def __init__(self) -> None:
        self.free_at = self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Return when a request that arrives now is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at


def simulate(nbytes: int, nodes: int, costs: Costs, task: int = 256 * MIB, piece: int = 16 * MIB) -> Found:
    """Simulate a conversion of ``nbytes`` bytes on ``nodes`` nodes, in tasks and pieces of so many bytes."""
    coordinator, reads, writes = _Server(), _Server(), _Server()
    inward, outward = ([_Server() for _ in range(nodes)] for _ in range(2))
    copying = 0.0
    left = -(-nbytes // task)
    pieces = -(-task // piece)
    # (time, order, worker, pieces of its task that are left, step): a worker asks for a task, reads, copies, writes
    events = [(costs.start, n, n, 0, 0) for n in range(nodes * costs.workers)]
    order, end = len(events), 0.0
    while events:
        now, _, worker, rest, step = heapq.heappop(events)
        node = worker % nodes
        order += 1
        if not rest:
            if not left:
                end = max(end, now)
                continue
            left -= 1
            done = coordinator.serve(now, costs.task + costs.ledger * pieces + costs.payload / costs.network)
            heapq.heappush(events, (done, order, worker, pieces, 0))
        elif step == 0:
            done = max(reads.serve(now, piece / costs.reads), inward[node].serve(now, piece / costs.network))
            heapq.heappush(events, (done, order, worker, rest, 1))
        elif step == 1:
            copying += piece / costs.copy
            heapq.heappush(events, (now + piece / costs.copy, order, worker, rest, 2))
        else:
            done = max(writes.serve(now, piece / costs.writes), outward[node].serve(now, piece / costs.network))
            heapq.heappush(events, (done, order, worker, rest - 1, 0))
    busy = {
        "scheduler and ledger": coordinator.busy / end,
        "reads of the file system": reads.busy / end,
        "writes of the file system": writes.busy / end,
        "network of the nodes": max(s.busy for s in (*inward, *outward)) / end,
        "processors": copying / (end * nodes * costs.workers),
    }
    return Found(nodes, end, busy)


def measured(nbytes: int = 256 * MIB, count: int = 1000) -> Costs:
    """Measure what one machine can tell: a task of Dask, a line of the ledger, a worker's rate and start.

    The rate is that of a tensor of ``nbytes`` bytes, the time of a task that of ``count`` tasks."""
    import torch
    from distributed import Client, LocalCluster

    import lazyckpt
    from lazyckpt.jobs.batching import Task
    from lazyckpt.jobs.executor import run
    from lazyckpt.jobs.ledger import Ledger
    from lazyckpt.jobs.places import Folder
    from lazyckpt.jobs.sending import Descriptions

    costs = Costs()
    with tempfile.TemporaryDirectory() as folder:
        with Ledger(Folder(folder)) as ledger:
            number = ledger.begin("x", 1 << 40)
            begun = time.perf_counter()
            for n in range(20_000):
                ledger.add(number, n << 24, 16 * MIB, n)
            per_line = (time.perf_counter() - begun) / 20_000
        torch.save({"w": torch.zeros(nbytes // 4)}, Path(folder, "x.pt"))
        view = lazyckpt.open(Path(folder, "x.pt"), cache=False)
        begun = time.perf_counter()
        with ThreadPoolExecutor(1) as one:
            view.to_safetensors(Path(folder, "out"), progress=False, executor=one)
        rate = view.nbytes / (time.perf_counter() - begun)
        work = [part.__getitem__ for _, part in view["w"].pieces(16 * MIB)]
        payload = len(Descriptions([view["w"]]).pickled(work))
        begun = time.perf_counter()
        options = {"n_workers": 1, "threads_per_worker": 16, "dashboard_address": ":0", "local_directory": folder}
        with LocalCluster(**options) as cluster, Client(cluster) as client:  # type: ignore[no-untyped-call]
            client.submit(__import__, "torch").result()
            start = time.perf_counter() - begun
            begun = time.perf_counter()
            tasks = (Task(256 * MIB, 0, int) for _ in range(count))
            run(tasks, lambda task, result: None, client)
            per_task = (time.perf_counter() - begun) / count
    return replace(costs, task=per_task, ledger=per_line, payload=payload, copy=rate, start=start)


def table(found: list[Found], costs: Costs, nbytes: int) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        f"Measured: {costs.task * 1e3:.1f} ms for a task of Dask, {costs.ledger * 1e6:.0f} us for a line of the "
        f"ledger, {costs.copy / 1e9:.1f} GB/s for a worker, {costs.start:.0f} s to start one. Simulated for "
        f"{nbytes / 1e12:.1f} TB:",
        "",
        "| nodes | time | speedup | busiest |",
        "|---|---|---|---|",
    ]
    for one in found:
        share = f"{one.limit}, {one.busy[one.limit]:.0%}"
        lines.append(f"| {one.nodes} | {one.seconds:,.0f} s | {found[0].seconds / one.seconds:.1f} | {share} |")
    return "\n".join(lines)


def _plot(found: list[Found], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lazyckpt"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    nodes = [one.nodes for one in found]
    axes.plot(nodes, [found[0].seconds / n for n in nodes], "--", color="0.7", label="linear")
    axes.plot(nodes, [one.seconds for one in found], "o-", label="simulated")
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="seconds", xticks=nodes, xticklabels=map(str, nodes))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Measure, simulate, and write the table and the plot of the guide."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--bytes", type=float, default=5.7e12, help="bytes to convert")
    parser.add_argument("--write", action="store_true", help="write the page and the plot")
    options = parser.parse_args()
    costs = measured()
    nbytes = int(options.bytes)
    found = [simulate(nbytes, nodes, costs) for nodes in NODES]
    text = table(found, costs, nbytes)
    print(asdict(costs), text, sep="\n")
    if options.write:
        before, _, rest = _PAGE.read_text().partition(MARK)
        after = rest[rest.index("![Simulated") :]
        _PAGE.write_text(f"{before}{MARK}\n\n{text}\n\n{after}")
        _plot(found, _PLOT)


if __name__ == "__main__":
    main()
