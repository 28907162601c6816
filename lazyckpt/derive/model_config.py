"""config.json of Hugging Face for models with other layers or experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DataError

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token", "moe_k")
_NUMBERED = ("mlp_only_layers", "global_attn_layers", "cross_attention_layers")  # lists of numbers of layers


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers; None if the configuration does not say it."""
    found = _place(config, _LAYERS)
    return None if found is None else int(found[0][found[1]])


def with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Return the configuration of a model that has these of the layers, in this order.

    Lists with a value for each layer get those of the chosen layers; lists of layers' numbers get the new ones.

    Raises DataError if the configuration cannot express the order.
    """
    found = _place(config, _LAYERS)
    if found is None:
        return dict(config)
    inner, key = found
    count = inner[key]
    new = {**inner, key: len(chosen)}
    for name, value in inner.items():
        if name in _NUMBERED and isinstance(value, list):
            new[name] = [n for n, old in enumerate(chosen) if old in value]
        elif isinstance(value, list) and len(value) == count and name.endswith(("_layers", "_types", "_type", "_list")):
            new[name] = [value[n] for n in chosen if n < count]
    dense = inner.get("first_k_dense_replace")
    if isinstance(dense, int) and dense:
        kinds = [n < dense for n in chosen]
        if kinds != sorted(kinds, reverse=True):
            raise DataError(
                f"config.json has first_k_dense_replace={dense}: layers without experts can only be the first ones"
            )
        new["first_k_dense_replace"] = sum(kinds)
    step = inner.get("decoder_sparse_step")
    if (
        isinstance(step, int)
        and step > 1
        and [(n + 1) % step for n in chosen] != [(n + 1) % step for n in range(len(chosen))]
    ):
        raise DataError(f"config.json has decoder_sparse_step={step}, which the chosen layers do not follow")
    return _with(config, inner, new)


def with_experts(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the configuration of a model with this number of experts in each layer.

    Raises DataError if a token needs more experts than are left, or groups of experts become unequal.
    """
    found = _place(config, _EXPERTS)
    if found is None:
        return dict(config)
    inner, key = found
    top = next((inner[name] for name in _TOP if isinstance(inner.get(name), int)), None)
    if top is not None and top > count:
        raise DataError(f"{count} experts are left, and config.json sends each token to {top}")
    groups = inner.get("n_group")
    if isinstance(groups, int) and groups > 1 and count % groups:
        raise DataError(f"{count} experts are left, which config.json's {groups} groups cannot share equally")
    return _with(config, inner, {**inner, key: count})


def as_mixture(config: Mapping[str, Any], model: str, architecture: str, experts: int, top: int) -> dict[str, Any]:
    """Return the configuration of a dense model whose MLPs became mixtures of experts."""
    new = {**config, "model_type": model, "architectures": [architecture], "num_experts_per_tok": top}
    if model == "mixtral":
        return {**new, "num_local_experts": experts}
    return {
        **new,
        "num_experts": experts,
        "moe_intermediate_size": config.get("intermediate_size"),
        "norm_topk_prob": True,  # the weights of a token's experts sum to 1, as those of the one MLP did
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _place(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[Mapping[str, Any], str] | None:
    """Return the table that has one of the keys, the outer one or that of the text model, and the key."""
    for table in (config, config.get("text_config")):
        if isinstance(table, Mapping):
            for key in keys:
                if isinstance(table.get(key), int):
                    return table, key
    return None


def _with(config: Mapping[str, Any], inner: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return new if inner is config else {**config, "text_config": new}
