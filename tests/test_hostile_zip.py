"""Zips that lie, tensors that do not fit their storages, and files that are something else."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError

from .handmade import (
    call,
    dict_of,
    legacy,
    list_of,
    named,
    number,
    program,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
    write_pickle,
    zip_of,
)
from .hostility import Entry, attempt, raw_zip, tree
from .writers import torch_files

PICKLE = program(dict_of(text("w"), tensor()))
DATA = struct.pack("<4f", 1, 2, 3, 4)
OTHER = struct.pack("<4f", 5, 6, 7, 8)


def members(**changes: Entry) -> list[Entry]:
    """A good file; ``changes``: other entries for `pkl`, `order`, `data` or `version`."""
    good = {
        "pkl": Entry(b"archive/data.pkl", PICKLE),
        "order": Entry(b"archive/byteorder", b"little"),
        "data": Entry(b"archive/data/0", DATA),
        "version": Entry(b"archive/version", b"3\n"),
    }
    return list((good | changes).values())


def data(**lies: Any) -> list[Entry]:
    return members(data=Entry(b"archive/data/0", DATA, **lies))


def pkl(**lies: Any) -> list[Entry]:
    return members(pkl=Entry(b"archive/data.pkl", PICKLE, **lies))


def test_the_good_zip_reads(tmp_path: Path) -> None:
    """And torch reads it too: the lies below are told by what is changed in it."""
    path = tmp_path / "good.pt"
    path.write_bytes(raw_zip(members()))
    assert torch.equal(lazyckpt.open(path)["w"][...], torch.tensor([1.0, 2, 3, 4]))
    assert torch.equal(torch.load(path)["w"], torch.tensor([1.0, 2, 3, 4]))


REFUSED: dict[str, list[Entry]] = {
    "deflated by name": data(method=8),
    "deflated pickle by name": pkl(method=8),
    "an unknown method": data(method=99),
    "encrypted": data(flags=1),
    "encrypted pickle": pkl(flags=1),
    "a size beyond the file": data(size=1000, stored=1000),
    "a size of 4 GiB": data(size=1 << 32, stored=1 << 32),
    "a size of 2**63": data(size=1 << 63, stored=1 << 63),
    "a size of 2**64 - 1": data(size=(1 << 64) - 1, stored=(1 << 64) - 1),
    "a pickle beyond the file": pkl(size=1 << 40, stored=1 << 40),
    "a smaller size than the tensor needs": data(size=8, stored=8),
    "a size of nothing": data(size=0, stored=0),
    "an offset beyond the file": data(offset=10_000),
    "an offset of 2**40": data(offset=1 << 40),
    "an offset of 2**63": data(offset=1 << 63),
    "an offset into the middle": data(offset=17),
    "a pickle that is elsewhere": pkl(offset=17),
    "a pickle whose checksum is wrong": pkl(crc=12345),
    "no storage": [e for e in members() if e.name != b"archive/data/0"],
    "no pickle": [e for e in members() if e.name != b"archive/data.pkl"],
    "a storage of another name": members(data=Entry(b"archive/data/1", DATA)),
    "a storage under another prefix": members(data=Entry(b"other/data/0", DATA)),
    "a pickle under another prefix": members(order=Entry(b"archive/byteorder", b"little"),
                                             pkl=Entry(b"other/data.pkl", PICKLE)),
    "a byte order that is none": members(order=Entry(b"archive/byteorder", b"middle")),
    "an empty byte order": members(order=Entry(b"archive/byteorder", b"")),
    "an empty pickle": members(pkl=Entry(b"archive/data.pkl", b"")),
    "a pickle of junk": members(pkl=Entry(b"archive/data.pkl", bytes(range(1, 200)))),
    "names with backslashes": members(data=Entry(b"archive\\data\\0", DATA)),
    "names that climb": members(data=Entry(b"archive/../data/0", DATA)),
    "nothing": [],
    "a folder": [Entry(b"archive/", b"")],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_false_claims_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "liar.pt"
    path.write_bytes(raw_zip(REFUSED[name]))
    assert attempt(path) is None


def test_rewritten_by_another_tool(tmp_path: Path) -> None:
    """Compressed records would be read as garbage: they are refused, with what to do."""
    torch.save(tree(), tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as source:
        records = {i.filename: source.read(i) for i in source.infolist()}
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        (tmp_path / "model.pt").write_bytes(zip_of(records, compression=method))
        with pytest.raises(FormatError, match=r"model\.pt.*compressed.*torch\.save\(torch\.load"):
            lazyckpt.open(tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes(zip_of(records))
    found = attempt(tmp_path / "model.pt")
    assert found
    assert torch.equal(found["a.weight"], tree()["model"]["a.weight"])


def agrees_with_torch(path: Path) -> None:
    """Refused, or read as torch reads it: a file must not mean two things."""
    found = attempt(path)
    try:
        expected = torch.load(path, weights_only=True)
    except Exception:
        return
    if found is not None:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), "torch reads something else"


AMBIGUOUS: dict[str, list[Entry]] = {
    "a storage twice": [*members(), Entry(b"archive/data/0", OTHER)],
    "a storage twice, the directory in the other order": [
        Entry(b"archive/data.pkl", PICKLE), Entry(b"archive/byteorder", b"little"), Entry(b"archive/data/0", DATA),
        Entry(b"archive/data/0", b"", offset=0, local=False, size=16, stored=16),
    ],
    "a storage twice, of two sizes": [*members(), Entry(b"archive/data/0", OTHER * 2)],
    "a pickle twice": [*members(), Entry(b"archive/data.pkl", program(dict_of(text("v"), tensor())))],
    "a pickle without a prefix, too": [*members(), Entry(b"data.pkl", program(dict_of(text("v"), tensor())))],
    "a pickle with two prefixes": [*members(), Entry(b"other/data.pkl", program(dict_of(text("v"), tensor())))],
    "two whole archives": [*members(), *(Entry(b"other/" + e.name[8:], e.data) for e in members())],
    "no prefix": [Entry(e.name[8:], e.data) for e in members()],
    "an absolute prefix": [Entry(b"/" + e.name, e.data) for e in members()],
    "a prefix of two folders": [Entry(b"a/" + e.name, e.data) for e in members()],
    "an odd prefix": [Entry(b"\xff\xfe" + e.name, e.data) for e in members()],
    "another name in the header": data(local_name=b"archive/data/9"),
    "a longer name in the header": data(local_name=b"archive/data/0000000000"),
    "two storages in the same place": [
        Entry(b"archive/data.pkl", program(dict_of(text("w"), tensor(), text("v"), tensor(storage(text("1")))))),
        Entry(b"archive/data/0", DATA), Entry(b"archive/data/1", b"", offset=30 + 16 + len(PICKLE) + 117, local=False,
                                              size=16, stored=16),
    ],
    "a wrong checksum of the data": data(crc=1),
    "a larger stored size": data(stored=20),
    "a bad alignment": [*members(), Entry(b"archive/.storage_alignment", b"9" * 5000)],
    "an alignment of nothing": [*members(), Entry(b"archive/.storage_alignment", b"")],
    "an alignment of zero": [*members(), Entry(b"archive/.storage_alignment", b"0")],
    "a negative alignment": [*members(), Entry(b"archive/.storage_alignment", b"-64")],
    "an alignment in other digits": [*members(), Entry(b"archive/.storage_alignment", "٣".encode())],
    "a record within the pickle": data(extra=b"xx\x04\x00abcd"),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_zips(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(raw_zip(AMBIGUOUS[name]))
    agrees_with_torch(path)


_SUMS = zlib.crc32(DATA), len(DATA), len(DATA)
DESCRIPTORS = {
    12: struct.pack("<3I", *_SUMS),
    16: b"PK\7\x08" + struct.pack("<3I", *_SUMS),
    20: struct.pack("<I2Q", *_SUMS),
    24: b"PK\7\x08" + struct.pack("<I2Q", *_SUMS),
}


@pytest.mark.parametrize("flags", [0x0008, 0x0808])
@pytest.mark.parametrize("descriptor", DESCRIPTORS)
@pytest.mark.parametrize("extra", [0, 9, 20, 40])
def test_where_data_begins_is_not_guessed(flags: int, descriptor: int, extra: int, tmp_path: Path) -> None:
    """Streaming zip writers leave sizes to descriptors of 12 to 24 bytes, and align nothing: read at any place."""
    path = tmp_path / "model.pt"
    found = 0
    for pad in range(64):
        entry = Entry(b"archive/data/0", DATA, flags=flags, descriptor=DESCRIPTORS[descriptor])
        entry.extra = struct.pack("<2H", 0x5455, extra - 4) + bytes(extra - 4) if extra else b""
        path.write_bytes(raw_zip([*members(data=entry), Entry(b"archive/z", b"")], start=b""))
        path.write_bytes(raw_zip([Entry(b"archive/" + b"p" * (pad + 1), b""), *members(data=entry)]))
        tensors = attempt(path)
        if tensors is not None:
            found += 1
            assert torch.equal(tensors["w"], torch.tensor([1.0, 2, 3, 4])), "read beside the tensor"
    assert found == 64


@pytest.mark.parametrize("junk", [1, 63, 64, 1000])
def test_junk_around_a_zip(junk: int, tmp_path: Path) -> None:
    """Before it, it is no torch file any more; behind it, it is as torch sees it."""
    good = torch_zip(PICKLE, {"0": DATA})
    path = tmp_path / "model.pt"
    path.write_bytes(bytes(junk) + good)
    assert attempt(path) is None
    path.write_bytes(good + bytes(junk))
    agrees_with_torch(path)
    path.write_bytes(good[:4] + bytes(junk) + good[4:])
    agrees_with_torch(path)
    path.write_bytes(raw_zip(members(), comment=b"c" * junk))
    agrees_with_torch(path)


def of(**arguments: bytes) -> bytes:
    return dict_of(text("w"), tensor(**arguments))


def sizes(*numbers: int) -> bytes:
    return tuple_of(*map(number, numbers))


V3 = named("torch._utils", "_rebuild_tensor_v3")
UNTYPED = storage(kind="UntypedStorage", numel=16)
BAD_TENSORS: dict[str, bytes] = {
    "beyond the storage": of(size=sizes(5)),
    "an offset beyond the storage": of(offset=number(1)),
    "an offset far beyond": of(offset=number(1 << 60)),
    "a stride beyond the storage": of(size=sizes(2, 2), stride=sizes(3, 1)),
    "a huge stride": of(size=sizes(2), stride=sizes(1 << 61)),
    "a product that overflows": of(size=sizes(1 << 32, 1 << 32), stride=sizes(0, 0)),
    "a negative size": of(size=sizes(-1)),
    "a negative stride": of(stride=sizes(-1)),
    "a negative offset": of(offset=number(-1)),
    "a float as size": of(size=tuple_of(b"G" + struct.pack(">d", 4.0))),
    "a bool as size": of(size=tuple_of(b"\x88")),
    "text as sizes": of(size=text("4")),
    "None as sizes": of(size=b"N"),
    "more sizes than strides": of(size=sizes(2, 2)),
    "65 dimensions": of(size=sizes(*[1] * 65), stride=sizes(*[1] * 65)),
    "a storage of more elements than there are": of(storage=storage(numel=5)),
    "a storage of 2**62 elements": of(storage=storage(numel=1 << 62)),
    "a storage of fewer elements than it uses": of(storage=storage(numel=-4)),
    "a storage that is none": of(storage=text("storage")),
    "a storage that is a tensor": of(storage=tensor()),
    "a storage of a path": of(storage=storage(text("../data.pkl"))),
    "a storage of no name": of(storage=storage(text(""))),
    "a dtype that is none": dict_of(text("w"), call(V3, UNTYPED, number(0), sizes(4), sizes(1), b"\x89", b"N", b"N")),
    "a dtype that does not fit": dict_of(
        text("w"), call(V3, UNTYPED, number(0), sizes(4), sizes(1), b"\x89", b"N", named("torch", "complex128"))
    ),
    "a lone storage beyond its record": dict_of(text("w"), storage(numel=400)),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    """Zip and legacy; never memory, never bytes of something else."""
    body = BAD_TENSORS[name]
    assert attempt(write_pickle(tmp_path / "bad.pt", program(body))) is None
    (tmp_path / "legacy.pt").write_bytes(legacy(program(body), program(list_of(text("0")))))
    assert attempt(tmp_path / "legacy.pt") is None


GOOD_TENSORS: dict[str, tuple[bytes, list[Any]]] = {
    "expanded": (of(size=sizes(3, 4), stride=sizes(0, 1)), [[1.0, 2, 3, 4]] * 3),
    "overlapping": (of(size=sizes(3, 2), stride=sizes(1, 1)), [[1.0, 2], [2, 3], [3, 4]]),
    "empty, far away": (of(size=sizes(0), offset=number(1 << 40)), []),
    "empty, with strides": (of(size=sizes(0, 3), stride=sizes(3, 1)), []),
    "one element, any stride": (of(size=sizes(1), stride=sizes(1 << 40)), [1.0]),
}


@pytest.mark.parametrize("name", GOOD_TENSORS)
def test_odd_tensors_that_do_fit(name: str, tmp_path: Path) -> None:
    body, expected = GOOD_TENSORS[name]
    (tmp_path / "odd.pt").write_bytes(torch_zip(program(body), {"0": DATA}))
    (tmp_path / "legacy.pt").write_bytes(legacy(program(body), program(list_of(text("0")))))
    for path in (tmp_path / "odd.pt", tmp_path / "legacy.pt"):
        assert lazyckpt.open(path)["w"][...].tolist() == expected


# -- legacy files


BAD_LEGACY: dict[str, tuple[bytes, bytes]] = {
    "keys that are no list": (program(text("0")), struct.pack("<q", 4) + DATA),
    "keys of lists": (program(list_of(list_of(text("0")))), struct.pack("<q", 4) + DATA),
    "keys of numbers": (program(list_of(number(0))), struct.pack("<q", 4) + DATA),
    "no keys": (program(list_of()), struct.pack("<q", 4) + DATA),
    "other keys": (program(list_of(text("1"))), struct.pack("<q", 4) + DATA),
    "more keys": (program(list_of(text("0"), text("1"))), struct.pack("<q", 4) + DATA),
    "a negative count": (program(list_of(text("0"))), struct.pack("<q", -4) + DATA),
    "a huge count": (program(list_of(text("0"))), struct.pack("<q", 1 << 62) + DATA),
    "a smaller count": (program(list_of(text("0"))), struct.pack("<q", 2) + DATA),
    "no count": (program(list_of(text("0"))), b""),
    "no data": (program(list_of(text("0"))), struct.pack("<q", 4)),
}


@pytest.mark.parametrize("name", BAD_LEGACY)
def test_bad_legacy_files_are_refused(name: str, tmp_path: Path) -> None:
    keys, storages = BAD_LEGACY[name]
    (tmp_path / "model.pt").write_bytes(legacy(PICKLE, keys, storages))
    assert attempt(tmp_path / "model.pt") is None


def test_a_legacy_storage_listed_twice(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(legacy(PICKLE, program(list_of(text("0"), text("0"))), (struct.pack("<q", 4) + DATA) * 2))
    agrees_with_torch(path)


# -- files that are something else


def tar_file(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("sys_info")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "docx": (
        lambda p: p.write_bytes(zip_of({"[Content_Types].xml": b"<x/>", "word/document.xml": b"<x/>"})),
        "no data",
    ),
    "jar, deflated": (lambda p: p.write_bytes(zip_of({"META-INF/M": b"x"}, compression=8)), "no data.pkl"),
    "plain pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1}, 4)), "plain pickle"),
    "plain pickle, protocol 2": (lambda p: p.write_bytes(pickle.dumps([1], 2)), "plain pickle"),
    "tar": (tar_file, "tar"),
    "gzip": (lambda p: p.write_bytes(b"\x1f\x8b\x08\x00" + bytes(600)), "not a file of torch.save"),
    "text": (lambda p: p.write_text("weights\n"), "weights"),
    "a shell script": (lambda p: p.write_text("#!/bin/sh\necho\n"), "#!/bin"),
}


@pytest.mark.parametrize("suffix", [".pt", ".bin"])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_refused_by_what_they_are(name: str, suffix: str, tmp_path: Path) -> None:
    write, word = FOREIGN[name]
    path = tmp_path / f"model{suffix}"
    write(path)
    with pytest.raises(FormatError, match=word) as caught:
        lazyckpt.open(path)
    assert str(path) in str(caught.value)


def test_related_formats_are_refused_with_advice(tmp_path: Path) -> None:
    path, _ = torch_files.write_package(tmp_path)
    renamed = path.rename(tmp_path / "model.pt")
    with pytest.raises(FormatError, match=r"torch\.package.*Load it where you trust it") as caught:
        lazyckpt.open(renamed)
    assert str(renamed) in str(caught.value)
    with pytest.raises((FormatError, CorruptError), match=r"model\.pt"):
        lazyckpt.open(renamed, format="torch")
