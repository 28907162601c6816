"""`lazyckpt verify` of checkpoints in buckets: what it finds is what it finds locally, with few requests."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import lazyckpt

from .servers.fixtures import Cloud
from .writers import Case

FEW = 12  # requests for each file; a file of these checkpoints holds up to 60 archives, of which each took four or more


@pytest.fixture(params=["dcp-fsdp2_uneven", "megatron-tp2_pp2_bf16"])
def folder(request: pytest.FixtureRequest) -> Path:
    """A checkpoint whose tensors are archives inside of files; those of Megatron are of stacked layers, too."""
    group, _, name = request.param.partition("-")
    if group == "dcp":
        cases: Mapping[str, Case] = request.getfixturevalue("dcp_cases")
        return cases[name].path
    top: Path = request.getfixturevalue("megatron_folder") / name / "dist"
    return next(top.rglob(".metadata")).parent


def test_few_requests(folder: Path, s3: Cloud) -> None:
    files = sum(path.is_file() for path in folder.rglob("*"))
    url = s3.put_folder(folder, "run")
    s3.server.reset()
    report = lazyckpt.verify(url, storage_options=s3.options)
    assert s3.server.counts().requests <= FEW * files
    assert report.findings == lazyckpt.verify(folder).findings


@pytest.mark.parametrize("nbytes", [4, 1000], ids=["data", "structure"])
def test_damage_is_found(folder: Path, s3: Cloud, tmp_path: Path, nbytes: int) -> None:
    """Some archive is not what was written, or none at all; the others are looked at all the same."""
    shutil.copytree(folder, tmp_path / "run")
    victim = max((tmp_path / "run").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    middle = data.index(b"PK\x07\x08", len(data) // 2) - nbytes  # behind the data of a record
    data[middle : middle + nbytes] = bytes(0xFF ^ byte for byte in data[middle : middle + nbytes])
    victim.write_bytes(data)
    found = lazyckpt.verify(s3.put_folder(tmp_path / "run", "run"), storage_options=s3.options).findings
    assert {finding.file for finding in found if finding.severity == "error"} == {victim.name}
    assert [(one.code, one.file, one.tensor) for one in found] == [
        (one.code, one.file, one.tensor) for one in lazyckpt.verify(tmp_path / "run").findings
    ]
