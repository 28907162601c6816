"""The table of the members of a zip that a folder was packed into.

Members have to be stored, not compressed, to be read by ranges. A small compressed one, such as a text, is unpacked in
memory.
"""

from __future__ import annotations

import struct
from stat import S_ISLNK

import numpy as np

from ...core.extents import ZipEntry
from ...errors import FormatError
from ..limits import Budget
from ..storage.members import Member, Tree
from ..storage.streams import StoreFile
from .pickle.records import short
from .zip import DEFLATED, ENCRYPTED, STORED, Zip, refused
from .zip_columns import Records
from .zip_offsets import data_offsets

_TENSORS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".gguf", ".npz")  # are never unpacked
_SMALL = 64 << 10  # bytes of a compressed member of another name
_TEXTS = (".json", ".jsonl", ".txt", ".md", ".yaml", ".yml", ".toml", ".jinja", ".py", ".sh", ".csv", ".log")
LARGEST_TEXT = 16 << 20  # bytes of a compressed member with such a name
_LINK = 4096  # bytes of a link's target
_UNIX = 3  # the system whose attributes an entry has


def read_zip_folder(file: StoreFile, found: Zip) -> Tree:
    """Return the members of a zip whose directory is ``found``.

    Raises CorruptError for a damaged zip, FormatError for members that are compressed or encrypted.
    """
    budget = Budget(file.where, file.size)
    tree = Tree(file.where, budget)
    entries = sorted(found.entries, key=lambda entry: entry.header)
    records = Records.of(entries)
    directory = file.at(found.start, file.size - found.start)
    links: list[tuple[ZipEntry, int]] = []
    for entry, offset in zip(entries, data_offsets(file, found.start, records).tolist(), strict=True):
        if entry.name.endswith("/"):
            tree.add(entry.name, None)
            continue
        if _is_link(directory, entry):
            links.append((entry, offset))
            continue
        plain = entry.method == STORED and not entry.flags & ENCRYPTED
        if plain:
            tree.add(entry.name, Member(offset, entry.nbytes))
            continue
        _check_small(file, entry)
        budget.inflated(entry.nbytes)
        tree.add(entry.name, Member(offset, entry.nbytes, entry.stored, entry.crc))
    _add_links(file, tree, links)
    return tree.finish()


def _check_small(file: StoreFile, entry: ZipEntry) -> None:
    """Raise FormatError unless a compressed member may be unpacked in memory."""
    name = entry.name.lower()
    limit = LARGEST_TEXT if name.endswith(_TEXTS) else -1 if name.endswith(_TENSORS) else _SMALL
    if entry.method != DEFLATED or entry.flags & ENCRYPTED or max(entry.nbytes, entry.stored) > limit:
        kind = "encrypted" if entry.flags & ENCRYPTED else "compressed"
        raise FormatError(
            f"{file.where}: the member {short(entry.name)} is {kind}, so it cannot be read by ranges. Unzip it, or "
            "pack the folder again without compression (zip -0 -r)"
        )


def _is_link(directory: bytes, entry: ZipEntry) -> bool:
    _, system = struct.unpack_from("<2B", directory, entry.at + 4)
    (attributes,) = struct.unpack_from("<I", directory, entry.at + 38)
    return bool(system == _UNIX and S_ISLNK(attributes >> 16))


def _add_links(file: StoreFile, tree: Tree, links: list[tuple[ZipEntry, int]]) -> None:
    """Read where the links lead to, which is their content."""
    targets = []
    for entry, offset in links:
        if entry.method != STORED or entry.flags & ENCRYPTED or entry.nbytes > _LINK:
            raise refused(file, f"the link {short(entry.name)} is compressed or too long")
        targets.append((offset, np.empty(entry.nbytes, np.uint8).data))
    file.read_pieces(targets)
    for (entry, _), (_, target) in zip(links, targets, strict=True):
        tree.add_link(entry.name, bytes(target).decode("utf-8", "surrogateescape"))
