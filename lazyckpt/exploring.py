"""`lazyckpt.serve`: the explorer of a checkpoint, a run or a comparison, by path or view."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, Generic, TypeVar

import torch

from .core.units import size_in_bytes
from .derive.sources import address_of, shown_path
from .errors import DataError, FormatError, MissingFileError, some
from .explore.api import Explorer
from .explore.query import Query
from .explore.server import Server
from .explore.sharing import Folder, Zarr, routes
from .explore.subject import Subject
from .runs.view import RunView
from .view import CheckpointView

T = TypeVar("T")
Source = CheckpointView | str | os.PathLike[str]
_SOON = 1.0  # seconds in which an opening that fails is an error of `serve`
_OF_ONE = ("tag", "format", "rules", "base")  # options of one checkpoint, which a run does not take


def subject_of(source: Source, other: Source | None = None, options: Mapping[str, Any] | None = None) -> Subject:
    """Return what the explorer shows of a path or view, and of a second one beside it.

    Parameters
    ----------
    source
        A view, or a path. The folder of a run with two or more checkpoints is shown as a run, unless ``options`` name
        one of them (``tag``) or say how to read it (``format``, ``rules``, ``base``), which runs have no use for.
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
    title = "" if isinstance(source, CheckpointView) else title_of(source)
    if other is not None:
        return Subject(_opened(source, options), _opened(other, options), title=_joined(source, other))
    if isinstance(source, RunView):
        return Subject(source, run=source, title=title)
    if not isinstance(source, CheckpointView) and not any(options.get(name) for name in _OF_ONE):
        run = _run_of(source, options)
        if run is not None:
            return Subject(run, run=run, title=title)
    return Subject(_opened(source, options), title=title)


def _opened(source: Source, options: Mapping[str, Any]) -> CheckpointView:
    return source if isinstance(source, CheckpointView) else CheckpointView(source, **options)


def title_of(source: Source) -> str:
    """Return what pages and reports call a view, path or URL: without the user and the query of a URL."""
    if isinstance(source, CheckpointView):
        return address_of(source)
    return shown_path(os.fspath(source))


def _joined(a: Source, b: Source) -> str:
    return f"{title_of(a)} and {title_of(b)}"


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
    rename: str | None = None,
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> Server:
    """Show a checkpoint, a run, or two checkpoints side by side as a local web page. Returns when the checkpoint
    is open, at the latest after a second; with ``rename``, ``dtype`` or ``dequantize`` always when it is open.

    The server is read-only. It listens on this machine's loopback address unless told otherwise, and answers those who
    know the token that `Server.url` has in it. It runs in a thread until `Server.close`, or until the process ends;
    `Server.wait` waits for it.

    It also offers the checkpoint as if it had been converted, computed on demand and by ranges: as a folder of
    safetensors at `Server.address` + "hf/", and as a Zarr store at "zarr/".

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
    rename
        Names for the folder and the store: "hf" or "megatron" (`CheckpointView.rename`).
    dtype
        Dtype of the floating-point weights in the folder and the store.
    dequantize
        Offer the weights that the codes and scales of a quantized model mean, as ``dtype`` (default: bfloat16).
    max_shard_size
        Largest size of a file of the folder: bytes, or text such as "5GB".
    **options
        Options of `lazyckpt.open`: tag, format, rules, storage_options, ...

    Returns
    -------
    Server
        ``url``, ``wait()``, ``close()``.

    Raises
    ------
    DataError
        starlette or uvicorn is not installed, the port cannot be used, or options are given for a view, which is open
        already.
    LazyckptError
        ``rename``, ``dtype`` or ``dequantize`` do not fit the checkpoint, or it cannot be opened. The page shows
        errors of an opening that takes longer than a second.

    Examples
    --------
    >>> server = lazyckpt.serve("runs/405b")  # doctest: +SKIP
    >>> server.url  # doctest: +SKIP
    'http://127.0.0.1:43521/?token=...'
    """
    unknown = options.keys() - signature(CheckpointView).parameters.keys()
    if unknown:  # otherwise only a thread would know it
        raise TypeError(f"serve() got an unexpected keyword argument {min(unknown)!r}")
    given = sorted(name for name, value in options.items() if value is not None)
    if given and all(isinstance(one, CheckpointView) for one in (source, other) if one is not None):
        raise DataError(
            f"{some(given)} cannot change a view that is open: pass the option to lazyckpt.open, or the path to serve"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DataError(f"dtype is {dtype!r:.60}: weights are served in a floating-point dtype, such as torch.bfloat16")
    size_in_bytes(max_shard_size)
    explorer = Later(lambda: Explorer(subject_of(source, other, options)))
    explorer.start()
    path = None if isinstance(source, CheckpointView) else os.fspath(source)

    def views() -> tuple[CheckpointView, CheckpointView]:
        view = explorer.get().subject.checkpoint(Query({}))
        assert isinstance(view, CheckpointView)  # `subject_of` makes no others
        return view, _changed(view, rename, dtype, dequantize)

    def folder() -> Folder:
        view, changed = both.get()
        return Folder(changed, _beside(path, view, changed, dtype, dequantize), max_shard_size)

    both, files, store = Later(views), Later(folder), Later(lambda: Zarr(both.get()[1]))
    if rename is not None or dtype is not None or dequantize:
        both.get()  # what does not fit the checkpoint is told now, not by an answer
    server = Server(
        explorer.get, host=host, port=port, token=token, hosts=hosts, mounts=lambda: routes(files.get, store.get)
    )
    try:
        explorer.join(_SOON)
    except BaseException:
        server.close()
        raise
    return server


def _changed(view: CheckpointView, rename: str | None, dtype: torch.dtype | None, dequantize: bool) -> CheckpointView:
    if dequantize:
        view = view.dequantize(dtype or torch.bfloat16)
    if rename is not None:
        view = view.rename(rename)
    return view if dtype is None or dequantize else view.astype(dtype)


def _beside(
    path: str | None, view: CheckpointView, changed: CheckpointView, dtype: torch.dtype | None, dequantize: bool
) -> dict[str, bytes]:
    """Return the configuration and tokenizer beside a checkpoint; else the configuration in its metadata, if any."""
    from .recipes.parts import with_dtype  # recipes import torch.distributed, which takes 50 MB
    from .recipes.unquantized import SideFiles

    told = dtype or (torch.bfloat16 if dequantize else None)
    found = SideFiles(path or view.root, changed, view.root, told, plain=dequantize).contents()
    config = changed.meta.get("config")
    if "config.json" not in found and isinstance(config, Mapping) and "model_type" in config:
        settings = with_dtype(config, told) if told is not None else config
        try:
            found["config.json"] = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
        except (TypeError, ValueError):
            return found  # the metadata has objects that are not plain
    return found


class Later(Generic[T]):
    """Something that is made once, by the first who asks for it or in a thread. All get it, or what making it raised.

    Parameters
    ----------
    make
        Makes it.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._made: T | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Begin to make it, in a thread."""
        self._thread = threading.Thread(target=self._quietly, name="lazyckpt open", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait at most so long for the thread that `start` began, and raise what making it raised."""
        if self._thread is not None:
            self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def _quietly(self) -> None:
        with suppress(Exception):  # `get` raises it
            self.get()

    def get(self) -> T:
        """Return it, or raise what making it raised."""
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)  # else it keeps the frames of all who asked
            if self._made is None:
                try:
                    self._made = self._make()
                except Exception as e:
                    self._error = e
                    raise
            return self._made
