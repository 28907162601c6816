"""`Likeness`: the protocols of numpy, torch and DLPack on lazy tensors; elements are read only where one is needed."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .core.dtypes import dtype_of, to_numpy, widened
from .errors import DataError

if TYPE_CHECKING:
    import torch
else:
    from .deferred import torch

# -- numpy's functions: they get arrays that numpy computes with correctly.

_LOOKING = frozenset(
    (
        np.shape, np.ndim, np.size, np.iscomplexobj, np.isrealobj, np.result_type, np.can_cast, np.empty_like,
        np.zeros_like, np.ones_like, np.full_like,
    )
)  # fmt: skip
_MOVING = frozenset(
    (
        np.concatenate, np.stack, np.vstack, np.hstack, np.dstack, np.column_stack, np.block, np.reshape, np.ravel,
        np.transpose, np.moveaxis, np.swapaxes, np.rollaxis, np.squeeze, np.expand_dims, np.broadcast_to,
        np.broadcast_arrays, np.flip, np.fliplr, np.flipud, np.rot90, np.roll, np.repeat, np.tile, np.take,
        np.compress, np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit, np.copy, np.atleast_1d, np.atleast_2d,
        np.atleast_3d, np.diag, np.diagonal, np.tril, np.triu, np.save, np.savez, np.savez_compressed,
    )
)  # fmt: skip
_WRITING = frozenset((np.copyto, np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal))


def array_function(
    kind: type,
    read: Callable[[Any], torch.Tensor],
    func: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function of numpy with arrays in the place of tensors.

    Parameters
    ----------
    kind
        The class of the tensors in ``args`` and ``kwargs``, also inside lists and tuples.
    read
        A function that reads a whole tensor.
    func, args, kwargs
        The function and its arguments.

    Returns
    -------
    Any
        The function's result; NotImplemented for a function that would write to a tensor.
    """
    args = tuple(args)
    if func in _WRITING or _holds(kind, _output(func, args, kwargs)):
        return NotImplemented

    def array(tensor: Any) -> np.ndarray[Any, Any]:
        if func in _LOOKING:
            return np.broadcast_to(np.empty((), dtype_of(tensor.dtype).numpy), tuple(tensor.shape))
        whole = read(tensor)
        return to_numpy(whole if func in _MOVING else whole.to(_wide(whole.dtype)))

    return func(*(replaced(a, kind, array) for a in args), **{k: replaced(v, kind, array) for k, v in kwargs.items()})


