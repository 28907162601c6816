"""Real files, damaged everywhere: each is refused with an error that names it, or opens as a view that reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, LazyckptError

from . import processes
from .handmade import dict_of, nested, program, tensor, text, write_pickle
from .hostility import KINDS, attempt, deadline, parts, write_real
from .lanes import rounds, sampled


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def real(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real(tmp_path_factory.mktemp("real"), kind)


@pytest.fixture
def victim(real: Path, tmp_path: Path) -> Path:
    """Where damaged copies are written: a file of the same name."""
    return tmp_path / real.name


def test_the_real_file_reads(real: Path) -> None:
    found = attempt(real)
    assert found
    assert len(found) >= 7


@pytest.mark.slow
def test_every_truncation_is_refused(kind: str, real: Path, victim: Path) -> None:
    """From zero bytes to all but the last, byte by byte but for padding and data; what is left of a file must not pass
    for the whole."""
    data = real.read_bytes()
    points = set(range(0, len(data), 11)) | set(range(600)) | set(range(len(data) - 400, len(data)))
    points |= {at + d for at in parts(data) for d in (-1, 0, 1, 4, 29, 30)} if kind.startswith("zip") else set()
    for n in sorted(points & set(range(len(data)))):
        victim.write_bytes(data[:n])
        assert attempt(victim) is None, f"{n} of {len(data)} bytes"


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".safetensors", ".dat", ""])
def test_short_files_of_any_name(real: Path, tmp_path: Path, suffix: str) -> None:
    data = real.read_bytes()
    for n in (*range(70), 100, 300, 511, 512, 513, 600):
        (tmp_path / f"short{suffix}").write_bytes(data[:n])
        assert attempt(tmp_path / f"short{suffix}") is None


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    for name in ("model.pt", "model.safetensors", "model", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(LazyckptError, match=rf"{name}.*(empty|0 bytes)") as caught:
            lazyckpt.open(tmp_path / name)
        assert isinstance(caught.value, ValueError)


def flip_bits(rng: random.Random, data: bytearray, low: int, high: int) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(low, high)] ^= 1 << rng.randrange(8)


def set_bytes(rng: random.Random, data: bytearray, low: int, high: int) -> None:
    for _ in range(rng.choice([1, 1, 2, 4])):
        data[rng.randrange(low, high)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])


def set_words(rng: random.Random, data: bytearray, low: int, high: int) -> None:
    """Whole numbers, as sizes and offsets are."""
    width = rng.choice([2, 4, 8])
    at = rng.randrange(low, max(low + 1, high - width))
    value = rng.choice([0, 1, len(data), len(data) - at, (1 << 8 * width) - 1, 1 << 8 * width - 1, rng.getrandbits(16)])
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def remove(rng: random.Random, data: bytearray, low: int, high: int) -> None:
    at = rng.randrange(low, high)
    del data[at : at + rng.choice([1, 1, 4, 16, 64])]


def insert(rng: random.Random, data: bytearray, low: int, high: int) -> None:
    at, other = rng.randrange(low, high), rng.randrange(len(data))
    data[at:at] = data[other : other + rng.choice([1, 1, 4, 16, 64])]


def overwrite(rng: random.Random, data: bytearray, low: int, high: int) -> None:
    """With another piece of the same file."""
    n = rng.choice([4, 8, 30, 64])
    at, other = rng.randrange(low, high), rng.randrange(max(1, len(data) - n))
    data[at : at + n] = data[other : other + n]


CHANGES: list[Callable[[random.Random, bytearray, int, int], None]] = [
    flip_bits, flip_bits, set_bytes, set_words, remove, insert, overwrite,
]  # fmt: skip


def regions(kind: str, data: bytes) -> Iterator[tuple[str, int, int]]:
    """The places where damage does different things."""
    yield "anywhere", 0, len(data)
    if kind.startswith("zip"):
        start = data.index(b"\x80\x02")
        yield "data.pkl", start, data.index(b"PK\x07\x08")
        yield "directory", data.index(b"PK\x01\x02"), len(data)
        yield "ends", data.index(b"PK\x06\x06"), len(data)
        at = data.index(b"PK\x03\x04", start)
        yield "a local header", at, at + 60
    elif kind == "legacy":
        yield "pickles", 0, data.index(b"\x00" * 8)
    else:
        yield "header", 0, 8 + int.from_bytes(data[:8], "little")
        yield "length", 0, 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(2), [0]))
def test_mutations(kind: str, real: Path, victim: Path, seed: int) -> None:
    """Thousands of random changes."""
    rng = random.Random(f"{kind} {seed}")
    data = real.read_bytes()
    for region, low, high in regions(kind, data):
        outcomes = {True: 0, False: 0}
        for _ in range(rounds(300)):
            changed = bytearray(data)
            rng.choice(CHANGES)(rng, changed, low, high)
            victim.write_bytes(changed)
            with deadline():
                outcomes[attempt(victim) is None] += 1
        assert outcomes[True], f"nothing in {region} was noticed"


@pytest.mark.slow
def test_mutations_of_the_middle_records(kind: str, real: Path, victim: Path) -> None:
    """Truncated in the middle: cut out whole records, or all from one record's mark to another's."""
    data = real.read_bytes()
    marks = parts(data) if kind.startswith("zip") else list(range(0, len(data), 37))
    rng = random.Random(5)
    for _ in range(rounds(400)):
        a, b = sorted(rng.sample(marks, 2))
        victim.write_bytes(data[:a] + data[b:])
        attempt(victim)
        victim.write_bytes(data[:a] + bytes(b - a) + data[b:])
        attempt(victim)


def test_a_checksum_guards_the_pickle(tmp_path: Path) -> None:
    """Every single flipped bit of data.pkl is noticed where the file has checksums."""
    path = write_real(tmp_path, "zip")
    data = path.read_bytes()
    low, high = data.index(b"\x80\x02"), data.index(b"PK\x07\x08")
    for at in range(low, high, 7):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(CorruptError, match=r"model\.pt.*damaged"):
            lazyckpt.open(path, cache=False)


def test_zeros_in_the_middle_of_a_download(kind: str, real: Path, victim: Path) -> None:
    """What a broken download leaves: the right size, zeros from some byte on."""
    data = real.read_bytes()
    for n in range(0, len(data), 97):
        victim.write_bytes(data[:n] + bytes(len(data) - n))
        attempt(victim)


def test_a_page_instead_of_a_file(tmp_path: Path) -> None:
    """What a failed download leaves: an error page, or git-lfs's pointer."""
    pages = [
        b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 437\n",
        b'{"error":"Repository not found"}',
        b"Entry not found",
    ]
    for page in pages:
        for name in ("model.safetensors", "pytorch_model.bin", "model.pt", "model"):
            (tmp_path / name).write_bytes(page)
            with pytest.raises((CorruptError, FormatError), match=name):
                lazyckpt.open(tmp_path / name)


