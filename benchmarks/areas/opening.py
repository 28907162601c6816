"""Opening files and folders: torch files, safetensors, Hugging Face folders, DCP; time, bytes and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest, need
from ..host import LAZYCKPT, Fresh
from ..sample import Cold, Timed, warm

INDEX = 200.0  # bytes of memory a stored tensor


def _torch(settings: Settings, weights_only: bool) -> Contest:
    file = data.many(settings)
    warm(file)
    name = "torch.load(mmap=True)" if weights_only else "torch.load(mmap=True, weights_only=False)"
    peer = Timed(lambda: torch.load(file, mmap=True, weights_only=weights_only))
    return Contest(Timed(lambda: lazyckpt.open(file, cache=False)), (name, peer))


def _cold(settings: Settings) -> Contest:
    file = data.large(settings, "pt")
    ours = Cold([file], lambda: None, lambda _: lazyckpt.open(file, cache=False))
    peer = Cold([file], lambda: None, lambda _: torch.load(file, mmap=True))
    return Contest(ours, ("torch.load(mmap=True)", peer), calls=1, most=15)


def _opened(path: Path, first: Path | None = None) -> Fresh:
    """In a fresh process, for its memory. What is opened ``first`` is not measured: the pages of the program's code
    that opening touches are no part of an index."""
    prepare = f"lazyckpt.open({str(first)!r}, cache=False)" if first is not None else ""
    return Fresh(LAZYCKPT, f"view = lazyckpt.open({str(path)!r}, cache=False)", prepare)


def _names(settings: Settings, names: int) -> Contest:
    file = data.names(settings, names)
    peer = Fresh(LAZYCKPT, f"names = safe_open({str(file)!r}, 'pt').keys()", "from safetensors import safe_open")
    assert set(lazyckpt.open(file, cache=False)) == set(safe_open(file, "pt").keys())
    return Contest(_opened(file, data.names(settings, 100)), ("safe_open", peer), calls=1, most=7)


def _gguf(settings: Settings) -> Contest:
    """A file with the words of a vocabulary, as models have them."""
    from gguf import GGUFReader, GGUFWriter

    file = settings.data / "vocabulary.gguf"
    if not file.exists():
        writer = GGUFWriter(file, "llama")
        writer.add_token_list([f"word{n}" for n in range(100_000)])
        writer.add_token_scores([float(n) for n in range(100_000)])
        for n in range(300):
            writer.add_tensor(f"blk.{n}.ffn_up.weight", torch.zeros(64, 64).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    warm(file)
    return Contest(
        Timed(lambda: lazyckpt.open(file, cache=False)),
        ("GGUFReader", Timed(lambda: GGUFReader(file))),
        calls=1,
        most=5,
    )


def _orbax(settings: Settings, layers: int) -> Contest:
    """A training state of a model with Adam, by Orbax itself."""
    ocp, np, os = need("orbax.checkpoint"), need("numpy"), need("os")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    folder = settings.data / f"orbax-{layers}"
    if not folder.exists():
        matrix, vector = np.zeros((64, 64), "float32"), np.zeros(64, "float32")
        layer = {"q": matrix, "k": matrix, "v": matrix, "o": matrix, "up": matrix, "down": matrix, "norm": vector}
        params = {f"layer_{n}": layer for n in range(layers)}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder.absolute(), {"params": params, "opt_state": {"mu": params, "nu": params}})
    handler = ocp.PyTreeCheckpointHandler()
    peer = Timed(lambda: handler.metadata(folder.absolute()))
    return Contest(Timed(lambda: lazyckpt.open(folder, cache=False)), ("metadata() of orbax", peer), calls=1, most=7)


def _fsdp(settings: Settings, layers: int, ranks: int) -> Contest:
    folder = data.fsdp(settings, layers, ranks)
    warm(folder / ".metadata")
    assert lazyckpt.open(folder, cache=False).format == "megatron-fsdp"
    peer = Timed(lambda: FileSystemReader(folder).read_metadata())
    named = ("FileSystemReader.read_metadata", peer)
    return Contest(Timed(lambda: lazyckpt.open(folder, cache=False)), named, calls=1, most=3, least=2)


def _torch_names(settings: Settings, names: int) -> Contest:
    file = data.torch_names(settings, names)
    warm(file)
    peer = Fresh(LAZYCKPT, f"found = torch.load({str(file)!r}, mmap=True)")
    first = data.torch_names(settings, 100)
    return Contest(_opened(file, first), ("torch.load(mmap=True)", peer), calls=1, most=5)


def _hf(settings: Settings, shards: int, names: int) -> Contest:
    folder = data.hf_names(settings, shards, names)
    warm(folder / "model.safetensors.index.json")
    peer = Fresh(
        LAZYCKPT,
        f"found = headers(Path({str(folder)!r}))",
        "from benchmarks.areas.opening import headers; from pathlib import Path",
    )
    ours = _opened(folder, data.names(settings, 100))
    return Contest(ours, ("json.loads of the headers and the index", peer), calls=1, most=5)


def headers(folder: Path) -> list[object]:
    """What a reader of the folder cannot avoid: the index and all headers, through `json`."""
    found: list[object] = [json.loads((folder / "model.safetensors.index.json").read_bytes())]
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    return found


def _dcp(settings: Settings, tensors: int, chunks: int, ranks: int) -> Contest:
    folder = data.dcp_chunks(settings, tensors, chunks, ranks)
    warm(folder / ".metadata")
    peer = Fresh(
        LAZYCKPT,
        f"found = FileSystemReader({str(folder)!r}).read_metadata()",
        "from torch.distributed.checkpoint import FileSystemReader",
    )
    named = ("FileSystemReader.read_metadata", peer)
    return Contest(_opened(folder), named, calls=1, rehearse=False, most=3, least=2)


def _small_dcp(settings: Settings) -> Contest:
    folder = data.dcp(settings)
    warm(folder / ".metadata")
    peer = Timed(lambda: FileSystemReader(folder).read_metadata())
    return Contest(Timed(lambda: lazyckpt.open(folder, cache=False)), ("FileSystemReader.read_metadata", peer))


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    yield Case("a torch file of 2,000 tensors", partial(_torch, settings, True), [Goal(0.3)])
    yield Case(
        "a torch file of 2,000 tensors, peer without weights_only", partial(_torch, settings, False), [Goal(0.7)]
    )
    size = settings.pick(1024, 64)
    share = Goal(0.01, "resident", float(size << 20), "bytes brought into the cache", "the size of the file")
    share = share if not settings.quick else share._replace(at_most=0.02)
    yield Case(f"a torch file of {size} MiB, cold", partial(_cold, settings), [Goal(1.0), share])
    names = settings.pick(100_000, 10_000)
    held = Goal(1.0, "held", INDEX * names, "memory of the index", f"{INDEX:.0f} bytes a tensor")
    yield Case(f"one safetensors file of {names:,} names", partial(_names, settings, names), [Goal(1.0), held])
    yield Case(f"one torch file of {names:,} names", partial(_torch_names, settings, names), [Goal(0.3), held])
    shards, names = settings.pick(1000, 20), settings.pick(500_000, 10_000)
    what = f"a Hugging Face folder of {shards:,} shards and {names:,} names"
    held = Goal(1.0, "held", INDEX * names, "memory of the index", f"{INDEX:.0f} bytes a tensor")
    yield Case(what, partial(_hf, settings, shards, names), [Goal(2.0), held])
    yield Case("a GGUF file with 100,000 words", partial(_gguf, settings), [Goal(0.5)])
    layers = settings.pick(100, 10)
    yield Case(f"an Orbax checkpoint of {21 * layers:,} arrays", partial(_orbax, settings, layers), [Goal(0.5)])
    layers, ranks = settings.pick(150, 20), settings.pick(64, 16)
    what = f"a Megatron-FSDP checkpoint of {ranks} ranks and {7 * layers + 3:,} parameters"
    yield Case(what, partial(_fsdp, settings, layers, ranks), [Goal(0.5)])
    yield Case("a DCP checkpoint of 2 ranks", partial(_small_dcp, settings), [Goal(1.0)])
    tensors, ranks, chunks = settings.pick(10_000, 100), settings.pick(2048, 64), 102
    what = f"a DCP checkpoint of {ranks:,} ranks, {tensors:,} tensors and {tensors * chunks:,} chunks"
    yield Case(
        what, partial(_dcp, settings, tensors, chunks, ranks), [Goal(0.5), Goal(0.5, "peak", label="peak memory")]
    )


AREA = Area(
    "opening",
    "Opening",
    "From the path to a view of all names. *Memory of the index* is what the process holds more after it.",
    _cases,
)
