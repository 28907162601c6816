"""Hugging Face folders: shards with an index, or one file, and config.json.

Writer: transformers/modeling_utils.py `save_pretrained`, huggingface_hub `split_torch_state_dict_into_shards`. Tied
weights are not stored; their names follow from the architecture in config.json (hf_ties.json).
"""

from __future__ import annotations

import functools
import json
import pkgutil
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.columns import ExtentSpecs
from ..core.index import FileInfo, Index
from ..core.names import natural
from ..core.specs import Gathered, Specs, TensorSpec, some_of
from ..errors import CorruptError, FormatError, LazyckptError, Problem, cannot_read, only_one, some
from ..io.containers.pickle.plain import Plain
from ..io.containers.safetensors import is_safetensors, read_safetensors
from ..io.containers.torch_file import is_torch_file, read_torch_file
from ..io.limits import LEVELS, check_levels
from ..io.storage.base import Store
from ..layouts.tables import pattern
from .reader import Reader, Source
from .shared.announce import announce, listing
from .shared.composites import composed, tied_wholes, wholes_of
from .shared.paths import inside
from .slime import is_delta, read_version
from .torch_save import specs_of, ties, warnings

_MAX_JSON = 256 << 20  # maximum size of a JSON file, in bytes
_BROKEN = 100  # maximum number of unreadable files that get a problem of their own
# in transformers' order of preference
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_CUT_BIN = re.compile(r"(?:ft-|pytorch_)?model-\d+-of-\d+\.bin")  # torchtune writes no index unless it converts
# A shard of a model: its number and their count, or its rank.
_SHARD = re.compile(
    r"(?P<before>.*?)(?:\d{1,6}(?P<behind>-of-(?P<of>\d{1,6})\..*)|(?<![A-Za-z])rank[-_.]?\d{1,7}(?P<rest>\D*))"
)
_HEAD = "lm_head.weight"
_JSON = ("config.json", "generation_config.json", "adapter_config.json", "trainer_state.json", "params.json")


class Shard(NamedTuple):
    """The tensors of one file, in either container format. ``wholes`` are the dense tensors of sparse ones, ``parts``
    the names of the tensors that these consist of. ``pieces`` maps names of tensors to that of the one that they stand
    for: the tensors in a nested one, and the parts of one whose meaning is not known."""

    info: FileInfo
    specs: Specs
    aliases: dict[str, str]
    meta: dict[str, Any]
    problems: list[Problem]
    wholes: Mapping[str, TensorSpec] = MappingProxyType({})
    parts: Collection[str] = ()
    pieces: Mapping[str, str] = MappingProxyType({})


def read_shard(store: Store, path: str) -> Shard:
    """Index one shard in the container format of its name's ending or, if that fails, of its first bytes.

    Raises the errors of the container format."""
    named = path.lower().endswith(".safetensors")
    try:
        return _read_shard(store, path, named)
    except (CorruptError, FormatError):
        source = Source(store, path)
        found = not is_torch_file(source.head) and is_safetensors(source.head, source.size)
        if found == named or not (found or is_torch_file(source.head)):
            raise
        shard = _read_shard(store, path, found)
        kinds = ("a safetensors file", "a file of torch.save")
        line = f"{path} is {kinds[named]}, not {kinds[not named]} as its name says"
        shard.problems.append(Problem("misnamed-file", line, path))
        return shard


def _read_shard(store: Store, path: str, is_safe: bool) -> Shard:
    if is_safe:
        file = read_safetensors(store, path)
        specs = ExtentSpecs(file.extents)
        return Shard(file.info, specs, file.aliases, dict(file.metadata), [note.prefixed(path) for note in file.notes])
    torch_file = read_torch_file(store, path)
    compose = partial(composed, store, torch_file)
    plain = Plain(torch_file.root, path, torch_file.pickle_size, compose=compose)
    found = specs_of(torch_file, plain)
    same = ties(plain.tensors)
    parts = {*plain.parts, *plain.inner}
    same = {a: o for a, o in same.items() if a not in parts} | tied_wholes(plain, same)
    meta = plain.meta if isinstance(plain.meta, dict) else {}
    meta.pop("_metadata", None)
    problems = warnings(path, torch_file, plain)
    return Shard(torch_file.info, found, same, meta, problems, wholes_of(plain, found, ""), parts, plain.pieces)


def has_weights(names: Collection[str]) -> bool:
    """Return whether a folder has a model's usual files, from its listing."""
    return any(name in names for name in (*_INDEXES, *_SINGLES))


