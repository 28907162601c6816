"""Readers of zarr hierarchies: lossless exports of lazyckpt, and any others.

An export describes itself completely (documents.py). In any other hierarchy every array is a tensor of the weights,
named by its path with dots, and attributes are in ``view.meta["attributes"]``. Opening reads the documents, or only the
root's document of a consolidated hierarchy; chunks are examined when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import itemgetter
from typing import Any

from ...core.index import FileInfo, Index
from ...core.placement import Mesh
from ...core.specs import TensorSpec
from ...errors import CorruptError, FormatError, MissingFileError, Problem, only_one, some
from ...io.plain_json import decode
from ...io.storage.base import Store
from ...io.storage.listed import Listed
from ..reader import Reader, Source
from .documents import ATTRIBUTE, JOB, PACKING, component, dimension_names
from .grid import Array, ChunkFiles, GridFragments, Place, spec_of
from .keys import Keys
from .listing import listed
from .metadata import array_v2, array_v3
from .packing import NoTensorError, unknown_codecs
from .packs import Members, PackedSpecs, members
from .tree import ROOTS, Folder, Nodes, Tree, Zip, is_zip_of_zarr, nodes

_ALONE = "array"  # name of the tensor if the hierarchy is a single array
_DIMENSION = re.compile(r"d\d+(?:_\d+)?")
_LOOKED_INTO = 64  # maximum number of subfolders that are examined in a folder without a document


def _read(source: Source) -> Index:
    tree: Tree = Zip(source.store, source.path) if is_zip_of_zarr(source.path, source.head) else Folder(source.store)
    found = nodes(tree)
    if isinstance(tree, Zip) and not (found.root or found.arrays or found.attributes or found.damaged):
        raise FormatError(
            f"{source.where} is a zip file of {_named(tree.names)}, and no Zarr hierarchy. Unpack it, and open the "
            "checkpoint in it"
        )
    top = found.attributes.get("", {})
    about: dict[str, Any] = top[ATTRIBUTE] if _is_export(top) else {}
    own = bool(about)
    several = [path for path, attributes in found.attributes.items() if path and _is_export(attributes)]
    if several and not found.root:
        raise FormatError(
            f"{source.where} holds exports of lazyckpt: {some(several)}. Open one of them, or all as a run "
            "(lazyckpt.open_run)"
        )
    exported = JOB in source.entries or any(ATTRIBUTE in attributes for _, _, attributes, _ in found.arrays.values())
    if not own and exported and not found.root:
        raise MissingFileError(
            f"{source.where} is an export of lazyckpt without the root's zarr.json, which is written last: it was not "
            "finished. Run the same export again: it goes on where it stopped."
        )
    if own and found.damaged:
        raise CorruptError(next(iter(found.damaged.values())))
    problems: list[Problem] = []
    unreadable = {_name(path): why for path, why in found.damaged.items()}
    arrays = _arrays(tree, found, problems, None if own else unreadable)
    if unreadable and not arrays:
        raise CorruptError(next(iter(unreadable.values())))
    places: Mapping[str, Mapping[str, Place]] = tree.places(arrays) if isinstance(tree, Zip) else {}
    fragments = {
        path: GridFragments(array, path, own, tree.path, places.get(path))
        if isinstance(tree, Zip)
        else GridFragments(array, path, own, keys=_keys(source.store, path, array))
        for path, array in arrays.items()
    }
    files: Mapping[str, FileInfo] = tree.documents
    states: Listed | None = None
    if isinstance(tree, Folder):
        states = listed(source.store, tree.documents, fragments)
        files = ChunkFiles(source.store, tree.documents, states, list(fragments.values()))
    if own:
        where = tree.where("zarr.json")
        for path, array in arrays.items():
            _check_shape(array, found.arrays[path][1].get("dimension_names"), f"{where}: {path!r:.80}")
        return replace(_own_index(about, fragments, files, tree, problems), listed=states)
    return replace(_index(fragments, found, files, tree, problems, unreadable), listed=states)


def _keys(store: Store, path: str, array: Array) -> Keys:
    return Keys(store, path, array.prefix, array.separator, len(array.shape))


def _name(path: str) -> str:
    return path.replace("/", ".") or _ALONE


def _named(names: list[str]) -> str:
    return f"{len(names):,} files ({some(names, 4)})" if names else "no files"


def _is_export(attributes: Mapping[str, Any]) -> bool:
    own = attributes.get(ATTRIBUTE)
    return isinstance(own, dict) and "layout" in own


def _arrays(tree: Tree, found: Nodes, problems: list[Problem], unreadable: dict[str, str] | None) -> dict[str, Array]:
    """Return the arrays that are tensors, by path, and add problems for the others to ``problems``.

    Arrays with damaged documents are added to ``unreadable``; if that is None, CorruptError is raised."""
    arrays: dict[str, Array] = {}
    others: dict[str, list[str]] = {}
    for path, (version, about, attributes, document) in found.arrays.items():
        where = f"{tree.where(document)} ({path})" if path else tree.where(document)
        try:
            array = array_v3(about, where) if version == 3 else array_v2(about, where, attributes)
        except NoTensorError as e:
            others.setdefault(f"not in the view because of their {e.kind}", []).append(path)
            continue
        except CorruptError as e:
            if unreadable is None:
                raise
            unreadable[_name(path)] = str(e)
            continue
        for codec in unknown_codecs(array.packing):
            others.setdefault(f"cannot be read, because lazyckpt lacks their codec {codec!r:.60}", []).append(path)
        arrays[path] = array
    problems += [
        Problem("unsupported-tensor", f"{_count(paths)} {reason}: {some(paths)}", only_one(paths))
        for reason, paths in others.items()
    ]
    return arrays


def _count(paths: list[str]) -> str:
    return f"{len(paths):,} {'arrays are' if len(paths) > 1 else 'array is'}"


def _index(
    fragments: Mapping[str, GridFragments],
    found: Nodes,
    files: Mapping[str, FileInfo],
    tree: Tree,
    problems: list[Problem],
    unreadable: Mapping[str, str],
) -> Index:
    """Return the index of a hierarchy that lazyckpt did not write."""
    tensors: dict[str, TensorSpec] = {}
    for path, grid in fragments.items():
        name = _name(path)
        if name in tensors:
            line = f"two arrays would be called {name!r}: one is {path!r}"
            problems.append(Problem("duplicate-tensor", line, path))
            name = path
        tensors[name] = spec_of(name, grid)
    attributes = found.attributes | {path: attributes for path, (_, _, attributes, _) in found.arrays.items()}
    meta = {"attributes": {path: value for path, value in attributes.items() if value}}
    return Index(
        format="zarr",
        states={"weights": tensors},
        files=files,
        stored=tensors,
        meta=meta if meta["attributes"] else {},
        problems=(*problems, *(Problem("unreadable-file", why, name) for name, why in unreadable.items())),
        unreadable=unreadable,
        watched=tree.documents,
    )


def _own_index(
    about: Mapping[str, Any],
    fragments: Mapping[str, GridFragments],
    files: Mapping[str, FileInfo],
    tree: Tree,
    problems: list[Problem],
) -> Index:
    """Return the index of an export, which restores the exported view."""
    where = tree.where("zarr.json")
    if type(about["layout"]) is not int or about["layout"] > PACKING:
        raise FormatError(
            f"{where}: an export of layout {about['layout']!r:.20}, this version of lazyckpt reads up to {PACKING}: "
            "use a later one"
        )
    origin, first, listed = about.get("format"), about.get("state"), about.get("states")
    aliases, degrees, notes = about.get("aliases") or {}, about.get("mesh") or {}, about.get("problems") or []
    try:
        mesh = Mesh(**degrees)
        valid = isinstance(origin, str) and isinstance(first, str) and isinstance(listed, list) and first in listed
        texts = (*(listed or ()), *aliases.keys(), *aliases.values(), *notes)
        valid = valid and all(isinstance(text, str) for text in texts)
    except (TypeError, AttributeError):
        valid = False
    if not valid or any(type(n) is not int or n < 1 for n in (mesh.tp, mesh.pp, mesh.dp, mesh.ep)):
        raise CorruptError(f"{where}: its attributes do not describe an export of lazyckpt: damaged")
    rule = f"exported from a checkpoint of the format {origin}"
    # an export of `view.stored` has only raw names, and "stored" cannot be the name of a state of the opened view
    called = {
        state: "weights" if listed == ["stored"] else state for state in dict.fromkeys([str(first), *(listed or ())])
    }
    groups = {component(group): state for group, state in called.items()}
    in_order = sorted(fragments.items(), key=lambda item: _order(item[1]))
    stored = {path: spec_of(path, grid, rule) for path, grid in in_order}
    states = _states(stored, fragments, groups, list(called.values()), rule, where)
    lost = [owner for owner in aliases.values() if not any(owner in table for table in states.values())]
    if lost:
        raise CorruptError(f"{where}: names are tied to {lost[0]!r:.80}, which is no array: damaged")
    try:
        meta = decode(about.get("meta") or {})
    except Exception as e:  # numpy and others raise various errors for invalid texts
        raise CorruptError(f"{where}: its meta is damaged ({e!s:.120})") from e
    if not isinstance(meta, dict):
        raise CorruptError(f"{where}: its meta is no dict: damaged")
    return Index(
        format="zarr",
        states=states,
        files=files,
        stored=stored,
        aliases=aliases,
        meta=meta,
        mesh=mesh,
        problems=(*(Problem("noted-at-export", f"when it was exported: {line}") for line in notes), *problems),
        watched=tree.documents,
    )


def _check_shape(array: Array, named: Any, where: str) -> None:
    """Check a shape against the names of its dimensions, which contain their sizes unless somebody renamed them."""
    ours = isinstance(named, list) and all(isinstance(name, str) and _DIMENSION.fullmatch(name) for name in named)
    if ours and named != dimension_names(array.shape):
        raise CorruptError(f"{where} has the shape {list(array.shape)}, but its dimensions are called {named}: damaged")


def _order(grid: GridFragments) -> int:
    """Return the position of an array in the exported view."""
    own = (grid.array.attributes or {}).get(ATTRIBUTE)
    order = own.get("order") if isinstance(own, dict) else None
    return order if type(order) is int else 0


def _states(
    stored: Mapping[str, TensorSpec],
    fragments: Mapping[str, GridFragments],
    groups: Mapping[str, str],
    states: Sequence[str],
    rule: str,
    where: str,
) -> dict[str, Mapping[str, TensorSpec]]:
    """Return the tensors of an export by state and name, in the order of the view that was written."""
    found: dict[str, list[tuple[int, str, TensorSpec | tuple[int, int]]]] = {state: [] for state in states}
    packs: list[tuple[TensorSpec, Members]] = []
    for path, spec in stored.items():
        own = (fragments[path].array.attributes or {}).get(ATTRIBUTE)
        own = own if isinstance(own, dict) else {}
        state, name = groups.get(path.split("/")[0]), own.get("name")
        if not isinstance(name, str) or state is None:
            raise CorruptError(f"{where}: the array {path!r:.80} has no name of its own in a state: damaged")
        if "packed" not in own:
            found[state].append((_order(fragments[path]), name, spec_of(name, fragments[path], rule)))
            continue
        if len(spec.shape) != 1:
            raise CorruptError(f"{where}: the array {path!r:.80} of packed tensors has {len(spec.shape)} dimensions")
        listed = members(own["packed"], spec.numel, spec.dtype.itemsize, f"{where}: {path!r:.80}")
        numbers = zip(repeat(len(packs)), range(len(listed.names)), strict=False)
        found[state] += zip(listed.order, listed.names, numbers, strict=True)
        packs.append((spec, listed))
    tables: dict[str, Mapping[str, TensorSpec]] = {}
    for state, entries in found.items():
        table = {name: entry for _, name, entry in sorted(entries, key=itemgetter(0))}
        if len(table) < len(entries):
            raise CorruptError(f"{where}: two arrays of the state {state!r:.80} have the same name: damaged")
        if packs:
            tables[state] = PackedSpecs(table, packs, rule)
        else:
            tables[state] = {name: entry for name, entry in table.items() if isinstance(entry, TensorSpec)}
    return tables


def _recognises(source: Source) -> bool:
    if source.path:
        return source.path in ROOTS or is_zip_of_zarr(source.path, source.head)
    return any(root in source.entries for root in ROOTS)


def _recognises_folder(source: Source) -> bool:
    if JOB in source.entries:
        return True
    folders = [name for name, entry in source.entries.items() if entry.is_dir][:_LOOKED_INTO]
    return not source.path and any(
        any(root in listed for root in ROOTS) for listed in (source.inside(folder) for folder in folders)
    )


READER = Reader(
    "zarr", "zarr hierarchies, v2 and v3 (zarr.json, .zgroup or .zarray), folders and zips", _recognises, _read
)
FOLDER = Reader("zarr-arrays", "folders of zarr arrays without a group", _recognises_folder, _read)
