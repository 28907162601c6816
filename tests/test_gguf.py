"""GGUF files: versions, byte orders, types, splits, metadata; damaged and hostile files; older formats."""

from __future__ import annotations

import json
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt import CorruptError, FormatError
from lazyckpt.core.ops.ggml import SWAPPED
from lazyckpt.testing import contract, opened
from lazyckpt.testing.contract import Check
from lazyckpt.testing.oracle import same

from . import recordings
from .conftest import Cases
from .hostility import attempt, deadline
from .lanes import rounds
from .test_dequantize_ops import check_parts
from .writers import Case

NAMES = recordings.GROUPS["gguf"].names


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[[str], Path]) -> Cases:
    return Cases("gguf", checkpoints("gguf"))


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, cases: Cases) -> Case:
    return cases[request.param]


def copied(case: Case, to: Path) -> Path:
    return Path(shutil.copytree(case.path, to / "ckpt"))


def header(*parts: bytes, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def padded(data: bytes, more: int = 0) -> bytes:
    return data + bytes(-len(data) % 32 + more)


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + data


# -- what the writer wrote


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(case: Case, check: Check) -> None:
    check(case)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_dequantized(cases: Cases, name: str) -> None:
    case = cases[name]
    values = torch.load(case.path.parent / "values.pt")
    assert bool(values) is (name != "big_endian")
    found = lazyckpt.open(case.path).dequantize(torch.float32)
    for one, whole in values.items():
        same(found[one][...], whole, one)
    for one in set(case.truth["weights"]) - set(values):
        assert found[one].shape == case.truth["weights"][one].shape
    assert {p.code for p in found.problems} == ({"assumed-quantization"} if name == "big_endian_blocks" else set())


@settings(max_examples=rounds(60), deadline=None)
@given(data=st.data())
def test_parts_of_dequantized_tensors(cases: Cases, data: st.DataObject) -> None:
    view = lazyckpt.open(cases[data.draw(st.sampled_from(("every", "split", "big_endian_blocks")))].path)
    view = view.dequantize(torch.float32)
    check_parts(view[data.draw(st.sampled_from(sorted(name for name in view if name.startswith("blk."))))], data.draw)


def test_a_slice_reads_its_blocks(cases: Cases) -> None:
    view, counts = opened(cases["every"].path)
    matrix = view.dequantize()["blk.0.Q6_K"]
    counts.clear()
    _ = matrix[1, 256:300]
    assert counts.bytes == 210


def test_metadata(case: Case) -> None:
    view = lazyckpt.open(case.path)
    meta = view.meta
    assert view.format == "gguf" and view.problems == ()
    assert meta["general.architecture"] == "llama" and meta["general.name"] == "a model"
    assert meta["tokenizer.ggml.tokens"][:5] == ["<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}a", "größe", "\N{SNOWMAN}"]
    assert len(meta["tokenizer.ggml.tokens"]) == 55 and meta["tokenizer.ggml.scores"][3] == -3.0
    assert meta["tokenizer.ggml.add_bos_token"] is True and meta["llama.block_count"] == 2
    assert meta["llama.rope.freq_base"] == 10000.5 and meta["test.f64"] == 0.1
    assert (meta["test.u8"], meta["test.i8"], meta["test.u16"]) == (200, -3, 60000)
    assert (meta["test.i16"], meta["test.i64"]) == (-300, -(1 << 40))
    assert meta["test.bools"] == [True, False] and meta["test.nested"] == [[1, 2], [3]]
    assert meta["tensor_types"] == {n: n.rpartition(".")[2] for n in view if n.startswith("blk.")}
    assert bool(meta.get("big_endian")) is case.path.parent.name.startswith("big_endian")


def test_agrees_with_the_gguf_reader(case: Case) -> None:
    gguf = pytest.importorskip("gguf")
    if case.path.parent.name == "version1":
        pytest.skip("GGUFReader reads versions 2 and 3")
    view = lazyckpt.open(case.path)
    names = set()
    for path in case.path.glob("*.gguf"):
        for tensor in gguf.GGUFReader(path).tensors:
            names.add(tensor.name)
            if tensor.n_elements == 1:
                continue  # (GGUFReader gives a tensor without dimensions one)
            ours = view[tensor.name]
            if tensor.data.dtype.kind == "u" or str(tensor.tensor_type.name) == "BF16":
                if not view.meta.get("big_endian"):
                    assert ours[...].view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()
            else:
                assert ours.shape == tensor.data.shape and (ours.numpy() == tensor.data).all()
    assert names == set(view)


# -- splits and folders


def test_a_lost_split_is_told(cases: Cases, tmp_path: Path) -> None:
    folder = copied(cases["split"], tmp_path)
    second = folder / "model-00002-of-00003.gguf"
    lost = set(lazyckpt.open(second))
    second.unlink()
    view = lazyckpt.open(folder)
    assert set(view) == set(cases["split"].truth["weights"]) - lost
    assert [(p.code, p.path) for p in view.problems] == [("missing-file", second.name)]


def test_the_first_split_opens_all_and_another_one_itself(cases: Cases) -> None:
    folder = cases["split"].path
    first = lazyckpt.open(folder / "model-00001-of-00003.gguf")
    assert set(first) == set(cases["split"].truth["weights"]) and first.problems == ()
    part = lazyckpt.open(folder / "model-00003-of-00003.gguf")
    assert 0 < len(part) < 15 and [p.code for p in part.problems] == ["part-of-checkpoint"]


def test_splits_that_have_each_others_names(cases: Cases, tmp_path: Path) -> None:
    """Each tensor is where its file says, whatever the file's name."""
    folder = copied(cases["split"], tmp_path)
    one, two, other = (folder / name for name in ("model-00001-of-00003.gguf", "model-00002-of-00003.gguf", "x"))
    one.rename(other)
    two.rename(one)
    other.rename(two)
    view = lazyckpt.open(folder)
    assert view.meta["general.name"] == "a model"
    for name, whole in cases["split"].truth["weights"].items():
        same(view[name][...], whole, name)


def test_a_damaged_split_is_told(cases: Cases, tmp_path: Path) -> None:
    folder = copied(cases["split"], tmp_path)
    (folder / "model-00002-of-00003.gguf").write_bytes(b"GGUF" + bytes(60))
    view = lazyckpt.open(folder)
    assert "unreadable-file" in {p.code for p in view.problems}
    assert 0 < len(view) < len(cases["split"].truth["weights"])


def test_several_models_in_a_folder(cases: Cases, tmp_path: Path) -> None:
    folder = copied(cases["version2"], tmp_path)
    shutil.copy(folder / "model.gguf", folder / "other.gguf")
    with pytest.raises(FormatError, match=r"model\.gguf.*other\.gguf"):
        lazyckpt.open(folder)
    assert set(lazyckpt.open(folder / "other.gguf")) == set(cases["version2"].truth["weights"])


def test_the_same_tensor_in_two_splits(cases: Cases, tmp_path: Path) -> None:
    folder = copied(cases["split"], tmp_path)
    shutil.copy(folder / "model-00001-of-00003.gguf", folder / "model-00002-of-00003.gguf")
    with pytest.raises(FormatError, match="another file"):
        lazyckpt.open(folder)


# -- damage


def test_a_truncated_file(cases: Cases, tmp_path: Path) -> None:
    whole = (cases["every"].path / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[:-2000])
    view = lazyckpt.open(path)
    assert [p.code for p in view.problems] == ["missing-tensor"]
    truth = cases["every"].truth["weights"]
    assert 0 < len(view.unreadable) < len(truth) and set(view.unreadable) == set(truth) - set(view.stored)
    for name in view.stored:
        same(view[name][...], truth[name], name)
    with pytest.raises(lazyckpt.LazyckptError, match="truncated"):
        _ = view[next(iter(view.unreadable))][...]
    for size in (3, 20, 24, 200, 2000):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptError, match=r"truncated|damaged"):
            lazyckpt.open(path)


