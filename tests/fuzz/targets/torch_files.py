"""Files of torch.save, zip and legacy: what torch.load(weights_only=True) reads of a file that is accepted is equal."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lazyckpt
from lazyckpt.errors import LazyckptError
from lazyckpt.io.containers.pickle.plain import Plain
from lazyckpt.io.containers.torch_file import read_torch_file
from lazyckpt.io.containers.zip import read_zip
from lazyckpt.io.containers.zip_columns import read_columns
from lazyckpt.io.containers.zip_offsets import data_offset
from lazyckpt.io.storage.streams import StoreFile

from ... import test_datastates
from ...hostility import write_real
from ..contract import DifferenceError, Target
from .sources import equal, look, memory, write


def _real(*kinds: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [write_real(Path(folder), kind).read_bytes() for kind in kinds]


def legacy() -> list[bytes]:
    """A file whose storages are called 10000000000000 and so on, where torch writes their addresses."""
    addresses: dict[int, int] = {}

    def number(storage: torch.UntypedStorage) -> int:
        address = torch._C.StorageBase._cdata.__get__(storage)
        return addresses.setdefault(address, 10**13 + len(addresses))

    with mock.patch.object(torch.UntypedStorage, "_cdata", property(number), create=True):
        return _real("legacy")


def archives() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "more.pt")
        torch.save({"w": torch.nn.Parameter(torch.ones(2, 3)), "s": torch.eye(3).to_sparse()}, path)
        more = [path.read_bytes()]
        torch.save(torch.arange(3), path)
        more.append(path.read_bytes())
        torch.save({str(n): torch.full((2,), n) for n in range(40)}, path)  # the same pattern many times
        more.append(path.read_bytes())
    return [*_real("zip", "zip without checksums"), *more]


def file(data: bytes) -> None:
    """Open a file, and compare its tensors with torch's."""
    path = write("model.pt", data)
    with lazyckpt.open(path, cache=False) as view:
        found = look(view)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever torch refuses
        return
    parsed = read_torch_file(memory(data, "model.pt"), "model.pt")
    plain = Plain(parsed.root, "model.pt", len(data))
    for name, place in plain.paths.items():
        value = _at(theirs, place)
        ours = found.get(name)
        if isinstance(value, torch.Tensor) and ours is not None and value.layout is torch.strided:
            if value.is_quantized:
                value = value.int_repr()
            if value.device.type != "meta" and not equal(ours, value):
                raise DifferenceError(f"{name!r}: {ours!r:.300} and, by torch, {value!r:.300}")


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        if isinstance(value, dict):
            keys = [key for key in value if str(key) == str(part)]
            if len(keys) != 1:
                return None
            value = value[keys[0]]
        elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def zip_columns(data: bytes) -> None:
    """Read the directory of a zip record by record and as columns: both find the same."""
    one, several = StoreFile(memory(data, "a.zip"), "a.zip"), StoreFile(memory(data, "a.zip"), "a.zip")
    start, entries = read_zip(one)
    columns = read_columns(several)
    if columns.start != start or len(columns.records.names) != len(entries):
        raise DifferenceError(f"{len(entries)} records at {start:,}, as columns {len(columns.records.names)}")
    for n, entry in enumerate(entries):
        other = columns.records.entry(n)
        if (entry.name, entry.nbytes, entry.stored, entry.crc) != (other.name, other.nbytes, other.stored, other.crc):
            raise DifferenceError(f"{entry} and, as columns, {other}")
        data_offset(one, entry)


def sparse_files() -> list[bytes]:
    found = []
    eye = torch.eye(4) * torch.arange(4.0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twice = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0], [2, 2, 3]]), torch.ones(3), (6, 4))
        blocks = eye.to_sparse_bsr((2, 2))
        nested = [torch.nested.nested_tensor([eye[:1], eye[1:]], layout=kind) for kind in (torch.strided, torch.jagged)]
        for tree in (
            {"coo": eye.to_sparse(), "twice": twice},
            {"csr": eye.to_sparse_csr(), "csc": eye.to_sparse_csc(), "bsr": blocks, "bsc": eye.to_sparse_bsc((2, 2))},
            {"nested": nested[0], "jagged": nested[1]},
        ):
            torch.save(tree, Path(folder, "sparse.pt"))
            found.append(Path(folder, "sparse.pt").read_bytes())
    return found


def sparse(data: bytes) -> None:
    """Open a file with sparse and nested tensors, and compare the dense ones with torch's."""
    path = write("sparse.pt", data)
    ours: dict[str, torch.Tensor] = {}
    with lazyckpt.open(path, cache=False) as view:
        look(view)
        for name, tensor in view.items():
            with contextlib.suppress(LazyckptError):
                if tensor.nbytes < 1 << 20:
                    ours[name] = tensor[...]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever torch refuses
        return
    for name, value in theirs.items() if isinstance(theirs, dict) else ():
        if not isinstance(value, torch.Tensor) or value.layout not in _SPARSE or str(name) not in ours:
            continue
        try:
            dense = value.to_dense()
        except (IndexError, RuntimeError):  # indices of a tensor without elements
            continue
        if not equal(ours[str(name)], dense):
            raise DifferenceError(f"{name!r}: {ours[str(name)]!r:.300} and, by torch, {dense!r:.300}")


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def datastates_files() -> list[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for aligned in (False, True):
            test_datastates.write(test_datastates.STATE, Path(folder, "model.pt"), aligned)
            found.append(Path(folder, "model.pt").read_bytes())
    return found


def datastates(data: bytes) -> None:
    path = write("datastates.pt", data)
    lazyckpt.scan(path)
    with lazyckpt.open(path, cache=False) as view:
        look(view)


TARGETS = (
    Target("torch.zip", file, archives, "zip"),
    Target("torch.legacy", file, legacy, "pickle"),
    Target("torch.directory", zip_columns, archives, "zip"),
    Target("torch.sparse", sparse, sparse_files, "zip"),
    Target("torch.datastates", datastates, datastates_files, "safetensors"),
)
