"""Every kind of DeepSpeed checkpoint, by the real writer, against what the training processes held.

Also what DeepSpeed's own converters make of them: where they are wrong, the test says which fault it is.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.core.extents import Hole

from .writers import Case, bit_equal
from .writers.deepspeed_more import NAMES

# A plain optimizer numbers its parameters. Order and shapes leave one choice here: a group holds one bias only, and
# `between.bias` and `frozen.bias` are of one shape. (In 16 bit, as moe_zero0_fp16_ep1, the fp32 copies tell.)
UNDETERMINED = {"moe_zero0_fp32": {"between.bias", "frozen.bias"}}
# No file of a pipeline with a plain optimizer has the KEY in the name of a shared module, `tied_modules.KEY`: its
# names begin with the number of its layer.
WITHOUT_KEY = {"pipe_zero0_fp32", "pipe_zero0_fp16", "pipe_zero0_sgd_dp2"}
# Faults of ds_to_universal: it trusts param_slice_mappings, which round_robin_gradients makes wrong, and lets the last
# pipeline stage's copy of a tied module win.
CONVERTED_WRONG = {"zero2_round_robin_dp3.universal", "pipe_zero1_dp2.universal"}
_UNIVERSAL = ("fp32", "exp_avg", "exp_avg_sq")


def _wrong(case: Case, view: lazyckpt.CheckpointView) -> dict[str, list[str]]:
    """State -> names that do not read as the truth."""
    wrong: dict[str, list[str]] = {}
    vocab = case.info.get("vocab")
    for state, tensors in case.truth.items():
        if state == "weights" and "weights" not in view.states:
            continue  # ZeRO-3 stores none
        found = dict(view.states.get(state, {}))
        for name, truth in tensors.items():
            if name in found and found[name].shape[:1] == (vocab,):
                truth = truth[:vocab]  # the writer's padding of the vocabulary
            if name not in found or not bit_equal(found[name][...], truth):
                wrong.setdefault(state, []).append(name)
    return wrong


@pytest.mark.parametrize("name", [n for n in NAMES if n not in {*UNDETERMINED, *WITHOUT_KEY, *CONVERTED_WRONG}])
def test_every_state_equals_what_the_processes_held(kinds: dict[str, Case], name: str) -> None:
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert _wrong(case, view) == {}
    if not name.endswith(".universal"):
        degrees = view.mesh.tp, view.mesh.pp, view.mesh.dp
        assert degrees == tuple(case.info.get(k, 1) for k in ("tp", "pp", "dp"))
    else:  # a file for each state of each parameter, and none hides another in the raw namespace
        kept = [n for n in view.stored if n.split("/")[-2] in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")]
        assert len(kept) == sum(len(view.states.get(s, {}).keys() - view.aliases.keys()) for s in _UNIVERSAL)


@pytest.mark.parametrize("name", sorted(UNDETERMINED))
def test_states_without_names_stay_under_their_numbers(kinds: dict[str, Case], name: str) -> None:
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert any(line.code == "undecided-name" for line in view.problems)
    wrong = _wrong(case, view)
    assert wrong
    for state, names in wrong.items():  # all others have their names, and are right
        assert set(names) == UNDETERMINED[name] & case.truth[state].keys()
        assert not set(view.states[state]) & UNDETERMINED[name], "a frozen weight may not pass for a master either"
        numbered = view.states[state].select("optimizer of *")
        assert len(numbered) == case.info["ep"]  # every expert-parallel rank has it
        assert all(bit_equal(t[...], case.truth[state]["between.bias"]) for t in numbered.values())


@pytest.mark.parametrize("name", sorted(WITHOUT_KEY))
def test_a_shared_module_whose_key_no_file_has(kinds: dict[str, Case], name: str) -> None:
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert sum(line.code == "undecided-name" for line in view.problems) == 1
    assert any((line.code, line.path) == ("duplicate-tensor", "1.position") for line in view.problems)
    renamed = {
        state: {n.replace("tied_modules.embed", "1"): t for n, t in tensors.items()}
        for state, tensors in case.truth.items()
    }
    assert _wrong(replace(case, truth=renamed), view) == {}
    assert not any(n.startswith(("optimizer of", "tied_modules")) for s in view.states.values() for n in s)


def test_names_from_mappings_with_a_rank_lost(kinds: dict[str, Case], tmp_path: Path) -> None:
    """BF16_Optimizer over a pipeline at ZeRO-0: what a lost file alone names is gone, the rest keeps its place."""
    case = kinds["pipe_zero0_bf16_dp2"]
    for lost_rank, held in ((0, {"3.down.weight", "2.down.weight"}), (1, {"2.ln.weight", "2.gamma"})):
        folder = Path(shutil.copytree(case.path, tmp_path / str(lost_rank)))
        lost = folder / case.info["tag"] / f"bf16_zero_pp_rank_{lost_rank}_mp_rank_00_optim_states.pt"
        lost.unlink()
        view = lazyckpt.open(folder)
        assert any(lost.name in line for line in view.problems)
        for state in ("fp32", "exp_avg"):
            readable = set()
            for name, tensor in view.states[state].items():
                if name not in case.truth[state]:
                    continue
                try:
                    found = tensor[...]
                except lazyckpt.MissingFileError as e:
                    assert lost.name in str(e)
                    continue
                if name.startswith("tied_modules") and lost_rank == 0:
                    continue  # the second stage's copy, which differs
                assert state == "fp32" or bit_equal(found, case.truth[state][name]), name
                readable.add(name)
            assert held <= readable
            stage1 = {n for n in case.truth[state] if n.startswith(("5.", "6."))}
            assert stage1 <= readable


@pytest.mark.parametrize(
    "name", ["zero1_8bit", "zero2_8bit_dp3", "zero3_8bit", "zero3_8bit_sub_groups", "bf16opt_8bit"]
)
def test_states_of_another_length_than_the_parameters_are_not_cut(kinds: dict[str, Case], name: str) -> None:
    """8-bit optimizers keep a table and a scale per block of a flat group: they belong to no parameter."""
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert set(view.states) == set(case.truth) - ({"weights"} if case.info["stage"] == 3 else set())
    dtypes = {t.dtype for t in view.states["state1"].values()}
    assert dtypes == {torch.uint8, torch.float32}, "large groups in 8 bits, small ones not"
    for state in ("absmax1", "absmax2", "qmap1", "qmap2"):
        (line,) = [line for line in view.problems if repr(state) in line]
        assert "view.stored" in line
        stored = [n for n in view.stored if n.endswith(f".{state}")]
        assert stored and all(view.stored[n].ndim == 1 for n in stored)
    steps = str(view.meta["optimizer"]).split("'step': ")[1:]
    assert steps and all(line.startswith("3") for line in steps), "a plain number is in meta"


def test_states_per_parameter_need_not_have_its_shape(kinds: dict[str, Case]) -> None:
    view = lazyckpt.open(kinds["zero0_adafactor"].path)
    rows, columns = view.states["exp_avg_sq_row"], view.states["exp_avg_sq_col"]
    assert rows["embed.weight"].shape == view["embed.weight"].shape[:1]
    assert columns["embed.weight"].shape == view["embed.weight"].shape[1:]
    assert view.states["RMS"]["embed.weight"].shape == ()
    assert not view.problems
    view = lazyckpt.open(kinds["zero0_8bit"].path)
    assert view.states["state1"]["embed.weight"].shape == view["embed.weight"].shape
    assert view.states["qmap1"]["embed.weight"].shape == (256,)


def test_states_of_another_shape_are_not_merged_by_the_rules_of_weights(kinds: dict[str, Case]) -> None:
    view = lazyckpt.open(kinds["autotp_zero0_adafactor"].path)
    for state in ("exp_avg_sq_row", "exp_avg_sq_col"):
        (line,) = [line for line in view.problems if repr(state) in line]
        assert "tensor-parallel" in line
        with pytest.raises(lazyckpt.DataError, match="how its shards"):
            view.states[state]["lm_head.weight"][...]
        assert any(n.endswith(state) and t[...].numel() for n, t in view.stored.items())


@pytest.mark.parametrize("name", ["moe_zero0_mixed_ep_dp4", "moe_zero0_bf16_dp4", "moe_zero1_residual_dp4"])
def test_tied_parameters_beside_experts(kinds: dict[str, Case], name: str) -> None:
    """engine.py saves clones of what is beside experts, and no shared_params without ZeRO."""
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert dict(view.aliases) == case.info["tied"] == {"head.weight": "embed.weight"}
    assert bit_equal(view.states["fp32"]["head.weight"][...], case.truth["fp32"]["embed.weight"])
    assert view.states["weights"].keys() == case.truth["weights"].keys()


@pytest.mark.parametrize("name", ["pipe_zero1_pp3", "pipe_zero1_ties_dp2", "pipe_zero0_fp16_named_ties"])
def test_a_file_of_a_shared_module_used_again_adds_no_names(kinds: dict[str, Case], name: str) -> None:
    case = kinds[name]
    files = [file for file, known in case.info["layer_files"].items() if known["module"].startswith("tied_modules")]
    modules = {known["module"] for file, known in case.info["layer_files"].items() if file in files}
    assert len(files) > len(modules), "a module has two files"
    view = lazyckpt.open(case.path)
    for state in ("weights", "exp_avg"):
        assert view.states[state].keys() == case.truth[state].keys()
    assert any(n.startswith(max(files)) for n in view.stored)


def test_one_tensor_parallel_rank_has_a_padded_vocabulary_too(kinds: dict[str, Case]) -> None:
    case = kinds["megatron_tp1_dp2"]
    view = lazyckpt.open(case.path)
    assert case.info["padded_vocab"] > case.info["vocab"]
    for state in ("weights", "fp32", "exp_avg"):
        for name in case.info["vocab_tensors"]:
            assert view.states[state][name].shape[0] == case.info["vocab"]
    raw = {t.shape[0] for n, t in view.stored.items() if n.endswith("/word_embeddings.weight")}
    assert raw == {case.info["padded_vocab"]}


def _without_info(case: Case, folder: Path) -> Path:
    """The checkpoint without what it says about tensor parallelism."""
    shutil.copytree(case.path, folder)
    for path in folder.glob("*/*.pt"):
        saved = torch.load(path, weights_only=False)
        saved.pop("universal_checkpoint_info", None)
        saved.get("optimizer_state_dict", {}).pop("universal_checkpoint_info", None)
        torch.save(saved, path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autotp_zero0_tp4", "autotp_zero1_tp4"])
def test_ranks_that_hold_nothing_of_a_parameter(kinds: dict[str, Case], tmp_path: Path, name: str) -> None:
    """Three key-value heads over four ranks: a rank's shard has no elements, and no optimizer lists it."""
    case = kinds[name]
    places = case.info["tp_places"]
    assert any(place and [] in place[1] for place in places.values())
    words = {"cat0": "column", "cat1": "row", "replicated": "replicated"}
    rules = {n: words[rule] for n, rule in case.info["rules"].items()}
    view = lazyckpt.open(_without_info(case, tmp_path / "ckpt"), rules=rules)
    assert _wrong(case, view) == {}
    assert not any("not there" in f.extent.reason for s in view.states.values() for t in s.values()
                   for f in t.fragments if isinstance(f.extent, Hole))  # fmt: skip