def read(source: Source) -> Index:
    """Index a Hugging Face folder.

    Raises FormatError for a name that two files hold, and the errors of the files' container formats."""
    store = source.store
    index_path = source.path if source.path.endswith(".json") else _find(source)
    meta: dict[str, Any] = {}
    problems: list[Problem] = []
    weight_map: dict[str, str] | None = None
    beside = listing(store)
    announce(store, [n for n in (index_path, *_JSON) if n in beside and n.endswith(".json")])
    if index_path.endswith(".json"):
        table = load_json(store, index_path)
        if is_delta(table):
            return read_version(source, index_path, table)
        weight_map = _weight_map(f"{store.root}/{index_path}", table)
        meta["index"] = table.get("metadata", {})
        paths = sorted(set(weight_map.values()), key=natural)  # shards follow the order of the state dict
    else:
        paths = [index_path] if index_path else _loose(source)
        if not paths:
            raise FormatError(
                f"{source.where} has no weights under the names of Hugging Face (model.safetensors, "
                "pytorch_model.bin, ...), nor an index of them. Open it without format= to let lazyckpt look for others"
            )
        problems += _without_index(paths)

    shards, broken = _shards(store, paths)
    if not shards:
        raise next(iter(broken.values()))
    problems += [p for shard in shards.values() for p in shard.problems]
    stored, twice = _union(shards)
    held = _composed(stored, shards, twice)
    weight_map = _by_piece(weight_map, shards)
    unreadable = _lost(weight_map, held, broken, problems)
    for name, path in twice.items():
        raise FormatError(
            f"{source.where}: {name!r} is in {path} and another file, and no index says which is "
            "meant: open one of the files"
        )
    lost_in: dict[str, list[str]] = {}
    for name, path in (weight_map or {}).items() if broken else ():
        if path in broken:
            lost_in.setdefault(path, []).append(name)
    for path, error in islice(broken.items(), _BROKEN):
        lost = lost_in.get(path, [])
        problems.append(cannot_read(path, error, f", nor its {len(lost):,} tensors ({some(lost)})"))
    if len(broken) > _BROKEN:
        more = list(broken)[_BROKEN:]
        line = f"{len(more):,} more files cannot be read, nor their tensors: {some(more)}"
        problems.append(Problem("unreadable-file", line, only_one(more)))
    if weight_map is not None:
        extra = [] if held.keys() <= weight_map.keys() else [n for n in held if n not in weight_map]
        if extra:
            line = f"the index does not list {len(extra):,} tensors that the files hold: {some(extra)} (in view.stored)"
            problems.append(Problem("index-mismatch", line, index_path))
    weights = held if weight_map is None or not extra else some_of(held, weight_map.__contains__)

    meta |= configs(store, problems)
    aliases = {a: o for shard in shards.values() for a, o in shard.aliases.items() if o in weights}
    aliases |= tied_names(meta.get("config", {}), weights, problems)
    for path, shard in shards.items():
        if shard.meta and shard.meta != {"format": "pt"}:
            meta[path] = shard.meta
    files = {path: shard.info for path, shard in shards.items()}
    if index_path.endswith(".json"):
        files[index_path] = store.stat(index_path)
    return Index(
        format="huggingface",
        states={"weights": some_of(weights, lambda n: n not in aliases) if aliases else weights},
        files=files,
        stored=stored,
        aliases=aliases,
        meta=meta,
        problems=tuple(problems),
        unreadable=unreadable,
    )


def configs(store: Store, problems: list[Problem]) -> dict[str, Any]:
    """Read the JSON files beside the weights: name without ".json" -> object."""
    found: dict[str, Any] = {}
    beside = listing(store)
    announce(store, [name for name in _JSON if name in beside])
    for name in _JSON:
        if name in beside:
            try:
                found[name.removesuffix(".json")] = load_json(store, name)
            except LazyckptError as e:  # the weights can be read without it
                problems.append(cannot_read(name, e))
    return found


def _shards(store: Store, paths: list[str]) -> tuple[dict[str, Shard], dict[str, LazyckptError]]:
    shards: dict[str, Shard] = {}
    broken: dict[str, LazyckptError] = {}
    announce(store, paths)
    for path in paths:
        try:
            shards[path] = read_shard(store, path)
        except LazyckptError as e:
            broken[path] = e
    return shards, broken


