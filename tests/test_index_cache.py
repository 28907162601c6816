"""The index cache: the same views in less time, as long as the checkpoint is the same."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import platformdirs
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli.program import app
from lazyckpt.core.index import Index
from lazyckpt.errors import ChangedFileError, LazyckptError
from lazyckpt.formats import opening, registry
from lazyckpt.formats.cache import folder, state
from lazyckpt.formats.cache.opening import kept
from lazyckpt.formats.reader import Reader, Source
from lazyckpt.io.directories import Directory

from . import recordings
from .conftest import Checkpoints
from .index_caches import cache, entries, forget, loads, opened_twice, rank_file, run, zero
from .lanes import LANE
from .same_views import check_same
from .writers import Case

__all__ = ["cache", "loads", "zero"]


def opened_below(root: Path) -> Iterator[tuple[Path, lazyckpt.CheckpointView]]:
    """Open the first folder of each case that is a checkpoint: its own, or one in it; of a folder of files, a file.

    The lane "all" has all cases of a group, the others about a dozen.
    """
    cases = sorted(filter(Path.is_dir, root.iterdir()))
    step = 1 if os.environ.get(LANE) == "all" else -(-len(cases) // 12)
    for case in cases[:: step or 1]:
        inside = sorted(filter(Path.is_dir, case.iterdir()))
        files = [path for folder in inside for path in sorted(filter(Path.is_file, folder.iterdir()))]
        for path in (case, *inside, *files):
            forget()
            with suppress(LazyckptError):
                yield path, lazyckpt.open(path)
                break


# what is not kept, and why; all other recorded checkpoints are
UNKEPT = ("decided on use", "looked at on use", "a class", "several folders")


@pytest.mark.parametrize("group", recordings.GROUPS)
def test_views_from_the_cache_are_the_same(
    group: str, checkpoints: Checkpoints, cache: Path, loads: list[bool]
) -> None:
    found = 0
    reasons = []
    for path, first in opened_below(checkpoints(group)):
        found += 1
        forget()
        loads.clear()
        second = lazyckpt.open(path)
        if not loads or not loads[-1]:  # files are not looked up at all
            why = [row["state"] for row in kept() if row["where"] == first.root] if cache.exists() else []
            # a file in a folder of files, or arrays of Zarr, whose chunks are listed each time
            assert why or path.is_file() or len(first.files) == 1 or first.format == "levanter", path
            reasons += why
            continue
        check_same(first, second)
        if found <= 2:
            digests = [view.digest(progress=False).to_json() for view in (first, second)]
            assert digests[0] == digests[1]
    assert found
    assert all(any(reason in line for reason in UNKEPT) for line in reasons), reasons
    assert len(reasons) <= found // 10 + 2


# -- when it is used


def test_another_process_reads_only_the_ends_of_files(zero: Path, cache: Path) -> None:
    code = f"""
