"""Building blocks of HTML outputs for notebooks: escaped text, elements, tables, and a frame with style and scripts."""

from .parts import Shown, cell, dtype_class, page, safe, table, tag

__all__ = ["Shown", "cell", "dtype_class", "page", "safe", "table", "tag"]
