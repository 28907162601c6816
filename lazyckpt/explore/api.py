"""The explorer's API: a request is a path and parameters, an answer is bytes of a media type.

Nothing here knows what carries requests and answers: the server, the widget and the report all call `Explorer.answer`.
docs/reference/explorer-api.md describes every path. A path's function is in a module of `endpoints`, which is imported
when the path is first asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any

from ..errors import (
    ChangedFileError,
    DataError,
    LazyckptError,
    MissingFileError,
    SelectionError,
    TensorNotFoundError,
    printable,
)
from .packing import VERSION, to_json
from .query import Query
from .subject import Subject

_MODULES = (
    "endpoints.about",
    "endpoints.tree",
    "endpoints.architecture",
    "endpoints.ranks",
    "endpoints.tensor",
    "endpoints.values",
    "endpoints.layers",
    "endpoints.experts",
    "endpoints.tokens",
    "endpoints.compare",
    "endpoints.run",
    "endpoints.python",
)  # modules with a dictionary ENDPOINTS: path -> function
_KEPT = 4 << 20  # bytes of answers that an explorer keeps
_ENTRY = 1024  # bytes of an entry besides its texts
_STATUS = (
    (TensorNotFoundError, 404),
    (MissingFileError, 404),
    (SelectionError, 400),
    (DataError, 400),
    (ChangedFileError, 409),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    body: bytes
    """JSON, or arrays as `packing.pack` packs them."""
    type: str = "application/json"
    """Media type of the body."""
    status: int = 200
    """Status as in HTTP."""


Endpoint = Callable[[Subject, Query], "dict[str, Any] | bytes"]
"""Computes the answer to a request: a dictionary, which becomes JSON, or packed arrays."""


class Explorer:
    """Answers the requests of the explorer about a subject. Threads may share one.

    Parameters
    ----------
    subject
        The checkpoint, run or comparison to explore.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._answers: OrderedDict[tuple[Any, ...], Answer] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def answer(self, path: str, values: Mapping[str, str], wanted: Callable[[], bool] = lambda: True) -> Answer:
        """Return the answer to a request. Errors that a request can cause are answers, too.

        Parameters
        ----------
        path
            The path without a slash at either end: "about", "tree", ...
        values
            The parameters.
        wanted
            Returns whether the answer is still wanted. Long computations ask between blocks.

        Raises
        ------
        Cancelled
            The answer is no longer wanted.
        """
        endpoint = _endpoints().get(path)
        if endpoint is None:
            return _error(404, "NotFound", f"there is no path {printable(path)!r:.80} in version {VERSION} of the API")
        query = Query(values, wanted)
        key = (path, *query.key)
        with self._lock:
            kept = self._answers.get(key)
            if kept is not None:
                self._answers.move_to_end(key)
                return kept
        try:
            found = endpoint(self.subject, query)
        except (LazyckptError, OSError) as e:
            return failed(e)
        if isinstance(found, bytes):
            answer = Answer(found, "application/octet-stream")
        else:
            answer = Answer(to_json(found))
        self._keep(key, answer)
        return answer

    def forget(self) -> None:
        """Forget the answers, and the elements, that are kept to be given again."""
        self.subject.forget()
        with self._lock:
            self._answers.clear()
            self._size = 0

    def _keep(self, key: tuple[Any, ...], answer: Answer) -> None:
        if _size(key, answer) > _KEPT // 2:
            return
        with self._lock:
            old = self._answers.pop(key, None)
            self._size += _size(key, answer) - (_size(key, old) if old else 0)
            self._answers[key] = answer
            while self._size > _KEPT:
                self._size -= _size(*self._answers.popitem(last=False))


def _size(key: tuple[Any, ...], answer: Answer) -> int:
    """Return the bytes of an answer that is kept, with those of the request."""
    path, *values = key
    return len(answer.body) + _ENTRY + 4 * (len(path) + sum(len(name) + len(value) for name, value in values))


def failed(error: LazyckptError | OSError) -> Answer:
    """Return the answer for an error."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 422)
    return _error(status, type(error).__name__, str(error))


def _error(status: int, kind: str, message: str) -> Answer:
    return Answer(to_json({"error": {"kind": kind, "message": message}}), status=status)


@cache
def endpoint_modules() -> tuple[Any, ...]:
    """Return the modules of the paths."""
    return tuple(import_module(f".{name}", __package__) for name in _MODULES)


@cache
def _endpoints() -> Mapping[str, Endpoint]:
    found: dict[str, Endpoint] = {}
    for module in endpoint_modules():
        found |= module.ENDPOINTS
    return found
