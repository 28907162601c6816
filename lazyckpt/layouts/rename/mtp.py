"""Layers that predict further tokens (MTP): a stack of their own in Megatron, behind the last layer at Hugging Face.

``mtp.layers.0`` of megatron-core (transformer/multi_token_prediction.py `MultiTokenPredictionLayer`) is layer 61 of
DeepSeek V3, whose decoder has the layers 0 to 60. Its transformer layer is ``transformer_layer`` until megatron-core
0.16, later ``mtp_model_layer``. The tables name what it has in addition (`enorm`, `hnorm`, `eh_proj`,
`final_layernorm`) as if it were a layer of the decoder. Megatron's names get that form before a table is applied, or
lose it afterwards.

Of Nemotron-H each such layer has a few layers of its own, ``mtp.layers.0.mtp_model_layer.layers.1``. At Hugging Face
all of them have one number, ``mtp.layers.1``. What a layer has in addition is with its first one there, the last norm
with its last one. The tables have the names with one number.

Sources: Megatron-Bridge src/megatron/bridge/models/deepseek/common.py, glm/glm45_bridge.py and
nemotronh/nemotron_h_bridge.py `_MTPFlatteningMapping`, mbridge mbridge/models/deepseek_v3.py `_convert_mtp_param`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...core.specs import TensorSpec, renamed
from ..tables import pattern
from .table import Entry

_OWN = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_INNER = ("transformer_layer", "mtp_model_layer")


def has_mtp(entries: Iterable[Entry]) -> bool:
    """Return whether a table has names for such layers."""
    return any(".eh_proj." in entry.left and entry.left.startswith("decoder.") for entry in entries)


def layers_of(meta: Mapping[str, Any]) -> int | None:
    """Return how many layers the decoder has, by Megatron's args or Hugging Face's config; None if neither says."""
    args, config = meta.get("args"), meta.get("config")
    found = [getattr(args, "num_layers", None), config.get("num_hidden_layers") if isinstance(config, dict) else None]
    return next((count for count in found if type(count) is int and count > 0), None)


def as_decoder(
    states: Mapping[str, Mapping[str, TensorSpec]], layers: int | None
) -> Mapping[str, Mapping[str, TensorSpec]]:
    """Return Megatron's tensors with those of MTP layers in layers behind the decoder's.

    They keep their names if the number of the decoder's layers is not known.
    """
    if layers is None:
        return states
    return {state: _renamed(specs, lambda name: _behind(name, layers)) for state, specs in states.items()}


def _behind(name: str, layers: int) -> str:
    """Return the name of a tensor in a layer behind the decoder's.

    >>> _behind("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", 61), _behind("mtp.layers.0.enorm.weight", 61)
    ('decoder.layers.61.mlp.linear_fc2.weight', 'decoder.layers.61.enorm.weight')
    """
    match = pattern("megatron.mtp_layer").fullmatch(name)
    if match is None:
        return name
    head, _, rest = match[2].partition(".")
    if head in _INNER:
        return f"decoder.layers.{layers + int(match[1])}.{rest}"
    return f"decoder.layers.{layers + int(match[1])}.{match[2]}" if head in _OWN else name


def from_decoder(
    states: Mapping[str, Mapping[str, TensorSpec]], layers: int | None
) -> dict[str, dict[str, TensorSpec]]:
    """Return Megatron's tensors with those of layers behind the decoder's in a stack of their own.

    Where the number of the decoder's layers is not known, the first layer with an ``eh_proj`` is the first behind them.
    """
    found = {state: dict(specs) for state, specs in states.items()}
    if layers is None:
        own = [
            m
            for s in found.values()
            for n in s
            if (m := pattern("megatron.decoder_layer").match(n)) and ".eh_proj." in n
        ]
        layers = min((int(match[1]) for match in own), default=None)
    if layers is None:
        return found
    first = layers
    saved = {
        spec.stored_as for specs in found.values() for spec in specs.values() if ".mtp_model_layer." in spec.stored_as
    }
    inner = _INNER[1] if saved else _INNER[0]
    return {state: _renamed(specs, lambda name: _apart(name, first, inner)) for state, specs in found.items()}


def stray(states: Mapping[str, Mapping[str, TensorSpec]], meta: Mapping[str, Any]) -> int | None:
    """Return the number of a layer behind the decoder's that cannot be one of MTP: config.json does not count it, and
    it has no ``eh_proj``. ``states`` have the names of the tables. None if there is none."""
    layers, config = layers_of(meta), meta.get("config")
    if layers is None or not isinstance(config, dict):
        return None
    further = config.get("num_nextn_predict_layers")
    layers += further if type(further) is int and further > 0 else 0
    found: dict[int, bool] = {}
    for name in {name for specs in states.values() for name in specs}:
        match = pattern("megatron.decoder_layer").match(name)
        if match is not None and int(match[1]) >= layers:
            found[int(match[1])] = found.get(int(match[1]), False) or ".eh_proj." in name
    return min((number for number, whole in found.items() if not whole), default=None)


def _apart(name: str, layers: int, inner: str) -> str:
    """Return the name of a tensor in Megatron's stack of MTP layers.

    >>> _apart("decoder.layers.61.mlp.linear_fc2.weight", 61, "transformer_layer")
    'mtp.layers.0.transformer_layer.mlp.linear_fc2.weight'
    """
    match = pattern("megatron.decoder_layer").match(name)
    if match is None or int(match[1]) < layers:
        return name
    tail = name[match.end() :]
    own = tail.partition(".")[0] in _OWN
    return f"mtp.layers.{int(match[1]) - layers}.{tail if own else f'{inner}.{tail}'}"


# -- Nemotron-H


def is_hybrid(entries: Iterable[Entry]) -> bool:
    """Return whether a table has names for layers that have layers of their own."""
    return any(entry.left.startswith("mtp.") and ".mixer." in entry.left for entry in entries)


def per_layer(names: Iterable[str], back: bool) -> int | None:
    """Return how many layers each MTP layer has, by Megatron's names, or ``back`` by those of Hugging Face.

    None if there are none, or if the names do not say it.
    """
    found = [match for name in names if (match := pattern("megatron.mtp_layer").fullmatch(name))]
    if not back:
        inner = [one for match in found if (one := pattern("megatron.mtp_inner").match(match[2]))]
        return 1 + max(int(one[2]) for one in inner) if inner else None
    first = sorted({int(match[1]) for match in found if match[2].startswith("eh_proj.")})
    last = sorted({int(match[1]) for match in found if match[2].startswith("final_layernorm.")})
    count = 1 + max((int(match[1]) for match in found), default=-1)
    size = count // len(first) if first and count % len(first) == 0 else 0
    fits = first == list(range(0, count, size or 1)) and last == [number + size - 1 for number in first]
    return size if size and fits else None


def flattened(states: Mapping[str, Mapping[str, TensorSpec]], size: int) -> dict[str, dict[str, TensorSpec]]:
    """Return Megatron's tensors with one number for the layers of all MTP layers, of which each has ``size``."""
    return {
        state: {(new := _flat(name, size)): renamed(one, new) for name, one in specs.items()}
        for state, specs in states.items()
    }


