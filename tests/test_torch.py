"""Files of torch.save: the contract on every kind of them, and what is peculiar to the format."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.io.containers.torch_file import Pickles, read_torch_file
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import as_ints, indexed, keys, same

from .writers import Case, torch_contents, torch_files


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(torch_save_case: Case, check: Check) -> None:
    check(torch_save_case)


def test_format_mesh_and_stored_names(torch_save_case: Case) -> None:
    view = lazyckpt.open(torch_save_case.path)
    assert view.format == "torch"
    assert view.mesh == lazyckpt.Mesh(tp=1, pp=1, dp=1, ep=1)
    assert set(view.stored) == set(torch_save_case.stored), "dotted paths, tied ones too"
    assert list(view.files) == [torch_save_case.path.name]


@pytest.mark.parametrize(
    "name", ["flat", "views", "aligned4096", "no_crc", "list_root", "single", "legacy", "big_endian"]
)
def test_ordinary_files_have_no_problems(torch_cases: dict[str, Case], name: str) -> None:
    assert lazyckpt.open(torch_cases[name].path).problems == ()


def test_subclasses_are_read_as_their_data_and_told_of(torch_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(torch_cases["wrapped"].path)
    assert all(type(tensor) is torch.Tensor for tensor in view.to().values())
    marked = [line for line in view.problems if "MarkedTensor" in line]
    assert len(marked) == len(view.problems) == 2
    assert any("'subclass'" in line for line in marked) and any("'attributed_subclass'" in line for line in marked)


# -- what is not a tensor


@pytest.mark.parametrize("name", ["training", "protocol3", "protocol4", "protocol5", "legacy_training"])
def test_meta_holds_all_the_rest(torch_cases: dict[str, Case], name: str) -> None:
    tree: Any = torch_contents.training()
    meta: Any = lazyckpt.open(torch_cases[name].path).meta
    assert meta["epoch"] == 3
    assert meta["scheduler"] == tree["scheduler"]
    assert meta["optimizer"]["param_groups"] == tree["optimizer"]["param_groups"]
    args = meta["args"]
    assert isinstance(args, argparse.Namespace)
    assert (args.lr, args.dtype, args.device, str(args.out)) == (1e-2, torch.bfloat16, torch.device("cpu"), "run")
    assert meta["rng"]["python"] == tree["rng"]["python"]
    state = meta["rng"]["numpy"]
    assert (state[0], *state[2:]) == (tree["rng"]["numpy"][0], *tree["rng"]["numpy"][2:])
    for key in ("array", "fortran", "strings", "records"):
        got, want = meta["numpy"][key], tree["numpy"][key]
        assert isinstance(got, np.ndarray) and (got.dtype, got.shape) == (want.dtype, want.shape)
        assert np.array_equal(got, want)
    assert np.array_equal(state[1], tree["rng"]["numpy"][1])
    assert (meta["numpy"]["scalar"], type(meta["numpy"]["scalar"])) == (1.5, np.float64)
    assert meta["numpy"]["objects"].tolist() == [None, {"x": 1}]


@pytest.mark.parametrize("name", ["training", "protocol3", "protocol4", "protocol5", "legacy_training"])
def test_plain_objects_come_back_equal(torch_cases: dict[str, Case], name: str) -> None:
    tree: Any = torch_contents.training()
    objects: Any = lazyckpt.open(torch_cases[name].path).meta["objects"]
    plain = (
        "counter",
        "set",
        "frozenset",
        "bytes",
        "bytearray",
        "complex",
        "big_int",
        "range",
        "slice",
        "size",
        "unicode",
    )
    for key in (*plain, "defaultdict", "none"):
        assert objects[key] == tree["objects"][key], key
    assert type(objects["size"]) is torch.Size
    assert list(objects["deque"]) == [1, 2]
    assert objects["ellipsis"] is Ellipsis or "Ellipsis" in repr(objects["ellipsis"])


@pytest.mark.parametrize("name", ["training", "protocol3", "protocol4", "protocol5", "legacy_training"])
def test_a_date_shows_itself(torch_cases: dict[str, Case], name: str) -> None:
    date: Any = lazyckpt.open(torch_cases[name].path).meta["objects"]["date"]
    if isinstance(date, datetime.datetime):
        assert date == torch_contents.training()["objects"]["date"]
    else:  # a record: it must say of what
        assert (date.module, date.name) == ("datetime", "datetime")
        assert "datetime.datetime" in repr(date)


@pytest.mark.parametrize("name", ["training", "protocol5", "legacy_training"])
def test_unknown_classes_are_inert_records(torch_cases: dict[str, Case], name: str) -> None:
    objects: Any = lazyckpt.open(torch_cases[name].path).meta["objects"]
    classes = {
        "enum": "Phase",
        "int_enum": "Level",
        "dataclass": "RunState",
        "custom": "Custom",
        "slots": "Slots",
        "reduced": "Reduced",
        "list_like": "ListLike",
        "dict_like": "DictLike",
        "named_tuple": "Pair",
        "function": "walk",
        "class": "Custom",
    }
    for key, class_name in classes.items():
        record = objects[key]
        assert type(record).__module__.startswith("lazyckpt"), "nothing of the writer's was made"
        assert (record.module, record.name) == (torch_contents.__name__, class_name), key
        assert class_name in repr(record) and torch_contents.__name__ in repr(record)
    assert (objects["dataclass"].epoch, objects["dataclass"].best) == (3, 0.5)
    assert "objects.dataclass.ema" in repr(objects["dataclass"].ema), "where its tensor is found"
    assert objects["custom"].names == ["a", "b"]
    assert (objects["slots"].left, objects["slots"].right) == (1, [2])
    assert (objects["reduced"].args, objects["reduced"].state) == ((9,), {"note": "state"})
    assert objects["list_like"].note == objects["dict_like"].note == "attribute"
    assert objects["list_like"].items[0] == 1
    assert (objects["module"].module, objects["module"].name) == ("torch.nn.modules.linear", "Linear")
    with pytest.raises(AttributeError):
        _ = objects["custom"].no_such_attribute


@pytest.mark.parametrize("name", ["training", "protocol4", "legacy_training"])
def test_harmless_training_files_raise_no_alarm(torch_cases: dict[str, Case], name: str) -> None:
    (problem,) = lazyckpt.open(torch_cases[name].path).problems
    assert problem.code == "unsorted-tensor"  # dicts of tensors beside the model


@pytest.mark.parametrize("value", [{}, [], None, 5, "text", {"step": 3}, [1, {"a": (2.5, None)}]])
def test_files_without_tensors(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert len(view) == 0 and view.to() == {} and view.numel == view.nbytes == 0
    assert repr(view) and view.tree() and view.explain()
    assert view.meta == (value if isinstance(value, dict) else {"": value})


# -- names


def test_paths_that_read_the_same_stay_two_tensors(tmp_path: Path) -> None:
    path, _ = torch_files.write_colliding(tmp_path)
    view = lazyckpt.open(path)
    read = view.to()
    assert len(read) == 2
    same(read["a.b.c"], torch.zeros(2), "a.b.c")
    (other,) = (tensor for name, tensor in read.items() if name != "a.b.c")
    same(other, torch.ones(3), "the other")
    assert len(view.problems) == 1 and "'a.b.c'" in view.problems[0]


def test_a_tree_that_contains_itself(tmp_path: Path) -> None:
    path, tree = torch_files.write_cyclic(tmp_path)
    view = lazyckpt.open(path)
    assert list(view) == ["w"]
    same(view["w"][...], tree["w"], "w")
    assert set(view.meta) == {"self", "list"} and repr(view.meta)


def test_a_lone_tensor_has_the_empty_name(torch_cases: dict[str, Case]) -> None:
    case = torch_cases["single"]
    view = lazyckpt.open(case.path)
    assert list(view) == list(view.stored) == [""]
    same(view[""][1:], case.truth["weights"][""][1:], "")


# -- tensors that are not one block of bytes


def test_exotic_tensors_keep_their_parts(tmp_path: Path) -> None:
    path, tree = torch_files.write_exotic(tmp_path)
    view = lazyckpt.open(path)
    stored = view.stored
    same(view["plain"][...], tree["plain"], "plain")
    for name in ("quantized", "quantized_channels"):
        same(view[name][...], tree[name].int_repr(), name)
    for name in ("coo", "coo_uncoalesced"):
        same(stored[f"{name}.indices"][...], tree[name]._indices(), name)
        same(stored[f"{name}.values"][...], tree[name]._values(), name)
    for name in ("csr", "bsr"):
        same(stored[f"{name}.compressed"][...], tree[name].crow_indices(), name)
        same(stored[f"{name}.plain"][...], tree[name].col_indices(), name)
        same(stored[f"{name}.values"][...], tree[name].values(), name)
    same(stored["csc.compressed"][...], tree["csc"].ccol_indices(), "csc")
    same(stored["nested.buffer"][...], torch.cat([t.flatten() for t in tree["nested"].unbind()]), "nested")
    same(stored["jagged.values"][...], tree["jagged"].values(), "jagged")
    for name in set(tree) - {"plain"}:
        assert any(repr(name) in line for line in view.problems), f"{name} is not what it seems, and no line says so"


def test_a_meta_tensor_has_a_shape_and_no_data(tmp_path: Path) -> None:
    path, tree = torch_files.write_exotic(tmp_path)
    t = lazyckpt.open(path)["meta"]
    assert (t.shape, t.dtype) == (tree["meta"].shape, tree["meta"].dtype)
    assert t.to("meta").is_meta and repr(t) and t.lazy[0].shape == (4,)
    for read in (lambda: t[...], lambda: t[0], t.numpy, t.to, lambda: lazyckpt.open(path).to()):
        with pytest.raises(lazyckpt.DataError, match="'meta'"):
            read()


# -- containers


def test_over_four_gigabytes(tmp_path: Path) -> None:
    try:
        path, expected = torch_files.write_zip64(tmp_path)
    except RuntimeError as e:
        pytest.skip(f"{e}: 4.25 GiB would be written")
    view = lazyckpt.open(path)
    assert view["big"].shape == (17, 1 << 26) and view.numel == 17 * (1 << 26) + 3 + 35
    columns = view["big"].shape[1]
    for element, values in expected["big"].items():
        before, first = divmod(element, columns)
        n = min(len(values), columns - first)
        same(view["big"][before, first : first + n], values[:n], element)
        if n < len(values):  # goes on in the next row
            same(view["big"][before + 1, : len(values) - n], values[n:], element)
    across = view["big"][:, 0]
    same(across, torch.tensor([0.5, *[0.0] * 15, 4.0]), "a column")
    same(view["big"][-1:, -2:], torch.tensor([[8.0, 9.0]]), "the end")
    same(view["first"][...], expected["first"][0], "first")
    same(view["last"][...], expected["last"][0].view(5, 7), "last")
    path.unlink()


@pytest.mark.parametrize("kind", ["as it is", "stored again", "torch 1.13", "appended to"])
def test_archives_of_other_hands(torch_cases: dict[str, Case], tmp_path: Path, kind: str) -> None:
    """Rewritten by another zip tool (no alignment, no descriptors); as old versions of torch wrote it."""
    case, path = torch_cases["flat"], tmp_path / "renamed without a suffix"
    if kind in ("as it is", "appended to"):
        shutil.copy(case.path, path)
        if kind == "appended to":
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr("flat/extra/note.txt", "a record that torch does not know")
    else:
        with zipfile.ZipFile(case.path) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
            names = old.namelist()
            if kind == "torch 1.13":
                later = ("byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
                names = sorted(name for name in names if not name.endswith(later))
                names.sort(key=lambda name: not name.endswith("data.pkl"))
            for name in names:
                new.writestr(name, old.read(name))
    view = lazyckpt.open(path)
    assert view.format == "torch"
    for name, tensor in view.to().items():
        whole = case.truth["weights"][name]
        same(tensor, whole, name)
        for key in keys(whole.shape, name, 2):
            same(view[name][key], indexed(whole, key), (name, key))
    assert set(view) == set(case.truth["weights"])


def test_legacy_data_is_little_endian_whatever_its_header_says(tmp_path: Path) -> None:
    """Writer torch/csrc/serialization.cpp `THPStorage_writeFileRaw`: a big-endian machine swaps what it writes."""
    tree = {"a": torch.arange(5000, dtype=torch.int32), "b": torch.randn(3, 4, dtype=torch.complex128)}
    with mock.patch.object(sys, "byteorder", "big"):
        torch.save(tree, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    oracle = torch.load(tmp_path / "x.pt")
    for name, tensor in lazyckpt.open(tmp_path / "x.pt").to().items():
        same(tensor, tree[name], name)
        same(tensor, oracle[name], name)


def test_big_endian_agrees_with_torch(torch_cases: dict[str, Case]) -> None:
    case = torch_cases["big_endian"]
    oracle = torch.load(case.path)
    for name, tensor in lazyckpt.open(case.path).to().items():
        same(tensor, oracle[name], name)


def test_files_with_equal_pickles_share_what_is_in_them_and_no_bytes(tmp_path: Path) -> None:
    """As the ranks' files of one save: their storages lie elsewhere, and damage to one is its own."""
    for name, values in (("a.pt", torch.arange(6.0)), ("a_longer_name_than_that.pt", torch.arange(6.0) * 10)):
        torch.save({"pad": values[:1].clone(), "w": values.clone()}, tmp_path / name)
    store, pickles = LocalStore(tmp_path), Pickles()
    first, second = (read_torch_file(store, n, pickles) for n in ("a.pt", "a_longer_name_than_that.pt"))
    assert second.root is first.root and second.records != first.records
    for file, factor in ((first, 1.0), (second, 10.0)):
        extent = file.extent(file.root["w"], "w")
        assert extent.path == file.path
        raw = bytearray(store.read(extent.path, extent.offset, 24))
        assert torch.equal(torch.frombuffer(raw, dtype=torch.float32), torch.arange(6.0) * factor)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-30])
    with pytest.raises(lazyckpt.CorruptError):
        read_torch_file(store, "cut.pt", pickles)


