"""The folder of a destination where others may write: what they put there is refused, and never followed or published.

Staging folders have names that can be guessed (`.NAME.incomplete`). Tests that need a second user run as root.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import DestinationError
from lazyckpt.formats.zarr.documents import JOB
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.publish import discard, staging_path, unfinished
from lazyckpt.recipes import to_hf

from . import gguf_models
from .hostility import deadline
from .writers import bit_equal

WRITERS: dict[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "safetensors": ("x.safetensors", lambda view, dest: view.to_safetensors(dest)),
    "torch": ("x.pt", lambda view, dest: view.to_torch(dest)),
    "shards": ("x", lambda view, dest: view.to_safetensors(dest, max_shard_size="60KB")),
    "dcp": ("x", lambda view, dest: view.to_dcp(dest)),
    "universal": ("x", lambda view, dest: view.to_universal(dest)),
    "gguf": ("x.gguf", lambda view, dest: gguf_models.to_gguf(view, dest, dtype="f32")),
    "zarr": ("x.zarr", lambda view, dest: view.to_zarr(dest, chunk="16KB")),
    "zip": ("x.zip", lambda view, dest: view.to_zarr(dest, chunk="16KB")),
}
every_writer = pytest.mark.parametrize("name", WRITERS)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
SOMEBODY = 12345


@pytest.fixture
def source(tmp_path: Path) -> Path:
    g = torch.Generator().manual_seed(0)
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.pt"
    torch.save({f"layers.{n}.w": torch.randn(40, 64, generator=g) for n in range(12)}, path)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder with files that no export may touch."""
    folder = tmp_path / "victim"
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "deep" / "model.safetensors").write_text("mine, too")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(source: Path, name: str, dest: Path) -> None:
    with pytest.raises(DestinationError):
        WRITERS[name][1](lazyckpt.open(source), dest)
    assert not dest.exists()


def interrupted(source: Path, name: str, dest: Path) -> None:
    """An export that fails when most of it is written, and keeps that."""
    calls = [0]

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DestinationError, match="kept in"):
        if name in ("zarr", "zip"):
            patch.setattr("lazyckpt.jobs.write.check_unchanged", fail)
        else:
            move = stream._move

            def moving(*args: Any) -> Any:
                calls[0] += 1
                return fail() if calls[0] > 9 else move(*args)

            patch.setattr(stream, "_move", moving)
            patch.setattr("lazyckpt.jobs.executor._TOGETHER", 1)
        WRITERS[name][1](lazyckpt.open(source), dest)
    assert unfinished(dest)


def same(source: Path, dest: Path) -> None:
    found = lazyckpt.open(dest)
    truth = torch.load(source)
    if found.format == "gguf":
        gguf_models.compared(found, truth)
        return
    assert set(found) == set(truth)
    assert all(bit_equal(found[key][...], tensor) for key, tensor in truth.items())


# -- what is there already


@every_writer
def test_a_link_in_place_of_the_staging_folder_is_refused(
    source: Path, victim: Path, tmp_path: Path, name: str
) -> None:
    dest = tmp_path / WRITERS[name][0]
    before = contents(victim)
    staging_path(dest).symlink_to(victim)
    refused(source, name, dest)
    with pytest.raises(DestinationError):
        discard(dest)
    assert contents(victim) == before


@as_root
@pytest.mark.parametrize("name", ["shards", "dcp", "universal", "zarr"])
def test_a_destination_that_is_anothers_link_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    """``overwrite=True`` would replace the folder that it leads to, whosever that is."""
    dest, write = WRITERS[name]
    first = tmp_path / "theirs" / dest
    first.parent.mkdir()
    write(lazyckpt.open(source), first)
    before = contents(first)
    link = tmp_path / "link" / dest
    link.parent.mkdir()
    link.symlink_to(first)
    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(DestinationError, match="another user"):
        write(lazyckpt.open(source), link)
    assert contents(first) == before


@every_writer
def test_a_file_in_place_of_the_staging_folder_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    dest = tmp_path / WRITERS[name][0]
    staging_path(dest).write_text("mine")
    refused(source, name, dest)
    assert staging_path(dest).read_text() == "mine"


