"""The documents that describe a checkpoint as a zarr v3 hierarchy: zarr.json of the root, groups and arrays.

/zarr.json                     attributes.lazyckpt: what the checkpoint is (`about`), and everything consolidated
/weights/layers/3/up/weight    an array: state, then the parts of the name (`nodes.paths`)
/exp_avg/...                   further states
Source: the zarr v3 core specification; consolidated metadata as zarr-python writes it (core/metadata/v3.py,
core/group.py `ConsolidatedMetadata`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ...core.box import Shape
from ...core.dtypes import BOOL, C32, DTYPES, DType
from ...core.index import Mesh
from ...errors import DataError, Problem
from ...io.plain_json import encode

# -- What zarr calls dtypes: as torch does.

NAMES: dict[DType, str] = {d: d.name for d in DTYPES if d.is_number and d is not C32}
FROM_ZARR: dict[str, DType] = {name: dtype for dtype, name in NAMES.items()}

# Those that zarr-python (3.1.6) does not know by itself: interop/zarr_dtypes.py teaches it.
FOREIGN = tuple(name for name in NAMES.values() if name == "bfloat16" or name.startswith("float8"))


def fill_value(dtype: DType) -> Any:
    """Zero, as JSON spells it for the dtype. (Every chunk is written, so nobody reads it.)"""
    if dtype is BOOL:
        return False
    if dtype.is_complex:
        return [0.0, 0.0]
    return 0.0 if dtype.is_floating_point else 0


# -- Where a tensor stands in a zarr hierarchy: groups follow the dotted names, below a group for the state.

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


# -- The documents that describe a checkpoint as a zarr v3 hierarchy: zarr.json of the root, groups and arrays.

LAYOUT = 1  # of the attributes; readers refuse a higher one
ATTRIBUTE = "lazyckpt"
JOB = ".lazyckpt-job"  # stands in a folder or prefix while an export is written there
RAW = ({"name": "bytes", "configuration": {"endian": "little"}},)
Json = dict[str, Any]


def array(name: str, shape: Shape, dtype: DType, chunk: Shape, codecs: Sequence[Json] = RAW, **attributes: Any) -> Json:
    """The document of an array. ``attributes``: further ones, beside its ``name``; ``order``: which of the view's
    tensors it is, where that is to be kept. Raises DataError for a dtype that zarr has not."""
    data_type = NAMES.get(dtype)
    if data_type is None:
        raise DataError(f"zarr has no {dtype}, which {name!r} is: leave it out (view.select) or convert it")
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value(dtype),
        "codecs": [dict(codec) for codec in codecs],
        "attributes": {ATTRIBUTE: {"name": name, **attributes}},
        "dimension_names": dimension_names(shape),
        "storage_transformers": [],
    }


def group(attributes: Mapping[str, Any] | None = None) -> Json:
    """The document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def groups_of(arrays: Iterable[str]) -> list[str]:
    """The paths of all groups that arrays at these paths are in, but for the root's."""
    found: dict[str, None] = {}
    for path in arrays:
        found.update(dict.fromkeys(_ancestry(path)[:-1]))
    return list(found)


def _ancestry(path: str) -> list[str]:
    """The paths of the groups that a node is in, from the top, and its own."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def hierarchy(arrays: Mapping[str, Json], about: Mapping[str, Any], states: Iterable[str]) -> dict[str, Json]:
    """Path -> document of all nodes, the root's ("") last; it lists all others, so that opening reads one document.
    ``states``: the paths of groups that are there even if they are empty."""
    # what is in one group stands together: zarr-python (core/group.py, _flat_to_nested) loses it otherwise
    order: dict[str, int] = {}
    for path in (*states, *arrays):
        for above in _ancestry(path):
            order.setdefault(above, len(order))
    known = {path: arrays[path] if path in arrays else group() for path in order}
    nodes = {path: known[path] for path in sorted(known, key=lambda path: [order[p] for p in _ancestry(path)])}
    root = group({ATTRIBUTE: {"layout": LAYOUT, **about}})
    # a group that stands in a consolidated one has an empty list of its own
    listed = {p: d | {"consolidated_metadata": _NONE} if d["node_type"] == "group" else d for p, d in nodes.items()}
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": listed}
    return {**nodes, "": root}


_NONE: Json = {"kind": "inline", "must_understand": False, "metadata": {}}


# -- What of a view goes into a zarr hierarchy, where it stands there, and what the root says about it.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Part(Protocol[T_co]):
    """What is asked of a view."""

    @property
    def state(self) -> str: ...
    @property
    def states(self) -> Mapping[str, Part[T_co]]: ...
    @property
    def format(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def problems(self) -> tuple[Problem, ...]: ...
    def once(self) -> tuple[Mapping[str, T_co], Mapping[str, str]]: ...


@dataclass(frozen=True, slots=True)
class Contents(Generic[T]):
    """``arrays``: path -> tensor; ``names``: path -> the name that the view has for it; ``groups``: the paths of the
    states' groups; ``about``: what the root's attributes say (documents.hierarchy)."""

    arrays: dict[str, T]
    names: dict[str, str]
    groups: tuple[str, ...]
    about: dict[str, Any]


def contents(view: Part[T], only: Sequence[str] | None = None) -> Contents[T]:
    """The hierarchy of a view; ``only``: of these states. Reads no tensor data. Raises DataError for metadata that is
    no plain object, or a state that there is not."""
    whole = view.state == next(iter(view.states), None)
    states: Mapping[str, Part[T]] = view.states if whole else {view.state: view}
    if only is not None:
        only = (only,) if isinstance(only, str) else only
        if not only:
            raise DataError("states=[]: there is nothing to write; None stands for all")
        for state in only:
            if state not in view.states:
                raise DataError(f"there is no state {state!r}: there are {', '.join(map(repr, view.states))}")
        states = {state: part for state, part in view.states.items() if state in only}
    arrays: dict[str, T] = {}
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    groups = {state: component(state) for state in states}
    for state, part in states.items():
        tensors, tied = part.once()
        aliases.update(tied)
        for name, path in paths(tensors).items():
            where = f"{groups[state]}/{path}"
            arrays[where] = tensors[name]
            names[where] = name
    mesh = view.mesh
    about = {
        "format": view.format,
        "mesh": {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep},
        "state": view.state if view.state in states else next(iter(states), view.state),
        "states": list(states),
        "aliases": aliases,
        "meta": encode(dict(view.meta)),
        "problems": list(view.problems),
    }
    return Contents(arrays, names, tuple(groups.values()), about)
