"""The configurations of NeMo and Megatron-Bridge, as the arguments that Megatron-LM would have recorded.

Sources: NeMo 1 ``model_config.yaml`` (nemo/collections/nlp/models/language_modeling/megatron_base_model.py
`build_transformer_config`, modules/common/megatron/mlp.py `ParallelMLP`), the fields of megatron-core's
`TransformerConfig` (transformer/transformer_config.py, model_parallel_config.py) in NeMo 2's ``context/model.yaml`` and
Megatron-Bridge's ``run_config.yaml``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ...errors import LazyckptError, Problem, cannot_read
from ...io.containers.pickle.values import namespace
from ...io.plain_yaml import load_yaml
from ...io.storage.base import Store
from ...layouts.megatron import number

# field of the configuration -> Megatron-LM's argument
_ARGUMENTS = {
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_WITHOUT = ", nor how the model was cut"


def read_config(store: Store, path: str, problems: list[Problem]) -> dict[str, Any] | None:
    """Return the mapping in a YAML file; None, with a problem, if it cannot be read or is no mapping."""
    try:
        found = load_yaml(store, path)
    except LazyckptError as e:
        problems.append(cannot_read(path, e, _WITHOUT))
        return None
    if not isinstance(found, dict):
        line = f"{path} holds a {type(found).__name__}, not a table: how the model was cut is not known from it"
        problems.append(Problem("unreadable-file", line, path))
        return None
    return found


def args_of(config: Mapping[Any, Any]) -> Namespace:
    """Return the fields of a `TransformerConfig`, or of what has the same names, as arguments of Megatron-LM.

    >>> found = args_of({"num_moe_experts": 4, "share_embeddings_and_output_weights": False})
    >>> found.num_experts, found.untie_embeddings_and_output_weights
    (4, True)
    """
    args = namespace({key: value for key, value in config.items() if isinstance(key, str)})
    for own, argument in _ARGUMENTS.items():
        if own in config:
            setattr(args, argument, config[own])
    shared = config.get("share_embeddings_and_output_weights")
    if isinstance(shared, bool):
        args.untie_embeddings_and_output_weights = not shared
    groups = number(args, "num_query_groups")
    args.group_query_attention = groups is not None and groups != number(args, "num_attention_heads")
    return args


def nemo_args(config: Mapping[Any, Any], core: bool) -> Namespace:
    """Return the arguments in a ``model_config.yaml`` of NeMo 1. ``core``: whether the model is megatron-core's, whose
    first matrices are gate and up in one with every gated activation. NeMo's own have them in one matrix with
    activations that are called fast, in two matrices with the others.

    >>> nemo_args({"activation": "swiglu"}, True).swiglu, nemo_args({"activation": "swiglu"}, False).swiglu
    (True, False)
    """
    args = args_of(config)
    parts = [part for name in ("encoder", "decoder") if isinstance(part := config.get(name), Mapping)]
    activations = {str(one["activation"]) for one in (config, *parts) if one.get("activation") is not None}
    gated = {name.endswith("glu") and (core or name.startswith("fast-")) for name in activations}
    if len(gated) == 1:
        args.swiglu = gated.pop()
    if config.get("normalization") == "layernorm1p":
        args.apply_layernorm_1p = True
    if isinstance(config.get("transformer_engine"), bool):
        args.transformer_impl = "transformer_engine" if config["transformer_engine"] else "local"
    for key in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"):
        values = {part[key] for part in parts if type(part.get(key)) is int}
        if not hasattr(args, key) and len(values) == 1 and key != "num_layers":
            setattr(args, key, values.pop())
    return args
