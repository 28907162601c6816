"""The explorer: a shard over HTTP, against nginx serving the converted file; and what its page waits for."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.subject import Subject
from lazyckpt.inspect.pixels import pooled

from .. import data, pages
from ..case import Area, Case, Goal, Settings
from ..contest import Contest, Skipped
from ..sample import Sample, Timed, warm

MIB = 1 << 20
_PIECE = MIB


def _fetch(url: str, buffer: bytearray) -> int:
    """Read a URL into a buffer, again and again, and return the number of bytes."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    connection.request("GET", parts.path)
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    total = 0
    while count := answer.readinto(buffer):
        total += count
    connection.close()
    return total


def _shard(settings: Settings) -> Contest:
    """Both in a process of their own; the client reads into one buffer."""
    program = shutil.which("nginx")
    if program is None:
        raise Skipped("nginx is not installed")
    source, folder = data.torch_file(settings), settings.data / "converted"
    if not folder.exists():
        lazyckpt.open(source).to_safetensors(folder, max_shard_size=None, progress=False)
    (file,) = folder.glob("*.safetensors")
    warm(source)
    warm(file)
    ours = _server(source, "max_shard_size='1TB'")
    assert ours.stdout is not None
    address = ours.stdout.readline().strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings.data.joinpath("nginx.conf").write_text(_nginx(settings.data, folder, port))
    command = [program, "-e", "stderr", "-c", str(settings.data / "nginx.conf")]
    theirs = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _until(port)
    buffer, size = bytearray(_PIECE), file.stat().st_size

    def fetch(url: str) -> None:
        assert _fetch(url, buffer) == size

    def done() -> None:
        for process in (ours, theirs):
            process.terminate()
            process.wait()

    return Contest(
        Timed(partial(fetch, f"{address}hf/model.safetensors")),
        ("nginx", Timed(partial(fetch, f"http://127.0.0.1:{port}/{file.name}"))),
        calls=1,
        most=15,
        least=7,
        done=done,
    )