@every_writer
def test_a_link_in_place_of_the_lock_truncates_nothing(source: Path, victim: Path, tmp_path: Path, name: str) -> None:
    dest = tmp_path / WRITERS[name][0]
    staging_path(dest).mkdir(mode=0o700)
    (staging_path(dest) / ".lazyckpt-job").symlink_to(victim / "notes.txt")
    before = contents(victim)
    refused(source, name, dest)
    assert contents(victim) == before


@every_writer
def test_links_among_unfinished_files_are_not_followed(source: Path, victim: Path, tmp_path: Path, name: str) -> None:
    """Neither when an export goes on, nor when what another has left is removed."""
    dest = tmp_path / WRITERS[name][0]
    before = contents(victim)
    interrupted(source, name, dest)
    for n, path in enumerate(p for p in sorted(staging_path(dest).rglob("*")) if p.is_file()):
        if "lazyckpt" not in path.name:
            path.unlink()
            path.symlink_to(victim / "notes.txt" if n % 2 else victim / "deep" / "model.safetensors")
    WRITERS[name][1](lazyckpt.open(source), dest)
    assert contents(victim) == before
    same(source, dest)
    other = staging_path(tmp_path / f"other{dest.suffix}")
    other.mkdir(mode=0o700)
    (other / "folder").symlink_to(victim)
    (other / "file").symlink_to(victim / "notes.txt")
    WRITERS[name][1](lazyckpt.open(source), tmp_path / f"other{dest.suffix}")
    assert contents(victim) == before


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
@every_writer
def test_a_folder_that_others_can_write_to_is_refused(source: Path, tmp_path: Path, name: str, mode: int) -> None:
    dest = tmp_path / WRITERS[name][0]
    interrupted(source, name, dest)
    staging_path(dest).chmod(mode)
    refused(source, name, dest)
    staging_path(dest).chmod(0o700)
    WRITERS[name][1](lazyckpt.open(source), dest)
    same(source, dest)


@as_root
@every_writer
def test_a_folder_of_somebody_else_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    dest = tmp_path / WRITERS[name][0]
    interrupted(source, name, dest)
    os.chown(staging_path(dest), SOMEBODY, SOMEBODY)
    before = contents(staging_path(dest))
    refused(source, name, dest)
    with pytest.raises(DestinationError):
        discard(dest)
    assert contents(staging_path(dest)) == before


@as_root
def test_replaced_folder_of_another_user_is_not_restored(source: Path, victim: Path, tmp_path: Path) -> None:
    dest = tmp_path / "x"
    old = tmp_path / ".x.replaced"
    old.symlink_to(victim)
    before = contents(victim)
    refused(source, "dcp", dest)
    old.unlink()
    old.mkdir()
    (old / "poison").write_text("theirs")
    os.chown(old, SOMEBODY, SOMEBODY)
    refused(source, "dcp", dest)
    assert contents(victim) == before and (old / "poison").exists()


# -- what is written meanwhile


@every_writer
def test_nobody_else_can_enter_while_it_is_written(source: Path, tmp_path: Path, name: str) -> None:
    dest = tmp_path / WRITERS[name][0]
    umask = os.umask(0)
    try:
        interrupted(source, name, dest)
        assert stat.S_IMODE(staging_path(dest).stat().st_mode) == 0o700
        WRITERS[name][1](lazyckpt.open(source), dest)
        usual = tmp_path / "usual"
        usual.mkdir()
        if dest.is_dir():
            assert dest.stat().st_mode == usual.stat().st_mode, "what appears has the mode that folders get"
    finally:
        os.umask(umask)


