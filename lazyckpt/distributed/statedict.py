"""Write state dicts to files: sizes of dtypes, plans of shards, and one file that is written completely or not at all.

These are helpers that trainers have (VeOmni, MindSpeed: ``get_dtype_size``, ``get_shard_info``, ``save_state_dict``),
for tensors in memory and for lazy tensors. File names and the plan are those of Hugging Face
(huggingface_hub/serialization/_base.py `split_state_dict_into_shards_factory`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.dtypes import FROM_NAME, FROM_SAFETENSORS
from ..core.expr import leaves, structure
from ..core.units import size_in_bytes
from ..errors import DataError
from ..export.files import FileFormat, file_names, split
from ..export.safetensors import SAFETENSORS
from ..export.torch import TORCH, held
from ..export.writer import check_names
from ..jobs.destination import Files
from ..jobs.executor import run
from ..jobs.guard import local_path
from ..jobs.plan import File, Layout, WritePlan
from ..jobs.publish import fingerprint, once
from ..jobs.write import write
from ..tensor import LazyTensor
from ..view import CheckpointView

StateDict = Mapping[str, Any]  # of torch.Tensor or LazyTensor

# Bits of an element, for names without a dtype of torch, or with one of another itemsize.
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {f"{kind}int{n}": n for kind in ("", "u") for n in range(1, 8)}


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype by its name in torch (``bfloat16``, ``torch.bfloat16``) or safetensors (``BF16``).

    Raises DataError for any other name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    found = FROM_NAME.get(dtype.removeprefix("torch.")) or FROM_SAFETENSORS.get(dtype)
    if found is None:
        raise DataError(
            f"{dtype!r} is no dtype: write it as torch does ('bfloat16', 'torch.float8_e4m3fn') or safetensors ('BF16')"
        )
    return found.torch


def get_dtype_size(dtype: torch.dtype | str) -> int | float:
    """Return the bytes of one element. Elements of packed dtypes are fractions of a byte.

    A bool has 1 byte, as in memory and in files. `torch.float4_e2m1fn_x2` has 1 byte for two numbers, because torch's
    shapes count bytes. ``uint4`` (and all of int1 to uint7) has its packed size, also as a dtype of torch, although
    torch keeps each in a byte of its own.

    Parameters
    ----------
    dtype
        A dtype, or its name in torch (``bfloat16``, ``torch.bfloat16``) or safetensors (``BF16``).

    Returns
    -------
    int or float
        Bytes.

    Raises
    ------
    DataError
        There is no such dtype.

    Examples
    --------

    >>> get_dtype_size(torch.bfloat16), get_dtype_size("BF16"), get_dtype_size("uint4"), get_dtype_size("F6_E2M3")
    (2, 2, 0.5, 0.75)
    """
    if dtype in _PACKED:
        return _PACKED[str(dtype)] / 8
    found = dtype_of(dtype)
    bits = _PACKED.get(str(found).removeprefix("torch."))
    return found.itemsize if bits is None else bits / 8


class ShardInfo(NamedTuple):
    """The plan of `get_shard_info`.

    Attributes
    ----------
    is_sharded
        Whether there is more than one file.
    total_size
        Bytes of all tensors. Tied tensors are counted once.
    weight_map
        Name of a tensor -> name of its file.
    """

    is_sharded: bool
    total_size: int
    weight_map: dict[str, str]


def get_shard_info(
    state_dict: StateDict,
    save_dtype: torch.dtype | str | None = None,
    shard_size: int | str = 5_000_000_000,
    safe_serialization: bool = True,
) -> ShardInfo:
    """Plan the files of a state dict as Hugging Face names them. Reads and gathers nothing.

    A tensor with several names is in one file and counted once. Different views of the same memory are different
    tensors.

    Parameters
    ----------
    state_dict
        Tensors of torch on any device (also meta), DTensors (by their global size), lazy tensors, or a view.
    save_dtype
        The dtype that floating-point tensors will be converted to.
    shard_size
        Largest size of a file, in bytes or as text such as "5GB". A larger tensor gets a file of its own.
    safe_serialization
        True for ``model.safetensors`` or ``model-00001-of-0000N.safetensors``, False for ``pytorch_model.bin`` or
        ``pytorch_model-00001-of-0000N.bin``.

    Returns
    -------
    ShardInfo
        The plan.

    Raises
    ------
    DataError
        A value is not a tensor, or ``save_dtype`` or ``shard_size`` is invalid.
    """
    wanted = None if save_dtype is None else dtype_of(save_dtype)
    sizes: dict[str, _Sized] = {}
    owners = _owners(state_dict)
    for name, tensor in state_dict.items():
        if owners[name] == name:
            dtype = tensor.dtype if wanted is None or not tensor.dtype.is_floating_point else wanted
            sizes[name] = _Sized(tensor.numel() * dtype.itemsize)
    form = SAFETENSORS if safe_serialization else TORCH
    shards = split(sizes, size_in_bytes(shard_size))
    files = file_names(form.stem, form.suffix, len(shards))
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(size.nbytes for size in sizes.values())
    return ShardInfo(len(shards) > 1, total, {name: places[owners[name]] for name in state_dict})


def save_state_dict(state_dict: StateDict, path: str | os.PathLike[str], safe_serialization: bool = True) -> Path:
    """Write a flat state dict as one file of safetensors or of torch.save.

    An existing file is replaced when the new one is complete. Dense tensors are written in C order, without the storage
    that they are views of. A tensor with several names is stored once: torch.load returns it under all names; in
    safetensors the header's metadata has the other names. A DTensor is written only if this rank holds all of it.

    Parameters
    ----------
    state_dict
        Lazy tensors (a view), which are read in pieces with a few MiB of memory a thread, or dense tensors of torch on
        any device and with any strides.
    path
        The file to write.
    safe_serialization
        True for safetensors (with ``format: pt`` in its metadata), False for torch.save.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    DataError
        A value is not a tensor, a DTensor is on several ranks, or the format lacks a dtype or a name.
    DestinationError
        The file cannot be written, or a lazy tensor is read from it.
    LazyckptError
        What reading the lazy tensors raises.
    """
    owners = _owners(state_dict)
    check_names(state_dict)
    tensors: dict[str, Any] = {}
    for name in (name for name, owner in owners.items() if name == owner):
        value = state_dict[name]
        tensors[name] = value if isinstance(value, LazyTensor) else held(value, name)
    lazy = [t for t in tensors.values() if isinstance(t, LazyTensor)]
    aliases = {name: owner for name, owner in owners.items() if name != owner}
    form: FileFormat = SAFETENSORS if safe_serialization else TORCH
    nbytes = form.size(tensors, aliases)
    # tensors in memory have no fingerprint: such a file is never resumed
    parts = [(t, (name, str(t.dtype))) for name, t in tensors.items() if isinstance(t, LazyTensor)]
    same = fingerprint(parts, [repr(aliases).encode(), form.stem.encode()]) if len(parts) == len(tensors) else once()
    return replace_file(path, nbytes, lazy, partial(form.layout, tensors, aliases), same)


def replace_file(
    path: str | os.PathLike[str],
    nbytes: int,
    lazy: Sequence[LazyTensor],
    layout: Callable[[], Layout],
    same: str,
) -> Path:
    """Write a file of about ``nbytes`` bytes with this ``layout`` under another name, and publish it when it is
    complete. A call with the ``same`` fingerprint resumes an interrupted one. Raises DestinationError, also for a file
    that ``lazy`` tensors are read from."""
    place = local_path(path)
    plan = WritePlan(
        destination=Files(place, [place.name], lazy, overwrite=True, one=True),
        tensors=lazy,
        fingerprint=same,
        files=[File(place.name, nbytes, layout)],
        room=nbytes,
    )
    write(plan, verify=False, progress=False, run=run)
    return place


class _Sized(NamedTuple):
    nbytes: int


def _owners(state_dict: StateDict) -> dict[str, str]:
    """Return name -> first name of the same tensor. Raises DataError for a value that is not a tensor."""
    owners: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor | LazyTensor):
            raise DataError(f"{name!r} is a {type(tensor).__name__}: a state dict for files holds tensors only")
        if isinstance(state_dict, CheckpointView):
            key: Any = state_dict.owner(name)
        else:
            key = name if not tensor.numel() else _identity(tensor)
        owners[name] = first.setdefault(key, name)
    return owners


def _identity(tensor: Any) -> Any:
    """Return a key that two tensors share if and only if they are the same elements in the same memory."""
    if isinstance(tensor, LazyTensor):
        sources = tuple((one.source, id(one.spec.fragments)) for one in leaves(tensor.spec))
        what = repr(structure(tensor.spec))
        return id(tensor.store), sources, what, tensor.dtype, tensor.shape, tensor._block or id(tensor)
    plain = tensor.detach()
    if hasattr(plain, "full_tensor"):
        return "DTensor", tensor.shape, plain.placements, _identity(plain.to_local())
    if plain.layout != torch.strided:
        return id(tensor)
    try:
        storage = plain.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor made of others has no memory of its own
        return id(tensor)
    where = plain.storage_offset(), plain.shape, plain.stride(), plain.dtype, plain.is_conj(), plain.is_neg()
    return storage._cdata, where
