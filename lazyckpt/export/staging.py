"""Folders that appear when they are complete, and exports that go on where they were stopped.

Files are made in a hidden folder beside the destination, whose name follows from the destination's: a second call finds
what the first one finished, if both are the same job (its fingerprint stands there). While somebody works there, the
file with the fingerprint is locked. On object stores, which cannot rename, the fingerprint is a marker in the prefix,
and what tells a reader that there is something is written last.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CorruptError, DestinationError, LazyckptError, WorkerError
from ..formats.zarr.documents import JOB  # holds the fingerprint
from ..io.store import Store
from ..tensor import LazyTensor
from .destination import local_path, make_folder
from .places import PART, Bucket, Folder

_lock = threading.Lock()
_working: set[str] = set()
Finished = dict[str, int]  # key of what is there -> its bytes


def staging_path(dest: Path) -> Path:
    return dest.parent / f".{dest.name}.incomplete"


def unfinished(dest: str | os.PathLike[str]) -> int | None:
    """The bytes that an interrupted export to this local destination has finished; None if there is none."""
    staging = staging_path(local_path(dest))
    return sum(finished_sizes(staging)) if staging.is_dir() else None


def discard(dest: str | os.PathLike[str]) -> None:
    """Remove what an interrupted export to this local destination has left. Raises DestinationError if an export is
    writing there."""
    staging = staging_path(local_path(dest))
    if staging.is_dir():
        with _of_this_process(staging):
            fd = _locked(staging)
            try:
                shutil.rmtree(staging)
            finally:
                os.close(fd)


def finished_sizes(staging: Path) -> Iterator[int]:
    for where, _, files in os.walk(staging):
        yield from (os.path.getsize(os.path.join(where, n)) for n in files if not n.endswith(PART) and n != JOB)


@contextmanager
def staged(dest: Path, fingerprint: str) -> Iterator[tuple[Folder, Finished]]:
    """A folder to write into, and what is in it already; gone at the end of the block, by which it should have been
    renamed or packed.

    If the block fails, what is finished is kept for the next call, unless that would fail too (the source is damaged);
    OSErrors become DestinationErrors and say so.
    """
    folder = staging_path(dest)
    with _of_this_process(folder):
        yield from _staged(dest, folder, fingerprint)


def _staged(dest: Path, folder: Path, fingerprint: str) -> Iterator[tuple[Folder, Finished]]:
    made: list[Path] = []
    try:
        made = make_folder(folder)
        fd = _locked(folder)
    except BaseException as e:
        _unmake(made)
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            raise DestinationError(f"{e.filename or dest}: {e.strerror or e}. Nothing was written") from e
        raise
    try:
        if os.pread(fd, 4096, 0) != fingerprint.encode():
            _empty(folder)
            os.ftruncate(fd, 0)
            os.pwrite(fd, fingerprint.encode(), 0)
        yield Folder(str(folder)), finished(folder)
    except BaseException as e:
        kept = _goes_on(e) and any(finished(folder))
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
            _unmake(made[:-1] if made and made[-1] == folder else made)
        if isinstance(e, WorkerError) and kept:
            raise WorkerError(f"{e}. {_said(folder)}") from e
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            what = _said(folder) if kept else "Nothing was written"
            raise DestinationError(f"{dest}: {e.strerror or e}. {what}") from e
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def reveal(folder: Folder, dest: Path) -> None:
    """Rename a staging folder to its destination; a folder that is there already is replaced."""
    source, old = Path(folder.root), dest.parent / f".{dest.name}.replaced"
    (source / JOB).unlink()
    if dest.exists() and any(dest.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(dest, old)
        try:
            os.rename(source, dest)
        except BaseException:
            os.rename(old, dest)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(source, dest)


@contextmanager
def uploaded(bucket: Bucket, fingerprint: str, overwrite: bool) -> Iterator[tuple[Bucket, Finished]]:
    """The same for an object store: the prefix itself, and what is there. What must come last is the block's to order.

    Raises DestinationError if something else is there and not ``overwrite``, or not such a hierarchy.
    """
    try:
        there: Finished = bucket.find()
        ours = JOB in there and bucket.get(JOB, 0, 4096) == fingerprint.encode()
        if there and not ours:
            if JOB not in there and "zarr.json" not in there:
                raise DestinationError(f"{bucket} is not empty, and what is there is no zarr hierarchy: choose another")
            if not overwrite:
                what = "an unfinished export of something else" if JOB in there else "a zarr hierarchy"
                raise DestinationError(f"{bucket} holds {what}: choose another place, or pass overwrite=True")
            if "zarr.json" in there:
                bucket.remove("zarr.json")  # first, so that nobody opens what is going
            bucket.remove_all()
            there = {}
        bucket.put(JOB, [fingerprint.encode()])
        yield bucket, there
        bucket.remove(JOB)
    except CorruptError:
        bucket.remove_all()
        raise
    except OSError as e:
        if isinstance(e, LazyckptError):
            raise
        raise DestinationError(
            f"{bucket}: {e.strerror or e}. What is finished is kept there (no reader takes it for a hierarchy): call "
            "again to go on"
        ) from e


def fingerprint(tensors: Iterable[tuple[LazyTensor, object]], texts: Iterable[bytes]) -> str:
    """What two calls have in common that may go on with each other's files: the source's files, the tensors, each with
    what is said of where and how it is written, and what is written besides."""
    digest = hashlib.sha256()
    stores: dict[int, Store] = {}
    for tensor, where in tensors:
        stores[id(tensor.store)] = tensor.store
        spec = tensor.spec
        told = spec.name, spec.stored_as, spec.rule, spec.combine, where, len(spec.fragments)
        ends = (spec.fragments[0], spec.fragments[-1]) if spec.fragments else ()
        digest.update(repr((told, ends)).encode("utf-8", "surrogatepass"))
    for store in stores.values():
        digest.update(repr((store.root, sorted(store.pins.items()))).encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(text)
    return digest.hexdigest()


def _busy(folder: Path) -> DestinationError:
    return DestinationError(f"{folder}: another export is writing there. Wait for it")


def _said(folder: Path) -> str:
    return f"What is finished is kept in {folder}: call again to go on, or remove it"


def _goes_on(e: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return not isinstance(e, LazyckptError) or isinstance(e, WorkerError | DestinationError)


@contextmanager
def _of_this_process(folder: Path) -> Iterator[None]:
    """Locks of files are the process's: its threads exclude each other by name."""
    name = os.path.realpath(folder)
    with _lock:
        if name in _working:
            raise _busy(folder)
        _working.add(name)
    try:
        yield
    finally:
        _working.discard(name)


def _locked(folder: Path) -> int:
    """The open file with the fingerprint, locked for this process (its forked workers may outlive it, and must not keep
    the lock). Raises DestinationError if another process has it."""
    path = folder / JOB
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise _busy(folder) from None
            # else a file system without locks: then two exports at once are the user's to avoid
        with suppress(OSError):
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        os.close(fd)  # the one who had it has finished, and removed or renamed it
        folder.mkdir(parents=True, exist_ok=True)


def finished(folder: Path) -> Finished:
    """What is complete there. Removes what is not: killed workers leave it behind."""
    found: Finished = {}
    for where, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(where, name)
            if name.endswith(PART):
                os.unlink(path)
            elif name != JOB:
                found[os.path.relpath(path, folder)] = os.path.getsize(path)
    return found


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != JOB:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _unmake(made: list[Path]) -> None:
    for path in reversed(made):
        with suppress(OSError):  # somebody put a file there meanwhile
            path.rmdir()
