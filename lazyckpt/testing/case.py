"""A checkpoint that a test has written, with what it must turn out to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what it must turn out to hold. The truth comes from the process that wrote it, not from the
    files."""

    path: Path
    """The checkpoint as a user would open it."""
    truth: Mapping[str, dict[str, torch.Tensor]]
    """State name ("weights", "fp32", "exp_avg", ...) -> logical name -> tensor."""
    info: dict[str, Any]
    """What the writer knows besides. The contract uses ``tied`` (alias -> owner), ``open`` (options for
    `lazyckpt.open`) and ``archives`` (True if tensors are looked up in their files when they are first read)."""
    rank_buffers: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """"rank0", "rank1", ... -> persistent buffers of that rank, for writers whose ranks hold different ones."""
    shards: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """"mp_rank_00.fp32", ... -> what that model-parallel rank held of a state, before any merging."""
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Raw name -> tensor, if the test knows them all."""
    reference: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """What the library's own tools read from the checkpoint, for comparison: "zero_to_fp32", or whole states."""


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, same shape and the same bits (so NaN equals itself, and -0.0 is not 0.0); strides do not matter."""
    for t in (a, b):
        if t.layout != torch.strided or t.is_quantized or t.is_nested or t.is_meta:
            raise TypeError(f"no single block of bytes to compare: {t.layout}, {t.dtype}, {t.device}")
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    if t.element_size() == 1:  # torch copies some one-byte types (float4_e2m1fn_x2) only under another name
        return t.view(torch.uint8).contiguous()
    return t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)  # a size of 1 may have any stride