def _output(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the ``out`` argument of a call of a numpy function, by name or position."""
    try:
        return signature(func).bind_partial(*args, **kwargs).arguments.get("out")
    except (TypeError, ValueError):  # the function has no signature, or other parameters
        return kwargs.get("out")


def array_ufunc(
    kind: type,
    read: Callable[[Any], torch.Tensor],
    ufunc: np.ufunc,
    method: str,
    inputs: Iterable[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a method of a numpy ufunc with arrays in the place of tensors. See `array_function`."""
    if method == "at" or _holds(kind, kwargs.get("out")):
        return NotImplemented

    def array(tensor: Any) -> np.ndarray[Any, Any]:
        return to_numpy(read(tensor).to(_wide(tensor.dtype)))

    return getattr(ufunc, method)(
        *(replaced(x, kind, array) for x in inputs), **{k: replaced(v, kind, array) for k, v in kwargs.items()}
    )


def replaced(value: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """Return ``value`` with every object of ``kind`` replaced by ``new`` of it, also inside lists and tuples."""
    if isinstance(value, kind):
        return new(value)
    if isinstance(value, list | tuple) and any(_holds(kind, v) for v in value):
        return type(value)(replaced(v, kind, new) for v in value)
    return value


def _holds(kind: type, value: Any) -> bool:
    return isinstance(value, kind) or (isinstance(value, list | tuple) and any(_holds(kind, v) for v in value))


# -- The methods and protocols of a tensor.


class Likeness:
    """The attributes and methods that numpy, torch and DLPack expect of a tensor."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read the indexed elements."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in memory (of a dense copy), not in the file."""
        return self.numel() * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """The CPU: indexing reads to it."""
        return torch.device("cpu")

    # torch looks these up on objects that it treats as tensors (nn.Module.load_state_dict does)
    is_meta = False
    is_sparse = False
    is_quantized = False
    is_nested = False
    requires_grad = False

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def contiguous(self) -> torch.Tensor:
        """Read the whole tensor. DeepSpeed's lazy state dicts have this method, too."""
        return self[...]

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read the whole tensor as a numpy array, bit for bit; bf16 and fp8 get the dtypes of ml_dtypes.

        Do not compute with arrays of these dtypes: numpy rounds every step of a sum to them, so that ``mean`` and
        ``std`` are wrong, and a sum of float16 overflows at 65,504. ``t.to(torch.float32).numpy()`` is right, and so is
        numpy on the tensor itself (``np.std(t)``), which computes in float32.

        Returns
        -------
        numpy.ndarray
            An array of the same shape.

        Raises
        ------
        DataError
            numpy lacks the dtype, or does not support an array of this shape.
        LazyckptError
            What ``t[...]`` raises.
        """
        return to_numpy(self[...])

    def __array_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Let numpy's functions accept a lazy tensor as an array. Functions that compute get floats of 8 and 16 bits as
        float32."""
        return array_function(Likeness, _whole, func, args, kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return array_ufunc(Likeness, _whole, ufunc, method, inputs, kwargs)

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
        """Let torch's functions accept a lazy tensor: they get the tensor that it reads as."""
        return func(
            *(replaced(a, Likeness, _whole) for a in args),
            **{k: replaced(v, Likeness, _whole) for k, v in (kwargs or {}).items()},
        )

    def detach(self) -> torch.Tensor:
        return self[...]

    if not TYPE_CHECKING:  # so that a type checker reports names that do not exist

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For a method or attribute of torch.Tensor that lazy tensors lack, the message says
            how to call it."""
            if not name.startswith("_") and hasattr(torch.Tensor, name):
                raise AttributeError(
                    f"a lazy tensor has no {name!r}: read it first, as in t[...].{name}, or a part of it, t[:8].{name}",
                    name=name,
                    obj=self,
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def item(self) -> int | float | bool | complex:
        """Read the only element, as a Python number.

        Returns
        -------
        int, float, bool or complex
            The element.

        Raises
        ------
        DataError
            The tensor does not have exactly one element. Like torch's error it is a RuntimeError. Nothing is read.
        """
        if self.numel() != 1:
            raise DataError(f"{self!r} has {self.numel():,} elements: item() takes one, such as t[0, 0].item()")
        return self[...].item()

    def tolist(self) -> Any:
        return self[...].tolist()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for n in range(len(self)):
            yield self[n]

    def __contains__(self, element: Any) -> bool:
        return element in self[...]

    def __bool__(self) -> bool:
        """Return whether the only element is true. Raises DataError (a RuntimeError, as torch does), and reads nothing,
        if there is not exactly one element."""
        if self.numel() != 1:
            raise DataError(
                f"{self!r} has {self.numel():,} elements, and is neither true nor false as a whole: "
                "t[...].any() and t[...].all() are, and `t is None` asks for the object"
            )
        return bool(self[...])

    # Comparisons are torch's: they read the whole tensor and compare element by element. Dicts and sets find a tensor
    # without them, because they compare hash and identity first.

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compared(operator.ne, other)

    def __lt__(self, other: object) -> Any:
        return self._compared(operator.lt, other)

    def __le__(self, other: object) -> Any:
        return self._compared(operator.le, other)

    def __gt__(self, other: object) -> Any:
        return self._compared(operator.gt, other)

    def __ge__(self, other: object) -> Any:
        return self._compared(operator.ge, other)

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        """Compare element by element with numbers, arrays, tensors and lists of numbers; NotImplemented for others."""
        if isinstance(other, list | tuple | np.ndarray | np.generic):
            array = np.asarray(other)
            narrow = array.dtype.isbuiltin == 2  # a dtype of ml_dtypes: bf16, fp8, ...
            if not narrow and array.dtype.kind not in "biufc":  # texts, objects, records
                return NotImplemented
            other = torch.from_numpy(np.array(array, np.float32 if narrow else array.dtype.newbyteorder("=")))
        elif not isinstance(other, bool | int | float | complex | torch.Tensor | Likeness):
            return NotImplemented
        shape = tuple(getattr(other, "shape", ()))
        try:
            np.broadcast_shapes(self.shape, shape)
        except ValueError:
            raise DataError(f"{self!r} is not compared with elements of shape {shape}") from None
        try:
            return compare(_comparable(self[...]), _comparable(_whole(other)))
        except NotImplementedError as e:  # torch does not order complex numbers, or compare packed bits
            raise DataError(f"torch does not compare {self!r} in this way: {e}") from None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return widened(dtype_of(dtype)).torch


def _whole(value: Any) -> Any:
    return value[...] if isinstance(value, Likeness) else value


def _comparable(value: Any) -> Any:
    """Convert to a dtype that torch compares: not 8-bit floats, nor unsigned integers of 16 and 32 bits."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point() and value.itemsize == 1:
        return value.to(_wide(value.dtype))
    return value.to(torch.int64) if value.dtype in (torch.uint16, torch.uint32) else value
