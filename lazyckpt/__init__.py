"""Huge model checkpoints as one namespace of lazy tensors.

view = lazyckpt.open("runs/405b/global_step9000")
view["layers.3.mlp"].to("cuda")
view.states["exp_avg"]["layers.3.mlp.up.weight"][:8]
"""

from types import ModuleType as _ModuleType

from . import deepspeed as deepspeed  # the module is public, too
from .comparing import diff
from .core.index import Mesh
from .errors import (
    ChangedFileError,
    CorruptError,
    DataError,
    DestinationError,
    FormatError,
    LazyckptError,
    MeshError,
    MissingFileError,
    SelectionError,
    TensorNotFoundError,
    WorkerError,
)
from .inspect.diff import Diff, Difference
from .io.records import Opaque
from .retention import Pruned, prune
from .run import RunView
from .tensor import LazyTensor
from .view import CheckpointView, unshard

open = CheckpointView
open_run = RunView

__version__ = "0.1.0"
__all__ = [
    "ChangedFileError",
    "CheckpointView",
    "CorruptError",
    "DataError",
    "DestinationError",
    "Diff",
    "Difference",
    "FormatError",
    "LazyTensor",
    "LazyckptError",
    "Mesh",
    "MeshError",
    "MissingFileError",
    "Opaque",
    "Pruned",
    "RunView",
    "SelectionError",
    "TensorNotFoundError",
    "WorkerError",
    "diff",
    "open",
    "open_run",
    "prune",
    "unshard",
]


def load_ipython_extension(shell: object) -> None:
    """``%load_ext lazyckpt``: let IPython complete keys behind views, too (``view.states["``, ``view["layers.0"]["``).

    IPython calls no ``__getitem__`` and no property of classes that it does not know while it completes; this allows it
    those of views, in this process. They read no tensor data.
    """
    from .show.completion import allow

    allow(CheckpointView, RunView)


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext lazyckpt``: take back what `load_ipython_extension` has allowed."""
    from .show.completion import forbid

    forbid(CheckpointView, RunView)


def __getattr__(name: str) -> _ModuleType:
    """``lazyckpt.distributed``, ``lazyckpt.interop`` and ``lazyckpt.recipes`` are imported when they are first asked
    for: torch's distributed packages and zarr take a while."""
    if name in ("distributed", "interop", "recipes"):
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public: what Tab should offer."""
    return sorted((*__all__, "__doc__", "__version__", "deepspeed", "distributed", "interop", "recipes"))
