"""Folders in a tar or a zip: tarfile and zipfile find the same files, where they and lazyckpt read an archive."""

from __future__ import annotations

import io
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from lazyckpt import LazyckptError
from lazyckpt.formats.archives import opened_archive
from lazyckpt.io.storage.base import Store
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.testing.remote import Served

from ..contract import DifferenceError, Target
from .sources import opened, scratch, write, zip_of

_MOST = 1 << 20  # bytes of a file that is compared


def _folder(to: Path, words: int = 12) -> None:
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, to / "model.safetensors")
    (to / "config.json").write_text('{"model_type": "llama"}')
    (to / "sub").mkdir()
    (to / "sub" / ("long name " * words)).write_bytes(b"x" * 600)
    (to / "sub" / "link").symlink_to("../config.json")


def tars() -> list[bytes]:
    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tempfile.TemporaryDirectory() as name:
            _folder(Path(name), 9 if form == tarfile.USTAR_FORMAT else 12)
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w", format=form) as archive:
                archive.add(name, "run" if form == tarfile.GNU_FORMAT else ".", filter=_anywhere)
                hard = tarfile.TarInfo("hard.json")
                hard.type, hard.linkname = tarfile.LNKTYPE, "run/config.json"
                archive.addfile(hard)
            found.append(file.getvalue().rstrip(b"\0") + bytes(1536))
    return found


def _anywhere(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member as whoever makes the archive, whenever: each run has the same seeds."""
    member.mtime, member.uid, member.gid, member.uname, member.gname = 1e9 + 0.5, 0, 0, "user", "group"
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def zips() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        _folder(Path(name))
        packed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        return [zip_of(Path(name), lambda p, m=m: m if p.suffix == ".json" else zipfile.ZIP_STORED) for m in packed]


def _compare(store: Store, theirs: Mapping[str, bytes]) -> None:
    """Raise DifferenceError unless each file has the same bytes for both readers."""
    for name, data in theirs.items():
        found = bytes(store.read(name, 0, store.stat(name).size)) if len(data) < _MOST else data
        if found != data:
            raise DifferenceError(f"{name!r} has other bytes: {found[:40]!r} and {data[:40]!r}")


def _files(store: Store, folder: str = "", depth: int = 0) -> set[str]:
    found = set()
    for name, entry in store.list(folder).items() if depth < 8 else ():
        path = f"{folder}/{name}" if folder else name
        found |= _files(store, path, depth + 1) if entry.is_dir else {path}
    return found


def _outcome(store: Store) -> set[str] | str | None:
    try:
        archive = opened_archive(store, "run.tar")
    except LazyckptError as e:
        return str(e).replace(store.root, "")
    return None if archive is None else _files(archive)


def tar(data: bytes) -> None:
    """Open a tar, and compare its files with those that tarfile finds."""
    path = write("run.tar", data)
    near, far = (_outcome(store) for store in (LocalStore(scratch()), Served({"run.tar": data})))
    if near != far:
        raise DifferenceError(f"on a disk {near!r:.300}, behind a network {far!r:.300}")
    store = opened_archive(LocalStore(scratch()), "run.tar")
    if store is not None:
        theirs: dict[str, bytes] = {}
        whole = False
        with suppress(Exception), tarfile.open(path, "r:") as archive:  # whatever tarfile refuses
            found = {_clean(member.name): member for member in archive.getmembers() if not member.isdir()}
            links = any(member.issym() or member.islnk() for member in found.values())
            for name, member in found.items():
                if member.isreg() and (stream := archive.extractfile(member)) is not None:
                    theirs[name] = stream.read(_MOST)
            whole = not links
        _compare(store, theirs)
        if whole and _files(store) != set(theirs):
            raise DifferenceError(f"tarfile finds {sorted(theirs)[:5]}, lazyckpt {sorted(_files(store))[:5]}")
    opened(path)


def _clean(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def zip_(data: bytes) -> None:
    """Open a zip, and compare its files with those that zipfile finds."""
    path = write("run.zip", data)
    store = opened_archive(LocalStore(scratch()), "run.zip")
    if store is not None:
        theirs: dict[str, bytes] = {}
        with suppress(Exception), zipfile.ZipFile(path) as archive:  # whatever zipfile refuses
            for info in archive.infolist():
                link = info.create_system == 3 and info.external_attr >> 28 == 0o12
                if not info.is_dir() and not link and info.file_size < _MOST:
                    with suppress(Exception):
                        theirs[_clean(info.filename)] = archive.read(info)
        _compare(store, theirs)
    opened(path)


TARGETS = (Target("archives.tar", tar, tars, "tar"), Target("archives.zip", zip_, zips, "zip"))
