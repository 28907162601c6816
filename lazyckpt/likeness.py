"""What numpy, torch and DLPack ask of a tensor: a lazy one answers, and reads where that takes elements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from .core.dtypes import to_numpy


class Likeness:
    """A name, a shape, a dtype and elements, as a tensor."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read a part."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (what a dense copy takes), not of the file."""
        return self.numel() * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """The CPU: where reading without `to` puts it."""
        return torch.device("cpu")

    # torch asks these of what it takes for a tensor (nn.Module.load_state_dict does)
    is_meta = False
    is_sparse = False
    is_quantized = False
    is_nested = False
    requires_grad = False
    layout = torch.strided

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def contiguous(self) -> torch.Tensor:
        """Read the whole, as a tensor of torch's: what DeepSpeed's lazy state dicts are asked."""
        return self[...]

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read the whole as a numpy array; bf16 and fp8 have the dtypes of ml_dtypes. Raises DataError where numpy has
        no such dtype."""
        return to_numpy(self[...])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a lazy tensor has no memory to share: np.asarray(t, copy=False) cannot be done")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self[...].__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return torch.empty(0, device="cpu").__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Torch functions take a lazy tensor for the tensor it reads as."""
        return func(*(_real(a) for a in args), **{k: _real(v) for k, v in (kwargs or {}).items()})

    def detach(self) -> torch.Tensor:
        return self[...]

    def item(self) -> int | float | bool | complex:
        """The only element, as a Python number. Raises RuntimeError, as torch does, if there are more."""
        return self[...].item()

    def tolist(self) -> Any:
        return self[...].tolist()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for n in range(len(self)):
            yield self[n]

    def __bool__(self) -> bool:
        return bool(self[...])


def _real(value: Any) -> Any:
    if isinstance(value, Likeness):
        return value[...]
    if isinstance(value, list | tuple) and any(isinstance(v, Likeness) for v in value):
        return type(value)(_real(v) for v in value)
    return value
