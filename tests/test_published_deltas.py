"""Deltas that reinforcement-learning stacks publish on disk: slime (miles, SGLang) and SkyRL.

The writers need Ray, Megatron and GPUs, so the functions here write what the cited functions write, file by file:
formats/slime.py and formats/skyrl.py name them. numcodecs' zstd writes the frames; like zstandard's, they declare their
sizes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numcodecs import zstd
from safetensors.numpy import save as save_arrays
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.errors import CorruptError, DataError, FormatError, MissingFileError

Tensors = dict[str, torch.Tensor]


def flat(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(algorithm: str, data: np.ndarray[Any, Any]) -> str:
    if algorithm == "adler32":
        return f"{zlib.adler32(data.tobytes()):08x}"
    if algorithm == "sha256":
        return hashlib.sha256(data.tobytes()).hexdigest()
    module = pytest.importorskip({"xxh3-128": "xxhash", "blake3": "blake3"}[algorithm])
    made = module.xxh3_128() if algorithm == "xxh3-128" else module.blake3()
    made.update(data.tobytes())
    return str(made.hexdigest())


def slime(
    folder: Path, version: int, new: Tensors, old: Tensors, encoding: str, algorithm: str, ranks: int = 2
) -> None:
    """As `UpdateWeightFromDiskDelta._encode_delta` and `_write_delta_files` do, each rank with its own."""
    place = folder / f"weight_v{version:06d}"
    place.mkdir(parents=True)
    weight_map = {}
    parts = [{n: t for k, (n, t) in enumerate(new.items()) if k % ranks == rank} for rank in range(ranks)]
    for rank, part in enumerate(parts):
        delta, checksums = {}, {}
        for name, tensor in part.items():
            a, b = flat(tensor), flat(old[name])
            mask = a != b
            if not mask.any():
                continue
            diff = a ^ b
            if encoding == "overwrite":
                at = np.flatnonzero(mask).astype("<u4")
                diff = np.concatenate([np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), a[mask]])
            delta[name] = np.frombuffer(zstd.compress(diff.tobytes(), 1), np.uint8)
            checksums[name] = checksum(algorithm, a)
        if delta:
            file = f"model-{rank:05d}-of-{ranks:05d}.safetensors"
            (place / file).write_bytes(save_arrays(delta, metadata=checksums))
            weight_map |= dict.fromkeys(delta, file)
    about = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": algorithm,
    }  # fmt: skip
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": about, "weight_map": weight_map}))


def skyrl(folder: Path, version: int, new: Tensors, old: Tensors, algorithm: str = "xxh3-128") -> None:
    """As `DeltaCheckpointPublisher.create_delta_files` and `publish` do."""
    place = folder / f"delta-{version:08d}"
    place.mkdir(parents=True)
    records, files = [], []
    for number, (name, tensor) in enumerate(new.items()):
        a, b = flat(tensor), flat(old[name])
        if not (a ^ b).any():
            continue
        packed = np.frombuffer(zstd.compress((a ^ b).tobytes(), 1), np.uint8)
        file = f"delta-rank00000-file{number:06d}.safetensors"
        (place / file).write_bytes(save_arrays({name: packed}))
        files.append(file)
        records.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "uncompressed_num_bytes": a.nbytes,
                "compressed_num_bytes": packed.nbytes,
                "payload_file": file,
                "payload_key": name,
                "checksum": checksum(algorithm, a),
                "checksum_algorithm": algorithm,
            }
        )
    manifest = {
        "version": version, "base_version": version - 1, "tensors": records, "payload_files": files,
        "total_uncompressed_num_bytes": sum(r["uncompressed_num_bytes"] for r in records),
        "total_compressed_num_bytes": sum(r["compressed_num_bytes"] for r in records),
    }  # fmt: skip
    (place / "manifest.json").write_text(json.dumps(manifest))


def model(seed: int, old: Tensors | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    if old is None:
        return {
            "embed.weight": torch.randint(-99, 99, (50, 9), generator=generator).div(64).bfloat16(),
            "layers.0.w": torch.randint(-99, 99, (7, 5, 3), generator=generator).div(64),
            "layers.0.scale": torch.tensor(0.5).bfloat16(),
            "norm": torch.ones(11),
        }
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["embed.weight"][seed : seed + 4] *= 1.5
    new["layers.0.w"][:, seed % 5] += 0.25
    new["layers.0.scale"] = torch.tensor(0.5 + seed).bfloat16()
    return new


def history(base: Path) -> list[Tensors]:
    versions = [model(0)]
    for seed in (1, 2, 3):
        versions.append(model(seed, versions[-1]))
    base.mkdir()
    save_file(versions[0], base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text('{"model_type": "llama"}')
    return versions


def same(view: lazyckpt.CheckpointView, wanted: Tensors) -> None:
    assert set(view) == set(wanted)
    for name, tensor in wanted.items():
        found = view[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found[...], tensor), name
        if tensor.ndim > 1:
            assert torch.equal(found[1::3, -2:], tensor[1::3, -2:])
            assert torch.equal(found[[5, 0]], tensor[[5, 0]])


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3", "adler32"])
def test_slime(tmp_path: Path, encoding: str, algorithm: str) -> None:
    versions = history(tmp_path / "base")
    for n in (1, 2, 3):
        slime(tmp_path / "sync", n, versions[n], versions[n - 1], encoding, algorithm)
    for n in (1, 2, 3):
        view = lazyckpt.open(tmp_path / "sync" / f"weight_v{n:06d}", base=tmp_path / "base")
        assert view.format == "slime-delta"
        same(view, versions[n])
    out = tmp_path / "out"
    view.to_safetensors(out)
    same(lazyckpt.open(out), versions[3])
    assert view.meta["config"] == {"model_type": "llama"}


def test_a_full_version_ends_the_chain(tmp_path: Path) -> None:
    versions = history(tmp_path / "base")
    full = tmp_path / "sync" / "weight_v000002"
    full.mkdir(parents=True)
    save_file(versions[2], full / "model.safetensors", {"format": "pt"})
    slime(tmp_path / "sync", 3, versions[3], versions[2], "xor", "adler32")
    same(lazyckpt.open(tmp_path / "sync" / "weight_v000003"), versions[3])


def test_skyrl(tmp_path: Path) -> None:
    versions = history(tmp_path / "base")
    for n, algorithm in ((1, "xxh3-128"), (2, "sha256")):
        skyrl(tmp_path / "sync", n, versions[n], versions[n - 1], algorithm)
    skyrl(tmp_path / "sync", 3, versions[2], versions[2])  # nothing has changed
    for n in (1, 2):
        view = lazyckpt.open(tmp_path / "sync" / f"delta-{n:08d}", base=tmp_path / "base")
        assert view.format == "skyrl-delta"
        same(view, versions[n])
    same(lazyckpt.open(tmp_path / "sync" / "delta-00000003", base=lazyckpt.open(tmp_path / "base")), versions[2])


@pytest.mark.parametrize("kind", ["slime", "skyrl"])
def test_a_wrong_base_gives_no_bytes(tmp_path: Path, kind: str) -> None:
    versions = history(tmp_path / "base")
    if kind == "slime":
        slime(tmp_path / "sync", 1, versions[1], versions[0], "xor", "adler32")
        place = tmp_path / "sync" / "weight_v000001"
    else:
        skyrl(tmp_path / "sync", 1, versions[1], versions[0])
        place = tmp_path / "sync" / "delta-00000001"
    with pytest.raises(MissingFileError, match="base="):
        lazyckpt.open(place)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    save_file(versions[2], wrong / "model.safetensors")
    view = lazyckpt.open(place, base=wrong)
    with pytest.raises(DataError, match="not the tensor that was recorded"):
        view["embed.weight"][30]  # this row has not even changed
    save_file({"norm": versions[0]["norm"]}, wrong / "model.safetensors")
    with pytest.raises(DataError, match="lacks"):
        lazyckpt.open(place, base=wrong)


def test_a_missing_version_and_damage(tmp_path: Path) -> None:
    versions = history(tmp_path / "base")
    slime(tmp_path / "sync", 2, versions[2], versions[1], "xor", "adler32")
    place = tmp_path / "sync" / "weight_v000002"
    with pytest.raises(MissingFileError, match="weight_v000001"):
        lazyckpt.open(place, base=tmp_path / "base")
    index = place / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["metadata"]["delta_encoding"] = "sparse"
    index.write_text(json.dumps(table))
    with pytest.raises(FormatError, match="sparse"):
        lazyckpt.open(place)
    table["metadata"] |= {"delta_encoding": "xor", "base_version": "x"}
    index.write_text(json.dumps(table))
    with pytest.raises(CorruptError):
        lazyckpt.open(place)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_explains_what_a_slice_reads(tmp_path: Path, encoding: str) -> None:
    """A frame has no index: a row needs all of it, and its own bytes of the base."""
    old = {"w": torch.randn(64, 32)}
    new = {"w": old["w"].clone()}
    new["w"][::5] += 1
    (tmp_path / "base").mkdir()
    save_file(old, tmp_path / "base/model.safetensors")
    slime(tmp_path, 1, new, old, encoding, "adler32", ranks=1)
    view = lazyckpt.open(tmp_path / "weight_v000001", base=tmp_path / "base")
    frame = lazyckpt.open(tmp_path / "weight_v000001/model-00000-of-00001.safetensors")["w"].nbytes
    assert f"({frame + 128:,} bytes read)" in view["w"].explain(3)
    assert f"({frame:,} bytes)" in view["w"].explain(3)
    assert torch.equal(view["w"][5:20:5, 3], new["w"][5:20:5, 3])
