"""What an output format is.

A format is a `Writer` in a module of this package, and a line in `registry`. Its ``plan`` decides what is written, from
names, shapes and dtypes, as a `WritePlan`; `lazyckpt.jobs` carries it out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.dtypes import dtype_of
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
from .options import WriteOptions, WriteResult, complete
from .training import Training

if TYPE_CHECKING:
    import torch

WEIGHTS = ("weights", "fp32")
# why writers refuse options
NO_RANKS = "its layout does not depend on ranks, any number of them loads it"
BY_NAMES = "it is of parameters by their names"


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
            kinds[dtype_of(written).short] = None
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

    def write(self, view: View, dest: Any, given: WriteOptions, **own: Any) -> WriteResult:
        """Write a view. ``own``: options that only this format has."""
        options = complete(given, f"to_{self.name}")
        if not self.takes_parts:
            check_whole(view)
        return carry_out(self.plan(view, dest, options, **own), options)


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
