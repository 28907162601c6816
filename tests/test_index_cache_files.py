"""Files in the folder of the index cache that must not be used."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import lazyckpt
from lazyckpt.core.dtypes import F32
from lazyckpt.core.extents import Extent
from lazyckpt.errors import LazyckptError
from lazyckpt.formats.cache import folder
from lazyckpt.formats.cache.values import Decoder, Encoder, NotKept, inside

from .index_caches import cache, entries, forget, loads, opened_twice, zero

__all__ = ["cache", "loads", "zero"]


# -- when it is not: the file is not one that this user's lazyckpt wrote


def spoiled(cache: Path, zero: Path, loads: list[bool]) -> bool:
    """Return whether the cache is used; the view is right in any case."""
    forget()
    loads.clear()
    view = lazyckpt.open(zero)
    assert list(view) == list(lazyckpt.open(zero, cache=False))
    return loads[0]


def test_no_byte_of_an_entry_can_be_changed(zero: Path, cache: Path, loads: list[bool]) -> None:
    opened_twice(zero)
    (entry,) = entries(cache)
    data = entry.read_bytes()
    for at in (*range(60), *range(60, len(data), len(data) // 50), len(data) - 1):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        entry.write_bytes(bad)
        assert not spoiled(cache, zero, loads), at


@pytest.mark.parametrize("cut", [0, 1, 8, 39, 40, 47, 48, 100, 1000, -1])
def test_truncated_entries_are_not_used(cut: int, zero: Path, cache: Path, loads: list[bool]) -> None:
    opened_twice(zero)
    (entry,) = entries(cache)
    entry.write_bytes(entry.read_bytes()[:cut])
    assert not spoiled(cache, zero, loads)
    assert spoiled(cache, zero, loads), "it was written anew"


def test_entries_of_other_keys_are_not_used(zero: Path, cache: Path, loads: list[bool]) -> None:
    opened_twice(zero)
    key = (cache / "key").read_bytes()
    (cache / "key").write_bytes(bytes(32))
    assert not spoiled(cache, zero, loads)
    (cache / "key").write_bytes(key)
    assert spoiled(cache, zero, loads)


def test_an_entry_is_not_used_for_another_checkpoint(
    zero: Path, cache: Path, loads: list[bool], tmp_path: Path
) -> None:
    shutil.copytree(zero, tmp_path / "second")
    lazyckpt.open(zero)
    (one,) = entries(cache)
    lazyckpt.open(tmp_path / "second")
    (other,) = set(entries(cache)) - {one}
    shutil.copy(one, other)
    assert not spoiled(cache, tmp_path / "second", loads)


def _linked(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


OPEN_TO_OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "others may write to the entry": lambda cache, entry: entry.chmod(0o666),
    "a group may write to the entry": lambda cache, entry: entry.chmod(0o620),
    "the entry is a link": lambda cache, entry: _linked(entry),
    "the entry has a second name": lambda cache, entry: os.link(entry, cache / "second"),
    "others may write to the folder": lambda cache, entry: cache.chmod(0o777),
    "the folder is a link": lambda cache, entry: _linked(cache),
    "others may read the key": lambda cache, entry: (cache / "key").chmod(0o644),
    "the key is a link": lambda cache, entry: _linked(cache / "key"),
    "the key is too short": lambda cache, entry: (cache / "key").write_bytes(b"short"),
    "the entry is a folder": lambda cache, entry: (entry.unlink(), entry.mkdir()),
    "the entry is a pipe": lambda cache, entry: (entry.unlink(), os.mkfifo(entry)),
    "another user owns the entry": lambda cache, entry: os.chown(entry, 4321, -1),
    "another user owns the folder": lambda cache, entry: os.chown(cache, 4321, -1),
    "another user owns the key": lambda cache, entry: os.chown(cache / "key", 4321, -1),
}


@pytest.mark.skipif(os.name == "nt", reason="owners and permissions of POSIX")
@pytest.mark.parametrize("spoil", OPEN_TO_OTHERS.values(), ids=OPEN_TO_OTHERS)
def test_files_that_others_may_have_written_are_not_used(
    spoil: Callable[[Path, Path], object], zero: Path, cache: Path, loads: list[bool]
) -> None:
    opened_twice(zero)
    assert loads[-1]
    (entry,) = entries(cache)
    try:
        spoil(cache, entry)
    except PermissionError:
        pytest.skip("only root can give files away")
    assert not spoiled(cache, zero, loads)


def test_what_the_cache_writes_is_the_users_own(zero: Path, cache: Path) -> None:
    lazyckpt.open(zero)
    for path in (cache, *cache.iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    (entry,) = entries(cache)
    assert str(zero).encode() in entry.read_bytes(), "`cache ls` says what it is of"
    assert {path.name for path in cache.iterdir()} == {"key", entry.name}


# -- contents that pass the authentication nevertheless


def signed(entry: Path, payload: bytes) -> None:
    with folder.opened() as place:
        place.write(entry.stem, payload)


def test_contents_are_checked_although_they_are_signed(zero: Path, cache: Path, loads: list[bool]) -> None:
    """Whoever has the key can write what they like; still nothing but a wrong view comes of it."""
    opened_twice(zero)
    (entry,) = entries(cache)
    good = entry.read_bytes()[folder.HEAD :]
    random_ = random.Random(7)
    used = 0
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(random_.choice((1, 2, 8))):
            at = random_.randrange(len(bad))
            bad[at : at + random_.choice((0, 1, 4))] = random_.randbytes(random_.choice((1, 4)))
        signed(entry, bytes(bad))
        forget()
        loads.clear()
        try:
            view = lazyckpt.open(zero)
            for state_view in view.states.values():
                for name, spec in state_view.specs.items():
                    for fragment in spec.fragments:
                        assert inside(fragment.extent.path), name
        except (LazyckptError, ValueError, TypeError, LookupError, OverflowError, MemoryError, AttributeError):
            pass  # the view is wrong
        used += loads[0]
    assert used < 150


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "a\0b"])
def test_paths_outside_the_folder_are_refused(path: str) -> None:
    extent = Extent(path, 0, F32, (2,), (1,))
    with pytest.raises(NotKept, match="outside"):
        Encoder().value(extent)
    number, *fields = Encoder().value(Extent("good", 0, F32, (2,), (1,)))
    decoder = Decoder(memoryview(b""), [], memoryview(b""))
    with pytest.raises(NotKept, match="outside"):
        decoder.value([number, path, *fields[1:]])
