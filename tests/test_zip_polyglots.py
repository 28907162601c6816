"""Zips in which two readers would see different things are refused; whatever both accept, torch reads the same of."""

from __future__ import annotations

import io
import mmap
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError
from lazyckpt.io.containers.torch_file import Pickles, read_torch_file
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.testing.counting import opened

from .handmade import dict_of, program, storage, tensor, text
from .hostility import KINDS, Entry, attempt, raw_zip, tree, write_real

PICKLE = program(dict_of(text("w"), tensor()))
DATA = struct.pack("<4f", 1, 2, 3, 4)
OTHER = struct.pack("<4f", -666, 2, 3, 4)
TRUTH = [1.0, 2, 3, 4]


def members(data: bytes = DATA, **lies: object) -> list[Entry]:
    return [
        Entry(b"archive/data.pkl", PICKLE),
        Entry(b"archive/byteorder", b"little"),
        Entry(b"archive/data/0", data, **lies),  # type: ignore[arg-type]
        Entry(b"archive/version", b"3\n"),
    ]


def zip64(body: bytes, locator: int | None = None, count: int | None = None, start: int | None = None) -> bytes:
    """A zip with a zip64 end record between its directory and the end record; what is None is stated truly."""
    at = body.rindex(b"PK\5\6")
    _, _, _, here, _, size, begin, _ = struct.unpack("<4s4H2IH", body[at:])
    count, begin = here if count is None else count, begin if start is None else start
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
    return body[:at] + record + struct.pack("<4sIQI", b"PK\6\7", 0, at if locator is None else locator, 1) + body[at:]


def header_of(data: bytes, name: bytes) -> int:
    """Where the record's own header is."""
    return data.index(name) - 30


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def torch_file(path: Path, **tensors: torch.Tensor) -> bytes:
    torch.save(tensors or {"w": torch.tensor(TRUTH)}, path)
    return path.read_bytes()


def shifted_data() -> bytes:
    """The storage's own header states an extra field that is longer: torch skips it, and reads what stands behind."""
    made = io.BytesIO()
    torch.save({"w": torch.full((16,), -666.0), "v": torch.full((64,), 1.0)}, made)
    data = made.getvalue()
    at = header_of(data, b"archive/data/0")
    extra = struct.unpack("<H", data[at + 28 : at + 30])[0]
    return patched(data, at + 28, struct.pack("<H", extra + 64))


def second_archive() -> bytes:
    """Two whole zips, one behind the other: offsets of the second count from its own start."""
    return raw_zip(members(OTHER)) + raw_zip(members())


def lying_locator() -> bytes:
    """The zip64 locator points to another end record, whose directory is another one."""
    other = zip64(raw_zip(members(OTHER)))
    inner = other[: other.rindex(b"PK\5\6")]
    whole = raw_zip(
        [Entry(b"archive/data.pkl", PICKLE), Entry(b"archive/z", inner), *members()[1:]],
    )
    at = whole.index(b"PK\6\6")
    return zip64(whole, locator=at)


def second_end_in_comment() -> bytes:
    body = raw_zip(members())
    end = body[body.rindex(b"PK\5\6") :]
    return body[:-2] + struct.pack("<H", len(end)) + end


def directory_with_gap() -> bytes:
    """Bytes between the last record and the directory, which is where the end record says."""
    body = raw_zip(members())
    at = body.index(b"PK\1\2")
    end = body.rindex(b"PK\5\6")
    return body[:at] + bytes(64) + body[at:end] + body[end : end + 16] + struct.pack("<IH", at + 64, 0)


def counted(count: int) -> bytes:
    body = raw_zip(members())
    at = body.rindex(b"PK\5\6")
    return patched(body, at + 8, struct.pack("<2H", count, count))


def sized(change: int) -> bytes:
    body = raw_zip(members())
    at = body.rindex(b"PK\5\6")
    return patched(body, at + 12, struct.pack("<I", struct.unpack("<I", body[at + 12 : at + 16])[0] + change))


def in_header(field: int, new: bytes) -> bytes:
    """Another value in the storage's own header."""
    body = raw_zip(members())
    return patched(body, header_of(body, b"archive/data/0") + field, new)


