"""ZeRO and BF16_Optimizer checkpoints of :mod:`.nasty_model`, saved by real DeepSpeed.

The training runs in a child process (:mod:`.deepspeed_launch`); :func:`write_many` pays its start once for all cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from . import Case
from .deepspeed_launch import launch, load_case

__all__ = ["TagsSpec", "ZeroSpec", "load_tags", "write_many", "write_zero"]


@dataclass(frozen=True, kw_only=True)
class ZeroSpec:
    """One training run of three steps, saved at its end."""

    writer: ClassVar[str] = "deepspeed_dense"

    stage: Literal[0, 1, 2, 3]
    """Stage 0 has no names for its optimizer states on disk: ``info["group_param_names"]`` has them."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    dp: int = 2
    seed: int = 0
    hidden: int = 26
    layers: int = 2
    vocab: int = 103
    optimizer: str = "adamw"
    """One of :func:`.optimizers.make_optimizer`."""
    round_robin: bool = False
    sub_group_size: int | None = None
    """ZeRO-3: elements of a rank's partition per sub-group."""
    hpz: int | None = None
    """ZeRO-3: ranks that share a secondary copy of the weights (``zero_hpz_partition_size``)."""
    exclude_frozen: bool = False
    elastic: bool = False
    parameter_alignment: bool = False
    bf16_optimizer: bool = False
    """fp32 gradient accumulation, which makes DeepSpeed take its BF16_Optimizer (needs stage 1 and bf16)."""
    named_groups: bool = False
    """The optimizer is given named parameters, in an order that is not the module's."""
    client_state: dict[str, Any] | None = None
    """Pickled to the child: its classes must be importable there."""

    @property
    def world(self) -> int:
        return self.dp


@dataclass(frozen=True, kw_only=True)
class TagsSpec:
    """One training run of three steps, saved after each of them."""

    writer: ClassVar[str] = "deepspeed_dense"

    zero: ZeroSpec
    trainer: bool = False
    """As Hugging Face's Trainer has it: ``checkpoint-N/global_stepN``, each with its own ``latest`` and other files.

    Otherwise all tags share a folder, and a tag "best" is there too, saved at step 2 beside its own, not as latest.
    """

    @property
    def world(self) -> int:
        return self.zero.world

    def tags_at(self, step: int) -> list[str]:
        return [f"global_step{step}"] + (["best"] if step == 2 and not self.trainer else [])

    def folder_at(self, step: int) -> str:
        """The folder that holds the tags of this step."""
        return f"checkpoint-{step}" if self.trainer else "."


def write_zero(out_dir: Path, **options: Any) -> Case:
    """Write one checkpoint to ``out_dir/ckpt`` and its truth to ``out_dir/truth``; the options are ZeroSpec's."""
    return write_many(out_dir.parent, {out_dir.name: ZeroSpec(**options)})[out_dir.name]


def write_many(out_dir: Path, specs: Mapping[str, ZeroSpec]) -> dict[str, Case]:
    """Write each checkpoint to ``out_dir/NAME``, one after the other from one child process."""
    launch(out_dir, specs)
    return {name: load_case(out_dir / name) for name in specs}


def load_tags(folder: Path, spec: TagsSpec) -> dict[str, Case]:
    """What was written to ``folder``, by tag ("global_step2", "best") or by the Trainer's folder ("checkpoint-2").

    Of tags that share a folder, ``info["open"]`` says which one to open; the folder's ``latest`` is the last step's.
    """
    cases = {}
    for step in range(1, 4):
        for tag in spec.tags_at(step):
            case = load_case(folder / "saves" / spec.folder_at(step) / tag)
            info = case.info if spec.trainer else case.info | {"open": {"tag": tag}}
            path = folder / "ckpt" / spec.folder_at(step)
            cases[spec.folder_at(step) if spec.trainer else tag] = replace(case, path=path, info=info)
    return cases
