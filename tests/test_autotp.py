"""The merge rules of AutoTP, by every version's description of it.

The descriptions are those of deepspeed's layers.py `collect_autotp_universal_checkpoint_info` at the tags v0.18.9,
v0.19.4 and v0.19.8; test_deepspeed_newer.py and test_deepspeed_kinds.py read checkpoints that its versions wrote.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from lazyckpt.core.box import Shape
from lazyckpt.layouts.autotp import autotp_rules, described_rules, undescribed_rules, uses_autotp
from lazyckpt.layouts.families import family_rules
from lazyckpt.layouts.merge import Merge, decide
from lazyckpt.layouts.universal import universal_rules

CONFIG = {"tensor_parallel": {"autotp_size": 2}}
CUSTOM = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}}}
PRESET = {"tensor_parallel": {"autotp_size": 2, "preset_model": "bloom"}}
BY_VERSION = ("0.18.8", "0.18.9", "0.19.5")
ATTENTION = "model.layers.0.self_attn"


def _listed(*names: str) -> list[str]:
    return [f"^{re.escape(name)}$" for name in names]


def _info(version: str, **more: Any) -> dict[str, Any]:
    """What a version says of a Llama with row-parallel projections."""
    if version == "0.18.8":
        return {}
    replicated = _listed(f"{ATTENTION}.o_proj.bias")
    if version == "0.19.5":
        replicated += _listed("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "gate.weight")
    rows = _listed(f"{ATTENTION}.o_proj.weight")
    return {
        "universal_checkpoint_version": 0.2,
        "parameter_with_row_parallelism_patterns": rows,
        "tp_replicated_parameter_patterns": replicated,
        "vocabulary_parameter_patterns": [],
        "parameter_with_sub_params": [],
    } | more


def _merged(name: str, shards: list[Shape], info: dict[str, Any], config: Any = CONFIG, **shapes: Shape) -> Merge:
    family = family_rules()
    autotp = autotp_rules(info, config, {name: shards[0], **shapes}, family)
    return decide(name, shards, (universal_rules(info, family, autotp) if info else autotp, family))


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize(
    ("name", "shape", "whole"),
    [
        ("model.embed_tokens.weight", (8, 4), (8, 4)),
        ("lm_head.weight", (8, 4), (8, 4)),
        ("model.norm.weight", (4,), (4,)),
        (f"{ATTENTION}.q_proj.weight", (2, 4), (4, 4)),
        (f"{ATTENTION}.o_proj.weight", (4, 2), (4, 4)),
        (f"{ATTENTION}.o_proj.bias", (4,), (4,)),
    ],
)
def test_what_no_list_has(version: str, name: str, shape: Shape, whole: Shape) -> None:
    assert _merged(name, [shape, shape], _info(version)).shape == whole


@pytest.mark.parametrize(
    ("config", "width", "norm", "whole"),
    [
        (CUSTOM, 2, 4, None),  # `_slice_embedding`
        (CUSTOM, 4, 4, (8, 4)),
        (CUSTOM, 2, 6, (8, 2)),  # an embedding narrower than the model
        (CONFIG, 2, 4, (8, 2)),  # without a partition_config nothing cuts embeddings
    ],
)
def test_an_embedding_that_is_listed_as_whole_and_cut(config: Any, width: int, norm: int, whole: Shape | None) -> None:
    info, name = _info("0.19.5"), "model.embed_tokens.weight"
    shapes = {name: (8, width), "model.norm.weight": (norm,)}
    sources = described_rules(info, config, shapes, family_rules())
    if whole is None:
        with pytest.raises(ValueError, match=r"2 of the 4 columns that norms have.*rules="):
            decide(name, [(8, width)] * 2, sources)
    else:
        assert decide(name, [(8, width)] * 2, sources).shape == whole
    assert decide("model.norm.weight", [(norm,)] * 2, sources).shape == (norm,)


def test_a_vocabulary_that_is_cut_is_listed() -> None:
    info = _info("0.18.9", vocabulary_parameter_patterns=_listed("lm_head.weight"), original_vocab_size=15)
    assert _merged("lm_head.weight", [(8, 4), (7, 4)], info).shape == (15, 4)


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize("widths", [(6, 6), (8, 4)])
@pytest.mark.parametrize("name", ["attn.c_attn", "self_attn.qkv_proj", "attention.query_key_value", "self_attn.W_pack"])
def test_fused_attention_is_refused_even_if_the_shapes_differ(version: str, widths: tuple[int, int], name: str) -> None:
    """Bloom's heads alternate, GLM's and Phi-3's parts are cut each, and no file names the model."""
    for parameter, shards in ((".weight", [(n, 4) for n in widths]), (".bias", [(n,) for n in widths])):
        with pytest.raises(ValueError, match="model's class"):
            _merged(f"layers.0.{name}{parameter}", shards, _info(version))


