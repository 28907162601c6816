"""A single safetensors file."""

from __future__ import annotations

from ..core.columns import ExtentSpecs
from ..core.index import Index
from ..io.containers.safetensors import is_safetensors, read_safetensors
from ..io.containers.torch_file import is_torch_file
from .reader import Reader, Source


def _read(source: Source) -> Index:
    file = read_safetensors(source.store, source.path)
    specs = ExtentSpecs(file.extents)
    return Index(
        format="safetensors",
        states={"weights": specs},
        files={source.path: file.info},
        stored=specs,
        aliases=file.aliases,
        meta=dict(file.metadata),
        problems=tuple(note.prefixed(source.path) for note in file.notes),
    )


def _recognises(source: Source) -> bool:
    if not source.path or is_torch_file(source.head):  # the ending may be wrong, because people rename files
        return False
    return is_safetensors(source.head, source.size) or source.path.endswith(".safetensors")


READER = Reader("safetensors", "safetensors files", _recognises, _read)
