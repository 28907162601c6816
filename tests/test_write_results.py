"""What every ``to_...`` method returns, and the options that all of them take."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import WriteResult
from lazyckpt.export.options import DEFAULTS, WriteOptions
from lazyckpt.export.registry import NAMES, convertible, writer
from lazyckpt.jobs.publish import staging_path, unfinished

from . import gguf_models

Write = Callable[..., WriteResult]
FORMATS = {
    "safetensors": "x.safetensors",
    "torch": "x.pt",
    "dcp": "dcp",
    "universal": "universal",
    "zarr": "x.zarr",
    "gguf": "x.gguf",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    g = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(7))]
    folder = tmp_path / "source"
    folder.mkdir()
    weights = {name: torch.randn(16, 32, generator=g) for name in names}
    (folder / "config.json").write_text(json.dumps(gguf_models.config_of(weights)))  # which to_gguf needs
    torch.save(weights, folder / "model.pt")
    return folder / "model.pt"


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", [*FORMATS, "zip", "virtual"])
def test_paths_and_bytes(source: Path, tmp_path: Path, name: str) -> None:
    view = lazyckpt.open(source)
    dest = tmp_path / {"zip": "x.zip", "virtual": "x.json", **FORMATS}[name]
    result = getattr(view, "to_zarr" if name == "zip" else f"to_{name}")(dest)
    assert isinstance(result, WriteResult)
    assert result.paths == (dest,) and result.nbytes == size_of(dest)
    assert result == [dest] and list(result) == [dest] and result[0] == dest and len(result) == 1 and dest in result


def test_shards_are_a_sequence_of_paths(source: Path, tmp_path: Path) -> None:
    result = lazyckpt.open(source).to_safetensors(tmp_path / "out", max_shard_size="5KB")
    files = sorted((tmp_path / "out").iterdir())
    assert sorted(result) == files and len(result) == len(files) > 2
    assert result.nbytes == size_of(tmp_path / "out")
    assert result[-1].name == "model.safetensors.index.json" and result[:2] == list(result.paths[:2])
    assert result + [source] == [*result.paths, source]
    assert pickle.loads(pickle.dumps(result)) == result


def test_left_out_is_a_mapping() -> None:
    result = WriteResult((Path("dcp"),), {"args.rank": "a reason"}, 7)
    assert result["args.rank"] == "a reason" and "args.rank" in result and "other" not in result
    assert result == {"args.rank": "a reason"} and result != {}
    assert dict(result.items()) == dict(zip(result.keys(), result.values(), strict=True)) == result.left_out
    assert result.get("other") is None and result.get("args.rank") == "a reason"
    assert WriteResult((Path("dcp"),)) == {}


@pytest.mark.parametrize("name", FORMATS)
def test_every_method_takes_the_options(source: Path, tmp_path: Path, name: str) -> None:
    method: Write = getattr(lazyckpt.open(source), f"to_{name}")
    options: WriteOptions = {**DEFAULTS, "verify": True, "progress": False, "memory": "64MiB"}
    first = method(tmp_path / FORMATS[name], **options)
    with pytest.raises(lazyckpt.DestinationError, match="exists already"):
        method(tmp_path / FORMATS[name], **options)
    assert method(tmp_path / FORMATS[name], **{**options, "overwrite": True}) == first
    with pytest.raises(TypeError, match="unexpected keyword argument 'overwite'"):
        method(tmp_path / "other", overwite=True)
    assert not (tmp_path / "other").exists()
    assert DEFAULTS.keys() <= inspect.signature(method).parameters.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_resume_false_starts_anew(source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method: Write = getattr(lazyckpt.open(source), f"to_{name}")
    dest = tmp_path / FORMATS[name]

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(lazyckpt.DestinationError, match="call again"):
        patch.setattr("lazyckpt.jobs.write.check_unchanged", fail)
        method(dest)
    assert unfinished(dest)
    kept = {p.stat().st_ino: p.open("rb") for p in staging_path(dest).rglob("*") if p.is_file()}  # inodes stay taken
    try:
        method(dest, resume=False)
        files = [dest] if dest.is_file() else [p for p in dest.rglob("*") if p.is_file()]
        assert not {p.stat().st_ino for p in files} & kept.keys()
    finally:
        for file in kept.values():
            file.close()
    assert unfinished(dest) is None and sorted(os.listdir(tmp_path)) == sorted(["source", dest.name])


def test_the_registry_names_every_method() -> None:
    methods = {name.removeprefix("to_") for name in dir(lazyckpt.CheckpointView) if name.startswith("to_")}
    assert set(NAMES) == methods - {"frame", "xarray"}
    assert all(writer(name).name == name for name in NAMES)
    endings = [end for one in convertible() for end in one.endings]
    assert len(endings) == len(set(endings))


@pytest.mark.parametrize("name", ["dcp", "zarr"])
def test_dtype_option_equals_astype(source: Path, tmp_path: Path, name: str) -> None:
    view = lazyckpt.open(source)
    getattr(view, f"to_{name}")(tmp_path / "out", dtype=torch.bfloat16)
    found = lazyckpt.open(tmp_path / "out")
    for key, tensor in view.items():
        assert torch.equal(found[key][...], tensor[...].bfloat16())


def test_a_result_joins_lists_on_either_side(source: Path, tmp_path: Path) -> None:
    result = lazyckpt.open(source).to_safetensors(tmp_path / "a.safetensors")
    assert [tmp_path] + result == [tmp_path, *result] and result + [tmp_path] == [*result, tmp_path]
