"""DeepSpeed's own converters, run on the case that a writer left in ``out``, in a process of their own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import bit_equal


def zero_to_fp32(out: Path) -> None:
    """Into ``truth/reference/zero_to_fp32.safetensors``."""
    state = get_fp32_state_dict_from_zero_checkpoint(str(out / "ckpt"))
    _save(state, out / "truth" / "reference" / "zero_to_fp32.safetensors")


def universal_only(out: Path) -> None:
    """ds_to_universal on ``out/ckpt``, into ``out/universal/theirs``; ``out/refused.txt`` if it cannot."""
    tag = (out / "ckpt" / "latest").read_text()
    args = argparse.Namespace(
        input_folder=str(out / "ckpt" / tag),
        output_folder=str(out / "universal" / "theirs"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(args)
    except Exception as e:
        (out / "refused.txt").write_text(f"{type(e).__name__}: {e}")


def universal_lax(out: Path) -> None:
    """:func:`universal` without its check that every pattern of the checkpoint is of use."""
    universal(out, strict=False)


def universal(out: Path, strict: bool = True) -> None:
    """A case of its own, ``NAME.universal``, whose truth is the training's; and what is not as it should be.

    ``info["module_only"]``: what the checkpoint has as ``fp32`` though no optimizer had it (buffers, aliases, frozen
    parameters: ``ds_to_universal`` casts all of ``module``).  ``info["wrong"]``: state -> names that it got wrong.
    """
    case = out.with_name(f"{out.name}.universal")
    tag = (out / "ckpt" / "latest").read_text()
    folder = case / "ckpt" / f"{tag}_universal"
    folder.parent.mkdir(parents=True)
    args = argparse.Namespace(
        input_folder=str(out / "ckpt" / tag),
        output_folder=str(folder),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=strict,
        inject_missing_state=True,
    )
    ds_to_universal.main(args)

    truth = {path.stem: load_file(path) for path in (out / "truth" / "states").glob("*.safetensors")}
    files = {path.name for path in folder.glob("zero/*/*.pt")}
    found = {file.removesuffix(".pt"): _stored(folder / "zero", file) for file in sorted(files)}
    found.pop("step", None)
    module_only = sorted(found["fp32"].keys() - truth["fp32"].keys())
    for name in module_only:
        truth["fp32"][name] = truth["weights"][name].float()
    wrong = {key: [n for n, t in truth[key].items() if not _same(found[key].get(n), t)] for key in found}
    info = json.loads((out / "truth" / "info.json").read_text())
    info |= {"source": out.name, "module_only": module_only, "wrong": {k: names for k, names in wrong.items() if names}}
    info |= {"tag": folder.name, "states": sorted(found)}
    (case / "truth").mkdir()
    (case / "truth" / "info.json").write_text(json.dumps(info, indent=1))
    for key, tensors in found.items():
        _save(
            {n: t for n, t in truth[key].items() if n not in module_only}, case / "truth/states" / f"{key}.safetensors"
        )
        _save(tensors, case / "truth/reference" / f"{key}.safetensors")


def _stored(zero: Path, file: str) -> dict[str, Tensor]:
    """A state of all parameters; with ZeRO-3 they are flat."""
    stored = {path.parent.name: torch.load(path, weights_only=False) for path in zero.glob(f"*/{file}")}
    return {name: t["param"] if isinstance(t, dict) else t for name, t in stored.items()}


def _same(found: Tensor | None, truth: Tensor) -> bool:
    return (
        found is not None
        and bit_equal(found.flatten(), truth.flatten())
        and found.shape in (truth.shape, truth.flatten().shape)
    )


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, path)
