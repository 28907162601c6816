"""Faults of torch.distributed.checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from .fault import (
    FAILS,
    Fault,
    copy,
    cut,
    edit_item,
    edit_metadata,
    flip,
    items,
    remove,
    rename,
    swap,
)

_FSDP, _ZSTD, _HUB = "dcp/fsdp2_uneven/ckpt", "dcp/zstd/ckpt", "dcp/hub_ranks/ckpt"
_KEY = "model.emb.weight"


def _chunks(about: Any, key: str = _KEY) -> Any:
    return about.state_dict_metadata[key].chunks


def _twice(about: Any) -> None:
    _chunks(about).append(_chunks(about)[0])


def _overlap(about: Any) -> None:
    first = _chunks(about)[0]
    _chunks(about).append(ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([1, first.sizes[1]])))
    index, info = next(i for i in about.storage_data.items() if i[0].fqn == _KEY and i[0].offset == first.offsets)
    about.storage_data[replace(index, offset=torch.Size([1, 0]), index=None)] = info


def _missing(about: Any) -> None:
    lost = _chunks(about).pop(1)
    for index in list(about.storage_data):
        if index.fqn == _KEY and index.offset == lost.offsets:
            del about.storage_data[index]


def _nowhere(about: Any) -> None:
    for index in list(about.storage_data):
        if index.fqn == _KEY and index.offset == _chunks(about)[1].offsets:
            del about.storage_data[index]


def _shape(about: Any) -> None:
    about.state_dict_metadata[_KEY].size = torch.Size([20, 5])


def _beyond(about: Any) -> None:
    about.state_dict_metadata[_KEY].size = torch.Size([9, 5])


def _shifted(about: Any) -> None:
    for index, info in list(about.storage_data.items()):
        if index.fqn == _KEY and not any(index.offset):
            about.storage_data[index] = replace(info, offset=info.offset + 64)


def _object(path: Path) -> int:
    """A byte of a pickled object, which is an archive of torch.save as tensors are."""
    info = next(i for index, i in items(path.parent) if "param_groups" in index.fqn and i.relative_path == path.name)
    data = path.read_bytes()[info.offset : info.offset + info.length]
    return info.offset + data.index(b"data.pkl") + data[data.index(b"data.pkl") :].index(b"\x80") + 4


def _in_storage(path: Path) -> int:
    """The elements of a chunk."""
    info = next(i for index, i in items(path.parent) if index.fqn == _KEY and i.relative_path == path.name)
    data = path.read_bytes()
    tensor = torch.load(__import__("io").BytesIO(data[info.offset : info.offset + info.length]))
    return data.index(tensor.numpy().tobytes(), info.offset) + 9


def _row(t: torch.Tensor) -> None:
    t[0] = float("nan")


DCP = (
    Fault("a file of a rank is missing", "DCP", _FSDP, remove("__1_0.distcp"), "quick", "missing-file", file="__1_0"),
    Fault("a file of a rank is cut off", "DCP", _FSDP, cut("__1_0.distcp"), "quick", "unreadable-file",
          file="__1_0"),
    Fault("a file of a rank is empty", "DCP", _FSDP, cut("__1_0.distcp", 0), "quick", "unreadable-file",
          file="__1_0"),
    Fault("the files of two ranks are swapped", "DCP", _FSDP, swap("__0_0.distcp", "__1_0.distcp"), "quick",
          "unreadable-file"),
    Fault("`.metadata` is missing", "DCP", _FSDP, remove(".metadata"), FAILS),
    Fault("`.metadata` is missing, `.metadata.tmp` is there", "DCP", _FSDP, rename(".metadata", ".metadata.tmp"),
          FAILS),
    Fault("`.metadata.tmp` of a later save lies beside", "DCP", _FSDP, copy(".metadata", ".metadata.tmp"), "quick",
          "unfinished-save", file=".metadata.tmp"),
    Fault("`.metadata` is cut off", "DCP", _FSDP, cut(".metadata"), FAILS),
    Fault("the file of a rank that the save did not have lies beside", "DCP", _FSDP,
          copy("__0_0.distcp", "__7_0.distcp"), "quick", "left-over-file", file="__7_0"),
    Fault("a chunk is listed twice", "DCP", _FSDP, edit_metadata(_twice), "quick", "inconsistent-metadata",
          text=_KEY),
    Fault("two chunks overlap", "DCP", _FSDP, edit_metadata(_overlap), "quick", "inconsistent-metadata", text=_KEY),
    Fault("no chunk holds some rows", "DCP", _FSDP, edit_metadata(_missing), "quick", "missing-elements",
          text=_KEY),
    Fault("a chunk is in no file", "DCP", _FSDP, edit_metadata(_nowhere), "quick", "inconsistent-metadata",
          text=_KEY),
    Fault("a tensor is larger than its chunks", "DCP", _FSDP, edit_metadata(_shape), "quick", "missing-elements",
          text=_KEY),
    Fault("a chunk lies outside its tensor", "DCP", _FSDP, edit_metadata(_beyond), FAILS),
    Fault("an item begins at another byte than its archive", "DCP", _FSDP, edit_metadata(_shifted), "default",
          "overlapping-data", file="__0_0"),
    Fault("a flipped bit in a tensor", "DCP", _FSDP, flip("__1_0.distcp", _in_storage), "default",
          "wrong-checksum", file="__1_0"),
    Fault("a flipped bit in a pickled object", "DCP", _FSDP, flip("__1_0.distcp", _object), "quick",
          "unreadable-object", file="__1_0", text="checksum"),
    Fault("a flipped bit in a compressed item", "DCP (zstd)", _ZSTD, flip("*.distcp", lambda p: p.stat().st_size // 2),
          "default", "wrong-checksum", file="__0_0"),
    Fault("NaN in the rows of one rank", "DCP", _FSDP, edit_item(_KEY, _row, 1), "default", "not-a-number",
          file="__[012]_0", tensor="emb.weight", text="row"),
    Fault("a file of a rank is missing", "DCP (safetensors)", _HUB, remove("shard-00002-*"), "quick", "missing-file",
          text="shard-00002"),
    Fault("a file of a rank is cut off", "DCP (safetensors)", _HUB, cut("shard-00002-*"), "quick", "unreadable-file",
          file="shard-00002"),
)  # fmt: skip
