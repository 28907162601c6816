"""Legacy checkpoints of Megatron, by megatron-core's own ranks and in old layouts: as the model on one rank is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.core.extents import Extent
from lazyckpt.core.specs import whole as in_one_piece
from lazyckpt.formats.megatron.stacks import logical
from lazyckpt.layouts.megatron import megatron_rules
from lazyckpt.layouts.merge import decide
from lazyckpt.testing.contract import CHECKS, Check
from lazyckpt.testing.counting import opened

from .megatron_handmade import (
    Cut,
    args,
    columns,
    fused,
    halves,
    old_rows,
    rows,
    same,
    save_rank,
    save_tensor_parallel,
)
from .writers import Case, bit_equal
from .writers.megatron_core import CASES

NAMES = list(CASES)


@pytest.mark.product
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(megatron_kind: Case, check: Check) -> None:
    check(megatron_kind)


@pytest.mark.parametrize("name", NAMES)
def test_every_state_equals_what_the_ranks_held(megatron_cases: dict[str, Case], name: str) -> None:
    case, spec = megatron_cases[name], CASES[name]
    view = lazyckpt.open(case.path)
    assert view.problems == ()
    assert set(view.states) == set(case.truth)
    for state, truth in case.truth.items():
        assert set(view.states[state]) == set(truth), state
        for key, whole in truth.items():
            assert bit_equal(view.states[state][key][...], whole), (state, key)
    assert (view.mesh.tp, view.mesh.pp, view.mesh.dp, view.mesh.ep) == (spec.tp, spec.pp, spec.dp, spec.ep)
    assert view.format == "megatron"
    assert (view.meta["iteration"], view.meta["step"], view.meta["checkpoint_version"]) == (3, 3, 3.0)
    assert view.meta["args"].padded_vocab_size == spec.padded_vocab
    assert {"opt_param_scheduler", "rng_state", "optimizer"} <= set(view.meta)


@pytest.mark.slow
def test_the_model_on_one_rank_gives_the_parallel_models_logits(megatron_logits: dict[str, dict[str, float]]) -> None:
    found = megatron_logits["legacy"]
    assert len(found) >= len(NAMES) - 2  # (two are not recorded)
    # what is cut is summed in another order: of bf16, one in the last of eight bits
    assert {n: d for n, d in found.items() if d > (0.03 if CASES[n].bf16 else 1e-5)} == {}


def test_explain_says_the_rule_and_how_it_is_known(megatron_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(megatron_cases["tp2_pp2_bf16"].path)
    layer = view["decoder.layers.3"]
    text = layer["mlp.linear_fc1.weight"].explain()
    assert "concatenated in 2 parts" in text and "args.swiglu = True" in text and "fp32 copy in the file agree" in text
    assert "partition_dim = 1" in layer["mlp.linear_fc2.weight"].explain()
    assert "2 query groups" in layer["self_attention.linear_qkv.weight"].explain()
    assert "replicated on 2 ranks" in layer["input_layernorm.weight"].explain()
    assert "args.padded_vocab_size = 64, args.vocab_size = 60" in view["output_layer.weight"].explain()


def test_a_vocabulary_can_be_cut_to_its_rows(megatron_cases: dict[str, Case]) -> None:
    case = megatron_cases["tp2_pp2_bf16"]
    view = lazyckpt.open(case.path, rules={"embedding.word_embeddings.weight": {"cat": 0, "rows": 61}})
    truth = case.truth["weights"]["embedding.word_embeddings.weight"]
    assert bit_equal(view["embedding.word_embeddings.weight"][...], truth[:61])


# -- replicas


def test_replicas_agree_where_the_ranks_were_in_step(megatron_cases: dict[str, Case]) -> None:
    for name in ("tp2_ep2_etp1", "pp2_tied_bf16", "tp2_dp2_ep2_etp2"):
        view = lazyckpt.open(megatron_cases[name].path)
        assert all(t.replicas_agree() for state in view.states.values() for t in state.values())
    copies = {extent.path for f in view["embedding.word_embeddings.weight"].fragments if (extent := f.extent)}
    assert len(copies) == 4, "of each of two shards, every expert-parallel rank has a copy"


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("tp2_ep2_etp1", "decoder.final_layernorm.weight"),  # on every tensor-parallel rank
        ("ep2", "decoder.layers.1.self_attention.linear_qkv.weight"),  # in every expert-parallel rank's file
        ("pp2_tied_bf16", "embedding.word_embeddings.weight"),  # on the last stage once more
    ],
)
def test_a_replica_that_differs_is_found(megatron_cases: dict[str, Case], tmp_path: Path, case: str, name: str) -> None:
    path = shutil.copytree(megatron_cases[case].path, tmp_path / "copy")
    extent = lazyckpt.open(path)[name].fragments[-1].extent
    assert isinstance(extent, Extent)
    with open(path / extent.path, "r+b") as file:
        file.seek(extent.offset)
        byte = file.read(1)
        file.seek(extent.offset)
        file.write(bytes([byte[0] ^ 1]))
    view = lazyckpt.open(path)
    assert not view[name].replicas_agree()
    assert bit_equal(view[name][...], megatron_cases[case].truth["weights"][name]), "the first copy is read"
    assert view["decoder.layers.0.input_layernorm.weight"].replicas_agree()


def test_what_has_one_copy_agrees_without_a_read(megatron_cases: dict[str, Case]) -> None:
    view, counts = opened(megatron_cases["single"].path)
    counts.clear()
    assert all(t.replicas_agree() for t in view.values())
    assert counts.bytes == 0


# -- which iteration


def test_iterations_by_tracker_tag_and_folder(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    case = megatron_cases["tp2_gelu_tied"]
    path = shutil.copytree(case.path, tmp_path / "copy")
    shutil.copytree(path / "iter_0000003", path / "release")
    for view in (
        lazyckpt.open(path),
        lazyckpt.open(path / "iter_0000003"),
        *(lazyckpt.open(path, tag=tag) for tag in ("iter_0000003", "3", "release")),
    ):
        assert set(view) == set(case.truth["weights"])
    (path / "latest_checkpointed_iteration.txt").write_text("release")
    assert lazyckpt.open(path).meta["tag"] == "release"
    (path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(lazyckpt.FormatError, match="say which with tag"):
        lazyckpt.open(path)
    shutil.rmtree(path / "release")
    assert lazyckpt.open(path).meta["tag"] == "iter_0000003"


def test_iterations_that_are_not_there(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    path = shutil.copytree(megatron_cases["single"].path, tmp_path / "copy")
    (path / "iter_0000004" / "mp_rank_00").mkdir(parents=True)
    view = lazyckpt.open(path)
    assert [line for line in view.problems if (line.code, line.path) == ("unfinished-save", "iter_0000004")] == list(
        view.problems
    )
    with pytest.raises(lazyckpt.MissingFileError, match="iter_0000003"):
        lazyckpt.open(path, tag="7")
    tracker = path / "latest_checkpointed_iteration.txt"
    tracker.write_text("4")
    with pytest.raises(lazyckpt.MissingFileError, match="save was not finished"):
        lazyckpt.open(path)
    tracker.write_text("5")
    with pytest.raises(lazyckpt.MissingFileError, match="'iter_0000005'"):
        lazyckpt.open(path)
    tracker.write_text("five")
    with pytest.raises(lazyckpt.CorruptError, match="neither a number nor release"):
        lazyckpt.open(path)


# -- layouts of other versions


def test_models_before_megatron_core(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = "language_model.encoder.layers"
    model = {"language_model.embedding.word_embeddings.weight": (torch.randn(12, 16), rows)}
    for n in range(2):
        model |= {
            f"{block}.{n}.input_norm.weight": (torch.randn(16), same),
            f"{block}.{n}.self_attention.query_key_value.weight": (torch.randn(48, 16), rows),
            f"{block}.{n}.self_attention.query_key_value.bias": (torch.randn(48), rows),
            f"{block}.{n}.self_attention.dense.weight": (torch.randn(16, 16), columns),
            f"{block}.{n}.self_attention.dense.bias": (torch.randn(16), same),
            f"{block}.{n}.mlp.dense_h_to_4h.weight": (torch.randn(48, 16), halves),
            f"{block}.{n}.mlp.dense_4h_to_h.weight": (torch.randn(16, 24), columns),
        }
    model["language_model.encoder.final_norm.weight"] = torch.randn(16), same
    model["language_model.output_layer.weight"] = torch.randn(12, 16), rows
    view = lazyckpt.open(save_tensor_parallel(tmp_path, model, 2, nest=True, args={"swiglu": True}))
    assert view.problems == ()
    assert set(view) == set(model)
    for name, (wanted, _) in model.items():
        assert bit_equal(view[name][...], wanted), name


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_query_key_value_in_old_orders(tmp_path: Path, version: int, ranks: int) -> None:
    torch.manual_seed(0)
    names = [f"language_model.transformer.layers.0.attention.query_key_value.{k}" for k in ("weight", "bias")]
    model = {
        names[0]: (torch.randn(48, 16), old_rows(version, 4)),
        names[1]: (torch.randn(48), old_rows(version, 4)),
    }
    view = lazyckpt.open(save_tensor_parallel(tmp_path, model, ranks, checkpoint_version=float(version)))
    for name in names:
        assert bit_equal(view[name][...], model[name][0])
        assert bit_equal(view[name][5:31:3], model[name][0][5:31:3])
    assert "known from checkpoint_version" in view[names[0]].explain()
    view = lazyckpt.open(tmp_path, rules={"*.query_key_value.*": "column"})
    stored = [view.stored[f"mp_rank_{r:02d}/model_optim_rng.pt/model.{names[0]}"][...] for r in range(ranks)]
    assert bit_equal(view[names[0]][...], torch.cat(stored)), "what the user says goes first"


def test_experts_of_one_layer_under_numbered_names(tmp_path: Path) -> None:
    """TEGroupedMLP: linear_fc1.weight0, weight1, ... of the rank's experts."""
    whole = [torch.randn(8, 6) for _ in range(4)]
    for ep in range(2):
        own = {f"decoder.layers.0.mlp.experts.linear_fc1.weight{j}": whole[2 * ep + j] for j in range(2)}
        settings = args(expert_model_parallel_size=2, num_experts=4)
        save_rank(tmp_path / "iter_0000003", f"mp_rank_00_{ep:03d}", {"args": settings, "model": own})
    view = lazyckpt.open(tmp_path)
    for n, weight in enumerate(whole):
        assert bit_equal(view[f"decoder.layers.0.mlp.experts.linear_fc1.weight{n}"][...], weight)


