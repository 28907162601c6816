"""Tables of archives, and the databases of Orbax, in the index cache: fewer requests for the same views."""

from __future__ import annotations

import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

import lazyckpt
from lazyckpt import LazyckptError
from lazyckpt.formats import archives
from lazyckpt.formats.archives import opened_archive
from lazyckpt.formats.cache import entries as payloads
from lazyckpt.formats.cache import folder, state
from lazyckpt.formats.cache.members import sections_of, tree_of
from lazyckpt.formats.cache.opening import kept
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.storage.members import Tree

from .fuzz.targets.sources import golden
from .index_caches import cache, entries, forget
from .same_views import check_same
from .servers.fixtures import Cloud, s3
from .test_archives import check_equal, link, tar_of, tar_with, zip_of
from .test_cached_buckets import asked

__all__ = ["cache", "s3"]
PACKED = {"tar": tar_of, "zip": zip_of}


def opened(url: Path | str, **options: Any) -> lazyckpt.CheckpointView:
    """Open as another process does, which has no index and no table in memory."""
    forget()
    archives._trees.clear()
    return lazyckpt.open(url, **options)


@pytest.mark.parametrize("kind", PACKED)
def test_an_archive_in_a_bucket_is_read_once(kind: str, s3: Cloud, cache: Path, tmp_path: Path) -> None:
    path = PACKED[kind](golden("huggingface", "llama_sharded"), tmp_path / f"run.{kind}")
    url = s3.put(f"run.{kind}", path.read_bytes())
    first = opened(url, storage_options=s3.options)
    assert asked(s3.server)["get"] > 3
    second = opened(url, storage_options=s3.options)
    assert asked(s3.server) == {"list": 0, "head": 2, "get": 0}
    check_equal(second, first)
    assert {row["where"] for row in kept()} == {url, second.root}
    assert {row["state"] for row in kept()} == {"remote"}
    s3.server.reset()
    opened(url, storage_options=s3.options, cache=False)
    assert asked(s3.server)["get"] > 3


