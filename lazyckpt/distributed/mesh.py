"""The ("ep", "ep_fsdp") mesh of ranks, and how parameters are distributed over it: one `EPSpecInfo` for each.

Trainers: VeOmni (veomni/distributed/parallel_state.py, parallel_plan.py) and MindSpeed-MM, which adopted it. The
trainer cuts a stack of experts [E, ...] over "ep" along its first dimension, so that a rank's parameter is [E / ep,
...]. FSDP2 then shards that parameter over "ep_fsdp", usually along the second dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.names import matcher, unwrapped
from ..errors import MeshError, some

# -- The accelerator of this machine: CUDA, ROCm, XPU, MPS, or that of a plugin, such as Ascend's NPU.

_OLDER = ("cuda", "npu", "xpu")  # types of plugins that do not register with torch.accelerator


def get_device_type() -> str:
    """Return the type of the machine's accelerator: ``cuda``, ``npu``, ``xpu``, ``mps``, ..., or ``cpu`` if none.

    Plugins (torch_npu) have to be imported first.
    """
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return found.type
    for kind in _OLDER:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def synchronize() -> None:
    """Wait for all work on the current accelerator device. Without an accelerator, do nothing."""
    _call("synchronize")


def empty_cache() -> None:
    """Release the accelerator's memory that torch caches and no tensor uses. Without an accelerator, do nothing."""
    _call("empty_cache")


def _call(name: str) -> None:
    kind = get_device_type()
    function = getattr(getattr(torch, kind, None), name, None)
    if kind != "cpu" and function is not None:
        function()


# -- The ("ep", "ep_fsdp") mesh of ranks, and an `EPSpecInfo` for each parameter.

NAMES = ("ep", "ep_fsdp")


class EPDegrees(NamedTuple):
    """The sizes of an ("ep", "ep_fsdp") mesh, for use without processes."""

    ep: int = 1
    ep_fsdp: int = 1


@dataclass(frozen=True, slots=True)
class EPSpecInfo:
    """How a parameter is distributed over the ("ep", "ep_fsdp") mesh.

    Attributes
    ----------
    name
        The parameter's FQN.
    placement
        The placement over "ep": ``Shard(dim)`` for experts, ``Replicate()`` for all others; None if a checkpoint does
        not determine it.
    mesh
        The 2-D mesh, or its sizes without processes; None if a checkpoint does not determine it.
    fsdp_placement
        The placement over "ep_fsdp", or None if unknown.
    note
        What is unknown, and why.
    """

    name: str
    placement: Shard | Replicate | None
    mesh: DeviceMesh | EPDegrees | None
    fsdp_placement: Shard | Replicate | None = None
    note: str = ""

    @property
    def sharded(self) -> bool:
        """Whether the parameter is known to be distributed over the EP ranks."""
        return isinstance(self.placement, Shard)

    @property
    def ep_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that hold different experts. Raises MeshError if there are no processes."""
        return self._live["ep"]

    @property
    def ep_fsdp_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that share the same experts. Raises MeshError if there are no processes."""
        return self._live["ep_fsdp"]

    @property
    def _live(self) -> DeviceMesh:
        if not isinstance(self.mesh, DeviceMesh):
            raise MeshError(f"{self.name!r}: its mesh is {self.mesh}, sizes without processes: give a DeviceMesh")
        return self.mesh

    @property
    def degrees(self) -> EPDegrees:
        """The sizes of the mesh. Raises MeshError if they are not known."""
        if self.mesh is None:
            raise MeshError(f"{self.name!r}: {self.note or 'its mesh is not known'}")
        return degrees_of(self.mesh)


