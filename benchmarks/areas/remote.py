"""A checkpoint in a bucket: requests, bytes and time, against a server of S3's protocol that answers after 20 ms."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lazyckpt
from tests.servers.s3 import serve_s3
from tests.servers.server import Handle

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest, Skipped
from ..sample import Timed

DELAY = 0.02  # seconds before each answer
MIB = 1 << 20


class Bucket(NamedTuple):
    """A bucket with the files of a folder, the options that open it, and obstore's store of it."""

    server: Handle
    options: dict[str, Any]
    store: Any
    until: ExitStack

    @classmethod
    def of(cls, folder: Path) -> Bucket:
        try:
            from obstore.store import S3Store
        except ImportError:
            raise Skipped("obstore is not installed") from None
        until = ExitStack()
        server = until.enter_context(serve_s3(folder, delay=DELAY))
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        options = {"endpoint": server.endpoint, **keys}
        client = {"allow_http": True, "pool_max_idle_per_host": "64"}
        return cls(server, options, S3Store("bucket", config=options, client_options=client), until)

    def open(self, path: str, **options: Any) -> lazyckpt.CheckpointView:
        return lazyckpt.open(f"s3://bucket/{path}", cache=False, storage_options={**self.options, **options})


# -- opening


def _opening(settings: Settings, world: int, layers: int) -> Contest:
    """The limit: the requests that opening made, again, 64 at a time."""
    folder = data.ranks(settings, "zero3", world, layers)
    bucket = Bucket.of(folder.parent)
    name = folder.name
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    bucket.server.reset()
    bucket.open(name)
    log, counts = bucket.server.log(), bucket.server.counts()
    ranges = [_range(one.target, one.range) for one in log if one.method == "GET" and one.range]
    others = len(log) - len(ranges)

    def again() -> None:
        import obstore

        def ask(key: str, start: int, stop: int) -> None:
            obstore.get(bucket.store, key, options={"range": (start, stop)}).bytes()

        for _ in range(others):
            obstore.list_with_delimiter(bucket.store, name)
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda one: ask(*one), ranges))

    def count() -> dict[str, float]:
        return {"requests a file": len(log) / (2 * world), "share of the bytes": counts.sent / nbytes}

    limit = ("the same requests, 64 at a time", Timed(again))
    ours = Timed(lambda: bucket.open(name))
    return Contest(ours, None, limit, calls=1, most=5, count=count, done=bucket.until.close)


def _range(target: str, text: str) -> tuple[str, int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", text)
    assert found is not None, text
    return unquote(target.partition("?")[0]).removeprefix("/bucket/"), int(found[1]), int(found[2]) + 1


# -- slices


def _rows(settings: Settings) -> Contest:
    """One row from each of the 64 files of a tensor. The peer asks for the same bytes."""
    import obstore

    folder = data.ranks(settings, "zero3", 64, 8)
    bucket = Bucket.of(folder.parent)
    tensor = bucket.open(folder.name).states["fp32"]["model.layers.3.mlp.up_proj.weight"]
    step = tensor.shape[0] // 64
    bucket.server.reset()
    tensor[5::step]
    log, counts = bucket.server.log(), bucket.server.counts()
    ranges = [_range(one.target, one.range) for one in log]
    assert len({key for key, _, _ in ranges}) == 64

    def theirs() -> None:
        def ask(key: str, start: int, stop: int) -> None:
            obstore.get_range(bucket.store, key, start=start, end=stop)

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda one: ask(*one), ranges))

    def count() -> dict[str, float]:
        wanted = 64 * tensor.shape[1] * 4
        return {"requests a file": counts.requests / 64, "over-read": counts.sent / wanted}

    ours, peer = Timed(lambda: tensor[5::step]), ("obstore.get_range on 64 threads", Timed(theirs))
    return Contest(ours, peer, calls=1, most=9, count=count, done=bucket.until.close)


def _slice(settings: Settings, key: Any) -> Contest:
    path = _layer(settings)
    bucket = Bucket.of(path.parent)
    tensor = bucket.open(path.name)["layers.0.w3"]
    bucket.server.reset()
    nbytes = tensor[key].nbytes
    counts = bucket.server.counts()
    result = {"over-read": counts.sent / nbytes, "requests": counts.requests}
    return Contest(Timed(lambda: tensor[key]), calls=1, most=5, count=lambda: result, done=bucket.until.close)


