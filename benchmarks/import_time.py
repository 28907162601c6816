"""What `import lazyckpt` costs beside `import torch`, which it imports on first use: each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import Row, paired, report, show_seconds

RUNS = 9
LIMIT = 1.5


def imported(module: str) -> None:
    """A new Python that imports it, and ends."""
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def main(folder: Path) -> list[Row]:
    ours, peer, ratio = paired(lambda: imported("lazyckpt"), lambda: imported("torch"), RUNS)
    what = "`import lazyckpt` in a fresh process, against `import torch`"
    rows = [Row(what, show_seconds(ours), show_seconds(peer), ratio, LIMIT)]
    report("Importing", rows)
    return rows
