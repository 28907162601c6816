"""The doors from a view to other formats: its `to_...` methods."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from .export.files import FileFormat, export
from .export.safetensors import SAFETENSORS
from .export.torch import TORCH
from .tensor import LazyTensor

if TYPE_CHECKING:
    import xarray as xr


class Writing(Mapping[str, LazyTensor]):
    """What a view can be written as. Nothing here changes the view or its checkpoint."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def owner(self, name: str) -> str:
        """The full name that owns the tensor of this name of the view."""

    @abstractmethod
    def full_name(self, name: str) -> str:
        """The name that a name of this view has in the whole checkpoint."""

    def to_safetensors(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        overwrite: bool = False,
        progress: bool | None = None,
    ) -> list[Path]:
        """Write the view as safetensors, in bounded memory (4 MiB a thread), and return the paths of the files.

        ``dest``: a folder, which gets ``model.safetensors`` or, above ``max_shard_size`` (bytes, or text such as
        "5GB"; None for one file), numbered shards and their index, as Hugging Face names them; or a file that ends
        with ``.safetensors``. A tied tensor is stored once; its other names stand in the header's metadata. ``dtype``
        converts floating-point tensors. ``progress``: a bar; None for one on a terminal or in a notebook.

        The files appear when all are complete. Raises DestinationError (something is there already and not
        ``overwrite``, no room, no right to write), DataError (a dtype that the format lacks), and what reading raises.
        """
        return self._export(SAFETENSORS, dest, dtype, max_shard_size, overwrite, progress)

    def to_torch(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        overwrite: bool = False,
        progress: bool | None = None,
    ) -> list[Path]:
        """Write the view as state dicts that `torch.load` reads, tied names on the same storage; otherwise as
        `to_safetensors`. ``dest``: a file that ends with .pt, .pth, .bin or .ckpt, or a folder, which gets
        ``pytorch_model.bin`` or numbered shards and their index."""
        return self._export(TORCH, dest, dtype, max_shard_size, overwrite, progress)

    def to_xarray(self, *, chunks: Mapping[str, Any] | None = None) -> xr.DataTree:
        """The view as an `xarray.DataTree`: groups are the dotted names, variables the tensors, dimensions are named by
        their size ("d4096"). Reads nothing; a variable reads what is indexed of it.

        ``chunks``: None for xarray's own lazy arrays; {} for Dask arrays, in chunks of 8 to 64 MiB that follow the
        fragments where these form a grid; {"d4096": 512} for other chunks along a dimension. bf16 and fp8 keep their
        values (dtypes of ml_dtypes); `lazyckpt.interop.xarray.to_f32` converts them lazily, for reductions.
        """
        from .interop.xarray import View, tree

        return tree(cast(View, self), chunks)

    def once(self) -> tuple[dict[str, LazyTensor], dict[str, str]]:
        """What there is to write: (name of this view -> tensor, each tied one once, under the name that owns it if
        that is in the view; further name -> the name it is tied to)."""
        names: dict[str, str] = {}  # the name that owns a tensor -> the one it is written under
        for name in self:
            owner = self.owner(name)
            if owner == self.full_name(name) or owner not in names:
                names[owner] = name
        aliases = {name: kept for name in self if (kept := names[self.owner(name)]) != name}
        return {name: self[name] for name in names.values()}, aliases

    def _export(
        self,
        form: FileFormat,
        dest: str | os.PathLike[str],
        dtype: torch.dtype | None,
        max_shard_size: int | str | None,
        overwrite: bool,
        progress: bool | None,
    ) -> list[Path]:
        tensors, aliases = self.once()
        return export(
            form,
            tensors,
            aliases,
            dest,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