def in_entry(field: int, new: bytes) -> bytes:
    """Another value in the storage's entry of the directory."""
    body = raw_zip(members())
    return patched(body, body.rindex(b"archive/data/0") - 46 + field, new)


def with_extra(extra: bytes) -> bytes:
    """Extra fields in the storage's entry of the directory."""
    body = raw_zip(members())
    at, end = body.rindex(b"archive/data/0"), body.rindex(b"PK\5\6")
    body = patched(body, at - 46 + 30, struct.pack("<H", len(extra)))
    size = struct.unpack("<I", body[end + 12 : end + 16])[0]
    body = patched(body, end + 12, struct.pack("<I", size + len(extra)))
    return body[: at + 14] + extra + body[at + 14 :]


def and_also(name: bytes, data: bytes = OTHER) -> bytes:
    return raw_zip([*members(), Entry(name, data)])


POLYGLOTS: dict[str, Callable[[], bytes]] = {
    "a longer extra field in a record's own header": shifted_data,
    "two archives, one behind the other": second_archive,
    "a zip64 locator that points elsewhere": lying_locator,
    "a zip64 locator that points nowhere": lambda: zip64(raw_zip(members()), locator=17),
    "a zip64 record with another count": lambda: zip64(raw_zip(members()), count=3),
    "a zip64 record with another place": lambda: zip64(raw_zip(members()), start=0),
    "a second end record in the comment": second_end_in_comment,
    "bytes behind the end": lambda: raw_zip(members()) + bytes(100),
    "bytes in front of the first record": lambda: raw_zip(members(), start=b"PK\3\4" + bytes(60)),
    "bytes in front of the directory": directory_with_gap,
    "fewer entries than the directory has": lambda: counted(3),
    "more entries than the directory has": lambda: counted(5),
    "a directory that is longer": lambda: sized(46),
    "a directory that is shorter": lambda: sized(-1),
    "another name in the header": lambda: in_header(30, b"archive/data/1"),
    "another method in the header": lambda: in_header(8, struct.pack("<H", 8)),
    "encrypted by the header": lambda: in_header(6, struct.pack("<H", 1)),
    "a descriptor by the header": lambda: in_header(6, struct.pack("<H", 8)),
    "another checksum in the header": lambda: in_header(14, struct.pack("<I", 1)),
    "another size in the header": lambda: in_header(18, struct.pack("<2I", 8, 8)),
    "no header": lambda: in_header(0, b"PK\3\5"),
    "a folder by its attributes": lambda: in_entry(38, struct.pack("<I", 0x10)),
    "another disk": lambda: in_entry(34, struct.pack("<H", 1)),
    "two sizes": lambda: in_entry(20, struct.pack("<I", 8)),
    "a zip64 field with other sizes": lambda: with_extra(struct.pack("<2H3Q", 1, 24, 8, 8, 0)),
    "two zip64 fields": lambda: with_extra(struct.pack("<2HQ2HQ", 1, 8, 16, 1, 8, 16)),
    "a damaged extra field": lambda: with_extra(struct.pack("<2H", 1, 100)),
    "a record twice": lambda: and_also(b"archive/data/0"),
    "a pickle twice": lambda: and_also(b"archive/data.pkl"),
    "a name in capitals": lambda: and_also(b"archive/DATA/0"),
    "a byte order in capitals": lambda: raw_zip(
        [e if e.name != b"archive/byteorder" else Entry(b"archive/BYTEORDER", b"big") for e in members()]
    ),
    "a folder in capitals": lambda: and_also(b"Archive/data/0"),
    "a name with ./": lambda: and_also(b"archive/./data/0"),
    "a name with //": lambda: and_also(b"archive//data/0"),
    "a name with ..": lambda: and_also(b"archive/x/../data/0"),
    "a name with a backslash": lambda: and_also(b"archive\\data\\0"),
    "a name with NUL": lambda: and_also(b"archive/data/0\0x"),
    "a name in no encoding": lambda: and_also(b"archive/\xff\xfe"),
    "another root": lambda: and_also(b"other/data/0"),
    "a record within another": lambda: raw_zip(
        [
            Entry(b"archive/data.pkl", program(dict_of(text("w"), tensor(), text("v"), tensor(storage(text("1")))))),
            Entry(b"archive/data/0", raw_zip([Entry(b"archive/data/1", DATA)])),
            Entry(b"archive/data/1", b"", offset=30 + 16 + len(PICKLE), local=False, size=16, stored=16),
        ]
    ),
    "a descriptor that contradicts": lambda: raw_zip(
        members(flags=8, descriptor=b"PK\7\x08" + struct.pack("<3I", zlib.crc32(DATA), 8, 8))
    ),
    "a descriptor that is missing": lambda: raw_zip(members(flags=8, descriptor=b"")),
    "a gap behind a record": lambda: raw_zip(members(flags=8, descriptor=bytes(64))),
}


