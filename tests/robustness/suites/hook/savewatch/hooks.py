"""Wrap the functions that save, as soon as the module that defines them is imported.

A wrapper calls the function first, and returns or raises what the function does. Only then is the result compared, and
nothing that goes wrong there is raised.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from traceback import format_exc
from types import ModuleType
from typing import Any

from . import report

_inside = threading.local()  # .depth: how many checks and outer saves this thread is in


def install() -> None:
    """Wrap the savers of every module that this process imports from now on."""
    sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds modules as the other finders do, and patches those that save once they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = PATCHES.get(name)
        if patch is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, patch)
                return spec
        return None


def _run_after(loader: Any, patch: Callable[[ModuleType], None]) -> None:
    run = loader.exec_module

    def run_and_patch(module: ModuleType) -> None:
        run(module)
        patch(module)

    loader.exec_module = run_and_patch


@contextmanager
def _quiet() -> Iterator[None]:
    """Saves of this thread that happen meanwhile are part of something else: they are not compared."""
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        yield
    finally:
        _inside.depth -= 1


def _idle() -> bool:
    return not getattr(_inside, "depth", 0)


def _watch(saver: str, path: Any, check: Callable[[Any, dict[str, Any]], None]) -> None:
    from . import compare

    if os.path.exists(path):
        with _quiet():
            compare.watch(saver, os.fspath(path), check)


def _wrap(owner: Any, name: str, after: Callable[..., None]) -> None:
    """Let ``after`` see the arguments of each call that returned."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if _idle():
            _guarded(name, after, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def _guarded(saver: str, after: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Look at what was saved. A fault of this harness is recorded; the suite never sees it."""
    try:
        after(*args, **kwargs)
    except Exception:
        report.write({"saver": saver, "outcome": report.SKIPPED, "what": "the harness failed", "error": format_exc()})


# -- torch.save


def _torch(module: ModuleType) -> None:
    save = module.save  # type: ignore[attr-defined]

    @functools.wraps(save)
    def wrapper(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        start = _position(f) if _idle() else None
        with _quiet():
            result = save(obj, f, *args, **kwargs)
        if start is not None and not module._serialization_tls.skip_data:  # type: ignore[attr-defined]
            _guarded("torch.save", _watch_file, f, start, obj)
        return result

    module.save = wrapper  # type: ignore[attr-defined]


def _position(file: Any) -> int | None:
    """Where a save will begin in a file; None if what is written there cannot be looked at."""
    if isinstance(file, str | os.PathLike):
        return 0
    try:
        return file.tell() if hasattr(file, "getvalue") or isinstance(file.name, str) else None
    except (AttributeError, OSError, ValueError):
        return None


def _watch_file(file: Any, start: int, obj: Any) -> None:
    """Compare what was written to a path, or to a file from ``start`` on."""
    if isinstance(file, str | os.PathLike):
        _watch("torch.save", file, _check_file(lambda: obj))
        return
    try:
        written = file.getvalue()[start:] if hasattr(file, "getvalue") else _read_from(file.name, start)
    except (OSError, ValueError):  # closed, or gone
        return
    _watch_bytes("torch.save to a file object", written, ".pt", lambda: obj)


def _watch_bytes(saver: str, written: bytes, suffix: str, obj: Callable[[], Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="savewatch") as folder:
        path = os.path.join(folder, f"x{suffix}")
        with open(path, "wb") as file:
            file.write(written)
        _watch(saver, path, _check_file(obj))


def _read_from(path: str, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read()


def _check_file(obj: Callable[[], Any]) -> Callable[[Any, dict[str, Any]], None]:
    """A check that a file holds the tensors of what ``obj`` returns."""

    def check(view: Any, record: dict[str, Any]) -> None:
        from . import compare
        from .truth import truth_of

        try:
            truth = truth_of(obj())
        except Exception as error:
            raise compare.Untold(f"its tensors cannot be collected: {type(error).__name__}: {error}") from error
        compare.same_file(view, truth, record)

    return check


# -- torch.distributed.checkpoint


def _dcp(module: ModuleType) -> None:
    save = module._save_state_dict  # type: ignore[attr-defined]

    @functools.wraps(save)
    def wrapper(
        state_dict: Any,
        storage_writer: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: Any = None,
        **kwargs: Any,
    ) -> Any:
        if planner is None:
            planner = module.DefaultSavePlanner()  # type: ignore[attr-defined]
        with _quiet():
            metadata = save(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner, **kwargs)
        path = getattr(storage_writer, "path", None)
        if isinstance(path, str | os.PathLike) and metadata is not None:
            saver = f"dcp.save, {type(storage_writer).__name__}"
            _guarded(saver, _watch, saver, path, _check_folder(metadata, planner, state_dict))
        return metadata

    module._save_state_dict = wrapper  # type: ignore[attr-defined]


def _check_folder(metadata: Any, planner: Any, state_dict: Any) -> Callable[[Any, dict[str, Any]], None]:
    def check(view: Any, record: dict[str, Any]) -> None:
        from . import sharded

        sharded.same_folder(view, metadata, getattr(planner, "state_dict", state_dict), record)

    return check


# -- safetensors


def _safetensors(module: ModuleType) -> None:
    from_numpy = module.__name__.endswith("numpy")

    def tensors_of(tensors: Any) -> dict[str, Any]:
        import torch

        if not from_numpy:
            return dict(tensors)
        return {name: torch.from_numpy(a.astype(a.dtype.newbyteorder("="))) for name, a in tensors.items()}

    def after_save_file(tensors: Any, filename: Any, *_: Any, **__: Any) -> None:
        _watch(f"{module.__name__}.save_file", filename, _check_file(lambda: tensors_of(tensors)))

    save = module.save  # type: ignore[attr-defined]

    @functools.wraps(save)
    def save_bytes(tensors: Any, *args: Any, **kwargs: Any) -> bytes:
        written: bytes = save(tensors, *args, **kwargs)
        if _idle():
            saver = f"{module.__name__}.save"
            _guarded(saver, _watch_bytes, saver, written, ".safetensors", lambda: tensors_of(tensors))
        return written

    _wrap(module, "save_file", after_save_file)
    module.save = save_bytes  # type: ignore[attr-defined]


# -- Lightning, accelerate: models and optimizers by name


def _atomic_save(module: ModuleType) -> None:
    def after(checkpoint: Any, filepath: Any) -> None:
        _watch("lightning, _atomic_save", filepath, _check_file(lambda: checkpoint))

    _wrap(module, "_atomic_save", after)


def _lightning_trainer(module: ModuleType) -> None:
    def after(trainer: Any, filepath: Any, weights_only: Any = None, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero and trainer.world_size == 1:
            optimizers = [] if weights_only else trainer.optimizers
            _watch("Trainer.save_checkpoint", filepath, _check_models([trainer.lightning_module], optimizers))

    _wrap(module.Trainer, "save_checkpoint", after)  # type: ignore[attr-defined]


def _accelerate(module: ModuleType) -> None:
    def after_save_state(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        folder = args[0] if args else kwargs.get("output_dir")
        if accelerator.project_configuration.automatic_checkpoint_naming:
            number = accelerator.save_iteration - 1
            folder = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{number}")
        if accelerator.is_main_process and accelerator.num_processes == 1:
            models = [accelerator.unwrap_model(model) for model in accelerator._models]
            optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
            _watch("Accelerator.save_state", folder, _check_models(models, optimizers))

    def after_save_model(accelerator: Any, model: Any, save_directory: Any, *_: Any, **__: Any) -> None:
        if accelerator.is_main_process and accelerator.num_processes == 1:
            _watch("Accelerator.save_model", save_directory, _check_models([accelerator.unwrap_model(model)], []))

    _wrap(module.Accelerator, "save_state", after_save_state)  # type: ignore[attr-defined]
    _wrap(module.Accelerator, "save_model", after_save_model)  # type: ignore[attr-defined]


def _check_models(models: list[Any], optimizers: list[Any]) -> Callable[[Any, dict[str, Any]], None]:
    def check(view: Any, record: dict[str, Any]) -> None:
        import torch

        from . import compare

        if len(models) != 1:
            raise compare.Untold(f"{len(models)} models share the names")
        (model,) = models
        state = model.state_dict()
        weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        compare.same_weights(view, weights, record)
        for optimizer in optimizers if len(optimizers) == 1 else []:
            compare.same_optimizer(view, model, optimizer, record)

    return check


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch.serialization": _torch,
    "torch.distributed.checkpoint.state_dict_saver": _dcp,
    "safetensors.torch": _safetensors,
    "safetensors.numpy": _safetensors,
    "lightning.fabric.utilities.cloud_io": _atomic_save,
    "lightning_fabric.utilities.cloud_io": _atomic_save,
    "lightning.pytorch.trainer.trainer": _lightning_trainer,
    "pytorch_lightning.trainer.trainer": _lightning_trainer,
    "accelerate.accelerator": _accelerate,
}
