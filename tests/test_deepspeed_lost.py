"""Every kind of DeepSpeed checkpoint with one file lost, cut short, or left over from a larger save, one at a time.

It opens, and the file is named in ``problems``; each tensor of each state reads equal to the truth, or raises an error
that names the file. Nothing disappears, and nothing reads wrong.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lazyckpt

from .writers import Case, bit_equal

# One of every layout.
LOSING = (
    "zero1", "bf16opt", "zero3", "zero0_bf16", "autotp_zero1", "autotp_zero2_dp2", "autotp_zero3_dp2",
    "pipe_zero1_fp32", "pipe_zero1_model_axis_dp2", "pipe_zero1_bf16opt_dp2",
    "moe_zero1_residual_dp4", "moe_zero2_mixed_ep", "megatron_3d_even_dp2", "zero1.universal",
    "zero3.universal", "megatron_3d.universal",
)  # fmt: skip


def _copy(source: Path, target: Path) -> Path:
    """Return a copy. No hard links: linking changes the ctime of files that other processes have opened."""
    return Path(shutil.copytree(source, target, copy_function=shutil.copyfile))


def _tag(folder: Path) -> Path:
    latest = folder / "latest"
    return folder / (latest if latest.exists() else folder / "latest_universal").read_text()


def _victims(case: Case) -> Iterator[Path]:
    """Paths of rank files, relative to the checkpoint. Of a universal one, each state of the largest and smallest
    parameter."""
    tag = _tag(case.path)
    if not (tag / "zero").exists():
        yield from (p.relative_to(case.path) for p in sorted(tag.glob("*.pt")))
        return
    names = sorted(case.truth["exp_avg"], key=lambda n: case.truth["exp_avg"][n].numel())
    for name in (names[0], names[-1]):
        yield from (p.relative_to(case.path) for p in sorted((tag / "zero" / name).glob("*.pt")))


def _damaged(case: Case, folder: Path, victim: Path, damage: str) -> Path:
    copy = _copy(case.path, folder)
    data = (copy / victim).read_bytes()
    (copy / victim).unlink()
    if damage == "half":
        (copy / victim).write_bytes(data[: len(data) // 2])
    return copy


def _only_model_states(case: Case, victim: Path) -> bool:
    """Nothing names the parameters without them."""
    names = [p.name for p in _tag(case.path).glob("*mp_rank_*_model_states.pt") if "expert" not in p.name]
    return names == [victim.name]


def _wrong(case: Case, view: lazyckpt.CheckpointView, named: str, numbered: bool) -> tuple[list[str], int]:
    """What neither equals the truth nor raises an error that names the file; and how many raised."""
    wrong, raised = [], 0
    for state, truth in case.truth.items():
        if (state == "weights" and "weights" not in view.states) or (numbered and state != "weights"):
            continue
        for name, tensor in truth.items():
            try:
                found = view.states[state][name]
                whole = tensor[: found.shape[0]] if name in case.info.get("vocab_tensors", ()) else tensor
                if not bit_equal(found[...], whole):
                    wrong.append(f"{state}/{name}: other values")
            except lazyckpt.MissingFileError as e:
                raised += 1
                if named not in str(e):
                    wrong.append(f"{state}/{name}: {e}")
            except (KeyError, lazyckpt.LazyckptError) as e:
                if "layer_files" in case.info and name in case.info["frozen"]:
                    continue  # named in its layer's file alone
                wrong.append(f"{state}/{name}: {type(e).__name__} {e}")
    return wrong, raised


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("damage", ["missing", "half"])
@pytest.mark.parametrize("name", LOSING)
def test_one_lost_file(kinds: dict[str, Case], tmp_path: Path, name: str, damage: str) -> None:
    case = kinds[name]
    numbered = "zero0" in name
    seen = 0
    for number, victim in enumerate(_victims(case)):
        copy = _damaged(case, tmp_path / str(number), victim, damage)
        if _only_model_states(case, victim):
            with pytest.raises(lazyckpt.LazyckptError, match=r"model.states|no rank files"):
                lazyckpt.open(copy)
            continue
        view = lazyckpt.open(copy)
        shown = str(victim.relative_to(victim.parts[0])) if "zero" in victim.parts else victim.name
        assert any(shown in line for line in view.problems), (victim, view.problems)
        assert repr(view) and view.tree() and view.explain()
        wrong, raised = _wrong(case, view, shown, numbered)
        assert not wrong, (victim, wrong[:5], len(wrong))
        seen += raised
    assert seen or numbered


def _copied(folder: Path, old: str, new: str) -> str:
    shutil.copyfile(_tag(folder) / old, _tag(folder) / new)
    return new


EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
EXTRA: dict[str, tuple[str, Callable[[Path], str]]] = {
    "a data-parallel rank": (
        "zero1",
        lambda f: _copied(
            f, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
        ),
    ),
    "a data-parallel rank of ZeRO-3": (
        "zero3",
        lambda f: _copied(f, "zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_2_mp_rank_00_model_states.pt"),
    ),
    "a model-parallel rank": (
        "zero1", lambda f: _copied(f, "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
    ),
    "a tensor-parallel rank": (
        "autotp_zero1", lambda f: _copied(f, "mp_rank_01_model_states.pt", "mp_rank_02_model_states.pt"),
    ),
    "a tensor-parallel rank's optimizer": (
        "autotp_zero1",
        lambda f: _copied(
            f, "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt"
        ),
    ),
    "a tensor-parallel rank of ZeRO-3": (
        "autotp_zero3_dp2",
        lambda f: _copied(f, "zero_pp_rank_0_mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_02_model_states.pt"),
    ),
    "a pipeline stage": (
        "pipe_zero1_fp32", lambda f: _copied(f, "mp_rank_01_model_states.pt", "mp_rank_02_model_states.pt"),
    ),
    "a layer": ("pipe_zero1_fp32", lambda f: _copied(f, "layer_02-model_states.pt", "layer_11-model_states.pt")),
    "a tensor-parallel rank of a layer": (
        "pipe_zero1_model_axis_dp2",
        lambda f: _copied(f, "layer_02-model_00-model_states.pt", "layer_02-model_01-model_states.pt"),
    ),
    "a layer of 3D": (
        "megatron_3d_even_dp2",
        lambda f: _copied(f, "layer_02-model_01-model_states.pt", "layer_02-model_02-model_states.pt"),
    ),
    "an expert": (
        "moe_zero1_residual_dp4",
        lambda f: _copied(f, EXPERT.format(0, 3), EXPERT.format(0, 4)),
    ),
    "a layer of experts": (
        "moe_zero2",
        lambda f: _copied(f, EXPERT.format(1, 0), EXPERT.format(2, 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EXTRA)
def test_one_file_left_over(kinds: dict[str, Case], tmp_path: Path, what: str) -> None:
    name, add = EXTRA[what]
    case = kinds[name]
    copy = _copy(case.path, tmp_path / "copy")
    before = lazyckpt.open(case.path)
    added = add(copy)
    view = lazyckpt.open(copy)
    assert [line for line in view.problems if line not in before.problems and added in line], view.problems
    assert (view.mesh, list(view.states)) == (before.mesh, list(before.states))
    for state, tensors in before.states.items():
        extra = set(view.states[state]) - set(tensors)
        assert all(n.startswith("11.") for n in extra), "a layer may be a frozen one"
        assert tensors.keys() <= view.states[state].keys()
    assert _wrong(case, view, "no file", False) == ([], 0)


MIXED = {
    "model states of ZeRO-3": ("zero1", "zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    "model states of a rank of ZeRO-3": ("zero1", "zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    "model states of ZeRO-1": ("zero3", "zero1", "mp_rank_00_model_states.pt"),
    "an optimizer file of ZeRO-3 in fp32": ("zero1", "zero3_fp32_dp3", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "a pipeline's, in fp32": ("pipe_zero1_dp2", "pipe_zero1_fp32", "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
}


@pytest.mark.parametrize("what", MIXED)
def test_a_file_of_another_save(kinds: dict[str, Case], tmp_path: Path, what: str) -> None:
    name, donor, file = MIXED[what]
    case = kinds[name]
    copy = _copy(case.path, tmp_path / "copy")
    shutil.copyfile(_tag(kinds[donor].path) / file, _tag(copy) / file)
    before, view = lazyckpt.open(case.path), lazyckpt.open(copy)
    (line,) = [line for line in view.problems if line not in before.problems]
    assert line.startswith(f"{_tag(copy).name}/{file} belongs to another save under the same tag")
    assert (view.format, view.mesh, list(view.states)) == (before.format, before.mesh, list(before.states))
    assert _wrong(case, view, "no file", False) == ([], 0)


def test_of_two_whole_saves_the_later_one_is_read(kinds: dict[str, Case], tmp_path: Path) -> None:
    for name, other in (("zero1", "zero3_fp32_dp3"), ("zero3_fp32_dp3", "zero1")):
        copy = shutil.copytree(kinds[name].path, tmp_path / name)
        for file in _tag(kinds[other].path).iterdir():
            shutil.copy(file, _tag(copy))
            os.utime(_tag(copy) / file.name, (1, 1))
        view = lazyckpt.open(copy)
        assert len(view.problems) >= 2
        assert _wrong(kinds[name], view, "no file", False) == ([], 0)


def test_a_folder_left_over_in_a_universal_checkpoint(kinds: dict[str, Case], tmp_path: Path) -> None:
    case = kinds["zero1.universal"]
    copy = _copy(case.path, tmp_path / "copy")
    _copy(_tag(copy) / "zero" / "embed.weight", _tag(copy) / "zero" / "old.weight")
    view = lazyckpt.open(copy)
    assert any("old.weight" in line for line in view.problems)
    assert _wrong(case, view, "no file", False) == ([], 0)


def test_a_folder_lost_from_a_universal_checkpoint(kinds: dict[str, Case], tmp_path: Path) -> None:
    case = kinds["zero1.universal"]
    copy = _copy(case.path, tmp_path / "copy")
    for path in (_tag(copy) / "zero" / "embed.weight").iterdir():
        path.unlink()
    (_tag(copy) / "zero" / "embed.weight").rmdir()
    view = lazyckpt.open(copy)
    assert any("zero/embed.weight" in line for line in view.problems)
    wrong, raised = _wrong(case, view, "zero/embed.weight", False)
    assert (wrong, raised) == ([], 3 + ("step" in case.truth))


def test_a_lost_file_of_expert_optimizer_states(kinds: dict[str, Case], tmp_path: Path) -> None:
    case = kinds["moe_zero0_fp32"]
    victim = Path(case.info["tag"]) / "expp_rank_0_mp_rank_00_optim_states.pt"
    view = lazyckpt.open(_damaged(case, tmp_path / "copy", victim, "missing"))
    assert any(victim.name in line for line in view.problems)
    assert _wrong(case, view, victim.name, numbered=True) == ([], 0)


@pytest.mark.parametrize("lost", [2, 3])
def test_an_expert_in_the_place_of_another(kinds: dict[str, Case], tmp_path: Path, lost: int) -> None:
    case = kinds["moe_zero1_fp32"]
    copy = _copy(case.path, tmp_path / "copy")
    victim = _tag(copy) / EXPERT.format(0, lost)
    shutil.copyfile(_tag(copy) / EXPERT.format(0, 5 - lost), victim)
    view = lazyckpt.open(copy)
    assert ("inconsistent-metadata", victim.name) in {(p.code, Path(p.path or "").name) for p in view.problems}
    wrong, raised = _wrong(case, view, victim.name, False)
    assert wrong == [] and raised
