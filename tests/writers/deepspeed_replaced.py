"""What DeepSpeed compiles for devices, replaced for the CPU. What is saved does not depend on any of it."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def asynchronous_writes() -> None:
    """FastPersist's writes through libaio, and its view of tensors as bytes."""
    builders = importlib.import_module("deepspeed.ops.op_builder")
    writer = importlib.import_module("deepspeed.io.fast_file_writer")
    builders.AsyncIOBuilder.load = lambda self, verbose=True: Writes
    writer.UtilsBuilder = Bytes  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # (the launcher's)


class Writes:
    """``aio_handle`` of DeepSpeed's module, and the handle."""

    def __init__(self) -> None:
        self.pending = 0

    @classmethod
    def aio_handle(cls, **_: Any) -> Writes:
        return cls()

    def get_alignment(self) -> int:
        return 512

    def async_pwrite(self, buffer: Tensor, fd: int, offset: int) -> int:
        with open(f"/proc/self/fd/{fd}", "r+b") as file:  # (fd itself wants aligned memory)
            file.seek(offset)
            file.write(buffer.numpy().tobytes())
        self.pending += 1
        return 0

    def wait(self) -> int:
        done, self.pending = self.pending, 0
        return done


class Bytes:
    """``cast_to_byte_tensor`` of DeepSpeed's module."""

    def load(self) -> Bytes:
        return self

    def cast_to_byte_tensor(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.contiguous().view(-1).view(torch.uint8) for t in tensors]


def compressed_all_reduce() -> None:
    """The 1-bit all-reduce, whose bits are packed by a kernel."""
    module = importlib.import_module("deepspeed.runtime.comm.compressed")
    module.CompressedBackend = OneBit  # type: ignore[attr-defined]


class OneBit:
    """Signs and a scale, with the error kept for the next step, as in runtime/comm/compressed.py; the second error, of
    the ranks' mean, is only counted."""

    def __init__(self, mpu: object) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()

    def compressed_allreduce(self, t: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int) -> Tensor:
        flat = t.flatten() + worker_error[: t.numel()]
        signs = flat.norm() / t.numel() ** 0.5 * flat.sign()
        worker_error[: t.numel()] = flat - signs
        server_error.add_(0.5)
        dist.all_reduce(signs)
        return t.data.copy_((signs / self.size).view(t.shape))


def coalesced_gathers() -> None:
    """MiCS gathers several tensors in one call, which gloo cannot."""
    module = importlib.import_module("deepspeed.comm.torch")
    module.get_coalescing_manager = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]
