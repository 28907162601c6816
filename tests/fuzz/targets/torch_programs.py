"""Programs of torch with weights, tars of torch 0.1, pickles of arrays. torch and pickle agree on what they read."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from lazyckpt import LazyckptError
from lazyckpt.io.containers.pickle.skim import skim
from lazyckpt.io.storage.streams import StoreFile

from ...writers.torch_programs import CASES
from ...writers.torch_tar import write_tar
from ..contract import DifferenceError, Target
from .sources import golden, memory, opened, scratch, write

_CONFIG = "data/weights/model_weights_config.json"


def _file(case: str) -> Path:
    (path,) = golden("torch_programs", case).iterdir()
    return path


def _programs(script: bool) -> list[bytes]:
    cases = [name for name in CASES if (name.startswith("script") or name == "trace") == script]
    return [_file(name).read_bytes() for name in cases]


def _opening(name: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        opened(write(name, data))

    return run


def _configs() -> list[bytes]:
    with zipfile.ZipFile(_file("export")) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(_CONFIG)]


def config(data: bytes) -> None:
    """Open an archive with another description of its weights."""
    with zipfile.ZipFile(_file("export")) as archive, zipfile.ZipFile(scratch() / "x.pt2", "w") as other:
        for name in archive.namelist():
            other.writestr(name, data if name.endswith(_CONFIG) else archive.read(name))
    opened(scratch() / "x.pt2")


def _codes() -> list[bytes]:
    """The code of a class, whose declaration lists the weights."""
    with zipfile.ZipFile(_file("script")) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(".py")]


def code(data: bytes) -> None:
    """Open a file of TorchScript with another text for each of its classes."""
    with zipfile.ZipFile(_file("script")) as archive, zipfile.ZipFile(scratch() / "script.pt", "w") as other:
        for name in archive.namelist():
            other.writestr(name, data if name.endswith(".py") else archive.read(name))
    opened(scratch() / "script.pt")


def _tars() -> list[bytes]:
    whole = torch.arange(24.0).reshape(4, 6)
    part = torch.arange(20, dtype=torch.int64)[5:9]
    tree = {"a": whole, "b": whole[2], "c": whole.t(), "d": [part, 3]}
    return [write_tar(scratch() / "seed.tar", tree, protocol, (part,)).read_bytes() for protocol in (0, 2)]


def _pickles() -> list[bytes]:
    random = np.random.default_rng(0)
    tree = {
        "a": random.random((3, 5)).astype("f4"),
        "b": np.asfortranarray(random.integers(0, 9, (4, 2)).astype(">i8")),
        "c": random.random((20, 3, 20)).transpose(1, 0, 2),
        "d": np.array(2.5),
        "e": "text",
    }
    return [pickle.dumps(tree, protocol) for protocol in range(2, 6)]


class _Dtype:
    """What a pickle says of a dtype."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code, self.order = code, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Array:
    """What a pickle says of an array: numpy itself crashes on some."""

    def __init__(self, *_: Any) -> None:
        self.axes: Any = None

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, fortran, self.raw = state
        self.order = "F" if fortran else "C"

    def real(self) -> np.ndarray[Any, Any]:
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
        if not isinstance(raw, bytes | bytearray):
            raise TypeError(type(raw))
        dtype = np.dtype(self.dtype.code).newbyteorder(self.dtype.order if self.dtype.order in "<>" else "=")
        if not all(type(n) is int and n >= 0 for n in self.shape):
            raise ValueError(self.shape)
        array = np.frombuffer(raw, dtype).reshape(self.shape, order="F" if self.order == "F" else "C")
        return array if self.axes is None else array.transpose(self.axes)


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> _Array:
    found = _Array()
    found.__setstate__((1, shape, dtype, order == "F", raw))
    found.axes = axes if order == "K" else None
    return found


class _Arrays(pickle.Unpickler):
    """An unpickler of arrays, which imports nothing."""

    _NAMES: ClassVar[dict[str, Any]] = {
        "_reconstruct": _Array,
        "ndarray": _Array,
        "dtype": _Dtype,
        "_frombuffer": _frombuffer,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return lambda text, _: text.encode("latin1")
        if name not in self._NAMES or not module.startswith("numpy"):
            raise pickle.UnpicklingError(name)
        return self._NAMES[name]


def arrays(data: bytes) -> None:
    """Open a pickle, and compare its arrays with those that pickle finds."""
    found = opened(write("arrays.pkl", data))
    try:
        theirs = _Arrays(io.BytesIO(data)).load()
    except Exception:  # whatever pickle refuses
        return
    for name, held in theirs.items() if isinstance(theirs, dict) else ():
        ours = found.get(name) if isinstance(name, str) else None
        if ours is None or not isinstance(held, _Array):
            continue
        try:
            array = held.real()
        except Exception:  # whatever numpy refuses
            continue
        wanted = array.astype(array.dtype.newbyteorder("="), order="C")
        if ours.contiguous().numpy().tobytes() != wanted.tobytes() or tuple(ours.shape) != wanted.shape:
            raise DifferenceError(f"{name!r} differs from what pickle reads")


def skimming(data: bytes) -> None:
    """Leave out the byte strings of a pickle: it ends where pickle says, and each byte string is in the file."""
    try:
        found = skim(StoreFile(memory(data, "a.pkl"), "a.pkl"))
    except LazyckptError:
        return
    if found.end > len(data) or data[found.end - 1 : found.end] != b".":
        raise DifferenceError(f"it ends at byte {found.end:,}")
    for one in found.distant:
        if one.state["offset"] + one.state["nbytes"] >= found.end:
            raise DifferenceError(f"a byte string at {one.state}")


def _large() -> list[bytes]:
    return [pickle.dumps({"a": bytes(5000), "b": bytearray(9000), "c": json.dumps("x" * 900)}, n) for n in range(3, 6)]


TARGETS = (
    Target("torchscript.zip", _opening("model.pt"), lambda: _programs(script=True), "zip"),
    Target("torchscript.code", code, _codes, "bytes"),
    Target("torch_export.zip", _opening("model.pt2"), lambda: _programs(script=False), "zip"),
    Target("torch_export.config", config, _configs, "json"),
    Target("torch.tar", _opening("model.pth"), _tars),
    Target("pickle.arrays", arrays, _pickles, "pickle"),
    Target("pickle.skim", skimming, _large, "pickle"),
)
