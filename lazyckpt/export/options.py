"""The options of every ``to_...`` method, and the result that it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class WriteResult(Sequence[Path | str]):
    """The result of a ``to_...`` method.

    The result is a sequence of the written paths or URLs: ``for path in result``, ``result[0]``, ``len(result)``,
    ``(file,) = result``. With string keys, it is a mapping of the parts that were left out: ``result["args.rank"]``,
    ``"args.rank" in result``, ``result.items()``. It compares equal to a list of the same paths, and to a dict equal to
    ``left_out``.

    Attributes
    ----------
    paths
        The written files (`to_safetensors`, `to_torch`), or the one file or folder of other formats: as paths, or as
        the texts of their URLs, without credentials. Empty for the store of an Icechunk session.
    left_out
        Part that was not written, or that not every reader loads -> reason. Keys are dotted paths in ``meta``, names of
        tensors or states, or paths in the hierarchy, as the method documents.
    nbytes
        Size of all files in bytes, including those that an interrupted call wrote.
    manifest
        The path or URL of the manifest; None if there is none (``manifest=True`` was not given, or a share is not the
        last one).
    """

    paths: tuple[Path | str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    manifest: str | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Path | str]:
        return iter(self.paths)

    @overload
    def __getitem__(self, key: int, /) -> Path | str: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[Path | str]: ...
    @overload
    def __getitem__(self, key: str, /) -> str: ...
    def __getitem__(self, key: int | slice | str, /) -> Path | list[Path | str] | str:
        if isinstance(key, str):
            return self.left_out[key]
        return list(self.paths[key]) if isinstance(key, slice) else self.paths[key]

    def __contains__(self, item: object) -> bool:
        return item in self.paths or (isinstance(item, str) and item in self.left_out)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WriteResult):
            mine = self.paths, self.left_out, self.nbytes, self.manifest
            return mine == (other.paths, other.left_out, other.nbytes, other.manifest)
        if isinstance(other, Mapping):
            return dict(self.left_out) == dict(other)
        return list(self.paths) == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Path | str]) -> list[Path | str]:
        return [*self.paths, *other]

    def __radd__(self, other: Iterable[Path | str]) -> list[Path | str]:
        return [*other, *self.paths]

    def keys(self) -> KeysView[str]:
        """Return the keys of `left_out`."""
        return self.left_out.keys()

    def values(self) -> ValuesView[str]:
        """Return the reasons in `left_out`."""
        return self.left_out.values()

    def items(self) -> ItemsView[str, str]:
        """Return the keys and reasons of `left_out`."""
        return self.left_out.items()

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the reason why a part was left out, or ``default`` if it was not."""
        return self.left_out.get(key, default)


# -- the options of all writers


class WriteOptions(TypedDict, total=False):
    """The options of all ``to_...`` methods.

    Parameters
    ----------
    overwrite
        Replace an existing destination of the same format. By default, an existing destination raises
        DestinationError.
    resume
        Resume an interrupted call with the same arguments from its staging directory, a hidden folder beside the
        destination, or from what is in the bucket (default). False starts anew.
    verify
        Read the written files from the disk, or back from the bucket, and compare them with the source before
        publishing them. (A single object is compared after it appears, and removed if it differs.)
    progress
        Show a progress bar, or lines if stderr is not a terminal. By default, show a bar on a terminal or in a
        notebook, and nothing elsewhere.
    executor
        What does the work: an executor of concurrent.futures (such as a process pool) or of mpi4py.futures, a client of
        Dask, or the module ``ray``. Its workers read the source and write the files, so they need access to both. By
        default, threads of this process.
    memory
        Maximum bytes that the work in flight holds, as a number or text such as "2GB". By default 1 GiB, with an
        executor 1 GiB for each worker.
    share
        ``(i, n)``: do only share i of n of the work, counted from 0. n processes with a common file system that do
        their shares at any time, in any order, write the export together; the last one publishes it. Each writes whole
        files, so there should be several for each process. The paths of the result are empty until the export is
        published. Only for folders of local files.
    storage_options
        Credentials and other options for a ``dest`` that is a URL, as for `lazyckpt.open`.
    manifest
        Also write a manifest, the SHA-256 digests of all tensors (`Digest.to_json`). They are computed from the bytes
        that are written, so the source is read once. In a folder it is named lazyckpt-manifest.json; beside a single
        file NAME it is NAME.manifest.json. ``lazyckpt verify PATH --against MANIFEST`` compares.
    """

    overwrite: bool
    resume: bool
    verify: bool
    progress: bool | None
    executor: Executor | None
    memory: int | str | None
    share: tuple[int, int] | None
    manifest: bool
    storage_options: Mapping[str, Any] | None


DEFAULTS: WriteOptions = {
    "overwrite": False, "resume": True, "verify": False, "progress": None, "executor": None, "memory": None,
    "share": None, "manifest": False, "storage_options": None,
}  # fmt: skip


def with_options(method: F) -> F:
    """Decorate a method so that its signature in notebooks and ``help`` shows the options of `WriteOptions`."""
    signature = inspect.signature(method)
    named = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    types = WriteOptions.__annotations__
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_text(types[name]))
        for name, default in DEFAULTS.items()
    ]
    method.__signature__ = signature.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
    return method


def _text(annotation: Any) -> Any:
    return getattr(annotation, "__forward_arg__", annotation)


def complete(given: WriteOptions, method: str) -> WriteOptions:
    """Add the defaults to the given options. Raises TypeError for an unknown option."""
    for name in given:
        if name not in DEFAULTS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
    return {**DEFAULTS, **given}
