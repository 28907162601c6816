"""The fuzz targets. A module of `targets/` has those of a family of parsers, as ``TARGETS``."""

from __future__ import annotations

from .contract import Target
from .targets import (
    archives,
    arrays,
    cache,
    codecs,
    dcp,
    deltas,
    documents,
    folders,
    gguf_files,
    jobs,
    names,
    orbax,
    pickles,
    safetensors,
    server,
    torch_files,
    torch_programs,
    zarr,
)

MODULES = (
    pickles,
    torch_files,
    torch_programs,
    dcp,
    safetensors,
    zarr,
    gguf_files,
    codecs,
    documents,
    folders,
    jobs,
    cache,
    names,
    archives,
    deltas,
    orbax,
    arrays,
    server,
)
TARGETS: dict[str, Target] = {target.name: target for module in MODULES for target in module.TARGETS}