def test_fused_attention_of_a_preset_is_cut_as_it_says() -> None:
    name = "layers.0.self_attention.query_key_value"
    assert _merged(f"{name}.weight", [(6, 4)] * 2, _info("0.19.5"), PRESET).shape == (12, 4)
    fused = [{"patterns": _listed(f"{name}.weight"), "shape": [3, -1], "partition_dim": 0}]
    for suffix, shard in ((".weight", (6, 4)), (".bias", (6,))):  # the bias is in no list
        merged = _merged(f"{name}{suffix}", [shard] * 2, _info("0.18.9", parameter_with_sub_params=fused), PRESET)
        assert merged.how is not None and (merged.shape[0], merged.how.fused) == (12, 3)


def test_gate_and_up_in_one() -> None:
    name = "layers.0.mlp.gate_up_proj.weight"
    merged = _merged(name, [(6, 4), (4, 4)], {})
    assert merged.how is not None and (merged.shape, merged.how.fused) == ((10, 4), 2)
    for version in ("0.18.9", "0.19.5"):  # a plan of the model cuts it as one
        with pytest.raises(ValueError, match="gate and up"):
            _merged(name, [(6, 4), (4, 4)], _info(version))


@pytest.mark.parametrize("version", BY_VERSION)
@pytest.mark.parametrize(("columns", "parts"), [(6, 1), (3, 2)])
def test_the_next_matrix_tells_gate_and_up(version: str, columns: int, parts: int) -> None:
    name = "layers.0.mlp.dense_h_to_4h"
    second = {"layers.0.mlp.dense_4h_to_h.weight": (4, columns), f"{name}.weight": (6, 4)}
    for suffix, shard in ((".weight", (6, 4)), (".bias", (6,))):
        merged = _merged(name + suffix, [shard] * 2, _info(version), **second)
        assert merged.how is not None and (merged.shape[0], merged.how.fused) == (12, parts)
    with pytest.raises(ValueError, match="does not tell"):
        _merged(f"{name}.weight", [(6, 4)] * 2, _info(version))


def test_a_column_needs_a_row_after_it() -> None:
    """Transformers' plan of Qwen 2's mixture leaves the shared expert whole."""
    expert = "model.layers.0.mlp.shared_expert"
    for name in (f"{expert}.gate_proj.weight", f"{expert}.down_proj.weight"):
        with pytest.raises(ValueError, match="same module"):
            _merged(name, [(4, 4)] * 2, _info("0.18.9"))
    rows = _listed(f"{expert}.down_proj.weight")
    info = _info("0.18.9", parameter_with_row_parallelism_patterns=rows)
    assert _merged(f"{expert}.gate_proj.weight", [(4, 4)] * 2, info).shape == (8, 4)


@pytest.mark.parametrize("version", BY_VERSION[:2])
def test_stacks_of_experts_are_whole(version: str) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    assert _merged(name, [(4, 6, 2)] * 2, _info(version)).shape == (4, 6, 2)


@pytest.mark.parametrize("version", ["0.18.8", "0.18.9"])
def test_a_partition_config_is_not_guessed(version: str) -> None:
    for name in (f"{ATTENTION}.q_proj.weight", "lm_head.weight"):
        with pytest.raises(ValueError, match="partition_config"):
            _merged(name, [(4, 4), (4, 4)], _info(version), CUSTOM)
    assert _merged("model.norm.weight", [(4,), (4,)], _info(version), CUSTOM).shape == (4,)


def test_experts_of_transformers() -> None:
    experts = "model.layers.0.block_sparse_moe"
    assert _merged(f"{experts}.experts.3.w1.weight", [(6, 4)] * 2, {}).shape == (12, 4)
    assert _merged(f"{experts}.experts.3.w2.weight", [(4, 6)] * 2, {}).shape == (4, 12)
    assert _merged(f"{experts}.gate.weight", [(8, 4)] * 2, {}).shape == (8, 4)


