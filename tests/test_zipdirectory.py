"""Directories of zips that are alike: taken apart once, and never taken for each other."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest
import torch

from lazyckpt.io.containers import zip_directory as zipdirectory
from lazyckpt.io.containers.torch_file import Pickles, read_torch_file
from lazyckpt.io.storage.local import LocalStore


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose directories were taken apart by zipfile."""
    found: list[str] = []
    real = zipdirectory._read

    def read(file: zipdirectory.StoreFile) -> object:
        found.append(file.path)
        return real(file)

    monkeypatch.setattr(zipdirectory, "_read", read)
    return found


def save(path: Path, seed: int, note: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{n}": torch.randn(30 + n, generator=generator) for n in range(80)}
    torch.save({"note": note, "model": tensors, "empty": torch.empty(0)}, path)


def plain(path: Path) -> dict[str, tuple[int, int, int]]:
    """Name -> offset of the data, bytes, CRC-32, by zipfile and the records' own headers."""
    data = path.read_bytes()
    found = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30])
            at = info.header_offset + 30 + name + extra
            found[info.filename.partition("/")[2]] = at, info.file_size, info.CRC
    return found


def check(path: Path, pickles: Pickles) -> None:
    file = read_torch_file(LocalStore(path.parent), path.name, pickles)
    wanted = {name[5:]: record for name, record in plain(path).items() if name.startswith("data/")}
    assert set(file.records) == set(wanted) and len(file.records) == len(wanted)
    for name, (offset, nbytes, crc) in wanted.items():
        record = file.records[name]
        assert record.nbytes == nbytes and record.crc == crc
        assert record.offset == offset or not nbytes
        assert file.records.get(name) == record
    assert file.records.get("no such") is None and "no such" not in file.records
    for name, tensor in file.root["model"].items():
        extent = file.extent(tensor, name)
        whole = torch.load(path)["model"][name]
        assert path.read_bytes()[extent.offset : extent.offset + whole.nbytes] == whole.numpy().tobytes()


@pytest.mark.slow
def test_identical_directories_are_parsed_once(tmp_path: Path, parsed: list[str]) -> None:
    """Also where the pickles differ in length, which moves the header behind them."""
    pickles = Pickles()
    for n, note in enumerate(["a", "b", "cc", "ddd"]):
        folder = tmp_path / str(n)
        folder.mkdir()
        save(folder / "same.pt", n, note)
        check(folder / "same.pt", pickles)
    sizes = {(tmp_path / str(n) / "same.pt").stat().st_size for n in range(4)}
    assert len(parsed) == len(sizes) < 4


def test_different_directories_of_the_same_length_are_not_confused(tmp_path: Path, parsed: list[str]) -> None:
    """Tensors of other sizes that add up to the same length; a header that is not the one that the directory has in
    mind; a pickle that claims to be longer."""
    pickles = Pickles()
    a, b = torch.arange(64.0), torch.arange(160.0)
    torch.save({"model": {"a": a, "b": b}}, tmp_path / "first.pt")
    (tmp_path / "x").mkdir()
    torch.save({"model": {"a": b, "b": a}}, tmp_path / "x" / "first.pt")
    assert (tmp_path / "first.pt").stat().st_size == (tmp_path / "x" / "first.pt").stat().st_size
    check(tmp_path / "first.pt", pickles)
    check(tmp_path / "x" / "first.pt", pickles)
    assert len(parsed) == 2


@pytest.mark.parametrize("what", ["length", "one length", "header", "magic"])
def test_damage_is_not_hidden_by_a_similar_file(tmp_path: Path, what: str) -> None:
    """A damaged file gives the same, whether a sound one was read before or not."""
    save(tmp_path / "sound.pt", 0, "a")
    data = bytearray((tmp_path / "sound.pt").read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data.pkl"))
    with zipfile.ZipFile(tmp_path / "sound.pt") as archive:
        second = sorted(archive.infolist(), key=lambda i: i.header_offset)[1].header_offset
    if what == "length":
        data[entry + 20 : entry + 28] = struct.pack("<II", 1 << 20, 1 << 20)
    elif what == "one length":
        data[entry + 24 : entry + 28] = struct.pack("<I", 7)
    elif what == "header":
        data[second + 28 : second + 30] = struct.pack("<H", 999)
    else:
        data[second : second + 4] = b"nope"
    (tmp_path / "damaged.pt").write_bytes(data)
    store = LocalStore(tmp_path)

    def outcome(pickles: Pickles) -> str:
        try:
            file = read_torch_file(store, "damaged.pt", pickles)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return str({name: file.records[name] for name in file.records})

    warm = Pickles()
    read_torch_file(store, "sound.pt", warm)
    assert outcome(warm) == outcome(Pickles())
