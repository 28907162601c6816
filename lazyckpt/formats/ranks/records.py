"""DTensors and ShardedTensors from the records of their pickles by torch.save.

Writers: torch/distributed/tensor/_api.py `DTensor` (``_local_tensor`` and ``_spec``), _dtensor_spec.py `DTensorSpec`,
torch/distributed/device_mesh.py `DeviceMesh.__getstate__`; torch/distributed/_shard/sharded_tensor/api.py
`ShardedTensor.__getstate__`. A mesh lists its ranks in ``mesh`` and ``_flatten_mesh_list`` (torch 2.1 to 2.9), in later
versions in ``_layout`` and ``_flatten_rank_map``. Modules were named ``torch.distributed._tensor`` before 2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape, fits
from ...core.dtypes import DType
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import Opaque, short
from ...layouts.placements import Cut, Layout, MeshPlacement, Same, Summand

_MAX_RANKS = 1 << 24  # of a mesh
_MAX_SHARDS = 1 << 20  # of a tensor


class Mesh(NamedTuple):
    """A device mesh. ``ranks`` are in C order; ``coordinate`` is that of the rank that saved it (None: outside)."""

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    coordinate: Shape | None


class DTensor(NamedTuple):
    """A rank's piece of a tensor of this shape. ``local`` is the rank's array."""

    shape: Shape
    layout: Layout
    mesh: Mesh
    local: StoredTensor


class Shard(NamedTuple):
    """A block of a tensor. ``local`` is its array, None if another rank has it."""

    start: Shape
    shape: Shape
    rank: int | None
    local: StoredTensor | None


class ShardedTensor(NamedTuple):
    """A sharded tensor. ``shards`` are those of all ranks, which every file lists; ``held`` are those in this file."""

    shape: Shape
    dtype: DType
    shards: tuple[Shard, ...]
    held: tuple[Shard, ...]
    world: int | None


Values = Callable[[StoredTensor], Sequence[int]]


def is_dtensor(record: Opaque) -> bool:
    """Return whether a record is one of torch's DTensor, in any of its modules."""
    return record.name == "DTensor" and record.module.startswith("torch.distributed.")


def is_sharded(record: Opaque) -> bool:
    """Return whether a record is one of torch's ShardedTensor, in any of its modules."""
    return record.name == "ShardedTensor" and record.module.startswith("torch.distributed.")