def test_unknown_files_are_refused_with_the_supported_formats(tmp_path: Path) -> None:
    for content in (
        b"some text\n",
        b"TFL3\x03\x00\x00\x00",
        bytes(512),
    ):
        (tmp_path / "file").write_bytes(content * 3)
        with pytest.raises(FormatError, match=r"file .*lazyckpt formats"):
            lazyckpt.open(tmp_path / "file")


SHAPES = {
    "list": nested(90, "list"),
    "tuple": nested(90, "tuple"),
    "dict": nested(90, "dict value"),
    "record": nested(90, "record"),
    "state": nested(90, "state"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_nesting_and_a_deep_stack_of_the_caller(shape: str, tmp_path: Path) -> None:
    """What is not too deep to be refused is not too deep to be read, wherever it is called from."""
    path = write_pickle(tmp_path / "deep.pt", program(dict_of(text("w"), tensor(), text("x"), SHAPES[shape])))

    def call_from(depth: int) -> Any:
        if depth:
            return call_from(depth - 1)
        return attempt(path)

    for depth in (0, 100, 300, 500):
        found = call_from(depth)
        if depth == 0:
            assert found is not None
            assert torch.equal(found["w"], torch.frombuffer(bytearray(range(16)), dtype=torch.float32))


@pytest.mark.slow
def test_a_file_that_shrinks_after_it_was_opened(kind: str, real: Path, tmp_path: Path) -> None:
    """An error, not a crash: pages of a mapping that are gone would kill the process."""
    script = f"""
import sys, lazyckpt
path = sys.argv[1]
view = lazyckpt.open(path)
for t in view.values(): t[...]
open(path, "r+b").truncate(64)
for t in view.values():
    if t.numel():
        try: t[...]
        except lazyckpt.ChangedFileError as e: assert {real.name!r} in str(e)
        else: sys.exit("it read a file that is not the same any more")
"""
    path = tmp_path / real.name
    path.write_bytes(real.read_bytes())
    done = processes.run("-c", script, path)
    assert done.returncode == 0, done.stderr
