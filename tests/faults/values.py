"""Faults of elements, in every family that can hold them: the table of values is crossed with the families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .fault import Fault
from .others import weights

VALUES: tuple[Fault, ...] = ()