def _layer(settings: Settings) -> Path:
    size = settings.pick(4096, 1024)
    generator = torch.Generator().manual_seed(0)

    def write(path: Path) -> None:
        shape = (size, size)
        tensors = {n: torch.randint(0, 1 << 30, shape, generator=generator, dtype=torch.int32) for n in range(16)}
        save_file({f"layers.0.w{n}": tensor for n, tensor in tensors.items()}, path)

    return data.made(settings.data / f"remote-layer-{size}.safetensors", write)


# -- whole layers


def _whole(settings: Settings, peer: str) -> Contest:
    path = _layer(settings)
    bucket = Bucket.of(path.parent)
    view = bucket.open(path.name)
    theirs = {"obstore": _get_ranges, "fsspec": _fsspec, "torch": _torch_load, "runai": _runai}[peer]
    name, call = theirs(settings, bucket, view)
    return Contest(Timed(lambda: view.to()), (name, Timed(call)), calls=1, most=25, least=9, done=bucket.until.close)


def _get_ranges(_: Settings, bucket: Bucket, view: lazyckpt.CheckpointView) -> tuple[str, Callable[[], object]]:
    import obstore

    extents = [tensor.fragments[0].extent for tensor in view.values()]
    starts = [extent.offset for extent in extents]
    lengths = [tensor.nbytes for tensor in view.values()]
    path = extents[0].path
    return "obstore.get_ranges", lambda: obstore.get_ranges(bucket.store, path, starts=starts, lengths=lengths)


def _s3fs(bucket: Bucket) -> Any:
    try:
        import s3fs
    except ImportError:
        raise Skipped("s3fs is not installed") from None
    keys = {"key": "key", "secret": "secret", "endpoint_url": bucket.options["endpoint"]}
    return s3fs.S3FileSystem(**keys, client_kwargs={"region_name": "us-east-1"})


def _fsspec(settings: Settings, bucket: Bucket, _: lazyckpt.CheckpointView) -> tuple[str, Callable[[], object]]:
    """safetensors reads local files only: the file is copied with fsspec first."""
    fs, name = _s3fs(bucket), _layer(settings).name
    folder = Path(bucket.until.enter_context(tempfile.TemporaryDirectory(dir=settings.data)))

    def load() -> dict[str, torch.Tensor]:
        fs.get_file(f"bucket/{name}", str(folder / name))
        with safe_open(folder / name, "pt") as file:
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118

    return "s3fs, then safetensors", load


def _torch_load(settings: Settings, bucket: Bucket, _: lazyckpt.CheckpointView) -> tuple[str, Callable[[], object]]:
    path = _layer(settings)

    def write(out: Path) -> None:
        with safe_open(path, "pt") as file:
            torch.save({key: file.get_tensor(key) for key in file.keys()}, out)  # noqa: SIM118

    name, fs = data.made(path.with_suffix(".pt"), write).name, _s3fs(bucket)

    def load() -> object:
        with fs.open(f"bucket/{name}", "rb") as file:
            return torch.load(file)

    return "torch.load of a file of s3fs", load


