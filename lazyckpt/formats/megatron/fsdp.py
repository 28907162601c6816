"""Runs whose iterations are folders of torch.distributed.checkpoint: those of Megatron-FSDP (``--ckpt-format
fsdp_dtensor``) and of PyTorch's FSDP2 under Megatron-LM (``torch_dcp``).

Writer: Megatron-LM megatron/training/checkpointing.py `save_checkpoint`: ``iter_0000003/.metadata`` and
``__RANK_0.distcp``, and the tracker beside the iterations. The folder of an iteration itself is recognised by the
reader of DCP folders (dcp/reader.py).
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from ...core.index import Index
from ..dcp.reader import read_folder
from ..reader import Reader, Source
from .described import described
from .files import find_iteration, unfinished
from .mesh import mesh_of

_METADATA = ".metadata"
_OTHERS = ("common.pt", "metadata.json")  # of megatron-core's own distributed checkpoints


def _recognises(source: Source) -> bool:
    if source.path or _METADATA in source.entries:
        return False
    folder = find_iteration(source, strict=False)
    if not folder:
        return False
    names = source.inside(folder)
    return _METADATA in names and not any(name in names for name in _OTHERS)


def _read(source: Source) -> Index:
    folder = find_iteration(source) or ""
    index = read_folder(source.store, folder)
    about = described(source.store, folder, source.inside(folder))  # (Megatron-Bridge saves no arguments)
    more = about.meta if about.args is None or "args" in index.meta else {"args": about.args, **about.meta}
    return replace(
        index,
        meta=ChainMap(more, index.meta) if more else index.meta,  # type: ignore[arg-type]
        mesh=mesh_of(about.args) if "args" in more else index.mesh,
        files={**index.files, **about.files},
        problems=(*unfinished(source, folder), *about.problems, *index.problems),
    )


READER = Reader(
    "megatron-fsdp",
    "runs of Megatron-FSDP (fsdp_dtensor: iter_*/.metadata and *.distcp)",
    _recognises,
    _read,
    tags=True,
)
