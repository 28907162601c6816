"""The interface of output formats.

A format is a `Writer` in a module of this package, and a line in `registry`. Its ``plan`` derives a `WritePlan` from
names, shapes and dtypes; `lazyckpt.jobs` executes the plan.
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
from ..derive.groups import Training
from ..errors import DataError, DestinationError, MissingFileError
from ..formats.archives import check_outside
from ..io.memory import many_objects
from ..io.storage.uploads import Uploads, uploads_of
from ..io.storage.urls import is_remote
from ..jobs.destination import Destination, Kind, Session, Whole
from ..jobs.executor import executor_of, runner, shares_memory
from ..jobs.guard import followed, local_path
from ..jobs.plan import File, WritePlan
from ..jobs.publish import discard, fingerprint
from ..jobs.remote import Remote
from ..jobs.shares import discard_share, share_of, write_share
from ..jobs.upload import upload
from ..jobs.write import write
from ..lazy import LazyArray
from .manifest import below, with_manifest
from .options import WriteOptions, WriteResult, complete

if TYPE_CHECKING:
    import torch

WEIGHTS = ("weights", "fp32")
# reasons why writers reject options
NO_RANKS = "its layout does not depend on ranks, any number of them loads it"
BY_NAMES = "it is of parameters by their names"


# -- forecasts of the output, from names, shapes and dtypes


class Amount(NamedTuple):
    """The number of tensors (a tied one counts once), the size of their elements in bytes as written, and their
    dtypes."""

    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Iterable[LazyArray], dtype: torch.dtype | None = None) -> Amount:
        """Sum up tensors. ``dtype`` is the dtype in which floating-point tensors are written."""
        kinds: dict[str, None] = {}
        count = nbytes = 0
        for t in tensors:
            written = dtype if dtype is not None and t.dtype.is_floating_point else t.dtype
            kinds[dtype_of(written).short] = None
            count += 1
            nbytes += t.numel() * written.itemsize
        return cls(count, nbytes, tuple(kinds))

    def plus(self, other: Amount) -> Amount:
        """Return the sum of both amounts."""
        dtypes = tuple(dict.fromkeys((*self.dtypes, *other.dtypes)))
        return Amount(self.tensors + other.tensors, self.nbytes + other.nbytes, dtypes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast of an export: the amount written per state, the number of files (None if unknown in advance), and the
    approximate space in bytes that the destination needs (``room``; None if it depends on compression)."""

    states: Mapping[str, Amount]
    files: int | None
    room: int | None

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(amount.nbytes for amount in self.states.values())

    @property
    def tensors(self) -> int:
        """Number of tensors, summed over the states."""
        return sum(amount.tensors for amount in self.states.values())

    def plus(self, other: Forecast) -> Forecast:
        """Return the sum of both forecasts, which must have the same states."""
        states = {state: amount.plus(other.states[state]) for state, amount in self.states.items()}
        known = self.files is not None and other.files is not None
        files = (self.files or 0) + (other.files or 0) if known else None
        room = None if self.room is None or other.room is None else self.room + other.room
        return Forecast(states, files, room)


_AROUND = 2048  # approximate bytes of a torch.save file besides its tensor


def forecast_of_folder(states: Mapping[str, Amount]) -> Forecast:
    """Forecast a folder of torch.save files."""
    return Forecast(states, None, sum(amount.nbytes + _AROUND * amount.tensors for amount in states.values()))


def forecast_of_states(view: View, dest: str, options: WriteOptions, **own: Any) -> Forecast:
    """Forecast a folder with the tensors that the view reads and its other states; replicated tensors count once."""
    states: dict[str, Amount] = {}
    if view.state in WEIGHTS:
        states[view.state] = Amount.of(view.once()[0].values())
        if view.state == "weights" and "fp32" in view.states:
            states["fp32"] = Amount.of(view.states["fp32"].once()[0].values())
    moments = [s for s in view.states if s not in WEIGHTS] if view.state in WEIGHTS else [view.state]
    states |= {moment: Amount.of(tensor for _, tensor in view.states[moment].items()) for moment in moments}
    return forecast_of_folder(states)


def free_at(dest: str) -> int | None:
    """Return the free bytes of the file system of ``dest``; None for a URL."""
    if is_remote(dest):
        return None
    at = Path(os.path.abspath(local_path(dest)))
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def remote_place(dest: str | os.PathLike[str], options: WriteOptions) -> Uploads | None:
    """Return the prefix at a URL to write to; None for a local path. Raises DestinationError."""
    url = os.fspath(dest)
    if not is_remote(url):
        return None
    if url.startswith("memory://") and not shares_memory(options["executor"]):
        raise DestinationError(f"{url} is memory of this process, where other processes cannot write: use threads")
    found = uploads_of(url.rstrip("/"), options["storage_options"])
    check_outside(url, options["storage_options"])
    return found


# -- the writer