def _runai(settings: Settings, bucket: Bucket, _: lazyckpt.CheckpointView) -> tuple[str, Callable[[], object]]:
    try:
        from runai_model_streamer import SafetensorsStreamer
    except ImportError:
        raise Skipped("runai-model-streamer is not installed") from None
    os.environ |= {
        "AWS_ENDPOINT_URL": bucket.options["endpoint"],
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    url = f"s3://bucket/{_layer(settings).name}"

    def load() -> dict[str, torch.Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(url)
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return "runai-model-streamer", load


def _cached(settings: Settings) -> Contest:
    """The second read with the disk cache, against a local file."""
    path = _layer(settings)
    bucket = Bucket.of(path.parent)
    folder = Path(bucket.until.enter_context(tempfile.TemporaryDirectory(dir=settings.data)))
    url = f"s3://bucket/{path.name}"
    view = lazyckpt.open(url, cache=folder, storage_options=bucket.options)
    view.to()
    before = view.io.bytes
    local = lazyckpt.open(path)

    def count() -> dict[str, float]:
        return {"bytes from the server": view.io.bytes - before}

    ours, peer = Timed(lambda: view.to()), ("the same view of a local file", Timed(lambda: local.to()))
    return Contest(ours, peer, calls=1, most=9, count=count, done=bucket.until.close)


def _empty(settings: Settings) -> Contest:
    """The first read with a disk cache that is empty, against one without a cache."""
    path = _layer(settings)
    bucket = Bucket.of(path.parent)
    folder = Path(bucket.until.enter_context(tempfile.TemporaryDirectory(dir=settings.data)))
    url = f"s3://bucket/{path.name}"
    plain = lazyckpt.open(url, cache=False, storage_options=bucket.options)

    def emptied() -> tuple[lazyckpt.CheckpointView]:
        remove(folder / "cache")
        return (lazyckpt.open(url, cache=folder / "cache", storage_options=bucket.options),)

    ours, peer = Timed(lambda view: view.to(), emptied), ("a read without a cache", Timed(lambda: plain.to()))
    return Contest(ours, peer, calls=1, most=15, least=9, done=bucket.until.close)


# -- writing


def _writing(settings: Settings) -> Contest:
    """The peer puts a file that is ready on the disk."""
    import obstore

    path = _layer(settings)
    bucket = Bucket.of(path.parent)
    view = lazyckpt.open(path)

    def ours() -> None:
        view.to_safetensors(
            "s3://bucket/out/ours.safetensors", storage_options=bucket.options, overwrite=True, resume=False
        )

    def theirs() -> None:
        obstore.put(bucket.store, "out/theirs.safetensors", path)

    peer = ("obstore.put of a file", Timed(theirs))
    return Contest(Timed(ours), peer, calls=1, most=5, done=bucket.until.close)


# -- all


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    world, layers = settings.pick(1024, 64), settings.pick(126, 8)
    goals = [
        Goal(1.5, against="limit"),
        Goal(1.0, "requests a file", 2.5, "requests a file", "2.5 requests"),
        Goal(1.0, "share of the bytes", 0.01, "bytes", "1 % of the bytes"),
    ]
    yield Case(
        f"open {2 * world:,} files of {world:,} ranks, ZeRO-3", partial(_opening, settings, world, layers), goals
    )
    one = Goal(1.0, "requests a file", 1.0, "requests a file", "one request")
    over = Goal(1.0, "over-read", 1.2, "bytes read", "1.2 times the bytes wanted")
    yield Case("one row of each of 64 files", partial(_rows, settings), [Goal(1.25), one, over])
    for text, key in (
        ("one row", 5),
        ("one column", (slice(None), 7)),
        ("16 columns", (slice(None), slice(16, 32))),
        ("every 8th row", slice(None, None, 8)),
        ("a block of 512 x 512", (slice(100, 612), slice(200, 712))),
    ):
        yield Case(f"{text} of a matrix", partial(_slice, settings, key), [over])
    size = f"{settings.pick(4096, 1024) ** 2 * 64 // MIB:,} MiB"
    # new memory costs 0.3 to 1.4 s a GiB at random on a virtual machine (NOTES.md), more than a read takes
    yield Case(f"a layer of {size}, against obstore", partial(_whole, settings, "obstore"), _fastest(1 / 0.9))
    for peer in ("fsspec", "torch", "runai"):
        yield Case(f"a layer of {size}, against {peer}", partial(_whole, settings, peer))
    yield Case(f"a layer of {size} from the disk cache", partial(_cached, settings), [Goal(1 / 0.8)])
    yield Case(f"a layer of {size}, and into an empty disk cache", partial(_empty, settings), _fastest(1.5))
    yield Case(f"to_safetensors of {size}", partial(_writing, settings), [Goal(1 / 0.8)])


def _fastest(goal: float) -> list[Goal]:
    return [Goal(goal, label="the fastest calls", fastest=True), Goal(None)]


AREA = Area(
    "remote",
    "Checkpoints in a bucket",
    "A server of S3's protocol on the same machine, in a process of its own, which waits 20 ms before each answer and "
    "counts requests. It shares the machine's cores with the client.",
    _cases,
)
