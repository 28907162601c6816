"""The manifest of an export, ``manifest=True``: the digests of its tensors, published together with its files.

The written files are opened by their reader before they are published, so the manifest has the names and states that
everybody will see. The hashes come from the bytes that were written (`jobs.passing`); nothing of the source is read for
them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import DestinationError
from ..formats.opening import opened
from ..inspect.digest import digest
from ..inspect.manifest import MANIFEST, beside, files_mark
from ..io.storage.base import Store
from ..io.storage.urls import is_url
from ..jobs.destination import Files, Session, Whole, Zip
from ..jobs.passing import Passed
from ..jobs.plan import Manifest, WritePlan
from ..jobs.remote import Remote
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
        dest = replace(dest, keys=keys, manifest=key)
    elif isinstance(dest, Remote):
        options = dict(dest.place.options)
        if dest.one is not None:
            one = dest.one
            key = beside(one)
        elif plan.chunks is not None:
            key = beside(dest.name)
            dest = replace(dest, beside=key)
    elif plan.chunks is not None and isinstance(dest, Whole | Zip):  # zarr warns of other files in a hierarchy
        key = beside(dest.place.name)
        dest = replace(dest, beside=key)
    # the zip file is made when the manifest is complete, so its size and time are not known
    make = partial(_made, one=one, options=options, marked=not isinstance(dest, Zip))
    return replace(
        plan,
        destination=dest,
        fingerprint=manifested(plan.fingerprint),
        manifests=[Manifest(key, ALGORITHM, make)],
    )


def manifested(fingerprint: str) -> str:
    """Return the fingerprint of a job with a manifest, which keeps the prefix of one that cannot be resumed."""
    head, dash, _ = fingerprint.rpartition("-")
    return f"{head}{dash}{hashlib.sha256(f'{fingerprint} manifest'.encode()).hexdigest()}"


def below(manifests: Sequence[Manifest], folder: str) -> list[Manifest]:
    """Return the manifests of an export that is written to a folder of another one."""
    return [
        one._replace(key=f"{folder}/{one.key}", make=partial(one.make, below=f"{folder}/")) for one in manifests
    ]  # fmt: skip


def _made(
    root: str,
    passed: Passed,
    run: Any,
    *,
    one: str,
    options: Mapping[str, Any],
    marked: bool,
    below: str = "",
) -> bytes:
    """Return the manifest of the files in a folder or, if it is not "", of the file ``one``."""
    path = f"{root}/{below}{one}".rstrip("/") if is_url(root) else os.path.join(root, below, one).rstrip("/")
    store, index = opened(path, None, cache=False, storage_options=options or None, unfinished=True)
    with _view(store, next(iter(index.states)), index) as view:
        lost = {view.state: view.unreadable}
        known = partial(passed.known, below=below)
        found = digest(dict(view.states), lost, ALGORITHM, run, False, known=known)
    return replace(found, files=files_mark(index.files) if marked else None).to_json().encode()


def _view(store: Store, state: str, index: Any) -> Namespace[LazyArray]:
    view: Namespace[LazyArray] = object.__new__(Namespace)
    view._init(store, index, state, (), True)
    return view
