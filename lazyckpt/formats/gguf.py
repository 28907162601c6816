"""GGUF: the models of llama.cpp, in one file or split into ``NAME-00001-of-00003.gguf`` and so on.

Tensors of blocks stay as they are stored: uint8, with the bytes of a row of blocks in the last dimension.
`CheckpointView.dequantize` computes their values. The metadata are in ``view.meta``, under their own keys;
``view.meta["tensor_types"]`` says of which type the blocks of each tensor are.

A split file has ``split.no``, ``split.count`` and ``split.tensors.count`` in its metadata; the first one has the
metadata of the model (llama.cpp, tools/gguf-split/gguf-split.cpp; src/llama-model-loader.cpp, `llama_model_loader`).
"""

from __future__ import annotations

import re
from typing import Any

from ..core.index import Index
from ..core.names import natural
from ..core.specs import TensorSpec, whole
from ..errors import CorruptError, FormatError, LazyckptError, Problem, cannot_read, only_one, some
from ..io.containers.gguf import MAGIC, GgufFile, read_gguf
from .huggingface import configs
from .reader import Reader, Source
from .shared.announce import announce_ranges

TYPES = "tensor_types"  # the key in the metadata of the view; GGUF's own keys have a dot
BIG_ENDIAN = "big_endian"
_SPLIT = re.compile(r"(?P<before>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.gguf")
_FIRST = 1 << 18  # bytes of a file's header that are requested at once


def _read(source: Source) -> Index:
    store = source.store
    paths = [source.path] if source.path else _models(source)
    split = _SPLIT.fullmatch(source.path or paths[0])
    problems: list[Problem] = []
    if split and (not source.path or int(split["number"]) == 1):
        paths = _parts(source, split, problems)
    announce_ranges(store, [(path, 0, min(_FIRST, store.stat(path).size)) for path in paths] if len(paths) > 1 else ())
    files: list[GgufFile] = []
    for path in paths:
        try:
            files.append(read_gguf(store, path))
        except LazyckptError as e:
            if len(paths) == 1:
                raise
            problems.append(cannot_read(path, e))
    if not files:
        raise CorruptError(f"{source.where}: none of the {len(paths):,} files can be read: {problems[0]}")
    tensors, types, unreadable = _joined(source, files, problems)
    meta = _metadata(files, len(paths), len(tensors) + len(unreadable), problems)
    if not source.path:
        meta |= configs(store, problems)
    meta[TYPES] = types
    if any(file.swapped for file in files):
        meta[BIG_ENDIAN] = True
    return Index(
        format="gguf",
        states={"weights": tensors},
        files={file.path: file.info for file in files},
        stored=tensors,
        meta=meta,
        problems=tuple(problems),
        unreadable=unreadable,
    )


def _joined(
    source: Source, files: list[GgufFile], problems: list[Problem]
) -> tuple[dict[str, TensorSpec], dict[str, str], dict[str, str]]:
    """Return the tensors of all files, their types, and what cannot be read. Raises FormatError for a name that two
    files have."""
    tensors: dict[str, TensorSpec] = {}
    types: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    for file in files:
        problems += [note.prefixed(file.path, file.path) for note in file.notes]
        for name, extent in file.extents.items():
            if name in tensors or name in unreadable:
                raise FormatError(
                    f"{source.where}: {name!r:.80} is in {file.path} and in another file: open one of them"
                )
            tensors[name] = whole(name, extent)
        types |= file.types
        unreadable |= file.unreadable
    return tensors, types, unreadable


def _metadata(files: list[GgufFile], count: int, tensors: int, problems: list[Problem]) -> dict[str, Any]:
    """Return the metadata of the model, and add what contradicts them to the problems."""
    first = min(files, key=lambda file: file.metadata.get("split.no", 0) if len(files) > 1 else 0)
    meta = dict(first.metadata)
    for file in files:
        claimed = file.metadata.get("split.count", 0)
        if claimed > count and len(files) == 1:
            line = (
                f"{file.path} is part {file.metadata.get('split.no', 0) + 1} of {claimed}: it has its own tensors only"
            )
            problems.append(Problem("part-of-checkpoint", line, file.path))
        for key in meta.keys() & file.metadata.keys() if file is not first else ():
            if key != "split.no" and meta[key] != file.metadata[key]:
                line = f"{first.path} and {file.path} differ in {key!r}: they may be of different models"
                problems.append(Problem("inconsistent-metadata", line, file.path))
    told = meta.get("split.tensors.count")
    if len(files) == meta.get("split.count") and type(told) is int and told != tensors:
        line = f"the files have {tensors:,} tensors, and {first.path} counts {told:,}"
        problems.append(Problem("inconsistent-metadata", line, first.path))
    return meta


def _parts(source: Source, split: re.Match[str], problems: list[Problem]) -> list[str]:
    """Return the files of a split model that are here, and add the others to the problems."""
    beside = source.around().entries if source.path else source.entries
    count = int(split["count"])
    width = len(split["count"])
    here = [name for name in beside if (m := _SPLIT.fullmatch(name)) and m["before"] == split["before"]]
    here = sorted((name for name in here if int(_SPLIT.fullmatch(name)["count"]) == count), key=natural)  # type: ignore[index]
    if len(here) < count:
        known = set(here)
        lost = []
        for number in range(1, count + 1):
            name = f"{split['before']}-{number:0{width}d}-of-{split['count']}.gguf"
            if name not in known:
                lost.append(name)
            if len(lost) > 10 or len(lost) == count - len(here):
                break
        line = f"{count - len(here):,} of the {count:,} files of the model are not here: {some(lost)}"
        problems.append(Problem("missing-file", line, only_one(lost)))
    return here


def _models(source: Source) -> list[str]:
    """Return the file of the folder's model, or the first one of its files. Raises FormatError for several models."""
    names = sorted((n for n, e in source.entries.items() if n.endswith(".gguf") and not e.is_dir), key=natural)
    models: dict[tuple[str, str], str] = {}
    for name in names:
        split = _SPLIT.fullmatch(name)
        models.setdefault((split["before"], split["count"]) if split else (name, ""), name)
    if len(models) > 1:
        raise FormatError(
            f"{source.where} has {len(models):,} GGUF models: open one of the files: {some(models.values())}"
        )
    return list(models.values())


def _recognises(source: Source) -> bool:
    if source.path:
        return source.head.startswith(MAGIC) or source.path.lower().endswith(".gguf")
    return any(name.endswith(".gguf") and not entry.is_dir for name, entry in source.entries.items())


READER = Reader("gguf", "GGUF models of llama.cpp (one file, or NAME-00001-of-NNNNN.gguf)", _recognises, _read)
