"""A folder for each rank of a parallel layout, in one that appears when all of them are complete.

They are called as Megatron calls its ranks' folders. Source: megatron/training/checkpointing.py `get_checkpoint_name`:
``mp_rank_TT``, ``_PPP`` behind it with pipeline parallelism, ``_EEE`` with expert parallelism.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from ..errors import DestinationError
from ..jobs.destination import check_apart, local_path
from ..jobs.places import PART, Folder
from ..jobs.publish import fingerprint, reveal, staged
from ..lazy import LazyArray

_NAME = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_DONE = ".rank-done"  # marks the folder of a finished rank: key -> [bytes, CRC-32] of the others


def rank_folders(tp: int, pp: int, ep: int) -> Iterator[tuple[str, dict[str, int]]]:
    """
    >>> [name for name, rank in rank_folders(2, 1, 1)], next(rank_folders(2, 2, 2))
    (['mp_rank_00', 'mp_rank_01'], ('mp_rank_00_000_000', {'tp': 0, 'pp': 0, 'ep': 0}))
    """
    for p, e, t in product(range(pp), range(ep), range(tp)):
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        yield name, {"tp": t, "pp": p, "ep": e}


def export_ranks(
    writers: Mapping[str, Callable[[Path], object]],
    dest: str | os.PathLike[str],
    tensors: Iterable[LazyArray],
    about: str,
    overwrite: bool,
) -> list[Path]:
    """Have each writer write the folder of its name below ``dest``, and return their paths. ``tensors``: what is read;
    ``about``: what besides them tells this job from others. The same call goes on with what an interrupted one
    finished: ranks, and within one whatever its writer goes on with.

    Raises DestinationError, and what the writers raise.
    """
    place = local_path(dest)
    read = list(tensors)

    def check() -> None:
        check_apart(place, read)
        if place.exists() and not place.is_dir():
            raise DestinationError(f"{place} is a file: name a folder")
        there = sorted(os.listdir(place)) if place.is_dir() else []
        other = next((name for name in there if not _NAME.fullmatch(name)), None)
        if other is not None:
            raise DestinationError(f"{place} is not empty, {other} is no rank's folder: choose another folder")
        if there and not overwrite:
            raise DestinationError(f"{place} exists already: remove it, choose another place, or pass overwrite=True")

    check()
    job = fingerprint([(t, ()) for t in read], ["\0".join([about, *writers]).encode()])
    with staged(place, job) as folder:
        folder.tidy(lambda key: not key.endswith(PART))
        root = Path(folder.root)
        for name, write in writers.items():
            rank = folder.below(name)
            if not _is_done(rank):
                if rank.size(_DONE) is not None:  # it is damaged
                    rank.tidy(lambda key: False)
                write(root / name)
                rank.put(_DONE, [json.dumps(rank.checksums()).encode("utf-8", "surrogatepass")])
        check()  # somebody may have written there meanwhile
        for name in writers:
            (root / name / _DONE).unlink()
        reveal(folder, place)
    return [place / name for name in writers]


def _is_done(rank: Folder) -> bool:
    """Whether an earlier call has finished a rank, and its files still hold what it wrote."""
    size = rank.size(_DONE)
    if size is None:
        return False
    with suppress(ValueError, RecursionError):
        told = json.loads(rank.get(_DONE, 0, size))
        found: dict[str, object] = {key: list(sums) for key, sums in rank.checksums().items() if key != _DONE}
        return bool(found == told)
    return False