@pytest.mark.parametrize("name", POLYGLOTS)
def test_zips_that_readers_interpret_differently_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(POLYGLOTS[name]())
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path, format="torch", cache=False)


def test_unmodified_zips_are_readable(tmp_path: Path) -> None:
    for n, data in enumerate([raw_zip(members()), zip64(raw_zip(members())), raw_zip(members(), comment=b"a comment")]):
        path = tmp_path / f"{n}.pt"
        path.write_bytes(data)
        assert lazyckpt.open(path)["w"][...].tolist() == TRUTH == torch.load(path)["w"].tolist()


def test_false_claim_about_one_of_many_ranks(tmp_path: Path) -> None:
    """Also where the directory is the same as that of a file that was read before."""
    data = torch_file(tmp_path / "model.pt", a=torch.full((16,), 1.0), b=torch.full((64,), 2.0))
    at = header_of(data, b"model/data/0")
    extra = struct.unpack("<H", data[at + 28 : at + 30])[0]
    (tmp_path / "other.pt").write_bytes(patched(data, at + 28, struct.pack("<H", extra + 64)))
    pickles = Pickles()
    read_torch_file(LocalStore(tmp_path), "model.pt", pickles)
    with pytest.raises(CorruptError):
        read_torch_file(LocalStore(tmp_path), "other.pt", pickles)


# -- genuine files


def same_as_torch(path: Path) -> bool:
    """Whether both accept the file; wherever they do, what they read is equal."""
    found = attempt(path)
    seen = False
    for mapped in (False, True):
        try:
            expected = torch.load(path, weights_only=True, mmap=mapped)
        except Exception:
            continue
        if found is None:
            continue
        seen = True
        named = flat(expected)
        for key, value in found.items():
            assert key in named, f"torch has no {key!r}"
            assert torch.equal(value, named[key]) or value.isnan().any(), "torch reads something else"
    return seen


