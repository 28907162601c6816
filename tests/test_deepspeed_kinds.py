"""Every kind of DeepSpeed checkpoint, by the real writer, against what the training processes held.

Also what DeepSpeed's own converters make of them: where they are wrong, the test says which fault it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazyckpt

from .conftest import once
from .writers import Case, bit_equal

pytest.importorskip("deepspeed", reason="DeepSpeed writes these checkpoints")
from .writers.deepspeed_launch import load_case
from .writers.deepspeed_more import SPECS, TOOLS, write_all
from .writers.deepspeed_zero import TagsSpec

NAMES = sorted(name for name, spec in SPECS.items() if not isinstance(spec, TagsSpec))
NAMES += sorted(f"{name}.universal" for name, tools in TOOLS.items() if any(t.startswith("universal") for t in tools))
# A plain optimizer numbers its parameters: here order and shapes leave several ways to name them, or (with experts and
# over pipeline stages) nothing lists what an optimizer has. The states stand under numbers, and a problem line says so.
NUMBERED = {
    "zero0_fp32", "moe_zero0_fp32", "moe_zero0_fp16_ep1", "moe_zero0_bf16_dp4", "pipe_zero0_fp32", "pipe_zero0_fp16",
    "pipe_zero0_sgd_dp2", "megatron_3d_zero0_fp32",
}  # fmt: skip
# BF16_Optimizer over a pipeline with ZeRO-0: no file tells the names of what is in its flat groups in their order.
UNNAMED = {"pipe_zero0_bf16_dp2"}
# Faults of ds_to_universal: it trusts param_slice_mappings, which round_robin_gradients makes wrong, and lets the last
# pipeline stage's copy of a tied module win.
CONVERTED_WRONG = {"zero2_round_robin_dp3.universal", "pipe_zero1_dp2.universal"}


@pytest.fixture(scope="session")
def kinds(session_folder: Path) -> dict[str, Case]:
    once(session_folder, "deepspeed_kinds", lambda folder: len(write_all(folder / "cases")))
    return {name: load_case(session_folder / "deepspeed_kinds" / "cases" / name) for name in NAMES}


def _wrong(case: Case, view: lazyckpt.CheckpointView) -> dict[str, list[str]]:
    """State -> names that do not read as the truth."""
    wrong: dict[str, list[str]] = {}
    vocab = case.info.get("vocab")
    for state, tensors in case.truth.items():
        if state == "weights" and "weights" not in view.states:
            continue  # ZeRO-3 stores none
        found = view.states.get(state, {})
        for name, truth in tensors.items():
            if name in found and found[name].shape[:1] == (vocab,):
                truth = truth[:vocab]  # the writer's padding of the vocabulary
            if name not in found or not bit_equal(found[name][...], truth):
                wrong.setdefault(state, []).append(name)
    return wrong


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NUMBERED | UNNAMED | CONVERTED_WRONG])
def test_every_state_equals_what_the_processes_held(kinds: dict[str, Case], name: str) -> None:
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert _wrong(case, view) == {}
    if not name.endswith(".universal"):
        degrees = view.mesh.tp, view.mesh.pp, view.mesh.dp
        assert degrees == tuple(case.info.get(k, 1) for k in ("tp", "pp", "dp"))


@pytest.mark.parametrize("name", sorted(NUMBERED))
def test_states_without_names_stay_under_their_numbers(kinds: dict[str, Case], name: str) -> None:
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert any("under their numbers" in line for line in view.problems)
    states = [s for s in view.states if s not in ("weights", "fp32")]
    numbered = [t for s in states for t in view.states[s].values() if t.name.startswith("optimizer of ")]
    assert numbered
    assert all(torch.isfinite(t[...]).all() for t in numbered)
    for state in states:  # a rank whose names are determined has them, and they are right
        for found, tensor in view.states[state].items():
            if not found.startswith("optimizer of ") and state in case.truth:
                assert bit_equal(tensor[...], case.truth[state][found]), (state, found)


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
