"""Records of DTensors and ShardedTensors as several versions of torch spell them, and as none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazyckpt.core.dtypes import F32, I32, DType
from lazyckpt.formats.ranks.records import DTensor, Records
from lazyckpt.io.containers.pickle.rebuild import StoredStorage, StoredTensor, TensorSubclass
from lazyckpt.io.containers.pickle.records import Opaque
from lazyckpt.layouts.placements import Cut, Layout, Same, Summand

MESH = ([0, 1, 2, 3], (2, 2))


def stored(*shape: int, dtype: DType = F32) -> StoredTensor:
    whole = torch.empty(shape)
    storage = StoredStorage("0", dtype, whole.numel(), "cpu")
    return StoredTensor(storage, dtype, 0, shape, tuple(whole.stride()))


def record(module: str, name: str, state: Any = None, args: Any = ()) -> Opaque:
    made = Opaque(module, name, args)
    made.state = state
    return made


def placements(root: str = "torch.distributed.tensor", *, strided: bool = True) -> tuple[Opaque, ...]:
    module = f"{root}.placement_types"
    first = {"dim": 0, "split_factor": 2} if strided else {"dim": 0}
    return record(module, "_StridedShard" if strided else "Shard", first), record(module, "Shard", {"dim": 0})


def old_mesh(**changes: Any) -> Opaque:
    """torch 2.3: a tensor, the same as a list, and the coordinate."""
    ranks, shape = MESH
    state = {
        "device_type": "cuda",
        "mesh": stored(*shape, dtype=I32),
        "mesh_dim_names": ("dp", "tp"),
        "_flatten_mesh_list": tuple(ranks),
        "_dim_group_infos": [("", [0, 2], "1"), ("", [0, 1], "2")],
        "_coordinate_on_dim": [1, 0],
        "_hash": 5,
        **changes,
    }
    return record("torch.distributed.device_mesh", "DeviceMesh", {k: v for k, v in state.items() if v is not None})


def layout_mesh(axes: Any, ranks: tuple[int, ...], coordinate: Any, **more: Any) -> Opaque:
    """torch 2.13."""
    made = tuple(record("torch.distributed._mesh_layout", "_FlatLayout", {"shape": n, "stride": s}) for n, s in axes)
    state = {
        "_device_type": "cuda",
        "_layout": record("torch.distributed._mesh_layout", "_MeshLayout", {"axes": made}),
        "_rank_map": stored(len(ranks), dtype=I32),
        "_mesh_dim_names": None,
        "_flatten_rank_map": ranks,
        "_coordinate_on_dim": coordinate,
        **more,
    }
    return record("torch.distributed.device_mesh", "DeviceMesh", state)


def dtensor(mesh: Opaque, where: Any = None, shape: Any = (8, 3), local: Any = None, **spec: Any) -> TensorSubclass:
    made = TensorSubclass("torch.distributed._tensor.api", "DTensor")
    meta = record("torch.distributed._tensor.placement_types", "TensorMeta", None, (torch.Size(shape), (3, 1), F32))
    state = {"mesh": mesh, "placements": where or placements(), "tensor_meta": meta, **spec}
    made.args = (record("torch.distributed._tensor.api", "DTensor", None, None), F32, shape, (3, 1), 0)
    inner = record("torch.distributed._tensor.placement_types", "DTensorSpec", state)
    made.state = ({}, {"_local_tensor": stored(2, 3) if local is None else local, "_spec": inner})
    return made


def read(made: TensorSubclass, rank: int | None = 2, values: Any = None) -> DTensor:
    return Records(rank, values or (lambda tensor: pytest.fail("nothing has to be read"))).dtensor(made)


def test_torch_2_3() -> None:
    found = read(dtensor(old_mesh(), placements("torch.distributed._tensor")))
    assert found.layout == Layout((2, 2), (Cut(0, 2), Cut(0)))
    assert (found.shape, found.mesh.coordinate, found.mesh.ranks) == ((8, 3), (1, 0), (0, 1, 2, 3))
    assert found.mesh.names == ("dp", "tp")
    assert found.layout.runs(found.shape, (1, 0))[0] == [(2, 2)]


def test_a_mesh_that_is_only_a_tensor_is_read() -> None:
    mesh = old_mesh(_flatten_mesh_list=None, _coordinate_on_dim=None)
    found = read(dtensor(mesh), rank=3, values=lambda tensor: [0, 1, 2, 3])
    assert found.mesh.coordinate == (1, 1)
    assert read(dtensor(mesh), rank=9, values=lambda tensor: [0, 1, 2, 3]).mesh.coordinate is None


def test_a_spec_without_shape_takes_the_tensor_s() -> None:
    assert read(dtensor(old_mesh(), tensor_meta=None)).shape == (8, 3)


@pytest.mark.parametrize(
    ("axes", "ranks", "coordinate", "own", "wanted"),
    [
        ([((2,), (2,)), ((2,), (1,))], (0, 1, 2, 3), (1, 0), 2, (0, 1, 2, 3)),
        ([((2,), (1,))], (0, 1, 2, 3), (0,), 2, (2, 3)),  # mesh["tp"]: the part that the rank is in
        ([((2,), (2,))], (0, 1, 2, 3), (1,), 3, (1, 3)),  # mesh["dp"]
        ([((4,), (1,))], (4, 5, 6, 7), (2,), 6, (4, 5, 6, 7)),  # a later pipeline stage
        ([((2, 2), (4, 1)), ((2,), (2,))], tuple(range(8)), (2, 0), 4, (0, 2, 1, 3, 4, 6, 5, 7)),  # dims flattened
        ([((), ()), ((4,), (1,))], (0, 1, 2, 3), (0, 3), 3, (0, 1, 2, 3)),  # a dimension of one rank
    ],
)
def test_parts_of_larger_meshes(axes: Any, ranks: Any, coordinate: Any, own: int, wanted: Any) -> None:
    mesh = layout_mesh(axes, ranks, coordinate, _rank=own)
    where = placements(strided=False)[: len(axes)]
    assert read(dtensor(mesh, where), rank=None).mesh.ranks == wanted


def test_the_layout_before_torch_2_12() -> None:
    mesh = layout_mesh([], (0, 1, 2, 3), (1, 0), _rank=2)
    mesh.state["_layout"] = record("torch.distributed._mesh_layout", "_MeshLayout", {"shape": (2, 2), "stride": (2, 1)})
    assert read(dtensor(mesh)).mesh.shape == (2, 2)


def test_the_order_of_shards() -> None:
    entry = record("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", None, (0, (1, 0)))
    found = read(dtensor(old_mesh(), placements(strided=False), shard_order=(entry,)))
    assert found.layout.order == (1, 0)
    assert read(dtensor(old_mesh(), shard_order=((0, (0, 1)),))).layout.order is None


def test_other_placements() -> None:
    module = "torch.distributed._tensor.placement_types"
    where = (
        record(module, "_Partial", {"reduce_op": record("torch.distributed", "ReduceOp")}),
        record(module, "Replicate", {}),
    )
    assert read(dtensor(old_mesh(), where, local=stored(8, 3))).layout.placements == (Summand("sum"), Same())


HUGE = record("a", "_StridedShard", {"dim": 0, "split_factor": 1 << 39})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"local": "nothing"}, "local tensor"),
        ({"placements": None}, "no placements"),
        ({"placements": (record("a", "Odd"),) * 2}, "does not know"),
        ({"placements": (record("a", "Shard", {"dim": "0"}),) * 2}, "does not know"),
        ({"placements": placements()[:1]}, "1 placements on a mesh of 2"),
        ({"placements": (record("a", "Shard", {"dim": 7}),) * 2}, "dimension 7"),
        ({"placements": (record("a", "Shard", {"dim": -1}),) * 2}, "dimension -1"),
        ({"shape": (-1, 3)}, "its shape"),
        ({"shape": (1 << 61, 1 << 61)}, "its shape"),
        ({"shape": (1 << 40, 3), "placements": (HUGE,) * 2},
         "pieces"),
        ({"mesh": record("a", "DeviceMesh", {})}, "neither ranks nor shape"),
        ({"mesh": old_mesh(_flatten_mesh_list=(0, 1))}, "lists 2 ranks"),
        ({"mesh": old_mesh(_flatten_mesh_list=(0, 1, 2, "3"))}, "lists 4 ranks"),
        ({"mesh": layout_mesh([((1 << 20, 1 << 20), (1, 1))], (0, 1), (0,))}, "more ranks than it lists"),
        ({"mesh": layout_mesh([((2,), (9,))], (0, 1), (0,))}, "more ranks than it lists"),
        ({"mesh": layout_mesh([((2,), (-1,))], (0, 1), (0,))}, "layout of its mesh"),
        ({"mesh": layout_mesh([((2,), (1, 1))], (0, 1), (0,))}, "does not fit together"),
        ({"shard_order": (5,)}, "order of shards"),
        ({"shard_order": ((0, (5, 4)),)}, "order"),
        ({"shard_order": ((0, (1, 1)),)}, None),
    ],
)  # fmt: skip
def test_what_no_torch_writes(changes: dict[str, Any], what: str | None) -> None:
    local = changes.pop("local", None)
    shape = changes.pop("shape", (8, 3))
    made = dtensor(changes.pop("mesh", old_mesh()), None, (8, 3), local)
    spec = made.state[1]["_spec"].state
    spec.update(changes)
    if shape != (8, 3):
        spec["tensor_meta"] = None
        made.args = (*(made.args or ())[:2], shape)
    if what is None:  # no order at all
        read(made)
        return
    with pytest.raises(ValueError, match=what):
        read(made)


def sharded(**changes: Any) -> TensorSubclass:
    module = "torch.distributed._shard.sharded_tensor"

    def block(start: Any, shape: Any, rank: int) -> Opaque:
        device = record("torch.distributed.remote_device", "_remote_device", {"_rank": rank})
        state = {"shard_offsets": start, "shard_sizes": shape, "placement": device}
        return record("torch.distributed._shard.metadata", "ShardMetadata", (None, state))

    listed = changes.get("listed", [block([0, 0], [2, 3], 0), block([2, 0], [2, 3], 1)])
    local = changes.get("local", stored(2, 3))
    shard = record(
        f"{module}.shard", "Shard", (None, {"tensor": local, "metadata": changes.get("own", block([2, 0], [2, 3], 1))})
    )
    properties = record(f"{module}.metadata", "TensorProperties", (F32, "torch.strided", False, None, False))
    metadata = {"shards_metadata": listed, "size": changes.get("size", (4, 3)), "tensor_properties": properties}
    made = TensorSubclass(f"{module}.api", "ShardedTensor")
    group = record(f"{module}.api", "ShardedTensor.ProcessGroupState", {"global_world_size": 2})
    made.state = ([shard], record(f"{module}.metadata", "ShardedTensorMetadata", metadata), group, None, False)
    if "state" in changes:
        made.state = changes["state"]
    return made


def test_sharded_tensors() -> None:
    found = Records(1, lambda tensor: []).sharded(sharded())
    assert (found.shape, found.dtype, found.world) == ((4, 3), torch.float32, 2)
    assert [(s.start, s.shape, s.rank) for s in found.shards] == [((0, 0), (2, 3), 0), ((2, 0), (2, 3), 1)]
    assert found.held[0].start == (2, 0) and found.held[0].local is not None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"state": None}, "its state"),
        ({"state": ([], None)}, "lists no shards"),
        ({"local": stored(3, 3)}, "told to have"),
        ({"local": None}, "a shard of it"),
        ({"size": (3, 3)}, "leaves"),
        ({"size": (4, 3, 1)}, "of a tensor of shape"),
        ({"size": "x"}, "shape"),
        ({"own": record("a", "b", {})}, "shape"),
    ],
)
def test_what_no_sharded_tensor_is(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Records(1, lambda tensor: []).sharded(sharded(**changes))
