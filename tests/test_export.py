"""Writing views as safetensors and torch files: what the formats' own readers find in them, and what happens when
something is in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.core.dtypes import FROM_SAFETENSORS
from lazyckpt.core.units import size_in_bytes
from lazyckpt.errors import DataError, DestinationError, MissingFileError
from lazyckpt.export import safetensors
from lazyckpt.export.files import file_names, split
from lazyckpt.io import pool, system
from lazyckpt.jobs import destination, pieces
from lazyckpt.jobs import write as output
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.places import combined, crc32
from lazyckpt.jobs.publish import discard
from lazyckpt.testing import counting

from . import handmade, processes
from .writers import Case, bit_equal


def _state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(40, 30, generator=g)
    return {
        "f32": base,
        "transposed": base.t(),
        "part": base[3:20, ::2],
        "expanded": torch.arange(7.0).expand(5, 7),
        "bf16": torch.randn(333, generator=g).bfloat16(),
        "f16": torch.randn(2, 3, 5, generator=g).half(),
        "f8": torch.randn(33, generator=g).to(torch.float8_e4m3fn),
        "i64": torch.arange(11),
        "bool": torch.rand(9, generator=g) > 0.5,
        "u8": torch.arange(13, dtype=torch.uint8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "c64": torch.randn(6, dtype=torch.complex64, generator=g),
        "deep.er.name": torch.randn(1, generator=g),
        "Größe": torch.randn(2, generator=g),
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A torch file with a tied name, and what is in it."""
    state = _state()
    state["tied"] = state["f32"]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "state.pt"
    torch.save(state, path)
    return path, state


@pytest.fixture(params=[None, 1000, 64], ids=["whole", "pieces", "small pieces"])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(stream, "PIECE", request.param)
        monkeypatch.setattr(pieces, "PIECE", request.param)
        monkeypatch.setattr(pieces, "_NEAR", request.param)


@pytest.mark.usefixtures("piece")
def test_safetensors_reads_what_was_written(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    (file,) = lazyckpt.open(path).to_safetensors(tmp_path / "out")
    assert file == tmp_path / "out" / "model.safetensors"
    found = load_file(file)
    assert found.keys() == state.keys() - {"tied"}
    assert all(bit_equal(found[name], state[name]) for name in found)
    with safe_open(file, "pt") as f:  # as safetensors.torch.save_model tells of tied names
        assert f.metadata() == {"format": "pt", "tied": "f32"}
    again = lazyckpt.open(file)
    assert again.keys() == state.keys() and dict(again.aliases) == {"tied": "f32"}
    assert bit_equal(again["tied"][...], state["f32"])
    assert lazyckpt.open(tmp_path / "out").keys() == state.keys()
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert (8 + header) % 8 == 0
    for t in again.values():  # every tensor is aligned, so that it can be mapped
        assert t.fragments[0].extent.offset % t.itemsize == 0


@pytest.mark.usefixtures("piece")
def test_torch_reads_what_was_written(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    (file,) = lazyckpt.open(path).to_torch(tmp_path / "out" / "state.pt")
    for options in ({}, {"mmap": True}):
        found = torch.load(file, weights_only=True, **options)
        assert found.keys() == state.keys()
        assert all(bit_equal(found[name], state[name]) for name in found)
        assert found["tied"].data_ptr() == found["f32"].data_ptr()
    assert zipfile.ZipFile(file).testzip() is None
    by_torch = tmp_path / "by_torch.pt"
    torch.save({n: t.contiguous() for n, t in state.items() if n != "tied"}, by_torch)
    crcs = [{i.CRC for i in zipfile.ZipFile(p).infolist() if "/data/" in i.filename} for p in (file, by_torch)]
    assert crcs[0] == crcs[1]
    again = lazyckpt.open(file)
    assert not again.problems and dict(again.aliases) == {"tied": "f32"}


@pytest.mark.parametrize("dtype", sorted((d.torch for d in FROM_SAFETENSORS.values()), key=str), ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype != torch.bool else raw.bool()
    torch.save({"t": tensor}, tmp_path / "t.pt")
    view = lazyckpt.open(tmp_path / "t.pt")
    view.to_safetensors(tmp_path / "t.safetensors")
    view.to_torch(tmp_path / "again.pt")
    assert bit_equal(load_file(tmp_path / "t.safetensors")["t"], tensor)
    assert bit_equal(torch.load(tmp_path / "again.pt")["t"], tensor)


def test_unsupported_dtype_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "c": torch.ones(2, dtype=torch.complex128)}, tmp_path / "t.pt")
    view = lazyckpt.open(tmp_path / "t.pt")
    with pytest.raises(DataError, match=r"complex128.*'c'"):
        view.to_safetensors(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    view.to_torch(tmp_path / "c.pt")
    assert torch.equal(torch.load(tmp_path / "c.pt")["c"], torch.ones(2, dtype=torch.complex128))


@pytest.mark.usefixtures("piece")
def test_floating_point_tensors_are_converted(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    view = lazyckpt.open(path)
    view.to_torch(tmp_path / "out.pt", dtype=torch.bfloat16)
    found = torch.load(tmp_path / "out.pt")
    for name, tensor in state.items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert bit_equal(found[name], wanted), name


def test_a_part_has_its_own_names(tmp_path: Path) -> None:
    w = torch.randn(4, 3)
    torch.save({"layers": [{"w": w, "b": torch.ones(3)}], "head": w}, tmp_path / "t.pt")
    view = lazyckpt.open(tmp_path / "t.pt")
    view["layers.0"].to_safetensors(tmp_path / "part.safetensors")
    assert load_file(tmp_path / "part.safetensors").keys() == {"w", "b"}
    view.select("head").to_safetensors(tmp_path / "alias.safetensors")  # the name that owns it is not in the part
    assert bit_equal(load_file(tmp_path / "alias.safetensors")["head"], w)


# -- shards


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), limit=st.integers(1, 60))
def test_shards_are_those_of_hugging_face(sizes: list[int], limit: int) -> None:
    tensors = {f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes) if size}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    ours = split(tensors, limit)  # type: ignore[arg-type]
    if not tensors:
        assert ours == [{}]
        return
    names = file_names("model", ".safetensors", len(ours))
    assert dict(zip(names, map(list, ours), strict=True)) == theirs.filename_to_tensors


