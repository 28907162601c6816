"""The names of adapters' tensors.

PEFT: peft/utils/save_and_load.py `get_peft_model_state_dict`. kohya: networks/lora.py of sd-scripts, and LyCORIS, which
write ``lora_unet_down_blocks_0_...`` with underscores for dots. diffusers: loaders/lora_conversion_utils.py, with the
names ``.processor.to_q_lora`` before version 0.22.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import DataError

OUTER = "base_model.model."  # the modules of a PeftModel around the model

# What follows a module's name -> the part: (pattern, the part by the pattern's groups)
_PARTS = [
    (re.compile(r"\.lora_([AB])(?:\.\w+)?\.weight$"), "{}"),
    (re.compile(r"\.lora_B(?:\.\w+)?\.(bias)$"), "B.{}"),
    (re.compile(r"\.lora_embedding_([AB])(?:\.\w+)?$"), "embedding_{}"),
    (re.compile(r"\.lora_(magnitude)_vector(?:\.\w+)?$"), "{}"),
    (re.compile(r"\.(hada_(?:w[12]_[ab]|t[12]))(?:\.\w+)?$"), "{}"),
    (re.compile(r"\.(lokr_(?:w[12](?:_[ab])?|t2))(?:\.\w+)?$"), "{}"),
    (re.compile(r"\.lora_(down|up|mid)\.weight$"), "{}"),
    (re.compile(r"(?:\.lora|\.lora_linear_layer|_lora)\.(down|up)\.weight$"), "{}"),
    (re.compile(r"\.(alpha)$"), "{}"),
]
_SAME = {"down": "A", "up": "B"}
_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)$")
_PIPELINE = ("unet.", "text_encoder", "transformer.", "prior.")  # models of a pipeline of diffusers
_KOHYA = re.compile(r"^(lora|lycoris)_(unet|te\d?|transformer|prior_te|prior_unet|lm)_")


@dataclass
class Module:
    """What an adapter has for one module.

    Attributes
    ----------
    name
        The module, as the adapter names it, without PEFT's outer modules.
    depth
        How many other adapted parameters of the same module are wrapped in this one (PEFT's ``target_parameters``).
    parts
        What: "A", "B", "mid", "magnitude", "lokr_w1", "alpha", ... -> the name of the tensor.
    """

    name: str
    depth: int = 0
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def is_peft(self) -> bool:
        """Whether the names are those of PEFT, which has alpha in its configuration, and not of diffusers, where a
        missing alpha means a scale of 1."""
        if self.name.startswith(_PIPELINE):
            return False
        return any(
            ".lora_" in name or ".hada_" in name or ".lokr_" in name for name in self.parts.values()
        ) and not any(name.endswith((".up.weight", "lora_up.weight")) for name in self.parts.values())

    @property
    def flat(self) -> tuple[str, str] | None:
        """Of a name of kohya's the model (unet, te1) and the rest of the name."""
        found = _KOHYA.match(self.name)
        return None if found is None else (found[2], self.name[found.end() :])


def modules_of(names: Iterable[str]) -> tuple[list[Module], dict[str, str]]:
    """Return the adapted modules, and the other tensors, which replace whole ones: name -> the name in the model.

    Raises DataError if a module has two tensors for the same part: the file holds several adapters.
    """
    modules: dict[tuple[str, int], Module] = {}
    whole: dict[str, str] = {}
    for name in names:
        inner = name.removeprefix(OUTER)
        part = _part(inner)
        if part is None:
            whole[name] = _original(inner)
            continue
        module, what = part
        depth = module.count(".base_layer")
        plain = module.replace(".base_layer", "")
        one = modules.setdefault((plain, depth), Module(plain, depth))
        if what in one.parts:
            raise DataError(
                f"{name!r} and {one.parts[what]!r} are the same part of {plain!r}: the checkpoint holds several "
                "adapters. lazyckpt.recipes.adapters(src, dst, adapter=NAME) writes one of them"
            )
        one.parts[what] = name
    return list(modules.values()), whole


def _part(name: str) -> tuple[str, str] | None:
    """Return the module and the part that a name names.

    >>> _part("model.layers.0.q_proj.lora_A.weight")
    ('model.layers.0.q_proj', 'A')
    >>> _part("unet.mid_block.attentions.0.attn1.processor.to_out_lora.up.weight")
    ('unet.mid_block.attentions.0.attn1.to_out.0', 'B')
    >>> _part("model.norm.weight")
    """
    for pattern, what in _PARTS:
        found = pattern.search(name)
        if found is not None:
            module = name[: found.start()]
            old = _PROCESSOR.search(module)
            if old is not None:
                module = f"{module[: old.start()]}.{old[1]}{'.0' if old[1] == 'to_out' else ''}"
            part = what.format(found[1])
            return module, _SAME.get(part, part)
    return None


def _original(name: str) -> str:
    """Return the name that a tensor has in the model, without PEFT's modules around it."""
    return re.sub(r"\.modules_to_save(?:\.(?!weight$|bias$)\w+)?(?=\.)|\.base_layer(?=\.)", "", name)