def test_parameters_of_other_layers(tmp_path: Path) -> None:
    """Norms that Transformer Engine fuses into the matrix after them, attention to an encoder, offsets of softmax."""
    torch.manual_seed(0)
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (torch.randn(16), same),
        "self_attention.linear_qkv.weight": (torch.randn(48, 16), rows),
        "self_attention.core_attention.softmax_offset": (torch.randn(4), rows),
        "cross_attention.linear_q.layer_norm_bias": (torch.randn(16), same),
        "cross_attention.linear_q.weight": (torch.randn(16, 16), rows),
        "cross_attention.linear_kv.weight": (torch.randn(32, 16), rows),
        "cross_attention.linear_proj.weight": (torch.randn(16, 16), columns),
        "cross_attention.linear_proj.bias": (torch.randn(16), same),
        "inter_attention.key_value.weight": (torch.randn(32, 16), rows),
        "inter_attention.dense.weight": (torch.randn(16, 16), columns),
        "mlp.linear_fc1.layer_norm_bias": (torch.randn(16), same),
        "mlp.linear_fc1.weight": (torch.randn(24, 16), rows),
    }
    model = {f"decoder.layers.1.{name}": kept for name, kept in layer.items()}
    model |= {f"decoder.layers.0.{name}": kept for name, kept in layer.items()}
    model["encoder_relative_pos_emb.relative_attention_bias.weight"] = torch.randn(32, 4), same
    view = lazyckpt.open(save_tensor_parallel(tmp_path, model, 2))
    assert view.problems == ()
    for name, (whole, _) in model.items():
        assert bit_equal(view[name][...], whole), name


