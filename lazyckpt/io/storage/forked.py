"""Requests of a forked process, sent by a helper process.

The threads of obstore are not copied by a fork, and its locks are: in a child of a process that has used obstore, every
request waits for ever. Such a child (a worker of torch's DataLoader, for one) lets a helper send its requests. The
helper is a new interpreter, not a fork. All stores of the child share one; it starts with the first request, and ends
when the child does, however that ends.

Both sides write frames to a pipe: two lengths, a pickle of them, and the bytes of a file, which are never unpickled.
Requests have numbers, so several threads wait for answers at the same time. What stores are made of, credentials
included, goes through the pipe, not through the command line or the environment.

`obstore_works` says whether this process may use obstore itself. `by_helper` makes a method of a store ask the helper
where it does not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from ...core.index import FileInfo
from ...errors import DataError
from ..system import after_fork, widen_pipe
from .base import Store
from .repeating import Transient

_LENGTHS = struct.Struct("<QQ")  # of the pickle, and of the bytes of a file behind it
_PIPE = 1 << 20  # bytes; Linux gives a pipe 64 KiB, and a user no more than this
_THREADS = 64  # requests that a helper has under way
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.raw.readline()); "
    "from lazyckpt.io.storage.forked import main; main()"
)
_ENDED = "the helper process that sends the requests of this forked process has ended"

P = ParamSpec("P")
T = TypeVar("T")
Recipe = tuple[Callable[..., Store], tuple[Any, ...]]


class Remakable(Protocol):
    """A store that a helper can make again."""

    def recipe(self) -> Recipe:
        """Return a function of a module, and the arguments with which it makes a store like this one, without pins."""


S = TypeVar("S", bound=Remakable)

_user: int | None = None  # the process that has used obstore
_lock = threading.Lock()
_helper: Helper | None = None


def obstore_works() -> bool:
    """Return whether this process may use obstore, and remember that it does: in its forked children it does not."""
    global _user
    if _user is None:
        _user = os.getpid()
    return _user == os.getpid()


def by_helper(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method of a store that uses obstore: where that does not work, the helper calls it. The first argument
    is the name of a file or folder. A memoryview among the arguments is filled, and the method returns first how many
    bytes of it."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if obstore_works():
            return method(self, *args, **kwargs)
        result: T = _running().call(self, method.__name__, args, kwargs)
        return result

    return call


def _running() -> Helper:
    global _helper
    with _lock:
        if _helper is None or _helper.ended:
            _helper = Helper()
        return _helper


# -- in the forked process


class _Request(NamedTuple):
    """What the helper is asked for: to call a method of the store that ``recipe`` (pickled) makes. ``pin`` is the pin
    of the file, ``room`` the place among the arguments and the size of the memory to fill."""

    number: int
    recipe: bytes
    pin: FileInfo | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    room: tuple[int, int] | None


class _Raised(NamedTuple):
    """An exception, apart: pickles of OSError lose an errno that was set later."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    errno: int | None
    attributes: dict[str, Any]


class Helper:
    """The helper of this process. Safe to use from several threads.

    Raises
    ------
    DataError
        It cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable or hasattr(sys, "frozen"):
            raise DataError(
                "a forked process cannot read URLs here: there is no Python interpreter to start. Start the workers "
                "with the method 'spawn'"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        widen_pipe(self._from, _PIPE)
        self._lock = threading.Lock()  # of the pipe to the helper, and of what follows
        self._waiting: dict[int, tuple[Future[Any], memoryview | None]] = {}
        self._number = 0
        self.ended = False
        try:
            _write(self._to, json.dumps(sys.path).encode() + b"\n")
            _read(self._from, memoryview(bytearray(1)))
        except (OSError, EOFError) as e:
            self.close()
            raise DataError(
                f"the helper process that reads URLs for this forked process cannot be started ({sys.executable}): its "
                "error is above. Start the workers with the method 'spawn'"
            ) from e
        threading.Thread(target=self._answers, name="lazyckpt-helper", daemon=True).start()

    def call(self, store: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the helper call a method of a store like this one. Raises what the method raises, Transient if the helper
        has ended, and DataError if what the store is made of cannot be sent."""
        target = room = None
        for n, arg in enumerate(args):
            if isinstance(arg, memoryview):
                target, room = arg, (n, len(arg))
                args = (*args[:n], None, *args[n + 1 :])
        try:
            recipe = pickle.dumps(store.recipe())
        except Exception as e:  # pickle raises several
            raise DataError(
                f"{store.root}: its storage options cannot be sent to the helper process of a forked process "
                f"({type(e).__name__}). Start the workers with the method 'spawn', or pass plain options"
            ) from None
        pin = store.pins.get(args[0]) if args else None
        future: Future[Any] = Future()
        with self._lock:
            if self.ended:
                raise Transient(_ENDED)
            self._number += 1
            number = self._number
            data = pickle.dumps(_Request(number, recipe, pin, method, args, kwargs, room))
            self._waiting[number] = future, target
            try:
                _write(self._to, _LENGTHS.pack(len(data), 0) + data)
            except OSError:
                self._waiting.pop(number, None)
                self.ended = True
                raise Transient(_ENDED) from None
        try:
            return future.result()
        except BaseException:
            if not future.done() and self._waiting.pop(number, None) is None:
                wait([future])  # its bytes arrive right now: the caller may use the memory for something else next
            raise

    def _answers(self) -> None:
        """Hand the answers to the threads that wait for them, until the helper ends."""
        lengths = memoryview(bytearray(_LENGTHS.size))
        with contextlib.suppress(OSError, EOFError):
            while True:
                _read(self._from, lengths)
                size, nbytes = _LENGTHS.unpack(lengths)
                data = bytearray(size)
                _read(self._from, memoryview(data))
                number, found = pickle.loads(data)
                future, target = self._waiting.pop(number, (None, None))
                if target is None or nbytes > len(target):  # nobody waits for it any more
                    target = memoryview(bytearray(nbytes))
                try:
                    _read(self._from, target[:nbytes])
                except BaseException as e:
                    if future is not None:
                        future.set_exception(Transient(_ENDED))
                    raise e
                if future is not None:
                    if isinstance(found, _Raised):
                        future.set_exception(_again(found))
                    else:
                        future.set_result(found)
                del future, target, found
        with self._lock:
            self.ended = True
            left, self._waiting = self._waiting, {}
        for future, _ in left.values():
            future.set_exception(Transient(_ENDED))

    def close(self) -> None:
        """Close the pipes: the helper ends, if no other process has them."""
        self.ended = True
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _again(raised: _Raised) -> BaseException:
    try:
        error = raised.kind(*raised.args)
    except Exception:  # an exception with other parameters than its args
        error = OSError(raised.errno or errno.EIO, " ".join(map(str, raised.args)))
    if isinstance(error, OSError) and raised.errno is not None:
        error.errno = raised.errno
    for name, value in raised.attributes.items():
        setattr(error, name, value)
    return error


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read(fd: int, target: memoryview) -> None:
    """Fill the target. Raises EOFError at the end of the pipe."""
    while target:
        count = os.readv(fd, [target])
        if not count:
            raise EOFError
        target = target[count:]


