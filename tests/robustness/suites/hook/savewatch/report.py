"""The report: one line of JSON for each save, appended by whichever process saved."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EQUAL = "equal"  # every tensor that was saved is read, bit for bit
REFUSED = "refused"  # FormatError: lazyckpt says that it does not read this
MISMATCH = "mismatch"  # a tensor is lost, has another shape or dtype, or other elements
ERROR = "error"  # another LazyckptError: an honest file is called damaged
CRASH = "crash"  # an exception that is no LazyckptError
GONE = "gone"  # the suite removed the files before they were read
SKIPPED = "skipped"  # the harness cannot tell what was saved

FAILURES = (MISMATCH, ERROR, CRASH)


def write(record: dict[str, Any]) -> None:
    """Append a record to the report of this run, in one write, so that processes do not mix their lines."""
    record = {"test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0], "pid": os.getpid(), **record}
    line = json.dumps(record, default=str) + "\n"
    with open(os.environ["SAVEWATCH_REPORT"], "ab", buffering=0) as report:
        report.write(line.encode())


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a report; none if nothing was saved."""
    report = Path(path)
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def summary(records: Iterable[dict[str, Any]]) -> str:
    """What a report says: counts by function and outcome, failures with their tests, and lines of `problems`."""
    records = list(records)
    lines = []
    counts = Counter((record["saver"], record["outcome"]) for record in records)
    for (saver, outcome), count in sorted(counts.items()):
        tensors = sum(r.get("tensors", 0) for r in records if (r["saver"], r["outcome"]) == (saver, outcome))
        lines.append(f"{saver:28} {outcome:9} {count:6,} saves {tensors:8,} tensors")
    for outcome in (*FAILURES, REFUSED, SKIPPED):
        found: dict[str, list[str]] = {}
        for record in records:
            if record["outcome"] == outcome:
                found.setdefault(_general(f"{record['saver']}: {record.get('what', '')}"), []).append(record["test"])
        lines += _listed(outcome, found)
    told: dict[str, list[str]] = {}
    for record in records:
        for line in record.get("problems", ()):
            told.setdefault(_general(line), []).append(record["test"])
    return "\n".join(lines + _listed("problems", told))


def _listed(title: str, found: dict[str, list[str]]) -> list[str]:
    lines = [f"\n{title}: {sum(map(len, found.values()))}"] if found else []
    for what, tests in sorted(found.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(tests)} x {what[:600]}")
        lines += [f"      in {test}" for test in sorted(set(tests))[:3]]
    return lines


def _general(line: str) -> str:
    """A line without its paths and numbers, so that lines of one kind are counted as one."""
    return re.sub(r"\d[\d,]*", "N", re.sub(r"(/[\w.=+-]+)+", "PATH", line))