@pytest.mark.parametrize("known", [True, False])
def test_layers_of_mamba_and_gated_delta_nets(tmp_path: Path, known: bool) -> None:
    torch.manual_seed(0)
    settings = {
        "mamba_state_dim": 3,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "linear_key_head_dim": 3,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 2,
        "linear_num_value_heads": 4,
    }
    mamba, delta = [32, 32, 6, 6, 4], [6, 6, 8, 8, 4, 4]
    model = {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight": (torch.randn(16), same),
        "decoder.layers.0.mixer.in_proj.weight": (torch.randn(80, 16), fused(mamba)),
        "decoder.layers.0.mixer.conv1d.weight": (torch.randn(44, 1, 4), fused(mamba[1:4])),
        "decoder.layers.0.mixer.conv1d.bias": (torch.randn(44), fused(mamba[1:4])),
        "decoder.layers.0.mixer.A_log": (torch.randn(4), rows),
        "decoder.layers.0.mixer.D": (torch.randn(4), rows),
        "decoder.layers.0.mixer.dt_bias": (torch.randn(4), rows),
        "decoder.layers.0.mixer.norm.weight": (torch.randn(32), rows),
        "decoder.layers.0.mixer.out_proj.weight": (torch.randn(16, 32), columns),
        "decoder.layers.1.self_attention.in_proj.weight": (torch.randn(36, 16), fused(delta)),
        "decoder.layers.1.self_attention.conv1d.weight": (torch.randn(20, 1, 4), fused(delta[:3])),
        "decoder.layers.1.self_attention.A_log": (torch.randn(4), rows),
        "decoder.layers.1.self_attention.out_norm.weight": (torch.randn(2), same),
        "decoder.layers.1.self_attention.out_proj.weight": (torch.randn(16, 8), columns),
    }
    view = lazyckpt.open(save_tensor_parallel(tmp_path, model, 2, args=settings if known else {}))
    told = [name for name in model if any(f"{name!r} cannot be put together" in line for line in view.problems)]
    assert told == ([] if known else [name for name in model if "in_proj.weight" in name or "conv1d" in name])
    for name, (whole, _) in model.items():
        if name not in told:
            assert bit_equal(view[name][...], whole), name


