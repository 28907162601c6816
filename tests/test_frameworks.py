"""The contract on what further training frameworks wrote."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.oracle import same

from .writers import Case


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(framework_case: Case, check: Check) -> None:
    check(framework_case)


def test_format_and_problems(framework_case: Case) -> None:
    view = contract.open_case(framework_case)
    assert view.format == framework_case.info["format"]
    assert [problem.code for problem in view.problems] == framework_case.info.get("problems", [])


# -- OLMo-core


def test_steps_of_olmo_core(framework_cases: Mapping[str, Case]) -> None:
    case = framework_cases["olmo_core"]
    view = lazyckpt.open(case.path)
    meta: Any = view.meta
    assert Path(view.root).name == "step2" and meta["step"] == 2
    assert meta["train"]["rank"] == 0 and meta["config"] == {"model": {"d_model": 6}} and "version" in meta["metadata"]
    assert "train/rank0.pt/rng.cpu" in view.stored
    view = lazyckpt.open(case.path, tag="step1")
    for state, table in torch.load(case.path.parent / "older.pt").items():
        for name, tensor in table.items():
            same(view.states[state][name][...], tensor, (state, name))


def test_an_unfinished_step_of_olmo_core_is_passed_over(framework_cases: Mapping[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(framework_cases["olmo_core"].path, tmp_path / "copy"))
    (folder / "step2" / ".metadata.json").unlink()
    view = lazyckpt.open(folder)
    assert Path(view.root).name == "step1" and [p.code for p in view.problems] == ["unfinished-save"]
    assert [p.code for p in lazyckpt.open(folder / "step2").problems] == ["unfinished-save"]


def test_olmo_core_without_the_trainers_state(framework_cases: Mapping[str, Case], tmp_path: Path) -> None:
    case = framework_cases["olmo_core"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy")) / "step2"
    (folder / "train" / "rank0.pt").write_bytes(b"PK")
    view = lazyckpt.open(folder)
    assert [p.code for p in view.problems] == ["unreadable-file"]
    same(view["emb.weight"][...], case.truth["weights"]["emb.weight"], "emb")
    shutil.rmtree(folder / "train")
    assert [p.code for p in lazyckpt.open(folder).problems] == ["missing-file"]
