"""The documents that describe a checkpoint as a zarr v3 hierarchy: zarr.json of the root, groups and arrays.

/zarr.json                     attributes.lazyckpt: what the checkpoint is (`about`), and everything consolidated
/weights/layers/3/up/weight    an array: state, then the parts of the name (`nodes.paths`)
/exp_avg/...                   further states
Source: the zarr v3 core specification; consolidated metadata as zarr-python writes it (core/metadata/v3.py,
core/group.py `ConsolidatedMetadata`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...core.box import Shape
from ...errors import DataError
from .dtypes import NAMES, fill_value
from .nodes import dimension_names

LAYOUT = 1  # of the attributes; readers refuse a higher one
ATTRIBUTE = "lazyckpt"
JOB = ".lazyckpt-job"  # stands in a folder or prefix while an export is written there
RAW = ({"name": "bytes", "configuration": {"endian": "little"}},)
Json = dict[str, Any]


def array(
    name: str, shape: Shape, dtype: torch.dtype, chunk: Shape, codecs: Sequence[Json] = RAW, **attributes: Any
) -> Json:
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