def _union(shards: Mapping[str, Shard]) -> tuple[Specs, dict[str, str]]:
    """Merge the tensors of all shards; return the tensors, and the names that several files hold with the first file of
    each."""
    if len(shards) == 1:
        return next(iter(shards.values())).specs, {}
    table: dict[str, Specs] = {}
    twice: dict[str, str] = {}
    for shard in shards.values():
        if table.keys().isdisjoint(shard.specs.table):
            table.update(dict.fromkeys(shard.specs.table, shard.specs))
            continue
        for name in shard.specs:
            if table.setdefault(name, shard.specs) is not shard.specs:
                twice[name] = next(path for path, one in shards.items() if one.specs is table[name])
    return Gathered(table), twice


def _composed(
    stored: Mapping[str, TensorSpec], shards: Mapping[str, Shard], twice: dict[str, str]
) -> Mapping[str, TensorSpec]:
    """Return the tensors of the model: sparse tensors as dense ones, and no parts. A sparse tensor is where its first
    part is. Add those that another file also holds to ``twice``, with the file of the sparse one."""
    parts = {name for shard in shards.values() for name in shard.parts}
    if not parts:
        return stored
    wholes = {name: spec for shard in shards.values() for name, spec in shard.wholes.items()}
    twice |= {n: path for path, shard in shards.items() for n in shard.wholes if n in stored and n not in parts}
    found: dict[str, TensorSpec] = {}
    for name in stored:
        if name not in parts:
            found[name] = stored[name]
        elif (whole := name.rpartition(".")[0]) in wholes:
            found.setdefault(whole, wholes.pop(whole))
    return found | wholes


def _by_piece(weight_map: dict[str, str] | None, shards: Mapping[str, Shard]) -> dict[str, str] | None:
    """Return an index with the names of the tensors that stand for one that it lists."""
    pieces = {piece: name for shard in shards.values() for piece, name in shard.pieces.items()}
    if weight_map is None or not pieces:
        return weight_map
    listed = {piece: weight_map[name] for piece, name in pieces.items() if name in weight_map}
    gone = {pieces[piece] for piece in listed}
    return {name: path for name, path in weight_map.items() if name not in gone} | listed


def _lost(
    weight_map: Mapping[str, str] | None,
    stored: Mapping[str, TensorSpec],
    broken: Mapping[str, LazyckptError],
    problems: list[Problem],
) -> dict[str, str]:
    """Return the names in the index that no readable file holds, each with the reason."""
    lost: dict[str, str] = {}
    nowhere: list[str] = []
    if weight_map is None or weight_map.keys() <= stored.keys():
        return lost
    for name, path in weight_map.items():
        if name in stored:
            continue
        if path in broken:
            lost[name] = f"{name!r} is in {path}, which cannot be read: {broken[path]}"
        else:
            lost[name] = f"{name!r} should be in {path}, as the index says, but that file does not hold it"
            nowhere.append(name)
    if nowhere:
        line = f"the index lists {len(nowhere):,} tensors that no file holds: {some(nowhere)}"
        problems.append(Problem("index-mismatch", line, only_one(nowhere)))
    return lost


@functools.cache
def _ties() -> dict[str, Any]:
    """Load the table that tools/make_hf_ties.py writes."""
    table: dict[str, Any] = json.loads(pkgutil.get_data(__package__, "hf_ties.json") or b"")
    return table


def tied_names(config: Any, weights: Mapping[str, TensorSpec], problems: list[Problem]) -> dict[str, str]:
    """Return the tied names of the model that the files do not store: alias -> owner."""
    if not _ties_names(config):
        return {}
    pairs, known = _pairs(config)
    if known:
        aliases = {a: o for a, o in pairs.items() if a not in weights and o in weights}
        if aliases or any(a in weights for a in pairs):
            return aliases
    names = _architectures(config)
    if names and not any(re.search("LM|Generation", name) for name in names):
        return {}  # a model without a language model's head has nothing to tie
    embeddings = _embeddings(weights)
    if _HEAD in weights or len(embeddings) != 1:
        return {}
    line = (
        f"{_HEAD!r} is not stored and config.json ties the word embeddings: taken to be {embeddings[0]!r}, "
        f"without knowing the architecture ({config.get('architectures')})"
    )
    problems.append(Problem("assumed-tie", line, _HEAD))
    return {_HEAD: embeddings[0]}


def ties_of(config: Any, weights: Collection[str]) -> dict[str, str]:
    """Return which of the names a model of this config.json ties to others, and so would not store: alias -> owner."""
    if not _ties_names(config):
        return {}
    pairs, known = _pairs(config)
    if not known:
        embeddings = _embeddings(weights)
        pairs = {_HEAD: embeddings[0]} if len(embeddings) == 1 else {}
    return {a: o for a, o in pairs.items() if a in weights and o in weights}


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [a for a in named if isinstance(a, str)] if isinstance(named, list) else []