def _nginx(place: Path, folder: Path, port: int) -> str:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {place}/nginx; " for kind in kinds)
    return (
        f"daemon off; pid {place}/nginx.pid; events {{}}\n"
        f"http {{ access_log off; sendfile on; {temporary}\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )


def _until(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise Skipped("nginx does not start")


def _processor(do: Callable[[], object]) -> Callable[[int], Sample]:
    """A sampler of the seconds of processor time."""

    def sample(calls: int = 1) -> Sample:
        start = time.process_time()
        for _ in range(calls):
            do()
        return Sample((time.process_time() - start) / calls, {})

    return sample


def _tree(settings: Settings, names: int) -> Contest:
    view = lazyckpt.open(data.names(settings, names), cache=False)

    def answer() -> None:
        assert Explorer(Subject(view)).answer("tree", {}).status == 200

    return Contest(_processor(answer), calls=1, most=7)


def _html(settings: Settings, names: int) -> Contest:
    """What a notebook shows of a view that is new, and of the part of it below the first prefix."""
    path = data.names(settings, names)

    def sample(calls: int = 1) -> Sample:
        seconds = 0.0
        for _ in range(calls):
            view = lazyckpt.open(path, cache=False)
            start = time.process_time()
            first = next(iter(view)).partition(".")[0]
            assert view._repr_html_() and view.prefix(first)._repr_html_()
            seconds += time.process_time() - start
        return Sample(seconds / calls, {})

    return Contest(sample, calls=1, most=7)


def _page(settings: Settings, ranks: int) -> Contest:
    path = data.ranks(settings, "zero3", ranks, 8)

    def opened() -> None:
        with lazyckpt.serve(path, cache=False) as server:
            for request in ("", "assets/explorer.js", "api/v1/about", "api/v1/tree"):
                _fetch(f"{server.address}{request}", bytearray(_PIECE))

    return Contest(Timed(opened), calls=1, most=7)


def _in_page(settings: Settings, names: int, what: str) -> Contest:
    """``what``: a method of `pages.Page`."""
    with ExitStack() as stack:
        server = stack.enter_context(lazyckpt.serve(data.names(settings, names), cache=False))
        page = stack.enter_context(pages.opened(server.url))
        return Contest(getattr(page, what), calls=1, most=7, done=stack.pop_all().close)


def _overview(settings: Settings, dtype: torch.dtype) -> Contest:
    """The picture of a whole tensor, of 512 x 512 cells, against reading the tensor."""
    side = settings.pick(16384, 4096) if dtype == torch.float32 else settings.pick(23168, 5792)
    path = data.saved(settings, f"square-{str(dtype)[6:]}", "pt", 1, (side, side), dtype)
    warm(path)
    t = lazyckpt.open(path, cache=False).tensor("layers.0.weight")
    return Contest(Timed(lambda: pooled(t, 512, 512)), ("torch.load", Timed(lambda: torch.load(path))), calls=1, most=7)


def _clients(settings: Settings, folder: str, options: str) -> Contest:
    """The server's resident memory, all of it, when 100 clients have read 10 MiB each, or four pictures each."""
    source = data.torch_file(settings)
    warm(source)
    ours = _server(source, options)
    try:
        return _of_clients(ours, folder)
    except BaseException:
        ours.kill()
        raise


def _of_clients(ours: subprocess.Popen[str], folder: str) -> Contest:
    assert ours.stdout is not None
    address = ours.stdout.readline().strip()
    if folder == "api/":
        with urlopen(f"{address}api/v1/tree") as answer:
            assert answer.status == 200
        asked = [(f"api/v1/tensor/{path}", 0) for n in range(100) for path in _pictures(n)]
    elif folder == "hf/":
        size = int(urlopen(Request(f"{address}hf/model.safetensors", method="HEAD")).headers["Content-Length"])
        asked = [("hf/model.safetensors", n * (size - 10 * MIB) // 99) for n in range(100)]
    else:
        documents = json.loads(urlopen(f"{address}zarr/zarr.json").read())["consolidated_metadata"]["metadata"]
        array = next(path for path, node in documents.items() if node["node_type"] == "array")
        arrays = [path for path, node in documents.items() if node.get("shape") == documents[array]["shape"]]
        asked = [(f"zarr/{arrays[n % len(arrays)]}/c/{k}/0", 0) for n in range(100) for k in range(2)]

    def read(one: tuple[str, int]) -> None:
        path, begin = one
        with urlopen(Request(address + path, headers={"Range": f"bytes={begin}-{begin + 10 * MIB - 1}"})) as answer:
            while answer.read(64 << 10):
                pass

    def clients(calls: int = 1) -> Sample:
        with ThreadPoolExecutor(100) as pool:
            list(pool.map(read, asked))
        status = Path(f"/proc/{ours.pid}/status").read_text()
        (peak,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
        return Sample(0.0, {"peak": peak})

    def done() -> None:
        ours.terminate()
        ours.wait()

    return Contest(clients, calls=1, rehearse=False, most=3, least=1, done=done)


def _pictures(client: int) -> Iterator[str]:
    """What the page of a tensor asks for, at first and when one zooms."""
    name = f"layers.{client % 16}.weight"
    yield f"tile?name={name}&rows=512&cols=512&exact=yes&fraction={1 + client % 20}"
    yield f"tile?name={name}&rows=256&cols=256&r0={client}&r1={client + 512}&c0={client}&c1={client + 512}"
    yield f"histogram?name={name}&bins={100 + client}"
    yield f"norms?name={name}&rows={400 + client}&cols=512"


def _server(source: Path, options: str) -> subprocess.Popen[str]:
    """A server in a process of its own, as `lazyckpt serve` starts it, whose first line is its address."""
    code = (
        "import lazyckpt, torch\nfrom lazyckpt.io.system import share_heap\n"
        f"share_heap()\nserver = lazyckpt.serve({str(source)!r}, {options})\n"
        "print(server.address, flush=True)\nserver.wait()"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = settings.pick(1024, 64)
    yield Case(f"a shard of {size} MiB of a torch file over HTTP", partial(_shard, settings), [Goal(1 / 0.7)])
    for dtype in (torch.float32, torch.bfloat16):
        what = f"the heat map of a tensor of {settings.pick(1024, 64)} MiB of {str(dtype)[6:]}"
        yield Case(what, partial(_overview, settings, dtype), [Goal(1.3)])
    memory = [Goal(1.0, "peak", 300.0 * MIB, "memory of the server", "300 MiB")]
    for folder in ("hf/", "zarr/"):
        for options, also in (("", ""), ("dtype=torch.bfloat16", ", as bfloat16")):
            yield Case(f"100 clients of {folder}{also}", partial(_clients, settings, folder, options), memory)
    yield Case("100 clients of pictures", partial(_clients, settings, "api/", ""), memory)
    names = settings.pick(100_000, 10_000)
    half = [Goal(1.0, against=0.5, budget="half a second")]
    yield Case(f"HTML of {names:,} tensors and of a part: processor time", partial(_html, settings, names), half)
    names, ranks = settings.pick(500_000, 20_000), settings.pick(1024, 64)
    second = [Goal(1.0, against=1.0, budget="a second")]
    yield Case(f"the tree of {names:,} names: processor time", partial(_tree, settings, names), second)
    for what, name, goal, budget in (
        ("first paint", "first_paint", 0.3, "300 ms"),
        ("a key in the search", "key", 0.05, "50 ms"),
    ):
        case = partial(_in_page, settings, names, name)
        text = f"{names:,} names in the page: {what}: processor time"
        yield Case(text, case, [Goal(1.0, against=goal, budget=budget)])
    yield Case(f"the page of {ranks:,} ranks' files, from starting the server", partial(_page, settings, ranks), second)


AREA = Area(
    "explore",
    "The explorer",
    "A client reads the shard of a torch file as safetensors, which the explorer's server computes, and the converted "
    "file from nginx. The server's memory is all that is resident in its process, torch and zarr included, at most, "
    "while 100 clients read at the same time; each of those of pictures asks for an exact heat map, a part of it, a "
    "histogram and the norms of a tensor of 64 MiB. The tree's goal is one second of processor time, the page's one "
    "second in all. In the page of all names, the time of Chromium's main thread counts: from the answer to the first "
    "paint, and that of the slowest of 31 keys.",
    _cases,
)
