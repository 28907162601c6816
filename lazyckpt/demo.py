"""What `lazyckpt demo` shows: the writers of its checkpoints, and the walk through them.

The files are real ones: safetensors shards by safetensors itself, with the index that Hugging Face's tools write, and
training checkpoints by torch.save. Every line that the walk shows is the line that runs.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

_LAYERS, _HIDDEN, _INNER, _VOCAB = 4, 128, 512, 1000


class Step(NamedTuple):
    """A line of Python and what it printed; where ``code`` is empty, a remark."""

    code: str
    text: str


# -- the files


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write the demo's checkpoints: ``model/`` (sharded safetensors), ``training.pt``, ``bomb.pt``. -> what is in the
    first."""
    torch.manual_seed(0)
    weights = _write_model(folder / "model")
    _write_training(folder / "training.pt")
    torch.save({"weight": torch.ones(2, 3), "surprise": _Bomb(folder / "it_ran")}, folder / "bomb.pt")
    return weights


def _write_model(folder: Path) -> dict[str, torch.Tensor]:
    """A language model's weights in the names of Llama, bf16, in three shards; its output layer is tied to its
    embedding, so it is not stored."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN)}
    for n in range(_LAYERS):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (_HIDDEN, _HIDDEN) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (_INNER, _HIDDEN) for p in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INNER)}
        shapes |= {f"{layer}.{p}_layernorm.weight": (_HIDDEN,) for p in ("input", "post_attention")}
    shapes["model.norm.weight"] = (_HIDDEN,)
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}

    folder.mkdir(parents=True)
    total = sum(t.nbytes for t in weights.values())
    weight_map: dict[str, str] = {}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if size >= len(shards) * total / 3:
            shards.append({})
        shards[-1][name] = tensor
        size += tensor.nbytes
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    return weights


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": 4,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": 4,
    "vocab_size": _VOCAB,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _write_training(path: Path) -> None:
    """A small model after a few steps of Adam, with all that a training run saves to go on."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({k: v.state_dict() for k, v in parts.items()} | {"epoch": 1, "loss": loss.item()}, path)


class _Bomb:
    """Pickled, it is a call of os.system: unpickling it the usual way runs the command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)


# -- the walk

_WALK = """
# A language model in bf16, in three safetensors shards with a Hugging Face index. Opening it reads no tensor data.
import lazyckpt, torch
view = lazyckpt.open(folder / "model")
print(view.tree(depth=3))
# A part of it is a view too ("layers.1.mlp" will do: there is only one). `to` reads it, and nothing else.
layer = view["layers.1.mlp"].to("cpu")
{name: tuple(tensor.shape) for name, tensor in layer.items()}
# One tensor: its name, shape and dtype cost nothing. A slice reads the bytes it needs, and `explain` tells which.
w = view["layers.1.mlp.up_proj.weight"]
w
w[0:2, ::32]
print(w.lazy[0:2].explain())
# The output layer is tied to the embedding: the files hold it once, both names are there.
view.aliases
torch.equal(view["lm_head.weight"][7], view["model.embed_tokens.weight"][7])
# It is what was written, bit for bit.
read = view.to("cpu")
all(torch.equal(read[name], tensor) for name, tensor in written.items())
# A training checkpoint of torch.save: weights, Adam's moments under the parameters' names, and the scheduler.
run = lazyckpt.open(folder / "training.pt")
print(run.tree())
run.states["exp_avg_sq"]["0.weight"][0, :4]
run.meta["epoch"], run.meta["scheduler"]["last_epoch"]
# A file that runs a command when torch unpickles it. Here it is data: nothing in a pickle is ever run.
bomb = lazyckpt.open(folder / "bomb.pt")
print(*bomb.problems)
bomb.meta["surprise"].module, bomb.meta["surprise"].name
bomb["weight"][...]
(folder / "it_ran").exists()
"""


def walk(folder: Path) -> Iterator[Step]:
    """Write the checkpoints and go through them, line by line."""
    written = write(folder)
    names: dict[str, Any] = {"folder": folder, "written": written}
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    yield Step("", f"Wrote {len(files)} files, {size / 2**20:.1f} MiB, to {folder}:\n  " + "\n  ".join(files))
    for line in _WALK.strip().splitlines():
        if line.startswith("# "):
            yield Step("", line)
            continue
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(line, "<demo>", "single"), names)  # a line from above
        yield Step(line, printed.getvalue())
