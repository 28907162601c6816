"""What `lazyckpt convert` was asked for: the target, and which options go with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.dtypes import dtype_named
from ..errors import DataError, FormatError
from ..export.forecast import FILES
from ..io.storage.fsspec import is_url
from ..layouts.rename.table import ENDINGS, read_table
from ..view import CheckpointView
from .options import matching

TARGETS = {
    "safetensors": "the layout of Hugging Face",
    "torch": "files of torch.save",
    "dcp": "torch.distributed.checkpoint",
    "universal": "DeepSpeed's universal checkpoint",
    "megatron": "Megatron's legacy rank files",
    "zarr": "a Zarr v3 hierarchy",
}
_SUFFIXES = {end: name for name, form in FILES.items() for end in form.endings} | {".zarr": "zarr", ".zarr.zip": "zarr"}
_NO_RANKS = "its layout does not depend on ranks, any number of them loads it"
_REFUSED = {  # option -> target -> why
    "dtype": {"universal": "it always is in float32"},
    "mesh": {"dcp": _NO_RANKS, "universal": _NO_RANKS, "zarr": _NO_RANKS},
    "stored": {
        "dcp": "it is of parameters by their names",
        "universal": "it is of parameters by their names",
        "megatron": "it is of parameters by their names",
    },
    "max_shard_size": dict.fromkeys(("dcp", "universal", "megatron", "zarr"), "only safetensors and torch have shards"),
    "codec": dict.fromkeys(("safetensors", "torch", "dcp", "universal", "megatron"), "only zarr compresses"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options that change what is written; ``mesh``: the degrees (tp, pp, ep), None if none was given."""

    select: str | None
    dtype: str | None
    rename: str | None
    mesh: tuple[int, int, int] | None
    stored: bool
    max_shard_size: str | None
    codec: str | None

    def describe(self) -> dict[str, Any]:
        """Those that were given."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}


def target_of(dest: str, to: str | None) -> str:
    """The target by its name, or by the end of the destination's. Raises FormatError if neither tells, or they tell
    different ones."""
    end = next((end for end in sorted(_SUFFIXES, key=len, reverse=True) if dest.rstrip("/").endswith(end)), None)
    choices = "; ".join(f"{name} ({what})" for name, what in TARGETS.items())
    if to is None:
        if end is None:
            raise FormatError(f"the end of {dest!r} does not tell what to write: say --to, one of {choices}")
        return _SUFFIXES[end]
    if to not in TARGETS:
        raise FormatError(f"--to {to!r} is none of {choices}")
    if end is not None and _SUFFIXES[end] != to:
        raise FormatError(f"--to {to} does not go with the name {dest!r}, which ends as of {_SUFFIXES[end]}")
    return to


def check(to: str, dest: str, wanted: Wanted) -> None:
    """Raise DataError for options that do not go with the target."""
    if is_url(dest) and to != "zarr":
        raise DataError(f"only zarr is written to a URL: write {to} to a local path and upload that")
    for option, given in wanted.describe().items():
        why = _REFUSED.get(option, {}).get(to)
        if why is not None and given:
            named = "--tp, --pp, --ep" if option == "mesh" else "--" + option.replace("_", "-")
            raise DataError(f"{named} cannot be had with --to {to}: {why}")
    if wanted.stored and (wanted.mesh or wanted.rename):
        raise DataError("--stored takes tensors as they lie in the files: leave out --tp, --pp, --ep and --rename")
    if to in FILES and wanted.mesh and dest.endswith(FILES[to].endings):
        raise DataError(f"with --tp, --pp or --ep each rank gets a folder: {dest!r} has to be a folder's name")


def prepared(view: CheckpointView, wanted: Wanted) -> CheckpointView:
    """The part of the view that was asked for, as it was. Raises TensorNotFoundError if nothing is selected, and what
    renaming and converting raise."""
    if wanted.select is not None:
        view = matching(view, wanted.select, "--select")
    if wanted.rename is not None:
        view = view.rename(read_table(wanted.rename) if wanted.rename.endswith(ENDINGS) else wanted.rename)
    return view if wanted.dtype is None else view.astype(dtype_named(wanted.dtype).torch)
