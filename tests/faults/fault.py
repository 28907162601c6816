"""What a fault is, and the means to make one: editing files, keeping or breaking their checksums."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Make = Callable[[Path], "Path | None"]
FAILS = "opening fails"


@dataclass(frozen=True)
class Fault:
    """A fault in a copy of a checkpoint."""

    what: str
    """The fault, as the page says it."""
    family: str
    """Who wrote the checkpoint."""
    source: str
    """GROUP/CASE/FOLDER of the recordings; "" for an empty folder, which ``make`` fills."""
    make: Make
    """Makes the fault in the folder; returns what is to be verified if that is not the folder itself."""
    found: str
    """The level that finds it: "quick", "default", "full", or `FAILS`."""
    code: str = ""
    """The code of the finding."""
    file: str = ""
    """A regular expression that the file of the finding matches; "" if the finding names none."""
    tensor: str = ""
    """The same for its tensor."""
    text: str = ""
    """A regular expression that is found in the sentence."""

    @property
    def id(self) -> str:
        return f"{self.family}: {self.what}"


_FOUND = {"quick": "`--quick`", "default": "default", "full": "`--full`", FAILS: "opening, exit code 2"}


def page(faults: Iterable[Fault]) -> str:
    """Return the table of docs/reference/faults.md. Families with the same fault and finding share a row."""
    families: dict[tuple[str, str, str], list[str]] = {}
    for each in faults:
        families.setdefault((each.what, each.found, each.code), []).append(each.family)
    rows = ["| fault | in | found by | code |", "|---|---|---|---|"]
    for (what, found, code), of in families.items():
        rows.append(f"| {what} | {', '.join(dict.fromkeys(of))} | {_FOUND[found]} | {f'`{code}`' if code else ''} |")
    return "\n".join(rows) + "\n"


# -- means


def one(folder: Path, pattern: str) -> Path:
    """Return the first file below a folder that matches."""
    return sorted(folder.rglob(pattern))[0]


def remove(pattern: str) -> Make:
    return lambda folder: one(folder, pattern).unlink()


def cut(pattern: str, part: float = 0.5) -> Make:
    def make(folder: Path) -> None:
        path = one(folder, pattern)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])

    return make


def write(name: str, data: bytes | str) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return make


def copy(source: str, dest: str) -> Make:
    """Put the contents of one file in place of another."""

    def make(folder: Path) -> None:
        data = one(folder, source).read_bytes()
        found = sorted(folder.rglob(dest))
        (found[0] if found else one(folder, source).with_name(dest)).write_bytes(data)

    return make


def swap(first: str, second: str) -> Make:
    def make(folder: Path) -> None:
        a, b = one(folder, first), one(folder, second)
        left, right = a.read_bytes(), b.read_bytes()
        a.write_bytes(right)
        b.write_bytes(left)

    return make


def rename(source: str, dest: str) -> Make:
    def make(folder: Path) -> None:
        path = one(folder, source)
        path.rename(path.with_name(dest))

    return make


def both(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for each in makes:
            each(folder)

    return make


def edit(pattern: str, change: Callable[[Any], Any]) -> Make:
    """Change what a file of torch.save holds, and write it anew: its checksums are right."""

    def make(folder: Path) -> None:
        path = one(folder, pattern)
        state = torch.load(path, map_location="cpu", weights_only=False)
        change(state)
        torch.save(state, path)

    return make


def edit_json(pattern: str, change: Callable[[Any], Any]) -> Make:
    def make(folder: Path) -> None:
        path = one(folder, pattern)
        about = json.loads(path.read_text())
        change(about)
        path.write_text(json.dumps(about))

    return make


def flip(pattern: str, place: Callable[[Path], int]) -> Make:
    """Flip one bit of a file, at an offset."""

    def make(folder: Path) -> None:
        path = one(folder, pattern)
        data = bytearray(path.read_bytes())
        data[place(path)] ^= 0x10
        path.write_bytes(data)

    return make


def record(suffix: str) -> Callable[[Path], int]:
    """Return a function that finds the middle of a record of a zip: the largest whose name ends so."""

    def place(path: Path) -> int:
        with zipfile.ZipFile(path) as file:
            info = max((i for i in file.infolist() if i.filename.endswith(suffix)), key=lambda i: i.file_size)
        return _data(path.read_bytes(), info.header_offset) + info.file_size // 2

    return place


def storage(path: Path) -> int:
    """Find the middle of the largest storage of a file of torch.save."""
    with zipfile.ZipFile(path) as file:
        info = max((i for i in file.infolist() if "/data/" in i.filename), key=lambda i: i.file_size)
    return _data(path.read_bytes(), info.header_offset) + info.file_size // 2


def _data(data: bytes, header: int) -> int:
    name, extra = struct.unpack_from("<HH", data, header + 26)
    return header + 30 + int(name) + int(extra)


def sealed(data: bytes) -> bytes:
    """Return a zip with the right CRC-32 in its directory, whatever its records hold now."""
    out = bytearray(data)
    at = data.index(b"PK\x01\x02")
    while data[at : at + 4] == b"PK\x01\x02":
        size, name, extra, comment = struct.unpack_from("<IHHH", data, at + 24)
        header = struct.unpack_from("<I", data, at + 42)[0]
        begin = _data(data, header)
        crc = zlib.crc32(data[begin : begin + size])
        struct.pack_into("<I", out, at + 16, crc)
        if data[header + 14 : header + 18] != bytes(4):
            struct.pack_into("<I", out, header + 14, crc)
        if data[begin + size : begin + size + 4] == b"PK\x07\x08":  # a data descriptor
            struct.pack_into("<I", out, begin + size + 4, crc)
        at += 46 + name + extra + comment
    return bytes(out)


# -- safetensors


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and its data."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def edit_header(pattern: str, change: Callable[[dict[str, Any]], Any]) -> Make:
    """Change the header of a safetensors file; the data stay."""

    def make(folder: Path) -> None:
        path = one(folder, pattern)
        header, data = header_of(path)
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    return make


def edit_tensors(pattern: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Make:
    """Change the tensors of a safetensors file."""

    def make(folder: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        path = one(folder, pattern)
        state = load_file(path)
        with safe_open(path, "pt") as file:
            about = file.metadata()
        change(state)
        save_file({name: t.contiguous().clone() for name, t in state.items()}, path, about)

    return make


# -- DCP


def edit_metadata(change: Callable[[Any], Any]) -> Make:
    """Change the `.metadata` of a distributed checkpoint."""

    def make(folder: Path) -> None:
        path = one(folder, ".metadata")
        about = pickle.loads(path.read_bytes())
        change(about)
        path.write_bytes(pickle.dumps(about, 4))

    return make


def items(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (index, storage info) of all items."""
    yield from pickle.loads(one(folder, ".metadata").read_bytes()).storage_data.items()


def edit_item(key: str, change: Callable[[torch.Tensor], Any], number: int = 0) -> Make:
    """Change the elements of a chunk of a tensor in place; the checksums are right."""

    def make(folder: Path) -> None:
        found = [info for index, info in items(folder) if index.fqn == key]
        info = found[number]
        path = one(folder, info.relative_path)
        data = bytearray(path.read_bytes())
        archive = bytes(data[info.offset : info.offset + info.length])
        with zipfile.ZipFile(_memory(archive)) as file:
            inner = max((i for i in file.infolist() if "/data/" in i.filename), key=lambda i: i.file_size)
        tensor = torch.load(_memory(archive), weights_only=False)
        change(tensor)
        begin = _data(archive, inner.header_offset)
        raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        assert len(raw) == inner.file_size
        data[info.offset : info.offset + info.length] = sealed(archive[:begin] + raw + archive[begin + len(raw) :])
        path.write_bytes(data)

    return make


def _memory(data: bytes) -> Any:
    import io

    return io.BytesIO(data)
