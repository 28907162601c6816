"""Ledgers: what an interrupted export left. They are read when the same export is called again."""

from __future__ import annotations

from lazyckpt.jobs.ledger import read_ledger

from ..contract import DifferenceError, Target
from .sources import write

SEED = (
    b'["boot", "7d8a"]\n["file", 0, "model.safetensors", 4096]\n[0, 0, 1024, 123456]\n[0, 1024, 3072, 99]\n'
    b'["whole", "config.json", 17, 5]\n["file", 1, "b.safetensors", 10]\n[1, 0, 10, 1]\n["moving", true]\n'
)


def ledger(data: bytes) -> None:
    found = read_ledger(write("ledger", data))
    if found.length > len(data):
        raise DifferenceError("more valid bytes than there are")
    found.nbytes, [run.nbytes for file in found.files.values() for run in file.runs.values()]


TARGETS = (Target("jobs.ledger", ledger, lambda: [SEED], "lines"),)