def test_a_replaced_archive_is_read_again(s3: Cloud, cache: Path, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        (tmp_path / "model.safetensors").write_bytes(save({"b" if value == 2 else "a": torch.full((9,), value)}))
        data = tar_of(tmp_path / "model.safetensors", tmp_path / "run.tar", "model.safetensors").read_bytes()
        view = opened(s3.put("run.tar", data), storage_options=s3.options)
        assert float(view["b" if value == 2 else "a"][0]) == value
        os.remove(tmp_path / "run.tar")


def test_an_archive_on_a_disk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = tar_of(golden("huggingface", "llama_sharded"), tmp_path / "run.tar")
    first = opened(tar)
    (entry,) = entries(cache)
    with monkeypatch.context() as patch:
        patch.setattr(archives, "read_tar", lambda file: pytest.fail("it is read again"))
        check_equal(opened(tar), first)
        (row,) = kept()
        assert (row["where"], row["state"]) == (str(tar), "valid")
    status = tar.stat()
    tar.write_bytes(tar.read_bytes())
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same time and size
    assert [row["state"] for row in kept()] == ["changed"]
    used: list[Path] = []
    read = archives.read_tar
    monkeypatch.setattr(archives, "read_tar", lambda file: (used.append(tar), read(file))[1])
    opened(tar)
    assert used == [tar]
    monkeypatch.setattr(state, "TICK", 10**18)
    entry.unlink()
    opened(tar)
    assert entries(cache) == [], "it may still be written to"
    monkeypatch.setattr(state, "TICK", 0)
    monkeypatch.setattr(state, "MANY", 1000)
    opened(tar)
    assert entries(cache) == [], "it is read as fast as an entry"


def test_every_member_and_link_is_kept(tmp_path: Path) -> None:
    path = tar_with(
        tmp_path / "odd.tar",
        (tarfile.TarInfo("b/ü\udcff.pt"), b"1"),
        link("b/link", "ü\udcff.pt"),
        link("b/hard", "b/ü\udcff.pt", tarfile.LNKTYPE),
        link("b/out", "../../etc/passwd"),
        link("folder", "b"),
        (tarfile.TarInfo("a/b/c/d"), b"23"),
        (tarfile.TarInfo("b/ü\udcff.pt"), b"a later one"),
        form=tarfile.PAX_FORMAT,
    )
    archive = opened_archive(LocalStore(str(tmp_path)), path.name)
    assert archive is not None
    tree = archive._tree
    data = payloads.packed({}, sections_of(tree))
    again = tree_of(payloads.described(memoryview(data), "entry", "")[1], tree.where, path.stat().st_size)
    check_trees(again, tree)
    assert [name for name, _ in again.listed("folder")] == [name for name, _ in tree.listed("b")] != []


def check_trees(found: Tree, tree: Tree) -> None:
    assert (found.files, found.links) == (tree.files, tree.links)
    assert {name: list(inside) for name, inside in found.folders.items()} == {
        name: list(inside) for name, inside in tree.folders.items()
    }
    assert all(found.real(name) == tree.real(name) for name in [*tree.links, *tree.files])


BAD: dict[str, tuple[list[int], list[Any]]] = {
    "outside": ([900, 200, -1, 0], ["a", 0]),
    "overflowing": ([1 << 62, 1 << 62, -1, 0], ["a", 0]),
    "negative": ([-1, 1, -1, 0], ["a", 0]),
    "a negative size": ([0, -5, -1, 0], ["a", 0]),
    "unpacked for ever": ([0, 1 << 40, 9, 0], ["a", 0]),
    "above": ([0, 1, -1, 0], ["../a", 0]),
    "elsewhere": ([0, 1, -1, 0], ["/etc/passwd", 0]),
    "no row": ([0, 1, -1, 0], ["a", 7]),
    "no name": ([0, 1, -1, 0], [5, 0]),
    "half a row": ([0, 1, -1], ["a", 0]),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_table_claims_no_more_than_an_archive_can(bad: str) -> None:
    row, name = BAD[bad]
    sections = {
        "columns": memoryview(np.array(row, np.int64).tobytes()),
        "names": memoryview(json.dumps([name]).encode()),
    }
    with pytest.raises(payloads.FAILURES):
        tree_of(sections, "run.tar", 1000)


def test_tables_are_checked_although_they_are_signed(cache: Path, tmp_path: Path) -> None:
    save_file({"a": torch.arange(9.0)}, tmp_path / "model.safetensors")
    tar = tar_of(tmp_path / "model.safetensors", tmp_path / "run.tar", "model.safetensors")
    opened(tar)
    (entry,) = entries(cache)
    good = entry.read_bytes()[folder.HEAD :]
    random_, size = random.Random(7), tar.stat().st_size
    for _ in range(100):
        bad = bytearray(good)
        at = random_.randrange(len(bad))
        bad[at : at + random_.choice((0, 1, 4))] = random_.randbytes(random_.choice((1, 4)))
        with folder.opened() as place:
            place.write(entry.stem, bytes(bad))
        try:
            archives._trees.clear()
            archive = opened_archive(LocalStore(str(tmp_path)), tar.name, kept=True)
        except LazyckptError:
            continue
        assert archive is not None
        members = archive._tree.files.values()
        assert all(0 <= member.offset <= member.offset + member.size <= size for member in members)


def test_a_database_of_orbax_is_read_once(s3: Cloud, cache: Path) -> None:
    path = golden("orbax", "ocdbt")
    for file in filter(Path.is_file, path.rglob("*")):
        s3.put(f"run/{file.relative_to(path).as_posix()}", file.read_bytes())
    first = opened(s3.at("run"), storage_options=s3.options)
    listings = asked(s3.server)
    assert listings["get"] > 3
    second = opened(s3.at("run"), storage_options=s3.options)
    assert asked(s3.server) == {"list": listings["list"], "head": 0, "get": 0}
    check_same(first, second)
    assert torch.equal(second["layers.0.kernel"][3:5], first["layers.0.kernel"][3:5])
