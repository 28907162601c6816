"""What checkpoints of torch.distributed.checkpoint are written of: a model, odd tensors and objects, packers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._extension import StreamTransformExtension

__all__ = ["Reversed", "TinyNet", "Zstd", "adam", "odd_objects", "odd_tensors", "train"]


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("stat", torch.tensor(0.5 + inner))
        self.register_buffer("mask", torch.arange(inner) % 3 == 0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gain * self.down(self.up(self.norm(x)).relu())
        return out


class TinyNet(nn.Module):
    """A dim that no world size divides, parameters with fewer rows than ranks, buffers of other dtypes."""

    def __init__(self, hidden: int = 6, inner: int = 7, vocab: int = 11) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([Block(hidden, inner), Block(hidden, inner + 2)])
        self.head = nn.Linear(hidden, 5)
        self.register_buffer("ids", torch.arange(9))
        self.register_buffer("small", torch.arange(4, dtype=torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps, so that every optimizer state has values of its own."""
    for step in range(2):
        torch.manual_seed(step)
        loss = model(torch.arange(8) % 11).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def odd_tensors() -> dict[str, Tensor]:
    torch.manual_seed(5)
    base = torch.randn(6, 8)
    found = {
        str(dtype).removeprefix("torch."): torch.randn(5, 3).mul(4).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.complex64,
                      torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)
    }  # fmt: skip
    found |= {
        "bool": torch.tensor([True, False, True]),
        "uint16": torch.arange(5).to(torch.uint16),
        "scalar": torch.tensor(2.5),
        "integer": torch.tensor(7),
        "empty": torch.zeros(0, 7),
        "hollow": torch.zeros(3, 0, dtype=torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "transposed": base.t(),
        "window": base[1:4, 2:5],
        "steps": base[::2, ::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "many": torch.randn(2, 3, 1, 2, 2),
        "tied.one": base,
        "tied.two": base,
        "key.with.dots": base[0].clone(),
        "parameter": nn.Parameter(base.clone()).data,
    }
    return found


def odd_objects() -> dict[str, Any]:
    return {
        "epoch": 7,
        "name": "hello",
        "nothing": None,
        "plain": [1, 2, "x"],
        "bytes": b"\0\1",
        "set": {1, 2},
        "array": np.arange(6).reshape(2, 3),
        "nested": {"deep": {"lr": 0.5}, "pair": (1, 2)},
    }


class Zstd(StreamTransformExtension):
    """What torch's ZStandard extension writes, by numcodecs: frames that do not tell their size, as a stream gives."""

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> Zstd:
        return Zstd()

    def get_descriptor(self) -> str:
        return "stream.zstd/1"

    def pack(self, data: bytes) -> bytes:
        from numcodecs import zstd

        half = len(data) // 2  # a file of several frames is one stream too
        return b"".join(_sizeless(zstd.compress(part)) for part in (data[:half], data[half:]))

    def transform_to(self, output: Any) -> Any:
        outer = self

        class Writer(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(outer.pack(self.getvalue()))
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        raise NotImplementedError("torch asks this of a reader: here it only writes")


class Reversed(Zstd):
    """An extension that nobody else knows."""

    def get_descriptor(self) -> str:
        return "stream.reversed@example.org/3"

    def pack(self, data: bytes) -> bytes:
        return data[::-1]


def _sizeless(frame: bytes) -> bytes:
    """The same frame without its content size (RFC 8878, section 3.1.1.1)."""
    descriptor = frame[4]
    single, width = descriptor >> 5 & 1, (descriptor >> 5 & 1, 2, 4, 8)[descriptor >> 6]
    window = b"\x58" if single else frame[5:6]
    return frame[:4] + bytes([descriptor & 0x1F]) + window + frame[5 + (not single) + width :]
