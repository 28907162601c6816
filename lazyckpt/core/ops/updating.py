"""The directions of an optimizer's steps, from its stored states: operations ``update.NAME``.

A direction is the step without learning rate and without decoupled weight decay: the optimizer subtracts it, times the
learning rate, from the weights. `derive.updates` says what it multiplies directions with.

Sources: torch/optim/adam.py `_single_tensor_adam`, sgd.py `_single_tensor_sgd`, _adafactor.py
`_single_tensor_adafactor`, _muon.py `_single_tensor_muon` (torch 2.13); transformers/optimization.py `Adafactor.step`;
deepspeed/ops/lion, whose rule is that of google/automl lion_pytorch.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ..axes import everything, indices
from ..box import Selection, Shape
from ..expr import Kind, Op, Scan, op_of, wide
from ..rounding import convert
from ..specs import Expr

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

LARGEST = 1 << 27  # elements of a matrix that Muon orthogonalizes in memory: 1 GiB in float64


class Direction(Op):
    """An operation whose first operand has the shape of the parameter."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        for one in inputs:
            if not one.dtype.is_floating_point or not one.dtype.is_number:
                raise DataError(f"optimizer states are floating-point numbers, not {one.dtype}")
        return Kind(inputs[0].shape, wide(*(one.dtype for one in inputs)))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return [want if one.shape == e.shape else everything(one.shape) for one in e.inputs]

    def grain(self, e: Expr) -> Shape:
        grains = [op_of(one.op).grain(one) for one in e.inputs if isinstance(one, Expr) and one.shape == e.shape]
        return tuple(map(max, zip(*grains, strict=True))) if grains else super().grain(e)


def _same(what: str, first: Kind, others: Sequence[Kind]) -> None:
    for one in others:
        if one.shape != first.shape:
            raise DataError(f"{what} of shapes {first.shape} and {one.shape} are not of the same parameter")


class Adam(Direction):
    """``exp_avg, exp_avg_sq[, step]``: bias-corrected ``exp_avg / (sqrt(exp_avg_sq) + eps)``.

    ``betas``, ``eps``; ``bias_correction`` (False leaves the correction out); ``step``, the number of steps done, if
    there is no operand with it. Powers of the betas are computed in float64, the rest in float32 (float64 if a moment
    is float64).
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        _same("the moments", inputs[0], inputs[1:2])
        if len(inputs) > 2 and prod(inputs[2].shape) != 1:
            raise DataError(f"the step of a parameter is one number, not a tensor of shape {inputs[2].shape}")
        return Kind(inputs[0].shape, super().kind(inputs[:2], params).dtype)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return [want, want, *(everything(one.shape) for one in e.inputs[2:])]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        first = second = 1.0
        if e.params["bias_correction"]:
            step = float(blocks[2].reshape(()).double()) if len(blocks) > 2 else float(e.params["step"])
            if not (step >= 1 and math.isfinite(step)):
                raise DataError(f"the optimizer has made {step:g} steps with this parameter: there is no last step")
            first, second = (1 - beta**step for beta in e.params["betas"])
        dtype = e.dtype.torch
        mean = convert(blocks[0], dtype).div_(first)
        return mean.div_(convert(blocks[1], dtype).sqrt_().div_(math.sqrt(second)).add_(e.params["eps"]))


class Lion(Direction):
    """``exp_avg[, gradient]``: the sign of the mixture of both that Lion takes; without a gradient that of the moment.

    ``betas``. The moment before the step is computed from the one after it and the gradient.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        _same("a moment and a gradient", inputs[0], inputs[1:])
        return super().kind(inputs, params)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = e.dtype.torch
        moment = convert(blocks[0], dtype)
        if len(blocks) > 1:
            first, second = e.params["betas"]
            gradient = convert(blocks[1], dtype)
            moment = moment.sub_(gradient * (1 - second)).div_(second)  # before the step
            moment = moment.mul_(first).add_(gradient.mul_(1 - first))
        return moment.sign_()


