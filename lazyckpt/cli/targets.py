"""The target format of `lazyckpt convert`, and the checks of its options."""

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
    """The options that change the output. ``mesh`` has the degrees (tp, pp, ep); None if none was given."""

    select: str | None
    dtype: str | None
    rename: str | None
    mesh: tuple[int, int, int] | None
    stored: bool
    max_shard_size: str | None
    codec: str | None

    def describe(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}

    def own(self, writer: Writer) -> dict[str, Any]:
        """Return the options of a writer's plan and forecast."""
        found: dict[str, Any] = {}
        if "max_shard_size" in writer.options:
            found["max_shard_size"] = self.max_shard_size or "5GB"
        if "codec" in writer.options:
            found["codec"] = self.codec
        return found


def target_of(dest: str, to: str | None) -> Writer:
    """Return the writer for ``to`` or, if that is None, for the ending of the destination.

    Raises FormatError if neither identifies a format, or if they contradict each other."""
    known = {writer.name: writer for writer in convertible()}
    suffixes = {end: writer for writer in known.values() for end in writer.endings}
    end = next((end for end in sorted(suffixes, key=len, reverse=True) if dest.rstrip("/").endswith(end)), None)
    choices = "; ".join(f"{writer.name} ({writer.what})" for writer in known.values())
    if to is None:
        if end is None:
            raise FormatError(f"the ending of {dest!r} does not tell what to write: say --to, one of {choices}")
        return suffixes[end]
    if to not in known:
        raise FormatError(f"--to {to!r} is none of {choices}")
    if end is not None and suffixes[end].name != to:
        raise FormatError(f"--to {to} does not go with the name {dest!r}, whose ending is that of {suffixes[end].name}")
    return known[to]


def check(to: Writer, dest: str, wanted: Wanted) -> None:
    """Raise DataError for options that the format does not have."""
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
        raise DataError("--stored writes tensors as they are stored: leave out --tp, --pp, --ep and --rename")
    if to.by_rank and wanted.mesh and dest.endswith(to.endings):
        raise DataError(f"with --tp, --pp or --ep each rank gets a folder: {dest!r} has to be a folder's name")


def prepared(view: CheckpointView, wanted: Wanted) -> CheckpointView:
    """Apply --select, --rename and --dtype to a view.

    Raises TensorNotFoundError if nothing is selected, and the errors of renaming and converting."""
    if wanted.select is not None:
        view = matching(view, wanted.select, "--select")
    if wanted.rename is not None:
        view = view.rename(read_table(wanted.rename) if wanted.rename.endswith(ENDINGS) else wanted.rename)
    return view if wanted.dtype is None else view.astype(dtype_named(wanted.dtype).torch)
