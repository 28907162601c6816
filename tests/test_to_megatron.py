"""`to_megatron`: the files that Megatron's ranks would write, which megatron-core goes on from on other ranks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import lazyckpt
from lazyckpt.errors import DataError, DestinationError, MeshError
from lazyckpt.jobs import executor as job
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.publish import unfinished

from .conftest import need, once
from .lanes import LANE, sampled
from .megatron_handmade import Cut, columns, fused, rows, same, save_tensor_parallel
from .test_shard import division
from .writers import Case, bit_equal
from .writers.megatron_core import CASES, MegatronSpec, tokens_of
from .writers.megatron_resume import resume

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
EMBEDDING = "embedding.word_embeddings.weight"
# (objects of classes of Megatron's and Python's own, which are not imported)
CLASSES = {"args.model_type", "args.attention_backend", "args.exit_signal"}
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
TOKENS = 61  # rows behind them are padding


# (the states of a layer-wise optimizer are left out: Megatron-LM's own reader wants them by data-parallel rank)
WRITTEN = [name for name, spec in CASES.items() if not spec.layerwise]


def files(root: Path) -> dict[str, dict[str, Any]]:
    """The rank files, by path."""
    found = {path.relative_to(root).as_posix(): path for path in root.glob(f"*/*/{FILE}")}
    return {key: torch.load(path, weights_only=False) for key, path in sorted(found.items())}


def flat(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, (*path, key))
    else:
        yield path, value


def check_same(found: Any, wanted: Any, where: str) -> None:
    a, b = dict(flat(found)), dict(flat(wanted))
    assert set(a) == set(b), where
    for path, value in b.items():
        if isinstance(value, torch.Tensor):
            assert bit_equal(a[path], value.detach()), (where, path)
        else:
            assert a[path] == value and type(a[path]) is type(value), (where, path)


def check_whole(found: lazyckpt.CheckpointView, wanted: lazyckpt.CheckpointView, states: tuple[str, ...] = ()) -> None:
    """It is read back, whole, with every value equal."""
    assert found.format == "megatron" and not found.problems
    for state in states or wanted.states:
        assert set(found.states[state]) == set(wanted.states[state]), state
        for name, tensor in wanted.states[state].items():
            assert bit_equal(found.states[state][name][...], tensor[...]), (state, name)


# -- the files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "legacy") for name in WRITTEN), *((n, "dist") for n in ("tp2_pp2_bf16", "tp2_dp2_ep2_etp2", "tp2_mla"))],
)
def test_files_equal_those_of_megatron(
    megatron_folder: Path, megatron_cases: dict[str, Case], tmp_path: Path, name: str, kind: str
) -> None:
    spec, genuine = CASES[name], megatron_cases[name].path
    view = lazyckpt.open(megatron_folder / name / kind)
    lost = view.to_megatron(tmp_path / "out", **division(spec), verify=name == "ep2")
    assert set(lost.left_out) == {"rng_state", *CLASSES}
    assert (tmp_path / "out" / TRACKER).read_text() == (genuine / TRACKER).read_text()
    ours, theirs = files(tmp_path / "out"), files(genuine)
    assert set(ours) == set(theirs)
    for key, wanted in theirs.items():
        found = ours[key]
        for key_of_chunk in (key for key in wanted if key.startswith("model")):
            assert list(found[key_of_chunk]) == list(wanted[key_of_chunk]), "in the model's order"
        del wanted["rng_state"]
        if spec.distributed:  # here it is another optimizer's
            del found["optimizer"], wanted["optimizer"]
        args, theirs_args = vars(found.pop("args")), vars(wanted.pop("args"))
        changed = {"rank", "data_parallel_size", "world_size", "use_distributed_optimizer", "gated_linear_unit"}
        if spec.account or spec.layout:  # the same layers in other words
            changed |= {"pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank", *ACCOUNTED}
        told = {key for key, value in theirs_args.items() if args.get(key) != value}
        assert told - changed == {"model_type", "attention_backend", "exit_signal"}
        check_same(found, wanted, key)
    fp32 = ("fp32",) if spec.bf16 else ()  # (the distributed optimizer has copies of float32 weights, too)
    states = ("weights", *fp32, "exp_avg", "exp_avg_sq")
    check_whole(lazyckpt.open(tmp_path / "out"), view, states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("pp2_vpp2", {"pp": 4}),
        ("pp2_uneven", {"tp": 2}),
        ("tp2_ep2_etp1", {"tp": 2, "ep": 4}),
        ("tp2_pp2_vpp2_tied", {"tp": 4, "pp": 4}),
        ("ep2_grouped", {"tp": 2, "ep": 3}),
        ("tp2_mla", {"tp": 1, "pp": 2}),
        ("tp2_dp2_ep2_etp1_distopt", {"pp": 3}),
        ("pp2_uneven", {"pp": 3, "layout": [1, 2, 2]}),
        ("pp2_vpp2_account", {"pp": 3, "vpp": 2, "tp": 2}),
        ("tp2_dp2_mtp_distopt", {"pp": 2, "tp": 2}),
        ("tp2_dp2_mtp_distopt", {"pp": 3, "layout": "Ett|m|L"}),
        ("tp2_dp2_ep2_etp2", {"tp": 4, "ep": 2, "etp": 2}),
        ("single", {"tp": 4}),
    ],
)
def test_other_degrees_are_read_back(
    megatron_cases: dict[str, Case], tmp_path: Path, name: str, degrees: dict[str, Any]
) -> None:
    view = lazyckpt.open(megatron_cases[name].path)
    view.to_megatron(tmp_path / "out", **degrees)
    found = lazyckpt.open(tmp_path / "out")
    states = tuple(s for s in view.states if s != "fp32" or CASES[name].bf16)
    check_whole(found, view, states)
    assert all(getattr(found.mesh, axis) == degrees.get(axis, 1) for axis in ("tp", "pp", "ep"))
    assert dict(found.aliases) == dict(view.aliases)


def test_fp32_copies_alone(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    """A view of them gives weights of the dtype that the run had."""
    genuine = megatron_cases["tp2_pp2_bf16"].path
    lazyckpt.open(genuine).states["fp32"].to_megatron(tmp_path / "out", tp=2, pp=2)
    for key, wanted in files(genuine).items():
        found = torch.load(tmp_path / "out" / key, weights_only=False)
        check_same([found["model"], found["optimizer"]], [wanted["model"], wanted["optimizer"]], key)


@pytest.mark.slow
def test_through_other_formats(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(megatron_cases["tp2_pp2_bf16"].path)
    view.to_dcp(tmp_path / "dcp")
    lost = lazyckpt.open(tmp_path / "dcp").to_megatron(tmp_path / "of_dcp", tp=2, pp=2)
    assert set(lost.left_out) == {"rng_state"}
    for key, wanted in files(megatron_cases["tp2_pp2_bf16"].path).items():
        found = torch.load(tmp_path / "of_dcp" / key, weights_only=False)
        check_same([found["model"], found["optimizer"]], [wanted["model"], wanted["optimizer"]], key)

    view = lazyckpt.open(megatron_cases["ep2"].path)
    view.to_universal(tmp_path / "universal")
    universal = lazyckpt.open(tmp_path / "universal")
    lost = universal.to_megatron(tmp_path / "of_universal", ep=2)
    assert {"args.num_attention_heads", "opt_param_scheduler", "optimizer.param_groups.betas"} <= lost.keys()
    check_whole(lazyckpt.open(tmp_path / "of_universal"), view, ("weights", "exp_avg", "exp_avg_sq"))
    for file in files(tmp_path / "of_universal").values():
        for part in file["optimizer"]:  # no optimizer of Megatron's: as FusedAdam has it
            assert all(group["step"] == 3 and group["bias_correction"] for group in part["param_groups"])
            assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in part["state"].values())
        assert file["optimizer"][1]["param_groups"][0]["is_expert_parallel"]
    with pytest.raises(DataError, match="how many heads"):
        universal.to_megatron(tmp_path / "none", tp=2)


# -- megatron-core goes on

RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gelu_tied_tp2_to_pp2": ("tp2_gelu_tied", "legacy", {"tp": 1, "pp": 2}),
    "bf16_tied_pp2_to_tp2": ("pp2_tied_bf16", "legacy", {"tp": 2, "pp": 1}),
    "tp2_pp2_to_1": ("tp2_pp2_bf16", "dist", {"tp": 1, "pp": 1}),
    "1_to_tp2_pp2": ("single", "legacy", {"tp": 2, "pp": 2}),
    "ep2_to_1": ("ep2", "legacy", {"ep": 1, "dp": 1}),
    "experts_tp2_to_ep2": ("tp2_mixed", "dist", {"tp": 1, "ep": 2, "dp": 2}),
    "grouped_ep2_to_1": ("ep2_grouped", "legacy", {"ep": 1, "dp": 1}),
    "distributed_to_pp2": ("tp2_dp2_distopt", "legacy", {"tp": 1, "pp": 2, "dp": 1, "distributed": False}),
    "vpp2_to_vpp4": ("pp2_vpp2", "legacy", {"vpp": 4}),
    "uneven_to_layout": ("pp2_uneven", "legacy", {"first": None, "vpp": 2, "layout": "Et|t*2|t|tL"}),
    "mtp_to_its_own_stage": ("tp2_dp2_mtp_distopt", "dist", {"tp": 1, "dp": 1, "pp": 2, "distributed": False}),
    "experts_to_etp1": ("tp2_mixed", "dist", {"etp": 1, "ep": 2}),
    "groups_on_two_ranks_each": ("single", "legacy", {"tp": 4}),
    "hybrid_tp2_to_1": ("tp2_hybrid", "dist", {"tp": 1}),
}
# written as torch_dist, which is not of these ranks
DISTRIBUTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dist_to_pp2_vpp2": ("tp2_pp2_bf16", "legacy", {"tp": 1, "vpp": 2}),
    "dist_ep2_to_tp2": ("ep2", "legacy", {"tp": 2}),
    "dist_grouped": ("ep2_grouped", "legacy", {"ep": 2, "layers": 2}),
    "dist_mixed_to_pp2": ("tp2_mixed", "dist", {"tp": 1, "pp": 2}),
    "dist_distributed": ("tp2_dp2_distopt", "legacy", {"tp": 1}),
    "dist_experts_distributed": ("tp2_dp2_ep2_etp1_distopt", "legacy", {"tp": 1, "etp": 1, "moe_freq": (0, 1, 1)}),
    "dist_mla_to_pp2": ("tp2_mla", "dist", {"pp": 2}),  # (with tp=1, megatron-core's own gradients differ)
    "dist_mtp": ("tp2_dp2_mtp_distopt", "dist", {"tp": 2}),
    "dist_hybrid": ("tp2_hybrid", "legacy", {"tp": 1, "pp": 2}),
}
SOME = ("vpp2_to_vpp4", "uneven_to_layout", "mtp_to_its_own_stage", "dist_ep2_to_tp2", "dist_distributed")
MORE = (
    "experts_to_etp1",
    "groups_on_two_ranks_each",
    "hybrid_tp2_to_1",
    *(name for name in DISTRIBUTED if name not in SOME),
)
ALL_RUNS = {
    name: run for name, run in (RUNS | DISTRIBUTED).items() if os.environ.get(LANE) == "all" or name not in MORE
}
HUGGING_FACE = {
    "llama_tp2": (False, MegatronSpec(tp=2, groups=2, vocab=62, divisible=1)),
    "llama_tied_pp2": (True, MegatronSpec(pp=2, groups=2, vocab=62, divisible=1, tied=True)),
}


@pytest.fixture(scope="session")
def resumed(session_folder: Path, megatron_folder: Path) -> dict[str, dict[str, Any]]:
    need("transformers")

    def write(folder: Path) -> dict[str, dict[str, Any]]:
        jobs = {}
        for name, (source, kind, changes) in ALL_RUNS.items():
            spec = replace(CASES[source], **changes)
            view = lazyckpt.open(megatron_folder / source / kind)
            if name in DISTRIBUTED:  # (the degrees are those of args)
                view.to_megatron(folder / name, tp=CASES[source].tp, ep=spec.ep, ckpt_format="torch_dist")
            else:
                view.to_megatron(folder / name, **division(spec))
            jobs[name] = (folder / name, spec)
            own = "dist" if CASES[source].distributed else "legacy"
            jobs[f"as {source}"] = (megatron_folder / source / own, CASES[source])
        expected = {}
        for name, (tied, spec) in HUGGING_FACE.items():
            expected[name] = _llama(folder / f"{name}.hf", tied, spec)
            lost = (
                lazyckpt.open(folder / f"{name}.hf")
                .rename("megatron")
                .to_megatron(folder / name, tp=spec.tp, pp=spec.pp)
            )
            assert lost == {}
            jobs[name] = (folder / name, spec)
        found = resume(folder / "runs", jobs)
        return {name: one | {"expected": expected.get(name)} for name, one in found.items()}

    return once(session_folder, "to_megatron", write)


def _llama(folder: Path, tied: bool, spec: MegatronSpec) -> torch.Tensor:
    """A tiny model, saved by transformers: its logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.groups,
        vocab_size=spec.vocab,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens_of(spec, 100)).logits
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_RUNS)
def test_megatron_core_resumes_training(
    resumed: dict[str, dict[str, Any]], megatron_folder: Path, megatron_cases: dict[str, Case], name: str
) -> None:
    source, _, _ = ALL_RUNS[name]
    spec, found = CASES[source], resumed[name]
    assert found["iteration"] == 3
    for state, truth in megatron_cases[source].truth.items():
        for key, whole in truth.items():
            assert bit_equal(found["loaded"][state][key], whole), (state, key)
    logits = torch.load(megatron_folder / source / "logits.pt")["logits"][..., :TOKENS]
    tolerance = 2e-2 if spec.bf16 else 1e-5
    assert (found["logits"][..., :TOKENS] - logits).abs().max() <= tolerance * logits.abs().max()
    same = resumed[f"as {source}"]  # from its own files, on ranks as before
    assert found["losses"] == pytest.approx(same["losses"], rel=2e-3 if spec.bf16 else 1e-5)
    assert abs(same["losses"][1] - same["losses"][0]) > 1e-3, "the second one depends on the optimizer's states"
    for state in ("exp_avg", "exp_avg_sq"):
        for key, wanted in same["stepped"][state].items():
            size = max(float(wanted.abs().max()), 1e-6)
            off = (found["stepped"][state][key] - wanted).abs().max()
            assert off <= (1e-1 if spec.bf16 else 1e-4) * size, (state, key)
    for key, wanted in same["stepped"]["weights"].items():
        moved = (wanted - same["loaded"]["weights"][key]).abs()
        seen = same["stepped"]["exp_avg_sq"][key] > 1e-12 if key in same["stepped"]["exp_avg_sq"] else moved > 0
        off = (found["stepped"]["weights"][key] - wanted).abs()[seen]
        assert off.numel() == 0 or off.max() <= (1e-2 if spec.bf16 else 1e-5), key
        assert not moved.any() or moved.max() > 1e-3, "it trains"


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_faces_llama_computes_the_same(resumed: dict[str, dict[str, Any]], name: str) -> None:
    found = resumed[name]
    assert found["iteration"] == 0, "released weights"
    torch.testing.assert_close(found["logits"], found["expected"], rtol=0, atol=2e-5)