class Sgd(Direction):
    """``momentum_buffer[, gradient]``: the buffer; with a gradient Nesterov's ``gradient + momentum * buffer``.

    ``momentum``.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        _same("a buffer and a gradient", inputs[0], inputs[1:])
        return super().kind(inputs, params)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = e.dtype.torch
        buffer = convert(blocks[0], dtype)
        if len(blocks) == 1:
            return buffer
        return buffer.mul_(e.params["momentum"]).add_(convert(blocks[1], dtype))


class Adafactor(Direction):
    """``gradient, variance`` or ``gradient, rows, columns``, then perhaps ``weight`` and ``step``: the gradient over
    the root of the variance, clipped, times the relative learning rate.

    ``roles`` names the operands. Rows and columns are the factors of the variance of the last two dimensions, with or
    without a dimension of size 1 for the other one. ``least``: torch's eps1, below which their mean, and below whose
    square the variance, is raised (0: transformers does not). ``clip``: the root mean square above which the direction
    is scaled down. ``floor``: the least root mean square of the weights, which the direction is multiplied by; the
    operand ``weight`` has the weights, or their root mean square as one number. ``rate``: the largest of the learning
    rates, of which ``1 / sqrt(step)`` is the other, ``growth`` times the step if that is given.

    Gradient, variance and weights are read once more, for their sizes.
    """

    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        found = dict(zip(params["roles"], inputs, strict=True))
        shape = found["gradient"].shape
        if "variance" in found:
            _same("a gradient and its variance", found["gradient"], [found["variance"]])
        else:
            rows, columns = prod(found["rows"].shape), prod(found["columns"].shape)
            if len(shape) < 2 or rows * shape[-1] != prod(shape) or columns * shape[-2] != prod(shape):
                raise DataError(
                    f"{found['rows'].shape} and {found['columns'].shape} are not factors of the variance of {shape}"
                )
        return super().kind(inputs[:2], params)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        return [_needed(one.shape, role, want) for one, role in zip(e.inputs, e.params["roles"], strict=True)]

    def prepare(self, e: Expr, scan: Scan) -> Any:
        roles = e.params["roles"]
        factors = {role: _whole(e, scan, roles.index(role)) for role in ("rows", "columns", "step") if role in roles}
        sizes = []
        varying = [n for n, role in enumerate(roles) if role in ("gradient", "variance")]
        for box, blocks in scan(*varying):
            some = tuple(map(range, box.start, box.stop))
            found = factors | {roles[n]: block for n, block in zip(varying, blocks, strict=True)}
            sizes.append(_squares(self._unclipped(e, some, found)))
        factor = 1 / max(1.0, math.sqrt(math.fsum(sizes) / max(1, prod(e.shape))) / e.params["clip"])
        if e.params.get("rate") is not None:
            step = float(factors["step"].reshape(())) if "step" in factors else float(e.params["step"])
            if not (step >= 1 and math.isfinite(step)):
                raise DataError(f"the optimizer has made {step:g} steps with this parameter: there is no last step")
            growth = e.params.get("growth")
            factor *= min(e.params["rate"] if growth is None else growth * step, 1 / math.sqrt(step))
        if "weight" in roles:
            n = roles.index("weight")
            total = math.fsum(_squares(block.double()) for _, (block,) in scan(n))
            factor *= max(e.params["floor"], math.sqrt(total / max(1, prod(e.inputs[n].shape))))
        return factor

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        found = dict(zip(e.params["roles"], blocks, strict=True))
        return self._unclipped(e, want, found).mul_(e.kept["prepared"])

    @staticmethod
    def _unclipped(e: Expr, want: Selection, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        dtype, least = e.dtype.torch, e.params["least"]
        gradient = convert(found["gradient"], dtype)
        if "variance" in found:
            return gradient.div_(convert(found["variance"], dtype).clamp(min=least * least).sqrt_())
        rows = found["rows"].to(dtype).reshape(*e.shape[:-1], 1)
        columns = found["columns"].to(dtype).reshape(*e.shape[:-2], 1, e.shape[-1])
        means = torch.from_numpy(rows.numpy().mean(axis=-2, keepdims=True, dtype="float64")).to(dtype)
        rows = rows.div(means.clamp_(min=least))
        for d, axis in enumerate(want):
            at = torch.from_numpy(indices(axis).copy())
            rows = rows.index_select(d, at) if d < len(want) - 1 else rows
            columns = columns.index_select(d, at) if d != len(want) - 2 else columns
        return gradient.div_((rows * columns).clamp_(min=least * least).sqrt_())


def _needed(shape: Shape, role: str, want: Selection) -> Selection:
    """Return what a block of Adafactor's direction needs of an operand: sizes are known when it is computed."""
    if role in ("gradient", "variance"):
        return want
    return everything(shape) if role in ("rows", "columns") else (range(0),) * len(shape) or ()


def _whole(e: Expr, scan: Scan, n: int) -> torch.Tensor:
    whole = torch.empty(e.inputs[n].shape, dtype=e.inputs[n].dtype.torch)
    for box, (block,) in scan(n):
        whole[box.slices] = block
    return whole


def _squares(block: torch.Tensor) -> float:
    flat = block.to(torch.float64).reshape(-1).numpy()
    return float((flat * flat).sum())


class Muon(Direction):
    """``momentum_buffer[, gradient]``: the orthogonalized matrix, by Newton and Schulz's iteration, times ``ratio``.

    ``coefficients``, ``steps``, ``eps`` of the iteration; ``momentum``, of Nesterov's mixture with a gradient. The
    whole matrix is computed once, in float64 (torch iterates in bfloat16), and kept while the tensor is in use.
    """

    prepares = True

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        _same("a buffer and a gradient", inputs[0], inputs[1:])
        shape = inputs[0].shape
        if len(shape) != 2:
            raise DataError(f"Muon orthogonalizes matrices, not a tensor of shape {shape}")
        if prod(shape) > LARGEST:
            raise DataError(f"Muon's step of a matrix of {prod(shape):,} elements is not computed: at most {LARGEST:,}")
        return super().kind(inputs, params)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        if "prepared" in e.kept:
            return ((range(0), range(0)),) * len(e.inputs)
        return (everything(e.shape),) * len(e.inputs)

    def prepare(self, e: Expr, scan: Scan) -> Any:
        x = torch.empty(e.shape, dtype=torch.float64)
        for box, blocks in scan(*range(len(e.inputs))):
            if len(blocks) > 1:
                momentum = e.params["momentum"]
                x[box.slices] = blocks[0].double() * momentum + blocks[1].double() * (1 - momentum)
            else:
                x[box.slices] = blocks[0].double()
        a, b, c = e.params["coefficients"]
        tall = e.shape[0] > e.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=e.params["eps"])
        for _ in range(e.params["steps"]):
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return ((x.T if tall else x) * e.params["ratio"]).to(e.dtype.torch).contiguous()

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = e.kept["prepared"]
        for d, axis in enumerate(want):
            found = found.index_select(d, torch.from_numpy(indices(axis).copy()))
        return found


OPS: dict[str, Op] = {
    "update.adam": Adam(),
    "update.lion": Lion(),
    "update.sgd": Sgd(),
    "update.adafactor": Adafactor(),
    "update.muon": Muon(),
}
