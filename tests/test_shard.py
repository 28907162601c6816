"""`view.shard` and `lazyckpt.unshard`: what the ranks of another layout have, and all of it together again.

The truth is what real ranks wrote; for layouts that nobody wrote, torch's own chunk and cat.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import DataError, FormatError, MeshError, SelectionError
from lazyckpt.core.flat import interval, joined
from lazyckpt.core.placement import Mesh, Rank
from lazyckpt.layouts.ranks import division_of, place_of, rank_of, world_size
from lazyckpt.tensor import LazyTensor
from lazyckpt.testing.counting import opened

from .lanes import rounds
from .megatron_handmade import args
from .placements import Placed, PlainStore, placed
from .writers import Case, bit_equal
from .writers.megatron_core import CASES, MegatronSpec

State = dict[str, torch.Tensor]


def all_ranks(view: lazyckpt.CheckpointView, **degrees: int) -> list[lazyckpt.CheckpointView]:
    return [view.shard(**degrees, rank=n) for n in range(math.prod(degrees.values()))]


def dense(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype).copy_(t)


def check_same(found: lazyckpt.CheckpointView, wanted: lazyckpt.CheckpointView) -> None:
    """All states, bit for bit, and what else is told of them."""
    assert list(found.states) == list(wanted.states)
    assert (found.aliases, found.problems, found.mesh) == (wanted.aliases, wanted.problems, wanted.mesh)
    for state, view in wanted.states.items():
        assert list(found.states[state]) == list(view), state
        for name in view:
            assert bit_equal(found.states[state][name][...], view[name][...]), (state, name)


def save(path: Path, model: Mapping[str, torch.Tensor]) -> lazyckpt.CheckpointView:
    torch.save(dict(model), path / "model.pt")
    return lazyckpt.open(path / "model.pt")


# -- against what ranks wrote


PARALLEL = [name for name, spec in CASES.items() if spec.tp * spec.pp * spec.ep > 1]


def division(spec: MegatronSpec) -> dict[str, Any]:
    """What `shard` is asked for, to give what the ranks of a run have."""
    found: dict[str, Any] = {"tp": spec.tp, "pp": spec.pp, "ep": spec.ep, "vpp": spec.vpp or 1, "layout": spec.layout}
    if spec.etp is not None:
        found["etp"] = spec.etp
    if spec.first is not None:
        found["layout"] = [spec.first, spec.layers - spec.first]
    if spec.account:  # the first and the last chunk have one layer less
        found["layout"] = [1, *[2] * (2 * (spec.vpp or 1) - 2), 1]
    return found


def rank_file(case: Case, spec: MegatronSpec, rank: Rank) -> Path:
    name = f"mp_rank_{rank.tp:02d}" + (f"_{rank.pp:03d}" if spec.pp > 1 else "")
    return case.path / "iter_0000003" / (name + (f"_{rank.ep:03d}" if spec.ep > 1 else "")) / "model_optim_rng.pt"


def alone(root: dict[str, Any], spec: MegatronSpec, folder: Path) -> lazyckpt.CheckpointView:
    """A rank's file as that of a model on one rank."""
    layers = {name.split(".")[2] for name in root["model"] if name.startswith("decoder.layers.")}
    for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor"):
        setattr(root["args"], f"{name}_parallel_size", 1)
    root["args"].num_layers, root["args"].world_size, root["args"].data_parallel_size = len(layers), 1, 1
    root["args"].num_experts = spec.experts and spec.experts // spec.ep
    path = folder / "iter_0000003" / "mp_rank_00"
    path.mkdir(parents=True, exist_ok=True)
    torch.save(root, path / "model_optim_rng.pt")
    return lazyckpt.open(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
def test_a_shard_is_what_megatrons_rank_held(megatron_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    case, spec = megatron_cases[name], CASES[name]
    view = lazyckpt.open(case.path)
    mesh, etp = Mesh(spec.tp, spec.pp, 1, spec.ep), spec.etp or spec.tp
    shards = [view.shard(**division(spec), rank=n) for n in range(world_size(mesh, etp))]
    assert all(shard.mesh == mesh for shard in shards)
    for n, shard in enumerate(shards):
        path = rank_file(case, spec, place_of(division_of(mesh, etp), n).rank)
        root = torch.load(path, weights_only=False)
        chunks = {"": root["model"]} if spec.vpp is None else {f"model{i}.": root[f"model{i}"] for i in range(spec.vpp)}
        tensors = {f"{chunk}{key}": t for chunk, model in chunks.items() for key, t in model.items()}
        held = {key: t for key, t in tensors.items() if isinstance(t, torch.Tensor)}
        assert set(shard) == set(held)
        for key, t in held.items():  # (of grouped experts the files have one matrix, [experts, in, out] flattened)
            assert bit_equal(shard[key][...].reshape(t.shape), t), (n, key)
        if spec.distributed or spec.layerwise or spec.vpp is not None or etp != spec.tp:
            continue  # one file alone does not say whose a rank's states are (see test_to_megatron.py)
        own = alone(root, spec, tmp_path / str(n))
        assert set(own.states) == set(shard.states)
        for state, tensors in own.states.items():
            left = set(shard.states[state]) - set(tensors)  # (of one file, the experts' optimizer is not always known)
            assert set(tensors) <= set(shard.states[state]) and all(".experts." in key for key in left), state
            for key in tensors:
                assert bit_equal(shard.states[state][key][...], tensors[key][...]), (n, state, key)
    back = lazyckpt.unshard(reversed(shards))
    check_same(back, view)
    for state, truth in case.truth.items():
        for key, whole in truth.items():
            assert bit_equal(back.states[state][key][...], whole), (state, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("tp2_gelu_tied", {"tp": 4, "pp": 2}),
        ("tp2_mixed", {"tp": 4, "pp": 2, "ep": 2}),
        ("pp2_vpp2", {"pp": 4, "dp": 2}),
        ("ep2_grouped", {"tp": 2, "ep": 3}),
        ("tp2_dp2_grouped_etp2", {"tp": 4, "ep": 4}),
        ("tp2_ep2_etp1", {"tp": 2, "ep": 4, "dp": 3}),
        ("tp2_pp2_distopt_tied", {"pp": 4, "tp": 2, "dp": 2}),
        ("tp4_gelu", {"tp": 2, "dp": 3}),
        ("tp2_mla", {"tp": 2, "dp": 2}),
        ("pp2_vpp2", {"pp": 2, "vpp": 4, "tp": 2}),  # more ranks than groups of heads
        ("single", {"tp": 4}),
        ("pp2_uneven", {"layout": "E|tt|t|ttL", "pp": 4, "dp": 2}),
        ("tp2_mixed", {"layout": [0, 1, 2, 1], "pp": 2}),
        ("tp2_dp2_mtp_distopt", {"layout": "Et|t|mL", "pp": 3, "tp": 2}),
        ("tp2_ep2_etp1", {"tp": 2, "ep": 2, "etp": 4, "pp": 2, "layout": [0, 2], "dp": 2}),
        ("tp2_dp2_ep2_etp2", {"tp": 4, "ep": 4, "etp": 2}),
        ("ep2_grouped", {"ep": 3, "etp": 2}),
    ],
)
def test_other_degrees_and_back(megatron_cases: dict[str, Case], name: str, degrees: dict[str, Any]) -> None:
    view = lazyckpt.open(megatron_cases[name].path)
    mesh = Mesh(*(degrees.get(axis, 1) for axis in ("tp", "pp", "dp", "ep")))
    ranks = range(world_size(mesh, degrees.get("etp")))
    check_same(lazyckpt.unshard([view.shard(**degrees, rank=n) for n in ranks]), view)


def test_torch_dist_has_the_shards_that_rank_files_have(megatron_folder: Path, megatron_cases: dict[str, Case]) -> None:
    for name in ("tp2_pp2_bf16", "tp2_mla", "tp2_dp2_ep2_etp2"):
        rank_files = lazyckpt.open(megatron_cases[name].path)
        dist = lazyckpt.open(megatron_folder / name / "dist")
        shards = zip(all_ranks(rank_files, tp=2, pp=2), all_ranks(dist, tp=2, pp=2), strict=True)
        for one, other in shards:
            assert set(one) == set(other)
            assert all(bit_equal(one[key][...], other[key][...]) for key in one)


@pytest.mark.parametrize(("tp", "multiple"), [(1, 128), (2, 16), (3, 7), (4, 1)])
def test_the_vocabulary_is_padded_as_asked(megatron_cases: dict[str, Case], tp: int, multiple: int) -> None:
    name = "embedding.word_embeddings.weight"
    view = lazyckpt.open(megatron_cases["tp2_gelu_tied"].path).select(lambda n: n == name or "position" in n)
    whole = view.states["exp_avg"][name][...]  # 64 rows on two ranks
    rows = -(-len(whole) // (tp * multiple)) * multiple
    shards = [view.shard(tp=tp, vocab_multiple=multiple, rank=n) for n in range(tp)]
    padded = torch.cat([shard.states["exp_avg"][name][...] for shard in shards])
    assert {shard[name].shape for shard in shards} == {(rows, whole.shape[1])}
    assert torch.equal(padded[: len(whole)], whole) and not padded[len(whole) :].any()
    check_same(lazyckpt.unshard(shards), view)
    again = [shards[0].shard(tp=2, rank=n)[name].shape[0] for n in range(2)]
    assert again == [view.shard(tp=2 * tp, vocab_multiple=multiple, rank=0)[name].shape[0]] * 2
    with pytest.raises(MeshError, match="vocab_multiple=0"):
        view.shard(tp=2, vocab_multiple=0, rank=0)


def test_two_ranks_to_four_to_one(megatron_cases: dict[str, Case]) -> None:
    case = megatron_cases["tp2_gelu_tied"]
    view = lazyckpt.open(case.path)
    four = all_ranks(view, tp=4)
    truth = case.truth["exp_avg"]
    layer = "decoder.layers.1"
    for n, shard in enumerate(four):
        moments = shard.states["exp_avg"]
        for key, dim in {
            f"{layer}.self_attention.linear_qkv.bias": 0,
            f"{layer}.mlp.linear_fc1.weight": 0,
            f"{layer}.mlp.linear_fc2.weight": 1,
            "embedding.word_embeddings.weight": 0,
        }.items():
            assert bit_equal(moments[key][...], truth[key].chunk(4, dim)[n]), key
        assert bit_equal(moments[f"{layer}.mlp.linear_fc2.bias"][...], truth[f"{layer}.mlp.linear_fc2.bias"])
    check_same(lazyckpt.unshard(four), view)
    single = lazyckpt.unshard(four).shard(tp=1, rank=0)
    assert all(bit_equal(single[key][...], t) for key, t in case.truth["weights"].items())


def test_gate_and_up_are_cut_each(megatron_cases: dict[str, Case]) -> None:
    case = megatron_cases["single"]
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = case.truth["weights"][key].chunk(2)
    for n, shard in enumerate(all_ranks(lazyckpt.open(case.path), tp=2)):
        wanted = torch.cat([gate.chunk(2)[n], up.chunk(2)[n]])
        assert bit_equal(shard[key][...], wanted)
        assert bit_equal(shard[key][5:20:3, 1::2], wanted[5:20:3, 1::2])
        assert "concatenated in 2 parts" in shard[key].explain()
    layer = lazyckpt.open(case.path).select("*layers.0*").rename("hf")
    for n, shard in enumerate(all_ranks(layer, tp=2)):
        assert bit_equal(shard["model.layers.0.mlp.up_proj.weight"][...], up.chunk(2)[n])


@pytest.mark.slow
def test_what_deepspeeds_ranks_held(kinds: Mapping[str, Case]) -> None:
    """Shards of different sizes (AutoTP), a pipeline, fused parts: with the stored degree, the stored shards."""
    from .test_deepspeed_checkpoint import tag

    for name, tp in {"autotp_zero1": 2, "autotp_zero1_tp4": 4, "megatron_tp4": 4, "megatron_four_layers": 2}.items():
        case = kinds[name]
        view = lazyckpt.open(case.path)
        shards = all_ranks(view, tp=tp)
        check_same(lazyckpt.unshard(shards), view)
        for degree in (1, 2, tp):
            ours = all_ranks(view, tp=degree)
            peer = lazyckpt.deepspeed.DeepSpeedCheckpoint(tag(case), tp_degree=degree)
            for n, shard in enumerate(ours):
                if name.startswith("autotp"):
                    states: dict[str, Any] = peer.get_2d_parallel_state(n, 0)["module"]
                else:
                    pp = peer.pp_degree
                    layers = [layer for p in range(pp) for layer in peer.get_transformer_state(n, p)]
                    states = {f"{2 + i}.{key}": t for i, layer in enumerate(layers) for key, t in layer.items()}
                for key, t in states.items():
                    assert bit_equal(shard.states["weights"][key][...], t[...]), (name, degree, n, key)
    stages = all_ranks(lazyckpt.open(case.path), pp=2)
    layers_of = [sorted({key.split(".")[0] for key in stage if key[0].isdecimal()}) for stage in stages]
    assert layers_of[0] == ["2", "3"] and layers_of[1][:2] == ["4", "5"], "numbers of a pipeline stay"
    assert all("tied_modules.embed.word_embeddings.weight" in stage for stage in stages)


@pytest.mark.parametrize("name", ["llama_sharded", "mixtral"])
def test_hugging_faces_models(huggingface_cases: dict[str, Case], name: str) -> None:
    view = lazyckpt.open(huggingface_cases[name].path)
    rules = {"*.mlp.*": "replicated", "*.experts.*": "replicated"}  # (their 41 rows are odd)
    check_same(lazyckpt.unshard(view.shard(tp=2, dp=2, rank=n, rules=rules) for n in range(4)), view)
    stages = all_ranks(view, pp=2)
    layers = [name for name in view if ".layers." in name]
    assert sorted(n for stage in stages for n in stage if ".layers." in n) == sorted(layers), "names keep their numbers"
    assert "model.embed_tokens.weight" in stages[0] and "model.norm.weight" in stages[1]
    assert "lm_head.weight" in stages[1] and "lm_head.weight" not in stages[0]
    check_same(lazyckpt.unshard(stages), view)


@pytest.mark.slow
def test_what_is_packed_has_partitions_too(dcp_cases: dict[str, Case]) -> None:
    for name, case in dcp_cases.items():
        if name == "unknown_codec":
            continue
        view = lazyckpt.open(case.path)
        shards = all_ranks(view, dp=3)
        back = lazyckpt.unshard(shards)
        for state, tensors in view.states.items():
            for key, t in tensors.items():
                whole = t[...]
                assert bit_equal(back.states[state][key][...], whole), key
                if whole.dim() and whole.numel():
                    flat = torch.cat([shard.states[state][key][...] for shard in shards])
                    assert bit_equal(flat[: whole.numel()], whole.reshape(-1)), key
                    assert not flat[whole.numel() :].to(torch.bool).any()


# -- random models, rules and degrees


Rows = Callable[[torch.Tensor, int], list[torch.Tensor]]


def fused(sizes: list[int], dim: int) -> Rows:
    def cut(t: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        parts = [part.chunk(ranks, dim) for part in t.split(sizes, dim)]
        return [torch.cat([part[n] for part in parts], dim) for n in range(ranks)]

    return cut


@st.composite
def tensors(draw: st.DrawFn, ranks: int) -> tuple[tuple[int, ...], Any, Rows]:
    """(shape, rule, what torch makes of it for a number of ranks): cut evenly over ``ranks``, and what divides it."""
    ndim = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    dim = draw(st.integers(0, ndim - 1))
    parts = [draw(st.integers(1, 2)) * ranks for _ in range(draw(st.integers(1, 3)))]
    kind = draw(st.sampled_from(["replicated", "cat", "parts", "count"]))
    if kind == "replicated":
        return tuple(shape), "replicated", lambda t, n: [t] * n
    if kind == "count":
        parts = [parts[0]] * len(parts)
    shape[dim] = parts[0] if kind == "cat" else sum(parts)
    if kind == "cat":
        return tuple(shape), {"cat": dim}, lambda t, n: list(t.chunk(n, dim))
    return tuple(shape), {"cat": dim, "parts": parts if kind == "parts" else len(parts)}, fused(parts, dim)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_model_any_layout_and_back(tmp_path: Path, data: st.DataObject) -> None:
    tp, pp, dp, ep = (data.draw(st.sampled_from([1, 2, 3]), label=axis) for axis in ("tp", "pp", "dp", "ep"))
    again = data.draw(st.sampled_from([1, 2]), label="cut again")
    model: State = {"embed_tokens.weight": torch.randn(4 * tp * again, 3)}
    rules: dict[str, Any] = {"embed_tokens.weight": "column"}
    cuts: dict[str, Rows] = {"embed_tokens.weight": lambda t, n: list(t.chunk(n))}
    kinds = [data.draw(tensors(tp * again)) for _ in range(data.draw(st.integers(1, 2)))]
    experts = data.draw(st.sampled_from([0, ep * again]))
    for layer in range(pp * again):
        for k, (shape, rule, rows) in enumerate(kinds):
            for inner in ["", *(f"mlp.experts.{e}." for e in range(experts))]:
                name = f"layers.{layer}.{inner}w{k}"
                model[name] = torch.randn(shape)
                rules[f"layers.*w{k}"], cuts[name] = rule, rows
    model["norm.weight"] = torch.randn(5)
    cuts["norm.weight"] = lambda t, n: [t] * n
    view = save(tmp_path, model)
    mesh = Mesh(tp, pp, dp, ep)
    shards = [view.shard(tp=tp, pp=pp, dp=dp, ep=ep, rank=n, rules=rules) for n in range(world_size(mesh))]
    layers = sum(name.endswith(".w0") and "experts" not in name for name in model) // pp
    for n, shard in enumerate(shards):
        rank = rank_of(mesh, n)
        for name in shard:
            local = cuts[name](model[name], tp)[rank.tp]
            if dp > 1:
                each = -(-local.numel() // dp)
                padded = torch.cat([local.reshape(-1), torch.zeros(dp * each - local.numel())])
                local = padded[rank.dp * each : (rank.dp + 1) * each]
            assert bit_equal(shard[name][...], local), (rank, name)
            step = 1 + n % 3
            assert bit_equal(dense(shard[name][step - 1 :: step]), dense(local[step - 1 :: step]))
        there = {int(name.split(".")[1]) for name in shard if name.startswith("layers.")}
        assert there == set(range(rank.pp * layers, (rank.pp + 1) * layers))
        assert ("embed_tokens.weight" in shard) == (rank.pp == 0) and ("norm.weight" in shard) == (rank.pp == pp - 1)
    check_same(lazyckpt.unshard(data.draw(st.permutations(shards))), view)
    axis = data.draw(st.sampled_from(["tp", "pp", "ep", "dp"]), label="again along")
    at = data.draw(st.integers(0, len(shards) - 1))
    place = data.draw(st.integers(0, again - 1))
    twice = shards[at].shard(**{axis: again}, rank={axis: place})
    outer = rank_of(mesh, at)
    wide = {a: getattr(mesh, a) * (again if a == axis else 1) for a in ("tp", "pp", "dp", "ep")}
    deep = {a: getattr(outer, a) * again + place if a == axis else getattr(outer, a) for a in wide}
    check_same(twice, view.shard(**wide, rank=deep, rules=rules))


@settings(max_examples=rounds(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_pipeline_of_megatrons_and_back(tmp_path: Path, data: st.DataObject) -> None:
    pp, vpp = data.draw(st.integers(2, 4), label="pp"), data.draw(st.integers(1, 3), label="vpp")
    counts = data.draw(st.lists(st.integers(0, 2), min_size=pp * vpp, max_size=pp * vpp).filter(any), label="layers")
    predicts = data.draw(st.booleans(), label="mtp")
    last = max(n for n, count in enumerate(counts) if count)
    further = data.draw(st.integers(max(last, pp * (vpp - 1)), pp * vpp - 1), label="stage of mtp")
    model: State = {"embedding.word_embeddings.weight": torch.randn(4, 3), "output_layer.weight": torch.randn(4, 3)}
    held: list[State] = [{} for _ in counts]
    first = 0
    for at, count in enumerate(counts):
        for n in range(count):
            for name in ("mlp.linear_fc1.weight", "mlp.router.weight"):
                model[f"decoder.layers.{first + n}.{name}"] = held[at][f"decoder.layers.{n}.{name}"] = torch.randn(3, 4)
        first += count
    model["decoder.final_layernorm.weight"] = torch.randn(3)
    ends = {"embedding.word_embeddings.weight": [0], "output_layer.weight": [-1]}
    ends["decoder.final_layernorm.weight"] = [last if predicts else -1]
    if predicts:
        model["mtp.layers.0.eh_proj.weight"] = torch.randn(3, 6)
        ends["mtp.layers.0.eh_proj.weight"] = [further]
        ends["embedding.word_embeddings.weight"].append(further)
    for name, places in ends.items():
        for at in places:
            held[at][name] = model[name]
    view = save(tmp_path, model)
    layers = ["t" * count for count in counts]
    layers[further] += "m" * predicts
    layout = data.draw(st.sampled_from([counts, f"E{'|'.join(layers)}L"])) if not predicts else f"E{'|'.join(layers)}L"
    shards = [view.shard(pp=pp, vpp=vpp, layout=layout, rank=n) for n in range(pp)]
    for stage, shard in enumerate(shards):
        wanted: State = {}
        for chunk in range(vpp):
            prefix = f"model{chunk}." if vpp > 1 else ""
            wanted |= {prefix + name: t for name, t in held[chunk * pp + stage].items()}
        assert set(shard) == set(wanted)
        assert all(bit_equal(shard[name][...], t) for name, t in wanted.items())
    check_same(lazyckpt.unshard(shards), view)


def test_experts_are_cut_over_ranks_of_their_own(tmp_path: Path) -> None:
    """As parallel_state.py numbers ranks: tp fastest for dense tensors, etp and then ep for experts."""
    expert, dense = (
        "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc2.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    )
    model = {expert.format(n): torch.randn(3, 12) for n in range(4)} | {dense: torch.randn(3, 12)}
    view = save(tmp_path, model)
    for tp, etp, ep in product((1, 2, 3), (1, 2, 3, 4), (1, 2, 4)):
        world = math.lcm(tp, etp * ep)
        shards = [view.shard(tp=tp, ep=ep, etp=etp, rank=n) for n in range(world)]
        for n, shard in enumerate(shards):
            assert bit_equal(shard[dense][...], model[dense].chunk(tp, 1)[n % tp])
            for k in range(4 // ep):
                whole = model[expert.format(n // etp % ep * (4 // ep) + k)]
                assert bit_equal(shard[expert.format(k)][...], whole.chunk(etp, 1)[n % etp])
            assert len(shard) == 1 + 4 // ep
        check_same(lazyckpt.unshard(shards), view)
    with pytest.raises(SelectionError, match="no rank has both"):
        view.shard(tp=2, ep=2, etp=1, rank={"tp": 0, "ep": 1})
    with pytest.raises(SelectionError, match="several ranks"):
        view.shard(tp=1, ep=2, etp=2, rank={"ep": 1})
    again = view.shard(tp=2, etp=1, ep=2, rank=1).shard(tp=2, rank=1)  # etp=2 of the whole
    assert bit_equal(again[dense][...], model[dense].chunk(4, 1)[3])
    assert bit_equal(again[expert.format(0)][...], model[expert.format(2)].chunk(2, 1)[1])


def test_several_ranks_have_one_key_value_head(tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn"
    shapes = {"q_proj.weight": (16, 6), "k_proj.weight": (4, 6), "v_proj.bias": (4,), "o_proj.weight": (6, 16)}
    model = {f"{attention}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(model, tmp_path / "model.safetensors")
    settings = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 6}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    view = lazyckpt.open(tmp_path)
    shards = all_ranks(view, tp=4)
    for n, shard in enumerate(shards):
        for name in ("k_proj.weight", "v_proj.bias"):
            assert bit_equal(shard[f"{attention}.{name}"][...], model[f"{attention}.{name}"].chunk(2)[n // 2])
        assert bit_equal(shard[f"{attention}.q_proj.weight"][...], model[f"{attention}.q_proj.weight"].chunk(4)[n])
        assert f"key-value head {n // 2} of 2" in shard[f"{attention}.k_proj.weight"].explain()
    check_same(lazyckpt.unshard(shards), view)
    again = [shard.shard(tp=2, rank=n) for shard in all_ranks(view, tp=2) for n in range(2)]
    check_same(lazyckpt.unshard(again), view)
    with pytest.raises(MeshError, match="cannot be cut evenly"):
        view.select("*k_proj*").shard(tp=3, rank=0)


@settings(max_examples=rounds(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(placed(), st.data())
def test_intervals_of_tensors_in_any_files(tmp_path: Path, one: Placed, data: st.DataObject) -> None:
    one.write(tmp_path)
    store = PlainStore(tmp_path)
    whole = LazyTensor(store, one.spec)[...]  # type: ignore[arg-type]
    n = whole.numel()
    ends = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=3))), n]
    pieces = [(lo, interval(one.spec, lo, hi)) for lo, hi in pairwise(ends) if lo < hi]
    for lo, spec in pieces:
        found = LazyTensor(store, spec)  # type: ignore[arg-type]
        wanted = whole.reshape(-1)[lo : lo + spec.shape[0]]
        assert bit_equal(found[...], wanted)
        cut = data.draw(st.slices(spec.shape[0]).filter(lambda s: (s.step or 1) > 0))
        assert bit_equal(dense(found[cut]), dense(wanted[cut]))
    if pieces and one.spec.shape:
        assert bit_equal(LazyTensor(store, joined(one.spec, one.spec.shape, pieces))[...], whole)  # type: ignore[arg-type]


# -- names, paddings, ties


def llama(layers: int = 2, vocab: int = 10) -> State:
    model = {"model.embed_tokens.weight": torch.randn(vocab, 4), "model.norm.weight": torch.randn(4)}
    for n in range(layers):
        model |= {
            f"model.layers.{n}.self_attn.q_proj.weight": torch.randn(8, 4),
            f"model.layers.{n}.mlp.down_proj.weight": torch.randn(4, 12),
            f"model.layers.{n}.input_layernorm.weight": torch.randn(4),
        }
    return model | {"lm_head.weight": torch.randn(vocab, 4)}


def test_rows_of_a_vocabulary_are_padded(tmp_path: Path) -> None:
    model = llama()
    view = save(tmp_path, model)
    shards = all_ranks(view, tp=4)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.cat([model[name], torch.zeros(2, 4)])
        for n, shard in enumerate(shards):
            assert bit_equal(shard[name][...], padded[3 * n : 3 * n + 3])
            assert bit_equal(shard[name][1:, ::2], padded[3 * n + 1 : 3 * n + 3, ::2])
        assert "2 rows of padding" in shards[3][name].explain()
    check_same(lazyckpt.unshard(shards), view)
    shards[3].to_safetensors(tmp_path / "rank3")
    assert bit_equal(lazyckpt.open(tmp_path / "rank3")["lm_head.weight"][...], padded[9:12])
    many = all_ranks(save(tmp_path, {"lm_head.weight": model["lm_head.weight"]}), tp=16)
    assert [int(m["lm_head.weight"][...].abs().sum() > 0) for m in many] == [1] * 10 + [0] * 6
    assert bit_equal(lazyckpt.unshard(many)["lm_head.weight"][...], model["lm_head.weight"])


def test_megatron_pads_to_a_multiple_for_each_rank(tmp_path: Path) -> None:
    model = {"embedding.word_embeddings.weight": torch.randn(12, 4), "decoder.layers.0.a_norm.weight": torch.ones(4)}
    (tmp_path / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    root = {"args": args(make_vocab_size_divisible_by=4), "model": model, "iteration": 3, "checkpoint_version": 3.0}
    torch.save(root, tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt")
    shards = all_ranks(lazyckpt.open(tmp_path), tp=2)
    assert [shard["embedding.word_embeddings.weight"].shape for shard in shards] == [(8, 4), (8, 4)]
    assert bit_equal(shards[1]["embedding.word_embeddings.weight"][:4], model["embedding.word_embeddings.weight"][8:])


def test_a_tied_head_is_on_the_last_stage_too(tmp_path: Path) -> None:
    model = llama()
    model["lm_head.weight"] = model["model.embed_tokens.weight"]
    view = save(tmp_path, model)
    assert view.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    first, last = all_ranks(view, pp=2)
    assert "lm_head.weight" not in first and "model.embed_tokens.weight" not in list(last)
    assert bit_equal(last["lm_head.weight"][...], model["lm_head.weight"])
    assert view.shard(tp=2, rank=1).aliases == view.aliases
    back = lazyckpt.unshard([last, first])
    check_same(back, view)
    assert [f.extent for f in back["lm_head.weight"].fragments] == [f.extent for f in view["lm_head.weight"].fragments]


def test_experts_keep_their_numbers_or_count_from_0(tmp_path: Path) -> None:
    hf = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": torch.full((4, 2), n) for n in range(4)}
    stack = {"model.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 2, 6)}
    megatron = {f"decoder.layers.0.mlp.experts.linear_fc1.weight{n}": torch.full((4, 2), n) for n in range(4)}
    deepspeed = {f"moe.deepspeed_moe.experts.deepspeed_experts.{n}.w": torch.full((2,), n) for n in range(4)}
    view = save(tmp_path, hf | stack | megatron | deepspeed)
    shard = view.shard(ep=2, rank=1)
    assert set(shard) == {
        "model.layers.0.mlp.experts.2.up_proj.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "decoder.layers.0.mlp.experts.linear_fc1.weight1",
        "moe.deepspeed_moe.experts.deepspeed_experts.0.w",
        "moe.deepspeed_moe.experts.deepspeed_experts.1.w",
    }
    assert int(shard["decoder.layers.0.mlp.experts.linear_fc1.weight1"][0, 0]) == 3
    assert int(shard["moe.deepspeed_moe.experts.deepspeed_experts.0.w"][0]) == 2
    assert bit_equal(
        shard["model.layers.0.mlp.experts.gate_up_proj"][...], stack["model.layers.0.mlp.experts.gate_up_proj"][2:]
    )
    check_same(lazyckpt.unshard(all_ranks(view, ep=4)), view)


def test_ranks_are_counted_tp_first() -> None:
    mesh = Mesh(tp=2, pp=3, dp=2, ep=2)
    order = [Rank(t, p, d, e) for p, d, e, t in product(range(3), range(2), range(2), range(2))]
    assert [rank_of(mesh, n) for n in range(24)] == order
    assert rank_of(mesh, (1, 2)) == rank_of(mesh, {"tp": 1, "pp": 2}) == rank_of(mesh, Rank(1, 2)) == Rank(1, 2, 0, 0)
    for wrong in (24, -1, (2,), (0, 0, 0, 0, 0), {"tq": 1}, {"tp": -1}, "0", 1.0, (True,), {"pp": "1"}):
        with pytest.raises(SelectionError):
            rank_of(mesh, wrong)  # type: ignore[arg-type]


# -- how much is read


def test_nothing_is_read_before_a_slice_and_then_its_bytes(megatron_cases: dict[str, Case]) -> None:
    view, counts = opened(megatron_cases["tp2_pp2_bf16"].path)
    counts.clear()
    shard = view.shard(tp=4, rank=3, rules={"*linear_qkv*": "column"})
    part = view.shard(tp=4, dp=3, rank=3, rules={"*linear_qkv*": "column"})
    assert counts.bytes == 0
    t = shard["decoder.layers.2.mlp.linear_fc1.weight"]
    t[...]
    assert counts.bytes == t.nbytes
    counts.clear()
    t[3]
    assert counts.bytes == t.nbytes // t.shape[0]
    counts.clear()
    flat = part["decoder.layers.2.mlp.linear_fc1.weight"]
    flat[...]
    assert counts.bytes == flat.nbytes == t.nbytes // 3
    counts.clear()
    back = lazyckpt.unshard([view.shard(tp=2, dp=2, rank=n) for n in range(4)])
    assert counts.bytes == 0
    whole = back["decoder.layers.2.mlp.linear_fc1.weight"]
    whole[3:5]
    assert counts.bytes == 2 * whole.nbytes // whole.shape[0]


def test_shards_are_pickled_selected_and_sharded_again(megatron_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(megatron_cases["tp2_pp2_bf16"].path)
    stage = view.shard(pp=2, rank=1)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in stage, "Megatron's stages count from 0"
    sent = pickle.loads(pickle.dumps(stage))
    check_same(sent, stage)
    check_same(lazyckpt.unshard([sent, view.shard(pp=2, rank=0)]), view)
    again = sent.select("*linear_fc2*").shard(tp=2, pp=2, rank=(1, 1))
    assert list(again) == ["decoder.layers.0.mlp.linear_fc2.weight"]
    truth = megatron_cases["tp2_pp2_bf16"].truth["fp32"]["decoder.layers.3.mlp.linear_fc2.weight"]
    assert bit_equal(again.states["fp32"]["decoder.layers.0.mlp.linear_fc2.weight"][...], truth.chunk(2, 1)[1])
    halves = [view.shard(dp=2, rank=n).shard(tp=2, rank=m) for n, m in product(range(2), range(2))]
    check_same(lazyckpt.unshard(halves), view)
    assert stage["decoder.layers.1"].to()["mlp.linear_fc2.weight"].shape == truth.shape


# -- what cannot be


def test_degrees_that_do_not_divide_are_named(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    single = lazyckpt.open(megatron_cases["single"].path)  # 2 layers, 4 heads in 2 groups, 24 wide
    with pytest.raises(MeshError, match=r"tp=8.*linear_proj.*\(16, 16\).*4 heads"):
        single.shard(tp=8, rank=0)
    with pytest.raises(MeshError, match=r"pp=4: the 2 layers decoder.layers.0 to decoder.layers.1"):
        single.shard(pp=4, rank=0)
    with pytest.raises(MeshError, match=r"ep=3: the 4 experts of"):
        lazyckpt.open(megatron_cases["ep2"].path).shard(ep=3, rank=0)
    with pytest.raises(MeshError, match=r"ep=4: the 6 experts of .*weight1' \(6, 16, 48\)"):
        lazyckpt.open(megatron_cases["ep2_grouped"].path).shard(ep=4, rank=0)
    view = save(tmp_path, llama())
    with pytest.raises(
        MeshError, match=r"tp=8.*down_proj.weight' of shape \(4, 12\) cannot be cut evenly over 8 ranks"
    ):
        view.shard(tp=8, rank=0)
    with pytest.raises(MeshError, match="dp=0"):
        view.shard(dp=0, rank=0)
    with pytest.raises(SelectionError, match="there are 2 ranks"):
        view.shard(tp=2, rank=2)


def test_a_tensor_without_a_rule_is_named_and_rules_decide(tmp_path: Path) -> None:
    model = {
        "layers.0.thing": torch.randn(4, 6),
        "layers.0.gate_up": torch.randn(8, 3),
        "layers.0.norm.weight": torch.ones(3),
    }
    view = save(tmp_path, model)
    with pytest.raises(
        FormatError, match=r"tp=2: nothing tells how 'layers.0.thing' of shape \(4, 6\), 'layers.0.gate_up'"
    ):
        view.shard(tp=2, rank=0)
    assert list(view.select("*norm*").shard(tp=2, rank=0)) == ["layers.0.norm.weight"]
    rules: dict[str, Any] = {"*thing": "row", "*gate_up": "swiglu"}
    shard = view.shard(tp=2, rank=1, rules=rules)
    assert bit_equal(shard["layers.0.thing"][...], model["layers.0.thing"][:, 3:])
    assert bit_equal(shard["layers.0.gate_up"][...], model["layers.0.gate_up"][[2, 3, 6, 7]])
    check_same(shard.shard(rank=0), shard)  # the rules stay known
    uneven = all_ranks_with(view, {"*thing": {"cat": 1, "widths": [[3, 1], [1, 1]]}, "*gate_up": "replicated"})
    assert bit_equal(uneven[0]["layers.0.thing"][...], model["layers.0.thing"][:, [0, 1, 2, 4]])
    check_same(lazyckpt.unshard(uneven), view)
    with pytest.raises(FormatError, match="is not understood"):
        view.shard(tp=2, rank=0, rules={"*": "sideways"})


def all_ranks_with(view: lazyckpt.CheckpointView, rules: Mapping[str, Any]) -> list[lazyckpt.CheckpointView]:
    return [view.shard(tp=2, rank=n, rules=rules) for n in range(2)]


def test_where_a_stage_is_not_known_all_have_it(tmp_path: Path) -> None:
    view = save(tmp_path, llama() | {"adapter_table": torch.ones(3)})
    first, last = all_ranks(view, pp=2)
    assert "adapter_table" in first and "adapter_table" in last
    assert [line for line in last.problems if "adapter_table" in line and line.code == "assumed-stage"]
    check_same(lazyckpt.unshard([first, last]), view)


def test_only_all_ranks_of_one_mesh_go_together(tmp_path: Path) -> None:
    view = save(tmp_path, llama())
    two = all_ranks(view, tp=2)
    with pytest.raises(MeshError, match=r"1 of 2 ranks are missing: \(1, 0, 0, 0\)"):
        lazyckpt.unshard(two[:1])
    with pytest.raises(MeshError, match="not of one checkpoint on one mesh"):
        lazyckpt.unshard([two[0], view.shard(tp=4, rank=1)])
    for wrong in ([], [view]):
        with pytest.raises(MeshError, match="only views that `shard` gave"):
            lazyckpt.unshard(wrong)
    with pytest.raises(DataError, match="parts of shards"):
        lazyckpt.unshard([two[0].select("*"), two[1]])
    with pytest.raises(DataError, match="shard the whole view"):
        view["model.layers.0"].shard(tp=2, rank=0)


def test_tied_names_of_a_part(tmp_path: Path) -> None:
    weight = torch.randn(8, 4)
    path = tmp_path / "x.pt"
    torch.save({"a.weight": weight, "b.weight": weight, "c.weight": weight, "d.weight": torch.randn(8, 4)}, path)
    view = lazyckpt.open(path)
    rules = {"*": "column"}
    table = {"b.{p}": "e.{p}"}
    for names, tied in [("bd", ""), ("bcd", "c"), ("cd", ""), ("ad", ""), ("acd", "c")]:
        part = view.select(lambda name, names=names: name[0] in names)
        for made in (part.shard(tp=2, rank=1, rules=rules), part.rename(table)):
            new = names if made.mesh.tp == 2 else names.replace("b", "e")
            assert {name[0] for name in made} == set(new), (names, list(made))
            assert {alias[0] for alias in made.aliases} == set(tied)
            for name in made:
                wanted = part[name.replace("e.", "b.")][...]
                assert torch.equal(made[name][...], wanted[4:] if made.mesh.tp == 2 else wanted)
    shard = view.shard(tp=2, rank=0, rules=rules)
    with pytest.raises(DataError, match=r"'b.weight' is a tied name of 'a.weight'"):
        shard.select("b.*").shard(tp=2, rank=0)


def test_one_plan_serves_all_ranks(tmp_path: Path) -> None:
    """What is kept of one mesh or rules is not used for others."""
    name = "layers.0.mlp.up_proj.weight"
    torch.save({f"layers.{n}.mlp.up_proj.weight": torch.arange(32.0).view(8, 4) for n in range(6)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    first = [view.shard(tp=2, pp=2, rank=n) for n in range(4)]
    again = [lazyckpt.open(tmp_path / "x.pt").shard(tp=2, pp=2, rank=n) for n in range(4)]
    assert [{n: t.shape for n, t in v.items()} for v in first] == [{n: t.shape for n, t in v.items()} for v in again]
    assert view.shard(tp=4, rank=3)[name].shape == (2, 4)
    assert view.shard(tp=2, rank=1, rules={"*": "row"})[name].shape == (8, 2)
    assert torch.equal(view.shard(tp=2, rank=1)[name][...], view[name][4:])
