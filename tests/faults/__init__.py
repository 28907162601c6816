"""Faults that are made in copies of genuine checkpoints, and what `lazyckpt verify` says about each.

`FAULTS` is the one table: test_faults.py tries every row, and docs/reference/faults.md prints it
(``python -m tests.faults`` writes the page).
"""

from __future__ import annotations

from .dcp import DCP
from .deepspeed import DEEPSPEED
from .fault import Fault, page
from .huggingface import HUGGINGFACE
from .megatron import MEGATRON
from .others import OTHERS
from .values import VALUES

__all__ = ["FAULTS", "Fault", "page"]

FAULTS: tuple[Fault, ...] = (*DEEPSPEED, *MEGATRON, *DCP, *HUGGINGFACE, *OTHERS, *VALUES)
