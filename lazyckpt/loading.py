"""Filling a module from a view, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from .errors import DataError
from .tensor import LazyTensor


def load_into(view: Mapping[str, LazyTensor], module: torch.nn.Module, strict: bool) -> Any:
    """See `CheckpointView.load_into`."""
    wanted = _slots(module)
    missing = [name for name in wanted if name not in view]
    unexpected = [name for name in view if name not in wanted]
    problems = []
    if strict and missing:
        problems.append(f"the checkpoint lacks {_listed(missing)}")
    if strict and unexpected:
        problems.append(f"the module lacks {_listed(unexpected)}")
    found = {name: view[name] for name in wanted if name not in missing}
    for name, tensor in found.items():
        owner, attribute = wanted[name]
        shape = tuple(getattr(owner, attribute).shape)
        if shape != tuple(tensor.shape):
            problems.append(f"{name!r} is {tuple(tensor.shape)} in the checkpoint and {shape} in the module")
        tensor.explain()  # plans the read: a missing file is told before anything is written
    if problems:
        raise DataError(f"nothing was loaded: {'; '.join(problems)}")

    filled: dict[int, torch.Tensor] = {}  # tied parameters of the module are one object: filled once
    for name, tensor in found.items():
        owner, attribute = wanted[name]
        target: torch.Tensor = getattr(owner, attribute)
        if id(target) in filled:
            if target.is_meta:
                _set(owner, attribute, filled[id(target)])
            continue
        if target.is_meta:
            filled[id(target)] = _materialised(tensor, target)
            _set(owner, attribute, filled[id(target)])
            filled[id(filled[id(target)])] = filled[id(target)]
            continue
        with torch.no_grad():
            target.copy_(tensor.to(target.device))
        filled[id(target)] = target
    return _IncompatibleKeys(missing, unexpected)


def _slots(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Names of the state dict -> (the module that holds the tensor, its attribute); buffers that are not saved are not
    among them."""
    slots = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                slots[start + attribute] = (owner, attribute)
        for attribute, buffer in owner._buffers.items():
            if buffer is not None and attribute not in owner._non_persistent_buffers_set:
                slots[start + attribute] = (owner, attribute)
    return slots


def _materialised(tensor: LazyTensor, target: torch.Tensor) -> torch.Tensor:
    data = tensor.to("cpu", target.dtype)
    return torch.nn.Parameter(data, target.requires_grad) if isinstance(target, torch.nn.Parameter) else data


def _set(owner: torch.nn.Module, attribute: str, value: torch.Tensor) -> None:
    table: dict[str, Any] = owner._parameters if attribute in owner._parameters else owner._buffers
    table[attribute] = value


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
