"""Deltas that slime, miles and SGLang exchange on disk: ``weight_vNNNNNN/``, each over the version before it.

A version is a Hugging Face folder. In that of a delta, the index's metadata has ``delta_encoding``, and every tensor of
the files is one zstd frame: the bytes of the new tensor combined with the old ones by exclusive or ("xor"), or a list
of changed bytes ("overwrite"). The metadata of each file have the checksums of the new tensors. Version 0 is the model
that the engine was started with.

Writer: slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py `_encode_delta`,
`_write_delta_files`, and slime/utils/disk_delta.py `overwrite_encode`, `checksum` (THUDM/slime, commit
624b824a898ab0ec1fcb4d373004c7f3852bf515). Reader of the engine: docker/patch/latest/sglang-pull_weights.patch,
`_apply_delta`. radixark/miles, pull request 1235, describes the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.index import FileInfo, Index
from ..core.specs import TensorSpec, whole
from ..errors import CorruptError, FormatError
from ..io.containers.safetensors import read_safetensors
from .reader import Source
from .shared.announce import announce
from .shared.paths import inside
from .shared.versions import VERSION, Published

FORMAT = "slime-delta"
NAME = "weight_v{:06d}"  # of the folder of a version


def is_delta(table: Mapping[str, Any]) -> bool:
    """Return whether an index of a Hugging Face folder is that of a delta."""
    about = table.get("metadata")
    return isinstance(about, dict) and "delta_encoding" in about


def read_version(source: Source, index_path: str, table: Mapping[str, Any]) -> Index:
    """Index the stored frames of a version. `derive.versions.restored` puts them together with the version before.

    Raises FormatError for an unknown encoding, CorruptError for damaged files.
    """
    where, about = f"{source.where}/{index_path}", table["metadata"]
    encoding, packing = about.get("delta_encoding"), about.get("compression_format")
    if encoding not in ("xor", "overwrite") or packing != "zstd":
        raise FormatError(f"{where}: a delta encoded by {encoding!r:.40}, packed by {packing!r:.40}: not supported")
    try:
        version, base = int(about["version"]), int(about["base_version"])
        paths = sorted(set(table.get("weight_map", {}).values()))
    except (LookupError, TypeError, ValueError, AttributeError):
        raise CorruptError(f"{where}: its metadata do not say which version it is: damaged") from None
    if not all(map(inside, paths)):
        raise CorruptError(f"{where} names files outside its folder: the index is wrong or hostile")
    files: dict[str, FileInfo] = {index_path: source.store.stat(index_path)}
    announce(source.store, paths)
    checksums: dict[str, tuple[str, str]] = {}
    tensors: dict[str, TensorSpec] = {}
    for path in paths:
        file = read_safetensors(source.store, path)
        files[path] = file.info
        for name in file.extents:
            if name in tensors or name not in file.metadata:
                raise CorruptError(f"{source.where}/{path}: {name!r:.80} has no checksum, or is there twice: damaged")
            tensors[name] = whole(name, file.extents[name])
            checksums[name] = str(about.get("checksum_format")), file.metadata[name]
    lost = table.get("weight_map", {}).keys() ^ tensors.keys()
    if lost:
        raise CorruptError(f"{where}: the index and the files do not have the same tensors: {min(lost)!r:.80}")
    published = Published(FORMAT, version, base, NAME, encoding, checksums)
    return Index(
        format=FORMAT,
        states={"weights": tensors},
        files=files,
        stored=tensors,
        meta={VERSION: published},
    )
