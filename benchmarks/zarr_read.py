"""Reading back: a hierarchy of 1 GiB, uncompressed and with blosc, through lazyckpt and through zarr-python.

Both read all arrays, one after another, into fresh memory. zarr-python runs with its own defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, paired, report, show_seconds

import lazyckpt

ARRAYS, ROWS, COLUMNS = 16, 4096, 4096  # 64 MiB each
CHUNK = 1024  # rows: 16 MiB
RUNS = 7


def main(folder: Path) -> list[Row]:
    from zarr.codecs import BloscCodec

    kinds: dict[str, Any] = {"uncompressed": None, "blosc (zstd, byte-shuffled)": BloscCodec(cname="zstd", clevel=1)}
    rows = []
    for n, (kind, codec) in enumerate(kinds.items()):
        path = folder / f"zarr-read-{n}"
        if not (path / "done").exists():
            _write(path, codec)
        ours, theirs, ratio = paired(lambda path=path: _ours(path), lambda path=path: _theirs(path), RUNS)  # type: ignore[misc]
        what = f"all arrays, 1 GiB, {kind}; peer: zarr-python"
        rows.append(Row(what, show_seconds(ours), show_seconds(theirs), ratio, 1.1))
    report("zarr, reading", rows)
    return rows


def _write(path: Path, codec: Any) -> None:
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    generator = np.random.default_rng(0)
    for n in range(ARRAYS):
        options: dict[str, Any] = {"chunks": (CHUNK, COLUMNS), "compressors": codec}
        array = group.create_array(f"layers/{n}/weight", shape=(ROWS, COLUMNS), dtype="f4", **options)
        array[...] = generator.standard_normal((ROWS, COLUMNS), np.float32) / 32
    (path / "done").touch()


def _ours(path: Path) -> None:
    for t in lazyckpt.open(path, cache=False).values():
        t[...]


def _theirs(path: Path) -> None:
    import zarr

    group = zarr.open_group(str(path), mode="r")
    for n in range(ARRAYS):
        group[f"layers/{n}/weight"][...]
