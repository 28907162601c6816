"""Models whose matrices are stored as ``[in, out]``: those with transformers' Conv1D in place of linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.expr import make
from ...core.specs import Expr
from .model import Model

# transformers 5.3: the models that use pytorch_utils.Conv1D, and the names of these layers.
_MODELS = frozenset(("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"))
_LAYERS = frozenset(("c_attn", "c_fc", "c_proj", "q_attn"))


def as_unquantized(model: Model, module: str, value: Expr) -> Expr:
    """Return a matrix ``[out, in]`` in the orientation that the unquantized model stores.

    Quantizers transpose the matrices of Conv1D. Parameters: ``model``, the checkpoint; ``module``, the full name of the
    layer; ``value``, its matrix.
    """
    if is_turned(model.evidence.model, module):
        return make("transpose", value, axes=(1, 0))
    return value


def is_turned(config: Mapping[str, Any], module: str) -> bool:
    """Return whether a layer of the unquantized model stores its matrix as ``[in, out]``, by its config.json."""
    return config.get("model_type") in _MODELS and module.rpartition(".")[2] in _LAYERS
