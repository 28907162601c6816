"""A served checkpoint as a folder of safetensors and as a Zarr store: the bytes of a conversion, by ranges."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import xarray
import zarr
from safetensors.torch import load

import lazyckpt
from lazyckpt import demo
from lazyckpt.explore.server import Server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    demo.write(folder)
    return folder / "zero3"


@pytest.fixture(scope="module")
def server(source: Path) -> Iterator[Server]:
    with lazyckpt.serve(source, max_shard_size="40KB") as running:
        yield running


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("converted") / "out"
    lazyckpt.open(source).to_safetensors(dest, max_shard_size="40KB")
    return dest


def names_in(server: Server, folder: str) -> list[str]:
    text = httpx.get(server.address + folder).text
    return [line.split('"')[1] for line in text.splitlines() if "href" in line]


def test_the_folder_is_that_of_a_conversion(server: Server, converted: Path) -> None:
    wanted = {path.name: path.read_bytes() for path in converted.iterdir()}
    assert len(wanted) > 2  # shards and their index
    assert set(wanted) <= set(names_in(server, "hf/"))
    for name, content in wanted.items():
        answer = httpx.get(f"{server.address}hf/{name}")
        assert answer.content == content
        head = httpx.head(f"{server.address}hf/{name}")
        assert (head.headers["content-length"], head.content) == (str(len(content)), b"")
        assert head.headers["etag"] == answer.headers["etag"]
        assert head.headers["accept-ranges"] == "bytes"


def test_ranges_are_those_of_the_file(server: Server, converted: Path) -> None:
    chosen, client = random.Random(5), httpx.Client(verify=False)
    for path in converted.glob("*.safetensors"):
        content = path.read_bytes()
        url, size = f"{server.address}hf/{path.name}", len(content)
        spans = [(0, 8), (0, size), (size - 1, size), (7, 9)]
        for _ in range(20):
            begin, end = sorted(chosen.sample(range(size + 1), 2))
            spans.append((begin, end))
        for begin, end in spans:
            answer = client.get(url, headers={"Range": f"bytes={begin}-{end - 1}"})
            assert answer.status_code == 206
            assert answer.content == content[begin:end]
            assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}"
        assert client.get(url, headers={"Range": "bytes=-5"}).content == content[-5:]
        assert client.get(url, headers={"Range": f"bytes={size - 3}-"}).content == content[-3:]
        assert client.get(url, headers={"Range": f"bytes={size - 3}-{size + 100}"}).content == content[-3:]


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ("bytes=999999999-", 416),
        ("bytes=-0", 416),
        ("bytes=5-2", 200),
        ("bytes=a-b", 200),
        ("bytes=", 200),
        ("bytes=0-1,3-4", 200),
        ("lines=0-1", 200),
        ("bytes=" + "9" * 4000 + "-", 200),
    ],
)
def test_strange_ranges(server: Server, wanted: str, status: int) -> None:
    name = next(name for name in names_in(server, "hf/") if name.endswith(".safetensors"))
    assert httpx.get(f"{server.address}hf/{name}", headers={"Range": wanted}).status_code == status


def test_a_range_of_another_version_is_the_whole_file(server: Server, converted: Path) -> None:
    path = next(converted.glob("*.safetensors"))
    url = f"{server.address}hf/{path.name}"
    asked = httpx.head(url, headers={"Range": "bytes=0-3"})
    assert (asked.status_code, asked.headers["content-length"]) == (200, str(path.stat().st_size))  # RFC 9110, 14.2
    tag = asked.headers["etag"]
    assert httpx.get(url, headers={"If-None-Match": tag}).status_code == 304
    assert httpx.get(url, headers={"Range": "bytes=0-3", "If-Range": tag}).status_code == 206
    answer = httpx.get(url, headers={"Range": "bytes=0-3", "If-Range": '"other"'})
    assert (answer.status_code, answer.content) == (200, path.read_bytes())


@pytest.mark.parametrize(
    "path", ["hf/none", "hf/../api", "hf/%2e%2e/x", "zarr/none", "zarr/c/0", "zarr//zarr.json", "hf//etc/passwd"]
)
def test_other_names_are_not_found(server: Server, path: str) -> None:
    assert httpx.get(server.address + path).status_code == 404


def test_zarr_and_xarray_read_the_store(server: Server, source: Path) -> None:
    view = lazyckpt.open(source)
    root = zarr.open_group(f"{server.address}zarr", mode="r")
    for state, part in view.states.items():
        for name, tensor in part.once()[0].items():
            array: Any = root[f"{state}/{name.replace('.', '/')}"]
            found, wanted = np.asarray(array[...]), tensor[...]
            assert torch.equal(torch.from_numpy(found.copy()).view(wanted.dtype), wanted)
    tree = xarray.open_datatree(f"{server.address}zarr", engine="zarr", chunks=None)
    name = next(name for name in view if name.endswith("up_proj.weight"))
    values = np.array(tree[f"{view.state}/{name.replace('.', '/')}"])
    assert torch.equal(torch.from_numpy(values), view[name][...])


def test_zarr_lists_the_members_of_groups_whose_names_are_apart(tmp_path: Path) -> None:
    names = ["a.weight", "b.weight", "a.running_mean", "c", "b.running_mean"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "model.pt")
    with lazyckpt.serve(tmp_path / "model.pt") as server:
        found = zarr.open_group(f"{server.address}zarr/weights", mode="r", use_consolidated=False)
        assert np.asarray(found["a/weight"]).tolist() == [1, 1]
        root = zarr.open_group(f"{server.address}zarr", mode="r")
        listed = {path for path, one in root.members(max_depth=None) if isinstance(one, zarr.Array)}
    assert listed == {f"weights/{name.replace('.', '/')}" for name in names}


def test_names_and_dtype_of_the_copy_can_be_others(source: Path) -> None:
    with lazyckpt.serve(source, dtype=torch.bfloat16) as server:
        found = load(httpx.get(f"{server.address}hf/model.safetensors").content)
    tensors = lazyckpt.open(source).once()[0]
    assert found.keys() == set(tensors)
    assert all(torch.equal(found[name], tensor[...].bfloat16()) for name, tensor in tensors.items())


def test_a_replaced_checkpoint_is_never_mixed(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3 << 18)}, tmp_path / "model.pt")
    with lazyckpt.serve(tmp_path / "model.pt") as server:
        url = f"{server.address}hf/model.safetensors"
        before = httpx.get(url)
        assert before.status_code == 200
        torch.save({"w": torch.ones(3 << 18)}, tmp_path / "other.pt")
        (tmp_path / "other.pt").replace(tmp_path / "model.pt")
        for headers, wanted in (({"Range": "bytes=4096-8191"}, before.content[4096:8192]), ({}, before.content)):
            try:
                answer = httpx.get(url, headers=headers)
            except httpx.HTTPError:
                continue  # the connection ended before the announced length
            assert answer.status_code == 500 or answer.content == wanted


@pytest.mark.slow
def test_a_hundred_readers_get_every_byte(server: Server, converted: Path) -> None:
    contents = {path.name: path.read_bytes() for path in converted.glob("*.safetensors")}

    def read(number: int) -> bool:
        chosen = random.Random(number)
        name = chosen.choice(sorted(contents))
        content = contents[name]
        begin, end = sorted(chosen.sample(range(len(content) + 1), 2))
        with httpx.Client(timeout=60, verify=False) as client:
            part = client.get(f"{server.address}hf/{name}", headers={"Range": f"bytes={begin}-{end - 1}"})
            return part.content == content[begin:end] and client.get(f"{server.address}hf/{name}").content == content

    with ThreadPoolExecutor(100) as pool:
        assert all(pool.map(read, range(200)))
