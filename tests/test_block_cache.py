"""The block cache: bytes of remote objects on the disk, shared by processes that may die at any time."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyckpt.errors import CacheWarning, DataError
from lazyckpt.io import system, user_folder
from lazyckpt.io.storage import cache as caches
from lazyckpt.io.storage import segments
from lazyckpt.io.storage.cache import BlockCache, configured, object_key, place_of
from lazyckpt.io.storage.segments import BLOCK, SEGMENT, ObjectKey

from .lanes import rounds

SIZE = 3 * SEGMENT // 2 + 12_345
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")


@pytest.fixture(scope="module")
def truth() -> bytes:
    """The bytes of an object of one and a half segments."""
    return random.Random(5).randbytes(1 << 20) * (SIZE // (1 << 20) + 1)


def key(version: str = "v1", url: str = "s3://bucket/run/model.safetensors", size: int = SIZE) -> ObjectKey:
    found = object_key(url, version, size)
    assert found is not None
    return found


def read(cache: BlockCache, what: ObjectKey, offset: int, length: int) -> tuple[bytes, list[tuple[int, int]]]:
    target = bytearray(length)
    missing = cache.fill(what, offset, memoryview(target))
    return bytes(target), missing


def check(cache: BlockCache, what: ObjectKey, truth: bytes, offset: int, length: int) -> int:
    """Compare all bytes that the cache has with the truth; return how many are missing."""
    data, missing = read(cache, what, offset, length)
    at = offset
    for start, stop in [*missing, (offset + length, offset + length)]:
        assert offset <= at <= start <= stop <= offset + length
        assert data[at - offset : start - offset] == truth[at:start]
        at = stop
    return sum(stop - start for start, stop in missing)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.blocks"))


def other(cache: BlockCache) -> BlockCache:
    """Return a cache of the same folder that knows what a new process knows."""
    return BlockCache(cache.folder, cache.limit)


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "blocks", 1 << 30)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAZYCKPT_CACHE", "LAZYCKPT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def in_buffers(rng: random.Random, data: bytes) -> list[memoryview]:
    """Cut bytes into up to 600 buffers, of which some are empty."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 5, 600])))
    return [memoryview(data)[low:high] for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# -- correctness


@pytest.mark.parametrize("seed", range(4))
def test_random_ranges_are_those_that_were_stored(cache: BlockCache, truth: bytes, seed: int) -> None:
    rng = random.Random(seed)
    stored: list[tuple[int, int]] = []
    for _ in range(60):
        length = min(int(2 ** rng.uniform(0, 23)), SIZE)
        offset = rng.choice([0, SIZE - length, SEGMENT - length // 2, rng.randrange(SIZE - length + 1)])
        offset = min(offset, SIZE - length)
        if rng.random() < 0.5:
            cache.store(key(), offset, *in_buffers(rng, truth[offset : offset + length]))
            stored.append((offset, length))
            assert check(cache, key(), truth, offset, length) == 0
        else:
            check(rng.choice([cache, other(cache)]), key(), truth, offset, length)
    for offset, length in stored:
        assert check(other(cache), key(), truth, offset, length) == 0


@pytest.mark.parametrize("vectors", [0, 2, 256])
def test_buffers_are_written_one_after_the_other(
    cache: BlockCache, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system writes one at a time, or less than it was asked to."""
    rng = random.Random(vectors)
    data = rng.randbytes(5 * BLOCK + 17)
    monkeypatch.setattr(system, "_VECTORS", min(vectors, system._VECTORS))
    real = getattr(os, "pwritev", None)

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert real is not None
        return int(real(fd, [buffers[0][: 1 + len(buffers[0]) // 2]], offset))

    if real is not None:
        monkeypatch.setattr(os, "pwritev", some)
    start = SEGMENT - 2 * BLOCK - 3
    cache.store(key(), start, *in_buffers(random.Random(5), data), b"", data[:9])
    whole = data + data[:9]
    assert read(other(cache), key(), start, len(whole)) == (whole, [])


def test_what_was_read_is_there_exactly(cache: BlockCache, truth: bytes) -> None:
    assert read(cache, key(), 5, 100)[1] == [(5, 105)]
    cache.store(key(), 5, truth[5:105])
    assert read(cache, key(), 5, 100) == (truth[5:105], [])
    assert read(cache, key(), 7, 50) == (truth[7:57], [])
    assert read(cache, key(), 4, 100)[1] == [(4, 104)]
    cache.store(key(), 105, truth[105 : 3 * BLOCK])  # it touches the first range
    assert read(cache, key(), 5, 3 * BLOCK - 5) == (truth[5 : 3 * BLOCK], [])
    assert read(cache, key(), 2 * BLOCK, 2 * BLOCK)[1] == [(3 * BLOCK, 4 * BLOCK)]
    cache.store(key(), 0, truth[:20])
    assert read(other(cache), key(), 0, 3 * BLOCK) == (truth[: 3 * BLOCK], [])


def test_many_ranges_of_a_block(cache: BlockCache, truth: bytes) -> None:
    rng = random.Random(7)
    ranges = [(offset, rng.randrange(1, 30)) for offset in rng.sample(range(2 * BLOCK), 300)]
    for n, (offset, length) in enumerate(ranges):
        cache.store(key(), offset, truth[offset : offset + length])
        for start, size in ranges[max(0, n - 3) : n + 1]:
            assert read(rng.choice([cache, other(cache)]), key(), start, size) == (truth[start : start + size], [])
    covered = {at for offset, length in ranges for at in range(offset, offset + length)}
    for at in range(0, 2 * BLOCK, 7):
        assert (check(cache, key(), truth, at, 1) == 0) == (at in covered)
    cache.store(key(), 0, truth[: 2 * BLOCK])
    assert read(other(cache), key(), 0, 2 * BLOCK) == (truth[: 2 * BLOCK], [])


def test_ranges_over_segments_and_past_the_end(cache: BlockCache, truth: bytes) -> None:
    cache.store(key(), SEGMENT - 100, truth[SEGMENT - 100 : SIZE] + b"more than the object has")
    assert read(cache, key(), SEGMENT - 100, SIZE - SEGMENT + 100) == (truth[SEGMENT - 100 : SIZE], [])
    assert read(cache, key(), SIZE - 10, 30)[1] == [(SIZE - 10, SIZE + 20)]
    assert len(files(cache.folder)) == 2


def test_other_versions_urls_sizes_and_endpoints_are_other_objects(cache: BlockCache, truth: bytes) -> None:
    cache.store(key(), 0, truth[:1000])
    for one in (
        key("v2"),
        key(url="s3://bucket/run/other.safetensors"),
        key(size=SIZE + 1),
        key()._replace(place=place_of({"endpoint": "http://localhost:9000"})),
    ):
        assert read(cache, one, 0, 1000)[1] == [(0, 1000)]
    cache.store(key("v2"), 0, bytes(1000))
    assert read(cache, key(), 0, 1000) == (truth[:1000], [])
    assert read(cache, key("v2"), 0, 1000) == (bytes(1000), [])


def test_objects_without_a_version_have_no_key() -> None:
    assert object_key("http://host/a", "", 10) is None
    assert object_key("http://host/a", "v", 0) is None


def test_keys_have_no_credentials() -> None:
    signed = "https://me:pass@host/a.pt?X-Amz-Signature=12ab&X-Amz-Credential=AKIA&part=2&sig=xyz&se=2030&token=t"
    found = object_key(signed, "v", 10)
    assert found == ObjectKey("https://host/a.pt?part=2", "v", 10)
    again = signed.replace("12ab", "34cd").replace("xyz", "abc")
    assert object_key(again, "v", 10) == found
    assert object_key(signed.replace("part=2", "part=3"), "v", 10) != found


def test_files_have_no_credentials_and_are_the_users_own(cache: BlockCache) -> None:
    place = place_of({"endpoint": "http://me:pass@host", "secret_access_key": "hush", "client_kwargs": {"port": 9000}})
    assert "hush" not in place and "9000" in place
    url = "https://me:pass@host/a.pt?access=hush"
    found = object_key(url, "v", 10, place)
    assert found is not None
    cache.store(found, 0, b"0123456789")
    (file,) = files(cache.folder)
    data = file.read_bytes()
    assert b"hush" not in data and b"pass" not in data and b"0123456789" in data
    if os.name != "nt":
        assert file.stat().st_mode & 0o777 == 0o600
        assert cache.folder.stat().st_mode & 0o777 == 0o700


# -- damage


def spoil(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


@pytest.mark.parametrize("fresh", [True, False], ids=["new process", "same process"])
def test_a_damaged_block_is_missing_and_can_be_stored_again(cache: BlockCache, truth: bytes, fresh: bool) -> None:
    length = 10 * BLOCK
    cache.store(key(), 0, truth[:length])
    assert read(cache, key(), 0, length) == (truth[:length], [])
    (file,) = files(cache.folder)
    spoil(file, segments._DATA + 3 * BLOCK + 77, bytes([truth[3 * BLOCK + 77] ^ 1]))
    reader = other(cache) if fresh else cache
    assert read(reader, key(), 3 * BLOCK + 10, 20)[1] == [(3 * BLOCK + 10, 3 * BLOCK + 30)]
    assert check(reader, key(), truth, 0, length) == BLOCK
    reader.store(key(), 3 * BLOCK, truth[3 * BLOCK : 4 * BLOCK])
    assert read(other(cache), key(), 0, length) == (truth[:length], [])
    assert read(cache, key(), 0, length) == (truth[:length], [])


def test_random_damage_is_never_returned(cache: BlockCache, truth: bytes) -> None:
    rng = random.Random(3)
    for _ in range(40):
        lo = rng.randrange(0, 40 * BLOCK)
        cache.store(key(), lo, truth[lo : lo + rng.choice([100, 5000, 6 * BLOCK])])
        (file,) = files(cache.folder)
        match rng.randrange(5):
            case 0:
                spoil(file, rng.randrange(file.stat().st_size), rng.randbytes(rng.randrange(1, 100)))
            case 1:
                os.truncate(file, rng.randrange(file.stat().st_size))
            case 2:  # the table
                spoil(file, segments._HEAD + 8 * rng.randrange(46), rng.randbytes(8))
            case 3:  # the maps
                spoil(file, segments._MAPS + rng.randrange(46 * segments._MAP), rng.randbytes(8))
            case 4:
                spoil(file, 0, rng.randbytes(rng.randrange(1, segments._HEAD)))
        check(rng.choice([cache, other(cache)]), key(), truth, 0, 46 * BLOCK)
    cache.store(key(), 0, truth[: 46 * BLOCK])
    assert check(other(cache), key(), truth, 0, 46 * BLOCK) == 0


def test_a_file_of_another_object_is_not_used(cache: BlockCache, truth: bytes) -> None:
    cache.store(key(), 0, truth[:1000])
    (one,) = files(cache.folder)
    cache.store(key("v2"), 0, bytes(1000))
    (two,) = (file for file in files(cache.folder) if file != one)
    two.write_bytes(one.read_bytes())
    assert read(other(cache), key("v2"), 0, 1000)[1] == [(0, 1000)]
    cache.store(key("v2"), 0, bytes(1000))
    assert read(other(cache), key("v2"), 0, 1000) == (bytes(1000), [])


def test_a_removed_file_or_folder_is_missing(cache: BlockCache, truth: bytes) -> None:
    cache.store(key(), 0, truth[:1000])
    assert check(cache, key(), truth, 0, 1000) == 0
    files(cache.folder)[0].unlink()
    assert check(cache, key(), truth, 0, 1000) == 1000
    cache.store(key(), 0, truth[:1000])
    assert check(cache, key(), truth, 0, 1000) == 0
    files(cache.folder)[0].unlink()
    cache.folder.rmdir()
    assert check(cache, key(), truth, 0, 1000) == 1000
    cache.store(key(), 0, truth[:1000])
    assert check(cache, key(), truth, 0, 1000) == 0


# -- room


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlockCache:
    """A cache with room for some ten objects of a MiB, which looks after each write."""
    monkeypatch.setattr(caches, "_STEPS", 1 << 40)
    return BlockCache(tmp_path / "blocks", 10 << 20)


def nbytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in files(folder))


@posix
def test_the_least_recently_used_files_give_way(small: BlockCache, truth: bytes) -> None:
    objects = [key(url=f"s3://bucket/{n}", size=1 << 20) for n in range(30)]
    for n, one in enumerate(objects):
        small.store(one, 0, truth[: 1 << 20])
        for file in files(small.folder):  # a second passes
            s = file.stat()
            os.utime(file, (s.st_atime, s.st_mtime - 1))
        if n:
            assert check(other(small), objects[0], truth, 0, 1 << 20) == 0  # used again and again
        assert nbytes(small.folder) <= 10 << 20
    there = [check(other(small), one, truth, 0, 1 << 20) == 0 for one in objects]
    assert there == [True, *[False] * (29 - sum(there[1:])), *[True] * sum(there[1:])]
    assert 7 <= sum(there) <= 10


@posix
def test_an_object_larger_than_the_limit(small: BlockCache, truth: bytes) -> None:
    for start in range(0, SIZE, 1 << 20):
        small.store(key(), start, truth[start : min(SIZE, start + (1 << 20))])
        check(small, key(), truth, start, min(1 << 20, SIZE - start))
        assert nbytes(small.folder) <= 11 << 20


def test_the_default_limit_leaves_half_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 6 << 30

    monkeypatch.setattr(caches.shutil, "disk_usage", lambda path: Usage)
    cache = BlockCache(tmp_path / "blocks")
    cache.store(key(), 0, b"x")
    assert 3 << 30 <= cache.most() < (3 << 30) + (1 << 20)
    Usage.free = 1 << 50
    assert cache.most() == 20 << 30


def test_trim_and_clear(cache: BlockCache, truth: bytes) -> None:
    for n in range(4):
        cache.store(key(url=f"s3://bucket/{n % 2}/{n}", size=1 << 20), 0, truth[: 1 << 20])
    kept = cache.kept()
    assert sorted(one.url for one in kept) == [f"s3://bucket/{n % 2}/{n}" for n in (0, 2, 1, 3)]
    assert all(one.version == "v1" and one.files == 1 and one.nbytes >= 1 << 20 for one in kept)
    assert cache.clear("s3://bucket/1/3") == 1
    assert cache.clear("s3://bucket/0/") == 2
    assert cache.trim(1 << 30) == 0
    assert cache.trim(10) == 1
    assert cache.clear() == 0


# -- folders that cannot be used


def warned(cache: BlockCache, truth: bytes) -> list[str]:
    """Store and read twice; return the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            cache.store(key(), 0, truth[:1000])
            assert check(cache, key(), truth, 0, 1000) == 1000
    assert all(one.category is CacheWarning for one in found)
    return [str(one.message) for one in found]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_is_one_warning(
    cache: BlockCache, truth: bytes, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object, offset: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segments, "write_at", full)
    (message,) = warned(cache, truth)
    assert os.strerror(code) in message and str(cache.folder) in message


def test_threads_that_fail_together_warn_once(cache: BlockCache, truth: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8, timeout=60)

    def full(*_: object) -> None:
        together.wait()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(caches, "write", full)
    keys = [key(url=f"s3://bucket/{n}") for n in range(400)]
    locks = {hash((one, 0)) % caches._WRITING: one for one in keys}  # a lock for each thread
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda one: cache.store(one, 0, truth[:1000]), list(locks.values())[:8]))
    assert [one.category for one in found] == [CacheWarning]


def test_what_is_there_is_read_after_the_disk_is_full(
    cache: BlockCache, truth: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(key(), 0, truth[:1000])

    def full(fd: int, data: object, offset: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(segments, "write_at", full)
    with pytest.warns(CacheWarning):
        cache.store(key(), BLOCK, truth[BLOCK : 2 * BLOCK])
    assert read(cache, key(), 0, 1000) == (truth[:1000], [])


@posix
@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_a_read_only_folder_is_one_warning(tmp_path: Path, truth: bytes) -> None:
    tmp_path.chmod(0o500)
    assert len(warned(BlockCache(tmp_path / "blocks", 1 << 30), truth)) == 1
    tmp_path.chmod(0o700)


def test_a_file_in_place_of_the_folder_is_one_warning(tmp_path: Path, truth: bytes) -> None:
    (tmp_path / "blocks").write_bytes(b"")
    assert len(warned(BlockCache(tmp_path / "blocks", 1 << 30), truth)) == 1


@posix
def test_folders_of_others_are_refused(cache: BlockCache, truth: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(key(), 0, truth[:1000])
    cache.folder.chmod(0o777)
    (message,) = warned(other(cache), truth)
    assert "open to others" in message
    cache.folder.chmod(0o700)
    assert check(other(cache), key(), truth, 0, 1000) == 0
    monkeypatch.setattr(user_folder, "user_id", lambda: 12345)
    (message,) = warned(other(cache), truth)
    assert "another user" in message


@posix
def test_a_link_in_place_of_the_folder_or_a_file_is_not_followed(tmp_path: Path, truth: bytes) -> None:
    cache = BlockCache(tmp_path / "blocks", 1 << 30)
    cache.store(key(), 0, truth[:1000])
    (file,) = files(cache.folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert check(other(cache), key(), truth, 0, 1000) == 1000
    cache.folder.rename(tmp_path / "moved")
    cache.folder.symlink_to(tmp_path / "moved")
    assert len(warned(other(cache), truth)) == 1


@posix
def test_a_file_that_others_may_write_is_replaced(cache: BlockCache, truth: bytes) -> None:
    cache.store(key(), 0, truth[:1000])
    (file,) = files(cache.folder)
    file.chmod(0o666)
    assert check(other(cache), key(), truth, 0, 1000) == 1000
    cache.store(key(), 2000, truth[2000:3000])
    assert check(other(cache), key(), truth, 0, 1000) == 1000
    assert check(other(cache), key(), truth, 2000, 1000) == 0


# -- processes and threads


def _work(folder: Path, truth: bytes, seed: int, turns: int = sys.maxsize) -> None:
    """Store and read random ranges; exit with an error if bytes are wrong."""
    rng = random.Random(seed)
    cache = BlockCache(folder, 6 << 20)
    for _ in range(turns):
        offset = rng.randrange(SIZE - 1)
        if rng.random() < 0.7:
            offset %= 64 * BLOCK
        length = min(int(2 ** rng.uniform(0, 21)), SIZE - offset)
        if rng.random() < 0.6:
            cache.store(key(), offset, *in_buffers(rng, truth[offset : offset + length]))
        check(cache, key(), truth, offset, length)
        if rng.random() < 0.02:
            cache = BlockCache(folder, 6 << 20)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_processes_that_are_killed_leave_no_wrong_byte(
    tmp_path: Path, truth: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_STEPS", 1 << 40)  # they remove each other's files, too
    fork = multiprocessing.get_context("fork")
    folder = tmp_path / "blocks"
    rng = random.Random(1)
    running = []
    for round_ in range(12):
        while len(running) < 4:
            seed = round_ * 10 + len(running)
            running.append(fork.Process(target=_work, args=(folder, truth, seed)))
            running[-1].start()
        time.sleep(rng.uniform(0.05, 0.2))
        victim = running.pop(rng.randrange(4))
        assert victim.exitcode is None  # it has found no wrong byte
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
    for process in running:
        assert process.exitcode is None
        process.kill()
        process.join()
    cache = BlockCache(folder, 1 << 30)
    for offset in range(0, SIZE, 1 << 20):
        check(cache, key(), truth, offset, min(1 << 20, SIZE - offset))
    _work(folder, truth, 99, 300)


def test_threads(cache: BlockCache, truth: bytes) -> None:
    """What a thread stores is there, whatever other threads store and read meanwhile."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                offset = rng.randrange(20 * BLOCK)
                length = int(2 ** rng.uniform(0, 16))
                stored = rng.random() < 0.5
                if stored:
                    cache.store(key(), offset, truth[offset : offset + length])
                missing = check(cache, key(), truth, offset, length)
                assert not (stored and missing)
        except BaseException as e:
            errors.append(e)

    def lost(seed: int) -> int:
        rng, count = random.Random(seed), 0
        for _ in range(150):
            offset = rng.randrange(20 * BLOCK)
            length = int(2 ** rng.uniform(0, 16))
            if rng.random() < 0.5:
                count += check(cache, key(), truth, offset, length)
        return count

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not any(lost(seed) for seed in range(6)), "what one thread stores, no other one removes"


def test_a_read_in_the_middle_of_a_write(cache: BlockCache, truth: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of several pieces has a map, which is written before the checksum of both."""
    cache.store(key(), 0, truth[:100])
    cache.store(key(), 1000, truth[1000:1100])
    missing: list[int] = []
    reader = threading.Thread(target=lambda: missing.append(check(cache, key(), truth, 1000, 100)))
    real = segments.write_at

    def write_at(fd: int, data: bytes, offset: int) -> None:
        real(fd, data, offset)
        if not missing and not reader.ident:
            reader.start()
            reader.join(0.2)  # it ends, or waits for this write

    monkeypatch.setattr(segments, "write_at", write_at)
    cache.store(key(), 3000, truth[3000:3100])
    reader.join()
    assert missing == [0]
    assert check(other(cache), key(), truth, 1000, 100) == 0, "nor has it removed the block"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_reads_and_writes(cache: BlockCache, truth: bytes) -> None:
    cache.store(key(), 0, truth[:1000])
    check(cache, key(), truth, 0, 1000)

    def child() -> None:
        assert check(cache, key(), truth, 0, 1000) == 0
        cache.store(key(), 1000, truth[1000:2000])
        assert check(cache, key(), truth, 0, 2000) == 0

    with cache._lock:  # as if another thread held it
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
    assert process.exitcode == 0
    assert check(cache, key(), truth, 0, 2000) == 0


def test_many_segments_need_few_descriptors(cache: BlockCache, truth: bytes) -> None:
    objects = [key(url=f"s3://bucket/{n}", size=1000) for n in range(300)]
    for one in objects:
        cache.store(one, 0, truth[:1000])
    assert all(check(cache, one, truth, 0, 1000) == 0 for one in objects)
    assert len(cache._open) <= 128


# -- options


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LAZYCKPT_CACHE_DIR", str(tmp_path / "home"))
    yield tmp_path / "home" / "blocks"


def test_the_cache_that_is_asked_for(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def what(chosen: bool | str | Path = True, environment: str = "") -> tuple[Path, int | None] | None:
        monkeypatch.setenv("LAZYCKPT_CACHE", environment)
        found = configured(chosen)
        return None if found is None else (found.folder, found.limit)

    assert what() is what(False) is what(False, "disk") is None
    for word in ("0", "off", "No", "1", "true", "yes"):  # what the variable meant before there was this cache
        assert what(True, word) is None
    assert what("disk") == what("disk", "0") == what(True, "disk") == (home, None)
    assert what("5GiB") == what(True, "disk:5GiB") == what(True, "5 GiB") == (home, 5 << 30)
    path = tmp_path / "a:b"
    assert what(str(path)) == what(path) == what(True, str(path)) == (path / "blocks", None)
    assert what(f"{path}:1.5GiB") == what(True, f"{path}:1.5GiB") == (path / "blocks", 3 << 29)
    assert what("~/x") == (Path.home() / "x" / "blocks", None)
    for wrong in ("disc", "plenty:3GiB"):
        with pytest.raises(DataError, match="disk"):
            what(wrong)
        with pytest.raises(DataError, match="LAZYCKPT_CACHE"):
            what(True, wrong)


def test_a_cache_is_shared_and_a_pickle_finds_it(tmp_path: Path) -> None:
    cache = configured(f"{tmp_path}/c:3GiB")
    assert cache is configured(f"{tmp_path}/c:3GiB")
    assert pickle.loads(pickle.dumps(cache)) is cache


# -- what arrives in chunks


@given(st.integers(0, 3 * BLOCK), st.lists(st.integers(0, 3 * BLOCK), max_size=9), st.integers(1, 4))
@settings(deadline=None, max_examples=rounds(60))
def test_chunks_are_stored_in_runs(start: int, sizes: list[int], blocks: int) -> None:
    """Whatever the chunks, all of their bytes are stored once, in runs that end where blocks end."""
    data, stored = random.Random(0).randbytes(start + sum(sizes)), list[tuple[int, bytes]]()
    kept = SimpleNamespace(store=lambda key, at, *parts: stored.append((at, b"".join(parts))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "_RUN", blocks * BLOCK)
        keeping = caches.Keeping(cast(BlockCache, kept), ObjectKey("s3://b/x", "v", 1 << 40), start)
        at = start
        for size in sizes:
            keeping.add(memoryview(data)[at : at + size])
            at += size
        keeping.finish()
    assert b"".join(part for _, part in stored) == data[start:]
    ends = [at + len(part) for at, part in stored]
    assert [at for at, _ in stored] == [start, *ends[:-1]][: len(stored)]
    assert all(end % (blocks * BLOCK) == 0 for end in ends[:-1])
