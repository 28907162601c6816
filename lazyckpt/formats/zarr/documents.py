"""The documents that describe a checkpoint as a zarr v3 hierarchy: zarr.json of the root, groups and arrays.

/zarr.json                     attributes.lazyckpt: facts about the checkpoint; and the consolidated metadata
/weights/layers/3/up/weight    an array: state, then the parts of the name (`paths`)
/exp_avg/...                   further states
Source: the zarr v3 core specification; consolidated metadata as zarr-python writes it (core/metadata/v3.py,
core/group.py `ConsolidatedMetadata`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.box import Shape
from ...core.dtypes import BOOL, C32, DTYPES, DType
from ...core.placement import Mesh
from ...errors import DataError, Problem
from ...io.plain_json import encode

# -- The names of dtypes in zarr are those of torch.

NAMES: dict[DType, str] = {d: d.name for d in DTYPES if d.is_number and d is not C32}
FROM_ZARR: dict[str, DType] = {name: dtype for dtype, name in NAMES.items()}

# Dtypes that zarr-python (3.1.6) lacks; interop/zarr_dtypes.py registers them.
FOREIGN = tuple(name for name in NAMES.values() if name == "bfloat16" or name.startswith("float8"))


def fill_value(dtype: DType) -> Any:
    """Return zero as JSON for a dtype. (It is never read, because every chunk is written.)"""
    if dtype is BOOL:
        return False
    if dtype.is_complex:
        return [0.0, 0.0]
    return 0.0 if dtype.is_floating_point else 0


# -- The path of a tensor in a zarr hierarchy: a group for the state, then groups for the parts of the dotted name.

# `component` never produces these texts for any other component.
_EMPTY = "%empty"
_SELF = "%"  # the array of a tensor "a" if there are also tensors below "a"
_CUT = "%~"  # separates the start of a long component from its digest
_LONGEST = 200  # maximum bytes of a component; file systems allow 255
_LONGEST_START = 100
_LEGAL = re.compile(r"[^/\\%\x00-\x1f]+")  # zarr-python treats a backslash as a slash


def paths(names: Iterable[str]) -> dict[str, str]:
    """Return the path of the node of each name, with "/" between groups. A path depends on all names.

    >>> paths(["a.weight", "a.weight.scale", "x/y", ""])
    {'a.weight': 'a/weight/%', 'a.weight.scale': 'a/weight/scale', 'x/y': 'x%2Fy', '': '%empty'}
    """
    split = {name: tuple(map(component, name.split("."))) for name in names}
    groups = {parts[:n] for parts in split.values() for n in range(1, len(parts))}
    return {name: "/".join((*parts, _SELF) if parts in groups else parts) for name, parts in split.items()}


def component(text: str) -> str:
    """Return the name of a node for a part of a tensor's name.

    Zarr reserves "", names of dots only, and names that start with two underscores. Special characters are escaped as
    in a URL. A text that is too long for a file name is replaced by its beginning and a digest.

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
    """Return names of dimensions that depend on their sizes, so that xarray aligns dimensions of different tensors.

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

LAYOUT = 1  # version of the attributes; readers refuse a higher one than they know
PACKING = 2  # version of the attributes of a hierarchy with packs (packs.py)
ATTRIBUTE = "lazyckpt"
JOB = ".lazyckpt-job"  # exists in a folder or prefix while an export is being written there
RAW = ({"name": "bytes", "configuration": {"endian": "little"}},)
Json = dict[str, Any]


def array(name: str, shape: Shape, dtype: DType, chunk: Shape, codecs: Sequence[Json] = RAW, **attributes: Any) -> Json:
    """Return the document of an array. ``attributes`` are stored beside its ``name``, such as ``order``, the position
    of the tensor in the view. Raises DataError for a dtype that zarr lacks."""
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
    """Return the document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def groups_of(arrays: Iterable[str]) -> list[str]:
    """Return the paths of all groups that contain arrays at these paths, except for the root."""
    found: dict[str, None] = {}
    for path in arrays:
        found.update(dict.fromkeys(_ancestry(path)[:-1]))
    return list(found)


