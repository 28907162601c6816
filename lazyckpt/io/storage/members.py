"""The members of a tar or a zip as a tree of folders, with its links followed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ...errors import CorruptError
from ..limits import Budget

_HOPS = 40  # links that lead to each other, as in Linux
_LONGEST = 4096  # characters of a name


class Member(NamedTuple):
    """A file in an archive: where its bytes are, and, if they are deflated, how many those are and the checksum of the
    file."""

    offset: int
    size: int
    stored: int | None = None
    crc: int = 0


class Tree:
    """The members of an archive as a tree of folders.

    Parameters
    ----------
    where
        The archive, for messages.
    budget
        What the members may cost, see `io.limits`.
    """

    def __init__(self, where: str, budget: Budget) -> None:
        self.where = where
        self._budget: Budget | None = budget
        self.files: dict[str, Member] = {}
        self.links: dict[str, str] = {}
        self.folders: dict[str, dict[str, None]] = {"": {}}  # folder -> names in it
        self._ends: dict[str, str | None] = {}  # link -> what it leads to

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored_tree, (self.where, self.files, self.links, self.folders)

    # -- building

    def clean(self, name: str) -> str:
        """Return a member's name without "." and empty parts. Raises CorruptError for a name outside of the archive."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if len(name) > _LONGEST or name.startswith("/") or ".." in parts or "\0" in name:
            raise CorruptError(
                f"{self.where}: the member {name[:200]!r} has a name that is absolute, leads out of the archive, or is "
                "too long: the archive is hostile or odd. Pack the folder again with tar -C FOLDER -cf RUN.tar ."
            )
        return "/".join(parts)

    def add(self, name: str, member: Member | None) -> None:
        """Add a file, in place of an earlier one of this name; with None, a folder."""
        name = self.clean(name)
        if member is None:
            if name:
                self._add_folder(name)
            return
        self._put(name)
        self.links.pop(name, None)
        self.files[name] = member

    def add_link(self, name: str, target: str) -> None:
        """Add a symbolic link. One that leads out of the archive, or nowhere, is no file of the folder."""
        name = self.clean(name)
        self._put(name)
        self.files.pop(name, None)
        self.links[name] = target[: _LONGEST + 1]

    def add_hard_link(self, name: str, target: str) -> None:
        """Add another name of an earlier member. Without that, there is no file of this name."""
        target = "/".join(part for part in target.split("/") if part not in ("", "."))
        if target in self.files:
            self.add(name, self.files[target])
        else:
            self.add_link(name, self.links.get(target, f"/{target}"))

    def finish(self) -> Tree:
        """Follow all links; return the tree."""
        for link in self.links:
            self._ends[link] = self.real(link)
        self._budget = None
        return self

    def _put(self, name: str) -> None:
        assert self._budget is not None
        self._budget.objects()
        if not name or name in self.folders:
            raise self._twofold(name)
        if name not in self.files and name not in self.links:
            folder, _, last = name.rpartition("/")
            self._add_folder(folder)
            self.folders[folder][last] = None

    def _add_folder(self, name: str) -> None:
        assert self._budget is not None
        missing = []
        while name not in self.folders:
            self._budget.objects()
            self._budget.characters(len(name))
            if name in self.files or name in self.links:
                raise self._twofold(name)
            missing.append(name)
            name = name.rpartition("/")[0]
        for one in reversed(missing):
            self.folders[one] = {}
            above, _, last = one.rpartition("/")
            self.folders[above][last] = None

    def _twofold(self, name: str) -> CorruptError:
        return CorruptError(
            f"{self.where}: {name[:200]!r} is both a folder and a file: the archive is hostile or damaged"
        )

    # -- looking up

    def real(self, path: str) -> str | None:
        """Return a path without links; None if a link leads out of the archive, or to itself."""
        left = path.split("/")[::-1]
        done: list[str] = []
        here, hops = "", 0
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if self._budget is not None:
                self._budget.steps(1 + len(here) // 64)
            if part == "..":
                if not done:
                    return None
                done.pop()
                here = "/".join(done)
                continue
            full = f"{here}/{part}" if here else part
            target = self.links.get(full)
            if target is None:
                done.append(part)
                here = full
                continue
            hops += 1
            if hops > _HOPS or len(target) > _LONGEST or target.startswith("/"):
                return None
            parts = target.split("/")
            if self._budget is not None:
                self._budget.steps(len(parts))
            left.extend(reversed(parts))
        return here

    def file(self, path: str) -> Member | None:
        """Return a file, None if there is none at the path."""
        found = self.files.get(path)
        if found is None and self.links:
            real = self.real(path)
            found = None if real is None else self.files.get(real)
        return found

    def listed(self, folder: str) -> Iterator[tuple[str, Member | None]]:
        """Yield the names in a folder, each with its file, or with None if it is a folder itself."""
        real = self.real(folder) if self.links else folder
        for name in () if real is None else self.folders.get(real, ()):
            full: str | None = f"{real}/{name}" if real else name
            if full in self.links:
                full = self._ends[full]
            if full in self.folders:
                yield name, None
            elif full in self.files:
                yield name, self.files[full]

    def only(self, paths: Iterable[str]) -> Tree:
        """Return a tree of these files only."""
        files = {path: found for path in paths if (found := self.file(path)) is not None}
        return _restored_tree(self.where, files, {}, {"": {}})


def _restored_tree(
    where: str, files: dict[str, Member], links: dict[str, str], folders: dict[str, dict[str, None]]
) -> Tree:
    tree = Tree(where, Budget(where, 0))
    tree.files, tree.links, tree.folders, tree._budget = files, links, folders, None
    tree._ends = {link: tree.real(link) for link in links}
    return tree