@every_writer
def test_replacing_a_folder_meanwhile_has_no_effect(
    source: Path, victim: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / WRITERS[name][0]
    before = contents(victim)
    staging, away = staging_path(dest), tmp_path / "away"

    def exchange() -> None:
        if staging.is_dir() and not staging.is_symlink():
            os.rename(staging, away)
            for folder in away.iterdir():
                if folder.is_dir():  # as it was, over the victim's files
                    (victim / folder.name).mkdir(exist_ok=True)
            before.update(contents(victim))
            staging.symlink_to(victim)

    if name in ("zarr", "zip"):
        from lazyckpt.export import chunks

        write = chunks.write
        monkeypatch.setattr(chunks, "write", lambda *args: (exchange(), write(*args)))
    else:
        move = stream._move
        monkeypatch.setattr(stream, "_move", lambda *args: (exchange(), move(*args))[1])
    with pytest.raises(DestinationError):
        WRITERS[name][1](lazyckpt.open(source), dest)
    assert contents(victim) == before and not dest.exists()


# -- what is gone on with


@every_writer
def test_damaged_finished_work_is_found_and_written_again(source: Path, tmp_path: Path, name: str) -> None:
    """Without ``verify``: also in the header and between tensors, and where the size stays."""
    dest = tmp_path / WRITERS[name][0]
    whole = tmp_path / f"whole{dest.suffix}"
    WRITERS[name][1](lazyckpt.open(source), whole)
    interrupted(source, name, dest)
    spoilt = 0
    for path in sorted(staging_path(dest).rglob("*")):
        if path.is_file() and "lazyckpt" not in path.name and (size := path.stat().st_size):
            with path.open("r+b") as file:
                file.seek(size // 2)
                byte = file.read(1)
                file.seek(size // 2)
                file.write(bytes([byte[0] ^ 1]))
            spoilt += 1
    assert spoilt
    WRITERS[name][1](lazyckpt.open(source), dest)
    same(source, dest)


@every_writer
def test_foreign_files_in_the_staging_folder_are_not_published(source: Path, tmp_path: Path, name: str) -> None:
    dest = tmp_path / WRITERS[name][0]
    interrupted(source, name, dest)
    folders = [p for p in staging_path(dest).rglob("*") if p.is_dir()] or [staging_path(dest)]
    for folder in folders:
        (folder / "stranger.json").write_text("{}")
    WRITERS[name][1](lazyckpt.open(source), dest)
    same(source, dest)
    assert dest.is_file() or not list(dest.rglob("stranger.json"))
    assert dest.is_dir() or b"stranger.json" not in dest.read_bytes()


def test_damage_before_publishing_is_found(source: Path, tmp_path: Path) -> None:
    """Some files of the folder have their names already, the others are damaged where they wait."""
    dest = tmp_path / "x"
    dest.mkdir()
    (dest / "config.json").write_text("{}")
    real, left = os.replace, [3]

    def replace(*args: Any, **options: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        WRITERS["shards"][1](lazyckpt.open(source), dest)
    waiting = list(staging_path(dest).glob("*/*.safetensors"))
    assert waiting
    for path in waiting:
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\x55" * 8)
    WRITERS["shards"][1](lazyckpt.open(source), dest)
    (dest / "config.json").unlink()
    same(source, dest)


# -- what recipes write beside the weights


def test_recipes_replace_links_and_do_not_follow_them(tmp_path: Path, victim: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    torch.save({"model.layers.0.w": torch.ones(3)}, src / "pytorch_model.bin")
    (src / "config.json").write_text('{"model_type": "llama"}')
    (src / "tokenizer.json").write_text("{}")
    before = contents(victim)
    (dst / "config.json").symlink_to(victim / "notes.txt")
    (dst / "tokenizer.json").symlink_to(victim / "deep" / "model.safetensors")
    to_hf(src, dst, overwrite=True)
    assert contents(victim) == before
    assert (dst / "tokenizer.json").read_text() == "{}" and not (dst / "config.json").is_symlink()


@every_writer
def test_pipe_in_place_of_the_job_file_is_refused_at_once(source: Path, tmp_path: Path, name: str) -> None:
    file, write = WRITERS[name]
    dest = tmp_path / "out" / file
    staging = staging_path(dest)
    staging.mkdir(parents=True, mode=0o700)
    os.mkfifo(staging / JOB)
    with deadline(), pytest.raises(DestinationError):
        write(lazyckpt.open(source), dest)
    assert not dest.exists()


def test_a_staging_folder_of_the_next_process_is_not_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends removes its staging folder. As soon as its lock is gone, the next one may work there."""
    dest = tmp_path / "x.safetensors"
    staging, unlink = staging_path(dest), os.unlink

    def then_the_next_comes(path: Any, *args: Any, **options: Any) -> None:
        unlink(path, *args, **options)
        if path == staging / JOB:
            (staging / JOB).write_text("another job")
            (staging / "work").write_text("of another job")

    monkeypatch.setattr(os, "unlink", then_the_next_comes)
    lazyckpt.open(source).to_safetensors(dest)
    assert dest.exists()
    assert contents(staging) == {JOB: b"another job", "work": b"of another job"}