# -- what is told apart


def edited(source: Path, dest: Path, edit: Any) -> lazyckpt.CheckpointView:
    """A checkpoint with something changed in its files."""
    shutil.copytree(source, dest)
    for path in dest.glob(f"*/*/{FILE}"):
        root = torch.load(path, weights_only=False)
        edit(root)
        torch.save(root, path)
    return lazyckpt.open(dest)


@pytest.mark.slow
def test_the_vocabulary_is_padded_for_its_ranks(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    def of_41_tokens(root: dict[str, Any]) -> None:
        root["args"].vocab_size, root["args"].make_vocab_size_divisible_by = 40, 16

    view = edited(megatron_cases["tp2_gelu_tied"].path, tmp_path / "tp2", of_41_tokens)
    whole = view[EMBEDDING][...]
    assert whole.shape[0] == 64
    lost = view.to_megatron(tmp_path / "fewer", verify=True)
    assert "rows 48 to 64" in lost[EMBEDDING]
    found = lazyckpt.open(tmp_path / "fewer")
    assert bit_equal(found[EMBEDDING][...], whole[:48])
    assert bit_equal(found.states["exp_avg"][EMBEDDING][...], view.states["exp_avg"][EMBEDDING][:48])
    assert found.meta["args"].padded_vocab_size == 48
    assert EMBEDDING not in view.to_megatron(tmp_path / "more", tp=4, pp=2, verify=True)
    found = lazyckpt.open(tmp_path / "more")
    assert found.meta["args"].padded_vocab_size == found[EMBEDDING].shape[0] == 64

    view = lazyckpt.open(tmp_path / "fewer")
    view.to_megatron(tmp_path / "again", tp=4, verify=True)
    found = lazyckpt.open(tmp_path / "again")
    assert bit_equal(found[EMBEDDING][:48], whole[:48]) and found[EMBEDDING].shape[0] == 64
    assert not found[EMBEDDING][48:].any() and not found.states["exp_avg"][EMBEDDING][48:].any()

    def of_another_tokenizer(root: dict[str, Any]) -> None:
        of_41_tokens(root)
        root["args"].tokenizer_type = "HuggingFaceTokenizer"

    view = edited(megatron_cases["tp2_gelu_tied"].path, tmp_path / "unknown", of_another_tokenizer)
    assert EMBEDDING not in view.to_megatron(tmp_path / "kept")
    assert lazyckpt.open(tmp_path / "kept")[EMBEDDING].shape[0] == 64


def test_steps_in_the_groups(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    """As FusedAdam of Transformer Engine and apex has them."""

    def fused(root: dict[str, Any]) -> None:
        for group in root["optimizer"]["param_groups"]:
            group["step"] = 3
        for state in root["optimizer"]["state"].values():
            del state["step"]

    view = edited(megatron_cases["single"].path, tmp_path / "fused", fused)
    view.to_megatron(tmp_path / "out")
    (found,) = files(tmp_path / "out").values()
    (wanted,) = files(tmp_path / "fused").values()
    check_same(found["optimizer"], wanted["optimizer"], "as it was")


def test_incomplete_optimizer(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    def torn(root: dict[str, Any]) -> None:
        del root["optimizer"]["state"][3]

    view = edited(megatron_cases["single"].path, tmp_path / "torn", torn)
    lost = view.to_megatron(tmp_path / "out")
    assert "no exp_avg of decoder.layers.0.mlp.linear_fc1.weight" in lost["optimizer"]
    assert "--no-load-optim" in lost["optimizer"] and "--no-load-rng" in lost["rng_state"]
    (found,) = files(tmp_path / "out").values()
    assert "optimizer" not in found and found["iteration"] == 3


def test_names_of_transformer_engines_layers(tmp_path: Path, megatron_cases: dict[str, Case]) -> None:
    table = {
        "decoder.layers.{l}.input_layernorm.{p}": "decoder.layers.{l}.self_attention.linear_qkv.layer_norm_{p}",
        "decoder.layers.{l}.pre_mlp_layernorm.{p}": "decoder.layers.{l}.mlp.linear_fc1.layer_norm_{p}",
    }
    view = lazyckpt.open(megatron_cases["single"].path).rename(table)
    lost = view.to_megatron(tmp_path / "out", pp=2)
    assert "optimizer" not in lost
    found = files(tmp_path / "out")["iter_0000003/mp_rank_00_001/" + FILE]
    assert list(found["model"]) == [
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_proj._extra_state",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv._extra_state",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1._extra_state",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.linear_fc2._extra_state",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        "output_layer._extra_state",
    ]


def test_unsupported_models(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(megatron_cases["single"].path)
    with pytest.raises(DataError, match=r"rename\('megatron'\)"):
        view.rename("hf").to_megatron(tmp_path / "out")
    with pytest.raises(DataError, match="a view of 'exp_avg'"):
        view.states["exp_avg"].to_megatron(tmp_path / "out")
    for degrees, words in (
        ({"pp": 3}, "evenly"),
        ({"tp": 8}, "4 heads"),
        ({"pp": 2, "layout": [1, 2]}, "do not fit the layout"),
        ({"pp": 2, "layout": "Et|tmL"}, "stage m"),
        ({"pp": 2, "layout": "Et|tL|"}, "no multiple of pp=2"),
        ({"pp": 2, "layout": "t|tL"}, "one E first"),
        ({"vpp": 2}, "give pp="),
        ({"etp": 2}, "etp"),
        ({"ep": 2}, "no experts"),
        ({"tp": 0}, "tp=0"),
    ):
        with pytest.raises(MeshError, match=words):
            view.to_megatron(tmp_path / "out", **degrees)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DestinationError, match="no checkpoint of Megatron"):
        view.to_megatron(tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "notes.txt").unlink()
    view.to_megatron(tmp_path / "out")
    with pytest.raises(DestinationError, match="exists already"):
        view.to_megatron(tmp_path / "out", tp=2)
    view.to_megatron(tmp_path / "out", tp=2, overwrite=True)
    assert lazyckpt.open(tmp_path / "out").mesh.tp == 2


def test_resume_of_interrupted_export(
    megatron_cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = lazyckpt.open(megatron_cases["single"].path)
    real, calls = stream.write_at, []

    def write_at(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 30:
            raise OSError(5, "Input/output error")
        real(*args)

    monkeypatch.setattr(job, "_TOGETHER", 1)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_at", write_at)
        with pytest.raises(DestinationError, match="call again"):
            view.to_megatron(tmp_path / "out", tp=2, pp=2)
    assert not (tmp_path / "out").exists()
    finished = unfinished(tmp_path / "out")
    assert finished
    written = []
    monkeypatch.setattr(stream, "write_at", lambda *args: (written.append(len(args[1])), real(*args)))
    view.to_megatron(tmp_path / "out", tp=2, pp=2, verify=True)
    files = [lazyckpt.open(path).stored for path in (tmp_path / "out").glob(f"*/*/{FILE}")]
    assert len(files) == 4
    assert sum(written) == sum(t.nbytes for stored in files for t in stored.values()) - finished
    check_whole(lazyckpt.open(tmp_path / "out"), view)


# -- models that run on GPUs only


def test_hybrid_models(tmp_path: Path) -> None:
    """Mamba layers, attention and MLPs on several stages, with a layer on each: as mamba_mixer.py stores them."""
    sizes = [16, 16, 6, 6, 4]
    mixer, attention, mlp = "decoder.layers.0.mixer.", "decoder.layers.1.self_attention.", "decoder.layers.2.mlp."
    model: dict[str, tuple[torch.Tensor, Cut]] = {
        "embedding.word_embeddings.weight": (torch.randn(16, 8), rows),
        mixer + "dt_bias": (torch.randn(4), rows),
        mixer + "A_log": (torch.randn(4), rows),
        mixer + "D": (torch.randn(4), rows),
        mixer + "in_proj.layer_norm_weight": (torch.randn(8), same),
        mixer + "in_proj.weight": (torch.randn(sum(sizes), 8), fused(sizes)),
        mixer + "conv1d.weight": (torch.randn(sum(sizes[1:4]), 1, 4), fused(sizes[1:4])),
        mixer + "conv1d.bias": (torch.randn(sum(sizes[1:4])), fused(sizes[1:4])),
        mixer + "norm.weight": (torch.randn(16), rows),
        mixer + "out_proj.weight": (torch.randn(8, 16), columns),
        attention + "linear_proj.weight": (torch.randn(8, 16), columns),
        attention + "linear_qkv.layer_norm_weight": (torch.randn(8), same),
        attention + "linear_qkv.weight": (torch.randn(32, 8), rows),
        mlp + "linear_fc1.layer_norm_weight": (torch.randn(8), same),
        mlp + "linear_fc1.weight": (torch.randn(24, 8), rows),
        mlp + "linear_fc2.weight": (torch.randn(8, 24), columns),
        "decoder.final_norm.weight": (torch.randn(8), same),
        "output_layer.weight": (torch.randn(16, 8), rows),
    }
    settings = {"num_layers": 3, "hidden_size": 8, "mamba_head_dim": 4, "mamba_state_dim": 3, "mamba_num_groups": 2,
                "group_query_attention": True, "num_query_groups": 2, "swiglu": False}  # fmt: skip
    groups = {mult: [n for n, (t, _) in enumerate(model.values()) if (t.ndim > 1) == bool(mult)] for mult in (1.0, 0.0)}
    order = [list(model.values())[n][0] for mult in groups for n in groups[mult]]
    state = {n: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for n, t in enumerate(order)}
    starts = {1.0: 0, 0.0: len(groups[1.0])}
    listed = [
        {"wd_mult": mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 0.1,
         "params": list(range(starts[mult], starts[mult] + len(groups[mult])))}
        for mult in groups
    ]  # fmt: skip
    optimizer = {"state": state, "param_groups": listed}
    view = lazyckpt.open(save_tensor_parallel(tmp_path / "whole", model, 1, args=settings, optimizer=optimizer))
    assert not view.problems and set(view.states["exp_avg"]) == set(model)
    view.to_megatron(tmp_path / "ranks", tp=2, pp=3)
    found = files(tmp_path / "ranks")
    held: dict[str, list[str]] = {}
    for name in model:
        stage = 2 if name.startswith(("output", "decoder.final")) else 0
        stage = int(name.split(".")[2]) if name.startswith("decoder.layers.") else stage
        held.setdefault(f"_{stage:03d}", []).append(name)
    for path, root in found.items():
        rank, stage = int(path.split("/")[1][8:10]), path.split("/")[1][10:]
        tensors = {n: t for n, t in root["model"].items() if isinstance(t, torch.Tensor)}
        wanted = {re.sub(r"layers\.\d", "layers.0", name): model[name] for name in held[stage]}
        assert list(tensors) == list(wanted), "in the order of the model"
        for name, (whole, cut) in wanted.items():
            assert bit_equal(tensors[name], cut(whole, rank, 2).contiguous()), (path, name)
    check_whole(lazyckpt.open(tmp_path / "ranks"), view, ("weights", "exp_avg", "exp_avg_sq"))
    with pytest.raises(MeshError, match="one chunk on each stage"):
        view.to_megatron(tmp_path / "chunks", pp=3, layout=[1, 0, 1, 0, 1, 0])
    view.to_megatron(tmp_path / "dist", ckpt_format="torch_dist")
    dist = lazyckpt.open(tmp_path / "dist")
    key = "iter_0000003/" if any(name.startswith("iter_") for name in dist.stored) else ""
    for part, rows_of in zip(("z", "x", "B", "C", "dt"), model[mixer + "in_proj.weight"][0].split(sizes), strict=True):
        assert bit_equal(dist.stored[f"{key}{mixer}in_proj.weight.{part}"][...], rows_of), part
    for state_name in ("weights", "exp_avg", "exp_avg_sq"):
        for name in model:
            assert bit_equal(dist.states[state_name][name][...], view.states[state_name][name][...]), (state_name, name)


# -- distributed checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(
        [*(name for name in WRITTEN if not CASES[name].distributed), "tp2_dp2_distopt"],
        ("ep2", "ep2_grouped", "tp2_mixed", "tp2_mla", "pp2_tied_bf16", "tp2_dp2_distopt", "tp2_hybrid"),
    ),
)
def test_a_distributed_checkpoint_has_what_megatrons_has(
    megatron_folder: Path, megatron_cases: dict[str, Case], tmp_path: Path, name: str
) -> None:
    spec = CASES[name]
    lost = lazyckpt.open(megatron_cases[name].path).to_megatron(
        tmp_path / "out", **division(spec), ckpt_format="torch_dist", verify=name == "ep2"
    )
    assert set(lost.left_out) == {"rng_state", *CLASSES}
    (ours,), (theirs,) = (
        [path.parent for path in root.glob("*/.metadata")]
        for root in (tmp_path / "out", megatron_folder / name / "dist")
    )
    assert (ours / "metadata.json").read_text() == (theirs / "metadata.json").read_text()
    found, wanted = (FileSystemReader(folder).read_metadata().state_dict_metadata for folder in (ours, theirs))
    about = {key: getattr(entry, "size", None) for key, entry in wanted.items() if not key.startswith("rng_state/")}
    assert {key: getattr(entry, "size", None) for key, entry in found.items()} == about
    one, other = (
        {key: torch.empty(size, dtype=found[key].properties.dtype) for key, size in about.items() if size is not None}
        for _ in range(2)
    )
    for state, folder in ((one, ours), (other, theirs)):
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    for key in one:
        assert bit_equal(one[key], other[key]), key
    shared, genuine = (torch.load(folder / "common.pt", weights_only=False) for folder in (ours, theirs))
    del shared["args"], genuine["args"]
    check_same(shared, genuine, "common.pt")
    view = lazyckpt.open(tmp_path / "out")
    assert view.format == lazyckpt.open(megatron_folder / name / "dist").format and not view.problems
