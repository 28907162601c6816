"""Chunks of a Zarr hierarchy that change under an open view: old values or an error, never other values."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

import lazyckpt

LENGTH = 4  # of a chunk


def _hierarchy(folder: Path, chunks: int) -> Path:
    array = zarr.create_array(
        str(folder / "z"), shape=(chunks * LENGTH,), chunks=(LENGTH,), dtype="f4", fill_value=7, compressors=None
    )
    array[: 10 * LENGTH] = 1.0
    return folder / "z"


def _rewritten(path: Path) -> int:
    (path / "c/3").write_bytes(np.full(LENGTH, 9, "f4").tobytes())
    os.utime(path / "c/3", ns=(1, 1))
    return 3


def _removed(path: Path) -> int:
    (path / "c/3").unlink()
    return 3


def _truncated(path: Path) -> int:
    os.truncate(path / "c/3", 2)
    return 3


def _added(path: Path) -> int:
    (path / "c/20").write_bytes(np.full(LENGTH, 9, "f4").tobytes())
    return 20


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("change", [_rewritten, _removed, _truncated, _added])
def test_chunks_that_change_are_noticed(
    tmp_path: Path, change: Callable[[Path], int], warm: bool, travels: bool
) -> None:
    path = _hierarchy(tmp_path, 100)
    view = lazyckpt.open(path, cache=False)
    tensor = next(iter(view.values()))
    whole = tensor[...] if warm else None
    place = change(path)
    if travels:
        tensor = pickle.loads(pickle.dumps(tensor))
    old = 1.0 if place < 10 else 7.0
    for key in (slice(place * LENGTH, (place + 1) * LENGTH), ...):
        try:
            found = tensor[key]
        except (lazyckpt.ChangedFileError, lazyckpt.CorruptError, lazyckpt.MissingFileError):
            continue
        assert whole is None or found.tolist() == whole[key].tolist()
        assert found[place * LENGTH if key is ... else 0].item() == old
    if change is _added:  # opened again, it is read as it is now
        assert lazyckpt.open(path)["array"][place * LENGTH].item() == 9.0


@pytest.mark.parametrize("change", [_rewritten, _removed, _truncated, _added])
def test_states_of_read_chunks_are_remembered(tmp_path: Path, change: Callable[[Path], int]) -> None:
    path = _hierarchy(tmp_path, 2000)
    tensor = next(iter(lazyckpt.open(path, cache=False).values()))
    old = tensor[: 30 * LENGTH]
    change(path)
    with contextlib.suppress(lazyckpt.ChangedFileError, lazyckpt.CorruptError, lazyckpt.MissingFileError):
        assert tensor[: 30 * LENGTH].tolist() == old.tolist()


def test_all_chunks_are_pinned_when_the_hierarchy_is_opened(tmp_path: Path) -> None:
    """Also those behind the first hundreds, in folders of their own, and those that are absent."""
    root = zarr.open_group(str(tmp_path / "z"), mode="w")
    for name in ("a", "b", "c"):
        array = root.create_array(name, shape=(150, 8), chunks=(1, 4), dtype="f4", fill_value=7, compressors=None)
        array[:120] = 1.0
    view = lazyckpt.open(tmp_path / "z", cache=False)
    for place, column in ((110, 1), (149, 0)):
        (tmp_path / f"z/c/c/{place}").mkdir(exist_ok=True)
        (tmp_path / f"z/c/c/{place}/{column}").write_bytes(np.full(4, 9, "f4").tobytes())
    tensor = view["c"]
    assert tensor[110, :4].tolist() == [1.0] * 4 and tensor[148].tolist() == [7.0] * 8
    for key in ((110, 4), (149, 0), (slice(100, 120),), (...,)):
        with pytest.raises(lazyckpt.ChangedFileError):
            tensor[key]
    new = lazyckpt.open(tmp_path / "z")["c"]
    assert new[110, 4].item() == new[149, 0].item() == new[...][110, 4].item() == 9.0
