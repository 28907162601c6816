"""The options that every ``to_...`` method takes, and the result that it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class WriteResult(Sequence[Path]):
    """What a ``to_...`` method wrote.

    It is a sequence of its paths: ``for path in result``, ``result[0]``, ``len(result)``, ``(file,) = result``. By
    text it is the table of what was left out: ``result["args.rank"]``, ``"args.rank" in result``, ``result.items()``.
    It equals a list of the same paths, and a dict of the same table.

    Attributes
    ----------
    paths
        The files that were written (`to_safetensors`, `to_torch`), or the one file or folder that other formats are.
        Empty for a URL, and for the store of an Icechunk session.
    left_out
        What was not written, or is not loaded by every reader -> why. Keys are dotted paths in ``meta``, names of
        tensors or states, or paths in the hierarchy, as the method says.
    nbytes
        Bytes of all files, also of those that an interrupted call had written.
    """

    paths: tuple[Path, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)

    @overload
    def __getitem__(self, key: int, /) -> Path: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[Path]: ...
    @overload
    def __getitem__(self, key: str, /) -> str: ...
    def __getitem__(self, key: int | slice | str, /) -> Path | list[Path] | str:
        if isinstance(key, str):
            return self.left_out[key]
        return list(self.paths[key]) if isinstance(key, slice) else self.paths[key]

    def __contains__(self, item: object) -> bool:
        return item in self.left_out if isinstance(item, str) else item in self.paths

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WriteResult):
            return (self.paths, self.left_out, self.nbytes) == (other.paths, other.left_out, other.nbytes)
        if isinstance(other, Mapping):
            return dict(self.left_out) == dict(other)
        return list(self.paths) == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Path]) -> list[Path]:
        return [*self.paths, *other]

    def keys(self) -> KeysView[str]:
        """Keys of `left_out`."""
        return self.left_out.keys()

    def values(self) -> ValuesView[str]:
        """Reasons of `left_out`."""
        return self.left_out.values()

    def items(self) -> ItemsView[str, str]:
        """Keys and reasons of `left_out`."""
        return self.left_out.items()

    def get(self, key: str, default: str | None = None) -> str | None:
        """The reason why something was left out; ``default`` if it was not."""
        return self.left_out.get(key, default)


# -- the options of all writers


class WriteOptions(TypedDict, total=False):
    """The options that all ``to_...`` methods take.

    Parameters
    ----------
    overwrite
        Replace what is there, if it is of the same format. By default that raises DestinationError.
    resume
        Continue what an interrupted call with the same arguments has left in the hidden folder beside the destination:
        the default. False begins anew.
    verify
        Read everything again, from the disk, and compare it with the source before it appears.
    progress
        Show a progress bar, or lines in a log. By default a bar on a terminal or in a notebook.
    executor
        Where the work is done: any of concurrent.futures, such as a pool of processes or ``client.get_executor()`` of
        Dask. Its workers read the source and write the files, so both have to be within their reach. By default
        threads of this process.
    memory
        Bytes that the work in flight may hold, as a number or text such as "2GB"; by default 1 GiB.
    """

    overwrite: bool
    resume: bool
    verify: bool
    progress: bool | None
    executor: Executor | None
    memory: int | str | None


DEFAULTS: WriteOptions = {
    "overwrite": False, "resume": True, "verify": False, "progress": None, "executor": None, "memory": None,
}  # fmt: skip


def with_options(method: F) -> F:
    """Show the options of `WriteOptions` in the signature that notebooks and ``help`` look at."""
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
    """The options with their defaults. Raises TypeError for one that there is not."""
    for name in given:
        if name not in DEFAULTS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
    return {**DEFAULTS, **given}
