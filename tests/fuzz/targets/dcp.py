"""Checkpoints of torch.distributed.checkpoint: `.metadata`, its columns, and the items in `.distcp` files."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

from lazyckpt import LazyckptError
from lazyckpt.formats.dcp import metadata as reading

from ...test_dcp_columns import saved
from ..contract import DifferenceError, Target
from .sources import golden, memory, replacing


def _file(case: str, name: str) -> bytes:
    return (golden("dcp", case) / name).read_bytes()


def _outcome(data: bytes, columns: bool) -> Any:
    try:
        with mock.patch.object(reading, "_LARGE", 0):
            found = reading._read(memory(data, ".metadata"), ".metadata", columns)
    except LazyckptError as e:
        return str(e)
    tensors = {key: (t.dtype, t.shape, list(t.chunks), t.repeated) for key, t in found.tensors.items()}
    items = {index: found.items[index] for index in found.items}
    return tensors, items, found.others, found.paths, found.files, found.globals, found.reshaped


def columns(data: bytes) -> None:
    """Read `.metadata` as columns and with the machine alone."""
    ours, plain = _outcome(data, True), _outcome(data, False)
    if ours != plain:
        raise DifferenceError(f"as columns {ours!r:.400}, by the machine {plain!r:.400}")


def _columns_seeds() -> list[bytes]:
    import random

    rng = random.Random(1)
    return [pickle.dumps(saved(rng, 3, 6, odd), protocol) for odd in (False, True) for protocol in (2, 4, 5)]


def _replaced(name: str, case: str, file: str, grammar: str, *more: str) -> Target:
    """A target that replaces a file of a case; its seeds are that file, and that of other cases."""
    seeds = [(case, file), *((other, file) for other in more)]
    return Target(name, replacing(lambda: golden("dcp", case), file), lambda: [_file(*seed) for seed in seeds], grammar)


TARGETS = (
    _replaced("dcp.metadata", "fsdp2", ".metadata", "pickle", "odd", "numbered", "zstd", "as_safetensors"),
    _replaced("dcp.metadata-safetensors", "as_safetensors", ".metadata", "pickle"),
    Target("dcp.columns", columns, _columns_seeds, "pickle"),
    _replaced("dcp.items", "numbered", "__0_0.distcp", "bytes"),
    _replaced("dcp.packed", "unknown_codec", "__0_0.distcp", "bytes"),
    _replaced("dcp.hub", "hub_ranks", "shard-00002-model-00001-of-00001.safetensors", "safetensors"),
)
