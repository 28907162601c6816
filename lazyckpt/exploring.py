"""`lazyckpt.serve`: the explorer of a checkpoint, a run or a comparison, by path or view."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import DataError, FormatError, MissingFileError
from .explore.api import Explorer
from .explore.server import Server
from .explore.subject import Subject
from .runs.view import RunView
from .view import CheckpointView

Source = CheckpointView | str | os.PathLike[str]


def subject_of(source: Source, other: Source | None = None, options: Mapping[str, Any] | None = None) -> Subject:
    """Return what the explorer shows of a path or view, and of a second one beside it.

    Parameters
    ----------
    source
        A view, or a path. The folder of a run with two or more checkpoints is shown as a run, unless ``options`` name
        one of them (``tag``).
    other
        A second view or path, to compare the first one with.
    options
        Options of `lazyckpt.open`.

    Raises
    ------
    LazyckptError
        As `lazyckpt.open` raises it.
    """
    options = dict(options or {})
    title = "" if isinstance(source, CheckpointView) else os.fspath(source)
    if other is not None:
        return Subject(_opened(source, options), _opened(other, options), title=_joined(source, other))
    if isinstance(source, RunView):
        return Subject(source, run=source, title=title)
    if not isinstance(source, CheckpointView) and not options.get("tag") and not options.get("format"):
        run = _run_of(source, options)
        if run is not None:
            return Subject(run, run=run, title=title)
    return Subject(_opened(source, options), title=title)


def _opened(source: Source, options: Mapping[str, Any]) -> CheckpointView:
    return source if isinstance(source, CheckpointView) else CheckpointView(source, **options)


def _joined(a: Source, b: Source) -> str:
    texts = [one.root if isinstance(one, CheckpointView) else os.fspath(one) for one in (a, b)]
    return " and ".join(texts)


def _run_of(path: str | os.PathLike[str], options: Mapping[str, Any]) -> RunView | None:
    """Return the run at a path if it has two or more checkpoints with different steps."""
    try:
        run = RunView(path, storage_options=options.get("storage_options"))
    except (FormatError, MissingFileError):
        return None
    return run if len(run.paths) > 1 else None


def serve(
    source: Source,
    other: Source | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    hosts: Iterable[str] = (),
    **options: Any,
) -> Server:
    """Show a checkpoint, a run, or two checkpoints side by side as a local web page. Returns at once.

    The server is read-only. It listens on this machine's loopback address unless told otherwise, and answers those who
    know the token that `Server.url` has in it. It runs in a thread until `Server.close`, or until the process ends;
    `Server.wait` waits for it.

    Parameters
    ----------
    source
        A view, or the path or URL of a checkpoint or of a run.
    other
        A second one, to compare the first with.
    host
        The address to listen on.
    port
        The port; 0 chooses a free one.
    token
        What one has to know to be answered. By default a random one.
    hosts
        More names under which the server is reached: those of a proxy or a tunnel; "*" for any.
    **options
        Options of `lazyckpt.open`: tag, format, rules, storage_options, ...

    Returns
    -------
    Server
        ``url``, ``wait()``, ``close()``.

    Raises
    ------
    DataError
        starlette or uvicorn is not installed, or the port cannot be used. Errors of opening are shown by the page.

    Examples
    --------
    >>> server = lazyckpt.serve("runs/405b")  # doctest: +SKIP
    >>> server.url  # doctest: +SKIP
    'http://127.0.0.1:43521/?token=...'
    """
    explorer = Opening(source, other, options)
    return Server(explorer.get, host=host, port=port, token=token, hosts=hosts)


class Opening:
    """An explorer that is opened in a thread, so that a page is there before its checkpoint is open.

    Parameters
    ----------
    source, other, options
        As for `subject_of`.
    """

    def __init__(self, source: Source, other: Source | None, options: Mapping[str, Any]) -> None:
        self._error: Exception | None = None
        self._explorer: Explorer | None = None

        def work() -> None:
            try:
                self._explorer = Explorer(subject_of(source, other, options))
            except Exception as e:  # every request raises it
                self._error = e

        self._thread = threading.Thread(target=work, name="lazyckpt open", daemon=True)
        self._thread.start()

    def get(self) -> Explorer:
        """Return the explorer when it is open, or raise what opening raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._explorer is None:
            raise DataError("the checkpoint was not opened")
        return self._explorer
