"""Open huge model checkpoints as one namespace of lazy tensors.

view = lazyckpt.open("runs/405b/global_step9000")
view["layers.3.mlp"].to("cuda")
view.states["exp_avg"]["layers.3.mlp.up.weight"][:8]
"""

from __future__ import annotations

import os as _os
from collections.abc import Mapping as _Mapping
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .errors import (
    ChangedFileError,
    CorruptError,
    DataError,
    DestinationError,
    FormatError,
    LazyckptError,
    MeshError,
    MissingFileError,
    Problem,
    SelectionError,
    TensorNotFoundError,
    WorkerError,
)

if _TYPE_CHECKING:
    from . import deepspeed as deepspeed
    from . import distributed as distributed
    from . import interop as interop
    from . import recipes as recipes
    from .adapting import apply_lora, extract_lora
    from .combining import mean, merge
    from .core.placement import Mesh
    from .exploring import serve
    from .export.options import WriteResult
    from .inspect.diff import Difference
    from .inspect.manifest import Digest
    from .inspect.report import Finding, Report
    from .inspect.scan.folder import scan
    from .io.containers.pickle.records import Opaque
    from .runs.compare import diff, digest
    from .runs.delta import Delta, delta
    from .runs.prune import Pruned, prune
    from .runs.verify import verify
    from .runs.view import RunView
    from .show.compared import Diff
    from .tensor import LazyTensor
    from .view import CheckpointView, unshard

# Public name -> the module that defines it, imported at first access, because importing torch takes a second or two.
_HOMES = {
    "CheckpointView": "view",
    "Delta": "runs.delta",
    "Diff": "show.compared",
    "Difference": "inspect.diff",
    "Digest": "inspect.manifest",
    "LazyTensor": "tensor",
    "Mesh": "core.placement",
    "Opaque": "io.containers.pickle.records",
    "Pruned": "runs.prune",
    "RunView": "runs.view",
    "WriteResult": "export.options",
    "delta": "runs.delta",
    "diff": "runs.compare",
    "digest": "runs.compare",
    "verify": "runs.verify",
    "apply_lora": "adapting",
    "extract_lora": "adapting",
    "mean": "combining",
    "merge": "combining",
    "Report": "inspect.report",
    "Finding": "inspect.report",
    "prune": "runs.prune",
    "scan": "inspect.scan.folder",
    "serve": "exploring",
    "unshard": "view",
}
_MODULES = ("deepspeed", "distributed", "interop", "recipes")

__version__ = "0.1.0"
__all__ = [
    "ChangedFileError",
    "CheckpointView",
    "CorruptError",
    "DataError",
    "Delta",
    "DestinationError",
    "Diff",
    "Difference",
    "Digest",
    "Finding",
    "FormatError",
    "LazyTensor",
    "LazyckptError",
    "Mesh",
    "MeshError",
    "MissingFileError",
    "Opaque",
    "Problem",
    "Pruned",
    "Report",
    "RunView",
    "SelectionError",
    "TensorNotFoundError",
    "WorkerError",
    "WriteResult",
    "apply_lora",
    "delta",
    "diff",
    "digest",
    "extract_lora",
    "mean",
    "merge",
    "open",
    "open_run",
    "prune",
    "scan",
    "serve",
    "unshard",
    "verify",
]


