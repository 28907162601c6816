"""References: a zarr hierarchy whose chunks are the bytes of the rank files where they lie. Nothing is copied.

JSON holds the documents of zarr v3, parquet those of zarr v2: fsspec's reader of it (`LazyReferenceMapper`) looks for
".zarray". Sources: the kerchunk specification of references, version 1; fsspec/implementations/reference.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..core.box import Shape, hull
from ..core.dtypes import U8, U16
from ..core.plan import Copy
from ..core.references import Reference, reference_chunk, references
from ..errors import DataError, DestinationError, FormatError, LazyckptError
from ..formats.zarr import documents
from ..formats.zarr.documents import FOREIGN, NAMES, Contents, Part, contents
from ..io.reading.gather import planned
from ..io.storage.base import check
from ..io.storage.fsspec import is_url
from ..jobs.destination import appearing, check_apart, folder_appearing, local_path
from ..lazy import LazyArray

MOST = 64 << 20  # bytes of a chunk
_RECORDS = 10_000  # references in a parquet file
_BITS = {1: U8, 2: U16}


@dataclass(frozen=True, slots=True)
class _Referred:
    """A tensor that can be told as references: the name that the view has for it, its chunks, where they lie."""

    name: str
    tensor: LazyArray
    chunk: Shape
    copies: list[Copy]

    def references(self) -> Iterator[Reference]:
        """Where its chunks are: path is a URL."""
        for reference in references(self.copies, self.chunk):
            yield reference._replace(path=url_of(self.tensor.store.root, reference.path))


def to_virtual(view: Part[LazyArray], dest: Any, format: str | None, bits: bool) -> dict[str, str]:
    """`CheckpointView.to_virtual`."""
    form = format or _form(dest)
    if form not in _WRITERS:
        raise FormatError(f"references are written as {', '.join(_WRITERS)}, not as {form!r}")
    what = contents(view)
    referred, left_out = _referred(what)
    _check_sources(referred)
    what.about["left_out"] = left_out
    _WRITERS[form](what, referred, dest, bits)
    return left_out


def url_of(root: str, path: str) -> str:
    """A file of a store, as fsspec and others take it."""
    return f"{root}/{path}" if is_url(root) else f"file://{os.path.abspath(root)}/{path}"


def _form(dest: Any) -> str:
    if not isinstance(dest, str | os.PathLike):
        if type(dest).__module__.startswith("icechunk"):
            return "icechunk"
        raise FormatError(f"references are written to a path or to an Icechunk store, not to a {type(dest).__name__}")
    return "json" if Path(os.fspath(dest)).suffix == ".json" else "parquet"


def _referred(what: Contents[LazyArray]) -> tuple[dict[str, _Referred], dict[str, str]]:
    """Path -> a tensor that references can tell; path -> why another one cannot be told."""
    found: dict[str, _Referred] = {}
    left_out: dict[str, str] = {}
    for path, tensor in what.arrays.items():
        spec = tensor.spec
        try:
            if spec.dtype not in NAMES:
                raise DataError(f"zarr has no {spec.dtype}")
            copies = planned(tensor.store, spec, tuple(map(range, spec.shape)))
            found[path] = _Referred(what.names[path], tensor, reference_chunk(spec, copies, MOST), copies)
        except LazyckptError as e:
            left_out[path] = str(e)
    return found, left_out


def _check_sources(referred: Mapping[str, _Referred]) -> None:
    """Raise MissingFileError or ChangedFileError if a file is not what it was: its bytes may lie elsewhere now; and
    CorruptError for bytes that must not be used."""
    files = {(id(one.tensor.store), c.extent.path): one.tensor.store for one in referred.values() for c in one.copies}
    for (_, path), store in files.items():
        store.read(path, 0, 1)  # which compares
    for one in referred.values():
        for copy in one.copies:  # whoever follows the references does not
            extent = copy.extent
            if extent.within is None:
                size = extent.dtype.itemsize
                start, span = copy.start * size, hull(copy.shape, copy.strides) * size
                check(one.tensor.store, extent.path, extent.offset + start, span)


def _array(one: _Referred, bits: bool) -> documents.Json:
    dtype, shape = one.tensor.spec.dtype, tuple(one.tensor.shape)
    if bits and NAMES[dtype] in FOREIGN:
        return documents.array(one.name, shape, _BITS[dtype.itemsize], one.chunk, holds=NAMES[dtype])
    return documents.array(one.name, shape, dtype, one.chunk)


def _hierarchy(what: Contents[LazyArray], referred: Mapping[str, _Referred], bits: bool) -> dict[str, documents.Json]:
    nodes = documents.hierarchy({path: _array(one, bits) for path, one in referred.items()}, what.about, what.groups)
    if any(node.get("data_type") in FOREIGN for node in nodes.values()):
        # a reader that does not know one of them would not even open the others: let it look at each by itself
        del nodes[""]["consolidated_metadata"]
    return nodes


# -- JSON


def _write_json(what: Contents[LazyArray], referred: Mapping[str, _Referred], dest: Any, bits: bool) -> None:
    place = local_path(dest)
    nodes = _hierarchy(what, referred, bits)

    def items() -> Iterator[tuple[str, Any]]:
        for path, node in nodes.items():
            yield f"{path}/zarr.json".lstrip("/"), json.dumps(node)
        for path, one in referred.items():
            for reference in one.references():
                yield "/".join((path, "c", *map(str, reference.place))), list(reference[1:])

    with (
        appearing({place: 0}, lambda: _check(place, what)) as temporary,
        temporary[place].open("x", encoding="utf-8") as file,
    ):
        file.write('{"version": 1, "refs": {')
        for n, (key, value) in enumerate(items()):
            file.write(f"{',' if n else ''}\n{json.dumps(key)}: {json.dumps(value)}")
        file.write("\n}}\n")


def _check(place: Path, what: Contents[LazyArray]) -> None:
    check_apart(place, what.arrays.values())
    if os.path.lexists(place):
        raise DestinationError(f"{place} exists already: remove it or choose another place")


# -- parquet


def _write_parquet(what: Contents[LazyArray], referred: Mapping[str, _Referred], dest: Any, bits: bool) -> None:
    missing = [name for name in ("kerchunk", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise FormatError(f"references in parquet need {', '.join(missing)}: install that, or write to a .json")
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.reference import LazyReferenceMapper

    place = local_path(dest)
    nodes = _hierarchy(what, referred, bits)
    with folder_appearing(place, lambda: _check(place, what)) as folder:
        many = max((_count(node) for node in nodes.values() if node["node_type"] == "array"), default=1)
        out = LazyReferenceMapper.create(
            str(folder), fs=LocalFileSystem(), record_size=min(many, _RECORDS), engine="pyarrow"
        )
        for key, document in _v2(nodes):
            out[key] = json.dumps(document)
        for path, one in referred.items():
            for reference in one.references():
                out[f"{path}/{'.'.join(map(str, reference.place)) or '0'}"] = list(reference[1:])
        out.flush()


def _count(node: documents.Json) -> int:
    count = 1
    for n, c in zip(node["shape"], node["chunk_grid"]["configuration"]["chunk_shape"], strict=True):
        count *= max(1, n // c)
    return count


def _v2(nodes: Mapping[str, documents.Json]) -> Iterator[tuple[str, documents.Json]]:
    """The same documents in the words of zarr v2."""
    for path, node in nodes.items():
        start = f"{path}/" if path else ""
        attributes = dict(node["attributes"])
        if node["node_type"] == "group":
            yield f"{start}.zgroup", {"zarr_format": 2}
        else:
            attributes["_ARRAY_DIMENSIONS"] = node["dimension_names"]  # where xarray looks for them
            yield (
                f"{start}.zarray",
                {
                    "zarr_format": 2,
                    "shape": node["shape"],
                    "chunks": node["chunk_grid"]["configuration"]["chunk_shape"],
                    "dtype": _V2.get(node["data_type"], node["data_type"]),
                    "compressor": None,
                    "fill_value": None,  # xarray would take equal elements for missing ones
                    "order": "C",
                    "filters": None,
                    "dimension_separator": ".",
                },
            )
        yield f"{start}.zattrs", attributes


_V2 = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4",
    "int64": "<i8", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip


# -- Icechunk


def _write_icechunk(what: Contents[LazyArray], referred: Mapping[str, _Referred], dest: Any, bits: bool) -> None:
    """Into the store of a session of the caller's, or into a new repository in a local folder."""
    try:
        import icechunk
    except ImportError as e:
        raise FormatError(f"references in Icechunk need its package: pip install icechunk ({e})") from None
    nodes = _hierarchy(what, referred, bits)
    if isinstance(dest, icechunk.IcechunkStore):
        _fill(dest, nodes, referred)
        return
    place = local_path(dest)
    roots = {url_of(one.tensor.store.root, "") for one in referred.values()}
    if any(not root.startswith("file://") for root in roots):
        raise DestinationError(
            f"{place}: of files behind a URL only you can say how Icechunk gets at them: make a repository with a "
            "VirtualChunkContainer for them, and pass the store of a writable session of it instead of a path"
        )
    odd = [root for root in roots if quote(root, safe=":/") != root]
    if odd:  # it compares the escaped path with the plain one, or the reverse (1.1.21)
        raise DestinationError(f"{odd[0]}: Icechunk finds no files below a path that a URL has to escape: move them")
    config = icechunk.RepositoryConfig.default()
    for root in roots:
        files = icechunk.local_filesystem_store(root.removeprefix("file://"))
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(root, files))
    with folder_appearing(place, lambda: _check(place, what)) as folder:
        storage = icechunk.local_filesystem_storage(str(folder))
        repository = icechunk.Repository.create(storage, config, icechunk.containers_credentials(dict.fromkeys(roots)))
        repository.save_config()
        session = repository.writable_session("main")
        _fill(session.store, nodes, referred)
        session.commit("References to a checkpoint")


def _quoted(url: str) -> str:
    """As Icechunk takes it: fsspec takes a path as it is."""
    return f"file://{quote(url.removeprefix('file://'))}" if url.startswith("file://") else url


def _fill(store: Any, nodes: Mapping[str, documents.Json], referred: Mapping[str, _Referred]) -> None:
    import icechunk
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    async def write() -> None:
        for path, node in nodes.items():
            document = {k: v for k, v in node.items() if k != "consolidated_metadata"}  # Icechunk has its own way
            data = default_buffer_prototype().buffer.from_bytes(json.dumps(document).encode())
            await store.set(f"{path}/zarr.json".lstrip("/"), data)

    sync(write())
    for path, one in referred.items():
        chunks = [
            icechunk.VirtualChunkSpec(list(r.place), _quoted(r.path), r.offset, r.length, None, None)
            for r in one.references()
        ]
        if chunks and store.set_virtual_refs(path, chunks):
            raise DestinationError(
                f"the Icechunk repository has no VirtualChunkContainer for "
                f"{url_of(one.tensor.store.root, '')}: set one in its configuration"
            )


_WRITERS = {"json": _write_json, "parquet": _write_parquet, "icechunk": _write_icechunk}
