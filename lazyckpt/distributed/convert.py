"""One file of a distributed checkpoint, in bounded memory: all of it for torch.load, or its weights as safetensors.

Source: torch/distributed/checkpoint/format_utils.py `dcp_to_torch_save`, which has the whole checkpoint in memory and
unpickles what is no tensor. Where a value goes is said by the metadata's ``planner_data``.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
from pathlib import Path
from typing import Any

from ..errors import DataError, FormatError, MissingFileError, sentences
from ..export.torch import layout_of, leaves, replaced
from ..formats.dcp.objects import Meta
from ..formats.shared.paths import put
from ..io.containers.pickle.plain import TensorRef
from ..io.containers.pickle.records import Opaque
from ..jobs.publish import fingerprint
from ..lazy import named
from ..tensor import LazyTensor
from ..view import CheckpointView
from .statedict import replace_file


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> Path:
    """Write a folder of torch.distributed.checkpoint as one file of torch.save, as torch's function of this name does,
    and return its path: torch.load gives the nested state dict that was saved, with optimizer states and objects.

    Nothing is unpickled, and memory stays at a few MiB a thread besides the objects. Also reads what torch's function
    does not: folders of the safetensors serialization, of ``use_collectives=False``, and packed ones. A file of that
    name is replaced when the new one is complete. Dicts of any kind become plain ones.

    Raises FormatError (no such folder), MissingFileError (something is lost or cannot be unpacked: nothing is written),
    DataError (an object of a class that would have to be imported to write it again), DestinationError.
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
    return replace_file(torch_save_path, nbytes, tensors, lambda new: layout_of(new, whole), same)


def dcp_to_safetensors(dcp_checkpoint_dir: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the weights of a folder of torch.distributed.checkpoint (also of its HuggingFaceStorageWriter) as one file
    of safetensors, under the names of the view (without ``model.``), and return its path. In bounded memory; a file of
    that name is replaced when the new one is complete. ``path`` may be a folder, which gets ``model.safetensors``.

    Raises FormatError, MissingFileError, DataError (no weights, or a dtype that safetensors lacks), DestinationError.
    """
    view = CheckpointView(dcp_checkpoint_dir)
    if "dcp" not in view.format and view.format != "huggingface":
        raise FormatError(f"{os.fspath(dcp_checkpoint_dir)} is {view.format!r}, no distributed checkpoint")
    if not len(view) or view.state != "weights":
        raise DataError(f"{os.fspath(dcp_checkpoint_dir)} holds no weights, only {', '.join(view.states)}")
    (written,) = view.to_safetensors(path, max_shard_size=None, overwrite=True, progress=False)
    return written


def _restored(value: Any, key: str, stored: CheckpointView) -> Any:
    """An object as it is to be written: tensors in their places, no records of classes."""
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
            return argparse.Namespace(**inner)
    if isinstance(value, Opaque | argparse.Namespace):
        what = f"{value.module}.{value.name}" if isinstance(value, Opaque) else "argparse.Namespace with tensors"
        raise DataError(
            f"{stored.root}: {key!r} holds a {what}, which cannot be written again without importing it. Where you "
            "trust the checkpoint, torch's own dcp_to_torch_save does; the weights alone: dcp_to_safetensors"
        )
    return value
