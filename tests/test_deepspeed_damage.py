"""DeepSpeed folders as one finds them: rank files lost or left over, several tags, no `latest`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.testing.oracle import same

from .conftest import complete
from .test_deepspeed_zero import ranks_of
from .writers import Case

TAG = "global_step3"


@pytest.fixture
def copied(zero_cases: dict[str, Case], tmp_path: Path) -> Callable[[str], tuple[Case, Path]]:
    """A case's checkpoint, to be spoiled: (case, the copy)."""

    def copy(name: str) -> tuple[Case, Path]:
        case = zero_cases[name]
        return case, Path(shutil.copytree(case.path, tmp_path / name))

    return copy


def _spoil(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: {"half": len(data) // 2, "short": len(data) - 100, "empty": 0}[damage]])


def _check_rest(view: lazyckpt.CheckpointView, case: Case, lost: Path, rank: int) -> None:
    """What does not touch the lost rank reads; what touches it raises, naming the file."""
    truth = complete(case).truth
    whole_ones = broken = rows = 0
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        for name, whole in case.truth[state].items():
            t = view.states[state][name]
            assert (t.shape, t.dtype) == (whole.shape, whole.dtype)
            gone = ranks_of(case, name) == rank
            if not gone.any():
                same(t[...], whole, (state, name))
                whole_ones += 1
                continue
            broken += 1
            for read in (lambda t=t: t[...], t.to, t.numpy, t.explain):
                with pytest.raises(lazyckpt.MissingFileError) as error:
                    read()
                assert lost.name in str(error.value) and name in str(error.value)
            for row in range(len(whole)):
                if not gone[row].any():
                    same(t[row], whole[row], (state, name, row))
                    rows += 1
                else:
                    with pytest.raises(lazyckpt.MissingFileError, match=lost.name):
                        t[row]
    assert broken and rows, "some are not whole, and some rows of those are"
    assert whole_ones or (case.info["stage"] == 3 and rank == 0), "rank 0 of ZeRO-3 holds a piece of everything"
    for name, whole in truth.get("weights", {}).items():
        same(view.states["weights"][name][...], whole, name)
    with pytest.raises(lazyckpt.MissingFileError, match=lost.name):
        view.states["exp_avg"].to()


@pytest.mark.product
@pytest.mark.parametrize("damage", ["missing", "half", "short", "empty"])
@pytest.mark.parametrize("name", ["zero1_bf16_dp3", "zero2_fp32_dp4", "zero3_bf16_dp3", "zero3_fp32_dp4"])
@pytest.mark.parametrize("rank", [0, 1, -1])
def test_a_lost_optimizer_file(copied: Callable[[str], tuple[Case, Path]], name: str, damage: str, rank: int) -> None:
    case, folder = copied(name)
    rank %= case.info["dp"]
    (lost,) = folder.glob(f"{TAG}/*zero_pp_rank_{rank}_*optim_states.pt")
    _spoil(lost, damage)
    view = lazyckpt.open(folder)
    assert view.format == f"deepspeed-zero{case.info['stage']}"
    named = [line for line in view.problems if lost.name in line]
    assert len(named) == 1, view.problems
    assert repr(view) and view.tree() and view.explain() and view.nbytes
    _check_rest(view, case, lost, rank)


@pytest.mark.parametrize("name", ["zero2_fp32_dp4", "zero3_fp32_dp4"])
def test_several_lost_files(copied: Callable[[str], tuple[Case, Path]], name: str) -> None:
    case, folder = copied(name)
    for rank in (1, 2):
        (lost,) = folder.glob(f"{TAG}/zero_pp_rank_{rank}_*optim_states.pt")
        _spoil(lost, "missing" if rank == 1 else "half")
    view = lazyckpt.open(folder)
    for param, whole in case.truth["fp32"].items():
        owners = ranks_of(case, param)
        gone = (owners == 1) | (owners == 2)
        if gone.any():
            with pytest.raises(lazyckpt.MissingFileError) as error:
                _ = view.states["fp32"][param][...]
            for rank in (1, 2):
                assert (f"zero_pp_rank_{rank}_" in str(error.value)) == bool((owners == rank).any())
        else:
            same(view.states["fp32"][param][...], whole, param)


@pytest.mark.parametrize("damage", ["missing", "half"])
def test_lost_model_states_of_another_rank(copied: Callable[[str], tuple[Case, Path]], damage: str) -> None:
    """ZeRO-3 cuts frozen parameters over the ranks' model states; all else is in the optimizer's files."""
    case, folder = copied("zero3_bf16_dp3")
    lost = folder / TAG / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    _spoil(lost, damage)
    view = lazyckpt.open(folder)
    assert any(lost.name in line for line in view.problems)
    truth = complete(case).truth
    for name, whole in truth["fp32"].items():
        if name in case.info["frozen"]:
            with pytest.raises(lazyckpt.MissingFileError, match=lost.name):
                _ = view[name][...]
            width = -(-whole.numel() // 3)
            rows = 2 * width // whole[0].numel()  # these lie on ranks 0 and 1
            assert rows
            same(view[name][:rows], whole[:rows], name)
        else:
            same(view[name][...], whole, name)


@pytest.mark.parametrize("name", ["zero2_fp32_dp2", "zero3_fp32_dp2"])
def test_lost_model_states_of_rank_0(copied: Callable[[str], tuple[Case, Path]], name: str) -> None:
    _, folder = copied(name)
    for path in (folder / TAG).glob("*model_states.pt"):
        path.unlink()
    with pytest.raises(lazyckpt.MissingFileError) as error:
        lazyckpt.open(folder)
    assert "model states" in str(error.value) or "model_states" in str(error.value)


@pytest.mark.parametrize("name", ["zero2_bf16_dp2", "zero3_bf16_dp2"])
def test_no_optimizer_files_at_all(copied: Callable[[str], tuple[Case, Path]], name: str) -> None:
    case, folder = copied(name)
    for path in (folder / TAG).glob("*optim_states.pt"):
        path.unlink()
    view = lazyckpt.open(folder)
    assert any("optim_states" in p for p in view.problems if p.code == "missing-optimizer")
    if case.info["stage"] == 3:
        readable = set(case.info["buffers"]) | set(case.info["frozen"])
        assert set(view) == readable
        for key in readable:
            same(view[key][...], case.truth["weights"][key], key)
    else:
        assert list(view.states) == ["weights"]
        for key, whole in case.truth["weights"].items():
            same(view[key][...], whole, key)


@pytest.mark.parametrize("name", ["zero1_bf16_dp3", "zero3_bf16_dp3"])
def test_files_left_over_from_a_larger_run(
    copied: Callable[[str], tuple[Case, Path]], zero_cases: dict[str, Case], name: str
) -> None:
    """A save of 3 ranks over one of 4 with the same tag leaves the fourth rank's files."""
    case, folder = copied(name)
    larger = zero_cases[name.replace("dp3", "dp4")].path / TAG
    left = list(larger.glob("*zero_pp_rank_3_*.pt"))
    assert left
    for path in left:
        shutil.copy(path, folder / TAG)
    view = lazyckpt.open(folder)
    assert view.mesh.dp == 3
    for path in left:
        assert any(path.name in line for line in view.problems), view.problems
    for state, tensors in complete(case).truth.items():
        for key, tensor in view.states[state].to().items():
            same(tensor, tensors[key], (state, key))


# -- MiCS: ZeRO-3 that cuts over groups of ranks, each of which holds everything


def _as_mics(folder: Path, shard_size: int, count: bool = True) -> None:
    """What MiCS leaves of twice as many ranks: the first shard group's files, as ZeRO-3 over that group writes them."""
    for path in (folder / TAG).glob("*.pt"):
        saved = torch.load(path, weights_only=False)
        saved["ds_config"]["zero_optimization"]["mics_shard_size"] = shard_size
        if "dp_world_size" in saved:
            saved["dp_world_size"] *= 2
        else:
            assert saved["optimizer_state_dict"]["partition_count"] == shard_size
            if not count:
                del saved["optimizer_state_dict"]["partition_count"]
        torch.save(saved, path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3_bf16_dp2", "zero3_fp32_dp3", "zero3_sub_groups"])
@pytest.mark.parametrize("count", [True, False])
def test_mics(copied: Callable[[str], tuple[Case, Path]], name: str, count: bool) -> None:
    case, folder = copied(name)
    _as_mics(folder, case.info["dp"], count)
    view = lazyckpt.open(folder)
    assert view.mesh.dp == 2 * case.info["dp"]
    assert not any(line.code == "missing-file" for line in view.problems)
    for state, tensors in complete(case).truth.items():
        for key, tensor in view.states[state].to().items():
            same(tensor, tensors[key], (state, key))
    lost = next((folder / TAG).glob("*zero_pp_rank_1_*optim_states.pt"))
    lost.unlink()
    view = lazyckpt.open(folder)
    assert [line for line in view.problems if lost.name in line]
    _check_rest(view, case, lost, 1)


def test_mics_is_not_believed_against_the_sizes(copied: Callable[[str], tuple[Case, Path]]) -> None:
    case, folder = copied("zero3_fp32_dp4")
    for path in (folder / TAG).glob("*.pt"):
        saved = torch.load(path, weights_only=False)
        saved["ds_config"]["zero_optimization"]["mics_shard_size"] = 2
        torch.save(saved, path)
    for state, tensors in complete(case).truth.items():
        for key, tensor in lazyckpt.open(folder).states[state].to().items():
            same(tensor, tensors[key], (state, key))


# -- tags


def _with_tags(copied: Callable[[str], tuple[Case, Path]]) -> tuple[Case, Case, Path]:
    """A folder with the tags of two different runs; `latest` names the first."""
    first, folder = copied("zero2_bf16_dp2")
    second, other = copied("zero3_fp32_dp2")
    shutil.copytree(other / TAG, folder / "global_step20")
    return first, second, folder


def _is(view: lazyckpt.CheckpointView, case: Case) -> bool:
    truth = complete(case).truth
    return set(view.states) == set(truth) and torch.equal(view.states["fp32"]["mix"][...], truth["fp32"]["mix"])


def test_the_tag_that_latest_names(copied: Callable[[str], tuple[Case, Path]]) -> None:
    first, second, folder = _with_tags(copied)
    assert _is(lazyckpt.open(folder), first) and not _is(lazyckpt.open(folder), second)
    (folder / "latest").write_text("global_step20\n")
    assert _is(lazyckpt.open(folder), second)
    assert lazyckpt.open(folder).meta["tag"] == "global_step20"


def test_a_tag_that_is_asked_for(copied: Callable[[str], tuple[Case, Path]]) -> None:
    first, second, folder = _with_tags(copied)
    assert _is(lazyckpt.open(folder, tag=TAG), first)
    assert _is(lazyckpt.open(folder, tag="global_step20"), second)
    with pytest.raises(lazyckpt.MissingFileError) as error:
        lazyckpt.open(folder, tag="global_step21")
    for word in ("global_step21", TAG, "global_step20"):
        assert word in str(error.value)


def test_no_latest(copied: Callable[[str], tuple[Case, Path]]) -> None:
    first, second, folder = _with_tags(copied)
    (folder / "latest").unlink()
    with pytest.raises(lazyckpt.FormatError) as error:
        lazyckpt.open(folder)
    assert TAG in str(error.value) and "global_step20" in str(error.value) and "tag=" in str(error.value)
    assert _is(lazyckpt.open(folder, tag="global_step20"), second)
    shutil.rmtree(folder / "global_step20")
    assert _is(lazyckpt.open(folder), first), "the only one there is"


@pytest.mark.parametrize("content", ["global_step99", "", "../elsewhere", "/", "x" * 5000])
def test_a_latest_that_leads_nowhere(copied: Callable[[str], tuple[Case, Path]], content: str) -> None:
    first, _, folder = _with_tags(copied)
    (folder / "latest").write_text(content)
    with pytest.raises(lazyckpt.LazyckptError) as error:
        lazyckpt.open(folder)
    assert "latest" in str(error.value) and "tag" in str(error.value)
    assert _is(lazyckpt.open(folder, tag=TAG), first), "what is asked for needs no latest"


def test_the_folder_of_a_tag(copied: Callable[[str], tuple[Case, Path]]) -> None:
    first, second, folder = _with_tags(copied)
    assert _is(lazyckpt.open(folder / TAG), first)
    assert _is(lazyckpt.open(str(folder / "global_step20")), second)
    assert _is(lazyckpt.open(f"{folder}/{TAG}/"), first)


def test_one_rank_file_on_its_own(zero_cases: dict[str, Case]) -> None:
    case = zero_cases["zero2_bf16_dp2"]
    view = lazyckpt.open(case.path / TAG / "mp_rank_00_model_states.pt")
    assert view.format == "torch"
    for name, whole in case.truth["weights"].items():
        same(view[f"module.{name}"][...], whole, name)


def test_tags_with_large_numbers_are_listed_in_natural_order(copied: Callable[[str], tuple[Case, Path]]) -> None:
    _, _, folder = _with_tags(copied)
    shutil.copytree(folder / TAG, folder / "global_step100")
    (folder / "latest").unlink()
    with pytest.raises(lazyckpt.FormatError) as error:
        lazyckpt.open(folder)
    text = str(error.value)
    assert text.index(TAG) < text.index("global_step20") < text.index("global_step100")


def test_a_tag_with_a_slash(copied: Callable[[str], tuple[Case, Path]]) -> None:
    """engine.py `save_checkpoint` joins folder and tag, whatever is in it."""
    case, folder = copied("zero2_bf16_dp2")
    (folder / "runs").mkdir()
    (folder / TAG).rename(folder / "runs" / TAG)
    (folder / "latest").write_text(f"runs/{TAG}")
    assert _is(lazyckpt.open(folder), case)
    assert lazyckpt.open(folder, tag=f"runs/{TAG}").meta["tag"] == f"runs/{TAG}"
    for tag in (
        "runs/../runs",
        f"../{folder.name}/runs/{TAG}",
        f"/{folder}/runs/{TAG}",
        f"runs/{TAG}/latest",
        "runs//",
    ):
        with pytest.raises(lazyckpt.MissingFileError):
            lazyckpt.open(folder, tag=tag)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("zero2_bf16_dp2", "zero3_bf16_dp2"),
        ("zero2_bf16_dp2", "zero3_fp32_dp2"),
        ("zero2_fp32_dp2", "zero2_bf16_dp2"),
        ("zero3_fp32_dp2", "zero1_bf16_dp2"),
    ],
)
def test_a_save_of_another_kind_over_an_old_one(copied: Callable[[str], tuple[Case, Path]], new: str, old: str) -> None:
    """The same tag, another stage or dtype: other names, so that the old files stay."""
    case, folder = copied(new)
    _, other = copied(old)
    stale = {path.name for path in (other / TAG).iterdir()} - {path.name for path in (folder / TAG).iterdir()}
    for name in stale:
        (folder / TAG / name).write_bytes((other / TAG / name).read_bytes())
    for path in (folder / TAG).iterdir():
        at = 1_000_000_000 if path.name in stale else 1_000_000_001
        os.utime(path, (at, at))
    view = lazyckpt.open(folder)
    truth = complete(case).truth
    assert stale and set(view.states) == set(truth)
    for state in truth:
        assert view.states[state].keys() == truth[state].keys()
        same(view.states[state]["mix"][...], truth[state]["mix"], state)
    for name in stale:
        assert any(line.startswith(f"{TAG}/{name} ") and line.code == "left-over-file" for line in view.problems)


def test_files_of_different_saves_alone(copied: Callable[[str], tuple[Case, Path]]) -> None:
    """ZeRO-3's model states beside the optimizer states of ZeRO-2."""
    case, folder = copied("zero2_fp32_dp2")
    _, other = copied("zero3_fp32_dp2")
    (folder / TAG / "mp_rank_00_model_states.pt").unlink()
    for path in (other / TAG).glob("*_model_states.pt"):
        (folder / TAG / path.name).write_bytes(path.read_bytes())
    view = lazyckpt.open(folder)
    assert sum(line.code == "missing-tensor" for line in view.problems) == 1
    assert not set(view) & set(case.truth["exp_avg"])
    with pytest.raises(lazyckpt.MissingFileError, match="one save"):
        view["mix"]


def test_shared_params_that_mislead(copied: Callable[[str], tuple[Case, Path]]) -> None:
    """engine.py `_get_shared_params` goes by data_ptr(), which is 0 for all that has no elements; and
    exclude_frozen_parameters leaves the second name of a frozen parameter in the module, without the first."""
    case, folder = copied("zero2_no_frozen")
    path = folder / TAG / "mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=False)
    assert saved["module"]["empty"].numel() == 0 and "pos" not in saved["module"]
    saved["module"] |= {"hollow": torch.empty(2, 0, 3), "second_pos": torch.arange(6.0).view(2, 3)}
    saved["shared_params"] |= {"hollow": "empty", "second_pos": "pos"}
    torch.save(saved, path)
    view = lazyckpt.open(folder)
    assert view.states["fp32"]["hollow"].shape == (2, 0, 3)
    same(view["second_pos"][...], torch.arange(6.0).view(2, 3), "second_pos")
    assert dict(view.aliases) == case.info["tied"]


def test_a_name_of_zero3_that_no_file_ties(copied: Callable[[str], tuple[Case, Path]]) -> None:
    """engine.py `_get_shared_params` walks named_children, which has a module once: of the second name of a module
    within one parent, ZeRO-3 keeps nothing but an empty tensor."""
    _, folder = copied("zero3_bf16_dp2")
    for path in (folder / TAG).glob("*_model_states.pt"):
        saved = torch.load(path, weights_only=False)
        saved["module"]["norm_again.weight"] = torch.empty(0)
        torch.save(saved, path)
    view = lazyckpt.open(folder)
    assert "norm_again.weight" not in view
    assert sum("'norm_again.weight'" in line for line in view.problems) == 1
