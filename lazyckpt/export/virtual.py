"""Virtual zarr hierarchies: the chunks are references to bytes of the checkpoint's files, and nothing is copied.

JSON contains documents of zarr v3. Parquet contains those of zarr v2, because fsspec's reader (`LazyReferenceMapper`)
looks for ".zarray". Sources: the kerchunk specification of references, version 1; fsspec/implementations/reference.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from ..core.box import Shape, hull
from ..core.copies import Copy
from ..core.dtypes import U8, U16
from ..core.references import Reference, reference_chunk, references
from ..errors import DataError, DestinationError, FormatError, LazyckptError
from ..formats.zarr import documents
from ..formats.zarr.documents import FOREIGN, NAMES, Contents, Part, contents
from ..io.reading.gather import planned
from ..io.storage.access import check, outside
from ..io.storage.credentials import without_secrets
from ..io.storage.urls import is_remote, is_url
from ..jobs.destination import Files, Kind, Session, Whole, check_apart
from ..jobs.guard import followed, local_path
from ..jobs.plan import WritePlan
from ..jobs.publish import once
from ..jobs.remote import Remote
from ..lazy import LazyArray
from .options import WriteOptions
from .writer import Writer, remote_place

MOST = 64 << 20  # maximum bytes of a chunk
_RECORDS = 10_000  # references in a parquet file
_BITS = {1: U8, 2: U16}


@dataclass(frozen=True, slots=True)
class _Referred:
    """A tensor that can be expressed as references: its name in the view, its chunk shape, and its copies in files."""

    name: str
    tensor: LazyArray
    chunk: Shape
    copies: Sequence[Copy]

    def references(self) -> Iterator[Reference]:
        """Yield the references to its chunks, with a URL as path."""
        for reference in references(self.copies, self.chunk):
            root, path, offset = outside(self.tensor.store, reference.path, reference.offset)
            yield reference._replace(path=url_of(root, path), offset=offset)

    @property
    def root(self) -> str:
        """The URL of the folder of its files; of an archive, the folder that the archive is in."""
        store = self.tensor.store
        return url_of(next((outside(store, copy.extent.path, 0)[0] for copy in self.copies), store.root), "")


def _plan(
    view: Part[LazyArray], dest: Any, options: WriteOptions, *, format: str | None = None, bits: bool = False
) -> WritePlan:
    form = format or _form(dest)
    if form not in _FORMS:
        raise FormatError(f"references are written as {', '.join(_FORMS)}, not as {form!r}")
    if form == "icechunk" and isinstance(dest, str | os.PathLike) and is_remote(os.fspath(dest)):
        raise DestinationError(
            f"{without_secrets(os.fspath(dest), {})}: Icechunk needs its own settings for a bucket: pass the store of "
            "a writable session of your repository instead of a URL"
        )
    what = contents(view)
    referred, left_out = _referred(what)
    _check_sources(referred)
    what.about["left_out"] = left_out
    return _FORMS[form](_References(what, referred, left_out, dest, bits, options))


@dataclass(frozen=True, slots=True)
class _References:
    """The content of an export and its destination."""

    what: Contents[LazyArray]
    referred: Mapping[str, _Referred]
    left_out: Mapping[str, str]
    dest: Any
    bits: bool
    options: WriteOptions

    @property
    def tensors(self) -> list[LazyArray]:
        return list(self.what.arrays.values())

    def nodes(self) -> dict[str, documents.Json]:
        """Return the documents of groups and arrays, by path."""
        arrays = {path: _array(one, self.bits) for path, one in self.referred.items()}
        nodes = documents.hierarchy(arrays, self.what.about, self.what.groups)
        if any(node.get("data_type") in FOREIGN for node in nodes.values()):
            # A reader that does not know one of these dtypes would reject the consolidated metadata, and all arrays.
            del nodes[""]["consolidated_metadata"]
        return nodes

    def folder(self, place: Path, marks: tuple[str, ...], build: Callable[[str], None]) -> WritePlan:
        """Return the plan of a folder that another library writes."""
        return WritePlan(
            destination=Whole(place, self.tensors, self.options["overwrite"], Kind("folder of references", marks)),
            tensors=(),
            fingerprint=once(),
            build=build,
            paths=(place,),
            left_out=self.left_out,
        )


def url_of(root: str, path: str) -> str:
    """Return the URL of a file of a store, in the form that fsspec accepts."""
    return f"{root}/{path}" if is_url(root) else f"file://{os.path.abspath(root)}/{path}"


def _form(dest: Any) -> str:
    if not isinstance(dest, str | os.PathLike):
        if type(dest).__module__.startswith("icechunk"):
            return "icechunk"
        raise FormatError(f"references are written to a path or to an Icechunk store, not to a {type(dest).__name__}")
    return "json" if Path(os.fspath(dest)).suffix == ".json" else "parquet"


def _referred(what: Contents[LazyArray]) -> tuple[dict[str, _Referred], dict[str, str]]:
    """Return the tensors that can be expressed as references, and for the others the reason why not, by path."""
    found: dict[str, _Referred] = {}
    left_out: dict[str, str] = {}
    for path, tensor in what.arrays.items():
        spec = tensor.spec
        try:
            if spec.dtype not in NAMES:
                raise DataError(f"zarr has no {spec.dtype}")
            if spec.expr is not None:
                raise DataError("it is computed: no file holds its elements")
            copies = planned(tensor.store, spec, tuple(map(range, spec.shape)))
            for file in {copy.extent.path for copy in copies}:
                outside(tensor.store, file, 0)
            found[path] = _Referred(what.names[path], tensor, reference_chunk(spec, copies, MOST), copies)
        except LazyckptError as e:
            left_out[path] = str(e)
    return found, left_out


def _check_sources(referred: Mapping[str, _Referred]) -> None:
    """Raise MissingFileError or ChangedFileError if a file changed, because the references may no longer be valid;
    raise CorruptError for bytes that must not be used."""
    files = {(id(one.tensor.store), c.extent.path): one.tensor.store for one in referred.values() for c in one.copies}
    for (_, path), store in files.items():
        store.read(path, 0, 1)  # compares the file with its pin
    for one in referred.values():
        for copy in one.copies:  # readers of the references do not check
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


# -- JSON


def _plan_json(of: _References) -> WritePlan:
    remote, overwrite = remote_place(of.dest, of.options), of.options["overwrite"]
    destination: Files | Remote
    if remote is not None:
        name = remote.name
        destination = Remote(remote.beside, of.tensors, overwrite, one=name)
    else:
        place = local_path(of.dest)
        name = place.name
        destination = Files(place, [name], of.tensors, overwrite, one=True, apart=check_apart)

    def items() -> Iterator[tuple[str, Any]]:
        for path, node in of.nodes().items():
            yield f"{path}/zarr.json".lstrip("/"), json.dumps(node)
        for path, one in of.referred.items():
            for reference in one.references():
                yield "/".join((path, "c", *map(str, reference.place))), list(reference[1:])

    def text() -> Iterator[bytes]:
        yield b'{"version": 1, "refs": {'
        for n, (key, value) in enumerate(items()):
            yield f"{',' if n else ''}\n{json.dumps(key)}: {json.dumps(value)}".encode()
        yield b"\n}}\n"

    return WritePlan(
        destination=destination,
        tensors=(),
        fingerprint=once(),
        texts={name: text},
        paths=(str(destination) if isinstance(destination, Remote) else destination.place,),
        left_out=of.left_out,
    )


# -- parquet


def _plan_parquet(of: _References) -> WritePlan:
    missing = [name for name in ("kerchunk", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise FormatError(f"references in parquet need {', '.join(missing)}: install that, or write to a .json")
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.reference import LazyReferenceMapper

    nodes = of.nodes()

    def build(folder: str) -> None:
        many = max((_count(node) for node in nodes.values() if node["node_type"] == "array"), default=1)
        out = LazyReferenceMapper.create(
            folder, fs=LocalFileSystem(), record_size=min(many, _RECORDS), engine="pyarrow"
        )
        for key, document in _v2(nodes):
            out[key] = json.dumps(document)
        for path, one in of.referred.items():
            for reference in one.references():
                out[f"{path}/{'.'.join(map(str, reference.place)) or '0'}"] = list(reference[1:])
        out.flush()

    marks = (".zmetadata",)
    place = remote_place(of.dest, of.options)
    if place is None:
        return of.folder(followed(local_path(of.dest)), marks, build)
    with TemporaryDirectory(prefix="lazyckpt-references-") as folder:
        build(folder)
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*.parq")}
        found |= {mark: Path(folder, mark).read_bytes() for mark in marks}  # the last one makes it readable
    kind = Kind("folder of references", marks)
    return WritePlan(
        destination=Remote(place, of.tensors, of.options["overwrite"], other=kind),
        tensors=(),
        fingerprint=once(),
        texts=found,
        paths=(str(place),),
        left_out=of.left_out,
    )


def _count(node: documents.Json) -> int:
    count = 1
    for n, c in zip(node["shape"], node["chunk_grid"]["configuration"]["chunk_shape"], strict=True):
        count *= max(1, n // c)
    return count


def _v2(nodes: Mapping[str, documents.Json]) -> Iterator[tuple[str, documents.Json]]:
    """Convert the documents to zarr v2."""
    for path, node in nodes.items():
        start = f"{path}/" if path else ""
        attributes = dict(node["attributes"])
        if node["node_type"] == "group":
            yield f"{start}.zgroup", {"zarr_format": 2}
        else:
            attributes["_ARRAY_DIMENSIONS"] = node["dimension_names"]  # the attribute that xarray reads
            yield (
                f"{start}.zarray",
                {
                    "zarr_format": 2,
                    "shape": node["shape"],
                    "chunks": node["chunk_grid"]["configuration"]["chunk_shape"],
                    "dtype": _V2.get(node["data_type"], node["data_type"]),
                    "compressor": None,
                    "fill_value": None,  # xarray would treat elements equal to a fill value as missing
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


def _plan_icechunk(of: _References) -> WritePlan:
    """Plan an export to the store of the caller's session, or to a new repository in a local folder."""
    try:
        import icechunk
    except ImportError as e:
        raise FormatError(f"references in Icechunk need its package: pip install icechunk ({e})") from None
    nodes = of.nodes()
    if isinstance(of.dest, icechunk.IcechunkStore):
        store = of.dest
        return WritePlan(
            destination=Session(lambda: _fill(store, nodes, of.referred)),
            tensors=(),
            fingerprint=once(),
            left_out=of.left_out,
        )
    place = followed(local_path(of.dest))
    roots = {one.root for one in of.referred.values()}
    if any(not root.startswith("file://") for root in roots):
        raise DestinationError(
            f"{place}: for files behind a URL, Icechunk needs your settings to access them: make a repository with a "
            "VirtualChunkContainer for them, and pass the store of a writable session of it instead of a path"
        )
    odd = [root for root in roots if quote(root, safe=":/") != root]
    if odd:  # Icechunk 1.1.21 compares the escaped path with the unescaped one
        raise DestinationError(f"{odd[0]}: Icechunk finds no files below a path that a URL has to escape: move them")
    config = icechunk.RepositoryConfig.default()
    for root in roots:
        files = icechunk.local_filesystem_store(root.removeprefix("file://"))
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(root, files))

    def build(folder: str) -> None:
        storage = icechunk.local_filesystem_storage(folder)
        repository = icechunk.Repository.create(storage, config, icechunk.containers_credentials(dict.fromkeys(roots)))
        repository.save_config()
        session = repository.writable_session("main")
        _fill(session.store, nodes, of.referred)
        session.commit("References to a checkpoint")

    return of.folder(place, ("refs", "snapshots"), build)


def _quoted(url: str) -> str:
    """Escape a file URL for Icechunk; fsspec uses unescaped paths."""
    return f"file://{quote(url.removeprefix('file://'))}" if url.startswith("file://") else url


def _fill(store: Any, nodes: Mapping[str, documents.Json], referred: Mapping[str, _Referred]) -> None:
    import icechunk
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    async def write() -> None:
        for path, node in nodes.items():
            document = {k: v for k, v in node.items() if k != "consolidated_metadata"}  # Icechunk does not need it
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
                f"the Icechunk repository has no VirtualChunkContainer for {one.root}: set one in its configuration"
            )


_FORMS = {"json": _plan_json, "parquet": _plan_parquet, "icechunk": _plan_icechunk}
WRITER = Writer(name="virtual", what="references to the bytes of the files", plan=_plan, takes_parts=True)
