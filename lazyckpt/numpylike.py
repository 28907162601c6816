"""What numpy's functions are called with for tensors: arrays that numpy computes with correctly.

numpy (with ml_dtypes) adds up bf16 and fp8 in bf16 and fp8, where a sum stops growing after a few hundred elements, and
a sum of fp16 overflows at 65,504. Functions that compute therefore get such tensors as float32; functions that only
move elements get them as they are stored; functions that ask for shape and dtype get an array that has no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch

from .core.dtypes import numpy_dtype, to_numpy, widened

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
    """What a function of numpy gives for tensors of ``kind``; NotImplemented for one that would write to them.

    Parameters
    ----------
    kind
        The class of the tensors among ``args`` and ``kwargs``; also inside lists and tuples.
    read
        Reads one as a whole.
    """
    args = tuple(args)
    if func in _WRITING or _holds(kind, _output(func, args, kwargs)):
        return NotImplemented

    def array(tensor: Any) -> np.ndarray[Any, Any]:
        if func in _LOOKING:
            return np.broadcast_to(np.empty((), numpy_dtype(tensor.dtype)), tuple(tensor.shape))
        whole = read(tensor)
        return to_numpy(whole if func in _MOVING else whole.to(widened(whole.dtype)))

    return func(*(replaced(a, kind, array) for a in args), **{k: replaced(v, kind, array) for k, v in kwargs.items()})


def _output(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function of numpy is told to write to, by name or by position."""
    try:
        return signature(func).bind_partial(*args, **kwargs).arguments.get("out")
    except (TypeError, ValueError):  # it has no signature, or takes no such arguments
        return kwargs.get("out")


def array_ufunc(
    kind: type,
    read: Callable[[Any], torch.Tensor],
    ufunc: np.ufunc,
    method: str,
    inputs: Iterable[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The same for a ufunc."""
    if method == "at" or _holds(kind, kwargs.get("out")):
        return NotImplemented

    def array(tensor: Any) -> np.ndarray[Any, Any]:
        return to_numpy(read(tensor).to(widened(tensor.dtype)))

    return getattr(ufunc, method)(
        *(replaced(x, kind, array) for x in inputs), **{k: replaced(v, kind, array) for k, v in kwargs.items()}
    )


def replaced(value: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """The value with ``new`` of every object of ``kind`` in its place, also inside lists and tuples."""
    if isinstance(value, kind):
        return new(value)
    if isinstance(value, list | tuple) and any(_holds(kind, v) for v in value):
        return type(value)(replaced(v, kind, new) for v in value)
    return value


def _holds(kind: type, value: Any) -> bool:
    return isinstance(value, kind) or (isinstance(value, list | tuple) and any(_holds(kind, v) for v in value))