def flat(value: object, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found: dict[str, torch.Tensor] = {}
    for key, inner in items:
        found |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    # lazyckpt leaves out the names of containers that hold one model
    return found | {k.removeprefix("model."): v for k, v in found.items() if not prefix}


def framing(data: bytes) -> list[int]:
    """The bytes of a torch zip that are not of a tensor: of headers, descriptors, the directory and the end records."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        found = list(range(archive.start_dir, len(data)))
    for info in infos:
        n_name, n_extra = struct.unpack("<2H", data[info.header_offset + 26 : info.header_offset + 30])
        begins = info.header_offset + 30 + n_name + n_extra
        found += range(info.header_offset, info.header_offset + 30 + n_name + 4)
        found += range(begins + info.file_size, min(begins + info.file_size + 16, len(data)))
    return found


# more of them: LAZYCKPT_TEST_MUTATIONS=60
MUTATIONS = int(os.environ.get("LAZYCKPT_TEST_MUTATIONS", "15"))


@pytest.mark.parametrize("seed", range(8))
def test_wherever_both_accept_a_damaged_zip_they_read_the_same(seed: int, tmp_path: Path) -> None:
    """Bytes of the framing are flipped, copied over each other, removed and repeated."""
    rng = random.Random(seed)
    data = write_real(tmp_path, "zip" if seed % 2 else "zip without checksums").read_bytes()
    places = framing(data)
    path = tmp_path / "damaged.pt"
    accepted = 0
    for _ in range(MUTATIONS):
        new = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.choice(places)
            what = rng.randrange(5)
            if what == 0:
                new[at] ^= 1 << rng.randrange(8)
            elif what == 1:
                new[at] = rng.choice((0, 1, 8, 64, 255))
            elif what == 2:
                source, length = rng.choice(places), rng.choice((2, 4, 8, 22, 46))
                new[at : at + length] = new[source : source + length]
            elif what == 3:
                del new[at : at + rng.choice((1, 4, 16))]
            else:
                new[at:at] = new[at : at + rng.choice((1, 16, 64))]
        path.write_bytes(new)
        accepted += same_as_torch(path)
    assert accepted < MUTATIONS


@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith("zip")])
def test_genuine_zips_read_as_torch_reads_them(kind: str, tmp_path: Path) -> None:
    assert same_as_torch(write_real(tmp_path, kind))


def test_a_zip_packed_again_by_python_reads(tmp_path: Path) -> None:
    torch.save(tree(), tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as old, zipfile.ZipFile(tmp_path / "new.pt", "w") as new:
        for info in old.infolist():
            with new.open(info.filename, "w", force_zip64=True) as stream:
                stream.write(old.read(info))
    assert same_as_torch(tmp_path / "new.pt")


class Stream(io.RawIOBase):
    """Cannot seek: zipfile then writes sizes behind the data."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(bytes(data))  # type: ignore[call-overload]


@pytest.mark.parametrize("large", [False, True])
def test_a_zip_that_was_streamed_reads(large: bool, tmp_path: Path) -> None:
    torch.save(tree(), tmp_path / "model.pt")
    stream = Stream()
    with zipfile.ZipFile(tmp_path / "model.pt") as old, zipfile.ZipFile(stream, "w") as new:
        for info in old.infolist():
            with new.open(info.filename, "w", force_zip64=large) as target:
                target.write(old.read(info))
    (tmp_path / "new.pt").write_bytes(stream.data)
    assert same_as_torch(tmp_path / "new.pt")


def test_an_appended_record_reads(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor(TRUTH)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt", "a") as archive:
        archive.writestr("model/extra", b"note")
    assert lazyckpt.open(tmp_path / "model.pt")["w"][...].tolist() == TRUTH


@pytest.mark.slow
def test_more_than_65535_records(tmp_path: Path) -> None:
    torch.save([torch.tensor(n) for n in range(66_000)], tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert len(view) == 66_000 and view["65999"][...].item() == 65_999


def test_a_sparse_file_of_more_than_4_gib(tmp_path: Path) -> None:
    """Sizes and places in zip64 fields, as torch writes them."""
    with torch.serialization.skip_data(), (tmp_path / "model.pt").open("wb") as file:
        torch.save({"big": _unbacked((5 << 30) // 4), "after": _unbacked(4)}, file)
    view = lazyckpt.open(tmp_path / "model.pt")
    assert view["big"].nbytes == 5 << 30 and view["big"][-1].item() == 0.0
    assert view["after"][...].tolist() == [0.0] * 4


def _unbacked(count: int) -> torch.Tensor:
    """A tensor over memory that is never touched."""
    memory = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    return torch.frombuffer(memory, dtype=torch.float32)


# -- other uses of zips


@pytest.mark.parametrize("change", ["twice", "behind", "count"])
def test_zarr_in_a_zip_that_is_ambiguous_is_refused(change: str, tmp_path: Path) -> None:
    group = b'{"zarr_format":3,"node_type":"group"}'
    entries = [Entry(b"zarr.json", group), Entry(b"a/zarr.json", group)]
    data = raw_zip(entries if change != "twice" else [*entries, Entry(b"a/zarr.json", group + b" ")])
    if change == "behind":
        data = raw_zip([Entry(b"other", b"x")]) + data
    elif change == "count":
        data = patched(data, data.rindex(b"PK\5\6") + 8, struct.pack("<2H", 1, 1))
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(CorruptError, match=r"x\.zip"):
        lazyckpt.open(tmp_path / "x.zip", format="zarr")


def test_headers_of_neighbours_are_read_together_over_a_network(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.full((100,), float(n)) for n in range(300)}, tmp_path / "model.pt")
    view, counts = opened(tmp_path / "model.pt", gap=256 << 10)
    assert counts.requests < 12
    counts.clear()
    assert view["w7"][...].tolist() == [7.0] * 100 and counts.bytes == 400
