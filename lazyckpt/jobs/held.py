"""What can be written: lazy tensors, and torch's own, wherever and however they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core.box import Shape, c_strides, tiles
from ..errors import DataError
from ..io.tensors import bits_of
from ..lazy import LazyArray


class Writable(Protocol):
    """Name, shape and dtype at once, the elements in pieces: what a `LazyArray` is to a writer."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    def numel(self) -> int: ...
    def pieces(self, nbytes: int) -> Iterator[tuple[int, Any]]: ...
    def runs(self) -> Any: ...


class Held:
    """A dense tensor of torch's in memory, on any device, with any strides, as something to write."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    @property
    def itemsize(self) -> int:
        return self.tensor.dtype.itemsize

    def numel(self) -> int:
        return self.tensor.numel()

    def pieces(self, nbytes: int) -> Iterator[tuple[int, Held]]:
        """As `LazyArray.pieces`."""
        strides = c_strides(self.shape)
        for box in tiles(self.shape, nbytes // self.itemsize):
            ahead = sum(a * s for a, s in zip(box.start, strides, strict=True))
            yield ahead, Held(self.tensor[box.slices])

    def runs(self) -> None:
        """It stands in no file."""

    def read_into(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the elements to a contiguous CPU tensor of the same shape and dtype."""
        source = self.tensor.resolve_conj().resolve_neg()
        bits = bits_of(self.itemsize)  # not every dtype can be copied with strides
        out.view(bits).copy_(source.view(bits))
        return out


class Viewed:
    """A lazy tensor's elements, in C order, under another shape of as many."""

    def __init__(self, tensor: LazyArray, shape: Shape) -> None:
        self.tensor = tensor
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def itemsize(self) -> int:
        return self.tensor.itemsize

    def numel(self) -> int:
        return self.tensor.numel()

    def pieces(self, nbytes: int) -> Iterator[tuple[int, Any]]:
        """As `LazyArray.pieces`."""
        return self.tensor.pieces(nbytes)

    def runs(self) -> Any:
        """As `LazyArray.runs`."""
        return self.tensor.runs()


def held(tensor: torch.Tensor, name: str) -> Held:
    """Raises DataError for a tensor that is not one dense array with its data on this rank.

    A DTensor is written where this rank holds all of it (its mesh is one device, or it is replicated); gathering it is
    a matter for all ranks, which a function that one rank may call alone cannot do.
    """
    plain: Any = tensor.detach()
    if hasattr(plain, "full_tensor"):
        spread = [p for n, p in zip(plain.device_mesh.shape, plain.placements, strict=True) if n > 1]
        if not all(p.is_replicate() for p in spread):
            raise DataError(
                f"{name!r} is a DTensor spread over {tuple(plain.device_mesh.shape)} ranks as {tuple(plain.placements)}"
                ": gather it on all of them first (.full_tensor()), or save with torch.distributed.checkpoint and "
                "convert that (dcp_to_safetensors)"
            )
        plain = plain.to_local()
    why = (
        f"a {plain.layout} tensor" if plain.layout != torch.strided
        else "a quantized tensor" if plain.is_quantized
        else "a nested tensor" if plain.is_nested
        else "on the meta device, without data" if plain.is_meta
        else f"a {type(tensor).__name__}, a tensor made of others" if is_traceable_wrapper_subclass(plain)
        else ""
    )  # fmt: skip
    if why:
        raise DataError(f"{name!r} is {why}: only dense tensors that hold their data can be written")
    return Held(plain)
