"""The names of DeepSpeed's rank files, in both directions, and the constants, against deepspeed's own."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lazyckpt import deepspeed as ours
from lazyckpt.core.index import FileInfo
from lazyckpt.deepspeed import RankFile, constants, parse_ckpt_name
from lazyckpt.formats.deepspeed.files import name_of_rank, rank_files
from lazyckpt.io.storage.base import Entry

pytestmark = pytest.mark.xdist_group("deepspeed")  # its import takes seconds: in one process only

ranks = st.integers(0, 12345)
folders = st.sampled_from(["", "ckpt", "/a b/global_step9", "runs/x/", "layer_01", "mp_rank_00_model_states.pt"])


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("deepspeed.checkpoint", reason="DeepSpeed's functions are the oracle")


# -- ranks -> name


@pytest.mark.slow
def test_the_three_functions_take_what_deepspeeds_take(theirs: Any) -> None:
    for name in ("get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank", "get_layer_ckpt_name_for_rank"):
        mine, peer = (list(inspect.signature(getattr(m, name)).parameters) for m in (ours, theirs))
        assert mine == peer


@pytest.mark.slow
@settings(deadline=None)
@given(folder=folders, dp=ranks, mp=ranks, layer=ranks, text=st.one_of(st.just("*"), st.text(max_size=4)))
def test_names_are_deepspeeds(theirs: Any, folder: str, dp: int, mp: int, layer: int, text: str) -> None:
    for base in (folder, Path(folder)):
        for rank in (f"{mp:02d}", text):
            assert ours.get_model_ckpt_name_for_rank(base, rank) == theirs.get_model_ckpt_name_for_rank(base, rank)
        for each in (dp, str(dp), "*"):
            expected = theirs.get_zero_ckpt_name_for_rank(base, each, mp)
            assert ours.get_zero_ckpt_name_for_rank(base, each, mp) == expected
        for key in (f"layer_{layer:02d}", text):
            expected = theirs.get_layer_ckpt_name_for_rank(base, key, mp)
            assert ours.get_layer_ckpt_name_for_rank(base, key, mp) == expected


# -- name -> ranks

files = st.one_of(
    st.builds(RankFile, st.just("model"), mp=ranks),
    st.builds(
        RankFile,
        st.sampled_from(["optim", "zero_model"]),
        dp=ranks,
        mp=ranks,
        prefix=st.sampled_from(["", "bf16_", "fp16_"]),
    ),
    st.builds(RankFile, st.just("layer"), layer=ranks, tp=st.none() | ranks),
    st.builds(RankFile, st.just("expert"), layer=st.none() | ranks, expert=ranks, mp=ranks),
    st.builds(RankFile, st.just("expert_optim"), ep=ranks, mp=ranks),
)


@settings(deadline=None)
@given(file=files, folder=folders)
def test_a_name_tells_what_it_was_made_of(file: RankFile, folder: str) -> None:
    assert parse_ckpt_name(file.name) == file
    assert parse_ckpt_name(os.path.join(folder, file.name)) == file
    assert parse_ckpt_name(Path(folder) / file.name) == file


@pytest.mark.slow
@settings(deadline=None)
@given(dp=ranks, mp=ranks, layer=ranks)
def test_the_inverse_of_deepspeeds_functions(theirs: Any, dp: int, mp: int, layer: int) -> None:
    model = theirs.get_model_ckpt_name_for_rank("d", f"{mp:02d}")
    zero = theirs.get_zero_ckpt_name_for_rank("d", dp, mp)
    of_layer = theirs.get_layer_ckpt_name_for_rank("d", f"layer_{layer:02d}", mp)
    for path, file in (
        (model, RankFile("model", mp=mp)),
        (zero, RankFile("optim", dp=dp, mp=mp)),
        (of_layer, RankFile("layer", layer=layer, tp=mp)),
    ):
        assert parse_ckpt_name(path) == file
        if file.kind != "layer":
            assert os.path.join("d", file.name) == path
    # the one for layers spells a name that the pipeline never writes: test_the_inverse_of_the_engines_names has it
    assert of_layer.replace("_model_states", "-model_states") == os.path.join(
        "d", RankFile("layer", layer=layer, tp=mp).name
    )


@pytest.mark.slow
@settings(deadline=None)
@given(dp=ranks, mp=ranks, layer=ranks, expert=ranks, stage3=st.booleans(), bf16=st.booleans())
def test_the_inverse_of_the_engines_names(dp: int, mp: int, layer: int, expert: int, stage3: bool, bf16: bool) -> None:
    """The methods of the engine and the pipeline that name what they write, on a stand-in for them."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.engine import DeepSpeedEngine as Engine
    from deepspeed.runtime.pipe.module import PipelineModule

    engine: Any = object.__new__(Engine)
    vars(engine).update(checkpoint_mp_rank=mp, zero_optimization_partition_weights=lambda: stage3)
    if stage3:
        path = Engine._get_ckpt_name(engine, "d", "tag", pp_placeholder=str(dp))
        assert parse_ckpt_name(path) == RankFile("zero_model", dp=dp, mp=mp)
    else:
        assert parse_ckpt_name(Engine._get_ckpt_name(engine, "d", "tag")) == RankFile("model", mp=mp)
    path = Engine._get_rank_zero_ckpt_name(engine, "d", "tag", mp, dp, bf16)
    assert parse_ckpt_name(path) == RankFile("optim", dp=dp, mp=mp, prefix="bf16_" if bf16 else "")
    path = Engine._get_optimizer_ckpt_name(engine, "d", "tag", dp)
    assert parse_ckpt_name(path) == RankFile("expert_optim", ep=dp, mp=mp)
    for number in (layer, -1):
        path = Engine._get_expert_ckpt_name("d", number, expert, "tag", checkpoint_mp_rank=mp)
        assert parse_ckpt_name(path) == RankFile("expert", layer=None if number < 0 else number, expert=expert, mp=mp)
    for shown, tp in (("", None), (f"model_{mp:02d}", mp)):
        topology = SimpleNamespace(get_rank_repr=lambda rank, shown=shown: shown)
        pipe: Any = SimpleNamespace(_local_start=0, global_rank=0, _grid=SimpleNamespace(_topo=topology))
        path = PipelineModule.ckpt_layer_path(pipe, "d", layer)
        assert parse_ckpt_name(path) == RankFile("layer", layer=layer, tp=tp)
        assert path == os.path.join("d", RankFile("layer", layer=layer, tp=tp).name)


