"""Programs of torch with their weights: recorded files of TorchScript, torch.export, AOTInductor, and damaged ones."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, testing
from lazyckpt.testing.contract import open_case

from .writers import Case, bit_equal, torch_programs

FORMATS = {
    name: "torchscript" if "script" in name or name == "trace" else "torch-export" for name in torch_programs.CASES
}


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["script", "export"])  # the others by their values
def test_contract(name: str, check: testing.Check, program_cases: Mapping[str, Case]) -> None:
    check(program_cases[name])


@pytest.mark.parametrize("name", torch_programs.CASES)
def test_weights_are_those_of_the_process(name: str, program_cases: Mapping[str, Case]) -> None:
    case = program_cases[name]
    view = open_case(case)
    assert view.format == FORMATS[name]
    assert {state: set(part) for state, part in view.states.items()} == {s: set(t) for s, t in case.truth.items()}
    for state, truth in case.truth.items():
        for key, tensor in truth.items():
            assert bit_equal(view.states[state][key][...], tensor), (state, key)
    assert dict(view.aliases) == case.info.get("tied", {})
    odd = {"unread-program", *(["unsupported-tensor"] if name == "script_quantized" else [])}
    assert {p.code for p in view.problems} == odd


@pytest.mark.parametrize("name", torch_programs.CASES)
def test_scan_and_verify(name: str, program_cases: Mapping[str, Case]) -> None:
    """A program is told, nothing else; its checksums are right, and a changed byte is found."""
    path = program_cases[name].path
    report = lazyckpt.scan(path)
    assert {f.code for f in report} - {"framework-class"} == {"shipped-code"} and report.worst == "warning"
    assert lazyckpt.verify(path, progress=False).worst != "error"


def test_a_changed_byte_of_a_weight_is_found(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    for name in ("export", "export_2_8", "export_2_7", "aoti"):
        path = Path(shutil.copy(program_cases[name].path, tmp_path / f"{name}.pt2"))
        view = lazyckpt.open(path)
        tensor = next(t for t in view.values() if t.numel())
        data = bytearray(path.read_bytes())
        data[tensor.fragments[0].extent.offset] ^= 0x10  # type: ignore[union-attr]
        path.write_bytes(data)
        assert "wrong-checksum" in {f.code for f in lazyckpt.verify(path, progress=False)}, name


# -- archives with records that the tests change


Change = Callable[[dict[str, bytes]], object]
_CONFIG = "program/data/weights/model_weights_config.json"


def changed(case: Case, path: Path, change: Change) -> Path:
    """Write the archive of a case with other records."""
    with zipfile.ZipFile(case.path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


def entry(name: str, **values: Any) -> Change:
    """Change the description of a weight."""

    def change(records: dict[str, bytes]) -> None:
        table = json.loads(records[_CONFIG])
        one = table["config"][name]
        one.update({key: value for key, value in values.items() if key in one})
        one["tensor_meta"].update({key: value for key, value in values.items() if key in one["tensor_meta"]})
        records[_CONFIG] = json.dumps(table).encode()

    return change


def test_archives_of_other_zips_are_read(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    case = program_cases["export"]
    path = changed(case, tmp_path / "other.pt2", lambda records: None)
    view = lazyckpt.open(path)
    assert all(bit_equal(view[key][...], tensor) for key, tensor in case.truth["weights"].items())


@pytest.mark.parametrize(
    "change",
    [
        entry("left", sizes=[{"as_int": 400}]),
        entry("left", sizes=[{"as_int": -1}]),
        entry("left", storage_offset={"as_int": 8}),
        entry("left", dtype=99),
        entry("left", dtype=8),  # the other half of the record is described as float32
        entry("left", layout=1),
        entry("left", path_name="weight_99"),
        entry("left", path_name=None),
        lambda records: records.update({_CONFIG: b"{"}),
        lambda records: records.update({_CONFIG: b"[1]"}),
        lambda records: records.update({_CONFIG: b'{"config": ' + b"[" * 500 + b"]" * 500 + b"}"}),
        lambda records: records.update({"elsewhere/x": b""}),
        lambda records: records.update({"program/DATA/weights/weight_0": b""}),
    ],
)
def test_what_cannot_be_right_is_refused(change: Change, tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    with pytest.raises(CorruptError):
        lazyckpt.open(changed(program_cases["export"], tmp_path / "x.pt2", change))


def test_another_version_is_refused(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    newer: Change = lambda records: records.update({"program/archive_version": b"1"})  # noqa: E731
    with pytest.raises(FormatError, match="version"):
        lazyckpt.open(changed(program_cases["export"], tmp_path / "x.pt2", newer))


def test_weights_that_are_not_there_are_problems(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    path = changed(program_cases["export"], tmp_path / "x.pt2", lambda records: records.pop(_CONFIG))
    view = lazyckpt.open(path)
    assert "missing-metadata" in {p.code for p in view.problems} and not list(view) and view.states["constants"]


def test_fake_tensors_and_symbols_are_problems(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    def change(records: dict[str, bytes]) -> None:
        table = json.loads(records[_CONFIG])["config"]
        records[f"program/data/weights/{table['turned']['path_name']}"] = b""
        entry("left", sizes=[{"as_expr": {"expr_str": "s0", "hint": None}}])(records)

    view = lazyckpt.open(changed(program_cases["export"], tmp_path / "x.pt2", change))
    assert {p.code for p in view.problems} == {"unread-program", "unsupported-tensor", "unreadable-object"}
    assert "left" not in view
    with pytest.raises(lazyckpt.DataError):
        view["turned"][...]


def test_compiled_weights_are_refused_with_advice(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    def change(records: dict[str, bytes]) -> None:
        for name in [name for name in records if "weight" in name]:
            del records[name]

    with pytest.raises(FormatError, match="package_constants_on_disk_format"):
        lazyckpt.open(changed(program_cases["aoti"], tmp_path / "x.pt2", change))


def test_tensor_subclasses_and_objects(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    """What torch pickles within an archive: a Tensor subclass as its record, an object of C++ as a problem."""

    def change(records: dict[str, bytes]) -> None:
        held = io.BytesIO()
        torch.save(torch.arange(5), held)
        records["program/data/weights/weight_90"] = held.getvalue()
        table = json.loads(records[_CONFIG])
        meta = table["config"]["left"]["tensor_meta"]
        about = {"path_name": "weight_90", "is_param": False, "use_pickle": True, "tensor_meta": meta}
        table["config"] |= {"pickled": about, "object": about | {"tensor_meta": None}}
        records[_CONFIG] = json.dumps(table).encode()

    view = lazyckpt.open(changed(program_cases["export"], tmp_path / "x.pt2", change))
    assert bit_equal(view["pickled"][...], torch.arange(5)) and "object" not in view
    assert "unreadable-object" in {p.code for p in view.problems}


def test_no_elements_are_read_on_opening(tmp_path: Path, program_cases: Mapping[str, Case]) -> None:
    def change(records: dict[str, bytes]) -> None:
        table = json.loads(records[_CONFIG])["config"]
        records[f"program/data/weights/{table['left']['path_name']}"] = bytes(4 << 20)

    _, counts = testing.opened(changed(program_cases["export"], tmp_path / "x.pt2", change))
    assert counts.bytes < 256 << 10
