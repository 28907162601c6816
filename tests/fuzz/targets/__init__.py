"""The fuzz targets: one module per family of parsers, each with ``TARGETS``."""

from __future__ import annotations

from ..contract import Target
from . import cache, codecs, dcp, documents, folders, jobs, names, pickles, safetensors, torch_files, zarr

MODULES = (pickles, torch_files, dcp, safetensors, zarr, codecs, documents, folders, jobs, cache, names)
TARGETS: dict[str, Target] = {target.name: target for module in MODULES for target in module.TARGETS}
