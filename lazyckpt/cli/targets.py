"""What `lazyckpt convert` was asked for: the target, and which options go with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.dtypes import dtype_named
from ..errors import DataError, FormatError
from ..export.registry import convertible
from ..export.writer import Writer
from ..io.storage.fsspec import is_url
from ..layouts.rename.table import ENDINGS, read_table
from ..view import CheckpointView
from .options import matching

_ONLY = {"max_shard_size": "have shards", "codec": "compresses"}


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

    def own(self, writer: Writer) -> dict[str, Any]:
        """The options of a writer's plan and forecast."""
        found: dict[str, Any] = {}
        if "max_shard_size" in writer.options:
            found["max_shard_size"] = self.max_shard_size or "5GB"
        if "codec" in writer.options:
            found["codec"] = self.codec
        return found


def target_of(dest: str, to: str | None) -> Writer:
    """The format by its name, or by the end of the destination's. Raises FormatError if neither says it, or they
    differ."""
    known = {writer.name: writer for writer in convertible()}
    suffixes = {end: writer for writer in known.values() for end in writer.endings}
    end = next((end for end in sorted(suffixes, key=len, reverse=True) if dest.rstrip("/").endswith(end)), None)
    choices = "; ".join(f"{writer.name} ({writer.what})" for writer in known.values())
    if to is None:
        if end is None:
            raise FormatError(f"the end of {dest!r} does not tell what to write: say --to, one of {choices}")
        return suffixes[end]
    if to not in known:
        raise FormatError(f"--to {to!r} is none of {choices}")
    if end is not None and suffixes[end].name != to:
        raise FormatError(f"--to {to} does not go with the name {dest!r}, which ends as of {suffixes[end].name}")
    return known[to]


def check(to: Writer, dest: str, wanted: Wanted) -> None:
    """Raise DataError for options that do not go with the format."""
    if is_url(dest) and not to.urls:
        others = " and ".join(writer.name for writer in convertible() if writer.urls)
        raise DataError(f"only {others} is written to a URL: write {to.name} to a local path and upload that")
    for option, given in wanted.describe().items():
        if given and option not in (*to.options, "select", "rename"):
            named = "--tp, --pp, --ep" if option == "mesh" else "--" + option.replace("_", "-")
            takers = [writer.name for writer in convertible() if option in writer.options]
            why = to.refused.get(option, f"only {' and '.join(takers)} {_ONLY.get(option)}")
            raise DataError(f"{named} cannot be had with --to {to.name}: {why}")
    if wanted.stored and (wanted.mesh or wanted.rename):
        raise DataError("--stored takes tensors as they lie in the files: leave out --tp, --pp, --ep and --rename")
    if to.by_rank and wanted.mesh and dest.endswith(to.endings):
        raise DataError(f"with --tp, --pp or --ep each rank gets a folder: {dest!r} has to be a folder's name")


def prepared(view: CheckpointView, wanted: Wanted) -> CheckpointView:
    """The part of the view that was asked for, as it was. Raises TensorNotFoundError if nothing is selected, and what
    renaming and converting raise."""
    if wanted.select is not None:
        view = matching(view, wanted.select, "--select")
    if wanted.rename is not None:
        view = view.rename(read_table(wanted.rename) if wanted.rename.endswith(ENDINGS) else wanted.rename)
    return view if wanted.dtype is None else view.astype(dtype_named(wanted.dtype).torch)
