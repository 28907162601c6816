"""Optimizers whose states are not Adam's: the layouts that readers must not take for granted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.optimization import Adafactor

__all__ = ["EightBitAdam", "Lion", "make_optimizer"]

BLOCK = 64
SMALL = 16


class Lion(torch.optim.Optimizer):
    """Lion has a single state, and no ``step``: nothing here may assume Adam."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


class EightBitAdam(torch.optim.Optimizer):
    """Adam with the state of bitsandbytes' (optim/optimizer.py `Optimizer2State.init_state`): moments as uint8 codes of
    a table (``qmap``, 256 values), with a scale for each block of elements (``absmax``); small tensors keep float32
    moments and have neither; ``step`` is an int."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.999)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    _start(state, p)
                state["step"] += 1
                moments = []
                for n, (beta, value) in enumerate(zip(group["betas"], (p.grad, p.grad**2), strict=True), start=1):
                    m = beta * _decoded(state, n) + (1 - beta) * value
                    _encode(state, n, m)
                    moments.append(m / (1 - beta ** state["step"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * moments[0] / (moments[1].sqrt() + 1e-8))


def _start(state: dict[str, Any], p: Tensor) -> None:
    state["step"] = 0
    for n in (1, 2):
        if p.numel() < SMALL:
            state[f"state{n}"] = torch.zeros_like(p, dtype=torch.float32)
            continue
        state[f"state{n}"] = torch.zeros_like(p, dtype=torch.uint8)
        state[f"qmap{n}"] = torch.linspace(-1.0 if n == 1 else 0.0, 1.0, 256)
        state[f"absmax{n}"] = torch.zeros(-(-p.numel() // BLOCK))


def _decoded(state: dict[str, Any], n: int) -> Tensor:
    codes: Tensor = state[f"state{n}"]
    if codes.dtype != torch.uint8:
        return codes
    scale = state[f"absmax{n}"].repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)
    return state[f"qmap{n}"][codes.long()] * scale


def _encode(state: dict[str, Any], n: int, value: Tensor) -> None:
    codes: Tensor = state[f"state{n}"]
    if codes.dtype != torch.uint8:
        codes.copy_(value)
        return
    flat = value.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    state[f"absmax{n}"].copy_(absmax)
    scaled = (blocks / absmax.clamp_min(1e-30)[:, None]).flatten()[: flat.numel()]
    nearest = torch.bucketize(scaled, state[f"qmap{n}"]).clamp(max=255)
    codes.copy_(nearest.to(torch.uint8).view(codes.shape))


def make_optimizer(name: str, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if name == "lion":
        return Lion(groups, lr=1e-3)
    if name == "8bit":
        return EightBitAdam(groups, lr=1e-2)
    if name == "adafactor":
        return Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    if name == "torch_adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    if name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True)
    if name == "adagrad":
        return torch.optim.Adagrad(groups, lr=1e-2)
    if name in ("adamw", "amsgrad"):
        return torch.optim.AdamW(groups, lr=1e-2, amsgrad=name == "amsgrad")
    raise ValueError(f"no optimizer {name!r} here")
