"""What an output format is, the options that all of them have, and what writing returns.

A format is a `Writer` in a module of this package, and a line in `registry`. Its ``plan`` decides what is written, from
names, shapes and dtypes, as a `WritePlan`; `lazyckpt.jobs` carries it out.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar, overload

import torch

from ..core.dtypes import short_name
from ..core.units import plural
from ..errors import DataError, MissingFileError
from ..io.storage.fsspec import is_url
from ..jobs.destination import Destination, Kind, Remote, Whole
from ..jobs.executor import runner
from ..jobs.guard import followed, local_path
from ..jobs.plan import File, WritePlan
from ..jobs.publish import discard, discard_upload, fingerprint
from ..jobs.write import write
from ..lazy import LazyArray
from .training import Training

WEIGHTS = ("weights", "fp32")
# why writers refuse options
NO_RANKS = "its layout does not depend on ranks, any number of them loads it"
BY_NAMES = "it is of parameters by their names"
F = TypeVar("F", bound=Callable[..., Any])


# -- what writing returns


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


# -- what will be written, from names, shapes and dtypes


class Amount(NamedTuple):
    """``tensors``: how many, each tied one once; ``nbytes``: of their elements, as they are written; ``dtypes``."""

    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Iterable[LazyArray], dtype: torch.dtype | None = None) -> Amount:
        """``dtype``: that of floating-point tensors when they are written."""
        kinds: dict[str, None] = {}
        count = nbytes = 0
        for t in tensors:
            written = dtype if dtype is not None and t.dtype.is_floating_point else t.dtype
            kinds[short_name(written)] = None
            count += 1
            nbytes += t.numel() * written.itemsize
        return cls(count, nbytes, tuple(kinds))

    def plus(self, other: Amount) -> Amount:
        """Both."""
        dtypes = tuple(dict.fromkeys((*self.dtypes, *other.dtypes)))
        return Amount(self.tensors + other.tensors, self.nbytes + other.nbytes, dtypes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """``states``: what is written, by state; ``files``: how many there will be, None where that is not known before;
    ``room``: bytes that the target has to have, about; None where that depends on how well they compress."""

    states: Mapping[str, Amount]
    files: int | None
    room: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(amount.nbytes for amount in self.states.values())

    @property
    def tensors(self) -> int:
        """How many there are, counted in each state."""
        return sum(amount.tensors for amount in self.states.values())

    def plus(self, other: Forecast) -> Forecast:
        """Both, of the same states."""
        states = {state: amount.plus(other.states[state]) for state, amount in self.states.items()}
        known = self.files is not None and other.files is not None
        files = (self.files or 0) + (other.files or 0) if known else None
        room = None if self.room is None or other.room is None else self.room + other.room
        return Forecast(states, files, room)


_AROUND = 2048  # bytes of a file of torch.save besides its tensor, about


def forecast_of_folder(states: Mapping[str, Amount]) -> Forecast:
    """Of a folder of files of torch.save."""
    return Forecast(states, None, sum(amount.nbytes + _AROUND * amount.tensors for amount in states.values()))


def forecast_of_states(view: View, dest: str, options: WriteOptions, **own: Any) -> Forecast:
    """Of a folder with what the view reads and the states beside it; what all ranks have counts once."""
    states: dict[str, Amount] = {}
    if view.state in WEIGHTS:
        states[view.state] = Amount.of(view.once()[0].values())
        if view.state == "weights" and "fp32" in view.states:
            states["fp32"] = Amount.of(view.states["fp32"].once()[0].values())
    moments = [s for s in view.states if s not in WEIGHTS] if view.state in WEIGHTS else [view.state]
    states |= {moment: Amount.of(tensor for _, tensor in view.states[moment].items()) for moment in moments}
    return forecast_of_folder(states)


def free_at(dest: str) -> int | None:
    """Bytes that are free where ``dest`` is to be; None for a URL."""
    if is_remote(dest):
        return None
    at = Path(os.path.abspath(local_path(dest.removeprefix("file://"))))
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def is_remote(dest: str) -> bool:
    """Whether a destination is a URL of something else than local files."""
    return is_url(dest) and not dest.startswith("file://")


# -- the writer


class View(Training, Protocol):
    """What a writer asks of a view."""

    @property
    def state(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def stored(self) -> Mapping[str, LazyArray]: ...
    @property
    def unreadable(self) -> Mapping[str, str]: ...
    def once(self) -> tuple[Mapping[str, LazyArray], Mapping[str, str]]: ...


@dataclass(frozen=True, slots=True)
class Writer:
    """An output format."""

    name: str
    """As in ``to_NAME`` and ``lazyckpt convert --to NAME``."""
    what: str
    """What it is, in a few words, for lists."""
    plan: Callable[..., WritePlan]
    """(view, dest, options, **own) -> the plan. Raises DataError for what the format cannot hold."""
    forecast: Callable[..., Forecast] | None = None
    """(view, dest, options, **own) -> how much it will be. None: `lazyckpt convert` does not offer the format."""
    endings: tuple[str, ...] = ()
    """Of destinations that are of this format."""
    options: frozenset[str] = frozenset()
    """Options of its own that `lazyckpt convert` offers: dtype, mesh, stored, max_shard_size, codec."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why it does not take one of these, where that is not because others do."""
    replaces: Callable[[str], bool] = lambda name: True
    """Whether a name in a folder that is there is of a file that would have to be replaced."""
    urls: bool = False
    """Whether it is written to object stores."""
    takes_parts: bool = False
    """Whether tensors of which nothing is known but the name are left out, instead of refused."""
    by_rank: bool = False
    """Whether each rank of a mesh gets a folder (`plan_of_ranks`), instead of options tp, pp and ep."""


