"""The common part of file formats of weights: one file, or shards in a folder with an index.

Source of the sharding: huggingface_hub/serialization/_base.py `split_state_dict_into_shards_factory`: tensors stay in
order, a shard is closed when the next tensor would exceed the limit, and a tensor larger than the limit gets its own
shard.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ..core.names import Names
from ..core.units import size_in_bytes
from ..errors import DataError, TensorNotFoundError
from ..jobs.destination import Files, check_inside
from ..jobs.guard import followed, local_path
from ..jobs.plan import File, Layout, Writable, WritePlan
from ..jobs.publish import fingerprint
from ..jobs.remote import Remote
from ..lazy import LazyArray
from .options import WriteOptions
from .writer import Amount, Forecast, View, Writer, check_names, remote_place

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, Writable]
NewNames = Mapping[str, str | None] | Callable[[str], str | None]
Aliases = Mapping[str, str]  # additional name -> name of the same tensor


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A file format of named tensors.

    Attributes
    ----------
    stem, suffix
        Parts of the names of files in a folder, as in Hugging Face's tools.
    endings
        File extensions of a destination that is a single file.
    lists_aliases
        Whether the index lists aliases.
    size
        Returns the maximum size of a file in bytes. Raises DataError for tensors that the format cannot represent.
    layout
        Returns the content of a file.
    """

    stem: str
    suffix: str
    endings: tuple[str, ...]
    lists_aliases: bool
    size: Callable[[Tensors, Aliases], int]
    layout: Callable[[Tensors, Aliases], Layout]


def file_writer(name: str, what: str, form: FileFormat) -> Writer:
    """Return the writer of a file format."""
    return Writer(
        name=name,
        what=what,
        plan=partial(_plan, form),
        forecast=partial(_forecast, form),
        endings=form.endings,
        options=frozenset({"dtype", "mesh", "stored", "max_shard_size"}),
        replaces=partial(is_of_family, stem=form.stem, suffix=form.suffix),
        by_rank=True,
    )


def _plan(
    form: FileFormat,
    view: View,
    dest: str | os.PathLike[str],
    options: WriteOptions,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
    names: NewNames | None = None,
) -> WritePlan:
    tensors, aliases = under(names, *view.once())
    return plan_of_files(form, tensors, aliases, dest, dtype, max_shard_size, options)


def _forecast(
    form: FileFormat, view: View, dest: str, options: WriteOptions, *, max_shard_size: int | str | None = "5GB"
) -> Forecast:
    tensors = view.once()[0]
    one = Path(dest).suffix in form.endings or max_shard_size is None
    shards = 1 if one else len(split(tensors, size_in_bytes(max_shard_size or 0)))
    amount = Amount.of(tensors.values())
    return Forecast({view.state: amount}, shards + (shards > 1), amount.nbytes)  # including the index


def plan_of_files(
    form: FileFormat,
    tensors: Mapping[str, LazyArray],
    aliases: Aliases,
    dest: str | os.PathLike[str],
    dtype: torch.dtype | None,
    max_shard_size: int | str | None,
    options: WriteOptions,
) -> WritePlan:
    """Plan the files of tensors, each written once. A ``dest`` with one of the format's endings is a single file; any
    other is a folder with one file, or with shards of at most ``max_shard_size`` and an index.

    Raises DataError, and DestinationError for an invalid path.
    """
    remote = remote_place(dest, options)
    place = PurePosixPath(remote.name) if remote is not None else local_path(dest)
    check_names([*tensors, *aliases])
    if dtype is not None and not dtype.is_floating_point:
        raise DataError(f"floating-point tensors are not converted to {dtype}: name a floating-point dtype")
    tensors = {name: _converted(t, dtype) for name, t in tensors.items()}
    one = place.suffix in form.endings
    if not one and isinstance(place, Path):
        target = followed(place)
        place = place if place.exists() else target
    cut = cut_files(form, tensors, aliases, max_shard_size, place.name if one else None)
    keys, texts = [file.key for file in cut.files], cut.texts
    lazy = list(tensors.values())
    of_family = partial(is_of_family, stem=form.stem, suffix=form.suffix)
    destination: Files | Remote
    paths: tuple[Path | str, ...]
    if remote is not None:
        where_to = remote.beside if one else remote
        destination = Remote(where_to, lazy, options["overwrite"], one=place.name if one else None, of_family=of_family)
        paths = tuple(map(where_to.at, [*keys, *texts]))
    else:
        destination = Files(
            Path(place),
            [*keys, *texts],
            lazy,
            options["overwrite"],
            one=one,
            of_family=of_family,
            index=bool(texts),
            ending=form.endings[0],
            apart=check_inside,
        )
        paths = tuple(map(destination.path, destination.keys))
    return WritePlan(
        destination=destination,
        tensors=lazy,
        fingerprint=cut.fingerprint,
        files=cut.files,
        texts=texts,
        room=cut.room,
        paths=paths,
    )


class Cut(NamedTuple):
    """The files of tensors, without a place for them.

    ``texts`` has the content of the index, if there are several files. ``fingerprint`` identifies what they hold, and
    ``room`` is their approximate size in bytes."""

    files: list[File]
    texts: Mapping[str, bytes]
    fingerprint: str
    room: int


