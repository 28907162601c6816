"""Tensors that are computed from others while they are read, against the tools that move the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numcodecs import zstd
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.testing import opened

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest, Skipped
from ..host import LAZYCKPT, Fresh
from ..limits import copy
from ..sample import Timed, warm

MIB = 1 << 20

# The view of 0.5 * a + 0.5 * b, as text, because the peak memory is measured in a process of its own.
_AVERAGE = """
from lazyckpt.core.expr import computed, make
from lazyckpt.derive.sources import Sources
from lazyckpt.view import view_of

def average(first, second):
    sources = Sources([lazyckpt.open(path, cache=False) for path in (first, second)])
    tensors = {}
    for name in sources.views[0]:
        operands = (sources.operand(n, name) for n in range(2))
        tensors[name] = computed(name, make("linear", *operands, weights=(0.5, 0.5), dtype=None))
    return view_of(sources.store, sources.index(tensors, "linear"), "weights", (), True)
"""
_WRITE = "view.to_safetensors({out!r}, max_shard_size=None, progress=False, memory='256MiB')"


def two(settings: Settings) -> tuple[Path, Path]:
    """Two files of 16 bfloat16 tensors each: of 1 GiB, in a quick run of 64 MiB."""
    rows, columns = settings.pick(8192, 2048), settings.pick(4096, 1024)
    stems = "half-a", "half-b"
    first, second = (data.saved(settings, s, "safetensors", 16, (rows, columns), torch.bfloat16) for s in stems)
    return first, second


def _average(settings: Settings) -> Contest:
    first, second = two(settings)
    out, copied = settings.out(), settings.out("copy")
    warm(first)
    warm(second)
    prepare = f"import lazyckpt\n{_AVERAGE}\nview = average({str(first)!r}, {str(second)!r})"
    names: dict[str, object] = {}
    exec(prepare, names)
    write = compile(_WRITE.format(out=str(out)), "<write>", "exec")

    def cat() -> None:
        """Read both files, and write one."""
        subprocess.run(["cat", first, second], stdout=subprocess.DEVNULL, check=True)
        with open(copied, "wb") as target:
            subprocess.run(["cat", first], stdout=target, check=True)

    def before() -> None:
        remove(copied)
        os.sync()

    def anew() -> tuple[()]:
        remove(out)
        os.sync()
        return ()

    def done() -> None:
        remove(out)
        remove(copied)

    ours = Timed(lambda: exec(write, names), anew)
    clear = f"shutil.rmtree({str(out)!r}, ignore_errors=True)"
    fresh = Fresh(LAZYCKPT, f"{prepare}\n{_WRITE.format(out=str(out))}", clear)
    once = [] if settings.quick else [fresh]
    peer = ("cat of both, and of one to a file", Timed(cat))
    return Contest(ours, peer, before=before, calls=1, most=11, once=once, done=done)


_MERGEKIT = """
import os, shutil, torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
"""
_MERGE = """
options = MergeOptions(quiet=True, lazy_unpickle=True, copy_tokenizer=False, write_model_card=False)
run_merge(MergeConfiguration.model_validate({table!r}), {out!r}, options)
"""


def llama(settings: Settings, name: str) -> Path:
    """The folder of a Llama of bfloat16: of 1 GiB, in a quick run of 64 MiB."""

    def write(folder: Path) -> None:
        hidden, inner, layers = settings.pick(2048, 1024), settings.pick(5632, 2816), settings.pick(10, 3)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (4096, hidden)}
        for n in range(layers):
            layer = f"model.layers.{n}"
            shapes |= {f"{layer}.self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"}
            shapes |= {f"{layer}.mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
            shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, inner)}
            shapes |= {f"{layer}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
        shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (4096, hidden)}
        generator = torch.Generator().manual_seed(sum(name.encode()))
        folder.mkdir()
        tensors = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64, "vocab_size": 4096, "tie_word_embeddings": False,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))

    return data.made(settings.data / f"llama-{name}", write)


def _merge(settings: Settings) -> Contest:
    if find_spec("mergekit") is None:
        raise Skipped("mergekit is not installed: it pins packages, so it needs an environment of its own")
    models = [llama(settings, name) for name in "ab"]
    for model in models:
        warm(model)
    entries = [{"model": str(model), "parameters": {"weight": weight}} for model, weight in zip(models, (0.4, 0.6))]
    table = {"merge_method": "linear", "dtype": "bfloat16", "models": entries}
    out, other, copied = settings.out(), settings.out("peer"), settings.out("copy")

    def before() -> None:
        for path in (out, other, copied):
            remove(path)
        os.sync()

    ours = f"lazyckpt.recipes.merge_to_hf({table!r}, {str(out)!r})"
    peer = _MERGE.format(table=table, out=str(other))
    return Contest(
        Fresh(LAZYCKPT, ours, "import lazyckpt.recipes"),
        ("mergekit", Fresh(_MERGEKIT, peer)),
        ("cp of both models", Timed(partial(copy, models, copied))),
        before=before, calls=1, rehearse=False, most=7, done=before,
    )  # fmt: skip


def fp8(settings: Settings) -> Path:
    """A model in DeepSeek-V3's layout: 1 GiB of FP8 in two shards, a scale for each block of 128x128."""
    rows, columns, each = settings.pick(4096, 1024), settings.pick(8192, 2048), settings.pick(16, 4)
    folder = settings.data / "fp8"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    for shard in range(2):
        tensors: dict[str, torch.Tensor] = {}
        for n in range(each):
            name = f"model.layers.{shard}.experts.{n}.weight"
            tensors[name] = torch.randint(0, 127, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(rows // 128, columns // 128)
        path = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file(tensors, folder / path)
        weight_map |= dict.fromkeys(tensors, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantized_by_blocks(x: torch.Tensor, s: torch.Tensor, block: int = 128) -> torch.Tensor:
    """`weight_dequant` of deepseek-ai/DeepSeek-V3 inference/kernel.py, on the CPU: a block for each program of the
    kernel."""
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    for i in range(0, x.shape[0], block):
        for j in range(0, x.shape[1], block):
            at = (slice(i, i + block), slice(j, j + block))
            y[at] = x[at].to(torch.float32) * s[i // block, j // block]
    return y


def _dequantize(settings: Settings) -> Contest:
    source, out, other = fp8(settings), settings.out(), settings.out("loop")
    paths = sorted(source.glob("*.safetensors"))
    for path in paths:
        warm(path)

    def loop() -> None:
        """inference/fp8_cast_bf16.py, without its progress bar."""
        other.mkdir()
        for path in paths:
            state = load_file(path)
            new = {
                name: dequantized_by_blocks(weight, state[f"{name}_scale_inv"])
                for name, weight in state.items()
                if not name.endswith("_scale_inv")
            }
            save_file(new, other / path.name)

    def ours() -> None:
        lazyckpt.open(source, cache=False).dequantize().to_safetensors(out, progress=False)

    def anew() -> None:
        remove(out)
        remove(other)
        os.sync()

    code = f"lazyckpt.open({str(source)!r}, cache=False).dequantize().to_safetensors({str(out)!r}, progress=False)"
    clear = f"shutil.rmtree({str(out)!r}, ignore_errors=True)"
    once = [] if settings.quick else [Fresh(LAZYCKPT, f"import lazyckpt\n{code}", clear)]
    peer = ("the loop that DeepSeek publishes, on the CPU", Timed(loop))
    return Contest(Timed(ours), peer, before=anew, calls=1, most=5, once=once, done=anew)


def _row_of_four_bits(settings: Settings) -> Contest:
    rows, columns = settings.pick(8192, 1024), 8192
    folder = settings.data / "nvfp4.safetensors"
    if not folder.exists():
        torch.manual_seed(0)
        tensors = {
            "m.weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
            "m.weight_scale": torch.rand(rows, columns // 16).to(torch.float8_e4m3fn),
            "m.weight_scale_2": torch.tensor(0.01),
        }
        save_file(tensors, folder)
    view, counts = opened(folder)
    row = view.dequantize()["m.weight"]
    row[3]

    def count() -> dict[str, float]:
        counts.clear()
        row[rows // 2]
        return {"bytes": float(counts.bytes)}

    return Contest(Timed(lambda: row[rows // 2]), count=count)


def _steps(settings: Settings) -> tuple[Path, Path]:
    """A file of 16 bfloat16 tensors, and the same after 10 steps of AdamW: each element moves by about 1e-4."""
    rows, columns = settings.pick(8192, 2048), settings.pick(4096, 1024)
    base = data.saved(settings, "trained", "safetensors", 16, (rows, columns), torch.bfloat16)
    new = base.with_name(f"{base.stem}-later.safetensors")
    if not new.exists():
        generator = torch.Generator().manual_seed(1)
        moved = {}
        for name, tensor in load_file(base).items():
            step = torch.randn(tensor.shape, generator=generator)
            moved[name] = (tensor.float() * (1 + 3e-3 * step)).bfloat16()
        save_file(moved, new)
    return base, new


def _delta(settings: Settings) -> Contest:
    base, new = _steps(settings)
    out, packed = settings.out(), settings.out("packed")
    warm(base)
    warm(new)

    def write() -> None:
        lazyckpt.delta(new, base).write(out, progress=False)

    def loop() -> None:
        """What the senders of reinforcement-learning stacks do for each tensor: exclusive or, zstd, a checksum."""
        old = load_file(base)
        with open(packed, "wb") as file:
            for name, tensor in load_file(new).items():
                one = _bytes(tensor)
                file.write(zstd.compress(one ^ _bytes(old[name]), 1))
                file.write(hashlib.sha256(one).digest())

    def anew() -> tuple[()]:
        remove(out)
        remove(packed)
        os.sync()
        return ()

    peer = ("a loop over tensors: load, xor, zstd, SHA-256", Timed(loop, anew))
    return Contest(Timed(write, anew), peer, calls=1, most=7, done=anew)


def _read_delta(settings: Settings) -> Contest:
    base, new = _steps(settings)
    out = settings.out()
    remove(out)
    lazyckpt.delta(new, base).write(out, progress=False)
    delta = lazyckpt.open(out)
    old, later = load_file(base), load_file(new)
    packed = {name: zstd.compress(_bytes(later[name]) ^ _bytes(old[name]), 1) for name in later}
    warm(base)

    def loop() -> None:
        """What the receivers of reinforcement-learning stacks do for each tensor, with packed bytes at hand."""
        for name, tensor in load_file(base).items():
            one = _bytes(tensor)
            one ^= np.frombuffer(zstd.decompress(packed[name]), np.uint8)

    peer = ("a loop over tensors: load, unpack, xor", Timed(loop))
    return Contest(Timed(lambda: delta.to()), peer, calls=1, most=7, done=lambda: remove(out))


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().reshape(-1)


def _extract(settings: Settings) -> Contest:
    """The difference of two bfloat16 matrices: noise whose singular values fall, on a random matrix."""
    side, rank = settings.pick(4096, 1024), 64
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, 2 * rank, generator=generator) for _ in range(2))
    change = (left * 0.95 ** torch.arange(2 * rank)) @ right.T + torch.randn(side, side, generator=generator)
    base = torch.randn(side, side, generator=generator)
    first, second = settings.out("base"), settings.out("tuned")
    for path, matrix in ((first, base), (second, base + change)):
        path = path.with_suffix(".safetensors")
        save_file({"model.layers.0.mlp.up_proj.weight": matrix.bfloat16()}, path)
    views = [lazyckpt.open(path.with_suffix(".safetensors"), cache=False) for path in (second, first)]
    (name,) = views[0]
    difference = views[0][name].float() - views[1][name].float()
    out = settings.out("adapter")

    def anew() -> tuple[()]:
        remove(out)
        return ()

    def done() -> None:
        for path in (out, *(one.with_suffix(".safetensors") for one in (first, second))):
            remove(path)

    ours = Timed(lambda: lazyckpt.extract_lora(*views, out, rank=rank, progress=False), anew)
    peer = Timed(lambda: torch.linalg.svd(difference, full_matrices=False))
    what = "torch.linalg.svd of the difference in memory"
    return Contest(ours, (what, peer), calls=1, rehearse=False, most=3, done=done)


def _cases(settings: Settings) -> list[Case]:
    goals = [Goal(1.3)]
    if not settings.quick:
        goals.append(Goal(1.0, "peak", float(256 * MIB), "peak memory", "256 MiB"))
    beside = Goal(None, against="limit", label="beside cp of both models")
    memory = Goal(1.0, "peak", label="peak memory")
    merge = Case("linear merge of two models of bfloat16", partial(_merge, settings), [Goal(1 / 3), beside, memory])
    average = Case("0.5 * a + 0.5 * b of bfloat16 to safetensors", partial(_average, settings), goals)
    blocks = [Goal(0.35)]
    if not settings.quick:
        blocks.append(Goal(1.0, "peak", float(1280 * MIB), "peak memory", "1.25 GiB"))
    stored = 8192 // 2 + 8192 // 16
    row = Goal(1.1, "bytes", float(stored), "bytes read", "its codes and scales")
    dequantized = [
        Case("FP8 in blocks to bfloat16, safetensors to safetensors", partial(_dequantize, settings), blocks),
        Case("One row of a matrix of NVFP4", partial(_row_of_four_bits, settings), [row]),
    ]
    deltas = [
        Case("a delta of a bfloat16 checkpoint over the one before, to Zarr", partial(_delta, settings), [Goal(1.5)]),
        Case("all of a checkpoint from its delta and its base", partial(_read_delta, settings)),
    ]
    extract = Case(
        "extract_lora of 4096 x 4096 at rank 64 (1024 in a quick run)", partial(_extract, settings), [Goal(0.2)]
    )
    return [merge, *dequantized, average, *deltas, extract]


AREA = Area(
    "expressions",
    "Expressions",
    "Two safetensors files of 1 GiB of bfloat16 (64 MiB in a quick run), in the system's cache, to a new file on the "
    "same disk.",
    _cases,
)
