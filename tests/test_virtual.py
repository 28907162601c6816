"""References: any reader of zarr reads the rank files where they lie, without lazyckpt and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.dtypes import to_numpy
from lazyckpt.interop import zarr_dtypes as zarr_dtypes
from lazyckpt.testing.contract import open_case

from .conftest import DCP_FEW, DCP_NAMES, TORCH, TORCH_FEW, ZERO_FEW, ZERO_KINDS, complete
from .lanes import sampled
from .test_zarr_store import equal, nodes
from .writers import Case


def group_of(dest: Path) -> zarr.Group:
    """The references, as zarr opens them through fsspec."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.reference import LazyReferenceMapper
    from zarr.storage import FsspecStore

    references: Any = str(dest) if dest.suffix == ".json" else LazyReferenceMapper(str(dest), engine="pyarrow")
    fs = fsspec.filesystem("reference", fo=references, remote_protocol="file", asynchronous=True)
    return zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r")


def check(case: Case, dest: Path, **options: Any) -> dict[str, str]:
    view = open_case(case)
    left_out = view.to_virtual(dest, **options).left_out
    root = group_of(dest)
    assert root.attrs["lazyckpt"]["left_out"] == left_out
    there = nodes(view)
    assert set(left_out) >= {path for path in left_out if path not in there}
    for path, t in there.items():
        if path in left_out:
            assert path not in root
        else:
            equal(root[path][...], case.truth[path.split("/")[0]][t.name], path)
    return left_out


@pytest.mark.slow
@pytest.mark.parametrize("torch_save_case", sampled(TORCH, TORCH_FEW), indirect=True)
def test_files_of_torch(torch_save_case: Case, tmp_path: Path) -> None:
    check(torch_save_case, tmp_path / "refs.json")


@pytest.mark.slow
@pytest.mark.parametrize("dcp_case", sampled(DCP_NAMES, DCP_FEW), indirect=True)
def test_distributed_checkpoints(dcp_case: Case, tmp_path: Path) -> None:
    check(dcp_case, tmp_path / "refs.json")


@pytest.mark.slow
@pytest.mark.parametrize("zero_kind", sampled(ZERO_KINDS, ZERO_FEW), indirect=True)
def test_deepspeed(zero_kind: Case, tmp_path: Path) -> None:
    check(complete(zero_kind), tmp_path / "refs.json")


def test_megatron(megatron_kind: Case, tmp_path: Path) -> None:
    check(megatron_kind, tmp_path / "refs.json")


def parquet() -> None:
    for package in ("kerchunk", "pandas", "pyarrow"):
        pytest.importorskip(package, reason="references in parquet are written and read with it")


def test_parquet(torch_cases: dict[str, Case], dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    parquet()
    check(torch_cases["training"], tmp_path / "refs.parq")
    check(dcp_cases[next(iter(n for n in dcp_cases if n != "unknown_codec"))], tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "refs.parq"]


# -- a checkpoint of known pieces


@pytest.fixture
def truth() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "layers.0.up.weight": torch.randn(10, 6),
        "layers.0.up.bias": torch.randn(10),
        "half": torch.randn(4, 3).bfloat16(),
        "eighth": torch.randn(4, 3).to(torch.float8_e5m2),
        "step": torch.tensor(7),
    }


