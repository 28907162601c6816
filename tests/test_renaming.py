"""Names of another family: cut and joined by placement, there and back, on models that transformers writes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import DataError, FormatError
from lazyckpt.testing.oracle import indexed, keys, same

from .conftest import need
from .writers import Case


@pytest.mark.parametrize("name", ["llama_sharded", "llama_single", "mixtral"])
def test_there_and_back(huggingface_cases: dict[str, Case], name: str) -> None:
    view = lazyckpt.open(huggingface_cases[name].path)
    there = view.rename("megatron")
    assert [line for line in there.problems if line not in view.problems] == []
    assert any(n.endswith("linear_qkv.weight") for n in there) and not any("q_proj" in n for n in there)
    back = there.rename("hf")
    assert set(back.specs) == set(view.specs)
    for n, truth in huggingface_cases[name].truth["weights"].items():
        if n in back:
            same(back[n][...], truth, n)
            for key in keys(truth.shape, n, 3):
                same(back[n][key], indexed(truth, key), (n, key))


def test_rows_of_a_fused_matrix(huggingface_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(huggingface_cases["llama_single"].path)
    config = view.meta["config"]
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    truth = huggingface_cases["llama_single"].truth["weights"]
    q, k, v = (truth[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv")
    dim = q.shape[0] // heads
    per_group = [q.view(groups, -1, q.shape[1]), k.view(groups, dim, -1), v.view(groups, dim, -1)]
    wanted = torch.cat(per_group, 1).flatten(0, 1)
    t = view.rename("megatron")["decoder.layers.1.self_attention.linear_qkv.weight"]
    same(t[...], wanted, "q, k and v, group by group")
    gate, up = (truth[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    same(view.rename("megatron")["decoder.layers.1.mlp.linear_fc1.weight"][...], torch.cat([gate, up]), "gate, up")
    assert "joined from model.layers.1.self_attn.q_proj.weight" in t.explain()


@pytest.mark.slow
def test_transformers_own_layout_of_gpt2(tmp_path: Path) -> None:
    """Conv1D's matrices are [in, out], with q, k and v one behind the other."""
    need("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=24, vocab_size=31, n_positions=16)).save_pretrained(tmp_path)
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert not [line for line in there.problems if line not in view.problems]
    fused = view["transformer.h.1.attn.c_attn.weight"][...].T  # [3 * 24, 24]
    q, k, v = (part.view(4, 6, 24) for part in fused.split(24))
    wanted = torch.cat([q, k, v], 1).flatten(0, 1)
    same(there["decoder.layers.1.self_attention.linear_qkv.weight"][...], wanted, "qkv")
    same(
        there["decoder.layers.0.mlp.linear_fc1.weight"][5:90:7],
        view["transformer.h.0.mlp.c_fc.weight"][...].T[5:90:7],
        "fc1",
    )
    back = there.rename("hf")
    for n in view.specs:
        same(back[n][...], view[n][...], n)


def megatron_like(tied: bool = True, **more: Any) -> dict[str, Any]:
    heads, groups, dim, hidden = 4, 2, 3, 12
    layer = "decoder.layers.0."
    torch.manual_seed(1)
    weights = {
        "embedding.word_embeddings.weight": torch.randn(7, hidden),
        layer + "self_attention.linear_qkv.weight": torch.randn((heads + 2 * groups) * dim, hidden),
        layer + "self_attention.linear_qkv.bias": torch.randn((heads + 2 * groups) * dim),
        layer + "mlp.linear_fc1.weight": torch.randn(10, hidden),
        "something.else": torch.randn(2),
    }
    args = Namespace(
        num_attention_heads=heads,
        kv_channels=dim,
        num_query_groups=groups,
        group_query_attention=True,
        untie_embeddings_and_output_weights=not tied,
        **more,
    )
    return {"model": weights, "args": args}


def test_what_has_no_entry_stays_and_is_told(tmp_path: Path) -> None:
    tree = megatron_like()
    torch.save(tree, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt").rename("hf")
    assert "something.else" in view
    assert [line for line in view.problems if "something.else" in line and line.code == "not-renamed"]
    assert view.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    same(view["lm_head.weight"][...], tree["model"]["embedding.word_embeddings.weight"], "tied")
    bias = tree["model"]["decoder.layers.0.self_attention.linear_qkv.bias"].view(2, 4, 3)
    same(view["model.layers.0.self_attn.k_proj.bias"][...], bias[:, 2].flatten(), "k")
    assert view["model.layers.0.self_attn.k_proj.bias"].spec.stored_as.endswith("linear_qkv.bias")
    with pytest.raises(DataError, match="rename the whole view"):
        view["model.layers"].rename("hf")


def test_heads_that_do_not_fit_or_are_unknown(tmp_path: Path) -> None:
    tree = megatron_like()
    tree["args"].kv_channels = 5
    torch.save(tree, tmp_path / "x.pt")
    torch.save({"model": tree["model"]}, tmp_path / "y.pt")
    for name, words in (("x.pt", "not q, k and v of 4 heads of 5 in 2 groups"), ("y.pt", "is not known")):
        view = lazyckpt.open(tmp_path / name).rename("hf")
        assert "decoder.layers.0.self_attention.linear_qkv.weight" in view
        assert [line for line in view.problems if words in line]
        assert "model.layers.0.mlp.up_proj.weight" in view, "the rest is renamed"


@pytest.mark.parametrize("seen", [True, False])
def test_an_mlp_without_a_gate_has_no_halves(tmp_path: Path, seen: bool) -> None:
    """By the second matrix, else by the arguments."""
    tree = megatron_like(swiglu=seen)  # (which the shapes belie)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    if seen:
        tree["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.randn(12, 10)
    torch.save(tree, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt").rename("llama")  # (which is for MLPs with one)
    same(view[name][...], tree["model"][name], "as it was")
    assert not any("gate_proj" in key for key in view)
    assert [line for line in view.problems if line.code == "not-renamed"]


def test_values_that_mean_something_else(tmp_path: Path) -> None:
    torch.save(megatron_like(apply_layernorm_1p=True, rotary_interleaved=True), tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    there = view.rename("hf")
    assert [line.split(":")[0] for line in there.problems if line.startswith("args.")] == [
        "args.apply_layernorm_1p",
        "args.rotary_interleaved",
    ]


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    torch.save({"blocks.0.w": torch.arange(6.0).view(3, 2), "blocks.1.w": torch.zeros(3, 2)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    own = {"blocks.{l}.w": {"into": ["h.{l}.kernel"], "transpose": True}}
    renamed = view.rename(own)
    assert list(renamed) == ["h.0.kernel", "h.1.kernel"]
    same(renamed["h.0.kernel"][...], torch.arange(6.0).view(3, 2).T, "turned")
    again = renamed.rename(own, reverse=True)
    assert list(again) == list(view)
    same(again["blocks.0.w"][1:], view["blocks.0.w"][1:], "and back")
    more = view.rename({"extends": "llama", "blocks.{l}.w": "x.{l}"})
    assert list(more) == ["x.0", "x.1"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("lama", "did you mean 'llama'"),
        ({"a.{l}": "b"}, "different fields"),
        ({"a": {"cut": "qkv"}}, "neither a name"),
        ({"a": {"into": ["b", "c"]}}, "into 2 names"),
        ({"a": {"into": ["b"], "cut": "thirds"}}, "into 1 names"),
        ({"a": 3}, "neither a name"),
        ({"a": {"into": [3]}}, "names are wanted"),
        ({"extends": "nothing"}, "no table"),
    ],
)
def test_tables_that_cannot_be(tmp_path: Path, table: Any, words: str) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=words):
        lazyckpt.open(tmp_path / "x.pt").rename(table)


def of_megatron(tmp_path: Path, more: dict[str, torch.Tensor], **args: Any) -> lazyckpt.CheckpointView:
    """A model of one layer in megatron-core's names, of 4 heads of 3, as Megatron saves it."""
    model = {
        "embedding.word_embeddings.weight": torch.randn(7, 12),
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.randn(36, 12),
        "decoder.layers.0.self_attention.linear_proj.weight": torch.randn(12, 12),
        **more,
        "decoder.final_layernorm.weight": torch.randn(12),
    }
    given = {"num_attention_heads": 4, "kv_channels": 3, "hidden_size": 12, "tensor_model_parallel_size": 1, **args}
    path = tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"args": Namespace(**given), "iteration": 3, "checkpoint_version": 3.0, "model": model}, path)
    return lazyckpt.open(tmp_path)


@pytest.mark.slow
def test_experts_as_transformer_engine_and_grouped_matrices_have_them(tmp_path: Path) -> None:
    """``linear_fc1.weight3`` of TEGroupedMLP; ``weight1`` of GroupedMLP is all experts' [in, out]."""
    mlp = "decoder.layers.0.mlp."
    first, second = torch.randn(3, 10, 12), torch.randn(3, 12, 5)
    own = {mlp + "router.weight": torch.randn(3, 12), "decoder.layers.0.pre_mlp_layernorm.weight": torch.randn(12)}
    for e in range(3):
        own |= {f"{mlp}experts.linear_fc1.weight{e}": first[e], f"{mlp}experts.linear_fc2.weight{e}": second[e]}
    engine = of_megatron(tmp_path / "engine", own, num_experts=3)
    grouped = of_megatron(
        tmp_path / "grouped",
        {
            mlp + "router.weight": own[mlp + "router.weight"],
            mlp + "experts.weight1": first.transpose(1, 2).reshape(3 * 12 * 10).view(12, 30),
            mlp + "experts.weight2": second.transpose(1, 2).reshape(3 * 5 * 12).view(15, 12),
        },
        num_experts=3,
    )
    assert grouped[mlp + "experts.weight1"].shape == (3, 12, 10)
    for view in (engine, grouped):
        there = view.rename("hf")
        assert there.problems == view.problems
        for e in range(3):
            moe = f"model.layers.0.block_sparse_moe.experts.{e}."
            same(there[moe + "w1.weight"][...], first[e][:5], "gate")
            same(there[moe + "w3.weight"][2:4, ::5], first[e][5:][2:4, ::5], "up")
            same(there[moe + "w2.weight"][...], second[e], "down")
    back = engine.rename("hf").rename("megatron")
    assert set(back) == set(engine) and all(torch.equal(back[n][...], engine[n][...]) for n in engine)
    assert mlp + "experts.local_experts.2.linear_fc1.weight" in grouped.rename("hf").rename("megatron")


def test_norms_go_back_to_the_names_they_had(tmp_path: Path) -> None:
    fused = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": torch.randn(12),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": torch.randn(12),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(10, 12),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(12, 5),
    }
    view = of_megatron(tmp_path, fused, untie_embeddings_and_output_weights=False)
    there = view.rename("hf")
    assert there.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    same(there["model.layers.0.post_attention_layernorm.weight"][...], list(fused.values())[1], "norm")
    back = there.rename("megatron")
    assert set(back) == set(view), "no output layer either: it is tied"
    assert all(torch.equal(back[n][...], view[n][...]) for n in view)


@pytest.mark.parametrize(
    ("bias", "name"),
    [(True, "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"), (False, "model.layers.0.mlp.up_proj.weight")],
    ids=["gpt_neox", "nemotron"],
)
def test_an_mlp_without_a_gate_is_not_cut_in_halves(tmp_path: Path, bias: bool, name: str) -> None:
    plain = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(10, 12),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(12, 10),
        "decoder.layers.0.pre_mlp_layernorm.weight": torch.randn(12),
    }
    names = ("decoder.final_layernorm", "decoder.layers.0.self_attention.linear_proj") if bias else ()
    view = of_megatron(tmp_path, plain | {f"{one}.bias": torch.randn(12) for one in names})
    there = view.rename("hf")
    assert there.problems == view.problems
    same(there[name][...], plain["decoder.layers.0.mlp.linear_fc1.weight"], "whole")
    back = there.rename("megatron")
    assert all(torch.equal(back[n][...], view[n][...]) for n in view)


@pytest.mark.slow
def test_transformers_own_layout_of_gpt_neox(tmp_path: Path) -> None:
    need("transformers")
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        num_hidden_layers=1, num_attention_heads=4, hidden_size=24, intermediate_size=40, vocab_size=31
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    view = lazyckpt.open(tmp_path)
    there = view.rename("megatron")
    assert not [line for line in there.problems if line not in view.problems]
    assert there["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (72, 24)
    assert "output_layer.weight" in there and set(there.rename("hf").specs) == set(view.specs)


def test_states_are_renamed_and_told_of_once(tmp_path: Path) -> None:
    layer = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(10, 12),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(12, 5),
        "decoder.layers.0.own.gain": torch.randn(3),
    }
    path = of_megatron(tmp_path, layer).root
    file = Path(path) / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    wide = [n for n, t in state["model"].items() if t.ndim > 1]
    small = [n for n in state["model"] if n not in wide]
    numbers = list(range(len(wide) + len(small)))
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(state["model"][n])}
        for i, n in zip(numbers, wide + small, strict=True)
    }
    groups = [{"wd_mult": 1.0, "params": numbers[: len(wide)]}, {"wd_mult": 0.0, "params": numbers[len(wide) :]}]
    torch.save({**state, "optimizer": {"state": moments, "param_groups": groups}}, file)
    view = lazyckpt.open(path)
    there = view.rename("hf")
    fc1 = moments[wide.index("decoder.layers.0.mlp.linear_fc1.weight")]["exp_avg"]
    same(there.states["exp_avg"]["model.layers.0.mlp.up_proj.weight"][...], fc1[5:], "up")
    assert there.states["step"]["model.layers.0.mlp.up_proj.weight"].item() == 3
    assert [line for line in there.problems if line not in view.problems] == [
        "the table has no entry for 1 name (decoder.layers.0.own.gain): as they were"
    ]


def test_names_that_are_those_already_are_nothing_to_tell(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")
    torch.save({name: torch.ones(4, 4) for name in names} | {"something.else": torch.ones(1)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt").rename("hf")
    assert set(view) == {*names, "something.else"}
    (line,) = view.problems
    assert line == "the table has no entry for 1 name (something.else): as they were"
