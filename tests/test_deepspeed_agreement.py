"""DeepSpeed's own tools beside lazyckpt: zero_to_fp32 and ds_to_universal on every checkpoint of the writers.

Where a tool works, the two agree bit for bit, name by name; what it refuses, leaves out or gets wrong is listed here
with its reason, and has to be seen exactly as listed. So this file is the list of the tools' faults (deepspeed 0.19).
That lazyckpt is right where they differ is tested against the training processes (test_deepspeed_zero, _kinds).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lazyckpt

from . import recordings
from .conftest import need, once
from .lanes import sampled
from .writers import Case, bit_equal
from .writers.deepspeed_more import SPECS, TOOLS
from .writers.deepspeed_outcomes import fp32_of, outcomes

pytestmark = pytest.mark.slow

MORE = {f"kind-{n}": n for n in SPECS}  # (both families have a zero3_fp32_dp3)
NAMES = [*sorted(recordings.GROUPS["deepspeed_zero"].names), *MORE]
# The default lane: each stage, option, kind of model and refusal.
SOME = (
    "zero1_fp32_dp1", "zero1_bf16_dp3", "zero1_fp16_dp3", "zero2_bf16_dp2", "zero3_bf16_dp3", "zero3_fp32_dp4",
    "zero2_round_robin", "zero1_aligned", "zero2_elastic", "zero3_sub_groups", "zero1_no_frozen", "zero3_no_frozen",
    "zero2_fp16_amsgrad", "zero2_sgd", "zero2_fp32_lion", "zero3_lion", "zero2_dp11", "bf16_optimizer_dp1",
    "bf16_optimizer_dp3", "zero3_client_state", "kind-zero0_fp32", "kind-zero0_8bit", "kind-zero2_round_robin_dp3",
    "kind-zero3_hpz_dp4", "kind-zero3_8bit", "kind-zero1_adafactor", "kind-zero2_rmsprop_dp3", "kind-bf16opt",
    "kind-pipe_zero0_bf16_dp2", "kind-pipe_zero0_named", "kind-pipe_zero1_dp2", "kind-pipe_zero1_pp3",
    "kind-pipe_zero1_lion", "kind-moe_zero0_fp32", "kind-moe_zero1_residual_dp4", "kind-moe_zero2",
    "kind-autoep_zero0", "kind-autoep_zero2", "kind-autoep_zero3", "kind-autoep_autotp_zero1",
    "kind-autoep_autotp_zero3", "kind-autotp_zero0", "kind-autotp_zero1",
    "kind-autotp_zero1_frozen", "kind-autotp_zero1_fused", "kind-autotp_zero1_tp4", "kind-autotp_bf16opt_dp2",
    "kind-megatron_tp1_dp2", "kind-megatron_3d", "kind-megatron_3d_zero0_fp32",
)  # fmt: skip
EACH = sampled(NAMES, SOME)


class Refusal(NamedTuple):
    """Where a tool ends with an error: for which checkpoints, with which words, and why."""

    why: str
    applies: Callable[[Case], bool]
    says: str


def _pipeline(case: Case) -> bool:
    return "layer_files" in case.info


def _lacks(state: str) -> Callable[[Case], bool]:
    return lambda case: state not in case.truth


def _autoep(case: Case) -> bool:
    """Its experts are stacks, and ``ep`` is one number (DeepSpeed's own layers have one each)."""
    return isinstance(case.info["spec"].get("ep"), int)


def _headless(case: Case) -> bool:
    spec = case.info["spec"]
    return bool(case.info["tp"] > spec.get("kv_heads", case.info["tp"]))


def _overlong(case: Case) -> bool:
    """BF16_Optimizer notes the padding of a whole group for the last rank, which may hold less."""
    if case.info["wrapper"] != "BF16_Optimizer" or "group_names" not in case.info:
        return False
    dp, shapes = case.info["dp"], case.info["shapes"]
    sizes = [sum(torch.Size(shapes[n]).numel() for n in group) for group in case.info["group_names"]]
    widths = [-(-n // (2 * dp)) * 2 for n in sizes]
    return any(width * dp - n > width for n, width in zip(sizes, widths, strict=True))


FP32_REFUSALS = (
    Refusal("a pipeline's model states have no module", _pipeline, "NoneType"),
    Refusal(
        "it knows no experts that are cut over some ranks only",
        lambda c: _autoep(c) and c.info["stage"] == 3,
        "does not support AutoEP ZeRO-3",
    ),
    Refusal("it takes the experts' files for model states", lambda c: "experts" in c.info, "layer_0_expert_0"),
    Refusal("without ZeRO there are no param_shapes", lambda c: c.info["stage"] == 0, "NoneType"),
    Refusal(
        "BF16_Optimizer's states have no zero_stage",
        lambda c: c.info["wrapper"] == "BF16_Optimizer",
        "is not a zero checkpoint",
    ),
    Refusal("it knows no tensor parallelism", lambda c: c.info["tp"] > 1, r"Expected \d+ of '\*_optim_states.pt'"),
)
UNIVERSAL_REFUSALS = (
    Refusal(
        "the names behind BF16_Optimizer's states in a pipeline without ZeRO are nowhere",
        lambda c: _pipeline(c) and c.info["stage"] == 0 and c.info["wrapper"] == "BF16_Optimizer",
        "param_shapes",
    ),
    Refusal(
        "it takes the states of the experts, without ZeRO, for ZeRO's",
        lambda c: "experts" in c.info and c.info["stage"] == 0,
        "optimizer_state_dict",
    ),
    Refusal("it converts ZeRO's files only", lambda c: c.info["stage"] == 0, r"optim_states\.pt"),
    Refusal(
        "it concatenates what expert-parallel ranks hold of different experts under the same local name",
        lambda c: "experts" in c.info and not _autoep(c) and max(c.info["spec"]["ep"]) > 1,
        "is invalid for input of size",
    ),
    Refusal(
        "the states of an elastic checkpoint are a list", lambda c: bool(c.info["spec"].get("elastic")), "no attribute"
    ),
    Refusal("it takes every optimizer for Adam: no exp_avg", _lacks("exp_avg"), "KeyError: 'exp_avg'"),
    Refusal("it takes every optimizer for Adam: no exp_avg_sq", _lacks("exp_avg_sq"), "KeyError: 'exp_avg_sq'"),
    Refusal("a padding that exceeds the partition", _overlong, r"narrow\(\): length must be non-negative"),
    Refusal("a rank without attention heads has no slice of them", _headless, "NoneType"),
    Refusal(
        "AutoEP with AutoTP under ZeRO-1 and 2",
        lambda c: _autoep(c) and c.info["tp"] > 1 and c.info["stage"] < 3,
        "AutoEP with tensor parallelism is not supported|not divisible by AutoEP size",
    ),
    Refusal(
        "AutoEP with AutoTP under ZeRO-3", lambda c: _autoep(c) and c.info["tp"] > 1, "AutoEP . AutoTP folded ZeRO-3"
    ),
    Refusal(
        "AutoTP lists patterns for frozen parameters, which have no states (--no_strict gets over it)",
        lambda c: bool(c.info["tp"] > 1 and c.info["frozen"] and not _pipeline(c)),
        "Unused patterns",
    ),
)


@pytest.fixture(scope="session")
def tools(
    session_folder: Path,
    zero_cases: Mapping[str, Case],
    kinds: Mapping[str, Case],
    pytestconfig: pytest.Config,
) -> tuple[dict[str, Case], dict[str, dict[str, str]], Path]:
    """All cases; what became of the tools on each; where that lies."""
    need("deepspeed")
    names = NAMES if pytestconfig.getoption("lane") == "all" else SOME
    cases = {name: kinds[MORE[name]] if name in MORE else zero_cases[name] for name in names}
    paths = {name: case.path for name, case in cases.items()}
    converted = {
        name: kinds[f"{n}.universal"].path / kinds[f"{n}.universal"].info["tag"]
        for name, n in MORE.items()
        if name in cases and "universal" in TOOLS.get(n, ())
    }
    found = once(session_folder, "deepspeed_outcomes", lambda folder: outcomes(folder, paths, converted))
    return cases, found, session_folder / "deepspeed_outcomes"


Tools = tuple[dict[str, Case], dict[str, dict[str, str]], Path]


def _refusal(refusals: tuple[Refusal, ...], case: Case) -> Refusal | None:
    return next((r for r in refusals if r.applies(case)), None)


def _differ(a: Any, b: Any, names: set[str]) -> set[str]:
    return {n for n in names if not bit_equal(a[n][...], b[n][...])}


# -- zero_to_fp32


@pytest.mark.parametrize("name", EACH)
def test_zero_to_fp32(tools: Tools, name: str) -> None:
    cases, found, folder = tools
    case, error = cases[name], found[name]["zero_to_fp32"]
    refusal = _refusal(FP32_REFUSALS, case)
    if refusal is not None:
        assert re.search(refusal.says, error), (refusal.why, error)
        return
    assert error == ""
    theirs, ours = fp32_of(folder, name)["zero_to_fp32"], lazyckpt.open(case.path).states["fp32"]
    assert ours.keys() - theirs.keys() == _left_out(case, set(ours))
    assert theirs.keys() - ours.keys() == set()
    for key in theirs:
        mine = ours[key][...]
        if key in case.info["buffers"] and mine.is_floating_point():
            mine = mine.float()  # it does that to buffers
        assert bit_equal(mine, theirs[key]), key


def _left_out(case: Case, names: set[str]) -> set[str]:
    """Stage 1 does not list frozen parameters in ``frozen_param_shapes``, nor does any stage that was to exclude them:
    zero_to_fp32 then drops them, and parameters without elements, though ``module`` has them."""
    listed = case.info["stage"] > 1 and not case.info["spec"]["exclude_frozen"]
    return set() if listed else names & {*case.info["frozen"], *case.info["empty"]}


# -- ds_to_universal


@pytest.mark.parametrize("name", EACH)
def test_ds_to_universal(tools: Tools, name: str) -> None:
    cases, found, folder = tools
    case, error = cases[name], found[name]["universal"]
    refusal = _refusal(UNIVERSAL_REFUSALS, case)
    if refusal is not None:
        assert re.search(refusal.says, error), (refusal.why, error)
        if _autoep(case) or not (folder / name / "lax").exists():  # of AutoEP it leaves half a folder
            return
    else:
        assert error == ""
    source, states = lazyckpt.open(case.path), lazyckpt.open(folder / name / ("lax" if refusal else "universal")).states
    # It converts Adam's states and nothing else: amsgrad's maxima are lost without a word; stage 3 loses the step too.
    kept = {"fp32", "exp_avg", "exp_avg_sq"} | ({"step"} if case.info["stage"] < 3 else set())
    assert states.keys() == source.states.keys() & kept

    wrong = _wrong(case)
    for state in kept:
        ours, theirs = source.states[state], states[state]
        trained = set(case.truth["fp32"])
        names = set(theirs)
        assert names - set(ours) == set(), "nothing that is not in the source"
        lost = set(ours) - names
        if state == "fp32":  # a pipeline has no module to take the others from, and of stage 3 it takes none
            rest = set(ours) - trained - set(case.info["tied"])
            assert lost == (rest if case.info["stage"] == 3 or _pipeline(case) else set()), state
        else:
            assert lost == set(), state
        differ = _differ(ours, theirs, names & trained)
        if state == "step":
            assert not differ
        elif wrong is None:
            assert differ and differ <= _moved(case), (state, differ)
        else:
            assert differ == wrong, (state, differ)
        if state == "fp32":
            _check_untrained(case, source, theirs, names - trained)


def _wrong(case: Case) -> set[str] | None:
    """The parameters whose states it gets wrong; None: some of those that `_moved` has.

    A module that several pipeline stages hold: their copies differ in what is not kept in step, and the last stage to
    write wins, while the layer file (and training, when it is resumed) has the first stage's. Only what Megatron lists
    in pipeline_replicated_parameter_patterns is taken from the first stage.
    """
    if case.info["spec"].get("round_robin") and not case.info["spec"].get("parameter_alignment"):
        return None
    return set() if "vocab_tensors" in case.info else set(case.info.get("differing_over_stages", ()))


def _moved(case: Case) -> set[str]:
    """param_slice_mappings, which it trusts, are those of the order before round_robin_gradients changed it: wrong for
    every parameter that is not alone in its group."""
    return {n for group in case.info["group_names"] if len(group) > 1 for n in group}


def _check_untrained(case: Case, source: lazyckpt.CheckpointView, theirs: Any, names: set[str]) -> None:
    """All of ``module`` becomes fp32: buffers and frozen parameters (integers too), and tied names under a folder of
    their own, in what the training dtype left of them: they are not equal to their owners any more. Of the modules of
    tensor-parallel ranks it takes the first: of what is cut, a slice."""
    for name in names:
        if "weights" not in source.states:  # stage 3: a tied name is read as its owner
            assert bit_equal(theirs[name][...], source.states["fp32"][name][...]), name
            continue
        stored = source.states["weights"][name][...].float()
        if case.info.get("tp_places", {}).get(name) is not None:
            assert theirs[name].shape != stored.shape
            assert any(f"{name!r}" in line for line in theirs.problems), "this is told"
            stored = stored[tuple(slice(n) for n in theirs[name].shape)]
        assert bit_equal(theirs[name][...], stored), name


def test_a_converted_pipeline_has_the_last_stages_copy_of_a_tied_module(tools: Tools) -> None:
    cases, _, folder = tools
    for name in ("kind-pipe_zero1_dp2", "kind-pipe_zero1_pp3"):
        case = cases[name]
        view = lazyckpt.open(folder / name / "universal").states["exp_avg"]
        last = case.shards[f"mp_rank_{case.info['pp'] - 1:02d}.exp_avg"]
        for key in case.info["differing_over_stages"]:
            if key in last:
                assert bit_equal(view[key][...], last[key]) and not bit_equal(last[key], case.truth["exp_avg"][key])


@pytest.mark.parametrize("refusals", [FP32_REFUSALS, UNIVERSAL_REFUSALS], ids=["zero_to_fp32", "ds_to_universal"])
def test_every_listed_refusal_is_met(tools: Tools, refusals: tuple[Refusal, ...]) -> None:
    met = {_refusal(refusals, case) for case in tools[0].values()}
    assert met - {None} == set(refusals)
