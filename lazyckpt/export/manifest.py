"""The manifest of an export, ``manifest=True``: the digests of its tensors, published together with its files.

The written files are opened by their reader before they are published, so the manifest has the names and states that
everybody will see. The hashes come from the bytes that were written (`jobs.passing`); nothing of the source is read for
them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import DestinationError
from ..formats.opening import opened
from ..inspect.digest import digest
from ..inspect.manifest import MANIFEST, beside, files_mark
from ..io.storage.base import Store
from ..jobs.destination import Files, Remote, Session, Zip
from ..jobs.plan import Manifest, WritePlan
from ..lazy import LazyArray
from ..namespace import Namespace

ALGORITHM = "sha256"


def with_manifest(plan: WritePlan) -> WritePlan:
    """Return the plan with a manifest of what it writes. Raises DestinationError if it writes no files of its own."""
    dest = plan.destination
    if isinstance(dest, Session) or plan.build is not None or not plan.nbytes:
        raise DestinationError(
            "manifest=True is for exports with tensor data in files of their own. Compute the digests instead: "
            "lazyckpt digest PATH"
        )
    key, one, options = MANIFEST, "", dict[str, Any]()
    if isinstance(dest, Files):
        if dest.one:
            one = dest.keys[0]
            key = beside(one)
        keys = list(dest.keys)
        keys.insert(len(keys) - dest.index, key)  # the index is published last
        dest = replace(dest, keys=keys)
    elif isinstance(dest, Remote):
        options = dict(dest.bucket.options)
    # the time of modification of a zip file is later than that of the manifest in it
    make = partial(_made, one=one, options=options, marked=not isinstance(dest, Zip))
    return replace(
        plan,
        destination=dest,
        fingerprint=manifested(plan.fingerprint),
        manifests=[Manifest(key, "", ALGORITHM, make)],
    )


def manifested(fingerprint: str) -> str:
    """Return the fingerprint of a job with a manifest, which keeps the prefix of one that cannot be resumed."""
    head, dash, _ = fingerprint.rpartition("-")
    return f"{head}{dash}{hashlib.sha256(f'{fingerprint} manifest'.encode()).hexdigest()}"


def _made(
    folder: str,
    known: Callable[[LazyArray], Mapping[int, bytes]],
    run: Any,
    *,
    one: str,
    options: Mapping[str, Any],
    marked: bool,
) -> bytes:
    """Return the manifest of the written files in a folder or, if it is not "", of the file ``one``."""
    path = os.path.join(folder, one) if one else folder.rstrip("/")
    store, index = opened(path, None, cache=False, storage_options=options or None)
    view = _view(store, next(iter(index.states)), index)
    with view:
        lost = {view.state: view.unreadable}
        found = digest(dict(view.states), lost, ALGORITHM, run, False, known=known)
        files = files_mark(index.files) if marked else None
    return replace(found, files=files).to_json().encode()


def _view(store: Store, state: str, index: Any) -> Namespace[LazyArray]:
    view: Namespace[LazyArray] = object.__new__(Namespace)
    view._init(store, index, state, (), True)
    return view
