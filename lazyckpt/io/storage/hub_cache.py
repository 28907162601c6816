"""Files of the Hub that huggingface_hub has downloaded already, in its cache.

Layout (huggingface_hub, "Understand caching"): ``models--owner--name/refs/main`` holds a commit;
``snapshots/COMMIT/PATH`` is a link to ``blobs/ETAG``, or the file itself where there are no links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...core.index import FileInfo
from .base import Entry
from .hub_url import COMMIT, KINDS, Place

_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def _root(place: Place, cache_dir: str | None) -> Path:
    from huggingface_hub import constants

    # the name that huggingface_hub.file_download.repo_folder_name gives
    return Path(cache_dir or constants.HF_HUB_CACHE, "--".join([place.kind, *place.repo.split("/")]))


def cached_commit(place: Place, cache_dir: str | None) -> str:
    """Return the commit of a revision of which the cache has files; "" if there is none."""
    root, revision = _root(place, cache_dir), place.revision or "main"
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (root / "refs" / revision).read_text("utf-8").strip()
        except (OSError, ValueError):
            return ""
    return commit if COMMIT.fullmatch(commit) and (root / "snapshots" / commit).is_dir() else ""


class Snapshot:
    """The files of one commit in the cache.

    Parameters
    ----------
    place
        The repository, with the commit as its revision.
    cache_dir
        The folder of the cache; None for that of huggingface_hub's settings.
    """

    def __init__(self, place: Place, cache_dir: str | None) -> None:
        self._place = place
        self._cache_dir = cache_dir
        self.root = _root(place, cache_dir) / "snapshots" / place.revision

    def state(self, path: str) -> FileInfo | None:
        """Return the state of a file as the Hub would tell it, None if it is not in the cache. The version is empty if
        the cache does not tell it."""
        from huggingface_hub import try_to_load_from_cache

        repo, commit, kind = self._place.repo, self._place.revision, KINDS[self._place.kind]
        found = try_to_load_from_cache(repo, path, cache_dir=self._cache_dir, revision=commit, repo_type=kind)
        if not isinstance(found, str):
            return None
        try:
            return FileInfo(os.stat(found).st_size, 0, _version(found))
        except OSError:
            return None

    def list(self, folder: str) -> Mapping[str, Entry]:
        """Return the entries of a folder that are in the cache, by name."""
        found = {}
        try:
            with os.scandir(self.root / folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        found[entry.name] = Entry(FileInfo(0, 0), True)
                    elif entry.is_file():
                        found[entry.name] = Entry(FileInfo(entry.stat().st_size, 0, _version(entry.path)), False)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found


def _version(path: str) -> str:
    """Return the ETag that the blob of a file is named after."""
    real = Path(os.path.realpath(path))
    return real.name if real.parent.name == "blobs" and _BLOB.fullmatch(real.name) else ""
