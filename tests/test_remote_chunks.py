"""Zarr hierarchies in a bucket that are written anew while they are open: old values or an error, never a mixture."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.index import FileInfo
from lazyckpt.errors import ChangedFileError, MissingFileError
from lazyckpt.formats.zarr import listing
from lazyckpt.io.storage.object import ObjectStore

from .servers.fixtures import Cloud
from .servers.server import Handle

zarr = pytest.importorskip("zarr")
LENGTH = 4  # of a chunk
ERRORS = (ChangedFileError, MissingFileError)


def asked(server: Handle) -> dict[str, int]:
    """Count the requests: listings, states, bytes."""
    found = {"list": 0, "head": 0, "get": 0}
    for one in server.log():
        is_list = any(text in one.target for text in ("list-type=", "comp=list", "prefix="))
        found["head" if one.method == "HEAD" else "list" if is_list else "get"] += 1
    server.reset()
    return found


def written(folder: Path, value: float, chunks: int = 30, filled: int = 10, name: str = "z", **options: Any) -> Path:
    """A hierarchy of two arrays, of whose chunks the first ``filled`` are there."""
    root = zarr.open_group(str(folder / name), mode="w", zarr_format=3)
    for key in ("a", "b"):
        one = root.create_array(
            key, shape=(chunks * LENGTH,), chunks=(LENGTH,), dtype="f4", fill_value=7, compressors=None, **options
        )
        one[: filled * LENGTH] = value
    zarr.consolidate_metadata(str(folder / name))
    return folder / name


def opened(url: str, cloud: Cloud) -> lazyckpt.CheckpointView:
    return lazyckpt.open(url, cache=False, storage_options=cloud.options)


def chunk(value: float) -> bytes:
    return np.full(LENGTH, value, "f4").tobytes()


def rewritten(cloud: Cloud, tmp_path: Path) -> None:
    cloud.put("z/a/c/3", chunk(9))


def added(cloud: Cloud, tmp_path: Path) -> None:
    cloud.put("z/a/c/20", chunk(9))


def removed(cloud: Cloud, tmp_path: Path) -> None:
    cloud.store.delete("z/a/c/3")


def replaced(cloud: Cloud, tmp_path: Path) -> None:
    cloud.put_folder(written(tmp_path, 9.0, name="new"), "z")


def some_chunks_replaced(cloud: Cloud, tmp_path: Path) -> None:
    """As if the hierarchy were being written: the chunks of one array are there already."""
    cloud.put_folder(written(tmp_path, 9.0, name="new") / "a", "z/a")


CHANGES = [rewritten, added, removed, replaced, some_chunks_replaced]


@pytest.mark.parametrize("travels", ["", "tensor", "view"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_read_mixes_old_and_new_chunks(
    tmp_path: Path, s3: Cloud, change: Callable[[Cloud, Path], None], travels: str
) -> None:
    url = s3.put_folder(written(tmp_path, 1.0), "z")
    view = opened(url, s3)
    tensor = pickle.loads(pickle.dumps(view))["a"] if travels == "view" else view["a"]
    tensor = pickle.loads(pickle.dumps(tensor)) if travels == "tensor" else tensor
    assert tensor[:LENGTH].tolist() == [1.0] * LENGTH
    change(s3, tmp_path)
    refused = []
    for n in range(30):
        for _ in range(2):  # an error is no permission to read it the next time
            try:
                found = tensor[n * LENGTH : (n + 1) * LENGTH]
            except ERRORS:
                refused.append(n)
            else:
                assert found.tolist() == [1.0 if n < 10 else 7.0] * LENGTH
    wrong = {rewritten: [3], added: [20], removed: [3]}.get(change, [*range(1, 10)])
    assert set(wrong) <= set(refused)
    for _ in range(2):
        with pytest.raises(ERRORS):
            tensor[...]
    new = opened(url, s3)["a"][...]
    assert 9.0 in new.tolist() or change is removed


def test_a_sparse_array_keeps_the_chunks_that_it_had(tmp_path: Path, s3: Cloud) -> None:
    """Of many chunks, the absent ones are not looked up: the listing of the opening counts, in a worker, too."""
    url = s3.put_folder(written(tmp_path, 1.0, chunks=3000), "z")
    view = opened(url, s3)
    whole = view["a"][...]
    assert whole.tolist() == [1.0] * 10 * LENGTH + [7.0] * 2990 * LENGTH
    other = pickle.loads(pickle.dumps(view["a"]))
    added(s3, tmp_path)
    s3.store.delete("z/b/c/3")
    assert torch.equal(view["a"][...], whole) and torch.equal(other[...], whole)
    for tensor in (view["b"], pickle.loads(pickle.dumps(view["b"]))):
        with pytest.raises(ERRORS):
            tensor[...]
    again = lazyckpt.open(url, storage_options=s3.options)
    assert again["a"][20 * LENGTH].item() == 9.0 and again["a"][...][20 * LENGTH].item() == 9.0


def test_an_index_in_memory_knows_no_chunks(tmp_path: Path, s3: Cloud) -> None:
    url = s3.put_folder(written(tmp_path, 1.0, chunks=3000), "z")
    assert lazyckpt.open(url, storage_options=s3.options)["a"][...][20 * LENGTH].item() == 7.0
    added(s3, tmp_path)
    rewritten(s3, tmp_path)
    again = lazyckpt.open(url, storage_options=s3.options)["a"][...]
    assert again[20 * LENGTH].item() == 9.0 and again[3 * LENGTH].item() == 9.0


def test_a_listing_takes_the_place_of_a_request_for_each_chunk(tmp_path: Path, cloud: Cloud) -> None:
    url = cloud.put_folder(written(tmp_path, 1.0), "z")
    cloud.server.reset()
    view = opened(url, cloud)
    opening = asked(cloud.server)
    assert view["a"][: 5 * LENGTH].tolist() == [1.0] * 5 * LENGTH
    reading = asked(cloud.server)
    assert view["a"][10 * LENGTH : 12 * LENGTH].tolist() == [7.0] * 2 * LENGTH
    if cloud.kind == "http":  # no listing: each chunk is looked at, and the document is compared
        assert reading["get"] == 5 and reading["head"] >= 5
        return
    assert opening["list"] == 2 and opening["get"] + opening["head"] <= 3  # the folder, and all that is below it
    assert reading == {"list": 0, "head": 0, "get": 5}
    assert asked(cloud.server) == {"list": 0, "head": 2, "get": 0}  # the absent ones


def test_a_large_hierarchy_is_listed_array_by_array(tmp_path: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of everything is one answer after the other; those of the arrays are asked for at the same time."""
    url = s3.put_folder(written(tmp_path, 1.0), "z")
    monkeypatch.setattr(listing, "_PAGE", 5)
    s3.server.reset()
    view = opened(url, s3)
    assert asked(s3.server)["list"] == 3
    rewritten(s3, tmp_path)
    with pytest.raises(ChangedFileError):
        view["a"][3 * LENGTH]


