"""Exports to zarr: uncompressed, against `cp` of the same files; files warm, and cold; and what memory that takes.

1 GiB in 64 MiB tensors, as a torch file and as safetensors. A copy is made as the export is: into a new folder, and
left to the system to bring to the disk. In many small tensors most of the time goes into making files: there the peer
copies as many, the exported hierarchy.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Row, drop_cache, report, run_fresh, seconds, show_seconds
from safetensors.torch import save_file

import lazyckpt

MIB = 1 << 20
RUNS = 11  # pairs: with fewer, what else the machine writes back to its disk decides
RUNS_SMALL = 5  # of many files, which take longer


def main(folder: Path) -> list[Row]:
    sources = _write(folder)
    rows: list[Row] = []
    small = sources.pop("small")
    for name, source in sources.items():
        for cold in (False, True):
            what = f"1 GiB of {name}, files {'cold' if cold else 'warm'}"
            rows += [_against_cp(f"{what}, peer cp", source, source, folder / "exported", cold)]
    hierarchy = folder / "zarr-1g-small"
    if not hierarchy.exists():
        lazyckpt.open(small).to_zarr(hierarchy, progress=False)
    what = "1 GiB in 2,048 tensors, files warm, peer cp -r of the hierarchy"
    rows += [_against_cp(what, small, hierarchy, folder / "exported", False, RUNS_SMALL)]
    setup = "import lazyckpt, numcodecs, torch"
    for codec, limit in (("None", 192), ("'zstd'", 512)):
        out = folder / "exported"
        shutil.rmtree(out, ignore_errors=True)
        source = sources["torch"]
        taken = run_fresh(
            setup, f"lazyckpt.open({str(source)!r}).to_zarr({str(out)!r}, codec={codec}, memory='256MiB')"
        )
        shutil.rmtree(out)
        what = f"codec={codec}, memory='256MiB': peak memory / {limit} MiB"
        rows.append(Row(what, f"{taken.peak / MIB:.0f} MiB", f"{limit} MiB", taken.peak / (limit * MIB), 1))
    report("zarr, written", rows)
    return rows


def _write(folder: Path) -> dict[str, Path]:
    """Name -> file; written if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    found = {"torch": folder / "zarr-1g.pt", "safetensors": folder / "zarr-1g.safetensors"}
    if not all(p.exists() for p in found.values()):
        state = {f"layers.{n}.weight": torch.randn(4096, 4096) for n in range(16)}
        torch.save(state, found["torch"])
        save_file(state, found["safetensors"])
    found["small"] = folder / "zarr-1g-small.safetensors"
    if not found["small"].exists():
        state = {f"layers.{n}.weight": torch.randn(256, 512) for n in range(2048)}
        save_file(state, found["small"])
    return found


def _against_cp(what: str, source: Path, copied: Path, out: Path, cold: bool, runs: int = RUNS) -> Row:
    def ours() -> None:
        lazyckpt.open(source, cache=False).to_zarr(out, progress=False)

    def copy() -> None:
        out.mkdir()
        subprocess.run(["cp", "-r", copied, out], check=True)

    def once(do: Callable[[], None]) -> float:
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run(["sync"], check=True)  # what was written before is not what is measured
        if cold:
            drop_cache(source)
        else:
            for path in (source, *(p for p in copied.rglob("*") if p.is_file())):
                subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
        return seconds(do)

    once(ours), once(copy)
    pairs = [(once(ours), once(copy)) for _ in range(runs)]
    shutil.rmtree(out)
    a, b = (statistics.median(p[n] for p in pairs) for n in (0, 1))
    return Row(what, show_seconds(a), show_seconds(b), statistics.median(x / y for x, y in pairs), 1.25)
