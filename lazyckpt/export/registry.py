"""The registry of output formats, by name. A format's module is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import WriteOptions, WriteResult
    from .writer import View, Writer

# Modules of this package, each with a `WRITER`, in the order of lists and help texts.
NAMES = (
    "safetensors",
    "torch",
    "dcp",
    "universal",
    "megatron",
    "zarr",
    "gguf",
    "virtual",
)


def writer(name: str) -> Writer:
    """Return the writer of a format."""
    found: Writer = import_module(f".{name}", __package__).WRITER
    return found


def export(name: str, view: View, dest: Any, options: WriteOptions, **own: Any) -> WriteResult:
    """Write a view in a format. ``own`` are options that only this format has. Raises what
    `CheckpointView.to_safetensors` raises."""
    return writer(name).write(view, dest, options, **own)


def convertible() -> Iterator[Writer]:
    """Yield the writers that `lazyckpt convert` offers."""
    return (found for found in map(writer, NAMES) if found.forecast is not None)