def test_attributes_that_do_not_say_the_dimension(tmp_path: Path) -> None:
    """`setattr(weight, "tensor_model_parallel", True)` and no more: it is not replicated for that."""
    for rank in range(2):
        model = {"decoder.layers.0.of_ones_own": torch.randn(4)}
        main = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        main.tensor_model_parallel, main.partition_dim = True, -1  # type: ignore[attr-defined]
        groups = [{"params": [0], "wd_mult": 0.0}]
        optimizer = {"optimizer": {"state": {}, "param_groups": groups}, "fp32_from_fp16_params": [[main]]}
        settings = args(tensor_model_parallel_size=2)
        save_rank(
            tmp_path / "iter_0000003",
            f"mp_rank_{rank:02d}",
            {"args": settings, "model": model, "optimizer": optimizer},
        )
    view = lazyckpt.open(tmp_path)
    assert any((line.code, line.path) == ("unmerged-tensor", "decoder.layers.0.of_ones_own") for line in view.problems)


def test_several_stacks_of_layers_on_pipeline_stages(tmp_path: Path) -> None:
    """An encoder of images on the first stage does not count among the layers of the text's model."""
    weight = {}
    held = {0: {"vision_model.decoder": 3, "language_model.decoder": 1}, 1: {"language_model.decoder": 2}}
    for stage, stacks in held.items():
        own = {}
        for head, count in stacks.items():
            for n in range(count):
                whole = torch.randn(4)
                own[f"{head}.layers.{n}.input_layernorm.weight"] = whole
                weight[f"{head}.layers.{n + stage}.input_layernorm.weight"] = whole
        settings = args(pipeline_model_parallel_size=2, num_layers=3)
        save_rank(tmp_path / "iter_0000003", f"mp_rank_00_{stage:03d}", {"args": settings, "model": own})
    view = lazyckpt.open(tmp_path)
    assert view.problems == ()
    assert set(view) == set(weight)
    for name, whole in weight.items():
        assert bit_equal(view[name][...], whole), name


def test_a_layer_of_eight_ranks_reads_its_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = {
        "input_layernorm.weight": (torch.randn(64), same),
        "self_attention.linear_qkv.weight": (torch.randn(192, 64), rows),
        "self_attention.linear_proj.weight": (torch.randn(64, 64), columns),
        "mlp.linear_fc1.weight": (torch.randn(512, 64), halves),
        "mlp.linear_fc2.weight": (torch.randn(64, 256), columns),
    }
    model = {f"decoder.layers.{n}.{name}": kept for n in range(3) for name, kept in layer.items()}
    view, counts = opened(save_tensor_parallel(tmp_path, model, 8, args={"swiglu": True}))
    part = view["decoder.layers.1"]
    counts.clear()
    read = part.to()
    assert counts.bytes <= 1.05 * part.nbytes
    for name, (whole, _) in layer.items():
        assert bit_equal(read[name], whole)
    fc1 = view["decoder.layers.2.mlp.linear_fc1.weight"]
    counts.clear()
    assert bit_equal(fc1[100:101], layer["mlp.linear_fc1.weight"][0][100:101])
    assert counts.bytes == 64 * 4


# -- models of Transformer Engine and of Mamba, which the installed megatron-core does not make without a GPU


