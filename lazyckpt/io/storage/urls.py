"""From a user's URL to the store of its folder: which protocol is read by which store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FormatError, MissingFileError
from .base import Store, raise_unreadable
from .connecting import is_object_url
from .credentials import without_secrets
from .fsspec import FsspecStore
from .hub import handles, split_hub
from .local import split
from .object import ObjectStore
from .spellings import of_page

_LOCAL = "file://"  # begins the URL of a local file
_HERE = "localhost"  # the server that such a URL may name
# the endings of names that are files rather than folders
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".json", ".zip", ".gguf", ".npz", ".distcp", ".tar", ".metadata")


def is_url(path: str) -> bool:
    """Return whether a user's path has a protocol; a Windows drive is not one."""
    return "://" in path


def is_remote(path: str) -> bool:
    """Return whether a user's path is a URL of other than local files."""
    return is_url(path) and not path.startswith(_LOCAL)


def without_protocol(path: str) -> str:
    """Return the path that a ``file://`` URL names; other paths and URLs as they are.

    >>> without_protocol("file:///run"), without_protocol("file://localhost/run"), without_protocol("runs/file")
    ('/run', '/run', 'runs/file')
    """
    if not path.startswith(_LOCAL):
        return path
    found = path.removeprefix(_LOCAL)
    return found.removeprefix(_HERE) if found.startswith(f"{_HERE}/") else found


def store_of(url: str, options: Mapping[str, Any] | None = None) -> ObjectStore | FsspecStore:
    """Return the store of the folder at a URL. Raises FormatError for an unknown protocol or a missing package."""
    if is_object_url(url):
        return ObjectStore(url, options)
    return FsspecStore(url, options)


def split_url(url: str, options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Return the store for a user's URL and the name within the store. A folder has the name ""; a file is opened in
    the store of its parent folder.

    Raises MissingFileError if there is neither a file nor a folder, and what `store_of` raises.
    """
    if not is_remote(url):
        path = without_protocol(url)
        try:
            return split(path)
        except MissingFileError as e:
            if path.startswith(("/", "~")):
                raise
            server = path.partition("/")[0]
            raise MissingFileError(
                f"{url}: files of the machine {server!r} cannot be read so. A file of this machine has three slashes "
                "(file:///folder), or the server localhost"
            ) from e
    if options is not None and not isinstance(options, Mapping):
        kind = type(options).__name__
        raise FormatError(f"{without_secrets(url, {})}: storage_options is of type {kind}: give a dictionary")
    if page := of_page(url):
        raise FormatError(f"{without_secrets(url, {})}: a page of the Hub, not a file of a checkpoint: write {page}")
    if handles(url):
        try:
            return split_hub(url, options)
        except OSError as e:
            raise_unreadable(url, "", e)
    url = _folder(url)
    store = store_of(url, options)
    try:
        return _split_object(store) if isinstance(store, ObjectStore) else store.split()
    except OSError as e:
        raise_unreadable(store.root, "", e)


def _split_object(store: ObjectStore) -> tuple[Store, str]:
    parent = store.parent()
    if parent is None:  # a bucket
        return store, ""
    folder, name = parent
    if not store.listable:
        denied = None
        try:
            page = folder.is_page(name)
        except PermissionError as e:  # perhaps only the page of the folder
            page, denied = None, e
        if page is False:
            return folder, name
        entries = store.list()
        if entries:
            return store.listed(entries), ""
        if page:
            raise FormatError(
                f"{store.root}: the server has a page there (text/html) that lists no files. Name a file of the "
                "checkpoint, such as its index (model.safetensors.index.json)"
            )
        raise MissingFileError(str(denied) if denied else f"{store.root}: no such file or folder")
    likely = name.endswith(_FILES)  # then look for a file first
    if likely and folder.there(name):
        return folder, name
    entries = store.list()
    if entries:
        return store.listed(entries), ""
    if not likely and folder.there(name):
        return folder, name
    raise MissingFileError(f"{store.root}: no such file or folder")


def _folder(url: str) -> str:
    """Remove trailing slashes, except those of a protocol's root ("memory://")."""
    url = url.rstrip("/")
    return f"{url}//" if url.endswith(":") else url
