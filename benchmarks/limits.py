"""What the hardware allows: plain positioned reads with as many threads as lazyckpt uses, and `cp`."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

THREADS = max(4, min(8, os.cpu_count() or 1))  # as lazyckpt/io/pool.py
_STEP = 8 << 20

Place = tuple[int, torch.dtype, tuple[int, ...]]  # the offset in the file, and what is there


def places(path: Path) -> dict[str, Place]:
    """Where each tensor of a safetensors file is."""
    import json

    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: (8 + length + found["data_offsets"][0], dtypes[found["dtype"]], tuple(found["shape"]))
        for name, found in header.items()
        if name != "__metadata__"
    }


class Preadv:
    """Positioned reads by a pool of threads that is kept, as lazyckpt keeps its own."""

    def __init__(self, path: Path, threads: int = THREADS) -> None:
        self.file, self.size = os.open(path, os.O_RDONLY), path.stat().st_size
        self.pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.file)

    def each(self, where: dict[str, Place]) -> dict[str, torch.Tensor]:
        """Every tensor into its own new memory; large ones in pieces, small ones in batches."""
        found = {name: torch.empty(shape, dtype=dtype) for name, (_, dtype, shape) in where.items()}
        pieces = [
            (memoryview(tensor.view(-1).view(torch.uint8).numpy())[at : at + _STEP], where[name][0] + at)
            for name, tensor in found.items()
            for at in range(0, tensor.nbytes, _STEP)
        ]
        self._read(pieces)
        return found

    def whole(self) -> mmap.mmap:
        """All bytes of the file into one new buffer, of huge pages where the system has them."""
        out = mmap.mmap(-1, max(self.size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            out.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(out)
        self._read([(view[at : at + _STEP], at) for at in range(0, self.size, _STEP)])
        return out

    def through(self, nbytes: int) -> None:
        """All bytes of the file, into the same ``nbytes`` of memory again and again."""
        out = memoryview(bytearray(min(nbytes, self.size)))
        steps = range(0, self.size, _STEP)
        targets = [out[at : at + _STEP] for at in range(0, len(out) - _STEP + 1, _STEP)] or [out]
        self._read([(targets[n % len(targets)][: self.size - at], at) for n, at in enumerate(steps)])

    def _read(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        size = sum(len(piece) for piece, _ in pieces)
        batches, batch, left = [], [], 0
        for piece in pieces:
            batch.append(piece)
            left += len(piece[0])
            if left >= min(_STEP, size // THREADS):
                batches.append(batch)
                batch, left = [], 0
        list(self.pool.map(self._all, [*batches, batch]))

    def _all(self, batch: Sequence[tuple[memoryview, int]]) -> None:
        for target, offset in batch:
            done = 0
            while done < len(target):
                got = os.preadv(self.file, [target[done:]], offset + done)
                if not got:
                    raise EOFError(f"the file ends at {offset + done}")
                done += got


def copy(sources: Sequence[Path], out: Path) -> None:
    """`cp -r`, of all at the same time if there are several."""
    if len(sources) == 1:
        subprocess.run(["cp", "-r", sources[0], out], check=True)
        return
    out.mkdir()
    running = [subprocess.Popen(["cp", "-r", source, out]) for source in sources]
    failed = [one.args for one in running if one.wait()]
    if failed:
        raise OSError(f"failed: {failed}")