def _ancestry(path: str) -> list[str]:
    """Return the paths of the groups that contain a node, from the top, and its own path."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def hierarchy(arrays: Mapping[str, Json], about: Mapping[str, Any], states: Iterable[str]) -> dict[str, Json]:
    """Return the documents of all nodes by path. The root's ("") is last and lists all others, so that opening reads
    one document. ``states`` are the paths of groups that exist even if they are empty."""
    # the nodes of a group are consecutive: zarr-python (core/group.py, _flat_to_nested) loses them otherwise
    order: dict[str, int] = {}
    for path in (*states, *arrays):
        for above in _ancestry(path):
            order.setdefault(above, len(order))
    known = {path: arrays[path] if path in arrays else group() for path in order}
    nodes = {path: known[path] for path in sorted(known, key=lambda path: [order[p] for p in _ancestry(path)])}
    root = group({ATTRIBUTE: {"layout": LAYOUT, **about}})
    # a group inside a consolidated group has an empty list itself
    listed = {p: d | {"consolidated_metadata": _NONE} if d["node_type"] == "group" else d for p, d in nodes.items()}
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": listed}
    return {**nodes, "": root}


_NONE: Json = {"kind": "inline", "must_understand": False, "metadata": {}}


# -- The contents of a view as a zarr hierarchy: arrays, paths, and the attributes of the root.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Part(Protocol[T_co]):
    """The part of a view's interface that `contents` needs."""

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
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class Contents(Generic[T]):
    """The contents of a view as a zarr hierarchy."""

    arrays: dict[str, T]
    """Path -> tensor."""
    names: dict[str, str]
    """Path -> name of the tensor in the view."""
    groups: tuple[str, ...]
    """Paths of the states' groups."""
    about: dict[str, Any]
    """Attributes of the root, for `hierarchy`."""
    order: dict[str, int]
    """Path -> position of the tensor in the view, of all states."""
    small: dict[str, Small[T]]
    """Path of a state's group -> those tensors that are packed and have no path."""


class Packing(Protocol[T_contra]):
    """The choice of the tensors that are packed."""

    def __call__(self, tensor: T_contra) -> bool:
        """Return whether a tensor is packed."""
        ...

    def rows(self, part: Part[T_contra]) -> NDArray[np.int64] | None:
        """Return the positions of the packed tensors of a part, without looking at each; None if that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Small(Generic[T]):
    """The packed tensors of a state. ``positions`` are among the tensors of all states. Either ``tensors`` has the
    tensors, or ``rows`` has their positions in the columns of the ``part``."""

    part: Part[T]
    positions: Sequence[int]
    names: Sequence[str]
    tensors: Sequence[T] = ()
    rows: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, part: Part[T], names: Sequence[str], rows: NDArray[np.int64], first: int) -> Small[T]:
        """Return the tensors of these rows. ``names`` are all names of the part, ``first`` its first position."""
        found = rows.tolist()
        chosen = names if len(found) == len(names) else [names[n] for n in found]
        return cls(part, (rows + first).tolist(), chosen, (), rows)


def contents(view: Part[T], only: Sequence[str] | None = None, packs: Packing[T] | None = None) -> Contents[T]:
    """Return the contents of a view, or only those of the states ``only``. No tensor data is read. ``packs``
    chooses the tensors that are packed.

    Raises DataError for metadata that JSON cannot represent, or an unknown state."""
    whole = view.state == next(iter(view.states), None)
    states: Mapping[str, Part[T]] = view.states if whole else {view.state: view}
    if only is not None:
        only = (only,) if isinstance(only, str) else only
        if not only:
            raise DataError("states=[]: there is nothing to write; None writes all states")
        for state in only:
            if state not in view.states:
                raise DataError(f"there is no state {state!r}: there are {', '.join(map(repr, view.states))}")
        states = {state: part for state, part in view.states.items() if state in only}
    arrays: dict[str, T] = {}
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    groups = {state: component(state) for state in states}
    order: dict[str, int] = {}
    small: dict[str, Small[T]] = {}
    first = 0
    for state, part in states.items():
        rows = None if packs is None else packs.rows(part)
        if rows is not None:
            listed = list(part)
            here = small[groups[state]] = Small.of(part, listed, rows, first)
            packed = set(here.names) if len(rows) < len(listed) else listed
            positions = {} if packed is listed else {n: first + i for i, n in enumerate(listed) if n not in packed}
            tensors: Mapping[str, T] = {name: part[name] for name in positions}
            first += len(listed)
        else:
            tensors, tied = part.once()
            aliases.update(tied)
            positions = dict(zip(tensors, range(first, first + len(tensors)), strict=True))
            first += len(tensors)
            if packs is not None:
                chosen = [name for name, tensor in tensors.items() if packs(tensor)]
                places = [positions.pop(name) for name in chosen]
                small[groups[state]] = Small(part, places, chosen, [tensors[name] for name in chosen])
        for name, path in paths(positions).items():
            where = f"{groups[state]}/{path}"
            arrays[where] = tensors[name]
            names[where] = name
            order[where] = positions[name]
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
    return Contents(arrays, names, tuple(groups.values()), about, order, small)
