"""The files that are measured: made once by their own writers, and kept in the folder of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from .case import Settings, remove

ROOT = Path(__file__).parents[1]


def made(path: Path, write: Callable[[Path], object]) -> Path:
    """The path, written by ``write`` if it is not there yet."""
    if not path.exists():
        part = path.with_name(f"part-{path.name}")
        remove(part)
        part.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.rename(path)
    return path


def python(program: str, *arguments: str | Path) -> None:
    """Run a program in a new Python that finds the tests' writers; the benchmarks' process need not import them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])


def saved(
    settings: Settings, stem: str, form: str, count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Path:
    """``count`` random tensors in one file: form "pt" or "safetensors"."""

    def write(path: Path) -> None:
        torch.manual_seed(0)
        tensors = {f"layers.{n}.weight": torch.randn(shape).to(dtype) for n in range(count)}
        torch.save(tensors, path) if form == "pt" else save_file(tensors, path)

    return made(settings.data / f"{stem}.{form}", write)


# -- whole files


def large(settings: Settings, form: str) -> Path:
    """16 tensors, 1 GiB of float32."""
    return saved(settings, "big", form, 16, (settings.pick(16384, 1024), 1024))


def middle(settings: Settings, form: str) -> Path:
    """1,024 tensors, 1 GiB of float32."""
    return saved(settings, "mid", form, 1024, (settings.pick(256, 16), 1024))


def small(settings: Settings, form: str) -> Path:
    """100,000 tensors of 1 KiB."""
    return kibibytes(settings, form, settings.pick(100_000, 2_000))


def kibibytes(settings: Settings, form: str, count: int) -> Path:
    """``count`` tensors of 1 KiB."""
    return saved(settings, f"small-{count}", form, count, (256,))


def pages(settings: Settings, form: str) -> Path:
    """131,072 tensors of 4 KiB, 512 MiB."""
    count = settings.pick(131_072, 4_096)
    return saved(settings, f"pages-{count}", form, count, (1024,))


def one(settings: Settings, form: str) -> Path:
    """One tensor, 128 MiB of float32."""
    return saved(settings, "one", form, 1, (settings.pick(32768, 8192), 1024))


def many(settings: Settings) -> Path:
    """2,000 small tensors."""
    names = [f"layers.{i // 10}.w{i % 10}" for i in range(2000)]
    return made(settings.data / "many.pt", lambda path: torch.save({n: torch.randn(64, 64) for n in names}, path))


def grid(settings: Settings, form: str) -> Path:
    """Four bfloat16 tensors of 4096 x 2048."""
    return saved(settings, "grid", form, 4, (4096, 2048), torch.bfloat16)


def embedding(settings: Settings) -> Path:
    """A bfloat16 embedding of a real vocabulary, as a torch file."""
    shape = (settings.pick(128_256, 65_536), settings.pick(512, 256))
    return saved(settings, "embedding", "pt", 1, shape, torch.bfloat16)


def stats(settings: Settings, dtype: torch.dtype) -> Path:
    """1 GiB of safetensors."""
    size, short = side(settings), str(dtype).removeprefix("torch.")
    return saved(settings, f"stats-{short}", "safetensors", 64 // dtype.itemsize, (size, size), dtype)


# -- checkpoints of several files

_HF = """
import os, sys, torch
from huggingface_hub import save_torch_state_dict
torch.manual_seed(0)
side = int(sys.argv[2])
state = {f"layers.{n}.weight": torch.randn(side, side) for n in range(16)}
os.makedirs(sys.argv[1], exist_ok=True)
save_torch_state_dict(state, sys.argv[1], max_shard_size=side * side * 18)
"""
_DCP = """
import sys, tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def write(rank, store, out, side):
    dist.init_process_group("gloo", "file://" + store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": distribute_tensor(torch.randn(side, side), mesh, [Shard(0)]) for n in range(16)}
    dcp.save({"model": state, "step": 3}, checkpoint_id=out)

with tempfile.TemporaryDirectory() as scratch:
    arguments = (scratch + "/store", sys.argv[1], int(sys.argv[2]))
    mp.start_processes(write, args=arguments, nprocs=2, start_method="fork")
"""
# DeepSpeed's converter cannot write tied parameters as safetensors: their other names are removed from the files.
_ZERO = """
import sys, torch
from pathlib import Path
from tests.writers.deepspeed_zero import ZeroSpec, write_many
out, stage, hidden, layers, vocab = Path(sys.argv[1]), *map(int, sys.argv[2:])
spec = ZeroSpec(stage=stage, dtype="bf16", dp=2, hidden=hidden, layers=layers, vocab=vocab)
write_many(out.parent, {out.name: spec})
for path in out.glob("ckpt/*/*model_states.pt"):
    saved = torch.load(path, weights_only=False)
    for alias in saved["shared_params"]:
        saved["module"].pop(alias)
    saved["shared_params"] = {}
    torch.save(saved, path)
"""


def side(settings: Settings) -> int:
    """The rows and columns of the 16 float32 tensors of each source: 1 GiB in all, in a quick run 64 MiB."""
    return settings.pick(4096, 1024)


def torch_file(settings: Settings) -> Path:
    return saved(settings, "torch-1g", "pt", 16, (side(settings), side(settings)))


def safetensors_file(settings: Settings) -> Path:
    return saved(settings, "zarr-1g", "safetensors", 16, (side(settings), side(settings)))


def hf(settings: Settings) -> Path:
    return made(settings.data / "hf-1g", lambda path: python(_HF, path, str(side(settings))))


def dcp(settings: Settings) -> Path:
    return made(settings.data / "dcp-1g", lambda path: python(_DCP, path, str(side(settings))))


def zarr(settings: Settings, compressed: bool = False) -> Path:
    """16 arrays in chunks of a quarter of their rows, written by zarr-python."""

    def write(path: Path) -> None:
        import numpy as np
        import zarr
        from zarr.codecs import BloscCodec

        group = zarr.open_group(str(path), mode="w", zarr_format=3)
        generator, size = np.random.default_rng(0), side(settings)
        codec = BloscCodec(cname="zstd", clevel=1) if compressed else None
        for n in range(16):
            options = {"chunks": (size // 4, size), "compressors": codec}
            array = group.create_array(f"layers/{n}/weight", shape=(size, size), dtype="f4", **options)
            array[...] = generator.standard_normal((size, size), np.float32) / 32

    return made(settings.data / f"zarr-read-{int(compressed)}", write)


def zero(settings: Settings, stage: int) -> Path:
    """A checkpoint of real DeepSpeed on two ranks: bf16, more than 1 GiB of fp32 weights, and both moments of Adam."""
    size = ("2048", "16", "16384") if not settings.quick else ("512", "4", "8192")
    out = made(settings.data / f"zero{stage}-1g", lambda path: python(_ZERO, path, str(stage), *size))
    return out / "ckpt"


def sources(settings: Settings) -> Iterator[tuple[str, Callable[[], Path], str]]:
    """Every kind of source: its name, its path (made when called), and the state that is written ("": the weights)."""
    yield "safetensors", lambda: safetensors_file(settings), ""
    yield "torch file", lambda: torch_file(settings), ""
    yield "Hugging Face folder", lambda: hf(settings), ""
    yield "DCP", lambda: dcp(settings), ""
    yield "Zarr", lambda: zarr(settings), ""
    yield "ZeRO-2", lambda: zero(settings, 2), "fp32"
    yield "ZeRO-3", lambda: zero(settings, 3), "fp32"


# -- headers only, in processes of their own: what writing them imports and allocates is no part of what is measured


def ranks(settings: Settings, layout: str, world: int, layers: int) -> Path:
    """A ZeRO checkpoint of ``world`` ranks of 405B: "zero2", "zero3" or "zero3_frozen"; its flat buffers are holes."""
    stage, frozen = layout[:5], ", frozen=True" if layout.endswith("frozen") else ""
    program = (
        "import sys; from pathlib import Path; from benchmarks import sparse_zero\n"
        f"sparse_zero.write_{stage}(Path(sys.argv[1]), world={world}, layers={layers}{frozen})"
    )
    name = f"405b_{layout}" if (world, layers) == (1024, 126) else f"405b_{layout}_{world}x{layers}"
    return made(settings.data / name, lambda path: python(program, path))


def megatron(settings: Settings) -> Path:
    program = (
        "import sys; from pathlib import Path; from benchmarks import sparse_megatron as m; m.write(Path(sys.argv[1]))"
    )
    return made(settings.data / "megatron_1024", lambda path: python(program, path))


def dcp_chunks(settings: Settings, tensors: int, chunks: int, files: int) -> Path:
    """A DCP checkpoint of which only the metadata are real."""
    program = (
        "import sys; from pathlib import Path; from benchmarks import sparse_dcp\n"
        f"sparse_dcp.write_metadata(Path(sys.argv[1]), {tensors}, {chunks}, {files})"
    )
    return made(settings.data / f"dcp-{tensors}x{chunks}-{files}", lambda path: python(program, path))


def fsdp(settings: Settings, layers: int, ranks: int) -> Path:
    """A checkpoint of Megatron-FSDP of which only the metadata are real."""
    from . import sparse_dcp

    write = partial(sparse_dcp.write_fsdp, layers=layers, ranks=ranks)
    return made(settings.data / f"fsdp-{layers}-{ranks}", write)


def dcp_cut(settings: Settings, chunks: int) -> Path:
    """A bfloat16 tensor of 4096 x 2048, the first of `grid`, in so many chunks."""
    from .sparse_dcp import write_chunks

    def write(path: Path) -> None:
        tensors = torch.load(grid(settings, "pt"))
        write_chunks(path, {"layers.0.weight": tensors["layers.0.weight"]}, chunks, min(chunks, 8))

    return made(settings.data / f"dcp-cut-{chunks}", write)


def hf_names(settings: Settings, shards: int, names: int) -> Path:
    from . import sparse_hf

    return made(settings.data / f"hf-{shards}-{names}", lambda path: sparse_hf.write(path, shards, names))


def names(settings: Settings, count: int) -> Path:
    """One safetensors file."""
    from . import sparse_hf

    return made(settings.data / f"names-{count}.safetensors", lambda path: sparse_hf.write_one(path, count))


def torch_names(settings: Settings, count: int) -> Path:
    """One torch file with the names of `names`."""
    from . import sparse_hf

    def write(path: Path) -> None:
        torch.save({name: torch.zeros(2) for name in map(sparse_hf.name_of, range(count))}, path)

    return made(settings.data / f"names-{count}.pt", write)
