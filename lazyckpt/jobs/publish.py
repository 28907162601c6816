"""Folders that appear when they are complete, and exports that go on where they were stopped.

Files are made in a hidden folder beside the destination, whose name follows from the destination's: a second call finds
what the first one finished, if both are the same job (the folder holds its fingerprint). Nobody else may write to that
folder (`guard`). While somebody works there, the file with the fingerprint is locked. What is finished is listed with
checksums in a `ledger`; the files are in a folder of this job alone, where no worker of an earlier one can still write.
On object stores, which cannot rename, the fingerprint is a marker in the prefix, and what tells a reader that there is
something is written last.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import torch

from ..errors import CorruptError, DestinationError, LazyckptError, MissingFileError, WorkerError
from ..formats.zarr.documents import JOB  # holds the fingerprint
from ..io.storage.base import Store
from ..lazy import LazyArray
from .guard import Owner, is_own, local_path, make_folder, own_folder, usual_mode
from .ledger import told
from .places import LEDGER, Bucket, Folder

_ONCE = "once-"
_lock = threading.Lock()
_working: set[str] = set()


def staging_path(dest: Path) -> Path:
    """Where what is to be at ``dest`` is made: beside it, or in it if it is a folder that has to stay where it is (a
    mounted volume) or that nothing can be put beside."""
    real = Path(os.path.realpath(dest) if os.path.isdir(dest) else os.path.abspath(dest))
    name = f".{real.name}.incomplete"
    fixed = real.is_dir() and (os.path.ismount(real) or not os.access(real.parent, os.W_OK | os.X_OK))
    return (real if fixed else real.parent) / name


def check_replaceable(dest: Path) -> None:
    """Raise DestinationError if no folder can be given the name ``dest``."""
    if dest.is_dir() and staging_path(dest).parent == Path(os.path.realpath(dest)):
        raise DestinationError(
            f"{dest} is a mounted volume, or in a folder without the right to write, and cannot be replaced by the new "
            "folder: name one inside of it"
        )


def unfinished(dest: str | os.PathLike[str]) -> int | None:
    """The bytes that an interrupted export (or one that runs) to this local destination has finished; None if there is
    none. Calling it again with the same arguments goes on there."""
    staging = staging_path(_local(dest))
    return told(staging / LEDGER).nbytes if os.path.isdir(staging) else None


def discard(dest: str | os.PathLike[str]) -> None:
    """Remove what an interrupted export to this local destination has left, if there is something: the next one starts
    afresh. What is at ``dest`` itself stays. Raises DestinationError if an export is writing there, or if somebody else
    may have written what is there."""
    staging = staging_path(_local(dest))
    if not os.path.isdir(staging):
        return
    with _of_this_process(staging):
        try:
            fd, _ = _locked(staging)
            try:
                os.ftruncate(fd, 0)
                shutil.rmtree(staging)
            finally:
                os.close(fd)
        except OSError as e:
            if isinstance(e, LazyckptError):
                raise
            raise DestinationError(f"{e.filename or staging}: {e.strerror or e}. It cannot be removed") from e


def _local(dest: str | os.PathLike[str]) -> Path:
    return local_path(os.fspath(dest).removeprefix("file://"))


def discard_upload(bucket: Bucket) -> None:
    """The same for an object store."""
    if JOB in bucket.find():
        bucket.remove_all()


def content(staging: Folder, fingerprint: str, plain: bool) -> Folder:
    """Return the folder for the files of a job: one of its own in the staging folder, where no worker of an earlier job
    can still write; or, if ``plain`` and there was no earlier job, the staging folder itself."""
    own = _content_name(fingerprint)
    return staging if plain and not os.path.isdir(os.path.join(staging.root, own)) else staging.below(own)


def moved(dest: Path, fingerprint: str, keys: Sequence[str], verified: bool) -> set[str]:
    """Which files of the folder ``dest`` an earlier call of the same job has put there, if it was killed before it had
    all of them there; ``verified``: after it had verified them."""
    staging = staging_path(dest)
    try:  # anybody may have made that folder, and anything in it: it is not checked yet
        fd = os.open(staging / JOB, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode) or os.read(fd, 4096) != fingerprint.encode():
                return set()
        finally:
            os.close(fd)
    except OSError:
        return set()
    state = told(staging / LEDGER).moving
    if state is None or state < verified:
        return set()
    gone = {key for key in keys if not (staging / _content_name(fingerprint) / key).exists()}
    return gone if len(gone) < len(keys) and all((dest / key).exists() for key in gone) else set()


def _content_name(fingerprint: str) -> str:
    return fingerprint[:16]


@contextmanager
def staged(dest: Path, fingerprint: str) -> Iterator[Folder]:
    """A folder to write into, with what an earlier call of this job has left there; gone at the end of the block, by
    which it should have been renamed or packed.

    If the block fails, what is finished is kept for the next call, unless that would fail too (the source is damaged);
    OSErrors become DestinationErrors and say so.
    """
    folder = staging_path(dest)
    with _of_this_process(folder):
        yield from _staged(dest, folder, fingerprint)


def _staged(dest: Path, folder: Path, fingerprint: str) -> Iterator[Folder]:
    made: list[Path] = []
    new = not os.path.lexists(folder)
    try:
        made = make_folder(folder.parent)
        fd, owner = _locked(folder)
        _put_back(dest)
    except BaseException as e:
        if new:
            _unmake([*made, folder])
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            raise DestinationError(f"{e.filename or dest}: {e.strerror or e}. Nothing was written") from e
        raise
    try:
        if os.pread(fd, 4096, 0) != fingerprint.encode():
            os.ftruncate(fd, 0)  # first: what is half removed is no job's to go on with
            if _empty(folder):
                os.mkdir(folder / _content_name(fingerprint))
            os.pwrite(fd, fingerprint.encode(), 0)
        yield Folder(str(folder), owner)
    except BaseException as e:
        kept = _goes_on(e) and not fingerprint.startswith(_ONCE) and bool(told(folder / LEDGER).nbytes)
        if not kept:
            os.ftruncate(fd, 0)
            shutil.rmtree(folder, ignore_errors=True)
            _unmake(made)
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
    """Rename a folder with all that is to be there to its destination; one that is there already is replaced."""
    if not folder.inside:  # the staging folder itself
        folder.remove(JOB)
        folder.remove(LEDGER)
        os.chmod(folder.root, usual_mode(Path(folder.root)))
    if dest.exists() and any(dest.iterdir()):
        old = _replaced(dest)
        os.rename(dest, old)
        try:
            folder.become(dest)
        except BaseException:
            os.rename(old, dest)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.become(dest)


def _replaced(dest: Path) -> Path:
    return dest.parent / f".{dest.name}.replaced"


def _put_back(dest: Path) -> None:
    """A process was killed while it replaced a folder: give the old one its name again, or let it go."""
    old = _replaced(dest)
    if not os.path.lexists(old):
        return
    if not is_own(old):
        raise DestinationError(
            f"{old}: an export that replaces {dest} keeps the old folder under this name, and what is there belongs to "
            "another user or is no folder. Nothing was written. Rename or remove it, or choose another destination"
        )
    if os.path.lexists(dest):
        shutil.rmtree(old)
    else:
        os.rename(old, dest)


@contextmanager
def uploaded(bucket: Bucket, fingerprint: str, overwrite: bool) -> Iterator[Mapping[str, int]]:
    """The same for an object store, where the prefix itself is written to: key of what is there -> its bytes. What must
    come last is the block's to order.

    Raises DestinationError if something else is there and not ``overwrite``, or not such a hierarchy.
    """
    try:
        there = bucket.find()
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
        yield there
        bucket.remove(JOB)
    except CorruptError:
        bucket.remove_all()
        raise
    except OSError as e:
        if isinstance(e, LazyckptError):
            raise
        what = (e.strerror or str(e)).removeprefix(f"{bucket}: ").removesuffix(".")
        raise DestinationError(
            f"{bucket}: {what}. What is finished is kept there (no reader takes it for a hierarchy): call again to "
            "go on"
        ) from e


def fingerprint(tensors: Iterable[tuple[LazyArray, object]], texts: Iterable[bytes]) -> str:
    """What two calls have in common that may go on with each other's files: the source's files, the tensors, each with
    what is said of where and how it is written, and what is written besides."""
    digest = hashlib.sha256(torch.__version__.encode())  # which decides where in a file of torch.save a tensor begins
    stores: dict[int, Store] = {}
    for tensor, where in tensors:
        stores[id(tensor.store)] = tensor.store
        spec = tensor.spec
        about = spec.name, spec.stored_as, spec.rule, spec.combine, where, len(spec.fragments)
        ends = (spec.fragments[0], spec.fragments[-1]) if spec.fragments else ()
        wanted = [a if isinstance(a, range) else a.tobytes() for a in tensor._sel.axes], tensor._sel.dims
        digest.update(repr((about, ends, wanted)).encode("utf-8", "surrogatepass"))
    for store in stores.values():
        digest.update(repr((store.root, sorted(store.pins.items()))).encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(text)
    return digest.hexdigest()


def once() -> str:
    """The fingerprint of a job that no other call can go on with."""
    return f"{_ONCE}{uuid4().hex}"


def _busy(folder: Path) -> DestinationError:
    return DestinationError(f"{folder}: another export is writing there. Wait for it")


def _said(folder: Path) -> str:
    return f"What is finished is kept in {folder}: call again to go on, or remove it"


def _goes_on(e: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return not isinstance(e, LazyckptError) or isinstance(e, WorkerError | DestinationError | MissingFileError)


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


def _locked(folder: Path) -> tuple[int, Owner]:
    """The open file with the fingerprint, locked for this process (its forked workers may outlive it, and must not keep
    the lock), and the owner of the folder, which is made if it is not there. Raises DestinationError if another process
    has the lock, or if the folder is not ours."""
    path = folder / JOB
    while True:
        above, owner = own_folder(folder)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(JOB, flags, 0o666, dir_fd=above)
        except FileNotFoundError:  # the folder was removed
            continue
        finally:
            os.close(above)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise DestinationError(f"{path} is no regular file. Nothing was written. Remove {folder}")
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise _busy(folder) from None
            # else a file system without locks: then two exports at once are the user's to avoid
        with suppress(OSError):
            if os.fstat(fd).st_ino == os.stat(path, follow_symlinks=False).st_ino:
                return fd, owner
        os.close(fd)  # the one who had it has finished, and removed or renamed it


def _empty(folder: Path) -> bool:
    """Remove everything but the file with the fingerprint. Return whether there was anything."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(at) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != JOB]
        for name, is_folder in found:
            shutil.rmtree(name, dir_fd=at) if is_folder else os.unlink(name, dir_fd=at)
        return bool(found)
    finally:
        os.close(at)


def _unmake(made: list[Path]) -> None:
    for path in reversed(made):
        with suppress(OSError):  # somebody put a file there meanwhile
            path.rmdir()
