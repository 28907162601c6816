"""Tar files as torch.save wrote in the first versions of torch 0.1 (torch/serialization.py `save` there).

Today's torch only reads them (`torch.load` with ``weights_only=False``), which is how the tests check this writer.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import torch

_CLASSES = {
    torch.float32: ("FloatTensor", "FloatStorage"),
    torch.float64: ("DoubleTensor", "DoubleStorage"),
    torch.float16: ("HalfTensor", "HalfStorage"),
    torch.int64: ("LongTensor", "LongStorage"),
    torch.int32: ("IntTensor", "IntStorage"),
    torch.uint8: ("ByteTensor", "ByteStorage"),
}


class _Pickler(pickle.Pickler):
    """A pickler that leaves tensors and storages out, under their keys."""

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}  # by id: key and tensor
        self.storages: dict[int, tuple[int, torch.UntypedStorage, torch.dtype]] = {}  # by address: key and storage

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            key, _ = self.tensors.setdefault(id(value), (94_000_000_000_000 + 64 * len(self.tensors), value))
            return str(key)
        return None

    def storage_of(self, tensor: torch.Tensor) -> int:
        held = tensor.untyped_storage()
        key = 95_000_000_000_000 + 64 * len(self.storages)
        return self.storages.setdefault(held.data_ptr(), (key, held, tensor.dtype))[0]


def write_tar(path: Path, tree: Any, protocol: int = 2, parts: tuple[torch.Tensor, ...] = ()) -> Path:
    """Write a tree of tensors. Storages of tensors in ``parts`` are saved as views of their whole storages."""
    objects, tensors, storages, info = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    sizes = {"short": 2, "int": 4, "long": 8}
    pickle.dump({"protocol_version": 1000, "little_endian": True, "type_sizes": sizes}, info, protocol)
    pickler = _Pickler(objects, protocol)
    pickler.dump(tree)
    views = []
    pickle.dump(len(pickler.tensors), tensors, protocol)
    for key, tensor in pickler.tensors.values():
        root, offset = pickler.storage_of(tensor), tensor.storage_offset()
        kind = getattr(torch, _CLASSES[tensor.dtype][0])
        if any(tensor is part for part in parts):
            views.append((key + 1, root, offset, tensor.numel()))
            root, offset = key + 1, 0
        pickle.dump((key, root, kind), tensors, protocol)
        tensors.write(struct.pack("<q", tensor.ndim))
        tensors.write(struct.pack(f"<{2 * tensor.ndim + 1}q", *tensor.shape, *tensor.stride(), offset))
    pickle.dump(len(pickler.storages), storages, protocol)
    for key, held, dtype in pickler.storages.values():
        pickle.dump((key, "cpu", getattr(torch, _CLASSES[dtype][1])), storages, protocol)
        storages.write(struct.pack("<q", held.nbytes() // dtype.itemsize) + bytes(held.tolist()))
    pickle.dump(views, storages, protocol)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, held in (("sys_info", info), ("pickle", objects), ("tensors", tensors), ("storages", storages)):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(held.getvalue()), 1_480_000_000
            archive.addfile(member, io.BytesIO(held.getvalue()))
    return path
