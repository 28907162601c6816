"""Files of ranks that are copies of each other, although they should hold different elements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import some
from ..report import Finding
from .sweep import Record, Swept

_LEAST = 256  # bytes of elements from which files are compared


def copies(swept: Swept, records: Mapping[str, Sequence[Record]]) -> Iterator[Finding]:
    """Yield findings about files whose records all have the same sizes and checksums.

    Each run of elements was planned from one file alone, so two files with runs hold different elements: replicas that
    are not read have none. Files whose elements are all the same number (a bias before the first step) can be equal.

    Parameters
    ----------
    swept
        What `sweep` found.
    records
        Path -> the records of the file with their recorded CRC-32.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    runs = swept.runs
    for number, path in enumerate(swept.paths):
        own = records.get(path, ())
        first, last = np.searchsorted(runs.files, (number, number + 1)).tolist()
        if not own or first == last or sum(record.nbytes for record in own) < _LEAST:
            continue
        mean = swept.squares[first:last].astype(np.float64) / np.maximum(runs.counts[first:last], 1)
        peak = swept.largest[first:last].astype(np.float64) ** 2
        if (np.abs(mean - peak) <= 1e-3 * peak).all():
            continue  # all runs are constant
        series = re.sub(r"\d+", "#", path)  # the names of ranks' files differ in numbers
        alike.setdefault((series, *((record.nbytes, record.crc) for record in own)), []).append(path)
    for paths in alike.values():
        if len(paths) > 1:
            text = f"{some(paths)} have the same contents, although they are files of different ranks"
            yield Finding("identical-files", text, None, details={"files": paths[:1000]})