def test_shards_and_their_index(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    view = lazyckpt.open(path)
    for form, suffix in (("safetensors", ".safetensors"), ("torch", ".bin")):
        out = tmp_path / form
        written = getattr(view, f"to_{form}")(out, max_shard_size="5KB")
        assert sorted(written) == sorted(out.iterdir()) and len(written) > 3
        index = json.loads(next(out.glob("*.index.json")).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in state.items() if n != "tied")
        assert index["weight_map"].keys() == state.keys() - ({"tied"} if form == "safetensors" else set())
        for name, file in index["weight_map"].items():
            shard = load_file(out / file) if suffix == ".safetensors" else torch.load(out / file)
            assert bit_equal(shard[name], state[name])
        again = lazyckpt.open(out)
        assert again.keys() == state.keys() and not again.problems
        assert all(bit_equal(again[name][...], state[name]) for name in state)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("10kb", 10**4), ("7", 7), (9, 9), ("2tb", 2 * 10**12)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 GX", "-1", "0", 0, "1e3"])
def test_invalid_sizes(text: str | int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"size|holds nothing"):
        size_in_bytes(text)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_checksums_of_pieces_combine(pieces: list[bytes]) -> None:
    assert combined((crc32(p), len(p)) for p in pieces) == zlib.crc32(b"".join(pieces))


@pytest.mark.parametrize("nbytes", [1, (1 << 20) - 1, 16 << 20])
def test_checksums_of_long_pieces_combine(nbytes: int) -> None:
    text = bytes(range(251)) * (3 * nbytes // 251 + 1)
    pieces = [text[:nbytes], text[nbytes : 2 * nbytes], text[2 * nbytes : 3 * nbytes]]
    assert combined((crc32(p), len(p)) for p in pieces) == zlib.crc32(text[: 3 * nbytes])


# -- what it costs


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(64, 512), "b": torch.randn(17)}, tmp_path / "t.pt")
    view, counts = counting.opened(tmp_path / "t.pt")
    counts.clear()
    view.to_safetensors(tmp_path / "out.safetensors")
    assert counts.bytes == view.nbytes