def test_a_type_that_nobody_knows(tmp_path: Path) -> None:
    data = padded(header(entry("new", 4, kind=4711), entry("old", 2, offset=0), tensors=2), 64)
    (tmp_path / "a.gguf").write_bytes(data)
    view = lazyckpt.open(tmp_path / "a.gguf")
    assert list(view.stored) == ["old"] and [p.code for p in view.problems] == ["unsupported-tensor"]
    assert "4711" in view.unreadable["new"]


HOSTILE = {
    "tensors": header(tensors=1 << 60),
    "keys": header(keys=1 << 60),
    "a name": header(struct.pack("<Q", 1 << 62), keys=1),
    "an array": header(array("a", 4, 1 << 60), keys=1),
    "texts": header(array("a", 8, 1 << 60), keys=1),
    "nested arrays": header(text("a"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 100_000, keys=1),
    "many nested arrays": header(array("a", 9, 1 << 20, struct.pack("<IQ", 0, 0) * (1 << 20)), keys=1, tensors=1),
    "dimensions": header(text("a") + struct.pack("<I", 1 << 31), bytes(100), tensors=1),
    "a size": padded(header(entry("a", 1 << 40, 1 << 40), tensors=1)),
    "an offset": padded(header(entry("a", 4, offset=(1 << 64) - 8), tensors=1), 64),
    "blocks": padded(header(entry("a", 33, kind=8), tensors=1), 64),
    "no rows": padded(header(entry("a", kind=8), tensors=1), 64),
    "overlaps": padded(header(entry("a", 4), entry("b", 4, offset=8), tensors=2), 64),
    "twice": padded(header(entry("a", 4), entry("a", 4, offset=32), tensors=2), 96),
    "an alignment": padded(header(text("general.alignment") + struct.pack("<II", 4, 3), keys=1), 64),
    "no alignment": padded(header(text("general.alignment") + struct.pack("<II", 4, 0), keys=1), 64),
    "a type": padded(header(text("a") + struct.pack("<I", 77), keys=1), 64),
    "a key twice": padded(header(*2 * [text("a") + struct.pack("<IB", 0, 1)], keys=2), 64),
    "no UTF-8": padded(header(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1), keys=1), 64),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_cost_little(tmp_path: Path, what: str) -> None:
    (tmp_path / "a.gguf").write_bytes(HOSTILE[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with deadline():
        found = attempt(tmp_path / "a.gguf")
    assert found is None  # refused
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_metadata_that_are_no_utf8_are_bytes(tmp_path: Path) -> None:
    value = text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"
    (tmp_path / "a.gguf").write_bytes(padded(header(value, array("b", 8, 1, struct.pack("<Q", 1) + b"\xe2"), keys=2)))
    assert dict(lazyckpt.open(tmp_path / "a.gguf").meta)["a"] == b"\xff\xfe"
    assert lazyckpt.open(tmp_path / "a.gguf").meta["b"] == [b"\xe2"]


@pytest.mark.parametrize(("magic", "name"), [(b"lmgg", "ggml"), (b"fmgg", "ggmf"), (b"tjgg", "ggjt")])
def test_formats_before_gguf_are_refused(tmp_path: Path, magic: bytes, name: str) -> None:
    (tmp_path / "a.gguf").write_bytes(magic + bytes(100))
    with pytest.raises(FormatError, match=f"{name}.*Convert"):
        lazyckpt.open(tmp_path / "a.gguf")


def test_a_version_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(FormatError, match="version 9"):
        lazyckpt.open(tmp_path / "a.gguf")


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
    (tmp_path / "a.gguf").write_bytes(pointer)
    with pytest.raises(lazyckpt.LazyckptError, match=r"git.lfs|LFS"):
        lazyckpt.open(tmp_path / "a.gguf")


# -- the rest of the house


def test_big_endian_blocks_of_unknown_layout_stay(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from .writers import gguf_files

    tensors = gguf_files.blocks()
    gguf_files.write(tmp_path / "a.gguf", tensors, big=True)
    view = lazyckpt.open(tmp_path / "a.gguf").dequantize()
    kept = {name for name, t in view.items() if t.dtype == torch.uint8}
    assert kept == {name for name in tensors if name.rpartition(".")[2] not in SWAPPED}
    assert {p.code for p in view.problems} == {"undecided-quantization", "assumed-quantization"}


def test_conversion(cases: Cases, tmp_path: Path) -> None:
    case = cases["every"]
    view = lazyckpt.open(case.path)
    view.dequantize().to_safetensors(tmp_path / "m.safetensors")
    values = torch.load(case.path.parent / "values.pt")
    found = lazyckpt.open(tmp_path / "m.safetensors")
    for name, whole in values.items():
        same(found[name][...], whole.to(torch.bfloat16), name)
    view.to_dcp(tmp_path / "dcp")
    for name, whole in case.truth["weights"].items():
        same(lazyckpt.open(tmp_path / "dcp")[name][...], whole, name)


def test_the_command_line(cases: Cases, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from lazyckpt.cli import app

    def run(*args: str | Path) -> str:
        result = CliRunner().invoke(app, [*map(str, args)])
        assert result.exit_code == 0, result.output
        return result.output

    case = cases["split"]
    about = json.loads(run("ls", case.path, "--json"))
    assert {t["name"]: t["shape"] for t in about["tensors"]} == {
        name: list(whole.shape) for name, whole in case.truth["weights"].items()
    }
    run("convert", case.path, tmp_path / "out", "--to", "safetensors", "--dequantize", "--dtype", "fp32")
    found = lazyckpt.open(tmp_path / "out")
    assert set(found) == set(case.truth["weights"])
    for name, whole in torch.load(case.path.parent / "values.pt").items():
        same(found[name][...], whole, name)
    result = CliRunner().invoke(app, ["convert", str(case.path), str(tmp_path / "new.gguf")])
    assert result.exit_code == 2 and "config.json" in result.output and not (tmp_path / "new.gguf").exists()


def test_renamed_files_are_recognised_by_content(cases: Cases, tmp_path: Path) -> None:
    shutil.copy(cases["version2"].path / "model.gguf", tmp_path / "weights.bin")
    assert lazyckpt.open(tmp_path / "weights.bin").format == "gguf"
