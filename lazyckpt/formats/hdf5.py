"""HDF5 files: those of Keras (`.weights.h5`, `.keras`; `.h5` before them: keras_h5.py), and any others.

Writers: keras/src/saving/saving_lib.py (`save_weights_only`, `save_model`, `H5IOStore`) of Keras 3. A layer's variables
are `layers/LAYER/vars/0`, `1`, ...; those of the optimizer are `optimizer/vars/N`, and the file does not say of which
parameters. A `.keras` is a zip with `config.json`, `metadata.json` and a stored `model.weights.h5`; the config is kept
as a text's object and nothing in it is built. Any other file: each dataset is a tensor, named by its path with dots.
"""

from __future__ import annotations

import json
from typing import Any

from ..core.index import Index
from ..core.specs import TensorSpec, renamed
from ..errors import CorruptError, FormatError, Problem, only_one, some
from ..io.containers.hdf5 import MAGIC, Hdf5, dotted, read_hdf5
from ..io.containers.zip import STORED, ZIP_MAGIC, read_zip
from ..io.containers.zip_offsets import data_offset
from ..io.limits import check_levels
from ..io.storage.streams import StoreFile
from .keras_h5 import is_old, names_of
from .reader import Reader, Source

_ENDINGS = (".h5", ".hdf5", ".keras")
_WEIGHTS = "model.weights.h5"
_DOCUMENTS = ("config.json", "metadata.json")
_LARGEST = 64 << 20  # bytes of a document
_OPTIMIZER = "optimizer/vars/"


def _recognises(source: Source) -> bool:
    if not source.path:
        return False
    if source.head.startswith(ZIP_MAGIC):
        return source.path.endswith(".keras")
    return source.head.startswith(MAGIC) or source.path.endswith(_ENDINGS)


def _read(source: Source) -> Index:
    file = StoreFile(source.store, source.path)
    head = source.head
    file.refuse_pointer(head)
    if head.startswith(ZIP_MAGIC):
        return _archive(file)
    if not head.startswith(MAGIC):
        raise FormatError(f"{file.where} is no HDF5 file (it begins with {head[:8]!r})")
    return _index(file, read_hdf5(file), {})


def _archive(file: StoreFile) -> Index:
    """Read a `.keras` file."""
    entries = {entry.name: entry for entry in read_zip(file).entries}
    weights = entries.get(_WEIGHTS)
    if weights is None:
        raise FormatError(f"{file.where}: there is no {_WEIGHTS} in it, but {some(sorted(entries))}")
    if weights.method != STORED:
        raise FormatError(
            f"{file.where}: {_WEIGHTS} is compressed in it, so it cannot be read by ranges: unzip it and open it"
        )
    meta: dict[str, Any] = {}
    for name in _DOCUMENTS:
        entry = entries.get(name)
        if entry is not None and entry.method == STORED and entry.nbytes <= _LARGEST:
            text = file.at(data_offset(file, entry), entry.nbytes)
            try:
                meta[name.removesuffix(".json")] = json.loads(text)
            except (ValueError, RecursionError):
                raise CorruptError(f"{file.where}: its {name} is no JSON: damaged") from None
            check_levels(f"{file.where}: {name}", meta)
    window = data_offset(file, weights), weights.nbytes
    return _index(file, read_hdf5(StoreFile(file.store, file.path, window=window)), meta)


def _index(file: StoreFile, found: Hdf5, meta: dict[str, Any]) -> Index:
    if found.damaged and not found.tensors:
        raise CorruptError(next(iter(found.damaged.values())))
    if is_old(found.attributes):
        return _old_keras(file, found, meta)
    is_keras = "vars" in found.attributes or any(path.startswith(("layers/", _OPTIMIZER)) for path in found.tensors)
    stored: dict[str, TensorSpec] = {}
    weights: dict[str, TensorSpec] = {}
    numbered = []
    problems: list[Problem] = []
    for path, spec in found.tensors.items():
        name = dotted(path)
        if name in stored:
            problems.append(
                Problem("duplicate-tensor", f"two datasets would be called {name!r}: one is {path!r}", path)
            )
            name = path
        stored[name] = renamed(spec, name)
        if is_keras and path.startswith(_OPTIMIZER):
            numbered.append(name)
        else:
            weights[name] = stored[name]
    if numbered:
        line = (
            f"the optimizer's {len(numbered)} variables are numbered, and the file does not say which parameter each "
            "belongs to: they are in view.stored"
        )
        problems.append(Problem("undecided-name", line, file.path))
    states = {"weights": weights}
    return _indexed("keras" if is_keras else "hdf5", file, found, meta, states, stored, problems)


def _old_keras(file: StoreFile, found: Hdf5, meta: dict[str, Any]) -> Index:
    """Return the index of a file of Keras before `.keras`."""
    names = names_of(found.tensors, {path: bool(spec.shape) for path, spec in found.tensors.items()})
    stored = {dotted(path): renamed(spec, dotted(path)) for path, spec in found.tensors.items()}
    states = {"weights": {name: renamed(found.tensors[path], name) for path, name in names.weights.items()}}
    for path, (state, name) in names.slots.items():
        states.setdefault("optimizer.weights" if state == "weights" else state, {})[name] = renamed(
            found.tensors[path], name
        )
    problems = []
    if len(stored) < len(found.tensors) or len(states["weights"]) < len(names.weights):
        line = "several datasets have the same name with dots in place of slashes: one of each is read"
        problems.append(Problem("duplicate-tensor", line, file.path))
    if names.unknown:
        line = f"the names of {len(names.unknown):,} variables of the optimizer tell no weight: {some(names.unknown)}"
        problems.append(Problem("undecided-name", line, only_one(names.unknown)))
    return _indexed("keras", file, found, meta, states, stored, problems)


def _indexed(
    format: str,
    file: StoreFile,
    found: Hdf5,
    meta: dict[str, Any],
    states: dict[str, dict[str, TensorSpec]],
    stored: dict[str, TensorSpec],
    problems: list[Problem],
) -> Index:
    reasons: dict[str, list[str]] = {}
    for path, why in found.refused.items():
        reasons.setdefault(why, []).append(path)
    problems += [
        Problem("unsupported-tensor", f"not in the view: {some(paths)}: {why}", only_one(paths))
        for why, paths in reasons.items()
    ]
    problems += [Problem("unreadable-file", why, path) for path, why in found.damaged.items()]
    if found.attributes:
        meta["attributes"] = found.attributes
    return Index(
        format=format,
        states=states,
        files={file.path: file.info},
        stored=stored,
        aliases={
            dotted(alias): dotted(owner) for alias, owner in found.aliases.items() if dotted(owner) in states["weights"]
        },
        meta=meta,
        problems=tuple(problems),
        unreadable={dotted(path): why for path, why in found.damaged.items()},
    )


READER = Reader("hdf5", "HDF5 files, and those of Keras (.weights.h5, .keras)", _recognises, _read)