def init_ep_mesh(ep_size: int, *, device_type: str | None = None, ep_outside: bool = False) -> DeviceMesh:
    """Make the 2-D mesh ("ep", "ep_fsdp") of all ranks. All ranks have to call it.

    Parameters
    ----------
    ep_size
        The number of ranks with different experts. The other dimension has the ranks that share the same experts.
    device_type
        By default the type of the accelerator; "cpu" for the gloo backend.
    ep_outside
        False makes EP ranks neighbours (0, 1, ... of one machine). True makes ranks that share experts neighbours.

    Returns
    -------
    DeviceMesh
        The mesh.

    Raises
    ------
    MeshError
        ``ep_size`` does not divide the number of ranks, or there is no process group.
    """
    if not dist.is_initialized():
        raise MeshError("there is no process group: call torch.distributed.init_process_group first")
    world = dist.get_world_size()
    if ep_size < 1 or world % ep_size:
        raise MeshError(f"{world} ranks cannot be dealt to {ep_size} expert-parallel ranks: it has to divide them")
    if device_type is None:
        backend = dist.get_backend()
        device_type = "cpu" if backend == "gloo" else get_device_type()
    ranks = torch.arange(world, dtype=torch.int, device="cpu")
    ranks = ranks.view(ep_size, -1) if ep_outside else ranks.view(-1, ep_size).t().contiguous()
    return DeviceMesh(device_type, ranks, mesh_dim_names=NAMES)


def checked(mesh: Any) -> DeviceMesh:
    """Return the mesh. Raises MeshError if it is not an ("ep", "ep_fsdp") mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"an ('ep', 'ep_fsdp') DeviceMesh is needed, not {type(mesh).__name__}")
    if mesh.mesh_dim_names != NAMES:
        raise MeshError(
            f"the mesh has the dimensions {mesh.mesh_dim_names} of {tuple(mesh.shape)}: they have to be {NAMES}, in "
            "this order (of a larger mesh: mesh['ep', 'ep_fsdp'])"
        )
    return mesh


def same_ranks(a: DeviceMesh, b: DeviceMesh) -> bool:
    """Return whether two meshes have the same ranks in the same places, under any names of dimensions."""
    return a is b or (a.ndim == b.ndim and torch.equal(a.mesh, b.mesh))


def degrees_of(mesh: DeviceMesh | EPDegrees) -> EPDegrees:
    """Return the sizes of a mesh. Raises MeshError if it is not an ("ep", "ep_fsdp") mesh."""
    return mesh if isinstance(mesh, EPDegrees) else EPDegrees(*checked(mesh).shape)


def build_ep_fqn2spec_info(
    model: torch.nn.Module, plan: Mapping[str, Shard | Replicate], mesh: DeviceMesh
) -> dict[str, EPSpecInfo]:
    """Describe how the parameters of a model are distributed over the experts' mesh.

    Parameters
    ----------
    model
        The module. Names do not include wrappers of torch (compile, FSDP1, activation checkpointing).
    plan
        Which parameters are experts: glob (``*`` also matches dots) -> placement over "ep", for example
        ``{"*.mlp.experts.*": Shard(0)}``. The first matching glob counts. A name without one is ``Replicate()``.
    mesh
        The ("ep", "ep_fsdp") mesh.

    Returns
    -------
    dict of str to EPSpecInfo
        FQN -> description, for every parameter.

    Raises
    ------
    MeshError
        A glob matches no name, a placement is neither ``Shard`` nor ``Replicate``, or the mesh is not an ("ep",
        "ep_fsdp") mesh.
    """
    mesh = checked(mesh)
    parameters = {unwrapped(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    placements = planned(list(parameters), plan)
    infos = {}
    for name, parameter in parameters.items():
        fsdp = None
        if isinstance(parameter, DTensor) and same_ranks(parameter.device_mesh, mesh["ep_fsdp"]):
            (over,) = parameter.placements
            fsdp = over if isinstance(over, Shard | Replicate) else None
        infos[name] = EPSpecInfo(name, placements[name], mesh, fsdp)
    return infos


def planned(names: Sequence[str], plan: Mapping[str, Shard | Replicate]) -> dict[str, Shard | Replicate]:
    """Return name -> placement over "ep". Raises MeshError for a glob that matches no name."""
    found: dict[str, Shard | Replicate] = dict.fromkeys(names, Replicate())
    taken: set[str] = set()
    for pattern, placement in plan.items():
        if not isinstance(placement, Shard | Replicate) or (isinstance(placement, Shard) and placement.dim < 0):
            raise MeshError(
                f"{pattern!r}: {placement!r} is no placement of experts: Shard(dim), dim >= 0, or Replicate()"
            )
        keep = matcher(pattern)
        matched = [name for name in names if keep(name)]
        if not matched:
            raise MeshError(f"{pattern!r} matches none of the {len(names):,} names: {some(names, 4)}")
        for name in matched:
            if name not in taken:
                found[name] = placement
                taken.add(name)
    return found
