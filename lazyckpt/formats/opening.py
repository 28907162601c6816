"""From a path or a URL to the store of its bytes and the index of what they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..core.index import Index
from ..io.local import split
from ..io.remote import is_url, split_url
from ..io.store import Store
from .cache import cached_index
from .reader import Source, read_index
from .runs import read_one


def opened(
    path: str | os.PathLike[str],
    format: str | None,
    tag: str | None = None,
    rules: Mapping[str, Any] | None = None,
    cache: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[Store, Index]:
    """What `lazyckpt.open` makes a view of; of a run's folder, its newest complete checkpoint or ``tag``."""
    if not (tag is None or isinstance(tag, str)):
        raise TypeError(f"tag={tag!r}: the name of a checkpoint is due, a text such as 'checkpoint-500'")
    store: Store
    url = os.fspath(path)
    store, name = split_url(url, storage_options) if is_url(url) else split(path)

    def read(source: Source) -> Index:
        return cached_index(source, format) if cache else read_index(source, format)

    source, index = read_one(Source(store, name, tag, rules), read)
    return source.store.pinned(index.pins), index