def _known(config: Mapping[str, Any]) -> list[Any] | None:
    """Return the table's entry for the architecture: [key of the map of names, whether it ties by default]."""
    table = _ties()["architectures"]
    return next((table[a] for a in _architectures(config) if a in table), None)


def _ties_names(config: Any) -> bool:
    if not isinstance(config, dict) or not config:
        return False
    known = _known(config)
    default = known[1] if known else False
    inner = config.get("text_config")
    default = inner.get("tie_word_embeddings", default) if isinstance(inner, dict) else default
    return bool(config.get("tie_word_embeddings", default))


def _pairs(config: Mapping[str, Any]) -> tuple[Mapping[str, str], bool]:
    """Return the architecture's ties (alias -> owner), and whether the architecture is known."""
    known = _known(config)
    return (_ties()["maps"][known[0]], True) if known else ({}, False)


def _embeddings(names: Iterable[str]) -> list[str]:
    return [n for n in names if pattern("model.embedding").search(n)]


def _find(source: Source) -> str:
    """Return the path of the index or of the single file of weights; "" if there are only loose files."""
    names = source.entries
    for wanted in (_INDEXES[0], _SINGLES[0], _INDEXES[1], *_SINGLES[1:]):
        if wanted in names:
            return wanted
    indexes = sorted(n for n in names if n.endswith((".safetensors.index.json", ".bin.index.json")) or ".index." in n)
    if indexes:  # a variant (model.safetensors.index.fp16.json) or another stem (diffusion_pytorch_model...)
        return indexes[0]
    return ""


def _loose(source: Source) -> list[str]:
    """Return the weight files of a folder without an index: a single file, or shards of one model by their names."""
    files = [n for n, e in source.entries.items() if not e.is_dir]
    found = [n for n in files if n.lower().endswith(".safetensors")] or list(filter(_CUT_BIN.fullmatch, files))
    if len(found) > 1 and len({_series(name) for name in found}) > 1:
        return []
    return sorted(found, key=natural) if len(found) < 2 or _series(found[0]) else []


def _series(name: str) -> tuple[str, str] | None:
    """Return the common part of the names of all shards of one model; None if the name is not that of a shard."""
    match = _SHARD.fullmatch(name)
    return (match["before"], match["behind"] or match["rest"]) if match else None


def _without_index(paths: list[str]) -> list[Problem]:
    """Return the problems of files without an index."""
    problems = []
    if len(paths) > 1:
        line = f"{len(paths):,} files without an index: taken as the shards of one model, as their names say"
        problems.append(Problem("missing-index", line))
    match = _SHARD.fullmatch(paths[0])
    lost = int(match["of"]) - len(paths) if match and match["of"] else 0
    if lost > 0:
        line = f"{lost:,} of the {lost + len(paths):,} files that the names count are not here: tensors are missing"
        problems.append(Problem("missing-file", line))
    return problems


def load_json(store: Store, path: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CorruptError or MissingFileError."""
    where = f"{store.root}/{path}"
    size = store.stat(path).size
    if size > _MAX_JSON:
        raise CorruptError(f"{where}: {size:,} bytes of JSON is more than an index can need")
    try:
        data = bytes(store.read(path, 0, size))
        table = json.loads(data.decode("utf-8")) if size else None
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where} is not valid JSON ({str(e)[:120]}): the file is damaged") from None
    if not isinstance(table, dict):
        raise CorruptError(f"{where} is not a JSON object: the file is {'empty' if not size else 'damaged'}")
    if data.count(b"{") + data.count(b"[") > LEVELS:
        check_levels(where, table)
    return table


def _weight_map(where: str, table: Mapping[str, Any]) -> dict[str, str]:
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError(f"{where} has no weight_map: it is no index of shards")
    normal: dict[str, str] = {}  # path -> normalised path; half a million names have a thousand paths
    found: dict[str, str] = {}
    for name, path in weight_map.items():
        if type(path) is not str or path not in normal:
            if not inside(path):
                raise CorruptError(
                    f"{where} maps {name!r} to {str(path)[:120]!r}, outside its folder: "
                    "not followed, the index is wrong or hostile"
                )
            normal[path] = posixpath.normpath(path)
        found[name] = normal[path]
    return found


def _recognises(source: Source) -> bool:
    if source.path:
        return ".index." in source.path and source.path.endswith(".json")
    return bool(_find(source) or _loose(source))


READER = Reader(
    "huggingface",
    "Hugging Face folders (model*.safetensors or pytorch_model*.bin, with or without an index)",
    _recognises,
    read,
)
