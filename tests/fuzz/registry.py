"""The fuzz targets. A module of `targets/` has those of a family of parsers, as ``TARGETS``."""

from __future__ import annotations

from .contract import Target
from .targets import cache, codecs, dcp, documents, folders, jobs, names, pickles, safetensors, torch_files, zarr

MODULES = (pickles, torch_files, dcp, safetensors, zarr, codecs, documents, folders, jobs, cache, names)
TARGETS: dict[str, Target] = {target.name: target for module in MODULES for target in module.TARGETS}