@pytest.mark.parametrize(
    "name",
    [
        "", "latest", "zero_to_fp32.py", "mp_rank_00_model_states.pt.bak", "mp_rank__model_states.pt",
        "mp_rank_00_optim_states.pt", "amp_rank_00_model_states.pt", "mp_rank_00_model_states.pt/",
        "mp_rank_-1_model_states.pt",
        "tf32_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_optim_states.pt", "layer_01-optim_states.pt",
        "layer_01-model_00-model_01-model_states.pt", "layer_01-model_00_model_states.pt.tmp", "layer_-model_states.pt",
        "layer_1_expert_mp_rank_00_model_states.pt", "mp_rank_\u0661_model_states.pt", "mp_rank_00_model_states.pt\n",
        f"mp_rank_{'1' * 5000}_model_states.pt",
    ],
)  # fmt: skip
def test_other_names_are_none(name: str) -> None:
    assert parse_ckpt_name(name) is None


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_name_or_none(text: str) -> None:
    assume("\0" not in text)
    assert parse_ckpt_name(text) is None


def slot(file: RankFile) -> tuple[object, ...]:
    """What the reader tells files by: not by the prefix, and no rank is rank 0."""
    return file.kind, file.mp, file.dp, file.tp or 0, file.ep, file.layer or 0, file.expert


@settings(deadline=None)
@given(st.lists(files, max_size=12, unique_by=slot))
def test_the_reader_sorts_files_by_the_same_scheme(found: list[RankFile]) -> None:
    if any(file.kind == "zero_model" for file in found):  # the others are of another save then
        found = [file for file in found if file.kind != "model"]
    entry = Entry(FileInfo(1, 1), False)
    sorted_files = rank_files("tag", dict.fromkeys([file.name for file in found] + ["latest", "layer_1.txt"], entry))
    assert sorted_files.left_over == []
    tables: dict[str, dict[Any, str]] = {
        "model": sorted_files.model, "zero_model": sorted_files.zero_model, "optim": sorted_files.optim,
        "layer": sorted_files.layers, "expert": sorted_files.experts, "expert_optim": sorted_files.expert_optim,
    }  # fmt: skip
    for kind, table in tables.items():
        assert sorted(table.values()) == sorted(f"tag/{file.name}" for file in found if file.kind == kind)
    for file in found:
        if file.kind in ("optim", "zero_model"):
            assert tables[file.kind][file.dp, file.mp] == f"tag/{file.name}"
            assert name_of_rank(f"tag/{file.name}", 7, 8) == f"tag/{replace(file, dp=7, mp=8).name}"


# -- constants


@pytest.mark.slow
def test_the_constants_are_deepspeeds() -> None:
    peer = pytest.importorskip("deepspeed.checkpoint.constants")
    expected = {name: value for name, value in vars(peer).items() if name.isupper()}
    found = {name: getattr(constants, name) for name in constants.__all__}
    assert found == expected
    assert {n: type(v) for n, v in found.items()} == {n: type(v) for n, v in expected.items()}
    assert all(getattr(ours, name) == value and name in ours.__all__ for name, value in expected.items())


def test_every_constant_has_a_comment() -> None:
    """Above it or above the run of lines that it stands in."""
    told = False
    for line in inspect.getsource(constants).splitlines():
        told = bool(line) and (told or line.startswith("# "))
        if re.match(r"[A-Z]\w* = ", line):
            assert told, line