def export(writer: Writer, view: View, dest: Any, given: WriteOptions, **own: Any) -> WriteResult:
    """Write a view. ``own``: options of this writer.

    Raises what `CheckpointView.to_safetensors` raises.
    """
    options = complete(given, f"to_{writer.name}")
    if not writer.takes_parts:
        check_whole(view)
    return carry_out(writer.plan(view, dest, options, **own), options)


def carry_out(plan: WritePlan, options: WriteOptions) -> WriteResult:
    """Write what a plan says."""
    if not options["resume"]:
        if isinstance(plan.destination, Destination):
            discard(plan.destination.place)
        elif isinstance(plan.destination, Remote):
            discard_upload(plan.destination.bucket)
    run = runner(options["executor"], options["memory"])
    nbytes = write(plan, verify=options["verify"], progress=options["progress"], run=run)
    return WriteResult(plan.paths, plan.left_out, nbytes)


def plan_of_folder(
    dest: str | os.PathLike[str],
    options: WriteOptions,
    kind: Kind,
    tensors: Sequence[LazyArray],
    same: str,
    files: Sequence[File],
    texts: Mapping[str, bytes],
    lost: Mapping[str, str],
    around: int = 2048,
) -> WritePlan:
    """A folder that appears as a whole. ``same``: the fingerprint; ``lost``: what is left out; ``around``: bytes of a
    file that no tensor has, about."""
    place = followed(local_path(dest))
    return WritePlan(
        destination=Whole(place, tensors, options["overwrite"], kind),
        tensors=tensors,
        fingerprint=same,
        files=files,
        texts=texts,
        room=sum(file.nbytes + around for file in files) + sum(map(len, texts.values())),
        paths=(place,),
        left_out=lost,
    )


def plan_of_ranks(
    plans: Mapping[str, WritePlan], dest: str, overwrite: bool, is_rank: Callable[[str], bool]
) -> WritePlan:
    """A folder for each rank, in one that appears as a whole. ``plans``: name of the folder -> what goes into it.
    ``is_rank``: whether a name is that of such a folder."""
    place = local_path(dest)

    def other(names: Sequence[str]) -> str | None:
        return next((f"{name} is no rank's folder" for name in sorted(names) if not is_rank(name)), None)

    tensors = [t for plan in plans.values() for t in plan.tensors]
    return WritePlan(
        destination=Whole(place, tensors, overwrite, other),
        tensors=tensors,
        fingerprint=fingerprint([], [f"{name} {plan.fingerprint}\n".encode() for name, plan in plans.items()]),
        files=[File(f"{name}/{f.key}", f.nbytes, f.layout) for name, plan in plans.items() for f in plan.files],
        texts={f"{name}/{key}": text for name, plan in plans.items() for key, text in plan.texts.items()},
        room=sum(plan.room for plan in plans.values()),
        paths=tuple(place / name for name in plans),
    )


def check_whole(view: View) -> None:
    """Raises MissingFileError for a view that lacks tensors of which nothing is known but the name."""
    for name, why in view.unreadable.items():
        raise MissingFileError(
            f"{plural(len(view.unreadable), 'tensor')} would be missing in what is written: {name}: {why}. Without "
            f"{'it' if len(view.unreadable) == 1 else 'them'}: view.select(lambda name: name not in view.unreadable)"
        )


def check_names(names: Iterable[str]) -> None:
    """Names go into the files as UTF-8, which a hostile pickle's need not fit. Raises DataError."""
    for name in names:
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise DataError(f"the name {name!r} is no valid text (a lone surrogate): no file can hold it") from None
