"""Archives of torch.export.save and of AOTInductor (.pt2): weights and constants, never the program.

Writers: torch/export/pt2_archive/_package.py `package_pt2` (torch 2.8 and later), before that `save` in
torch/export/__init__.py. Names of records: torch/csrc/export/pt2_archive_constants.h. Records of a model M are, by
version,

* 2.9 and later: ``data/weights/M_weights_config.json`` and ``data/constants/M_constants_config.json``, which map names
  to a record beside them (the raw bytes of a storage, or a file of torch.save for Tensor subclasses) and a shape,
  strides and an offset in it (torch/_export/serde/schema.py `PayloadConfig`);
* 2.8: ``data/weights/M.pt`` and ``data/constants/M.pt``, dicts in files of torch.save;
* 2.1 to 2.7: the same as ``serialized_state_dict.pt`` and ``serialized_constants.pt`` (.json in 2.1), in a zip without
  a folder;
* packages of AOTInductor: ``data/aotinductor/M/weights_config.json`` maps names to (record of ``data/weights``, shape,
  strides, offset). The record is a tensor in a file of torch.save. Without it, the weights are in the compiled library.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

from ..core.dtypes import FROM_NAME, DType
from ..core.index import Index
from ..core.names import free
from ..core.specs import TensorSpec
from ..errors import CorruptError, FormatError, Problem, some
from ..io.containers.pickle.plain import ATTRIBUTES, Plain
from ..io.containers.pickle.rebuild import StoredStorage, StoredTensor
from ..io.containers.pickle.records import Opaque, short
from ..io.containers.torch_file import TorchFile, read_torch_file
from ..io.containers.zip import ENCRYPTED, STORED, ZIP_MAGIC, read_zip
from ..io.containers.zip_directory import Record
from ..io.containers.zip_offsets import data_offsets_of_few
from ..io.limits import Budget, check_levels
from ..io.storage.streams import StoreFile
from .reader import Reader, Source
from .torch_save import READER as TORCH
from .torch_save import bloat, specs_of, ties, used_bytes, warnings

_WEIGHTS, _CONSTANTS, _COMPILED = "data/weights/", "data/constants/", "data/aotinductor/"
_FIRST = tuple(map(str.encode, (_WEIGHTS, _CONSTANTS, _COMPILED, "data/executorch/", "models/", "archive_")))
_OLD = {"weights": "serialized_state_dict", "constants": "serialized_constants"}
_PROGRAM = "serialized_exported_program.json"
_CONFIG = {"weights": "_weights_config.json", "constants": "_constants_config.json"}
_FOLDER = {"weights": _WEIGHTS, "constants": _CONSTANTS}
_STRIDED = 7  # schema.py `Layout`
# schema.py `ScalarType`
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "complex32",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_NO_DATA = "was saved without its data (a fake tensor), for which torch.export.load takes zeros"


def _recognises(source: Source) -> bool:
    head = source.head
    if not source.path or not head.startswith(ZIP_MAGIC):
        return False
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return name == _PROGRAM.encode() or name.partition(b"/")[2].startswith(_FIRST)


def _read(source: Source) -> Index:
    file = StoreFile(source.store, source.path)
    archive = _Archive(file)
    if _PROGRAM in archive.records:
        archive.pickled("weights", [_OLD["weights"] + end for end in (".pt", ".json")], "")
        archive.pickled("constants", [_OLD["constants"] + end for end in (".pt", ".json")], "")
    elif "archive_format" in archive.records:
        archive.check_version()
        models, compiled = archive.models(), archive.compiled()
        for model in models:
            prefix = f"{model}." if len(models) > 1 else ""
            for state in ("weights", "constants"):
                archive.exported(state, model, prefix)
        for model in compiled:
            prefix = f"{model}." if len(compiled) > 1 else ""
            archive.packaged("compiled" if models else "weights", model, prefix)
    else:
        return TORCH.read(source)
    return archive.index()


class _Archive:
    """The records of an archive, and the tensors that were found in them."""

    def __init__(self, file: StoreFile) -> None:
        self.file = file
        self.records = _records(file)
        self._budget = Budget(file.where, file.size)
        self._states: dict[str, dict[str, TensorSpec]] = {"weights": {}, "constants": {}, "compiled": {}}
        self._inner: dict[str, TensorSpec] = {}  # attributes of tensors, by raw name
        self._held: dict[str, StoredTensor] = {}  # the weights, with the record in the keys of their storages
        self._problems: list[Problem] = []
        self._meta: dict[str, Any] = {}
        self._attributes: dict[str, Any] = {}  # of tensors
        self._files: dict[str, TorchFile] = {}  # files of torch.save, by the record that holds them

    def models(self) -> list[str]:
        """Return the names of the exported programs."""
        return [
            n[len("models/") : -len(".json")] for n in self.records if n.startswith("models/") and n[-5:] == ".json"
        ]

    def compiled(self) -> list[str]:
        """Return the names of the compiled models."""
        names = (n.removeprefix(_COMPILED).partition("/") for n in self.records if n.startswith(_COMPILED))
        return list(dict.fromkeys(model for model, slash, _ in names if slash))

    def check_version(self) -> None:
        """Raise FormatError unless this is version 0 of the format, the only one there is."""
        kind = self._bytes("archive_format")
        version = self._bytes("archive_version") if "archive_version" in self.records else b"0"
        if kind != b"pt2" or version != b"0":
            raise FormatError(
                f"{self.file.where}: an archive of the format {kind[:20]!r}, version {version[:20]!r}; lazyckpt reads "
                "version 0 of pt2. Save its weights where you trust it: torch.export.load(path).state_dict"
            )

    def exported(self, state: str, model: str, prefix: str) -> None:
        """Add a state of an exported program."""
        old, config = f"{_FOLDER[state]}{model}.pt", f"{_FOLDER[state]}{model}{_CONFIG[state]}"
        if old in self.records:  # torch looks for it first, too
            self.pickled(state, [old], prefix)
        elif config in self.records:
            self._listed(state, config, prefix)
        else:
            line = f"{self.file.path}: neither {config} nor {old} is in it: the {state} of {model!r} are not read"
            self._problems.append(Problem("missing-metadata", line, self.file.path))

    def pickled(self, state: str, names: list[str], prefix: str) -> None:
        """Add the tensors of a dict in a file of torch.save, the first of these records that there is."""
        name = next((name for name in names if name in self.records), None)
        if name is None:
            line = f"{self.file.path}: {names[0]} is not in it: its {state} are not read"
            self._problems.append(Problem("missing-metadata", line, self.file.path))
            return
        if not self.records[name].nbytes:
            return
        file = self._torch(name)
        if not isinstance(file.root, dict):
            raise CorruptError(f"{self.file.where}: {name} holds no dict of tensors: the file is damaged")
        root = {key: self._real(value) for key, value in file.root.items()}
        self._add(state, name, file, Plain(root, f"{self.file.where} ({name})", file.pickle_size, prefix), prefix)

    def packaged(self, state: str, model: str, prefix: str) -> None:
        """Add the weights of a compiled model."""
        config = f"{_COMPILED}{model}/weights_config.json"
        if config not in self.records:
            line = (
                f"{self.file.path}: the weights of the compiled model {model!r} are in its library, or in none of the "
                "records that are read. Package it with aot_inductor.package_constants_on_disk_format='pickle_weights'"
            )
            self._problems.append(Problem("missing-weights", line, self.file.path))
            return
        held: dict[str, dict[str, StoredTensor]] = {}  # by record
        for name, entry in self._json(config).items():
            self._budget.objects(8)
            if not (isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str)):
                raise self._wrong(config, name, entry)
            record, shape, strides, offset = entry
            base = self._torch(_WEIGHTS + record, config).root
            if not isinstance(base, StoredTensor) or base.storage is None or base.conj or base.neg:
                raise self._wrong(config, name, entry)
            tensor = self._placed(config, name, base.storage, base.dtype, shape, strides, offset)
            held.setdefault(record, {})[name] = tensor
        for record, tensors in held.items():
            file = self._torch(_WEIGHTS + record)
            self._add(state, _WEIGHTS + record, file, Plain(tensors, self.file.where, file.pickle_size), prefix)

    def _listed(self, state: str, config: str, prefix: str) -> None:
        """Add the tensors that a configuration lists: those in raw records, and those in files of torch.save."""
        entries = self._json(config).get("config")
        if not isinstance(entries, dict):
            raise CorruptError(f"{self.file.where}: {config} lists no tensors: the file is damaged")
        folder = _FOLDER[state]
        raw: dict[str, StoredTensor] = {}
        records: dict[str, Record] = {}
        others: list[str] = []
        for name, entry in entries.items():
            self._budget.objects(8)
            where = entry.get("path_name") if isinstance(entry, dict) else None
            if not isinstance(where, str):
                raise self._wrong(config, name, entry)
            about = entry.get("tensor_meta")
            if about is None or _is_symbolic(about):
                others.append(name)
            elif entry.get("use_pickle"):
                file = self._torch(folder + where, config)
                self._add(
                    state,
                    folder + where,
                    file,
                    Plain({name: file.root}, self.file.where, file.pickle_size, prefix),
                    prefix,
                )
            else:
                records[where] = self._record(folder + where, config)
                raw[name] = self._tensor(config, name, about, where, records[where].nbytes)
        file = TorchFile(self.file.path, self.file.info, raw, records, {}, False, self.records[config].nbytes)
        self._add(state, "", file, Plain(raw, self.file.where, file.pickle_size), prefix)
        if others:
            line = (
                f"{self.file.path}: objects that are no tensors, or have symbolic shapes, are not read: {some(others)}"
            )
            self._problems.append(Problem("unreadable-object", line, self.file.path))

    def _add(self, state: str, record: str, file: TorchFile, plain: Plain, prefix: str) -> None:
        """Add the tensors of a part of the archive to a state. ``record`` is the file of torch.save that has them."""
        specs = specs_of(file, plain, prefix)
        found = self._states[state]
        for name in specs:
            if name in found:
                raise CorruptError(f"{self.file.where}: two tensors have the name {short(name)}: the file is damaged")
        inner = {prefix + name for name in plain.inner}
        found.update((name, spec) for name, spec in specs.items() if name not in inner)
        self._inner |= {name if state == "weights" else f"{state}/{name}": specs[name] for name in inner}
        for name, tensor in plain.tensors.items() if state == "weights" else ():
            if prefix + name not in inner and (storage := tensor.storage) is not None:
                self._held[prefix + name] = tensor.having(storage=storage._replace(key=f"{record}/{storage.key}"))
        if file.globals:
            self._problems += warnings(self.file.path, file, plain)
        else:
            self._problems += [note.prefixed(self.file.path, self.file.path) for note in plain.notes]
            self._problems += bloat(self.file.path, file, used_bytes(plain))
        if isinstance(plain.rest, dict):
            self._meta |= {prefix + str(key): value for key, value in plain.rest.items()}
        self._attributes |= {prefix + name: value for name, value in plain.attributes.items()}

    def _torch(self, name: str, config: str = "") -> TorchFile:
        """Return a file of torch.save that is a record."""
        if name not in self._files:
            record = self._record(name, config)
            window = (record.offset, record.nbytes)
            self._files[name] = read_torch_file(self.file.store, self.file.path, window=window)
        return self._files[name]

    def _record(self, name: str, config: str) -> Record:
        record = self.records.get(name)
        if record is None:
            raise CorruptError(f"{self.file.where}: {config} names the record {short(name)}, which is not in the file")
        return record

    def _tensor(self, config: str, name: str, about: Any, record: str, nbytes: int) -> StoredTensor:
        """Return the tensor that a `TensorMeta` describes, in a record of so many bytes."""
        dtype = _dtype(about)
        if dtype is None or about.get("layout") != _STRIDED:
            raise self._wrong(config, name, about)
        storage = StoredStorage(record, dtype, nbytes // dtype.itemsize, "cpu")
        shape, strides, offset = (
            _numbers(about.get("sizes")),
            _numbers(about.get("strides")),
            about.get("storage_offset"),
        )
        tensor = self._placed(config, name, storage, dtype, shape, strides, _number(offset))
        if not nbytes and 0 not in tensor.shape:
            return tensor.having(storage=None, note=_NO_DATA)
        if nbytes % dtype.itemsize:
            raise self._wrong(config, name, about)
        return tensor

    def _placed(
        self, config: str, name: str, storage: StoredStorage, dtype: DType, shape: Any, strides: Any, offset: Any
    ) -> StoredTensor:
        if not (isinstance(shape, list) and isinstance(strides, list)):
            raise self._wrong(config, name, (shape, strides))
        try:
            return StoredTensor(storage, dtype, offset, tuple(shape), tuple(strides))
        except CorruptError as e:
            raise CorruptError(f"{self.file.where}: {config} describes {short(name)} as {e}: damaged") from None

    def _real(self, value: Any) -> Any:
        """Return a fake tensor, which torch pickles as its `TensorMeta` in JSON, as a tensor without data."""
        if not (isinstance(value, Opaque) and value.name == "_reconstruct_fake_tensor" and value.args):
            return value
        data = value.args[0]
        about = _parsed(data, self.file.where) if isinstance(data, bytes) else None
        return value if about is None or _is_symbolic(about) else self._tensor("a pickle", "a tensor", about, "", 0)

    def _wrong(self, config: str, name: str, entry: Any) -> CorruptError:
        line = f"{self.file.where}: {config} describes {short(name)} as {short(entry)}"
        return CorruptError(f"{line}: the file is damaged, or of a version of torch that lazyckpt does not know")

    def _json(self, name: str) -> dict[str, Any]:
        found = _parsed(self._bytes(name), f"{self.file.where} ({name})")
        if not isinstance(found, dict):
            raise CorruptError(f"{self.file.where}: {name} is no JSON object: the file is damaged")
        return found

    def _bytes(self, name: str) -> bytes:
        record = self.records[name]
        data = self.file.at(record.offset - self.file.start, record.nbytes)
        if record.crc and zlib.crc32(data) != record.crc:
            raise CorruptError(f"{self.file.where}: {name} fails its checksum: the file is damaged, copy it again")
        return data

    def index(self) -> Index:
        """Return what was found."""
        path = self.file.path
        if not any(self._states.values()) and not (self.models() or _PROGRAM in self.records):
            why = self._problems[0] if self._problems else f"{path}: it has neither an exported program nor weights"
            raise FormatError(f"{self.file.where} holds no tensors that can be read without running it. {why}")
        stored, aliases = {**self._states["weights"]}, ties(self._held)
        states: dict[str, dict[str, TensorSpec]] = {
            "weights": {name: spec for name, spec in stored.items() if name not in aliases}
        }
        for state in ("constants", "compiled"):
            specs = self._states[state]
            stored |= {f"{state}/{name}": replace(spec, name=f"{state}/{name}") for name, spec in specs.items()}
            if specs:
                states[state] = {name: replace(spec, stored_as=f"{state}/{name}") for name, spec in specs.items()}
        stored |= {name: replace(spec, name=name) for name, spec in self._inner.items()}
        meta = {**self._meta, "records": [name for name in self.records if not name.startswith(_WEIGHTS)]}
        if self._attributes:
            meta[free(ATTRIBUTES, meta)] = self._attributes
        line = f"{path}: it is a program of torch.export. Its tensors are read; its code is neither loaded nor run"
        return Index(
            format="torch-export",
            states=states,
            files={path: self.file.info},
            stored=stored,
            aliases=aliases,
            meta=meta,
            problems=(Problem("unread-program", line, path), *self._problems),
        )


def _records(file: StoreFile) -> dict[str, Record]:
    """Return the records of a zip by name, without the folder that torch puts all of them in. Raises CorruptError for
    names that torch could take for one another, because it ignores case; FormatError for a packed record."""
    found = read_zip(file)
    entries = sorted(found.entries, key=lambda entry: entry.header)
    if not entries:
        raise CorruptError(f"{file.where}: an empty zip")
    names = [entry.name for entry in entries]
    folder = names[0].partition("/")[0] + "/" if "/" in names[0] else ""
    for entry in entries:
        if entry.method != STORED or entry.flags & ENCRYPTED:
            raise FormatError(
                f"{file.where}: the record {short(entry.name)} is packed or encrypted, which torch.export.save never "
                "does: another tool wrote it. Unpack it and pack it again without compression (zip -0)"
            )
    if len({name.lower() for name in names}) < len(names) or not all(name.startswith(folder) for name in names):
        raise CorruptError(
            f"{file.where}: it has records that torch does not write, outside of its folder or with names that differ "
            "only in the case of letters: the file is damaged or hostile"
        )
    offsets = data_offsets_of_few(file, found.start, entries)
    return {
        entry.name[len(folder) :]: Record(file.start + at, entry.nbytes, entry.crc or (None if entry.nbytes else 0))
        for entry, at in zip(entries, offsets, strict=True)
    }


def _parsed(data: bytes, where: str) -> Any:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where}: it is no JSON ({e!s:.100}): the file is damaged") from None
    check_levels(where, found)
    return found


def _dtype(about: Any) -> DType | None:
    number = about.get("dtype") if isinstance(about, dict) else None
    return FROM_NAME.get(_DTYPES.get(number, "")) if type(number) is int else None


def _number(value: Any) -> Any:
    """Return the number of a `SymInt`."""
    return value.get("as_int") if isinstance(value, dict) else value


def _numbers(values: Any) -> Any:
    return [_number(value) for value in values] if isinstance(values, list) else values


def _is_symbolic(about: Any) -> bool:
    """Return whether a `TensorMeta` has a size, stride or offset that is an expression."""
    if not isinstance(about, dict):
        return False
    numbers = [*_list(about.get("sizes")), *_list(about.get("strides")), about.get("storage_offset")]
    return any(isinstance(number, dict) and "as_expr" in number for number in numbers)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


READER = Reader(
    "torch-export", "torch.export.save (.pt2) and AOTInductor: weights, never the program", _recognises, _read
)
