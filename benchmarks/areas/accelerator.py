"""To the accelerator: against the rate of copies from pinned memory, and the loaders that are made for it.

Two rows need no accelerator: the ring of buffers in front of a simulated one, which takes the time of a copy and copies
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lazyckpt
from lazyckpt.io.reading.device import Device, Piece, ring

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest, Skipped, need
from ..limits import Preadv
from ..sample import Timed, warm

STEP = 64 << 20
BUFFERS = 96 << 20  # bytes that the ring has at most
RATE = 2e9  # bytes a second of the simulated device: slower than reads from the system's cache on two cores


def _to(settings: Settings, loader: str, make: Callable[[Settings, str], Path] = data.large) -> Contest:
    if not torch.cuda.is_available():
        raise Skipped("not measured: no GPU")
    file = make(settings, "safetensors")
    warm(file)
    view = lazyckpt.open(file, cache=False)

    def ours() -> dict[str, torch.Tensor]:
        return _finished(view.to("cuda"))

    pinned = ("copies from pinned memory", Timed(partial(_pinned, torch.empty(STEP, dtype=torch.uint8).pin_memory(),
                                                         file.stat().st_size)))  # fmt: skip
    if loader == "pinned":
        return Contest(Timed(ours), pinned, calls=1, most=25)
    if loader == "fastsafetensors":
        module = need("fastsafetensors")
        peer = Timed(lambda: _finished(_fastsafetensors(module, str(file))))
    else:
        module = need("instanttensor")
        peer = Timed(lambda: _finished(_instanttensor(module, str(file))))
    return Contest(Timed(ours), (loader, peer), pinned, calls=1, most=15)


def _finished(tensors: Any) -> Any:
    torch.cuda.synchronize()
    return tensors


def _pinned(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """As many bytes as the file has, from one pinned buffer again and again: what the bus can do."""
    out = torch.empty(size, dtype=torch.uint8, device="cuda")
    for at in range(0, size, STEP):
        part = out[at : at + STEP]
        part.copy_(buffer[: len(part)], non_blocking=True)
    torch.cuda.synchronize()
    return out


def _fastsafetensors(module: Any, file: str) -> dict[str, torch.Tensor]:
    """Its tensors are views of a buffer, which is closed with the loader: copied, as ours."""
    loader = module.SafeTensorsFileLoader(module.SingleGroup(), torch.device("cuda"), nogds=True)
    loader.add_filenames({0: [file]})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name).clone() for name in buffer.key_to_rank_lidx}
    buffer.close()
    loader.close()
    return tensors


def _instanttensor(module: Any, file: str) -> dict[str, torch.Tensor]:
    """Its tensors own their memory."""
    with module.safe_open(file, framework="pt", device=0) as opened:
        return dict(opened.tensors())


class Simulated(Device):
    """A device that is busy for as long as copies at ``rate`` bytes a second take, one after the other."""

    def __init__(self, rate: float) -> None:
        super().__init__(torch.device("meta"))
        self.rate = rate
        self.free_at = 0.0

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, host: torch.Tensor, pieces: Sequence[Piece]) -> Callable[[], object]:
        done = self.free_at = max(time.perf_counter(), self.free_at) + host.nbytes / self.rate
        return lambda: time.sleep(max(0.0, done - time.perf_counter()))


def _simulated(settings: Settings, make: Callable[[Settings, str], Path], rate: float) -> Contest:
    """The peer reads all bytes of the file into memory as large as the ring's buffers, and waits for nothing else."""
    file = make(settings, "safetensors")
    warm(file)
    view = lazyckpt.open(file, cache=False)
    plain = Preadv(file)

    def ours() -> list[torch.Tensor]:
        with ring(Simulated(rate)) as way:
            return [tensor._send(way) for tensor in view.values()]

    return Contest(Timed(ours), ("preadv", Timed(lambda: plain.through(BUFFERS))), calls=1, most=31, done=plain.close)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64) << 20
    kinds = [("16 tensors", data.large), ("1,024 tensors", data.middle)]
    for count, make in kinds:
        what = f"{size >> 20} MiB in {count} to a GPU, peer the pinned rate"
        yield Case(what, partial(_to, settings, "pinned", make), [Goal(1 / 0.9)])
    for loader in ("fastsafetensors", "InstantTensor"):
        yield Case(f"{size >> 20} MiB to a GPU, peer {loader}", partial(_to, settings, loader))
    for count, make in kinds:
        what = f"{size >> 20} MiB in {count} to a simulated device"
        yield Case(f"{what} that is infinitely fast", partial(_simulated, settings, make, math.inf), [Goal(1 / 0.95)])
        goal = Goal(1 / 0.9, against=size / RATE, budget=f"copies at {RATE / 1e9:.0f} GB/s")
        yield Case(f"{what} of {RATE / 1e9:.0f} GB/s", partial(_simulated, settings, make, RATE), [goal])


AREA = Area(
    "accelerator",
    "To the accelerator",
    "`view.to('cuda')` of a safetensors file in the system's cache. The goal is 0.9 of the rate of copies from pinned "
    "memory. Rows with a GPU are measured only on a machine that has one. The rows with a simulated device measure "
    "what needs none: what the ring of buffers adds to plain reads, and whether reads and copies overlap. The "
    "simulated device takes the time of a copy, and copies nothing.",
    _cases,
)
