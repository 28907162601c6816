"""Zarr hierarchies: the layout that lazyckpt writes, and readers of any hierarchy."""

from .reader import FOLDER, READER

__all__ = ["FOLDER", "READER"]
