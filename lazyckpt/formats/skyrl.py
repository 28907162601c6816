"""Deltas that SkyRL publishes: ``delta-NNNNNNNN/`` with manifest.json, each over the version before it.

The manifest lists the changed tensors, each with its file, its key in it, its size and a checksum of the new tensor. In
the file, a tensor is one zstd frame: the new bytes combined with the old ones by exclusive or. Version 0 is the model
that the engines were started with.

Writer: skyrl/backends/skyrl_train/weight_sync/delta_checkpoint.py `DeltaCheckpointPublisher.create_delta_files`,
`publish`, `DeltaManifest` (NovaSky-AI/SkyRL, commit a9564572eb8e91076be43c1bd5e4615e3de17265).
"""

from __future__ import annotations

import re
from typing import Any

from ..core.index import FileInfo, Index
from ..core.specs import TensorSpec, whole
from ..errors import CorruptError
from ..io.containers.safetensors import SafetensorsFile, read_safetensors
from .huggingface import load_json
from .reader import Reader, Source
from .shared.announce import announce
from .shared.paths import inside
from .shared.versions import VERSION, Published

FORMAT = "skyrl-delta"
NAME = "delta-{:08d}"
_MANIFEST = "manifest.json"
_FILE = re.compile(r"delta-rank\d{5,}-file\d{6,}\.safetensors")
_FOLDER = re.compile(r"delta-\d{8,}")


def _recognises(source: Source) -> bool:
    if source.path or _MANIFEST not in source.entries:
        return False
    files = [name for name in source.entries if name.endswith(".safetensors")]
    if not files:
        return _FOLDER.fullmatch(source.store.root.rpartition("/")[2]) is not None
    return all(_FILE.fullmatch(name) for name in files)


def _read(source: Source) -> Index:
    where = f"{source.where}/{_MANIFEST}"
    table = load_json(source.store, _MANIFEST)
    try:
        version, base = int(table["version"]), int(table["base_version"])
        records: list[dict[str, Any]] = [dict(record) for record in table["tensors"]]
        paths = sorted({str(record["payload_file"]) for record in records})
    except (LookupError, TypeError, ValueError):
        raise CorruptError(f"{where} is no manifest of a version: damaged") from None
    if not all(map(inside, paths)):
        raise CorruptError(f"{where} names files outside its folder: the manifest is wrong or hostile")
    announce(source.store, paths)
    found: dict[str, SafetensorsFile] = {path: read_safetensors(source.store, path) for path in paths}
    tensors: dict[str, TensorSpec] = {}
    checksums: dict[str, tuple[str, str]] = {}
    for record in records:
        file = found[str(record["payload_file"])]
        name, key, nbytes = (record.get(k) for k in ("name", "payload_key", "compressed_num_bytes"))
        if not isinstance(name, str) or not isinstance(key, str) or key not in file.extents or name in tensors:
            raise CorruptError(f"{where}: the tensor {name!r:.80} is not in {file.path}, or is listed twice: damaged")
        extent = file.extents[key]
        if extent.shape != (nbytes,):
            raise CorruptError(f"{where}: {name!r:.80} has {extent.shape} packed bytes in {file.path}, not {nbytes!r}")
        tensors[name] = whole(name, extent)
        old = record.get("sha256")  # of earlier versions of the writer
        algorithm = record.get("checksum_algorithm", "xxh3-128") if old is None else "sha256"
        checksums[name] = str(algorithm), str(record.get("checksum") if old is None else old)
    files: dict[str, FileInfo] = {_MANIFEST: source.store.stat(_MANIFEST)} | {p: f.info for p, f in found.items()}
    published = Published(FORMAT, version, base, NAME, "xor", checksums)
    return Index(
        format=FORMAT, states={"weights": tensors}, files=files, stored=tensors, meta={VERSION: published}
    )  # fmt: skip


READER = Reader("skyrl-delta", "deltas that SkyRL publishes (delta-NNNNNNNN/manifest.json)", _recognises, _read)
