"""Checkpoints of NeMo 1: archives by NeMo's own connectors, with models of megatron-core on gloo ranks in them.

``python -m tests.writers.nemo_files FOLDER`` writes every case of :data:`CASES` to ``FOLDER/NAME``: ``model.nemo`` and
``truth.pt`` (what the ranks held, under the names of the model on one rank). The module around the model is a `ModelPT`
with the attribute ``model``, as `MegatronGPTModel` is; the states of the optimizer are not part of such an archive.

nemo-toolkit is not in the test extra: its connectors for Megatron's models import all of its language models. It ran in
an environment of its own with lightning 2.4, hydra-core 1.3, omegaconf 2.3 and transformers 4.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import Case
from .megatron_core import MegatronSpec, _run, build, config_of, start
from .megatron_truth import gather

__all__ = ["CASES", "SPEECH", "NemoSpec", "load_case", "write_all"]

SPEECH = "speech"  # a model that is not Megatron's


@dataclass(frozen=True)
class NemoSpec:
    """An archive. ``half``: the model is in a Float16Module (``megatron_amp_O2``); ``distributed``: the weights are a
    distributed checkpoint; ``packed``: whether they are in an archive, or in its folder."""

    model: MegatronSpec
    half: bool = False
    distributed: bool = False
    packed: bool = True


CASES: dict[str, NemoSpec | None] = {
    SPEECH: None,
    "single": NemoSpec(MegatronSpec(groups=2, seed=40)),
    "tp2": NemoSpec(MegatronSpec(tp=2, groups=2, bias=True, norm="LayerNorm", seed=41)),
    "tp2_pp2_tied_half": NemoSpec(MegatronSpec(tp=2, pp=2, layers=4, tied=True, bf16=True, seed=42), half=True),
    "pp2_folder": NemoSpec(MegatronSpec(pp=2, layers=3, first=1, seed=43), packed=False),
    "dist_tp2": NemoSpec(MegatronSpec(tp=2, groups=2, seed=44), distributed=True),
    "dist_ep2": NemoSpec(MegatronSpec(dp=2, ep=2, experts=4, seed=45), distributed=True),
}


def write_all(folder: Path) -> Path:
    """Write all cases, in a child process of their own."""
    _run("nemo_files", str(folder))
    return folder


def load_case(folder: Path, name: str) -> Case:
    truth = torch.load(folder / name / "truth.pt")
    info = json.loads((folder / name / "info.json").read_text()) | {"tied": {}, "archives": False}
    path = folder / name / "model.nemo"
    return Case(path if path.is_file() else folder / name / "ckpt", truth, info)


# -- in the child


def config(spec: NemoSpec) -> dict[str, Any]:
    """The part of a ``megatron_gpt_config.yaml`` that describes the model."""
    model = spec.model
    return {
        "mcore_gpt": True,
        "tensor_model_parallel_size": model.tp,
        "pipeline_model_parallel_size": model.pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": model.ep,
        "encoder_seq_length": 8,
        "max_position_embeddings": 8,
        "num_layers": model.layers,
        "num_layers_in_first_pipeline_stage": model.first,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups,
        "kv_channels": None,
        "num_moe_experts": model.experts,
        "activation": "fast-swiglu" if model.gated else "gelu",
        "bias": model.bias,
        "normalization": model.norm.lower(),
        "share_embeddings_and_output_weights": model.tied,
        "make_vocab_size_divisible_by": model.divisible,
        "megatron_amp_O2": spec.half,
        "transformer_engine": False,
        "precision": "bf16" if model.bf16 else 32,
    }


def module_of(settings: dict[str, Any], model: Any, sharded: bool) -> Any:
    from nemo.core.classes.modelPT import ModelPT
    from omegaconf import OmegaConf

    class Module(ModelPT):
        def __init__(self) -> None:
            super().__init__(OmegaConf.create(settings))
            self.model = model

        def setup_training_data(self, train_data_config: Any) -> None: ...

        def setup_validation_data(self, val_data_config: Any) -> None: ...

        @classmethod
        def list_available_models(cls) -> None: ...

    if sharded:  # megatron_gpt_model.py `sharded_state_dict`
        Module.sharded_state_dict = lambda self: self.model.sharded_state_dict(prefix="model.")
    return Module()


def _speech(out: Path) -> None:
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector

    torch.manual_seed(39)
    inner = torch.nn.ModuleDict({
        "encoder": torch.nn.Conv1d(3, 4, 5),
        "norm": torch.nn.BatchNorm1d(4),
        "decoder": torch.nn.Linear(4, 7).half(),
    })  # fmt: skip
    module = module_of({"sample_rate": 16000, "labels": ["a", "b", "ä"], "optim": {"name": "adamw"}}, inner, False)
    connector = SaveRestoreConnector()
    connector.save_to(module, str(out / "model.nemo"))
    torch.save({"weights": {k: v.clone() for k, v in module.state_dict().items()}}, out / "truth.pt")
    (out / "info.json").write_text("{}")


def _without_tensorstore() -> None:
    """NeMo imports a loader of the zarr backend that megatron-core has no more since 0.16; it saves nothing."""
    from megatron.core.dist_checkpointing import strategies

    if not hasattr(strategies, "tensorstore"):
        module = ModuleType(f"{strategies.__name__}.tensorstore")
        module.TensorStoreLoadShardedStrategy = type("TensorStoreLoadShardedStrategy", (), {})  # type: ignore[attr-defined]
        sys.modules[module.__name__] = strategies.tensorstore = module


class _Untrained:
    """In place of an optimizer, of which NeMo's archives have nothing."""

    chained_optimizers = ()


