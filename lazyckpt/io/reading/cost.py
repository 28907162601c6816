"""What a read costs: the ranges of files, the bytes and the requests of a plan that is not carried out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...core.box import Selection
from ...core.copies import Copy
from ...core.extents import Chunk
from ...core.specs import TensorSpec
from ...core.units import plural
from ...errors import and_more
from ..storage.base import Store
from ..storage.remote import Remote
from .forecast import forecast, planned_unread
from .gather import Range, plan, ranges


@dataclass(slots=True)
class Cost:
    """The cost of a read: ``places``, a line for each range; ``paths`` of the files; ``nbytes`` in all; ``requests`` to
    a server, None for local files."""

    places: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    nbytes: int = 0
    requests: int | None = None
    whole: set[Any] = field(default_factory=set)
    """The packed chunks of known sizes that are counted in ``nbytes``."""

    def add(self, store: Store, spec: TensorSpec, want: Selection) -> None:
        """Add the read of a selection of a tensor in files. Raises the errors that reading would raise."""
        nbytes = self.nbytes
        for copy, found in ranges(store, plan(store, spec, want)):
            self._add_range(copy, found)
        if isinstance(store, Remote) and not store.maps_files:
            asked, fetched = forecast(store, planned_unread(store, spec, want))
            self.requests, self.nbytes = (self.requests or 0) + asked, nbytes + fetched

    def _add_range(self, copy: Copy, found: Range) -> None:
        """Add a range that a copy reads."""
        path, start, length, count, in_all = found
        self.paths.add(path)
        within = copy.extent.within
        if within is not None:
            line = f"{path}: {length * count:,} bytes within {within}"
            if isinstance(within, Chunk) and within.codecs and within.window and not within.shards:
                size = within.window[1]  # read and unpacked from its beginning
                self.nbytes += 0 if within.key in self.whole else size
                self.whole.add(within.key)
                line += f", which is read and unpacked as a whole ({size:,} bytes)"
            else:
                self.nbytes += in_all
            self.places.append(line)
            return
        self.nbytes += in_all
        times = and_more(count - 1, "runs of that length", start=" and ")
        times += ", with what lies between" if in_all > length * count else ""
        self.places.append(f"{path}: bytes {start:,} to {start + length:,} ({length:,}){times}")

    @property
    def summary(self) -> str:
        """The number of ranges, of files and of bytes, as text."""
        ranges = f"{len(self.places)} range{'s' if len(self.places) != 1 else ''}"
        files = f"{len(self.paths)} file{'s' if len(self.paths) != 1 else ''}"
        asked = "" if self.requests is None else f" in {plural(self.requests, 'request')}"
        return f"{ranges} in {files} ({self.nbytes:,} bytes read{asked})"