class Records:
    """The records of one file. Its tensors share meshes, and each mesh is parsed once.

    ``rank`` is the rank in the file's name. ``values`` reads the numbers of a small tensor.
    """

    def __init__(self, rank: int | None, values: Values) -> None:
        self._rank = rank
        self._values = values
        self._meshes: dict[int, Mesh] = {}
        self._layouts: dict[Layout, Layout] = {}

    def dtensor(self, record: Opaque) -> DTensor:
        """Parse a record of a DTensor. Raises ValueError, with the reason, for an invalid one."""
        local = _attribute(record, "_local_tensor")
        if not isinstance(local, StoredTensor):
            raise ValueError(f"its local tensor is {short(local)}")
        spec = _attribute(record, "_spec")
        if not isinstance(spec, Opaque):  # in torch 2.0 the tensor itself has the attributes of the spec
            spec = record
        attributes = spec.attributes
        meta = attributes.get("tensor_meta")
        if isinstance(meta, Opaque) and meta.args:
            shape = meta.args[0]
        elif meta is not None and isinstance(meta, tuple) and meta:
            shape = meta[0]
        else:
            shape = record.args[2] if record.args and len(record.args) > 2 else None
        placements = attributes.get("placements", attributes.get("_placements"))
        device_mesh = attributes.get("mesh", attributes.get("device_mesh", attributes.get("_device_mesh")))
        if not isinstance(placements, tuple | list) or not isinstance(device_mesh, Opaque):
            raise ValueError("it has no placements or no mesh")
        mesh = self._mesh(device_mesh)
        layout = Layout(
            mesh.shape, tuple(map(_placement, placements)), _order(attributes.get("shard_order"), len(mesh.shape))
        )
        sizes = _sizes(shape)
        if not fits(sizes, local.dtype.itemsize):
            raise ValueError(f"its shape is {short(shape)}")
        layout.local_shape(sizes, mesh.coordinate or (0,) * len(mesh.shape))  # raises if the placements do not fit
        return DTensor(sizes, self._layouts.setdefault(layout, layout), mesh, local)

    def _mesh(self, record: Opaque) -> Mesh:
        known = self._meshes.get(id(record))
        if known is None:
            known = self._meshes[id(record)] = self._read_mesh(record)
        return known

    def _read_mesh(self, record: Opaque) -> Mesh:
        tensor = _attribute(record, "mesh", "_mesh")
        layout = _attribute(record, "_layout")
        names = _attribute(record, "_mesh_dim_names", "mesh_dim_names") or ()
        names = tuple(map(str, names)) if isinstance(names, tuple | list) else ()
        coordinate = _attribute(record, "_coordinate_on_dim")
        own = _attribute(record, "_rank")
        own = own if type(own) is int else self._rank
        if isinstance(tensor, StoredTensor):
            shape = tensor.shape
            listed = _attribute(record, "_flatten_mesh_list")
            ranks = tuple(listed) if isinstance(listed, tuple | list) else tuple(self._values(tensor))
        elif isinstance(layout, Opaque):
            whole = _attribute(record, "_flatten_rank_map")
            if not isinstance(whole, tuple | list):
                rank_map = _attribute(record, "_rank_map")
                if not isinstance(rank_map, StoredTensor):
                    raise ValueError("its mesh lists no ranks")
                whole = self._values(rank_map)
            axes = _axes(layout, len(whole))
            shape = tuple(map(len, axes))
            offsets = [sum(c) for c in product(*axes)]
            # the mesh may be a part of a larger one: use the part that this rank is in
            here = list(whole).index(own) if own in whole else 0
            at = offsets[_ravel(coordinate, shape)] if _inside(coordinate, shape) else 0
            base = here - at if here >= at and here - at + max(offsets) < len(whole) else 0
            if base + max(offsets) >= len(whole):
                raise ValueError("its mesh has more ranks than it lists")
            ranks = tuple(whole[base + o] for o in offsets)
        else:
            raise ValueError("its mesh says neither ranks nor shape")
        if len(ranks) != prod(shape) or not all(type(r) is int and 0 <= r < _MAX_RANKS for r in ranks):
            raise ValueError(f"its mesh of shape {shape} lists {len(ranks)} ranks")
        if _inside(coordinate, shape):
            coordinate = tuple(coordinate)
        else:
            coordinate = _unravel(ranks.index(own), shape) if own in ranks else None
        return Mesh(shape, ranks, names if len(names) == len(shape) else (), coordinate)

    def sharded(self, record: Opaque) -> ShardedTensor:
        """Parse a record of a ShardedTensor. Raises ValueError, with the reason, for an invalid one."""
        state = record.state
        if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
            raise ValueError("its state is not that of a ShardedTensor")
        metadata = state[1]
        listed = _attribute(metadata, "shards_metadata")
        if not isinstance(listed, list) or len(listed) > _MAX_SHARDS:
            raise ValueError("it lists no shards")
        shape = _sizes(_attribute(metadata, "size"))
        shards = tuple(_shard(s, None, shape) for s in listed)
        held = []
        for shard in state[0]:
            local = _attribute(shard, "tensor")
            if not isinstance(local, StoredTensor):
                raise ValueError(f"a shard of it is {short(local)}")
            held.append(_shard(_attribute(shard, "metadata"), local, shape))
        properties = _attribute(metadata, "tensor_properties")
        named = properties.state[0] if isinstance(properties, Opaque) and isinstance(properties.state, tuple) else None
        dtype = held[0].local.dtype if held and held[0].local is not None else named
        if not isinstance(dtype, DType) or not fits(shape, dtype.itemsize):
            raise ValueError(f"it is of dtype {short(dtype)} and shape {short(shape)}")
        if any(s.local is not None and s.local.dtype != dtype for s in held):
            raise ValueError("its shards have several dtypes")
        group = state[2] if len(state) > 2 else None
        world = _attribute(group, "global_world_size")
        return ShardedTensor(shape, dtype, shards, tuple(held), world if type(world) is int else None)


def _shard(metadata: Any, local: StoredTensor | None, whole: Shape) -> Shard:
    start = _sizes(_attribute(metadata, "shard_offsets"))
    shape = _sizes(_attribute(metadata, "shard_sizes"))
    if len(start) != len(whole) or len(shape) != len(whole):
        raise ValueError(f"a shard at {start} of shape {shape}, of a tensor of shape {whole}")
    if any(a + n > m for a, n, m in zip(start, shape, whole, strict=True)):
        raise ValueError(f"a shard at {start} of shape {shape} leaves the tensor's shape {whole}")
    if local is not None and local.shape != shape:
        raise ValueError(f"a shard of shape {local.shape} is told to have {shape}")
    rank = _attribute(_attribute(metadata, "placement"), "_rank")
    return Shard(start, shape, rank if type(rank) is int else None, local)


