"""How DeepSpeed names the rank files of a tag, in both directions: ranks -> name, and name -> kind and ranks.

Writers: deepspeed/runtime/engine.py `_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`,
`_get_optimizer_ckpt_name`; runtime/pipe/module.py `ckpt_layer_path`. Names in words: deepspeed/checkpoint/utils.py.

    mp_rank_{MP}_model_states.pt                          model         module and client state of an mp rank
    zero_pp_rank_{DP}_mp_rank_{MP}_model_states.pt        zero_model    the same under ZeRO-3: every rank has one
    [bf16_]zero_pp_rank_{DP}_mp_rank_{MP}_optim_states.pt optim         a rank's partition of masters and moments
    layer_{LAYER}-model_{TP}-model_states.pt              layer         one layer of a pipeline
    layer_{LAYER}-model_states.pt                         layer         the same, without a topology that has "model"
    layer_{LAYER}_expert_{EXPERT}_mp_rank_{MP}_model_states.pt  expert  an expert of the LAYER-th MoE module
    expert_{EXPERT}_mp_rank_{MP}_model_states.pt          expert        the same, by old versions
    expp_rank_{EP}_mp_rank_{MP}_optim_states.pt           expert_optim  experts without ZeRO: an ep rank's optimizer

MP counts tensor-parallel ranks within pipeline stages (pp * tp_degree + tp). The "pp_rank" of a ZeRO file is the
data-parallel rank (a historic name). The prefix bf16_ (once also fp16_) says which dtype was configured and nothing
about the layout. MP, TP and a pipeline's LAYER have two digits at least, the others no padding: names do not sort.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_" + ZERO_FILE_PREFIX
FP16_ZERO_FILE_PREFIX = "fp16_" + ZERO_FILE_PREFIX
LAYER_FILE_PREFIX = "layer_"
MODEL_FILE_SUFFIX = "_model_states.pt"
OPTIM_FILE_SUFFIX = "_optim_states.pt"

Kind = Literal["model", "zero_model", "optim", "layer", "expert", "expert_optim"]

_PREFIX = r"(?P<prefix>bf16_|fp16_)?"


def _rank(field: str) -> str:
    return f"(?P<{field}>[0-9]{{1,6}})"  # longer runs of digits are no ranks


_PATTERNS: dict[Kind, re.Pattern[str]] = {
    "model": re.compile(rf"mp_rank_{_rank('mp')}_model_states\.pt"),
    "zero_model": re.compile(rf"{_PREFIX}zero_pp_rank_{_rank('dp')}_mp_rank_{_rank('mp')}_model_states\.pt"),
    "optim": re.compile(rf"{_PREFIX}zero_pp_rank_{_rank('dp')}_mp_rank_{_rank('mp')}_optim_states\.pt"),
    "layer": re.compile(rf"layer_{_rank('layer')}-(?:model_{_rank('tp')}[-_])?model_states\.pt"),
    "expert": re.compile(
        rf"(?:layer_{_rank('layer')}_)?expert_{_rank('expert')}_mp_rank_{_rank('mp')}_model_states\.pt"
    ),
    "expert_optim": re.compile(rf"expp_rank_{_rank('ep')}_mp_rank_{_rank('mp')}_optim_states\.pt"),
}


@dataclass(frozen=True, slots=True)
class RankFile:
    """What the name of a rank file says. Ranks that a kind of file has no place for are None.

    ``layer``: of a "layer", its index in the pipeline; of an "expert", the number of its MoE module (None in the names
    of old versions). ``expert``: its global number. ``tp``: None in the name of a layer without tensor parallelism.
    """

    kind: Kind
    mp: int | None = None
    dp: int | None = None
    tp: int | None = None
    ep: int | None = None
    layer: int | None = None
    expert: int | None = None
    prefix: Literal["", "bf16_", "fp16_"] = ""

    @property
    def name(self) -> str:
        """The file's name, without a folder, as the writer spells it. `parse_ckpt_name` is the inverse.

        >>> RankFile("optim", dp=10, mp=3, prefix="bf16_").name
        'bf16_zero_pp_rank_10_mp_rank_03_optim_states.pt'
        """
        if self.kind == "model":
            return get_model_ckpt_name_for_rank("", f"{self.mp:02d}")
        if self.kind == "optim":
            return self.prefix + get_zero_ckpt_name_for_rank("", self.dp, self.mp or 0)
        if self.kind == "zero_model":
            zero = get_zero_ckpt_name_for_rank("", self.dp, self.mp or 0)
            return self.prefix + zero.removesuffix(OPTIM_FILE_SUFFIX) + MODEL_FILE_SUFFIX
        if self.kind == "layer":
            of_rank = "" if self.tp is None else f"-model_{self.tp:02d}"
            return f"{LAYER_FILE_PREFIX}{self.layer:02d}{of_rank}-{MODEL_FILE_SUFFIX[1:]}"
        of_rank = f"_{MODEL_FILE_PREFIX}{self.mp:02d}"
        if self.kind == "expert":
            module = "" if self.layer is None else f"{LAYER_FILE_PREFIX}{self.layer}_"
            return f"{module}expert_{self.expert}{of_rank}{MODEL_FILE_SUFFIX}"
        return f"expp_rank_{self.ep}{of_rank}{OPTIM_FILE_SUFFIX}"


def parse_ckpt_name(path: str | os.PathLike[str]) -> RankFile | None:
    """The kind and the ranks that a file's name speaks of, with or without a folder before it; None for any other name.

    >>> parse_ckpt_name("global_step9/layer_03-model_01-model_states.pt")
    RankFile(kind='layer', mp=None, dp=None, tp=1, ep=None, layer=3, expert=None, prefix='')
    """
    name = os.path.basename(os.fspath(path))
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(name)
        if match is not None:
            found = match.groupdict()
            prefix = found.pop("prefix", None)
            ranks = {field: None if text is None else int(text) for field, text in found.items()}
            return RankFile(kind, prefix="bf16_" if prefix == "bf16_" else "fp16_" if prefix else "", **ranks)
    return None


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """The path of an mp rank's model states; the rank comes as text ("00", or "*" in a pattern).

    >>> get_model_ckpt_name_for_rank("global_step9", "01")
    'global_step9/mp_rank_01_model_states.pt'
    """
    return os.path.join(base_folder, MODEL_FILE_PREFIX + mp_rank_str + MODEL_FILE_SUFFIX)


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int | str | None, mp_rank: int) -> str:
    """The path of a rank's optimizer states, without the prefix that 16-bit runs put before the name."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """The path of a pipeline layer's states as deepspeed/checkpoint/utils.py spells it; ``layer_id`` is the layer's
    key, as in ``layer_keys`` ("layer_01").

    No writer of 0.19.8 uses that spelling: a pipeline writes ``-model_states.pt`` where this has ``_model_states.pt``.
    ``RankFile("layer", layer=1, tp=0).name`` is the name of the file; `parse_ckpt_name` takes both.
    """
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")
