"""Which file or folder that a trainer writes beside the weights is what. Pure.

Names: transformers/trainer.py (`_save_checkpoint` and what it calls), accelerate/checkpointing.py
`save_accelerator_state`, accelerate/utils/fsdp_utils.py `save_fsdp_model` and `save_fsdp_optimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_PLAIN = {  # files: names -> what stands in them; a number makes it the next of its kind
    r"optimizer(?:_(\d+))?\.bin": "optimizer",
    r"scheduler(?:_(\d+))?\.bin": "scheduler",
    r"optimizer\.pt()": "optimizer",
    r"scheduler\.pt()": "scheduler",
    r"sampler(?:_(\d+))?\.bin": "sampler",
    r"dl_state_dict(?:_(\d+))?\.bin": "dl_state_dict",
    r"custom_checkpoint_(\d+)\.pkl": "custom_checkpoint",
    r"random_states_(\d+)\.pkl": "random_states",
    r"rng_state(?:_(\d+))?\.pth": "rng_state",
    r"scaler\.pt()": "scaler",
    r"training_args\.bin()": "training_args",
}
_MODELS = {
    r"pytorch_model_fsdp(?:_(\d+))?\.bin": "model",
    r"(?:pytorch_)?model_(\d+)\.(?:bin|safetensors)": "model",
    r"model\.(?:pt|pth)()": "model",  # nobody's in particular, and everybody's
}
_FOLDERS = {r"pytorch_model_fsdp_(\d+)": "model", r"optimizer_(\d+)": "optimizer"}
_FILES = [(re.compile(pattern), kind) for pattern, kind in (_PLAIN | _MODELS).items()]
_DIRS = [(re.compile(pattern), kind) for pattern, kind in _FOLDERS.items()]
# these are numbered by rank, or from 0 on, and keep the number; of the others the first has none
_ALWAYS = ("random_states", "rng_state", "custom_checkpoint")
# these never number the first: a folder with such files is of a file for each rank (torch_checkpointing's)
_RANK = re.compile(r"(?:model|optimizer|scheduler)_0\.(?:pt|bin|safetensors)")
_FIRST = re.compile(r"(?:pytorch_)?model\.(?:bin|safetensors)(?:\.index\.json)?")  # the first model, of Hugging Face


class Part(NamedTuple):
    """``name``: the file or folder; ``place``: what it stands under in the whole: "optimizer", "model_1", ..."""

    name: str
    kind: str
    place: str
    folder: bool


def parts(files: Iterable[str], folders: Iterable[str]) -> list[Part]:
    """What there is, of the weights all but what an ordinary Hugging Face folder has.

    >>> [p.place for p in parts(["optimizer_1.bin", "rng_state_0.pth", "notes.txt"], ["pytorch_model_fsdp_0"])]
    ['optimizer_1', 'rng_state_0', 'model']
    >>> parts(["model_0.safetensors", "model_1.safetensors"], []), parts(["model_1.bin", "model_2.bin"], [])
    ([], [])
    """
    files = list(files)
    if any(_RANK.fullmatch(name) for name in files):
        return []
    found = [p for name in files if (p := _part(name, _FILES, False))]
    later = sorted(int(p.place.rpartition("_")[2]) for p in found if p.kind == "model" and p.place != "model")
    if later != list(range(1, len(later) + 1)):  # not the models of one state, but saves of several steps
        found = [p for p in found if p.kind != "model"]
    found += [p for name in folders if (p := _part(name, _DIRS, True))]
    if all(p.place.startswith("model_") for p in found) and not any(map(_FIRST.fullmatch, files)):
        return []  # of a state there would be a first model, or an optimizer: these are models by themselves
    return found


def _part(name: str, table: list[tuple[re.Pattern[str], str]], folder: bool) -> Part | None:
    for pattern, kind in table:
        match = pattern.fullmatch(name)
        if match:
            number = match[1]
            numbered = number and (kind in _ALWAYS or int(number) > 0)
            return Part(name, kind, f"{kind}_{int(number)}" if numbered else kind, folder)
    return None
