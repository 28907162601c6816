"""Zarr hierarchies, as lazyckpt writes and reads them."""

from .reader import FOLDER, READER

__all__ = ["FOLDER", "READER"]