def _placement(record: Any) -> MeshPlacement:
    name = record.name.rpartition(".")[2] if isinstance(record, Opaque) else ""
    if name in ("Shard", "_StridedShard", "StridedShard"):
        dim = _attribute(record, "dim")
        split = _attribute(record, "split_factor") if name != "Shard" else 1
        if type(dim) is int and type(split) is int:
            return Cut(dim, split)
    if name == "Replicate":
        return Same()
    if name in ("Partial", "_Partial", "_MaskPartial", "_NormPartial"):
        reduce = _attribute(record, "reduce_op")
        return Summand(reduce if isinstance(reduce, str) and reduce else "sum")
    raise ValueError(f"a placement is {short(record)}, which lazyckpt does not know")


def _order(entries: Any, ndim: int) -> tuple[int, ...] | None:
    """Return the order in which the mesh dimensions cut; None if it is that of the mesh."""
    if not isinstance(entries, tuple | list):
        return None
    order: list[int] = []
    usual = True
    for entry in entries:
        values = entry.args if isinstance(entry, Opaque) else entry
        dims = values[1] if isinstance(values, tuple | list) and len(values) == 2 else None
        if not isinstance(dims, tuple | list) or not all(type(m) is int for m in dims):
            raise ValueError(f"its order of shards has {short(entry)}")
        usual = usual and list(dims) == sorted(dims)
        order += dims
    return None if usual else (*order, *(m for m in range(ndim) if m not in order))


def _axes(layout: Opaque, ranks: int) -> list[list[int]]:
    """Return, for every dimension of a mesh, the offsets of its indices in the list of ranks.

    Source: torch/distributed/_mesh_layout.py, ``axes`` of `_FlatLayout`; before torch 2.12 ``shape`` and ``stride``,
    which are nested for a dimension that is flattened from several.
    """
    axes = _attribute(layout, "axes")
    if isinstance(axes, tuple | list):
        pairs = [(_attribute(a, "shape"), _attribute(a, "stride")) for a in axes]
    else:
        shape, stride = _attribute(layout, "shape"), _attribute(layout, "stride")
        if type(shape) is int:
            shape, stride = (shape,), (stride,)
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
            raise ValueError("the layout of its mesh has no shape")
        pairs = list(zip(shape, stride, strict=True))
    found = []
    total = 1
    for sizes, steps in pairs:
        flat, strides = _flattened(sizes), _flattened(steps)
        if len(flat) != len(strides):
            raise ValueError("the layout of its mesh does not fit together")
        total *= prod(flat)
        if not 0 < total <= ranks:
            raise ValueError("its mesh has more ranks than it lists")
        found.append(
            [
                sum(c)
                for c in product(*(range(0, n * s, s) if s else [0] * n for n, s in zip(flat, strides, strict=True)))
            ]
        )
    return found


def _flattened(value: Any, depth: int = 0) -> list[int]:
    if type(value) is int and 0 <= value < _MAX_RANKS:
        return [value]
    if isinstance(value, tuple | list) and depth < 8 and len(value) < 64:
        return [n for v in value for n in _flattened(v, depth + 1)]
    raise ValueError(f"the layout of its mesh has {short(value)}")


def _attribute(record: Any, *names: str) -> Any:
    """Return the first of these attributes that a record has and is not None; None if there is none."""
    if not isinstance(record, Opaque):
        return None
    attributes = record.attributes
    return next((attributes[n] for n in names if attributes.get(n) is not None), None)


def _sizes(values: Any) -> Shape:
    if not isinstance(values, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"its shape is {short(values)}")
    return tuple(values)


def _inside(coordinate: Any, shape: Shape) -> bool:
    return (
        isinstance(coordinate, tuple | list)
        and len(coordinate) == len(shape)
        and all(type(c) is int and 0 <= c < n for c, n in zip(coordinate, shape, strict=True))
    )


def _ravel(coordinate: Sequence[int], shape: Shape) -> int:
    at = 0
    for c, n in zip(coordinate, shape, strict=True):
        at = at * n + c
    return at


def _unravel(at: int, shape: Shape) -> Shape:
    found = []
    for n in reversed(shape):
        found.append(at % n)
        at //= n
    return tuple(reversed(found))
