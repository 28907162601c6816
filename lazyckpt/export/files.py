"""Writing named tensors as one file, or as shards in a folder with an index: what all formats of weights share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.units import size_in_bytes
from ..errors import DataError, DestinationError, some
from ..jobs.destination import alone, check_inside, check_paths, local_path, source_files
from ..jobs.executor import Run, run
from ..jobs.guard import followed
from ..jobs.held import Writable
from ..jobs.places import Folder, Target
from ..jobs.publish import fingerprint
from ..jobs.write import File, Layout, Plan, write
from ..lazy import LazyArray
from .shards import file_names, index_text, is_of_family, split

Tensors = Mapping[str, Writable]
Aliases = Mapping[str, str]  # further names -> the name of the same tensor


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A file format of named tensors.

    ``stem`` and ``suffix`` name its files in a folder, as Hugging Face's tools do; ``endings`` are those of a path that
    is one file. ``lists_aliases``: whether the index lists them. ``size``: bytes that a file is going to have, at most;
    it raises DataError for what the format cannot hold. ``layout``: make a file, with all that stands in it but the
    tensors' elements; those that are there already stay.
    """

    stem: str
    suffix: str
    endings: tuple[str, ...]
    lists_aliases: bool
    size: Callable[[Tensors, Aliases], int]
    layout: Callable[[Target, Tensors, Aliases], Layout]


def export(
    form: FileFormat,
    tensors: Mapping[str, LazyArray],
    aliases: Aliases,
    dest: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str | None,
    overwrite: bool,
    progress: bool | None,
    run: Run = run,
    verify: bool = False,
) -> list[Path]:
    """Write tensors, each once, and return the paths of the files. A ``dest`` with one of the format's endings is the
    file to write; any other is a folder, which gets one file, or shards of at most ``max_shard_size`` and an index.
    ``run`` does the work; ``verify``: then everything is read again and compared with the source.

    Raises what reading raises (a missing file is told before anything is written), DataError, DestinationError.
    """
    place = local_path(dest)
    check_names([*tensors, *aliases])
    if dtype is not None and not dtype.is_floating_point:
        raise DataError(f"floating-point tensors are not converted to {dtype}: name a floating-point dtype")
    tensors = {name: _converted(t, dtype) for name, t in tensors.items()}
    total = sum(t.nbytes for t in tensors.values())
    if place.suffix in form.endings:
        shards = [tensors]
        paths = [place]
    else:
        target = followed(place)
        if not place.exists():
            place = target
        shards = split(tensors, None if max_shard_size is None else size_in_bytes(max_shard_size))
        paths = [place / name for name in file_names(form.stem, form.suffix, len(shards))]
    of_shard = [{a: o for a, o in aliases.items() if o in shard} for shard in shards]
    sizes = {path: form.size(shard, also) for path, shard, also in zip(paths, shards, of_shard, strict=True)}
    index: dict[Path, str] = {}
    if len(shards) > 1:
        listed: dict[str, str] = {}
        for path, shard, also in zip(paths, shards, of_shard, strict=True):
            listed |= dict.fromkeys([*shard, *(also if form.lists_aliases else ())], path.name)
        index[place / f"{form.stem}{form.suffix}.index.json"] = index_text(listed, total)
        sizes |= {path: len(text.encode()) for path, text in index.items()}

    files = [_file(form, *begun) for begun in zip(paths, shards, of_shard, strict=True)]
    lazy = list(tensors.values())
    told = [
        (t, (path.name, n, str(t.dtype))) for path, shard in zip(paths, shards, strict=True) for n, t in shard.items()
    ]
    texts = {path.name: text.encode() for path, text in index.items()}
    plan = Plan(
        files=files,
        texts=texts,
        fingerprint=fingerprint(told, [form.stem.encode(), repr(dict(aliases)).encode(), *texts.values()]),
        around=max(sizes[path] - file.nbytes for path, file in zip(paths, files, strict=True)),
    )
    sources = source_files(lazy)

    def check(there: Set[str]) -> None:
        check_inside(place, lazy)
        if place not in paths:
            _check_folder(place, form, set(sizes), sources)
        check_paths([path for path in sizes if path.name not in there], sources, overwrite)

    def reveal(content: Folder) -> None:
        if place not in paths and not place.exists():
            content.become(place)
            return
        with alone(paths[0].parent):
            *_, last = sizes
            if last in index and content.size(last.name) is not None:
                last.unlink(missing_ok=True)  # an old index must not speak of new files
            for path in sizes:
                if content.size(path.name) is not None:
                    content.move(path.name, path)

    write(plan, place, lazy, check=check, reveal=reveal, verify=verify, progress=progress, run=run)
    return list(sizes)


def _file(form: FileFormat, path: Path, shard: Tensors, aliases: Aliases) -> File:
    return File(path.name, sum(t.nbytes for t in shard.values()), lambda at: form.layout(at, shard, aliases))


def check_names(names: Iterable[str]) -> None:
    """Names go into the files as UTF-8, which a hostile pickle's need not fit. Raises DataError."""
    for name in names:
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise DataError(f"the name {name!r} is no valid text (a lone surrogate): no file can hold it") from None


def _converted(tensor: LazyArray, dtype: torch.dtype | None) -> LazyArray:
    """As `nn.Module.to` does: integers and bools stay what they are."""
    return tensor if dtype is None or not tensor.dtype.is_floating_point else tensor.astype(dtype)


def _check_folder(folder: Path, form: FileFormat, new: set[Path], sources: set[Path]) -> None:
    """A folder in which what is written would not be mistaken for part of something else."""
    if folder.is_file():
        raise DestinationError(f"{folder} is a file: name a folder, or a file that ends with {form.endings[0]}")
    if not folder.is_dir():
        return
    if any(source.parent == Path(os.path.realpath(folder)) for source in sources):
        raise DestinationError(f"{folder} holds the checkpoint that is read: choose another folder")
    others = sorted(
        path.name for path in folder.iterdir() if path not in new and is_of_family(path.name, form.stem, form.suffix)
    )
    if others:
        raise DestinationError(
            f"{folder} holds other weights, which would be mistaken for part of these: {some(others)}. Remove them or "
            "choose another folder"
        )