_PEAK = """
import re, sys, lazyckpt
def value(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
view = lazyckpt.open(sys.argv[1])
view.select("small").to_safetensors(sys.argv[2] + "/warm")
open("/proc/self/clear_refs", "w").write("5")
before = value("VmRSS")
view.to_safetensors(sys.argv[2] + "/st", progress=False)
view.to_torch(sys.argv[2] + "/pt", progress=False)
view.to_torch(sys.argv[2] + "/bf16", dtype=__import__("torch").bfloat16, progress=False)
print(value("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is asked of Linux")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    torch.save({"big": torch.zeros(64 << 20, dtype=torch.float32), "small": torch.zeros(3)}, tmp_path / "t.pt")
    done = processes.run("-c", _PEAK, tmp_path / "t.pt", tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128 << 20  # the model has 256 MiB


# -- what is in the way


def _left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*"))


def test_nothing_is_overwritten_unless_asked(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    view = lazyckpt.open(saved[0])
    out = tmp_path / "out"
    view.to_safetensors(out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(DestinationError, match="exists already"):
        view.to_safetensors(out, dtype=torch.float16)
    assert (out / "model.safetensors").read_bytes() == before
    view.to_safetensors(out, dtype=torch.float16, overwrite=True)
    assert load_file(out / "model.safetensors")["f32"].dtype == torch.float16
    assert _left(out) == ["model.safetensors"]


def test_a_source_is_never_written_to(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    view = lazyckpt.open(saved[0])
    before = saved[0].read_bytes()
    os.symlink(saved[0], tmp_path / "link.pt")
    for dest in (saved[0], tmp_path / "link.pt"):
        with pytest.raises(DestinationError, match="that is read"):
            view.to_torch(dest, overwrite=True)
    with pytest.raises(DestinationError, match="holds the checkpoint that is read"):
        view.to_torch(saved[0].parent, overwrite=True)
    assert saved[0].read_bytes() == before
    assert _left(saved[0].parent) == ["state.pt"]
    view.to_safetensors(saved[0].with_suffix(".safetensors"))  # beside it is another place


def test_weights_of_another_model_are_not_mixed_in(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    view = lazyckpt.open(saved[0])
    out = tmp_path / "out"
    view.to_safetensors(out, max_shard_size="5KB")
    (out / "config.json").write_text("{}")
    before = _left(out)
    with pytest.raises(DestinationError, match=r"holds other weights.*model-00001-of"):
        view.to_safetensors(out, overwrite=True)
    assert _left(out) == before
    view.to_torch(out)  # files of another kind may stand beside them
    view.to_safetensors(out, max_shard_size="5KB", overwrite=True)


@pytest.mark.parametrize("dest", ["hf://someone/model", "https://example.org/x.safetensors"])
def test_a_url_that_is_only_read_is_refused(saved: tuple[Path, dict[str, torch.Tensor]], dest: str) -> None:
    with pytest.raises(DestinationError, match="only read"):
        lazyckpt.open(saved[0]).to_safetensors(dest)


def test_destination_folder_is_a_file(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    view = lazyckpt.open(saved[0])
    with pytest.raises(DestinationError, match="is a file"):
        view.to_safetensors(tmp_path / "f")
    with pytest.raises(DestinationError, match="Nothing was written"):
        view.to_safetensors(tmp_path / "f" / "below")
    with pytest.raises(DestinationError, match="is a folder"):
        (tmp_path / "d.safetensors").mkdir()
        view.to_safetensors(tmp_path / "d.safetensors")
    assert (tmp_path / "f").read_text() == "x"


def test_no_room(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 100

    monkeypatch.setattr(destination.shutil, "disk_usage", lambda _: Full)
    with pytest.raises(DestinationError, match="100 are free"):
        lazyckpt.open(saved[0]).to_safetensors(tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(system.PORTABLE, reason="it makes pwrite fail")
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failed_export_leaves_nothing(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    view = lazyckpt.open(saved[0])
    out = tmp_path / "out"
    view.to_safetensors(out)
    before = (out / "model.safetensors").read_bytes()
    calls = 0
    real = os.pwrite

    def pwrite(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise error
        return real(*args)

    monkeypatch.setattr(stream.os, "pwrite", pwrite)
    raised = DestinationError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(raised, match=r"No space|^$"):
        view.to_safetensors(out, overwrite=True)
    calls = 0
    with pytest.raises(raised, match=r"No space|^$"):
        view.to_torch(tmp_path / "new" / "x.pt")
    assert not (tmp_path / "new").exists()
    assert (out / "model.safetensors").read_bytes() == before
    assert _left(out) == ["model.safetensors"]


def test_missing_source_is_reported_before_anything_is_written(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = shutil.copytree(zero_cases["zero2_bf16_dp2"].path, tmp_path / "in")
    next(case.glob("*/*zero_pp_rank_1_*")).unlink()
    view = lazyckpt.open(case).states["fp32"]
    with pytest.raises(MissingFileError, match="zero_pp_rank_1_"):
        view.to_safetensors(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["to_safetensors", "to_torch", "to_zarr", "to_dcp", "to_universal", "to_megatron"])
def test_unreadable_tensors_are_not_left_out_silently(tmp_path: Path, to: str) -> None:
    """Of a folder that lost a shard, only the index tells the names of what was in it."""
    names = {"x": "model-00001-of-00002.safetensors", "y.w": "model-00002-of-00002.safetensors"}
    (tmp_path / "hf").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "hf" / names["x"])
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    view = lazyckpt.open(tmp_path / "hf")
    with pytest.raises(MissingFileError, match=r"1 tensor would be missing.*y\.w.*00002.*view\.select"):
        getattr(view, to)(tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]
    assert list(view.unreadable) == ["y.w"] and not view.select("x").unreadable


def test_readable_tensors_can_be_selected_for_export(tmp_path: Path) -> None:
    names = {"x": "model-00001-of-00002.safetensors", "y.w": "model-00002-of-00002.safetensors"}
    (tmp_path / "hf").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "hf" / names["x"])
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    view = lazyckpt.open(tmp_path / "hf")
    view.select(lambda name: name not in view.unreadable).to_torch(tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["x"].tolist() == [1, 1]


def test_files_created_meanwhile_are_not_mixed_in(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """What was free at first is looked at again before the files appear."""
    view = lazyckpt.open(saved[0])
    out = tmp_path / "out"

    class Other:  # somebody puts other weights there, while this one writes
        def __init__(self, *_: Any) -> None:
            view.to_safetensors(tmp_path / "other", max_shard_size="5KB")
            os.rename(tmp_path / "other", out)

        add = __exit__ = lambda *_: None

        def __enter__(self) -> Any:
            return self

    for overwrite in (False, True):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(DestinationError, match="holds other weights"):
            patch.setattr(output, "Bar", lambda *args: patch.undo() or Other(*args))
            view.to_safetensors(out, overwrite=overwrite)
        assert lazyckpt.open(out).keys() == saved[1].keys() and "model.safetensors" not in _left(out)
        shutil.rmtree(out)


@pytest.mark.parametrize("to", ["to_safetensors", "to_torch", "to_dcp", "to_universal"])
def test_two_exports_at_once(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, to: str) -> None:
    view = lazyckpt.open(saved[0])
    real = output.fill

    def fill(*args: Any) -> Any:
        for again in (getattr(view, to), lambda dest: discard(dest)):
            with pytest.raises(DestinationError, match="another export is writing there"):
                again(tmp_path / "out")
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "fill", fill)
        getattr(view, to)(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_resume_after_publishing_failed_midway(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replace(part: Any, path: Path, **options: Any) -> None:
        if "00002-of" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(part, path, **options)

    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with monkeypatch.context() as patch, pytest.raises(DestinationError, match=r"denied\. What is finished is kept in"):
        patch.setattr(os, "replace", replace)
        lazyckpt.open(saved[0]).to_safetensors(out, max_shard_size="5KB")
    assert len(_left(out)) == 2
    written = lazyckpt.open(saved[0]).to_safetensors(out, max_shard_size="5KB")
    assert sorted(map(str, written)) == sorted(str(out / name) for name in _left(out) if name != "config.json")
    assert lazyckpt.open(out).keys() == saved[1].keys() and sorted(os.listdir(tmp_path)) == ["in", "out"]
    with pytest.raises(DestinationError, match="exists already"):
        lazyckpt.open(saved[0]).to_safetensors(out, max_shard_size="5KB")


def test_second_interrupt_waits_for_running_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread may write to a descriptor that has been closed, and is another file's by then."""
    running, finish = threading.Event(), threading.Event()
    done = []
    real = pool.wait
    calls = 0

    def wait(futures: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        running.wait()
        if calls < 3:  # Ctrl-C, twice
            raise KeyboardInterrupt
        finish.set()
        return real(futures, **options)

    def task() -> None:
        running.set()
        finish.wait()
        done.append(1)

    monkeypatch.setattr(pool, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        pool.run([(64 << 20, task), (64 << 20, task), (1, lambda: None)])
    assert done == [1, 1]


def test_names_that_no_file_can_hold(tmp_path: Path) -> None:
    body = handmade.dict_of(handmade.text("a\udc80"), handmade.tensor())
    handmade.write_pickle(tmp_path / "t.pt", handmade.program(body))
    for write in ("to_safetensors", "to_torch"):
        with pytest.raises(DataError, match=r"udc80.*no valid text"):
            getattr(lazyckpt.open(tmp_path / "t.pt"), write)(tmp_path / "out")
    w = torch.ones(2)
    torch.save({"w": w, "format": w}, tmp_path / "u.pt")
    with pytest.raises(DataError, match="'format'"):
        lazyckpt.open(tmp_path / "u.pt").to_safetensors(tmp_path / "out")
    with pytest.raises(DestinationError, match="null character"):
        lazyckpt.open(tmp_path / "u.pt").to_torch(f"{tmp_path}/a\0b.pt")
    assert not (tmp_path / "out").exists()


def test_tensor_named_like_the_format_is_not_an_alias(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(2)}, tmp_path / "t.safetensors", metadata={"format": "pt"})
    assert list(lazyckpt.open(tmp_path / "t.safetensors")) == ["pt"]


def test_a_header_that_readers_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({f"t{n}": torch.ones(1) for n in range(100)}, tmp_path / "t.pt")
    monkeypatch.setattr(safetensors, "_LONGEST", 5000)
    view = lazyckpt.open(tmp_path / "t.pt")
    with pytest.raises(DataError, match="write shards"):
        view.to_safetensors(tmp_path / "out")
    view.to_safetensors(tmp_path / "out", max_shard_size=100)


def test_unsupported_conversions(tmp_path: Path) -> None:
    dtypes = [d for name in ("float4_e2m1fn_x2",) if (d := getattr(torch, name, None))]
    torch.save({str(d): torch.zeros(4, dtype=torch.uint8).view(d) for d in (torch.float16, *dtypes)}, tmp_path / "t.pt")
    view = lazyckpt.open(tmp_path / "t.pt")
    with pytest.raises(DataError, match="floating-point dtype"):
        view.to_torch(tmp_path / "out", dtype=torch.int8)
    for _ in dtypes:
        with pytest.raises(DataError, match="does not convert"):
            view.to_torch(tmp_path / "out", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()


# -- the bar


def test_the_bar(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    view = lazyckpt.open(saved[0])
    view.to_torch(tmp_path / "quiet.pt")  # no terminal: nobody looks
    assert capfd.readouterr().err == ""
    view.to_torch(tmp_path / "shown.pt", progress=True)
    assert "shown.pt" in capfd.readouterr().err


# -- what it stands on


@pytest.mark.slow
def test_pieces_and_read_into(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    view = lazyckpt.open(path)
    lazies = [(view[n], t) for n, t in state.items()]
    lazies += [(view["f32"].lazy[key], state["f32"][key]) for key in ((slice(3, 17), 4), ([5, 5, 2],), (None, 2))]
    lazies += [(view["f32"].lazy[::-3, 1:9], state["f32"].flip(0)[::3, 1:9])]
    for lazy, truth in lazies:
        whole = torch.empty(lazy.shape, dtype=lazy.dtype)
        assert lazy.read_into(whole) is whole and bit_equal(whole, truth.contiguous())
        for nbytes in (1, 100, 3000):
            flat = torch.empty(lazy.numel(), dtype=lazy.dtype)
            covered = 0
            for ahead, piece in lazy.pieces(nbytes):
                assert ahead == covered and (piece.nbytes <= nbytes or piece.numel() == 1)
                covered += piece.numel()
                piece.read_into(flat[ahead:covered].view(piece.shape))
            assert covered == lazy.numel() and bit_equal(flat.view(lazy.shape), truth.contiguous())
    with pytest.raises(DataError, match="contiguous CPU tensor"):
        view["f32"].read_into(torch.empty(40, 30, dtype=torch.float64))


def test_astype(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    view = lazyckpt.open(path)
    for name in ("f32", "transposed", "part", "bf16", "scalar", "empty", "i64"):
        lazy = view[name].astype(torch.float16)
        assert lazy.dtype == torch.float16 and bit_equal(lazy[...], state[name].half())
    assert bit_equal(view["part"].lazy[2:, 1].astype(torch.float64)[...], state["part"][2:, 1].double())
    assert view["f32"].astype(torch.float32) is view["f32"]
