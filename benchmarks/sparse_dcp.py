"""DCP checkpoints of any number of ranks and chunks, with torch's own metadata classes.

`write_chunks` writes the tensors too; `write_metadata` leaves the data files as holes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def write_chunks(folder: Path, tensors: Mapping[str, torch.Tensor], chunks: int, files: int) -> None:
    """Cut each tensor along its rows into ``chunks``, which lie in ``files`` files, each as `torch.save` writes it."""
    folder.mkdir(parents=True)
    described: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    parts: list[list[tuple[str, int, torch.Tensor]]] = [[] for _ in range(files)]
    for name, tensor in tensors.items():
        rows = -(-len(tensor) // chunks)
        blocks = list(zip(range(0, len(tensor), rows), tensor.split(rows), strict=True))
        inner = [0] * (tensor.ndim - 1)
        sizes = [ChunkStorageMetadata(torch.Size([start, *inner]), block.shape) for start, block in blocks]
        described[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, sizes)
        for n, (start, block) in enumerate(blocks):
            parts[n * files // len(blocks)].append((name, start, block))
    for rank, part in enumerate(parts):
        path = folder / f"__{rank}_0.distcp"
        with path.open("wb") as file:
            for name, start, block in part:
                packed = io.BytesIO()
                torch.save(block.clone(), packed)
                place = _StorageInfo(path.name, file.tell(), packed.getbuffer().nbytes)
                stored[MetadataIndex(name, torch.Size([start] + [0] * (block.ndim - 1)))] = place
                file.write(packed.getbuffer())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=stored)))


def write_metadata(folder: Path, tensors: int, chunks: int, ranks: int) -> None:
    """``tensors`` tensors of ``chunks`` chunks each (4 x 1,024 of float32), spread over the files of ``ranks``."""
    folder.mkdir(parents=True)
    shape, size = torch.Size([4, 1024]), 4 * 1024 * 4 + 1024  # bytes, with what torch.save adds
    properties = TensorProperties(torch.float32)
    described: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    ends = [0] * ranks
    for n in range(tensors):
        name = f"model.layers.{n // 10}.mlp.experts.{n % 10}.weight"
        starts = [torch.Size([4 * m, 0]) for m in range(chunks)]
        all_of = [ChunkStorageMetadata(start, shape) for start in starts]
        described[name] = TensorStorageMetadata(properties, torch.Size([4 * chunks, 1024]), all_of)
        for m, start in enumerate(starts):
            rank = (n * chunks + m) % ranks
            stored[MetadataIndex(name, start, m)] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], size)
            ends[rank] += size
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, storage_data=stored), file)


def write_fsdp(folder: Path, layers: int, ranks: int) -> None:
    """The weights and Adam's states of a Llama as Megatron-FSDP saves them: rows of every tensor on every rank. Five
    options of each parameter are objects."""
    folder.mkdir(parents=True)
    shapes = {"self_attention.linear_qkv": 192, "self_attention.linear_proj": 64, "mlp.linear_fc2": 64}
    layer = {f"{name}.weight": (rows, 64) for name, rows in shapes.items()}
    layer |= {f"mlp.linear_fc1.weight_{half}": (128, 64) for half in "wv"}
    layer |= {"input_layernorm.weight": (64,), "pre_mlp_layernorm.weight": (64,)}
    names = {"embedding.word_embeddings.weight": (1024, 64), "output_layer.weight": (1024, 64)}
    names |= {"decoder.final_layernorm.weight": (64,)}
    names |= {f"decoder.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str, ...]] = {}
    ends = [0] * ranks

    def placed(path: tuple[str, ...], rank: int, nbytes: int, index: MetadataIndex) -> None:
        paths[index.fqn] = path
        stored[index] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], nbytes)
        ends[rank] += nbytes

    def thing(*path: str) -> None:
        described[".".join(path)] = BytesStorageMetadata()
        placed(path, 0, 500, MetadataIndex(".".join(path)))

    def tensor(shape: tuple[int, ...], *path: str) -> None:
        key, chunks = ".".join(path), []
        cuts = [shape[0] * n // ranks for n in range(ranks + 1)]
        for rank, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                at, size = torch.Size([start] + [0] * (len(shape) - 1)), torch.Size([stop - start, *shape[1:]])
                placed(path, rank, size.numel() * 4 + 1200, MetadataIndex(key, at, len(chunks)))
                chunks.append(ChunkStorageMetadata(at, size))
        described[key] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)

    thing("checkpoint_version")
    for name, shape in names.items():
        tensor(shape, "model", f"module.{name}")
        for state in ("exp_avg", "exp_avg_sq"):
            tensor(shape, "optimizer", "state", f"module.module.module.{name}", state)
        for option in ("lr", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"):
            thing("optimizer", "param_to_group_meta", f"module.module.module.{name}", option)
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    metadata = Metadata(described, planner_data=paths, storage_data=stored)  # type: ignore[arg-type]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
