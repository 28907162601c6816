"""A function of the user's own. It is the only operation that holds code, so it stays in its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import DataError
from ..axes import everything, indices
from ..box import Selection, Shape
from ..dtypes import dtype_of
from ..expr import Kind, Op
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch


class Function:
    """A function that cannot be pickled.

    Parameters
    ----------
    call
        A function of a tensor that returns a tensor of the same shape.
    """

    __slots__ = ("call",)

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.call = call

    def __repr__(self) -> str:
        return f"{getattr(self.call, '__qualname__', type(self.call).__name__)} at {id(self.call):#x}"

    def __reduce__(self) -> NoReturn:
        raise DataError(
            f"{self!r}, the function of view.map, cannot be pickled: what is sent to other processes or written to "
            "disk names operations of lazyckpt. Use threads, or write the mapped tensors first"
        )


class Mapped(Op):
    """``function``, ``dtype``, ``whole``: the function's result, converted to the dtype (None: the operand's).

    The function gets blocks of any shape with all dimensions of the tensor, or the whole tensor if ``whole``.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        dtype = params.get("dtype")
        return Kind(inputs[0].shape, inputs[0].dtype if dtype is None else dtype_of(dtype))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return (everything(e.shape) if e.params["whole"] else want,)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = tuple(blocks[0].shape)
        found = e.params["function"].call(blocks[0])
        if not isinstance(found, torch.Tensor) or found.shape != shape:
            what = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise DataError(
                f"the function of view.map returned {what} for a tensor of shape {shape}: it has to return a tensor of "
                "the same shape"
            )
        found = found.detach().to("cpu")
        if e.params["whole"]:
            for d, axis in enumerate(want):
                if len(axis) != e.shape[d]:
                    found = found.index_select(d, torch.from_numpy(indices(axis)))
        return found

    def grain(self, e: Expr) -> Shape:
        return e.shape if e.params["whole"] else super().grain(e)


OPS: dict[str, Op] = {"map": Mapped()}