def _case(spec: NemoSpec, rank: int, out: Path) -> None:
    from megatron.core import mpu
    from megatron.core.transformer.module import Float16Module
    from nemo.collections.nlp.parts.nlp_overrides import NLPSaveRestoreConnector
    from nemo.utils.app_state import AppState

    start(spec.model)
    chunks = build(spec.model)
    if spec.model.bf16:
        chunks[0].bfloat16()
    truth = gather(spec.model, chunks, _Untrained())
    model = Float16Module(config_of(spec.model), chunks[0]) if spec.half else chunks[0]
    state = AppState()
    state.tensor_model_parallel_size, state.tensor_model_parallel_rank = (
        spec.model.tp,
        mpu.get_tensor_model_parallel_rank(),
    )
    state.pipeline_model_parallel_size = spec.model.pp
    state.pipeline_model_parallel_rank = mpu.get_pipeline_model_parallel_rank()
    state.data_parallel_size, state.data_parallel_rank = spec.model.dp, mpu.get_data_parallel_rank()
    state.model_parallel_size = spec.model.tp * spec.model.pp
    connector = NLPSaveRestoreConnector()
    connector.pack_nemo_file = spec.packed
    path = out / "model.nemo" if spec.packed else out / "ckpt" / "model.nemo"
    path.parent.mkdir(exist_ok=True)
    connector.save_to(module_of(config(spec), model, spec.distributed), str(path))
    if rank == 0:
        torch.save(truth, out / "truth.pt")
        (out / "info.json").write_text(json.dumps(asdict(spec)))


def main(folder: Path, only: list[str]) -> None:
    from tests.writers import nemo_files as named

    from .megatron_cpu import patch
    from .megatron_ranks import run_ranks

    patch()
    _without_tensorstore()
    worlds = {name: 1 if spec is None else spec.model.world for name, spec in CASES.items()}
    worlds = {name: world for name, world in worlds.items() if name in only or not only}
    for name in worlds:
        (folder / name).mkdir()

    def case(name: str, rank: int) -> None:
        spec = named.CASES[name]
        if spec is None:
            named._speech(folder / name)
        else:
            named._case(spec, rank, folder / name)

    run_ranks(worlds, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
