"""Run the benchmarks: python benchmarks/run.py [--folder DIR] [NAME ...]

They need lazyckpt with its test extras, about 34 GiB of disk in the folder (kept between runs), and an idle machine.
Every figure is a ratio against a named peer, measured in turn in the same run. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

NAMES = (
    "foundation",
    "deepspeed_convert",
    "deepspeed_open",
    "dcp",
    "megatron_open",
    "zarr_export",
    "zarr_read",
    "to_universal",
    "convert_out",
    "stats",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"which: {', '.join(NAMES)}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lazyckpt-benchmarks")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    rows = [row for name in options.names for row in importlib.import_module(name).main(options.folder)]
    missed = [row for row in rows if not row.met]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} figures met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
