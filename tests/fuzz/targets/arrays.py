"""Files of arrays: numpy's, HDF5 and Keras, Flax's msgpack, tables of TensorFlow. numpy agrees where it reads them."""

from __future__ import annotations

import functools
import io
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

import lazyckpt
from lazyckpt.formats.keras_h5 import names_of
from lazyckpt.io.containers.leveldb import FOOTER, MAGIC, masked

from ..contract import DifferenceError, Target
from .sources import golden, opened, replacing, scratch, write


def _opening(name: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        opened(write(name, data))

    return run


# -- numpy


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        "a": random.standard_normal((3, 5)).astype("<f4"),
        "b": np.asfortranarray(random.integers(0, 9, (4, 2)).astype(">i8")),
        "c": np.array(2.5),
        "d": np.zeros((0, 3), "u1"),
    }


def npz_seeds() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        held = io.BytesIO()
        save(held, **_arrays())
        found.append(held.getvalue())
    return found


def npy_seeds() -> list[bytes]:
    found = []
    for array in _arrays().values():
        held = io.BytesIO()
        np.save(held, array)
        found.append(held.getvalue())
    return found


def npy(data: bytes) -> None:
    """Open a file, and compare the array with what numpy reads."""
    found = opened(write("array.npy", data))
    try:
        theirs = np.load(io.BytesIO(data), allow_pickle=False)
        theirs = theirs.astype(theirs.dtype.newbyteorder("="), order="C")
    except Exception:  # whatever numpy refuses
        return
    for ours in found.values():
        if ours.numpy().tobytes() != theirs.tobytes() or ours.shape != theirs.shape:
            raise DifferenceError("the array differs from what numpy reads")


def npz(data: bytes) -> None:
    """Open a file, and compare its arrays with those that numpy reads."""
    found = opened(write("arrays.npz", data))
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            theirs = {name: held[name] for name in held.files}
    except Exception:  # whatever numpy refuses
        return
    for name, array in theirs.items():
        if name in found and array.dtype.kind in "biufc":
            wanted = array.astype(array.dtype.newbyteorder("="), order="C")
            if found[name].numpy().tobytes() != wanted.tobytes():
                raise DifferenceError(f"{name!r} differs from what numpy reads")


# -- TensorFlow: an index, and its entries in a table whose checksums are right


def _framed(block: bytes) -> bytes:
    """A block with its compression, none, and its checksum."""
    return block + b"\0" + masked(google_crc32c.value(block + b"\0")).to_bytes(4, "little")


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def _table(block: bytes) -> bytes:
    """A table with one block of entries."""
    data = _framed(block)
    handle = _varint(0) + _varint(len(block))
    entry = bytes([0, 1, len(handle)]) + b"~" + handle
    index = entry + bytes(4) + (1).to_bytes(4, "little")
    empty = bytes(4) + (1).to_bytes(4, "little")
    at = len(data)
    footer = _varint(at) + _varint(len(empty)) + _varint(at + len(empty) + 5) + _varint(len(index))
    return data + _framed(empty) + _framed(index) + footer.ljust(FOOTER - 8, b"\0") + MAGIC


def _blocks() -> list[bytes]:
    """The blocks of entries of the recorded tables: from the first byte to the restarts, which end at a checksum."""
    found = []
    for name in ("ckpt-1.index", "model.ckpt-2.index"):
        data = (golden("tensorflow", "files") / name).read_bytes()
        for size in range(8, len(data) - FOOTER):
            block = data[:size]
            if data[size : size + 5] == _framed(block)[size:]:
                found.append(block)
                break
    return found


@functools.cache
def _bundle() -> Path:
    to = Path(tempfile.mkdtemp(dir=scratch()))
    shutil.copy(golden("tensorflow", "files") / "ckpt-1.data-00000-of-00001", to)
    return to


def _with_index(data: bytes) -> None:
    (_bundle() / "ckpt-1.index").write_bytes(data)
    opened(_bundle())


def entries(data: bytes) -> None:
    _with_index(_table(data))


