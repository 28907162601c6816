"""Orbax: the manifest and nodes of OCDBT, with their checksums made right again, and the documents beside them."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import google_crc32c

from lazyckpt import LazyckptError
from lazyckpt.formats.orbax.nodes import BTREE, manifest, node

from ..contract import Target
from .sources import golden, opened, replacing, scratch


def _ocdbt() -> Path:
    return golden("orbax", "ocdbt")


def _framed(data: bytes, magic: int | None = None) -> bytes:
    """The bytes with the length and the checksum that a reader checks, so that it looks at what is between them."""
    body = data[14:-4] if len(data) > 18 else data
    start = data[:4] if magic is None else magic.to_bytes(4, "big")
    whole = start + (len(body) + 18).to_bytes(8, "little") + b"\0\0" + body
    return whole + google_crc32c.value(whole).to_bytes(4, "little")


def _plain(data: bytes) -> bytes:
    """A manifest or node whose body is not compressed."""
    from numcodecs import zstd

    return data[:12] + b"\0\0" + (zstd.decompress(data[14:-4]) if data[13] == 1 else data[14:-4]) + data[-4:]


def _manifests() -> list[bytes]:
    return [_plain(path.read_bytes()) for path in sorted(_ocdbt().rglob("manifest.ocdbt"))]


def _nodes() -> list[bytes]:
    found = []
    for path in sorted(_ocdbt().rglob("d/*")):
        data = path.read_bytes()
        at = data.find(BTREE.to_bytes(4, "big"))
        while at >= 0:
            length = int.from_bytes(data[at + 4 : at + 12], "little")
            if length <= len(data) - at:
                found.append(_plain(data[at : at + length]))
            at = data.find(BTREE.to_bytes(4, "big"), at + 4)
    return found


def as_manifest(data: bytes) -> None:
    for one in (data, _framed(data)):
        try:
            manifest(one, "manifest.ocdbt")
        except LazyckptError as e:
            str(e)


def as_node(data: bytes) -> None:
    for one in (data, _framed(data, BTREE)):
        for height in (0, 1):
            try:
                node(one, height, "", "d/node")
            except LazyckptError as e:
                str(e)


@functools.cache
def _folder() -> Path:
    to = Path(tempfile.mkdtemp(dir=scratch())) / "ckpt"
    shutil.copytree(_ocdbt(), to)
    return to


def with_manifest(data: bytes) -> None:
    (_folder() / "manifest.ocdbt").write_bytes(_framed(data))
    try:
        opened(_folder())
    except LazyckptError as e:
        str(e)


def _aggregate() -> Path:
    return golden("orbax", "aggregate")


def _text(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(_ocdbt() / name).read_bytes()]


TARGETS = (
    Target("orbax.manifest", as_manifest, _manifests, "bytes"),
    Target("orbax.node", as_node, _nodes, "bytes"),
    Target("orbax.folder", with_manifest, _manifests, "bytes"),
    Target("orbax.tree", replacing(_ocdbt, "_METADATA"), _text("_METADATA"), "json"),
    Target("orbax.sharding", replacing(_ocdbt, "_sharding"), _text("_sharding"), "json"),
    Target(
        "orbax.aggregate",
        replacing(_aggregate, "checkpoint"),
        lambda: [(_aggregate() / "checkpoint").read_bytes()],
        "bytes",
    ),
)