def test_names_are_the_same_in_listings_and_answers(tmp_path: Path, cloud: Cloud) -> None:
    names = ["a b", "x/y", "50%", "q?#", "é", "plain.weight"]
    save_file({name: torch.arange(12.0) for name in names}, tmp_path / "m.safetensors")
    lazyckpt.open(tmp_path / "m.safetensors").to_zarr(tmp_path / "z", codec="gzip", pack=False)
    url = cloud.put_folder(tmp_path / "z", "some folder/z")
    view = opened(url, cloud)
    cloud.server.reset()
    assert all(view[name].to().tolist() == torch.arange(12.0).tolist() for name in names)
    assert cloud.kind == "http" or asked(cloud.server)["head"] == 0


def test_a_document_that_is_replaced_before_the_listing(
    tmp_path: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3.put_folder(written(tmp_path, 1.0), "z")
    real = ObjectStore.tree

    def late(store: ObjectStore, folder: str, limit: int) -> Mapping[str, Any] | None:
        s3.put_folder(written(tmp_path, 9.0, chunks=20, name="new"), "z")
        return real(store, folder, limit)

    monkeypatch.setattr(ObjectStore, "tree", late)
    with pytest.raises(ChangedFileError, match=r"z/zarr\.json"):
        opened(url, s3)


# -- where there is no listing


@pytest.fixture(params=["refused", "too many"])
def unlisted(request: pytest.FixtureRequest, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    if request.param == "too many":
        monkeypatch.setattr(listing, "_REMOTE", 4)
        monkeypatch.setattr(listing, "_PAGE", 4)
        monkeypatch.setattr(listing, "_DOCUMENTS", 0)
    else:
        monkeypatch.setattr(ObjectStore, "tree", lambda *_: None)
    return s3


@pytest.mark.parametrize("same", [False, True], ids=["other documents", "equal documents"])
def test_without_a_listing_the_document_is_compared(
    tmp_path: Path, unlisted: Cloud, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are pinned when they are first read; a hierarchy that is replaced has a new document."""
    s3 = unlisted
    url = s3.put_folder(written(tmp_path, 1.0), "z")
    view = opened(url, s3)
    tensor = view["a"]
    assert tensor[:LENGTH].tolist() == [1.0] * LENGTH
    other = {} if same else {"attributes": {"new": 1}}
    s3.put_folder(written(tmp_path, 9.0, name="new", **other), "z")
    if same:  # only its time tells that it was written again, in whole seconds
        real = ObjectStore._ask_state

        def later(store: ObjectStore, path: str) -> FileInfo:
            info = real(store, path)
            return info._replace(mtime_ns=info.mtime_ns + 10**10) if path == "zarr.json" else info

        monkeypatch.setattr(ObjectStore, "_ask_state", later)
    for _ in range(2):
        for key in (slice(2 * LENGTH, 3 * LENGTH), slice(LENGTH), ..., slice(15 * LENGTH, 16 * LENGTH)):
            with pytest.raises(ChangedFileError):
                tensor[key]
    monkeypatch.undo()
    assert 9.0 in opened(url, s3)["a"][...].tolist()


def test_without_a_listing_an_absent_chunk_is_pinned_when_it_is_first_read(tmp_path: Path, unlisted: Cloud) -> None:
    url = unlisted.put_folder(written(tmp_path, 1.0), "z")
    tensor = opened(url, unlisted)["a"]
    assert tensor[20 * LENGTH].item() == 7.0
    added(unlisted, tmp_path)
    for key in (20 * LENGTH, ...):
        with contextlib.suppress(ChangedFileError):
            assert tensor[key].flatten()[20 * LENGTH if key is ... else 0].item() == 7.0


# -- other formats


def test_a_rank_file_that_is_replaced_while_the_checkpoint_is_opened(
    tmp_path: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the read. What other ranks hold can be read; the rest is no missing file."""
    with zipfile.ZipFile(Path(lazyckpt.__file__).parent / "demo/zero3.zip") as archive:
        archive.extractall(tmp_path)
    path = next(path for path in sorted(tmp_path.rglob("*optim_states.pt")) if "rank_1" in path.name)
    root = next(path for path in tmp_path.iterdir() if path.is_dir())
    url = s3.put_folder(root, "run")
    key = f"run/{path.relative_to(root).as_posix()}"
    real = ObjectStore._open
    done: list[str] = []

    def late(store: ObjectStore, name: str, start: int, stop: int) -> Any:
        if name.endswith(path.name) and not done:
            done.append(name)
            s3.put(key, path.read_bytes() + b" ")
        return real(store, name, start, stop)

    monkeypatch.setattr(ObjectStore, "_open", late)
    view = opened(url, s3)
    assert done and any("is not the file that was opened" in problem for problem in view.problems)
    refused = read = 0
    for one in (view, pickle.loads(pickle.dumps(view))):
        for tensor in one.states["exp_avg"].values():
            for number in range(tensor.shape[0]):
                try:
                    tensor[number]
                except ChangedFileError as e:
                    refused += 1
                    assert "open it again" in str(e)
                else:
                    read += 1
    assert refused and read
    assert opened(url, s3).problems is not None