@pytest.mark.parametrize("name", ["autoep_zero1_dp4", "autoep_zero2", "autoep_zero3_dp4", "autoep_zero0"])
def test_stacks_of_experts_with_a_rank_lost(kinds: dict[str, Case], tmp_path: Path, name: str) -> None:
    case = kinds[name]
    assert lazyckpt.open(case.path).mesh.ep == case.info["ep"] == 2
    folder = Path(shutil.copytree(case.path, tmp_path / "ckpt"))
    stage = case.info["stage"]
    lost = next(folder.glob("*/*expp_rank_1_*" if stage == 0 else "*/*zero_pp_rank_1_*optim_states.pt"))
    lost.unlink()
    view = lazyckpt.open(folder)
    experts = case.info["experts"]
    count = len(view.states["exp_avg"][experts[0]])
    for state in ("fp32", "exp_avg"):
        for param in experts:
            truth, tensor = case.truth[state][param], view.states[state][param]
            assert tensor.shape == truth.shape
            assert bit_equal(tensor[: count // 2], truth[: count // 2])
            if stage == 1 and "layers.1" in param:  # four ranks: this one holds layer 0's experts of the second half
                assert bit_equal(tensor[...], truth)
                continue
            with pytest.raises(lazyckpt.MissingFileError, match=r"rank.1"):
                tensor[count // 2]
            if case.info["dp"] == 4 and stage == 3:  # ... or of every stack of two experts the first
                assert bit_equal(tensor[-1], truth[-1])
    if stage == 3:
        return
    next(folder.glob("*/layer_1_expert_2_*")).unlink()
    view = lazyckpt.open(folder)
    assert any("expert 2" in line for line in view.problems)
    name = next(n for n in experts if "layers.1" in n)
    assert bit_equal(view[name][[0, 1, 3]], case.truth["weights"][name][[0, 1, 3]])
    with pytest.raises(lazyckpt.MissingFileError, match="expert 2"):
        view[name][1:3]


def test_experts_over_tensor_parallel_ranks_with_a_file_lost(kinds: dict[str, Case], tmp_path: Path) -> None:
    """Four ranks with an expert each: a lost optimizer file holds one expert, and a lost expert's file another."""
    case = kinds["autoep_autotp_zero2_ep4"]
    folder = Path(shutil.copytree(case.path, tmp_path / "ckpt"))
    next(folder.glob("*/*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()  # global rank 2
    next(folder.glob("*/layer_0_expert_1_mp_rank_01_model_states.pt")).unlink()
    view = lazyckpt.open(folder)
    assert {p.code for p in view.problems} == {"missing-file"} and any("tp=0, dp=1" in line for line in view.problems)
    assert view.mesh.ep == 4 and view.keys() == lazyckpt.open(case.path).keys()
    for name in case.info["experts"]:
        for state, lost in (("weights", 1), ("fp32", 2), ("exp_avg", 2)):
            tensor, truth = view.states[state][name], case.truth[state][name]
            kept = [n for n in range(4) if n != lost]
            assert bit_equal(tensor[kept], truth[kept])
            with pytest.raises(lazyckpt.MissingFileError):
                tensor[lost]


@pytest.mark.parametrize("name", ["autoep_autotp_zero0_fp32", "autoep_autotp_zero1", "autoep_autotp_zero3"])
def test_experts_over_tensor_parallel_ranks_have_no_problems(kinds: dict[str, Case], name: str) -> None:
    assert lazyckpt.open(kinds[name].path).problems == ()


def test_autotp_that_describes_nothing_cuts_no_vocabulary(kinds: dict[str, Case], tmp_path: Path) -> None:
    """deepspeed 0.18.8 and before write such files: the names of layers decide, and embeddings are whole."""
    case = kinds["autotp_zero1"]
    for config, whole in ((None, False), ("file.json", True)):
        folder = _without_info(case, tmp_path / str(config))
        for path in folder.glob("*/mp_rank_*") if config else ():
            torch.save(torch.load(path, weights_only=False) | {"ds_config": config}, path)
        view = lazyckpt.open(folder)
        unknown = {p.path for p in view.problems}
        assert ("model.embed_tokens.weight" in unknown) == whole
        for name in case.truth["weights"].keys() - unknown - {"lm_head.weight"}:
            assert bit_equal(view[name][...], case.truth["weights"][name]), name


@pytest.mark.parametrize(
    "layers", [None, [{"expert_key_prefix": "model.layers.0.mlp.experts", "num_experts": 1 << 60}]]
)
def test_stacks_that_no_file_describes_are_not_put_together(
    kinds: dict[str, Case], tmp_path: Path, layers: Any
) -> None:
    case = kinds["autoep_zero2"]
    folder = Path(shutil.copytree(case.path, tmp_path / "ckpt"))
    path = next(folder.glob("*/mp_rank_00_model_states.pt"))
    torch.save(torch.load(path, weights_only=False) | {"ds_autoep_layers": layers}, path)
    view = lazyckpt.open(folder)
    wrong = _wrong(case, view)
    assert all(set(names) == set(case.info["experts"]) for names in wrong.values())
    for state in wrong:
        assert not set(case.info["experts"]) & set(view.states[state])
    assert all(any(repr(n) in line for line in view.problems) for n in case.info["experts"])


@pytest.mark.parametrize("name", sorted(CONVERTED_WRONG))
def test_what_the_converter_gets_wrong_the_reader_gets_right(kinds: dict[str, Case], name: str) -> None:
    assert _wrong(kinds[name], lazyckpt.open(kinds[name].path))
    source = name.removesuffix(".universal")
    assert _wrong(kinds[source], lazyckpt.open(kinds[source].path)) == {}


def test_explain_tells_the_rule_and_its_source(kinds: dict[str, Case]) -> None:
    view = lazyckpt.open(kinds["megatron_3d"].path)
    rules = {name: t.explain() for name, t in view.items()}
    assert any("row_parallelism" in text for text in rules.values())
    assert any("original_vocab_size" in text for text in rules.values())
    assert any("replicated" in text for text in rules.values())


def test_the_user_overrules_the_checkpoint(kinds: dict[str, Case]) -> None:
    path = kinds["megatron_3d"].path
    name = next(n for n, t in lazyckpt.open(path).items() if "tp_replicated" in t.explain())
    plain = lazyckpt.open(path)[name]
    view = lazyckpt.open(path, rules={name: "column"})
    assert view[name].shape[0] == 2 * plain.shape[0]
    assert f"rules[{name!r}]" in view[name].explain()
