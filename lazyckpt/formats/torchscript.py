"""Files of TorchScript (torch.jit.save): the tensors of their modules, and the constants of their code.

Writer: torch/csrc/jit/serialization/export_module.cpp (`ScriptModuleSerializer`). ``data.pkl`` has the tree of modules,
whose storages are the records below ``data/``; ``constants.pkl`` has the constants of the code, with storages below
``constants/``. The declaration of a class in ``code/`` lists its parameters and buffers
(torch/csrc/jit/serialization/python_print.cpp). These lines are compared as text: nothing is compiled or run.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.index import Index
from ..core.specs import TensorSpec
from ..errors import CorruptError, Problem
from ..io.containers.pickle.machine import Pickle
from ..io.containers.pickle.plain import Path, Plain
from ..io.containers.pickle.rebuild import REBUILD, persistent_storage
from ..io.containers.pickle.records import Opaque
from ..io.containers.torch_file import TorchFile
from ..io.containers.zip import ZIP_MAGIC
from ..io.containers.zip_directory import Record, read_members
from ..io.limits import Budget
from ..io.storage.streams import StoreFile
from .reader import Reader, Source
from .torch_save import READER as TORCH
from .torch_save import specs_of, ties, warnings

_ROOT = "__torch__"
_CLASS = re.compile(r"^class (\w+)\(Module\):\n((?:  __\w+__ = .*\n)*)", re.MULTILINE)
_LISTS = re.compile(r"^  __(parameters|buffers)__ = \[(.*)\]$", re.MULTILINE)
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DEEP = 100  # tuples in each other
# What `_ConvNd.__getstate__` returns (torch/ao/nn/quantized/modules/conv.py), by length and position.
_CONV = {10: "weight", 11: "bias"}
_CONV_STATE = 15


def _recognises(source: Source) -> bool:
    head = source.head
    if not source.path or not head.startswith(ZIP_MAGIC):
        return False
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    inner = name.partition(b"/")[2]  # torch.save writes data.pkl first
    if inner.startswith(b"data/"):
        return inner[5:].isdigit()
    return inner.startswith((b"extra/", b"code/")) or (inner == b"data.pkl" and b"\x80\x02c__torch__" in head)


def _read(source: Source) -> Index:
    file = StoreFile(source.store, source.path)
    members, packed = read_members(file)
    if "constants.pkl" not in members or "data.pkl" not in members or "archive_format" in members:
        return TORCH.read(source)
    order = _bytes(file, members, "byteorder") if "byteorder" in members else b"little"
    if order not in (b"little", b"big"):
        raise CorruptError(f"{file.where}: its byteorder record says {order[:20]!r}")
    swapped = order == b"big"
    main = _part(file, members, "data", swapped)
    constants = _part(file, members, "constants", swapped)
    tree = _Modules(_declared(file, members, packed), f"{file.where} (data.pkl)")
    plain = Plain(tree.plain(main.root), file.where, main.pickle_size)
    specs = specs_of(main, plain)
    inner = set(plain.inner)  # the scales of quantized tensors
    weights = [name for name in specs if name not in inner and tree.is_weight(plain.paths[name])]
    others = inner.union(weights)
    aliases = ties({name: plain.tensors[name] for name in weights})
    fixed = Plain(list(_items(constants.root)), f"{file.where} (constants.pkl)", constants.pickle_size)
    stored = dict(specs) | {
        f"constants/{name}": replace(spec, name=f"constants/{name}")
        for name, spec in specs_of(constants, fixed).items()
    }
    states: dict[str, dict[str, TensorSpec]] = {
        "weights": {name: specs[name] for name in weights if name not in aliases},
        "attributes": {name: spec for name, spec in specs.items() if name not in others},
        "constants": {
            name: replace(spec, stored_as=f"constants/{name}") for name, spec in specs_of(constants, fixed).items()
        },
    }
    code = sorted(name for name in (*members, *packed) if name.startswith("code/"))
    line = f"{file.path}: it is a program of TorchScript. Its tensors are read; its code is neither compiled nor run"
    return Index(
        format="torchscript",
        states={name: state for name, state in states.items() if state or name == "weights"},
        files={file.path: file.info},
        stored=stored,
        aliases=aliases,
        meta={"attributes": plain.meta, "code": code, "constants": fixed.rest},
        problems=(
            Problem("unread-program", line, file.path),
            *warnings(file.path, main, plain),
            *warnings(file.path, constants, fixed),
        ),
    )


def _items(root: Any) -> tuple[Any, ...]:
    return root if isinstance(root, tuple) else (root,)


def _bytes(file: StoreFile, members: Mapping[str, Record], name: str) -> bytes:
    record = members[name]
    data = file.at(record.offset - file.start, record.nbytes)
    if record.crc and zlib.crc32(data) != record.crc:
        raise CorruptError(f"{file.where}: {name} fails its checksum: the file is damaged, copy it again")
    return data


def _part(file: StoreFile, members: Mapping[str, Record], name: str, swapped: bool) -> TorchFile:
    data = _bytes(file, members, f"{name}.pkl")
    pickle = Pickle(data, f"{file.where} ({name}.pkl)", REBUILD, persistent_storage)
    if pickle.end != len(data):
        raise CorruptError(f"{file.where}: {name}.pkl has bytes behind the end of its pickle: the file is damaged")
    records = {key.removeprefix(f"{name}/"): record for key, record in members.items() if key.startswith(f"{name}/")}
    return TorchFile(file.path, file.info, pickle.value, records, pickle.globals, swapped, len(data))


def _declared(
    file: StoreFile, members: Mapping[str, Record], packed: Mapping[str, tuple[Record, int]]
) -> dict[str, frozenset[str] | None]:
    """Return the names of the parameters and buffers of each class; None if its buffers are not listed (torch before
    1.5), and all its tensors are in the state dict."""
    every = {**members, **{name: record for name, (record, _) in packed.items()}}
    names = [name for name in every if name.startswith("code/") and name.endswith(".py")]
    buffers = [np.empty(every[name].nbytes, np.uint8) for name in names]
    file.read_pieces([(every[n].offset - file.start, b.data) for n, b in zip(names, buffers, strict=True) if len(b)])
    budget = Budget(file.where, file.size)
    found: dict[str, frozenset[str] | None] = {}
    for name, buffer in zip(names, buffers, strict=True):
        data = buffer.tobytes()
        if name in packed:
            data = _unpacked(file.where, name, data, packed[name][1], budget)
        module = name[5:-3].replace("/", ".")
        for match in _CLASS.finditer(data.decode("utf-8", "replace")):
            lists = dict(_LISTS.findall(match[2]))
            own = frozenset(one for text in lists.values() for one in _NAME.findall(text))
            found[f"{module}.{match[1]}"] = own if "buffers" in lists else None
    return found


def _unpacked(where: str, name: str, data: bytes, size: int, budget: Budget) -> bytes:
    budget.inflated(size)
    try:
        text = zlib.decompressobj(-15).decompress(data, size + 1)
    except zlib.error as e:
        raise CorruptError(f"{where}: {name} cannot be unpacked ({e}): the file is damaged") from None
    if len(text) != size:
        raise CorruptError(f"{where}: {name} has another size than the directory says: the file is damaged")
    return text


class _Modules:
    """The tree of modules as dicts and lists, and which of its tensors are in the state dict."""

    def __init__(self, declared: Mapping[str, frozenset[str] | None], where: str) -> None:
        self._declared = declared
        self._where = where
        self._made: dict[int, Any] = {}  # by the id of the record
        self._kept: dict[int, frozenset[str] | None] = {}  # by the id of a module's dict
        self._packed: set[int] = set()  # ids of the states of objects that are no modules
        self._todo: list[tuple[Any, Any]] = []
        self._root: Any = None

    def plain(self, root: Any) -> Any:
        """Return the object with a dict for each module. Objects that are shared stay shared."""
        self._root = self._of(root, 0)
        while self._todo:
            value, made = self._todo.pop()
            if isinstance(value, dict):
                made.update((key, self._of(item, 0)) for key, item in value.items())
            else:
                made.extend(self._of(item, 0) for item in value)
        return self._root

    def _of(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple):
            if depth > _DEEP:
                raise CorruptError(f"{self._where}: tuples are nested deeper than {_DEEP} levels: damaged or hostile")
            if type(value) is not tuple:
                return value
            if id(value) not in self._made:  # a tuple may be in others, each of them twice
                self._made[id(value)] = tuple(self._of(item, depth + 1) for item in value)
            return self._made[id(value)]
        script = isinstance(value, Opaque) and value.module.split(".")[0] == _ROOT and value.args is not None
        if not script and type(value) not in (list, dict):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value) if script else self._later(value)
        return self._made[id(value)]

    def _later(self, value: Any) -> Any:
        made: Any = {} if isinstance(value, dict) else []
        self._todo.append((value, made))
        return made

    def _new(self, value: Opaque) -> Any:
        state, kind = value.state, f"{value.module}.{value.name}"
        if isinstance(state, dict):
            made = self._later(state)
            self._kept[id(made)] = self._declared.get(kind, frozenset())
            return made
        if not isinstance(state, tuple):
            return state
        if ".nn.quantized.modules.conv" in value.module and len(state) == _CONV_STATE:
            made = self._later({_CONV.get(n, str(n)): item for n, item in enumerate(state)})
            self._kept[id(made)] = None
            return made
        made = self._later(list(state))
        self._packed.add(id(made))
        return made

    def is_weight(self, path: Path) -> bool:
        """Return whether the tensor at a path is in the state dict, or in the packed parameters of a module."""
        node, kept = self._root, False
        for key in path:
            if id(node) in self._kept:
                own = self._kept[id(node)]
                kept = own is None or key in own
            try:
                node = node[key]
            except (KeyError, IndexError, TypeError):
                return kept
            kept = kept or id(node) in self._packed
        return kept


READER = Reader("torchscript", "TorchScript (torch.jit.save): tensors only, never the code", _recognises, _read)
