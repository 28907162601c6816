"""Record the checkpoint that `lazyckpt demo` opens: lazyckpt/demo/zero3.zip.

    python tools/make_demo.py     # needs lazyckpt's test extra; about a minute

DeepSpeed trains a character-level Llama on the text of LICENSE with ZeRO-3 on 4 processes and saves it. The zip holds
the files of that save as they are, without the recovery scripts that DeepSpeed copies beside them, and ``truth.json``:
the SHA-256 of every tensor that the training processes held when they saved.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "lazyckpt" / "demo" / "zero3.zip"
DATE = (2026, 11, 1, 0, 0, 0)  # of every entry: what differs between two recordings is what training wrote


def record(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.writers.deepspeed_demo import DemoSpec
    from tests.writers.deepspeed_launch import launch

    launch(folder, {"zero3": DemoSpec(text=(ROOT / "LICENSE").read_text("utf-8"))})
    checkpoint = folder / "zero3" / "ckpt"
    files = {"truth.json": folder / "zero3" / "truth.json"}
    files |= {f"zero3/{p.relative_to(checkpoint)}": p for p in checkpoint.rglob("*") if p.is_file()}
    with zipfile.ZipFile(TARGET, "w") as archive:
        for name, path in sorted(files.items()):
            if path.suffix != ".py":
                entry = zipfile.ZipInfo(name, DATE)
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