@pytest.mark.parametrize("version", BY_VERSION)
def test_yuan_deals_out_heads_in_pairs(version: str) -> None:
    lf_gate = {f"{ATTENTION}.lf_gate.conv1.weight": (4, 4, 2, 1)}
    with pytest.raises(ValueError, match="Yuan"):
        _merged(f"{ATTENTION}.v_proj.weight", [(4, 4)] * 2, _info(version), **lf_gate)


def test_what_autotp_cannot_describe_is_refused() -> None:
    """Else it would be concatenated, as what no list has."""
    reason = "its fused qkv layout interleaves or replicates blocks"
    pattern = _listed("attn.c_attn.weight")[0]
    info = {"affine_map": {"version": 1, "params": {}}, "autotp_unsupported_parameter_patterns": {pattern: reason}}
    for autotp in (None, autotp_rules(info, CONFIG, {}, family_rules())):
        with pytest.raises(ValueError, match=reason):
            decide("attn.c_attn.weight", [(6, 4)] * 2, [universal_rules(info, family_rules(), autotp)])
    with pytest.raises(ValueError, match="not this one"):
        _merged(f"{ATTENTION}.q_proj.weight", [(6, 4)] * 2, info)


@pytest.mark.parametrize("sizes", [3, (4, 2, 2)])
def test_sub_parameters_in_a_view(sizes: int | tuple[int, ...]) -> None:
    """Two groups of heads, each with q, k and v, cut within each."""
    fused = [{"patterns": ["w"], "shape": [2, sizes, 3], "partition_dim": 1}]
    rows = 12 if sizes == 3 else 8
    merged = decide("w", [(rows, 3)] * 2, [universal_rules({"parameter_with_sub_params": fused}, family_rules())])
    assert merged.how is not None and (merged.shape, merged.how.fused) == ((2 * rows, 3), 6)
    fused = [{"patterns": ["w"], "shape": [-1, sizes, 3], "partition_dim": 1}]
    with pytest.raises(ValueError, match="view"):
        decide("w", [(rows, 3)] * 2, [universal_rules({"parameter_with_sub_params": fused}, family_rules())])


def test_an_affine_map_of_other_shards_is_refused() -> None:
    """GPT-2's matrices are transposed when they are cut, and the map does not say so."""

    def params(shape: list[int]) -> dict[str, Any]:
        def piece(rank: int) -> dict[str, Any]:
            return {"shape": [4, 2], "source": [2 * rank, [4, 1]], "dest": [0, [2, 1]], "locations": [rank]}

        ranks = {r: {"shard_shape": shape, "pieces": [piece(r)]} for r in range(2)}
        return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [4, 4], "ranks": ranks}}}}

    assert decide("w", [(4, 2)] * 2, [universal_rules(params([4, 2]), family_rules())]).shape == (4, 4)
    with pytest.raises(ValueError, match="shards of"):
        decide("w", [(2, 4)] * 2, [universal_rules(params([4, 2]), family_rules())])
    with pytest.raises(ValueError, match="ranks"):
        decide("w", [(4, 2)] * 3, [universal_rules(params([4, 2]), family_rules())])


def test_the_logical_shape_of_a_view_is_that_of_the_matrix() -> None:
    def piece(rank: int) -> dict[str, Any]:
        return {"shape": [3, 2, 5], "source": [10 * rank, [20, 5, 1]], "dest": [0, [10, 5, 1]], "locations": [rank]}

    ranks = {r: {"shard_shape": [3, 2, 5], "pieces": [piece(r)]} for r in range(2)}
    info = {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [3, 4, 5], "ranks": ranks}}}}
    merged = decide("w", [(6, 5)] * 2, [universal_rules(info, family_rules())])
    assert merged.shape == (12, 5)
    starts = [sorted(part.start[0] for part in p.parts or ()) for p in merged.placements]
    assert starts == [[0, 4, 8], [2, 6, 10]]


def test_tensor_parallelism_of_an_unknown_kind() -> None:
    source = undescribed_rules({})
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        with pytest.raises(ValueError, match="vocabulary"):
            decide(name, [(8, 4)] * 2, [source, family_rules()])
    assert decide(f"{ATTENTION}.q_proj.weight", [(8, 4)] * 2, [source, family_rules()]).shape == (16, 4)
    assert not uses_autotp("ds_config.json") and not uses_autotp({"tensor_parallel": {"autotp_size": 1}})
