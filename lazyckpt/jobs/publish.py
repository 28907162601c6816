"""Staging directories: exports are published when complete, and interrupted exports are resumed.

Files are written to a hidden staging directory beside the destination, whose name derives from the destination's. A
second call finds the finished work of the first one if both are the same job, which the fingerprint in the staging
directory decides. No other user can write to the directory (`guard`), and the file with the fingerprint is locked while
an export runs. A `ledger` lists finished work with checksums. The files are in a subfolder for this job, so that a
leftover worker of another job cannot write to them.

Object stores cannot rename: see `remote`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from ..core.expr import leaves, structure
from ..errors import DestinationError, LazyckptError, MissingFileError, WorkerError
from ..formats.zarr.documents import JOB  # holds the fingerprint
from ..io.directories import Directory, open_unfollowed, rename_directory
from ..io.storage.base import Store
from ..io.system import POSIX, after_fork, lock, read_at, write_at
from ..lazy import LazyArray
from .guard import Owner, is_own, local_path, make_folder, own_folder, usual_mode
from .ledger import read_ledger
from .places import LEDGER, Folder

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

_ONCE = "once-"
_lock = threading.Lock()
_working: set[str] = set()


def staging_path(dest: Path) -> Path:
    """Return the path of the staging directory for ``dest``: beside it, or inside it if ``dest`` is a mounted volume or
    in a folder without write permission."""
    real = Path(os.path.realpath(dest) if os.path.isdir(dest) else os.path.abspath(dest))
    name = f".{real.name}.incomplete"
    fixed = real.is_dir() and (os.path.ismount(real) or not os.access(real.parent, os.W_OK | os.X_OK))
    return (real if fixed else real.parent) / name


def check_replaceable(dest: Path) -> None:
    """Raise DestinationError if no folder can be renamed to ``dest``."""
    if dest.is_dir() and staging_path(dest).parent == Path(os.path.realpath(dest)):
        raise DestinationError(
            f"{dest} is a mounted volume, or in a folder without write permission, and cannot be replaced by the new "
            "folder: name a folder inside it"
        )


def unfinished(dest: str | os.PathLike[str]) -> int | None:
    """Return the number of bytes that an interrupted or running export to a local destination has finished.

    Repeat the interrupted call with the same arguments to resume it.

    Parameters
    ----------
    dest
        The destination of the export.

    Returns
    -------
    int or None
        Finished bytes; None if there is no interrupted or running export.
    """
    staging = staging_path(local_path(dest))
    return read_ledger(staging / LEDGER).nbytes if os.path.isdir(staging) else None


def discard(dest: str | os.PathLike[str]) -> None:
    """Remove the unfinished files of an interrupted export to a local destination, so that the next export starts anew.

    Does nothing if there are none. Published files at ``dest`` are not touched.

    Parameters
    ----------
    dest
        The destination of the export.

    Raises
    ------
    DestinationError
        An export to ``dest`` is running, or another user may have written the unfinished files.
    """
    staging = staging_path(local_path(dest))
    if not os.path.isdir(staging):
        return
    with _of_this_process(staging):
        try:
            job, _ = _locked(staging)
            with job:
                job.write("")
                job.remove(staging)
        except OSError as e:
            if isinstance(e, LazyckptError):
                raise
            raise DestinationError(f"{e.filename or staging}: {e.strerror or e}. It cannot be removed") from e


def content(staging: Folder, fingerprint: str, plain: bool) -> Folder:
    """Return the folder for the files of a job: one of its own in the staging folder, where no worker of an earlier job
    can still write; or, if ``plain`` and there was no earlier job, the staging folder itself."""
    own = _content_name(fingerprint)
    if not POSIX:  # where the open file with the fingerprint keeps the staging folder from being renamed
        plain = False
    return staging if plain and not os.path.isdir(os.path.join(staging.root, own)) else staging.below(own)


def moved(dest: Path, fingerprint: str, keys: Sequence[str], verified: bool) -> set[str]:
    """Return the keys of the files that an earlier call of the same job moved to ``dest`` before it was killed. With
    ``verified``, only if that call had verified them."""
    staging = staging_path(dest)
    try:  # the staging directory is not checked yet: any user may have created it
        fd = open_unfollowed(staging / JOB)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode) or os.read(fd, 4096) != fingerprint.encode():
                return set()
        finally:
            os.close(fd)
    except OSError:
        return set()
    state = read_ledger(staging / LEDGER).moving
    if state is None or state < verified:
        return set()
    gone = {key for key in keys if not (staging / _content_name(fingerprint) / key).exists()}
    return gone if len(gone) < len(keys) and all((dest / key).exists() for key in gone) else set()


def _content_name(fingerprint: str) -> str:
    return fingerprint[:16]


@contextmanager
def staged(dest: Path, fingerprint: str, has_work: Callable[[Path], bool] | None = None) -> Iterator[Folder]:
    """Create or reopen the staging directory of a job, and remove it at the end of the block. The block has to publish
    the files.

    If the block fails, finished work is kept for the next call, unless that call would fail, too (the source is
    damaged). ``has_work`` returns whether the staging directory holds any; by default, the ledger says so. An OSError
    becomes a DestinationError that says whether anything was kept.
    """
    folder = staging_path(dest)
    with _of_this_process(folder):
        yield from _staged(dest, folder, fingerprint, has_work or _is_in_ledger)


def _is_in_ledger(folder: Path) -> bool:
    return bool(read_ledger(folder / LEDGER).nbytes)


def _staged(dest: Path, folder: Path, fingerprint: str, has_work: Callable[[Path], bool]) -> Iterator[Folder]:
    made: list[Path] = []
    new = not os.path.lexists(folder)
    try:
        made = make_folder(folder.parent)
        job, owner = _locked(folder)
        _put_back(dest)
    except BaseException as e:
        if new:
            _unmake([*made, folder])
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            where = e.filename if isinstance(e.filename, str) and os.path.isabs(e.filename) else dest
            raise DestinationError(f"cannot write {where}: {e.strerror or e}. Nothing was written") from e
        raise
    try:
        if job.read() != fingerprint.encode():
            job.write("")  # first, so that no job resumes from half-removed files
            if _empty(folder):
                os.mkdir(folder / _content_name(fingerprint))
            job.write(fingerprint)
        yield Folder(str(folder), owner)
    except BaseException as e:
        kept = resumable(e) and not is_unique(fingerprint) and has_work(folder)
        if not kept:
            job.write("")
            job.remove(folder, ignore_errors=True)
            _unmake(made)
        if isinstance(e, WorkerError) and kept:
            raise WorkerError(f"{e}. {_kept_note(folder)}") from e
        if isinstance(e, OSError) and not isinstance(e, LazyckptError):
            what = _kept_note(folder) if kept else "Nothing was written"
            raise DestinationError(f"{dest}: {e.strerror or e}. {what}") from e
        raise
    else:
        job.remove(folder, ignore_errors=True)
    finally:
        job.close()


def reveal(folder: Folder, dest: Path) -> None:
    """Rename a complete folder to its destination, replacing an existing folder.

    Whenever Ctrl-C or a kill comes, either the staging folder can be resumed or the destination is complete. So the
    files that make it resumable are removed last, and the folder, which only its owner may use until then (a staging
    folder that others may write to is refused), gets the usual permissions after the renaming.
    """
    try:
        _rename(folder, dest)
    finally:
        if not folder.inside and not os.path.lexists(folder.root):  # the staging folder itself was renamed
            os.chmod(dest, usual_mode(dest.parent))
            for name in (JOB, LEDGER):
                with suppress(FileNotFoundError):
                    os.unlink(dest / name)


def _rename(folder: Folder, dest: Path) -> None:
    if dest.exists() and any(dest.iterdir()):
        old = _replaced(dest)
        rename_directory(dest, old)
        try:
            folder.become(dest)
        finally:
            if os.path.lexists(dest):
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, dest)
    else:
        folder.become(dest)


def _replaced(dest: Path) -> Path:
    return dest.parent / f".{dest.name}.replaced"


def _put_back(dest: Path) -> None:
    """Recover from a process that was killed while it replaced a folder: rename the old folder back, or remove it if
    the new one is in place."""
    old = _replaced(dest)
    if not os.path.lexists(old):
        return
    if not is_own(old):
        raise DestinationError(
            f"{old}: an export that replaces {dest} keeps the old folder under this name, but it belongs to another "
            "user or is not a folder. Nothing was written. Rename or remove it, or choose another destination"
        )
    if os.path.lexists(dest):
        shutil.rmtree(old)
    else:
        os.rename(old, dest)


def fingerprint(tensors: Iterable[tuple[LazyArray, object]], texts: Iterable[bytes]) -> str:
    """Return a digest that identifies a job: the source files, the tensors, where and how each is written, and the
    other content. Calls with the same fingerprint may resume each other's work."""
    digest = hashlib.sha256(torch.__version__.encode())  # offsets in a torch.save file depend on the version
    stores: dict[int, Store] = {}
    for tensor, where in tensors:
        stores[id(tensor.store)] = tensor.store
        spec = tensor.spec
        about = spec.name, spec.stored_as, spec.rule, structure(spec), where
        ends = [
            (len(held), *((held[0], held[-1]) if held else ())) for held in (one.spec.fragments for one in leaves(spec))
        ]
        wanted = [a if isinstance(a, range) else a.tobytes() for a in tensor._sel.axes], tensor._sel.dims
        digest.update(repr((about, ends, wanted)).encode("utf-8", "surrogatepass"))
    for store in stores.values():
        digest.update(repr((store.root, sorted(store.pins.items()))).encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(text)
    return digest.hexdigest()


def once() -> str:
    """Return a unique fingerprint for a job that cannot be resumed."""
    return f"{_ONCE}{uuid4().hex}"


class Busy(DestinationError):
    """Another export is writing to the same destination."""


def is_unique(fingerprint: str) -> bool:
    """Return whether a fingerprint is one of `once`."""
    return fingerprint.startswith(_ONCE)


def _busy(folder: Path) -> Busy:
    return Busy(f"{folder}: another export is writing there. Wait for it")


def _kept_note(folder: Path) -> str:
    return f"What is finished is kept in {folder}: call again to go on, or remove it"


def resumable(e: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    return not isinstance(e, LazyckptError) or isinstance(e, WorkerError | DestinationError | MissingFileError)


@contextmanager
def _of_this_process(folder: Path) -> Iterator[None]:
    """Exclude other threads of this process by the folder's name; file locks only exclude other processes."""
    with exclusively(os.path.realpath(folder), _busy(folder)):
        yield


@contextmanager
def exclusively(name: str, busy: Busy) -> Iterator[None]:
    """Exclude other threads of this process by a name: raise ``busy`` if one of them is in such a block."""
    with _lock:
        if name in _working:
            raise busy
        _working.add(name)
    try:
        yield
    finally:
        _working.discard(name)


def _after_fork() -> None:
    """Forget the exports of the parent in a forked child: their threads do not run here, and their file locks say where
    the parent still writes."""
    global _lock, _working
    _lock, _working = threading.Lock(), set()


after_fork(_after_fork)


class _Job:
    """The open and locked file with the fingerprint. The lock belongs to this process only: forked workers may outlive
    it and must not keep the lock."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self) -> bytes:
        assert self._fd is not None
        return read_at(self._fd, 4096, 0)

    def write(self, text: str) -> None:
        """Replace the content."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        write_at(self._fd, text.encode(), 0)

    def remove(self, folder: Path, ignore_errors: bool = False) -> None:
        """Remove the staging directory, unless it was renamed. The locked file goes last: as soon as it is gone,
        another process may create it again and work in the directory."""
        try:
            if self._fd is None or not _is_at(self._fd, folder / JOB):
                return
            _empty(folder)
            if not POSIX:  # where an open file cannot be removed
                self.close()
            os.unlink(folder / JOB)
            with suppress(OSError):  # another process works there
                folder.rmdir()
        except OSError:
            if not ignore_errors:
                raise


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is the one that the path leads to now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _locked(folder: Path) -> tuple[_Job, Owner]:
    """Open and lock the file with the fingerprint, creating the folder if needed; return it and the folder's owner.
    Raises DestinationError if another process has the lock, or if the folder belongs to another user."""
    path = folder / JOB
    while True:
        above, owner = own_folder(folder)
        try:
            fd = above.open(JOB, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # the folder was removed
            continue
        finally:
            above.close()
        job = _Job(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            job.close()
            raise DestinationError(f"{path} is not a regular file. Nothing was written. Remove {folder}")
        try:
            lock(fd)
        except BlockingIOError:
            job.close()
            raise _busy(folder) from None
        except OSError:  # a file system without locks: users must not run two exports at once
            pass
        with suppress(OSError):
            if _is_at(fd, path):
                return job, owner
        job.close()  # the previous holder of the lock finished and removed or renamed the file


def _empty(folder: Path) -> bool:
    """Remove everything but the file with the fingerprint. Return whether there was anything."""
    with Directory(folder) as at:
        found = [name for name in at.names() if name != JOB]
        for name in found:
            at.remove(name)
    return bool(found)


def _unmake(made: list[Path]) -> None:
    for path in reversed(made):
        with suppress(OSError):  # the folder is no longer empty
            path.rmdir()