def test_empty_tensors_cost_no_reads(tmp_path: Path) -> None:
    """ZeRO-3 saves every parameter empty: thousands of records of no bytes."""
    torch.save({f"p{n}": torch.empty(0) for n in range(1000)} | {"w": torch.arange(4)}, tmp_path / "empty.pt")
    view, counts = opened(tmp_path / "empty.pt")
    assert counts.requests < 20
    assert view["p7"][...].shape == (0,) and torch.equal(view["w"][...], torch.arange(4))


def test_misaligned_complex_numbers_can_be_used(tmp_path: Path) -> None:
    """A legacy file aligns nothing, and torch's kernels crash on a complex128 that does not stand at 16 bytes."""
    for pad in range(1, 17):
        tree = {"pad": torch.zeros(pad, dtype=torch.uint8), "c": torch.randn(6, 7, dtype=torch.complex128)}
        torch.save(tree, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
        view = lazyckpt.open(tmp_path / "x.pt")
        for tensor in (view["c"].to(copy=False), view.to(copy=False)["c"], view["c"][...]):
            same(tensor, tree["c"], pad)
            as_ints(tensor).mul_(2)
            same(tensor, tree["c"] * 2, pad)
        same(view["c"][:, 2], tree["c"][:, 2], pad)
        same(view["c"][::2, 1::3], tree["c"][::2, 1::3], pad)


def test_packages_of_code_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = torch_files.write_package(tmp_path)
    for name in (path, path.rename(tmp_path / "model.pt")):
        if not name.exists():
            continue
        with pytest.raises(lazyckpt.FormatError) as error:
            lazyckpt.open(name)
        assert "torch.package" in str(error.value) and str(name) in str(error.value)
        assert "save" in str(error.value).lower(), "what to do instead"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.pkl", b"\x80\x04K\x05."),
        ("model.pt", b"\x80\x02}q\x00."),
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(100)),
        ("notes.txt", b"just text"),
        ("x.bin", os.urandom(4096)),
        ("x.gguf", b"GGUF" + bytes(64)),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(lazyckpt.LazyckptError) as error:
        lazyckpt.open(tmp_path / name)
    assert isinstance(error.value, ValueError), "a FormatError or CorruptError"
    assert name in str(error.value)


@pytest.mark.parametrize(
    "spell", [str, Path, lambda p: os.path.relpath(p), lambda p: os.path.join(p.parent, ".", p.name)]
)
def test_ways_to_write_a_path(torch_cases: dict[str, Case], spell: Any) -> None:
    case = torch_cases["no_crc"]
    view = lazyckpt.open(spell(case.path))
    assert set(view) == set(case.truth["weights"])
    assert lazyckpt.CheckpointView(spell(case.path)).format == "torch"


def test_home_is_expanded(torch_cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = torch_cases["no_crc"]
    monkeypatch.setenv("HOME", str(case.path.parent))
    assert set(lazyckpt.open(f"~/{case.path.name}")) == set(case.truth["weights"])