def open(
    path: str | _os.PathLike[str],
    *,
    format: str | None = None,
    tag: str | None = None,
    rules: _Mapping[str, _Any] | None = None,
    cache: bool | str | _os.PathLike[str] = True,
    storage_options: _Mapping[str, _Any] | None = None,
    io: str = "auto",
    base: CheckpointView | str | _os.PathLike[str] | None = None,
) -> CheckpointView:
    """Open a checkpoint as one namespace of lazy tensors. Reads no tensor data.

    ``CheckpointView(path, ...)`` is the same. ``with lazyckpt.open(path) as view:`` or `CheckpointView.close` closes
    the files.

    Parameters
    ----------
    path
        A file, a folder, or the URL of one. A folder that is packed as a tar or a zip is opened like the folder.
    format
        The name of the reader to use, one of those that ``lazyckpt formats`` lists. By default the first reader that
        recognises the path.
    tag
        Which checkpoint to open in a folder that has several. By default the one that the file ``latest`` names, or the
        newest complete one.
    rules
        How the shards of tensor-parallel ranks form a tensor, for names whose rule the checkpoint does not record. Maps
        a glob of names to "column" (cut along dimension 0), "row" (along dimension 1), "replicated", "average",
        "swiglu", or a table such as ``{"cat": 0, "parts": [4096, 1024, 1024]}``; for flat parameters of FSDP1
        ``{"flat": {"up.weight": [64, 32]}}``.
    cache
        Reuse the index of an earlier opening if the files are unchanged. The last indexes are kept in memory; those of
        large checkpoints (hundreds of files, megabytes of metadata) and of folders at URLs also in the user's cache
        folder, for other processes. "disk", a size ("50GiB"), a path, or a path and a size ("/scratch/me:50GiB"): keep
        also the bytes that are read from a URL, in the user's cache folder or at the path, up to 20 GiB or the size.
        False reads everything anew and keeps nothing.
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.
    io
        How files are read. "auto": those of network file systems (NFS, Lustre, GPFS, FUSE, ...) are read in large
        requests, and those of local disks are mapped; "map": all are mapped; "read": none is mapped; "network": all are
        read as if they were on a network file system. The environment variable ``LAZYCKPT_IO`` replaces "auto" by
        another of these. No effect on URLs.
    base
        The base of a delta checkpoint (`delta`): a view, or a path. By default the base is opened where the delta says
        that it was.

    Returns
    -------
    CheckpointView
        A mapping from names to `LazyTensor`.

    Raises
    ------
    MissingFileError
        The path, or a file without which the checkpoint cannot be read, does not exist.
    FormatError
        No reader recognises the path, or the layout is not supported.
    CorruptError
        A file is damaged.
    DataError
        ``base`` is not the base of the delta, or the path is no delta.
    """
    from .view import CheckpointView

    return CheckpointView(
        path, format=format, tag=tag, rules=rules, cache=cache, storage_options=storage_options, io=io, base=base
    )


def open_run(
    path: str | _os.PathLike[str],
    *,
    steps: _Mapping[str, int] | None = None,
    storage_options: _Mapping[str, _Any] | None = None,
) -> RunView:
    """Open all checkpoints of a run as one view, whose tensors have steps as first dimension. Reads no tensor data.

    ``RunView(path, ...)`` is the same.

    Parameters
    ----------
    path
        The folder of the checkpoints, or its URL. Checkpoints are tags of DeepSpeed, ``iter_N``, ``checkpoint-N``,
        files such as ``step_1000.pt``, also in folders below.
    steps
        The steps of checkpoints that do not record one: name -> step.
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.

    Returns
    -------
    RunView
        The checkpoints in the order of their steps.

    Raises
    ------
    MissingFileError
        The folder does not exist.
    FormatError
        The folder has no checkpoint in it.
    """
    from .runs.view import RunView

    return RunView(path, steps=steps, storage_options=storage_options)


def load_ipython_extension(shell: object) -> None:
    """Let IPython complete keys behind views (``view.states["``, ``view["layers.0"]["``), by ``%load_ext lazyckpt``.

    While it completes, IPython calls ``__getitem__`` and properties only of classes on its list. This adds the views to
    the list, in this process; their lookups read no tensor data.
    """
    from .runs.view import RunView
    from .show.notebook import allow
    from .view import CheckpointView

    allow(CheckpointView, RunView)


def unload_ipython_extension(shell: object) -> None:
    """Undo `load_ipython_extension`, by ``%unload_ext lazyckpt``."""
    from .runs.view import RunView
    from .show.notebook import forbid
    from .view import CheckpointView

    forbid(CheckpointView, RunView)


def __getattr__(name: str) -> _Any:
    if name in _HOMES:
        value = getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _MODULES:
        value = _import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion by Tab."""
    return sorted((*__all__, *_MODULES, "__doc__", "__version__"))
