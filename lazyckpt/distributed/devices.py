"""The accelerator of this machine, whichever it is: CUDA, ROCm, XPU, MPS, or one of a plugin, such as Ascend's NPU."""

from __future__ import annotations

import torch

_OLDER = ("cuda", "npu", "xpu")  # what a plugin that does not tell torch.accelerator of itself is called


def get_device_type() -> str:
    """``cuda``, ``npu``, ``xpu``, ``mps``, ...: the accelerator that torch has here, ``cpu`` if none.

    Plugins (torch_npu) count once they are imported.
    """
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return found.type
    for kind in _OLDER:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def synchronize() -> None:
    """Wait until everything that was started on the current accelerator device is done; nothing on the CPU."""
    _call("synchronize")


def empty_cache() -> None:
    """Give memory that torch has cached, and no tensor uses, back to the accelerator; nothing on the CPU."""
    _call("empty_cache")


def _call(name: str) -> None:
    kind = get_device_type()
    function = getattr(getattr(torch, kind, None), name, None)
    if kind != "cpu" and function is not None:
        function()
