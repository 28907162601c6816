"""Convert a distributed checkpoint to one file, in bounded memory: all of it for torch.load, or weights as safetensors.

Source: torch/distributed/checkpoint/format_utils.py `dcp_to_torch_save`, which holds the whole checkpoint in memory and
unpickles everything that is not a tensor. The metadata's ``planner_data`` has each value's place in the state dict.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DataError, FormatError, MissingFileError, sentences
from ..export.torch import layout_of, leaves, replaced
from ..formats.dcp.objects import Meta
from ..formats.shared.paths import put
from ..io.containers.pickle.plain import TensorRef
from ..io.containers.pickle.records import Opaque
from ..io.containers.pickle.values import namespace
from ..jobs.publish import fingerprint
from ..lazy import named
from ..tensor import LazyTensor
from ..view import CheckpointView
from .statedict import replace_file


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> Path:
    """Write a checkpoint of torch.distributed.checkpoint as one file of torch.save.

    torch.load of the file returns the nested state dict that was saved, with optimizer states and objects; dicts of any
    kind become plain dicts. Unlike torch's function of this name it unpickles nothing, uses a few MiB a thread besides
    the objects, and supports folders of the safetensors serialization, of ``use_collectives=False``, and packed ones.

    Parameters
    ----------
    dcp_checkpoint_dir
        The folder of the distributed checkpoint.
    torch_save_path
        The file to write. An existing file is replaced when the new one is complete.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    FormatError
        The folder is not a distributed checkpoint with ``.metadata``.
    MissingFileError
        A value is missing or cannot be unpacked. Nothing is written.
    DataError
        An object's class would have to be imported to write the object.
    DestinationError
        The file cannot be written.
    """
    view = CheckpointView(dcp_checkpoint_dir)
    meta = view.meta
    if not isinstance(meta, Meta):
        raise FormatError(
            f"{os.fspath(dcp_checkpoint_dir)} is {view.format!r}, no distributed checkpoint with .metadata: write its "
            "weights with lazyckpt.open(...).to_torch(path)"
        )
    whole: dict[Any, Any] = {}
    stored = view.stored
    for key, path in meta.paths.items():
        if key in meta.objects:
            put(whole, path, _restored(meta.object(key), key, stored))
        elif (tensor := named(stored, key)) is not None:
            put(whole, path, tensor)
        else:
            raise MissingFileError(
                f"{view.root}: {key!r} cannot be read, nothing was written: {sentences(view.problems, 4)}"
            )
    tensors = list(leaves(whole))
    nbytes = sum(t.nbytes + 512 for t in tensors)
    skeleton = pickle.dumps(replaced(whole, lambda t: t.name))
    same = fingerprint([(t, str(t.dtype)) for t in tensors], [skeleton])
    return replace_file(torch_save_path, nbytes, tensors, partial(layout_of, whole), same)


def dcp_to_safetensors(dcp_checkpoint_dir: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path | str:
    """Write the weights of a checkpoint of torch.distributed.checkpoint as one file of safetensors, in bounded memory.

    Names are those of the view, without ``model.``.

    Parameters
    ----------
    dcp_checkpoint_dir
        The folder of the distributed checkpoint, also one of HuggingFaceStorageWriter.
    path
        The file to write, or a folder, which gets ``model.safetensors``. An existing file is replaced when the new one
        is complete.

    Returns
    -------
    Path, or str for a URL
        The file.

    Raises
    ------
    FormatError
        The folder is not a distributed checkpoint.
    MissingFileError
        The folder, or a file of it, does not exist.
    DataError
        The checkpoint has no weights, or a dtype that safetensors lacks.
    DestinationError
        The file cannot be written.
    """
    view = CheckpointView(dcp_checkpoint_dir)
    if "dcp" not in view.format and view.format != "huggingface":
        raise FormatError(f"{os.fspath(dcp_checkpoint_dir)} is {view.format!r}, no distributed checkpoint")
    if not len(view) or view.state != "weights":
        raise DataError(f"{os.fspath(dcp_checkpoint_dir)} holds no weights, only {', '.join(view.states)}")
    (written,) = view.to_safetensors(path, max_shard_size=None, overwrite=True, progress=False)
    return written


def _restored(value: Any, key: str, stored: CheckpointView) -> Any:
    """Return an object for writing, with tensors in their places. Raises DataError for records of classes."""
    if isinstance(value, TensorRef):
        tensor: LazyTensor = stored[value.name]
        return tensor
    if isinstance(value, dict):
        return {_restored(k, key, stored): _restored(v, key, stored) for k, v in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_restored(v, key, stored) for v in value)
    if isinstance(value, Opaque) and (value.module, value.name) == ("_io", "BytesIO"):
        content = value.state[0] if isinstance(value.state, tuple) and value.state else b""
        if isinstance(content, bytes):
            return io.BytesIO(content)
    if isinstance(value, argparse.Namespace):
        inner = {k: _restored(v, key, stored) for k, v in vars(value).items()}
        if not any(True for _ in leaves(inner)):
            return namespace(inner)
    if isinstance(value, Opaque | argparse.Namespace):
        what = f"{value.module}.{value.name}" if isinstance(value, Opaque) else "argparse.Namespace with tensors"
        raise DataError(
            f"{stored.root}: {key!r} holds a {what}, which cannot be written again without importing it. Where you "
            "trust the checkpoint, torch's own dcp_to_torch_save does; the weights alone: dcp_to_safetensors"
        )
    return value
