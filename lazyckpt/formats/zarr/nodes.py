"""Where a tensor stands in a zarr hierarchy: groups follow the dotted names, below a group for the state.

The exact name stands in the array's attributes, so a path only has to be its own, and legal for zarr and for xarray,
where a group and an array of one name exclude each other, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from ...core.box import Shape

_EMPTY = "%empty"  # no other component is written so, either
_SELF = "%"  # the array of a tensor "a" where there are tensors below "a", too: no component is written so
_CUT = "%~"  # what is left of a long component, then its digest: no component is written so
_LONGEST = 200  # bytes of a component; file systems take 255
_LONGEST_START = 100
_LEGAL = re.compile(r"[^/\\%\x00-\x1f]+")  # zarr-python takes a backslash for a slash


def paths(names: Iterable[str]) -> dict[str, str]:
    """Name -> the path of its node, with "/" between groups. All of them at once: they depend on each other.

    >>> paths(["a.weight", "a.weight.scale", "x/y", ""])
    {'a.weight': 'a/weight/%', 'a.weight.scale': 'a/weight/scale', 'x/y': 'x%2Fy', '': '%empty'}
    """
    split = {name: tuple(map(component, name.split("."))) for name in names}
    groups = {parts[:n] for parts in split.values() for n in range(1, len(parts))}
    return {name: "/".join((*parts, _SELF) if parts in groups else parts) for name, parts in split.items()}


def component(text: str) -> str:
    """A part of a name as the name of a node. Zarr keeps "", ".", "..", names of dots only and those that begin with
    two underscores for itself; what is no ordinary character is written as in a URL. Of one that is longer than the
    names of files may be, the beginning and a digest are left.

    >>> component("mlp"), component(""), component(".."), component("__x"), component("50%")
    ('mlp', '%empty', '%2E.', '%5F_x', '50%25')
    """
    if not text:
        return _EMPTY
    if _LEGAL.fullmatch(text) is None:
        text = re.sub(r"[/\\%\x00-\x1f]", _escaped, text)
    if text.startswith("__") or not text.strip(".") or text in ("zarr.json", ".zarray", ".zgroup", ".zattrs"):
        text = _escaped_char(text[0]) + text[1:]
    if len(data := text.encode("utf-8", "surrogatepass")) > _LONGEST:
        start = data[:_LONGEST_START].decode("utf-8", "ignore")
        text = f"{start}{_CUT}{hashlib.sha256(data).hexdigest()[:32]}"
    return text


def dimension_names(shape: Shape) -> list[str]:
    """Names that are the same for the same size, so that dimensions of different tensors line up in xarray.

    >>> dimension_names((4096, 11008, 4096))
    ['d4096', 'd11008', 'd4096_2']
    """
    names: list[str] = []
    for n in shape:
        same = sum(name.split("_")[0] == f"d{n}" for name in names)
        names.append(f"d{n}_{same + 1}" if same else f"d{n}")
    return names


def _escaped(match: re.Match[str]) -> str:
    return _escaped_char(match[0])


def _escaped_char(char: str) -> str:
    return f"%{ord(char):02X}"
