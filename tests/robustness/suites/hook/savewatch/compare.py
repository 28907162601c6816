"""Open what was saved with lazyckpt, and compare every tensor with what was in memory."""

from __future__ import annotations

import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import report
from .truth import Truth

_KEPT = 16 << 20  # bytes; a larger checkpoint is not kept as evidence


class Wrong(Exception):
    """What lazyckpt read is not what was saved."""


class Untold(Exception):
    """What was saved cannot be told from memory."""


def watch(saver: str, path: str, check: Callable[[Any, dict[str, Any]], None]) -> None:
    """Open ``path``, run ``check`` on the view and record the outcome. Raises nothing.

    Parameters
    ----------
    saver : the function that saved.
    path : what it wrote.
    check : compares; it takes the view and the record, to which it may add. Raises Wrong or Untold.
    """
    record: dict[str, Any] = {"saver": saver, "path": path, "outcome": report.EQUAL}
    try:
        with warnings.catch_warnings(), torch.no_grad(), _disable_current_modes():
            warnings.simplefilter("ignore")
            _checked(path, check, record)
        if record["outcome"] in report.FAILURES:
            record["kept"] = _keep(path)
    except Exception:
        record.update(outcome=report.SKIPPED, what="the harness failed", error=traceback.format_exc())
    report.write(record)


def _checked(path: str, check: Callable[[Any, dict[str, Any]], None], record: dict[str, Any]) -> None:
    import lazyckpt

    try:
        view = lazyckpt.open(path, cache=False)
        record.update(format=view.format, problems=list(view.problems))
        check(view, record)
    except Wrong as error:
        record.update(outcome=report.MISMATCH, what=str(error))
    except Untold as error:
        record.update(outcome=report.SKIPPED, what=str(error))
    except Exception as error:
        if not os.path.exists(path):
            outcome = report.GONE
        elif isinstance(error, lazyckpt.FormatError):
            outcome = report.REFUSED
        else:
            outcome = report.ERROR if isinstance(error, lazyckpt.LazyckptError) else report.CRASH
        record.update(outcome=outcome, what=f"{type(error).__name__}: {error}", error=traceback.format_exc())


def _keep(path: str) -> str | None:
    """Copy a checkpoint that was read wrongly beside the report."""
    source = Path(path)
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    if sum(file.stat().st_size for file in files) > _KEPT:
        return None
    folder = Path(os.environ["SAVEWATCH_REPORT"] + ".kept")
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    target = folder / f"{number}-{os.getpid()}" / source.name
    target.parent.mkdir()
    copy: Callable[..., Any] = shutil.copy if source.is_file() else shutil.copytree
    copy(source, target)
    return str(target)


# -- one tensor


def bits(tensor: Tensor) -> bytes:
    """The elements of a tensor, row by row."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def same(name: str, read: Tensor, true: Tensor) -> None:
    """Raises Wrong unless dtype, shape and every bit are the same."""
    if read.dtype != true.dtype or read.shape != true.shape:
        raise Wrong(f"{name!r}: read as {kind(read)}, saved as {kind(true)}")
    if bits(read) != bits(true):
        raise Wrong(f"{name!r}: {kind(true)} has other elements: {read.flatten()[:4]}, saved {true.flatten()[:4]}")


def same_lazy(name: str, lazy: Any, true: Tensor) -> int:
    """Compare a lazy tensor as a whole and a slice of it. Returns bytes compared."""
    if lazy.dtype != true.dtype or lazy.shape != true.shape:
        raise Wrong(f"{name!r}: listed as {lazy.dtype}{list(lazy.shape)}, saved as {kind(true)}")
    if true.is_meta:
        return 0
    same(name, lazy[...], true)
    if true.ndim and true.shape[0] > 1:
        half = true.shape[0] // 2
        same(f"{name}[{half}:]", lazy[half:], true.detach().resolve_conj().resolve_neg()[half:])
    return true.numel() * true.element_size()


# -- whole files


def same_file(view: Any, truth: Truth, record: dict[str, Any]) -> None:
    """Every tensor of memory is in the file, under its name where the format fixes one; and nothing else is."""
    stored = view.stored
    listed = set(stored)
    nbytes = 0
    for name, true in truth.named.items():
        if name not in listed:
            raise Wrong(f"{name!r} is not listed; {_some(listed)} are")
        nbytes += same_lazy(name, stored[name], true)
    rest = [stored[name] for name in stored if name not in truth.named]
    found = {(str(t.dtype), tuple(t.shape), bits(t[...])) for t in rest if t.fragments}
    for true in truth.others:
        if not true.is_meta and (str(true.dtype), tuple(true.shape), bits(true)) not in found:
            raise Wrong(f"a tensor {kind(true)} inside another object is not listed; {_some(listed)} are")
    record.update(tensors=len(truth.named) + len(truth.others), bytes=nbytes)
    if not truth.others:
        if len(rest):
            raise Wrong(f"{_some(t.name for t in rest)} are listed, and were not saved")
        same_states(view, truth.named.values())


def same_states(view: Any, true: Iterable[Tensor]) -> None:
    """Whatever a state of the view calls a tensor, its elements are some tensor's that was saved."""
    known = {(str(t.dtype), tuple(t.shape), bits(t)) for t in true if not t.is_meta}
    for state, part in view.states.items():
        for name, lazy in part.items():
            if lazy.fragments and (str(lazy.dtype), tuple(lazy.shape), bits(lazy[...])) not in known:
                raise Wrong(f"{name!r} of state {state!r} is no tensor that was saved")


def same_weights(view: Any, weights: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """The model's parameters and buffers have the model's names; of tied ones a writer may keep a single name."""
    kept = {true.data_ptr() for name, true in weights.items() if name in view}
    for name, true in weights.items():
        if name not in view:
            if true.data_ptr() in kept:
                continue
            raise Wrong(f"the model's {name!r} is not listed; {_some(view)} are")
        same_lazy(name, view[name], true)
    record["tensors"] = record.get("tensors", 0) + len(weights)


def same_optimizer(view: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Where a state of an optimizer has a parameter's name, it is that parameter's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        name = names.get(parameter)
        for key, true in state.items():
            if name is None or not isinstance(true, Tensor) or true.shape != parameter.shape:
                continue
            listed = view.states.get(key)
            if listed is None or name not in set(listed):
                record["unnamed"] = record.get("unnamed", 0) + 1
                continue
            same_lazy(f"{key} of {name}", listed[name], true)
            record["named"] = record.get("named", 0) + 1


def _some(names: Iterable[str]) -> str:
    some = sorted(names)
    return f"{some[:8]}" + (f" and {len(some) - 8} more" if len(some) > 8 else "")
