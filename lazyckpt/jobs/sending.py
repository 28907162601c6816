"""What a job sends to the workers of other processes: descriptions of its tensors once, and tasks that refer to them.

The description of a tensor on a thousand ranks takes 170 KB, and a hundred tasks read a part of it each. So
descriptions are sent apart, once for each worker: Dask and Ray hand them from worker to worker; the workers of other
executors get them with their first tasks, and a worker that joins later answers that it lacks them. A task has the
number of its tensor and the part that it reads.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from ..core.fragments import fragments_of
from ..core.specs import TensorSpec
from ..errors import DataError
from ..io.parcels import compressed, unpacked
from ..io.storage import credentials
from ..io.storage.base import Store
from ..lazy import LazyArray

_LARGE = 16 << 20  # bytes of a tensor that several tasks read
_MOST = 8 << 20  # bytes of descriptions that every worker gets; if there are more, each task has its own
_KEPT = 2  # jobs whose descriptions a worker keeps

_known: dict[str, list[tuple[Store, TensorSpec]]] = {}  # in a worker: digest -> descriptions by number
_own = threading.local()  # ``of``: the descriptions of the tasks that this thread is reading


class Descriptions:
    """The descriptions of those tensors of a job that many tasks read, or that have many fragments.

    Attributes
    ----------
    data
        The descriptions as bytes; None if there are none to send.
    digest
        Identifies the data; empty if there are none.
    """

    def __init__(self, tensors: Iterable[LazyArray]) -> None:
        found = {(id(t.spec), id(t.store)): t for t in tensors if _is_shared(t)}
        self._tensors = list(found.values())  # they keep the ids valid
        self._numbers = {key: n for n, key in enumerate(found)}
        data = compressed(_dumped([(t.store, t.spec) for t in self._tensors])) if found else b""
        self.data = data if 0 < len(data) <= _MOST else None
        self.digest = hashlib.sha256(data).hexdigest()[:32] if self.data else ""
        if self.data is None:
            self._numbers.clear()

    def pickled(self, work: Sequence[Callable[[], Any]]) -> bytes:
        """Return tasks as bytes. Raises DataError if they cannot be sent."""
        return compressed(_dumped(list(work), self))

    def reduced(self, tensor: LazyArray) -> Any:
        """Return how a tensor, or a part of one, is pickled."""
        number = self._numbers.get((id(tensor.spec), id(tensor.store)))
        return NotImplemented if number is None else (_tensor, (number, type(tensor), tensor._selection))


def _is_shared(tensor: LazyArray) -> bool:
    return tensor.nbytes > _LARGE or fragments_of(tensor.spec.fragments).only() is None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, descriptions: Descriptions) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._descriptions = descriptions

    def reducer_override(self, obj: Any) -> Any:
        return self._descriptions.reduced(obj) if isinstance(obj, LazyArray) else NotImplemented


def _dumped(value: Any, descriptions: Descriptions | None = None) -> bytes:
    try:
        with credentials.passing():  # to workers only
            if descriptions is None:
                return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            file = io.BytesIO()
            _Pickler(file, descriptions).dump(value)
            return file.getvalue()
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise DataError(f"the work cannot be sent to other processes: {e}. Use threads (executor=None)") from e


# -- in a worker


def perform(work: bytes, digest: str, data: bytes | None, _: str) -> list[Any] | None:
    """Do the tasks of `Descriptions.pickled`; return their results. None: the descriptions are needed, too."""
    if digest:
        found = _known.get(digest)
        if found is None:
            if data is None:
                return None
            for old in list(_known)[: len(_known) - _KEPT + 1]:
                _known.pop(old, None)
            found = _known[digest] = unpacked(data)
        _own.of = found
    try:
        return [do() for do in unpacked(work)]
    finally:
        _own.of = None


def _tensor(number: int, kind: type[LazyArray], selection: Any) -> LazyArray:
    store, spec = _own.of[number]
    return kind(store, spec, selection)


# -- to a worker


class Sender:
    """Submits tasks to an executor of other processes, with the descriptions of their tensors where they are needed.

    ``shared`` is what an executor accepts in place of the descriptions and hands to its workers by itself; None if it
    cannot. The first ``times`` futures then have the descriptions.
    """

    def __init__(self, executor: Any, tensors: Iterable[LazyArray], times: int) -> None:
        self._executor = executor
        self._descriptions = Descriptions(tensors)
        self._times = times
        digest, data = self._descriptions.digest, self._descriptions.data
        broadcast = _broadcast(executor)
        self._shared = None if data is None or broadcast is None else broadcast(data, digest)

    def submit(self, work: Sequence[Callable[[], Any]], again: bool = False, **where: Any) -> Any:
        """Return the future of `perform`. ``again``: the worker has answered that it lacks the descriptions. ``where``
        are options of the executor's ``submit``."""
        data: Any = self._shared
        if data is None and (again or self._times > 0):
            data = self._descriptions.data
            self._times -= 1
        # The unique text is needed because Dask treats two calls with equal arguments as one.
        packed = self._descriptions.pickled(work)
        return self._executor.submit(perform, packed, self._descriptions.digest, data, uuid4().hex, **where)


def _broadcast(executor: Any) -> Callable[[bytes, str], Any] | None:
    """Return the function by which an executor hands bytes to all workers, None if it has none."""
    client = getattr(executor, "_client", None)  # distributed.cfexecutor.ClientExecutor
    if client is not None:
        # the result of a task, unlike scattered data, is computed again if the workers that have it die
        return lambda data, digest: client.submit(bytes, data, key=f"lazyckpt-{digest}-{uuid4().hex}")
    put: Callable[[bytes, str], Any] | None = getattr(executor, "put", None)
    return put
