"""The areas of the suite, and a run of them."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import host, report
from .case import Area, Case, Settings
from .row import Row

NAMES = (
    "importing",
    "slices",
    "fragments",
    "whole",
    "one_tensor",
    "opening",
    "ranks",
    "cache",
    "scaling",
    "writing",
    "converting",
    "expressions",
    "zarr",
    "statistics",
    "trust",
    "workers",
    "processes",
    "accelerator",
    "remote",
    "explore",
)
_SECONDS = (3.0, 0.2)  # a case's pairs are measured for so long: in a full run, in a quick one
_LEAST = (5, 3)  # and at least so many


def areas(names: Sequence[str] = NAMES) -> list[Area]:
    """The areas of these names. Raises ValueError if there is no such area."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"no area {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return [importlib.import_module(f"{__package__}.areas.{name}").AREA for name in names]


def cases(area: Area, settings: Settings, only: str = "") -> list[Case]:
    """The cases of an area of which a row's text contains ``only``; in a quick run, the quick ones."""
    chosen = [case for case in area.cases(settings) if case.quick or not settings.quick]
    return [case for case in chosen if any(only.lower() in text.lower() for text in case.texts())]


def history(path: Path) -> list[dict[str, Any]]:
    """The runs of a history or a result, without the rows that the suite no longer has."""
    with tempfile.TemporaryDirectory() as folder:
        known = {
            (area.name, quick, text)
            for area in areas()
            for quick in (False, True)
            for case in cases(area, Settings(Path(folder), quick))
            for text in case.texts()
        }
    found = report.runs(path)
    for one in found:
        one["rows"] = [row for row in one["rows"] if (row["area"], one["quick"], row["what"]) in known]
    return found


def run(names: Sequence[str], settings: Settings, only: str = "") -> Iterator[tuple[Area, list[Row], float]]:
    """Measure area after area: the area, its rows, and the seconds that it took."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    chosen = areas(names)
    gc.freeze()  # what is imported is not looked at again by each collection
    try:
        yield from _run(chosen, settings, only)
    finally:
        host.close()


def _run(chosen: Sequence[Area], settings: Settings, only: str) -> Iterator[tuple[Area, list[Row], float]]:
    for area in chosen:
        start = time.perf_counter()
        rows: list[Row] = []
        for case in cases(area, settings, only):
            print(f"{area.name}: {case.what}", end=" ", file=sys.stderr, flush=True)
            began = time.perf_counter()
            try:
                rows += case.rows(area.name, _SECONDS[settings.quick], _LEAST[settings.quick])
            except Exception as error:  # a row that fails is reported, and the others are measured
                traceback.print_exc()
                rows += case.failed(area.name, error)
            print(f"({time.perf_counter() - began:.1f} s)", file=sys.stderr, flush=True)
        yield area, rows, time.perf_counter() - start