@pytest.fixture
def folder(truth: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    folder = tmp_path / "a checkpoint"
    folder.mkdir()
    save_file(truth, folder / "model.safetensors")
    return folder


READ = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "lazyckpt"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import fsspec, zarr
from zarr.storage import FsspecStore
fs = fsspec.filesystem("reference", fo=sys.argv[1], remote_protocol="file", asynchronous=True)
store = FsspecStore(fs, read_only=True, path="")
root = zarr.open_group(store, mode="r")
found = {path: root["weights"][path][...].tolist() for path in sys.argv[2:]}
import xarray
if "bits" in sys.argv[1]:
    tree = xarray.open_datatree(store, engine="zarr")
    for path in found:
        assert tree["weights/" + path].values.tolist() == found[path]
assert not {"torch", "lazyckpt"} & set(sys.modules)
print(json.dumps([found, root.attrs["lazyckpt"]["format"]]))
"""


def read_elsewhere(refs: Path, *names: str) -> tuple[dict[str, Any], str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", READ, str(refs), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found, form = json.loads(done.stdout)
    return found, form


@pytest.mark.slow
def test_without_lazyckpt_or_torch(folder: Path, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """What is bfloat16 zarr-python does not open by itself; it does not keep it from opening the rest."""
    view = lazyckpt.open(folder)
    assert view.to_virtual(tmp_path / "refs.json") == {}
    found, form = read_elsewhere(tmp_path / "refs.json", "layers/0/up/weight", "layers/0/up/bias", "step")
    assert form == view.format
    assert found["layers/0/up/weight"] == truth["layers.0.up.weight"].tolist()
    assert found["step"] == 7
    assert view.to_virtual(tmp_path / "bits.json", bits=True) == {}
    found, _ = read_elsewhere(tmp_path / "bits.json", "half", "eighth", "layers/0/up/bias", "step")
    assert found["half"] == to_numpy(truth["half"]).view(np.uint16).tolist()
    assert found["eighth"] == to_numpy(truth["eighth"]).view(np.uint8).tolist()
    assert group_of(tmp_path / "bits.json")["weights/half"].attrs["lazyckpt"] == {"name": "half", "holds": "bfloat16"}


def test_the_references_are_of_the_files(folder: Path, tmp_path: Path) -> None:
    lazyckpt.open(folder).to_virtual(tmp_path / "refs.json")
    told = json.loads((tmp_path / "refs.json").read_text())
    assert told["version"] == 1
    urls = {value[0] for value in told["refs"].values() if isinstance(value, list)}
    assert urls == {f"file://{folder}/model.safetensors"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a checkpoint", "refs.json"]


def test_what_is_left_out_and_why(tmp_path: Path) -> None:
    tree = {
        "fine": torch.randn(4, 4),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "turned": torch.randn(300, 300).t(),
    }
    (tmp_path / "in").mkdir()
    torch.save(tree, tmp_path / "in" / "m.pt")
    view = lazyckpt.open(tmp_path / "in" / "m.pt")
    left_out = view.to_virtual(tmp_path / "refs.json").left_out
    assert set(left_out) == {"weights/conj", "weights/turned"}
    assert "conjugated" in left_out["weights/conj"] and "90,000 references" in left_out["weights/turned"]
    root = group_of(tmp_path / "refs.json")
    assert root.attrs["lazyckpt"]["left_out"] == left_out and list(root["weights"]) == ["fine"]


def test_tensors_of_a_missing_file_are_left_out(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    import shutil

    case = next(
        c for n, c in dcp_cases.items() if n != "unknown_codec" and len(list(Path(c.path).glob("*.distcp"))) > 1
    )
    shutil.copytree(case.path, tmp_path / "in")
    lost = sorted((tmp_path / "in").glob("*.distcp"))[-1]
    lost.unlink()
    left_out = lazyckpt.open(tmp_path / "in").to_virtual(tmp_path / "refs.json").left_out
    assert left_out and all(lost.name in reason for reason in left_out.values())


@pytest.mark.parametrize("dest", ["x.json", "x"])
def test_overwrite_replaces_references(folder: Path, tmp_path: Path, dest: str) -> None:
    if dest == "x":
        parquet()
    view = lazyckpt.open(folder)
    first = view.to_virtual(tmp_path / dest)
    with pytest.raises(lazyckpt.DestinationError, match="exists already"):
        view.to_virtual(tmp_path / dest)
    assert view.to_virtual(tmp_path / dest, overwrite=True) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a checkpoint", dest]


def test_destinations(folder: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(folder)
    before = sorted(folder.iterdir())
    (tmp_path / "taken.json").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    for dest in ("taken.json", "full", "a checkpoint/model.safetensors", "a checkpoint"):
        with pytest.raises(lazyckpt.DestinationError):
            view.to_virtual(tmp_path / dest)
    assert view.to_virtual("memory://refs").paths == ("memory://refs",)
    for dest, format in ((tmp_path / "x", "csv"), (object(), None)):
        with pytest.raises(lazyckpt.FormatError):
            view.to_virtual(dest, format=format)
    assert (tmp_path / "taken.json").read_text() == "mine"
    assert sorted(folder.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a checkpoint", "full", "taken.json"]


def test_source_is_not_written_to_and_must_be_unchanged(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    import shutil

    case = next(iter(dcp_cases.values()))
    source = shutil.copytree(case.path, tmp_path / "in")
    view = lazyckpt.open(source)
    (source / "below").mkdir()
    for dest in (source / "below" / "refs.json", source / "below" / "new" / "refs"):
        with pytest.raises(lazyckpt.DestinationError, match="inside of the checkpoint"):
            view.to_virtual(dest)
    assert not list((source / "below").iterdir())
    file = sorted(source.glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(lazyckpt.ChangedFileError, match=file.name):
        view.to_virtual(tmp_path / "refs.json")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_beside_a_file(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "m.pt")
    assert lazyckpt.open(tmp_path / "m.pt").to_virtual(tmp_path / "m.json") == {}
    assert group_of(tmp_path / "m.json")["weights/w"][...].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_failure_leaves_no_folders(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.export.virtual._v2", lambda nodes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lazyckpt.open(folder).to_virtual(tmp_path / "some" / "where" / "refs")
    assert [p.name for p in tmp_path.iterdir()] == ["a checkpoint"]


def test_missing_packages_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = lazyckpt.open(folder)
    monkeypatch.setitem(sys.modules, "icechunk", None)
    with pytest.raises(lazyckpt.FormatError, match="install icechunk"):
        view.to_virtual(tmp_path / "repo", format="icechunk")
    monkeypatch.setattr("lazyckpt.export.virtual.find_spec", lambda name: None)
    with pytest.raises(lazyckpt.FormatError, match="kerchunk"):
        view.to_virtual(tmp_path / "refs")
    assert not (tmp_path / "repo").exists() and not (tmp_path / "refs").exists()


def test_references_to_urls(folder: Path, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/virtual/model.safetensors", (folder / "model.safetensors").read_bytes())
    lazyckpt.open("memory://virtual").to_virtual(tmp_path / "refs.json")
    from zarr.storage import FsspecStore

    fs = fsspec.filesystem("reference", fo=str(tmp_path / "refs.json"), remote_protocol="memory", asynchronous=True)
    root = zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r")
    equal(root["weights/half"][...], truth["half"], "half")


def test_icechunk(folder: Path, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    icechunk = pytest.importorskip("icechunk", reason="the store that is written to")
    with pytest.raises(lazyckpt.DestinationError, match="escape"):
        lazyckpt.open(folder).to_virtual(tmp_path / "repo", format="icechunk")
    folder = folder.rename(tmp_path / "checkpoint")
    view = lazyckpt.open(folder)
    assert view.to_virtual(tmp_path / "repo", format="icechunk") == {}
    may = icechunk.containers_credentials({f"file://{folder}/": None})
    repository = icechunk.Repository.open(
        icechunk.local_filesystem_storage(str(tmp_path / "repo")), authorize_virtual_chunk_access=may
    )
    root = zarr.open_group(repository.readonly_session("main").store, mode="r")
    for path, t in nodes(view).items():
        equal(root[path][...], truth[t.name], path)
    assert root.attrs["lazyckpt"]["format"] == view.format
    session = icechunk.Repository.create(icechunk.in_memory_storage()).writable_session("main")
    with pytest.raises(lazyckpt.DestinationError, match="VirtualChunkContainer"):
        view.to_virtual(session.store)
    with pytest.raises(lazyckpt.DestinationError, match="exists already"):
        view.to_virtual(tmp_path / "repo", format="icechunk")