def _flat(name: str, size: int) -> str:
    """Return the name of a tensor with one number.

    >>> _flat("mtp.layers.1.mtp_model_layer.layers.1.mixer.D", 2), _flat("mtp.layers.1.final_layernorm.weight", 2)
    ('mtp.layers.3.mixer.D', 'mtp.layers.3.final_layernorm.weight')
    """
    match = pattern("megatron.mtp_layer").fullmatch(name)
    if match is None:
        return name
    inner = pattern("megatron.mtp_inner").match(match[2])
    if inner is not None:
        return f"mtp.layers.{int(match[1]) * size + int(inner[2])}.{match[2][inner.end() :]}"
    at = size - 1 if match[2].startswith("final_layernorm.") else 0
    return f"mtp.layers.{int(match[1]) * size + at}.{match[2]}"


def nested(states: Mapping[str, Mapping[str, TensorSpec]], size: int) -> dict[str, dict[str, TensorSpec]]:
    """Return Megatron's tensors with two numbers for the layers of MTP layers, of which each has ``size``."""
    return {
        state: {(new := _two(name, size)): renamed(one, new) for name, one in specs.items()}
        for state, specs in states.items()
    }


def _two(name: str, size: int) -> str:
    """Return the name of a tensor with two numbers.

    >>> _two("mtp.layers.3.mixer.D", 2), _two("mtp.layers.3.final_layernorm.weight", 2)
    ('mtp.layers.1.mtp_model_layer.layers.1.mixer.D', 'mtp.layers.1.final_layernorm.weight')
    """
    match = pattern("megatron.mtp_layer").fullmatch(name)
    if match is None:
        return name
    outer, inner = divmod(int(match[1]), size)
    own = match[2].partition(".")[0] in _OWN
    return f"mtp.layers.{outer}.{match[2]}" if own else f"mtp.layers.{outer}.{_INNER[1]}.layers.{inner}.{match[2]}"


def _renamed(specs: Mapping[str, TensorSpec], new: Callable[[str], str]) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        other = new(name)
        taken = other != name and (other in specs or other in found)  # what would be two of a name keeps its own
        found[name if taken else other] = renamed(spec, name if taken else other)
    return found
