"""The families of quantized formats, by their modules in this package. Each module has a `FAMILY`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .model import Family

# A family's module is imported when a view is dequantized. The order has no meaning: a tensor that two families take
# stays as it is stored.
NAMES: tuple[str, ...] = (
    "fp8", "microscaling", "modelopt", "compressed", "gptq", "awq", "bitsandbytes", "hqq", "mlx", "torchao", "engine",
    "gguf", "affine",
)  # fmt: skip


def families() -> Iterator[Family]:
    """Yield all families."""
    for name in NAMES:
        found: Family = import_module(f".{name}", __package__).FAMILY
        yield found
