"""To the accelerator: against the rate of copies from pinned memory, and the loaders that are made for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest, Skipped, need
from ..sample import Timed, warm

STEP = 64 << 20


def _to(settings: Settings, loader: str) -> Contest:
    if not torch.cuda.is_available():
        raise Skipped("not measured: no GPU")
    file = data.large(settings, "safetensors")
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


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    what = f"{settings.pick(1024, 64)} MiB to a GPU"
    yield Case(f"{what}, peer the pinned rate", partial(_to, settings, "pinned"), [Goal(1 / 0.9)])
    for loader in ("fastsafetensors", "InstantTensor"):
        yield Case(f"{what}, peer {loader}", partial(_to, settings, loader))


AREA = Area(
    "accelerator",
    "To the accelerator",
    "`view.to('cuda')` of a safetensors file in the system's cache. The goal is 0.9 of the rate of copies from pinned "
    "memory. Rows are measured only on a machine with a GPU.",
    _cases,
)
