"""Layer-wise optimizers: each data-parallel rank has the states of some parameters, in a file of its own."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

import lazyckpt
from lazyckpt.testing.oracle import same

from .writers import Case

DENSE, EXPERTS = "dp2_layerwise", "tp2_dp2_ep2_layerwise"


def edit(path: Path, pattern: bytes, new: bytes) -> None:
    """Change something in the pickle of a file, without the classes that it names."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            changed, count = re.subn(pattern, new, data, flags=re.DOTALL) if name.endswith("data.pkl") else (data, 1)
            assert count == 1, (name, count)
            archive.writestr(name, changed)


@pytest.fixture
def run(megatron_cases: dict[str, Case], tmp_path: Path) -> Path:
    return Path(shutil.copytree(megatron_cases[DENSE].path, tmp_path / "run"))


def test_matrices_have_momentum_and_the_rest_moments(megatron_cases: dict[str, Case]) -> None:
    for name in (DENSE, EXPERTS):
        view = lazyckpt.open(megatron_cases[name].path)
        moments, momentum = set(view.states["exp_avg"]), set(view.states["momentum_buffer"])
        assert not moments & momentum and moments | momentum == set(view)
        assert "embedding.word_embeddings.weight" in moments
    expert = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert "layer_wise_optimizer_1.pt" in view.states["momentum_buffer"][expert].explain()
    part = view.states["momentum_buffer"][expert][3:40, 1:9]
    same(part, megatron_cases[EXPERTS].truth["momentum_buffer"][expert][3:40, 1:9], "a slice")


def test_a_lost_file_loses_its_parameters_only(run: Path, megatron_cases: dict[str, Case]) -> None:
    lost = "iter_0000003/mp_rank_00/layer_wise_optimizer_1.pt"
    (run / lost).unlink()
    view = lazyckpt.open(run)
    assert [(p.code, p.path) for p in view.problems] == [("missing-file", lost)]
    truth = megatron_cases[DENSE].truth
    assert 0 < len(view.states["fp32"]) < len(truth["fp32"])
    for state in ("fp32", "exp_avg", "momentum_buffer"):
        for key, tensor in view.states[state].items():
            same(tensor[...], truth[state][key], (state, key))


def test_a_damaged_file(run: Path) -> None:
    path = "iter_0000003/mp_rank_00/layer_wise_optimizer_0.pt"
    (run / path).write_bytes((run / path).read_bytes()[:4000])
    view = lazyckpt.open(run)
    assert [(p.code, p.path) for p in view.problems] == [("unreadable-file", path)] and view.states["fp32"]


@pytest.mark.parametrize(
    ("pattern", "new"),
    [(b"dist_muon", b"just_muon"), (rb"(context_parallel_size(?:q.|r.{4})K)\x01", b"\\1\x02")],
    ids=["optimizer", "context-parallel"],
)
def test_states_of_writers_that_deal_otherwise_stay_undecided(run: Path, pattern: bytes, new: bytes) -> None:
    edit(run / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", pattern, new)
    view = lazyckpt.open(run)
    assert [p.code for p in view.problems] == ["undecided-name"] and list(view.states) == ["weights"]
    assert any("layer_wise_optimizer_1.pt" in name for name in view.stored)


def test_shapes_that_do_not_fit_leave_all_undecided(run: Path) -> None:
    """Of one rank, the file of another."""
    folder = run / "iter_0000003" / "mp_rank_00"
    shutil.copy(folder / "layer_wise_optimizer_0.pt", folder / "layer_wise_optimizer_1.pt")
    view = lazyckpt.open(run)
    assert [p.code for p in view.problems] == ["undecided-name"] and list(view.states) == ["weights"]
