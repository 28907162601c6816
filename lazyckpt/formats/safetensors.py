"""A single safetensors file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from ..core.box import Shape
from ..core.dtypes import DType
from ..core.index import Index, Specs, TensorSpec, whole
from ..io.containers.safetensors import Extents, is_safetensors, read_safetensors
from ..io.containers.torch_file import is_torch_file
from .reader import Reader, Source


class ExtentSpecs(Specs):
    """The tensors of a file as stored. ``table`` maps their names to their numbers in the file."""

    __slots__ = ("_extents",)

    def __init__(self, extents: Extents, table: dict[str, int] | None = None) -> None:
        super().__init__(extents.rows if table is None else table)
        self._extents = extents

    def make(self, name: str, entry: int) -> TensorSpec:
        return whole(name, self._extents[name])

    def kind(self, name: str) -> tuple[Shape, DType]:
        return self._extents.kind(name)

    def marks(self, kinds: dict[tuple[Shape, DType], int]) -> Iterable[int]:
        if len(self.table) < len(self._extents):
            return super().marks(kinds)
        numbers = [kinds.setdefault(kind, len(kinds)) for kind in self._extents.kinds]
        return map(numbers.__getitem__, self._extents.numbers)

    def of(self, table: dict[str, Any]) -> Self:
        return type(self)(self._extents, table)


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
