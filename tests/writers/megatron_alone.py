"""The model on one rank, with the weights that lazyckpt reads from a parallel model's checkpoint: its logits.

``python -m tests.writers.megatron_alone FOLDER NAMES`` prints a line of JSON, kind -> name -> difference; NAMES is
JSON, kind -> names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import lazyckpt

from .megatron_core import CASES, MegatronSpec, build, forward, start


def difference(spec: MegatronSpec, folder: Path, kind: str) -> float:
    view = lazyckpt.open(folder / kind)
    start(MegatronSpec(seed=99))
    (model,) = build(spec, alone=True, vocab=view["embedding.word_embeddings.weight"].shape[0])
    weights = view.to()
    stacked = {name: t for name, t in weights.items() if t.ndim == 3}
    for name, t in stacked.items():  # [experts, in, out] lie one behind the other in the parameter
        weights[name] = t.reshape(dict(model.named_parameters())[name].shape)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any(not name.endswith("_extra_state") for name in missing):
        raise RuntimeError(f"{folder}: missing {missing}, unexpected {unexpected}")
    truth = torch.load(folder / "logits.pt")
    model.eval()
    with torch.no_grad():
        logits = forward(model, truth["tokens"], None)
    expected = truth["logits"]
    return float((logits - expected).abs().max() / expected.abs().max())


def main(folder: Path, names: dict[str, list[str]]) -> None:
    from .megatron_cpu import OnCPU, patch

    patch()
    found = {}
    with tempfile.TemporaryDirectory() as scratch, OnCPU():
        dist.init_process_group("gloo", f"file://{scratch}/store", rank=0, world_size=1)
        for kind in names:
            found[kind] = {name: difference(CASES[name], folder / name, kind) for name in names[kind]}
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
