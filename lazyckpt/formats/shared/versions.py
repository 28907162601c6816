"""What the folder of a version says that reinforcement-learning stacks publish: a delta over the version before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERSION = "published version"  # key of `Index.meta`


@dataclass(frozen=True, slots=True)
class Published:
    """A published version.

    Attributes
    ----------
    format
        The name of the layout.
    version, base
        The numbers of the version and of the one that it is a delta over; 0 is the model that the engine started with.
    name
        The names of the folders of versions, for `str.format`.
    encoding
        "xor" or "overwrite".
    checksums
        Name of a tensor -> the hash function and the hexadecimal digits of the new tensor's bytes.
    """

    format: str
    version: int
    base: int
    name: str
    encoding: str
    checksums: Mapping[str, tuple[str, str]]