import lazyckpt
from lazyckpt.formats.cache import state
from lazyckpt.io.storage.local import LocalStore
state.MANY = state.TICK = 0
fetch, read = LocalStore._fetch, []
LocalStore._fetch = lambda self, path, offset, target: read.append(len(target)) or fetch(self, path, offset, target)
view = lazyckpt.open({str(zero)!r})
print(len(view), sum(read), max(read))
"""
    first, second = ([int(n) for n in run(code).split()] for _ in range(2))
    assert first[0] == second[0] > 0
    files = len(lazyckpt.open(zero, cache=False).files) + 1  # and `latest`
    assert second[1] <= files * 2 * state._END
    assert second[2] <= 2 * state._END


def test_the_index_is_read_once_for_a_process(zero: Path, cache: Path, loads: list[bool]) -> None:
    opened_twice(zero)
    lazyckpt.open(zero)
    assert loads == [False, True]


@pytest.mark.usefixtures("cache")
def test_without_cache_nothing_is_written(zero: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    lazyckpt.open(zero, cache=False)
    monkeypatch.setenv("LAZYCKPT_CACHE", "0")
    lazyckpt.open(zero)
    assert not cache.parent.exists()


def test_without_cache_nothing_is_used(
    zero: Path, cache: Path, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_twice(zero)
    loads.clear()
    lazyckpt.open(zero, cache=False)
    forget()
    monkeypatch.setenv("LAZYCKPT_CACHE", "off")
    lazyckpt.open(zero)
    assert loads == []


def test_small_checkpoints_do_not_touch_it(zero: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYCKPT_CACHE", "1")
    monkeypatch.setattr(opening, "_indexes", {})

    def touched(*_: object) -> object:
        raise AssertionError

    for name in ("opened", "location", "limit"):
        monkeypatch.setattr(folder, name, touched)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    for path in (zero, zero, tmp_path / "x.pt"):
        lazyckpt.open(path)
        forget()


def test_options_have_entries_of_their_own(zero: Path, cache: Path, loads: list[bool]) -> None:
    tag = (zero / "latest").read_text().strip()
    for options in (
        {},
        {"tag": tag},
        {"format": "deepspeed"},
        {"rules": {"*": "row"}},
        {"rules": {"*": ("row", 1)[:1]}},
    ):
        loads.clear()
        try:
            first, second = opened_twice(zero, **options)
        except LazyckptError:
            assert "rules" in options
            continue
        assert loads == [False, True], options
        check_same(first, second)
    assert len(entries(cache)) >= 4


def test_rules_that_are_not_plain_are_not_kept(zero: Path, cache: Path, loads: list[bool]) -> None:
    class Text(str):
        __slots__ = ()

    opened_twice(zero, rules={"*": Text("row")})
    assert loads == []
    assert entries(cache) == []


def test_a_checkpoint_of_a_run_has_its_own_entry(zero: Path, cache: Path, loads: list[bool]) -> None:
    (zero / "latest").unlink()
    first, second = opened_twice(zero)
    check_same(first, second)
    assert loads[-1]


# -- when it is not: the checkpoint is another one


def _same_size(path: Path) -> None:
    """Other contents, the same size, the same modification time."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _exchanged(path: Path) -> None:
    """A new file under the old name."""
    status = path.stat()
    other = path.with_name("other")
    shutil.copy(path, other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "other contents of the same size and time": lambda ckpt: _same_size(rank_file(ckpt)),
    "a new file under the same name": lambda ckpt: _exchanged(rank_file(ckpt)),
    "a modification time": lambda ckpt: os.utime(rank_file(ckpt)),
    "a file more": lambda ckpt: (rank_file(ckpt).parent / "new.txt").touch(),
    "a file less": lambda ckpt: rank_file(ckpt).unlink(),
    "a folder more": lambda ckpt: (ckpt / "global_step99").mkdir(),
    "another name": lambda ckpt: rank_file(ckpt).rename(rank_file(ckpt).with_name("renamed.pt")),
    "another latest": lambda ckpt: (ckpt / "latest").write_text((ckpt / "latest").read_text()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_noticed(change: Callable[[Path], object], zero: Path, cache: Path, loads: list[bool]) -> None:
    opened_twice(zero)
    assert loads.pop()
    change(zero)
    forget()
    try:
        view = lazyckpt.open(zero)
    except LazyckptError as e:
        with pytest.raises(type(e)):
            lazyckpt.open(zero, cache=False)
    else:
        check_same(view, lazyckpt.open(zero, cache=False))
    assert not any(loads)


@pytest.mark.parametrize("at", [0, 3000, -1, -3000])
def test_other_ends_of_files_are_noticed_whatever_their_times(
    at: int, zero: Path, cache: Path, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "mark", lambda listing: repr(sorted(listing)))  # a file system without times
    opened_twice(zero)
    assert loads.pop()
    data = bytearray(rank_file(zero).read_bytes())
    data[at] ^= 0xFF
    rank_file(zero).write_bytes(data)
    forget()
    with suppress(LazyckptError):
        lazyckpt.open(zero)
    assert not any(loads)


def test_files_that_were_just_written_are_not_trusted(zero: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TICK", 3600 * 10**9)
    opened_twice(zero)
    assert entries(cache) == []


def test_a_file_that_changes_while_it_is_indexed_is_not_kept(
    zero: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_of = opening.index_of

    def late(source: Source, format: str | None) -> Index:
        found = index_of(source, format)
        os.utime(rank_file(zero))
        return found

    monkeypatch.setattr(opening, "index_of", late)
    with suppress(LazyckptError):  # the file is another one than its folder listed
        lazyckpt.open(zero)
    assert entries(cache) == []


def test_reads_of_a_changed_file_fail_as_ever(zero: Path, cache: Path, loads: list[bool]) -> None:
    _, view = opened_twice(zero)
    assert loads[-1]
    name = next(iter(view))
    _same_size(rank_file(zero))
    os.utime(rank_file(zero))
    with pytest.raises(ChangedFileError):
        view[name].to()


def test_a_version_that_was_replaced_in_a_running_process_keeps_nothing(
    zero: Path, cache: Path, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_IMPORTED", 0)
    state.program.cache_clear()
    opened_twice(zero)
    state.program.cache_clear()
    assert entries(cache) == []


def test_another_version_of_lazyckpt_makes_its_own_entries(
    zero: Path, cache: Path, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_twice(zero)
    monkeypatch.setattr(state, "program", lambda: "another version")
    loads.clear()
    opened_twice(zero)
    assert loads == [False, True]
    assert len(entries(cache)) == 2


# -- the folder


def test_entries_that_are_not_used_give_way(
    zero: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [tmp_path / f"copy{n}" for n in range(4)]
    for copy in copies:
        shutil.copytree(zero, copy)
    lazyckpt.open(copies[0])
    size = entries(cache)[0].stat().st_size
    monkeypatch.setenv("LAZYCKPT_CACHE_SIZE", str(int(2.5 * size)))
    stale = cache / ".old.1.abc"
    stale.touch()
    os.utime(stale, (0, 0))
    lazyckpt.open(copies[1])
    os.utime(entries(cache)[0], (1, 1))
    os.utime(entries(cache)[1], (2, 2))
    forget()
    lazyckpt.open(copies[0])  # used last
    lazyckpt.open(copies[2])
    assert {row["where"] for row in kept()} == {str(copies[0]), str(copies[2])}
    assert not stale.exists()
    monkeypatch.setenv("LAZYCKPT_CACHE_SIZE", "100B")
    lazyckpt.open(copies[3])
    assert str(copies[3]) not in {row["where"] for row in kept()}
    monkeypatch.setenv("LAZYCKPT_CACHE_SIZE", "plenty")
    forget()
    lazyckpt.open(copies[3])


@pytest.mark.parametrize("fault", ["a file is there", "no space", "no home", "cannot rename", "no permission"])
def test_what_cannot_be_written_is_not_told(
    fault: str, zero: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    match fault:
        case "a file is there":
            cache.parent.write_text("")
        case "no space":
            monkeypatch.setattr(secrets, "token_bytes", fail)
        case "no home":
            monkeypatch.delenv("LAZYCKPT_CACHE_DIR")
            monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache"))
        case "cannot rename":
            monkeypatch.setattr(Directory, "replace", fail)
        case "no permission":
            cache.parent.mkdir()
            cache.parent.chmod(0o500)
    first, second = opened_twice(zero)
    check_same(first, second)
    if cache.exists():
        assert not [path for path in cache.iterdir() if path.name.startswith(".")], "no part of a file is left"


def test_several_processes_at_once(zero: Path, cache: Path) -> None:
    code = f"""
import lazyckpt
from lazyckpt.formats import opening
from lazyckpt.formats.cache import state
state.MANY = state.TICK = 0
for _ in range(10):
    opening._indexes.clear()
    print(len(lazyckpt.open({str(zero)!r})))
"""
    several = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [one.communicate()[0] for one in several]
    assert all(one.returncode == 0 for one in several)
    assert len(set(" ".join(said).split())) == 1
    assert len(entries(cache)) == 1
    assert {path.suffix for path in cache.iterdir()} == {"", ".index"}


# -- URLs


@pytest.mark.parametrize("versions", [True, False])
def test_urls_are_kept_if_there_are_versions(
    versions: bool, zero: Path, cache: Path, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(zero), "/kept", recursive=True)
    listed, told = MemoryFileSystem.ls, MemoryFileSystem.info

    def tagged(entry: dict[str, Any]) -> dict[str, Any]:
        if versions and entry["type"] == "file":
            data = memory.cat_file(entry["name"])
            entry["ETag"] = hashlib.md5(data).hexdigest()
        return entry

    monkeypatch.setattr(MemoryFileSystem, "ls", lambda self, path, **k: list(map(tagged, listed(self, path, **k))))
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path, **k: tagged(told(self, path, **k)))
    try:
        first, second = opened_twice("memory://kept", storage_options={"asynchronous": False})  # type: ignore[arg-type]
        check_same(first, second)
        assert loads[-1] is versions
        if versions:
            name = memory.glob("/kept/*/*optim_states.pt")[0]
            memory.pipe_file(name, memory.cat_file(name) + b"x")
            forget()
            with suppress(LazyckptError):
                lazyckpt.open("memory://kept", storage_options={"asynchronous": False})
            assert not loads[-1]
            forget()
            with suppress(LazyckptError):
                lazyckpt.open("memory://kept")
            assert len(entries(cache)) <= 2
    finally:
        memory.rm("/kept", recursive=True)


# -- plug-ins


def test_indexes_of_other_packages_are_not_kept(
    tmp_path: Path, cache: Path, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(source: Source) -> Index:
        return Index("mine", {"weights": {}}, {"a.mine": source.store.stat("a.mine")})

    reader = Reader("mine", "", lambda source: "a.mine" in source.entries, read)
    monkeypatch.setattr(registry, "_installed", lambda: (reader,))
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "a.mine").touch()
    for options in ({}, {"format": "mine"}):
        opened_twice(tmp_path / "ckpt", **options)
    assert entries(cache) == []
    assert not any(loads)


# -- for users


def test_the_command(zero: Path, cache: Path, tmp_path: Path) -> None:
    runner = CliRunner()

    def said(*arguments: str) -> str:
        done = runner.invoke(app, ["cache", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    assert said("path").strip() == str(cache)
    assert "0 entries" in said("ls")
    assert "removed 0" in said("clear")
    shutil.copytree(zero, tmp_path / "second")
    lazyckpt.open(zero)
    lazyckpt.open(tmp_path / "second")
    os.utime(rank_file(tmp_path / "second"))
    rows = {row["where"]: row for row in json.loads(said("ls", "--json"))}
    assert rows[str(zero)]["state"] == "valid"
    assert rows[str(zero)]["format"] == lazyckpt.open(zero).format
    assert rows[str(zero)]["files"] == len(lazyckpt.open(zero).files)
    assert rows[str(tmp_path / "second")]["state"] == "changed"
    assert "2 entries" in said("ls")
    assert "removed 1 entry" in said("clear", str(zero))
    (cache / "key").write_bytes(bytes(32))
    assert "unusable" in said("ls")
    (cache / "key").unlink()
    assert "unusable" in said("ls")
    assert "removed 1 entry" in said("clear")
    assert entries(cache) == []
    assert runner.invoke(app, ["cache", "ls", str(zero)]).exit_code == 2


def test_what_is_not_kept_is_told(kinds: Mapping[str, Case], cache: Path, loads: list[bool]) -> None:
    path = next(case.path for name, case in kinds.items() if name == "moe_zero0_fp16_ep1")
    opened_twice(path)
    assert not any(loads)
    assert [row["state"] for row in kept()] == ["not kept: some names are decided on use"]