# -- Keras: what is not parsed by HDF5's library, and so is tried faster by itself


def _archive() -> dict[str, bytes]:
    with zipfile.ZipFile(golden("keras", "files") / "model.keras") as held:
        return {name: held.read(name) for name in held.namelist()}


def keras_configs() -> list[bytes]:
    return [_archive()["config.json"]]


def keras_config(data: bytes) -> None:
    with zipfile.ZipFile(scratch() / "model.keras", "w") as held:
        for name, content in (_archive() | {"config.json": data}).items():
            held.writestr(name, content)
    opened(scratch() / "model.keras")


def keras_paths() -> list[bytes]:
    with lazyckpt.open(golden("keras", "files") / "old.h5") as view:
        names = [name.replace(".", "/") for name in view.stored]
    return ["\n".join(names).encode(), b"model_weights/a/a/b:0\noptimizer_weights/Adam/m/a/b:0"]


def keras_names(data: bytes) -> None:
    """Name paths: each weight and each slot is one that is there."""
    paths = list(dict.fromkeys(data.decode("utf-8", "replace").split("\n")))
    found = names_of(paths, dict.fromkeys(paths, True))
    slots = list(found.slots.values())
    if not {*found.weights, *found.slots, *found.unknown} <= set(paths) or len(set(slots)) < len(slots):
        raise DifferenceError("a name is of no path, or two slots are one")
    if not {name for _, name in slots} <= set(found.weights.values()):
        raise DifferenceError("a slot is of no weight")


# -- folders of frameworks


def _replaced(group: str, case: str, pattern: str, grammar: str, name: str) -> Target:
    """A target that changes the first file of a recorded checkpoint that a pattern finds."""

    @functools.cache
    def file() -> Path:
        folder = golden(group, case)
        return sorted(folder.rglob(pattern))[0].relative_to(folder)

    def run(data: bytes) -> None:
        _replacing(group, case, file().as_posix())(data)

    return Target(name, run, lambda: [(golden(group, case) / file()).read_bytes()], grammar)


@functools.cache
def _replacing(group: str, case: str, file: str) -> Callable[[bytes], None]:
    return replacing(lambda: golden(group, case), file)


def _files(group: str, *names: str) -> Callable[[], list[bytes]]:
    return lambda: [(golden(group, "files") / name).read_bytes() for name in names]


TARGETS = (
    Target("arrays.npy", npy, npy_seeds, "bytes"),
    Target("arrays.npz", npz, npz_seeds, "zip"),
    Target(
        "arrays.hdf5", _opening("model.weights.h5"), _files("keras", "model.weights.h5", "half.weights.h5", "old.h5")
    ),
    Target("arrays.keras", _opening("model.keras"), _files("keras", "model.keras"), "zip"),
    Target("keras.config", keras_config, keras_configs, "json"),
    Target("keras.names", keras_names, keras_paths, "lines"),
    Target(
        "arrays.flax",
        _opening("state.msgpack"),
        _files("flax", "params.msgpack", "pieces.msgpack", "state.msgpack"),
    ),
    Target("tensorflow.index", _with_index, _files("tensorflow", "ckpt-1.index", "model.ckpt-2.index")),
    Target("tensorflow.entries", entries, _blocks),
    _replaced("frameworks", "nanotron_tp2_zero", "*.safetensors", "safetensors", "nanotron.shard"),
    _replaced("frameworks", "nanotron_tp2_zero", "checkpoint_metadata.json", "json", "nanotron.metadata"),
    _replaced("frameworks", "nanotron_tp2_zero", "optimizer_config.json", "json", "nanotron.optimizer"),
    _replaced("frameworks", "snapshot_sharded", ".snapshot_metadata", "json", "torchsnapshot.metadata"),
    _replaced("frameworks", "snapshot_batched_chunks", ".snapshot_metadata", "json", "torchsnapshot.chunks"),
    _replaced("megatron_fsdp", "dp2", ".metadata", "pickle", "megatron_fsdp.metadata"),
)
