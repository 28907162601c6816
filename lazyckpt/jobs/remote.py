"""Exports to object stores: the destination, and what may be in the way there.

Objects cannot be renamed, so an export is written in place. While it is not finished, a marker object is there. It has
the fingerprint of the job and the ids of its multipart uploads; which parts the store has, the store says. Before the
uploads begin it has the names of their files, so that an upload whose id got lost can be found and removed. Objects of
several parts appear when the uploads are completed, at the end, and the file that makes the checkpoint readable is
written last. A folder with a marker is not opened.

Two exports to the same place exclude each other within a process. Of two processes, the one that writes its marker last
goes on; the other one notices it when its uploads are gone or, at the latest, before it publishes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import DestinationError, LazyckptError
from ..io.storage.connecting import PROTOCOLS
from ..io.storage.uploads import PartUploads, UploadGoneError, Uploads, part_of
from ..lazy import LazyArray
from .destination import MARK_OF_MANIFEST, stores_of_all
from .unfinished import Record, busy, concurrently, mark_of, record_of, remove_all, remove_unfinished


@dataclass(frozen=True, slots=True)
class Remote:
    """Objects below a prefix, or a single object.

    Attributes
    ----------
    place
        The prefix, or that of the folder of the single object.
    tensors
        The tensors that are read.
    overwrite
        Whether an existing export is replaced.
    one
        The key of the single object; None for a folder.
    other
        For a folder that is replaced as a whole: returns why a folder with these names is of another kind, or None. If
        it is None, the folder may contain other objects.
    of_family
        Returns whether an object of this name would be mistaken for part of the export; None if that is impossible.
    packed
        Whether the single object is a zip file of all files.
    beside
        The key of a manifest that is written beside the folder, because its readers do not expect it inside.
    """

    place: Uploads
    tensors: Sequence[LazyArray]
    overwrite: bool
    one: str | None = None
    other: Callable[[Sequence[str]], str | None] | None = None
    of_family: Callable[[str], bool] | None = None
    packed: bool = False
    beside: str | None = None

    def __str__(self) -> str:
        return self.place.at(self.one or "")

    @property
    def name(self) -> str:
        """The last name in the URL."""
        return self.one or self.place.name

    @property
    def owns(self) -> bool:
        """Whether everything at the prefix belongs to the export."""
        return self.other is not None

    @property
    def mark(self) -> str:
        """The key of the marker."""
        return mark_of(self.one)

    def begin(self, fingerprint: str, keys: Sequence[str], resume: bool) -> Record:
        """Check and prepare the place; return the record, of an earlier call if it is resumed. ``keys``: the objects
        that are written, apart from chunks, the one that makes the export readable last. Without ``resume``, what an
        unfinished export has left is removed.

        Raises DestinationError if something is in the way, and OSError.
        """
        self._check_apart(keys)
        found, there = self._look()
        if found is not None:
            if resume and found.fingerprint == fingerprint:
                self._clear_leftovers(found, keys)
                if found.uploads is not None:
                    return found
            elif resume and not self.overwrite:
                raise DestinationError(
                    f"{self} holds an unfinished export of something else: choose another place, or pass overwrite=True"
                )
            else:
                remove_unfinished(self.place, self.mark, found)
                found = None
            there = self.place.list(self.one or "")
        there.pop(self.mark, None)
        if found is None:
            self._check(keys, there)
        self.place.put(self.mark, [Record(fingerprint, None, self.owns, tuple(keys)).text()])
        self._clear(keys, there)
        return Record(fingerprint, {}, self.owns)

    def _look(self) -> tuple[Record | None, dict[str, int]]:
        """Return the record of an unfinished export, and the sizes of the objects; both requests at the same time."""
        with ThreadPoolExecutor(1, thread_name_prefix="lazyckpt-ask") as pool:
            listing = pool.submit(self.place.list, self.one or "")
            return record_of(self.place, self.mark), listing.result()

    def _check(self, keys: Sequence[str], there: Mapping[str, int]) -> None:
        if self.beside is not None:
            above = self.place.beside
            if self.beside in above.list(self.beside) and MARK_OF_MANIFEST not in above.get(self.beside, 0, 256):
                raise DestinationError(
                    f"{above.at(self.beside)} exists already and is no manifest: remove it, or choose another place"
                )
        if self.other is not None:
            names = sorted({key.partition("/")[0] for key in there})
            if names and (why := self.other(names)) is not None:
                raise DestinationError(f"{self} is not empty, {why}: choose another place")
            if names and not self.overwrite:
                raise _taken(str(self))
            return
        if self.one is None and self.of_family is not None:
            others = sorted(key for key in there if "/" not in key and key not in keys and self.of_family(key))
            if others:
                raise DestinationError(
                    f"{self} holds other weights, which would be mistaken for part of these: {', '.join(others[:3])}"
                    f"{', ...' if len(others) > 3 else ''}. Remove them or choose another place"
                )
        for key in keys:
            if key in there and not self.overwrite:
                raise _taken(self.place.at(key))

    def _clear(self, keys: Sequence[str], there: Mapping[str, int]) -> None:
        """Remove what must not be mistaken for this export, beginning with what makes it readable."""
        if self.owns:
            remove_all(self.place, there, keep=self.mark)
        elif self.one is None and not self.place.resumes:
            # whether an object is an old one or finished could not be told later
            for key in reversed(keys):
                if key in there:
                    self.place.remove([key])

    def _clear_leftovers(self, record: Record, keys: Sequence[str]) -> None:
        """Remove what a killed call has begun and no later one can go on with."""
        place = self.place
        if isinstance(place, PartUploads):
            known = set((record.uploads or {}).values())
            begun = [one for one in place.begun(self.one or "") if one[1] not in known and self._writes(one[0], keys)]
            concurrently(lambda one: place.abort(*one), begun)
            return
        there = place.list("" if self.one is None else f".{self.one}.")
        place.remove([key for key in there if (of := part_of(key)) is not None and self._writes(of, keys)])

    def _writes(self, key: str, keys: Sequence[str]) -> bool:
        return self.owns or key in keys

    def _check_apart(self, keys: Sequence[str]) -> None:
        """Raise DestinationError if an object that is read would be replaced, or is in the same folder, or if the place
        is inside of the checkpoint that is read."""
        place, dest = _plain(self.place.url), _plain(f"{self.place.url}/{self.one or ''}")
        written = {_plain(f"{self.place.url}/{key}") for key in keys}
        for store in stores_of_all(self.tensors):
            root = _plain(store.root)
            sources = {f"{root}/{path}" for path in store.pins}
            folders = {source.rpartition("/")[0] for source in sources}
            packed = any(f"{source}/".startswith(f"{key}/") for key in written for source in (root, *folders))
            if (
                packed
                or sources & {*written, dest}
                or (self.one is None and self.of_family is not None and place in folders)
            ):
                raise DestinationError(f"{self} holds the checkpoint that is read: choose another place")
            if self.owns and any(f"{source}/".startswith(f"{place}/") for source in sources):
                raise DestinationError(f"{self} holds the checkpoint that is read: choose another place")
            inside = len(sources) > 1 and any(f"{place}/".startswith(f"{folder}/") for folder in (root, *folders))
            if inside and (self.one is None or place not in folders):
                raise DestinationError(f"{self} is inside of the checkpoint that is read: choose another place")

    def check_ours(self, record: Record) -> None:
        """Raise Busy if another export has taken the place."""
        if record_of(self.place, self.mark) != record:
            raise busy(str(self))

    @contextmanager
    def reporting(self, kept: bool = True) -> Iterator[None]:
        """Convert an OSError to a DestinationError, which says that finished work is kept if it is (``kept``)."""
        try:
            yield
        except UploadGoneError as e:
            raise busy(str(self)) from e
        except OSError as e:
            if isinstance(e, LazyckptError):
                raise
            what = (e.strerror or str(e)).removeprefix(f"{self}: ").removeprefix(f"{self.place.at(self.mark)}: ")
            note = "What is finished is kept there, and readers do not see it yet: call again to go on"
            raise DestinationError(f"{self}: {what.removesuffix('.')}" + (f". {note}" if kept else "")) from e


def _plain(url: str) -> str:
    """Return a URL for comparison: without user, slashes at the end, and other names of the same protocol."""
    scheme, sep, rest = url.partition("://")
    if not sep:
        return url
    head, _, tail = rest.partition("/")
    scheme = PROTOCOLS.get(scheme.lower(), scheme.lower())
    return f"{scheme}://" + "/".join(
        filter(None, [head if scheme == "az" else head.rpartition("@")[2], *tail.split("/")])
    )


def _taken(url: str) -> DestinationError:
    return DestinationError(f"{url} exists already: remove it, choose another place, or pass overwrite=True")