def _forget() -> None:
    """Close, in a forked child, the pipes of its parent's helper, which would not end with the parent otherwise."""
    global _lock, _helper
    _lock = threading.Lock()
    if _helper is not None:
        _helper.close()
        _helper._process.returncode = 0  # it is no child of this process: nothing waits for it here
        _helper = None


after_fork(_forget)


# -- in the helper


class _Made:
    """A store of the forked process, made when it is first used."""

    def __init__(self, recipe: bytes) -> None:
        self._recipe, self._lock = recipe, threading.Lock()
        self._store: Store | None = None

    def pinned(self, path: Any, pin: FileInfo | None) -> Store:
        with self._lock:
            if self._store is None:
                make, args = pickle.loads(self._recipe)
                self._store = make(*args)
        assert self._store is not None
        return self._store if pin is None else self._store.pinned({path: pin})


def main() -> None:
    """Answer requests until standard input ends. The rest of the program calls this in a new interpreter only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks, and that ends this one
    source, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(OSError):  # without standard error, the pipe is only closed
        os.close(1)
        os.dup2(2, 1)  # what libraries print must not get between the answers
    stores: dict[bytes, _Made] = {}
    lock = threading.Lock()
    threads = ThreadPoolExecutor(_THREADS)
    _write(answers, b"\n")

    def answer(request: _Request, made: _Made) -> None:
        found, memory = _result(request, made)
        try:
            data = pickle.dumps((request.number, found))
        except Exception as e:
            data, memory = pickle.dumps((request.number, _told(OSError(f"{type(e).__name__}: {e}")))), memory[:0]
        with lock, contextlib.suppress(OSError):
            _write(answers, _LENGTHS.pack(len(data), len(memory)) + data)
            _write(answers, memory)  # type: ignore[arg-type]  # memory as bytes

    lengths = memoryview(bytearray(_LENGTHS.size))
    with contextlib.suppress(EOFError, OSError):
        while True:
            _read(source, lengths)
            data = bytearray(_LENGTHS.unpack(lengths)[0])
            _read(source, memoryview(data))
            request: _Request = pickle.loads(data)
            made = stores.setdefault(request.recipe, _Made(request.recipe))
            threads.submit(answer, request, made)
    os._exit(0)  # without waiting for requests that nobody waits for


def _result(request: _Request, made: _Made) -> tuple[Any, memoryview]:
    """Call the method; return its result, or what it raised, and the bytes that it filled."""
    memory = memoryview(b"")
    try:
        args = list(request.args)
        if request.room is not None:
            at, size = request.room
            memory = args[at] = memoryview(bytearray(size))
        store = made.pinned(args[0] if args else None, request.pin)
        found = getattr(store, request.method)(*args, **request.kwargs)
        return found, memory[: found[0]] if request.room is not None else memory
    except BaseException as e:  # also a panic of a library in Rust
        return _told(e), memory[:0]


def _told(error: BaseException) -> _Raised:
    """Return an exception in parts that can be pickled, as its nearest type that can be."""
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, Exception)] or [OSError]
    for attributes in (dict(vars(error)), {}):
        for kind in kinds:
            raised = _Raised(kind, error.args, getattr(error, "errno", None), attributes)
            with contextlib.suppress(Exception):
                pickle.loads(pickle.dumps(raised))
                return raised
    return _Raised(OSError, (str(error),), errno.EIO, {})