def cut_files(
    form: FileFormat,
    tensors: Mapping[str, LazyArray],
    aliases: Aliases,
    max_shard_size: int | str | None,
    one: str | None = None,
) -> Cut:
    """Cut tensors into files: one of the name ``one``, or shards and their index. Reads no tensor data.

    Raises DataError for tensors that the format cannot represent."""
    if one is not None:
        shards, keys = [dict(tensors)], [one]
    else:
        shards = split(tensors, None if max_shard_size is None else size_in_bytes(max_shard_size))
        keys = file_names(form.stem, form.suffix, len(shards))
    of_shard = [{a: o for a, o in aliases.items() if o in shard} for shard in shards]
    room = sum(form.size(shard, also) for shard, also in zip(shards, of_shard, strict=True))
    texts: dict[str, bytes] = {}
    if len(shards) > 1:
        listed: dict[str, str] = {}
        for key, shard, also in zip(keys, shards, of_shard, strict=True):
            listed |= dict.fromkeys([*shard, *(also if form.lists_aliases else ())], key)
        total = sum(t.nbytes for t in tensors.values())
        texts[f"{form.stem}{form.suffix}.index.json"] = index_text(listed, total).encode()
    where = [(t, (key, n, str(t.dtype))) for key, shard in zip(keys, shards, strict=True) for n, t in shard.items()]
    found = fingerprint(where, [form.stem.encode(), repr(dict(aliases)).encode(), *texts.values()])
    files = [_file(form, *begun) for begun in zip(keys, shards, of_shard, strict=True)]
    return Cut(files, texts, found, room + sum(map(len, texts.values())))


def _file(form: FileFormat, key: str, shard: Tensors, aliases: Aliases) -> File:
    return File(key, sum(t.nbytes for t in shard.values()), partial(form.layout, shard, aliases))


def _converted(tensor: LazyArray, dtype: torch.dtype | None) -> LazyArray:
    """Convert a floating-point tensor; keep integers and bools unchanged, like `nn.Module.to`."""
    return tensor if dtype is None or not tensor.dtype.is_floating_point else tensor.astype(dtype)


# -- shards


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


def split(tensors: Mapping[str, T], limit: int | None) -> list[dict[str, T]]:
    """Split tensors into shards of at most ``limit`` bytes, in order; return at least one shard."""
    shards: list[dict[str, T]] = []
    current: dict[str, T] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if limit is not None and nbytes > limit:
            shards.append({name: tensor})
            continue
        if limit is not None and current and size + nbytes > limit:
            shards.append(current)
            current, size = {}, 0
        current[name] = tensor
        size += nbytes
    if current or not shards:
        shards.append(current)
    return shards


def file_names(stem: str, suffix: str, count: int) -> list[str]:
    """Return the file names of ``count`` shards.

    >>> file_names("model", ".safetensors", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{n:05d}-of-{count:05d}{suffix}" for n in range(1, count + 1)]


def is_of_family(name: str, stem: str, suffix: str) -> bool:
    """Return whether a file name is one of `file_names` for any count, or that of the index."""
    pattern = rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?"
    return re.fullmatch(pattern, name) is not None


def index_text(weight_map: Mapping[str, str], total_size: int) -> str:
    """Return the JSON index that maps tensors to files. ``total_size`` is the size of all tensors in bytes."""
    table = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return json.dumps(table, indent=2, sort_keys=True) + "\n"


# -- renaming of tensors in the files


def under(
    names: NewNames | None, tensors: Mapping[str, LazyArray], aliases: Mapping[str, str]
) -> tuple[dict[str, LazyArray], dict[str, str]]:
    """Rename tensors and aliases with a mapping, which keeps names that it lacks, or with a function. None removes a
    name; a tensor is kept as long as one of its tied names is kept.

    Raises DataError (two tensors get the same name, or a name is not a string), TensorNotFoundError (a mapping contains
    an unknown name).
    """
    if names is None:
        return dict(tensors), dict(aliases)
    if not callable(names):
        for name in names:
            if name not in tensors and name not in aliases:
                near = Names([*tensors, *aliases]).near(name)
                hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise TensorNotFoundError(f"names= contains {name!r}, which is not the name of a written tensor.{hint}")
    found: dict[str, LazyArray] = {}
    tied: dict[str, str] = {}
    was: dict[str, str] = {}  # new name -> first old name that is renamed to it
    kept: dict[str, str] = {}  # old name of a tensor -> new name
    for old, owner in [(name, name) for name in tensors] + list(aliases.items()):
        new = names(old) if callable(names) else names.get(old, old)
        if new is None:
            continue
        if not isinstance(new, str):
            raise DataError(f"names= gives {old!r} a {type(new).__name__} for a name: a str, or None to leave it out")
        first = was.setdefault(new, old)
        if aliases.get(first, first) != owner:
            raise DataError(f"names= gives {first!r} and {old!r} the same name, {new!r}, and they are two tensors")
        if kept.setdefault(owner, new) == new:
            found[new] = tensors[owner]
        else:
            tied[new] = kept[owner]
    return found, tied