class View(Training, Protocol):
    """The part of a view that writers use."""

    @property
    def state(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
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
    """The name in ``to_NAME`` and ``lazyckpt convert --to NAME``."""
    what: str
    """A short description, for lists."""
    plan: Callable[..., WritePlan]
    """(view, dest, options, **own) -> the plan. Raises DataError for tensors that the format cannot represent."""
    forecast: Callable[..., Forecast] | None = None
    """(view, dest, options, **own) -> the forecast. None if `lazyckpt convert` does not offer the format."""
    endings: tuple[str, ...] = ()
    """File extensions of destinations in this format."""
    options: frozenset[str] = frozenset()
    """Format-specific options that `lazyckpt convert` offers: dtype, mesh (with what else says which rank has what),
    stored, max_shard_size, codec, ckpt_format."""
    dtypes: tuple[str, ...] = ()
    """The dtypes that the format's own option ``dtype`` names, if they are not those of torch."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Option that the format does not support -> reason, if the reason is not just that other formats have it."""
    replaces: Callable[[str], bool] = lambda name: True
    """Returns whether an export to an existing folder replaces a file of this name."""
    takes_parts: bool = False
    """Whether tensors of which only the name is known are left out; if False, they raise an error."""
    by_rank: bool = False
    """Whether each rank of a mesh gets its own folder (`plan_of_ranks`); if not, ``plan`` takes the degrees."""

    def write(self, view: View, dest: Any, given: WriteOptions, **own: Any) -> WriteResult:
        """Write a view. ``own`` are options that only this format has."""
        options = complete(given, f"to_{self.name}")
        if not self.takes_parts:
            check_whole(view)
        with many_objects():
            plan = self.plan(view, dest, options, **own)
        return carry_out(plan, options)


def carry_out(plan: WritePlan, options: WriteOptions) -> WriteResult:
    """Execute a plan with the given options."""
    if options["manifest"] and not plan.manifests:
        plan = with_manifest(plan)
    share = None if options["share"] is None else share_of(options["share"])
    if not options["resume"]:
        if share is not None and isinstance(plan.destination, Destination):
            discard_share(plan.destination.place, share)
        elif isinstance(plan.destination, Destination):
            discard(plan.destination.place)
    run = runner(options["executor"], options["memory"])
    if share is not None:
        nbytes, finished = write_share(plan, share, verify=options["verify"], progress=options["progress"], run=run)
        return WriteResult(plan.paths if finished else (), plan.left_out, nbytes, _place(plan) if finished else None)
    if isinstance(plan.destination, Remote):
        nbytes = upload(
            plan,
            plan.destination,
            verify=options["verify"],
            progress=options["progress"],
            run=run,
            resume=options["resume"],
            threads=shares_memory(executor_of(options["executor"])),
        )
    else:
        nbytes = write(plan, verify=options["verify"], progress=options["progress"], run=run)
    return WriteResult(plan.paths, plan.left_out, nbytes, _place(plan))


def _place(plan: WritePlan) -> str | None:
    """Return the path or URL of a plan's manifest."""
    dest = plan.destination
    if len(plan.manifests) != 1 or isinstance(dest, Session):
        return None
    key = plan.manifests[0].key
    if isinstance(dest, Remote):
        return (dest.place.beside if dest.beside is not None else dest.place).at(key)
    return str(dest.path(key))


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
    """Plan a folder that is published as a whole. ``same`` is the fingerprint, ``lost`` has the parts that are left
    out, ``around`` is the approximate number of bytes of a file besides its tensors."""
    remote = remote_place(dest, options)
    destination: Whole | Remote
    if remote is not None:
        destination = Remote(remote, tensors, options["overwrite"], other=kind)
    else:
        destination = Whole(followed(local_path(dest)), tensors, options["overwrite"], kind)
    return WritePlan(
        destination=destination,
        tensors=tensors,
        fingerprint=same,
        files=files,
        texts=texts,
        room=sum(file.nbytes + around for file in files) + sum(map(len, texts.values())),
        paths=(str(destination) if isinstance(destination, Remote) else destination.place,),
        left_out=lost,
    )


def plan_of_ranks(
    plans: Mapping[str, WritePlan], dest: str, options: WriteOptions, is_rank: Callable[[str], bool]
) -> WritePlan:
    """Plan a folder with a subfolder for each rank, published as a whole. ``plans`` has a plan per subfolder;
    ``is_rank`` returns whether a name is that of a rank's folder."""
    remote = remote_place(dest, options)

    def other(names: Sequence[str]) -> str | None:
        return next((f"{name} is no rank's folder" for name in sorted(names) if not is_rank(name)), None)

    tensors = [t for plan in plans.values() for t in plan.tensors]
    destination: Whole | Remote
    paths: tuple[Path | str, ...]
    if remote is not None:
        destination = Remote(remote, tensors, options["overwrite"], other=other)
        paths = tuple(map(remote.at, plans))
    else:
        place = local_path(dest)
        destination = Whole(place, tensors, options["overwrite"], other)
        paths = tuple(place / name for name in plans)
    return WritePlan(
        destination=destination,
        tensors=tensors,
        fingerprint=fingerprint([], [f"{name} {plan.fingerprint}\n".encode() for name, plan in plans.items()]),
        files=[File(f"{name}/{f.key}", f.nbytes, f.layout) for name, plan in plans.items() for f in plan.files],
        texts={f"{name}/{key}": text for name, plan in plans.items() for key, text in plan.texts.items()},
        room=sum(plan.room for plan in plans.values()),
        paths=paths,
        manifests=[one for name, plan in plans.items() for one in below(plan.manifests, name)],
    )


def check_whole(view: View) -> None:
    """Raise MissingFileError for a view with tensors of which only the name is known."""
    for name, why in view.unreadable.items():
        raise MissingFileError(
            f"{plural(len(view.unreadable), 'tensor')} would be missing in what is written: {name}: {why}. Without "
            f"{'it' if len(view.unreadable) == 1 else 'them'}: view.select(lambda name: name not in view.unreadable)"
        )


def check_names(names: Iterable[str]) -> None:
    """Raise DataError for a name that cannot be encoded as UTF-8, which a hostile pickle may contain."""
    for name in names:
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise DataError(f"the name {name!r} is no valid text (a lone surrogate): no file can hold it") from None