def test_norms_that_transformer_engine_fuses_are_replicated(tmp_path: Path) -> None:
    """Its fp32 copies say ``partition_dim = 0`` of experts' second matrices, which are cut along 1: names go first."""
    layer = "decoder.layers.0."
    model = {
        layer + "self_attention.linear_qkv.layer_norm_weight": (torch.randn(16), same),
        layer + "self_attention.linear_qkv.weight": (torch.randn(32, 16), rows),
        layer + "mlp.linear_fc1.layer_norm_weight": (torch.randn(16), same),
        layer + "mlp.linear_fc1.layer_norm_bias": (torch.randn(16), same),
        layer + "mlp.experts.linear_fc2.weight0": (torch.randn(16, 8), columns),
    }
    view = lazyckpt.open(save_tensor_parallel(tmp_path, model, 2, args={"transformer_impl": "transformer_engine"}))
    assert view.problems == ()
    for name, (wanted, _) in model.items():
        assert bit_equal(view[name][...], wanted), name
    said = {"tensor_model_parallel": True, "partition_dim": 0}
    sources = megatron_rules(args(), {}, {layer + "mlp.experts.linear_fc2.weight0": said})
    merged = decide(layer + "mlp.experts.linear_fc2.weight0", [(16, 4), (16, 4)], sources)
    assert merged.shape == (16, 8) and "partition_dim = 0" in merged.rule


@pytest.mark.parametrize(
    "said",
    [{"tensor_model_parallel": True}, {"tensor_model_parallel": True, "partition_dim": -1}],
    ids=["no dimension", "the default"],
)
def test_attributes_that_do_not_say_the_dimension_decide_nothing(said: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rules="):
        decide(
            "decoder.layers.0.own.gain", [(4,), (4,)], megatron_rules(args(), {}, {"decoder.layers.0.own.gain": said})
        )


def test_mixers_of_mamba(tmp_path: Path) -> None:
    heads, width, states, groups, hidden = 4, 4, 3, 2, 8
    sizes = [heads * width, heads * width, groups * states, groups * states, heads]

    def parts(sizes: list[int]) -> Cut:
        return lambda t, rank, ranks: torch.cat([part.chunk(ranks)[rank] for part in t.split(sizes)])

    mixer = "decoder.layers.0.mixer."
    model = {
        mixer + "in_proj.layer_norm_weight": (torch.randn(hidden), same),
        mixer + "in_proj.weight": (torch.randn(sum(sizes), hidden), parts(sizes)),
        mixer + "conv1d.weight": (torch.randn(sum(sizes[1:4]), 1, 4), parts(sizes[1:4])),
        mixer + "conv1d.bias": (torch.randn(sum(sizes[1:4])), parts(sizes[1:4])),
        mixer + "A_log": (torch.randn(heads), rows),
        mixer + "D": (torch.randn(heads), rows),
        mixer + "dt_bias": (torch.randn(heads), rows),
        mixer + "norm.weight": (torch.randn(heads * width), rows),
        mixer + "out_proj.weight": (torch.randn(hidden, heads * width), columns),
    }
    settings = {"hidden_size": hidden, "mamba_head_dim": width, "mamba_state_dim": states, "mamba_num_groups": groups}
    view = lazyckpt.open(save_tensor_parallel(tmp_path, model, 2, args=settings))  # heads: 2 * hidden / width
    assert view.problems == ()
    for name, (wanted, _) in model.items():
        assert bit_equal(view[name][...], wanted), name
    (tmp_path / "other").mkdir()
    view = lazyckpt.open(save_tensor_parallel(tmp_path / "other", model, 2))
    assert all(mixer + name in line for name, line in zip(("in_proj", "conv1d", "conv1d"), view.problems, strict=True))


def test_matrices_that_a_distributed_checkpoint_keeps_apart_are_one() -> None:
    sizes = {"x": 4, "z": 4, "B": 2, "C": 2, "dt": 1}  # not in the order of the whole
    found = logical(
        {key: in_one_piece(key, Extent(key, 0, torch.float32, (2, n, 3), (n * 3, 3, 1))) for part, n in sizes.items()
         if (key := f"decoder.layers.mixer.in_proj.weight.{part}")},
        None,
    )  # fmt: skip
    assert list(found) == [f"decoder.layers.{n}.mixer.in_proj.weight" for n in range(2)]
    spec = found["decoder.layers.1.mixer.in_proj.weight"]
    assert spec.shape == (13, 3)
    assert [f.extent.path[-2:] for f in spec.fragments] == [".z", ".x", ".B", ".C", "dt"]
