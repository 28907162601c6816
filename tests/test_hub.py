"""Repositories on the Hub, through a Hub of our own (tests/servers/hub.py)."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from hashlib import sha256
from multiprocessing import current_process
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.errors import CredentialsWarning
from lazyckpt.io.storage.hub import HubStore
from lazyckpt.io.storage.hub_url import parse
from lazyckpt.io.storage.repeating import Transient

from .servers.hub import Answer, Asked, Hub

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
http = pytest.importorskip("huggingface_hub.utils._http")

ROOT = Path(__file__).parents[1]
SHARDS = 4


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub; nobody is logged in, and the cache is empty."""
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{n}.weight": torch.randn(64, 48, generator=generator) for n in range(2 * SHARDS)}


def sharded(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a folder of Hugging Face with an index; return its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    found = tensors(seed)
    names = list(found)
    weight_map = {}
    for n in range(SHARDS):
        file = f"model-{n + 1:05}-of-{SHARDS:05}.safetensors"
        own = names[2 * n : 2 * n + 2]
        save_file({name: found[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["Some"], "seed": seed}))
    return found


@pytest.fixture
def truth(hub: Hub, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the repository "org/model"."""
    found = sharded(tmp_path / "model")
    hub.push("org/model", tmp_path / "model")
    return found


def same(view: Any, truth: dict[str, torch.Tensor]) -> bool:
    return set(view) == set(truth) and all(torch.equal(view[name][...], tensor) for name, tensor in truth.items())


def download(hub: Hub, name: str, **options: Any) -> Path:
    """Download a repository, or ``filename`` of it, as a user does; return its path in the cache."""
    cache = constants.HF_HUB_CACHE
    do = huggingface_hub.hf_hub_download if "filename" in options else huggingface_hub.snapshot_download
    return Path(do(name, endpoint=hub.endpoint, cache_dir=cache, **options))


def close_sessions() -> None:
    """Those of huggingface_hub, which are shared and may be as old as their first use."""
    close = getattr(http, "close_session", None) or http.reset_sessions  # the latter before 1.0
    close()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE does, which is read when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_sessions()


@pytest.fixture(autouse=True)
def _fresh_sessions() -> Iterator[None]:
    yield
    close_sessions()


# -- URLs


@pytest.mark.parametrize(
    ("url", "kind", "repo", "revision", "path"),
    [
        ("hf://org/model", "models", "org/model", "", ""),
        ("hf://org/model/", "models", "org/model", "", ""),
        ("hf://models/org/model", "models", "org/model", "", ""),
        ("hf://datasets/org/states@v1.0/step 5", "datasets", "org/states", "v1.0", "step 5"),
        ("hf://spaces/org/app", "spaces", "org/app", "", ""),
        ("hf://org/model@refs/pr/1", "models", "org/model", "refs/pr/1", ""),
        ("hf://org/model@refs%2Fpr%2F1/a/b.bin", "models", "org/model", "refs/pr/1", "a/b.bin"),
        ("hf://org/model@refs/convert/parquet/x", "models", "org/model", "refs/convert/parquet", "x"),
        ("hf://org/model@feature%2Fnew", "models", "org/model", "feature/new", ""),
        ("hf://org/model/a@b#c?d%20é.bin", "models", "org/model", "", "a@b#c?d%20é.bin"),
    ],
)
def test_urls(url: str, kind: str, repo: str, revision: str, path: str) -> None:
    place = parse(url)
    assert place == (kind, repo, revision, path)
    assert parse(place.url) == place


@pytest.mark.parametrize(
    "url", ["hf://", "hf://model", "hf://org/", "hf://org/model@", "hf://org/model/../other", "hf://org/mo del"]
)
def test_urls_that_name_no_repository(url: str) -> None:
    with pytest.raises(lazyckpt.FormatError, match="hf://"):
        lazyckpt.open(url)


def test_unknown_options_are_refused(hub: Hub) -> None:
    with pytest.raises(lazyckpt.FormatError, match="revison"):
        lazyckpt.open("hf://org/model", storage_options={"revison": "main"})
    assert not hub.asked


def test_without_huggingface_hub_the_message_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(lazyckpt.FormatError, match=re.escape("pip install 'lazyckpt[hub]'")):
        lazyckpt.open("hf://org/model")


# -- reading


def test_a_repository_reads_like_its_folder(hub: Hub, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    view, local = lazyckpt.open("hf://org/model"), lazyckpt.open(tmp_path / "model")
    assert same(view, truth)
    assert (view.format, view.meta, list(view), set(view.files)) == (
        local.format, local.meta, list(local), set(local.files),
    )  # fmt: skip
    name = "layers.3.weight"
    for key in [(3,), (slice(1, 60, 7), slice(None, None, 5)), (..., 4), ([1, 5, 9],)]:
        assert torch.equal(view[name][key], truth[name][key])
    commit = hub.repositories["models/org/model"].refs["main"]
    assert view.root == f"hf://org/model@{commit}"
    assert all(info.version for info in view.files.values())


def test_requests_of_opening_and_of_a_slice(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model", cache=False)
    counts = hub.counts()
    assert counts["revision"] == counts["tree"] == 1
    assert counts["resolve"] == SHARDS + 2 and counts["resolve-cache"] == 2  # and the index, and config.json
    assert counts["cdn"] <= 2 * SHARDS
    assert view.io.requests == sum(counts.values())
    hub.clear()
    assert torch.equal(view["layers.5.weight"][7], truth["layers.5.weight"][7])
    assert hub.counts() == {"cdn": 1}
    assert hub.asked[0].range and view.io.requests == sum(counts.values()) + 1
    assert "1 request" in view["layers.5.weight"].explain((7,))


def test_the_token_is_not_sent_to_the_storage(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = sharded(tmp_path / "model")
    hub.push("org/secret", tmp_path / "model", private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert same(lazyckpt.open("hf://org/secret"), truth)
    assert {asked.token for asked in hub.asked if asked.server == "cdn"} == {""}
    assert {asked.token for asked in hub.asked if asked.server == "hub"} == {hub.token}


def test_links_that_expire_are_asked_for_again(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    hub.expire_links()
    hub.clear()
    assert torch.equal(view["layers.0.weight"][1], truth["layers.0.weight"][1])
    assert hub.counts() == {"cdn": 2, "resolve": 1}
    hub.clear()
    assert torch.equal(view["layers.0.weight"][2], truth["layers.0.weight"][2])
    assert hub.counts() == {"cdn": 1}


def test_many_threads_meet_a_link_that_has_expired(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    hub.expire_links()
    with ThreadPoolExecutor(16) as threads:
        rows = list(threads.map(lambda n: view["layers.0.weight"][n], range(64)))
    assert torch.equal(torch.stack(rows), truth["layers.0.weight"])


def test_a_file_and_a_folder_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    truth = sharded(tmp_path / "data" / "step 10" / "weights")
    hub.push("org/states", tmp_path / "data", kind="datasets", ref="refs/pr/1")
    root = "hf://datasets/org/states@refs%2Fpr%2F1/step 10/weights"
    assert same(lazyckpt.open(root), truth)
    view = lazyckpt.open(f"{root}/model-00002-of-00004.safetensors")
    assert set(view) == {"layers.2.weight", "layers.3.weight"}
    assert same(lazyckpt.open(f"{root}/model.safetensors.index.json"), truth)
    with pytest.raises(lazyckpt.MissingFileError, match=r"nothing\.bin"):
        lazyckpt.open(f"{root}/nothing.bin")


def test_names_of_all_kinds(hub: Hub) -> None:
    truth = {"w": torch.arange(7)}
    names = ["a b.pt", "a#b.pt", "a?b.pt", "a%20b.pt", "größe/模型.pt", "a@b+c&d=e.pt"]
    save = {}
    for n, name in enumerate(names):
        torch.save({"w": truth["w"] + n}, path := Path(os.environ["HF_ENDPOINT"].rsplit(":", 1)[1]))
        save[name] = path.read_bytes()
        path.unlink()
    hub.push("org/names", save)
    for n, name in enumerate(names):
        assert same(lazyckpt.open(f"hf://org/names/{name}"), {"w": truth["w"] + n})


def test_long_listings_have_pages(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    hub.page = 3
    assert same(lazyckpt.open("hf://org/model"), truth)
    assert hub.counts()["tree"] == 2


def test_folders_of_a_large_repository_are_listed_one_by_one(hub: Hub, tmp_path: Path) -> None:
    truth = sharded(tmp_path / "steps" / "checkpoint-7")
    hub.push("org/large", {f"logs/{n:04}.txt": b"" for n in range(100)})
    hub.push("org/large", tmp_path / "steps")
    hub.page = 20
    assert same(lazyckpt.open("hf://org/large/checkpoint-7"), truth)
    assert hub.counts()["tree"] <= 5  # not the 6 of the whole tree


def test_a_mirror_may_link_to_pages_of_the_original(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    hub.page = 4
    original = hub._tree

    def elsewhere(*arguments: Any) -> Answer:
        answer = original(*arguments)
        headers = {
            name: value.replace(hub.endpoint, "https://huggingface.co") for name, value in answer.headers.items()
        }
        return answer._replace(headers=headers)

    hub._tree = elsewhere  # type: ignore[method-assign]
    assert same(lazyckpt.open("hf://org/model"), truth)


# -- commits


def test_an_open_store_goes_on_with_its_commit(hub: Hub, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = lazyckpt.open("hf://org/model")
    changed = sharded(tmp_path / "new", seed=1)
    commit = hub.push("org/model", tmp_path / "new")
    after = lazyckpt.open("hf://org/model")
    assert same(before, truth) and same(after, changed)
    assert before.root != after.root == f"hf://org/model@{commit}"
    assert same(lazyckpt.open(before.root), truth)


def test_a_commit_needs_no_request_to_be_resolved(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    root = lazyckpt.open("hf://org/model").root
    hub.clear()
    assert same(lazyckpt.open(root, cache=False), truth)
    assert "revision" not in hub.counts()


def test_another_content_of_a_commit_is_refused(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    """Git does not do that; a mirror that is wrong may."""
    view = lazyckpt.open("hf://org/model")
    [commit] = hub.repositories["models/org/model"].commits.values()
    path = "model-00001-of-00004.safetensors"
    commit[path] = commit[path][:-4] + b"\1\1\1\1"
    hub.expire_links()
    with pytest.raises(lazyckpt.ChangedFileError, match="model-00001"):
        view["layers.0.weight"][...]
    assert torch.equal(view["layers.7.weight"][...], truth["layers.7.weight"])


def test_answers_of_another_commit_are_refused(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    hub.expire_links()
    hub.faults = lambda asked: (
        Answer(200, {"X-Repo-Commit": "0" * 40}, b"x" * 99) if "/resolve/" in asked.path else None
    )
    with pytest.raises(lazyckpt.ChangedFileError, match="commit"):
        view["layers.0.weight"][...]


# -- access


def test_a_private_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = sharded(tmp_path / "model")
    hub.push("org/secret", tmp_path / "model", private=True)
    with pytest.raises(lazyckpt.MissingFileError, match=r"org/secret, or it is private.*hf auth login"):
        lazyckpt.open("hf://org/secret")
    assert same(lazyckpt.open("hf://org/secret", storage_options={"token": hub.token}), truth)
    (tmp_path / "token").write_text(hub.token)  # as `hf auth login` leaves it
    assert same(lazyckpt.open("hf://org/secret"), truth)
    with pytest.raises(lazyckpt.MissingFileError, match="private"):
        lazyckpt.open("hf://org/secret", storage_options={"token": False})


def test_a_gated_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = sharded(tmp_path / "model")
    hub.push("org/gated", tmp_path / "model", gated=True)
    with pytest.raises(lazyckpt.MissingFileError, match=r"org/gated is gated: ask for access at .*/org/gated"):
        lazyckpt.open("hf://org/gated")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert same(lazyckpt.open("hf://org/gated"), truth)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("hf://org/nothing", "no repository org/nothing"),
        ("hf://org/model@v9", "no revision 'v9'"),
        ("hf://org/model@" + "0" * 40, "no revision '0000"),
        ("hf://org/model/sub/x.bin", "no such file or folder"),
    ],
)
def test_what_is_not_there(hub: Hub, truth: dict[str, torch.Tensor], url: str, told: str) -> None:
    with pytest.raises(lazyckpt.MissingFileError, match=told) as caught:
        lazyckpt.open(url)
    assert str(caught.value).startswith("hf://org/")
    done = CliRunner().invoke(cli.app, ["ls", url])
    assert done.exit_code == 2 and done.stderr.startswith("error: hf://org/")


def test_a_wrong_token_is_not_in_the_message(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    token = "hf_" + "x" * 34
    with pytest.raises(lazyckpt.MissingFileError, match="refuses the token") as caught:
        lazyckpt.open("hf://org/model", storage_options={"token": token})
    error: BaseException | None = caught.value
    while error is not None:
        assert token not in str(error) and token not in repr(error)
        error = error.__cause__


def test_a_login_may_be_renewed(hub: Hub, tmp_path: Path) -> None:
    truth = sharded(tmp_path / "model")
    hub.push("org/secret", tmp_path / "model", private=True)
    (tmp_path / "token").write_text(hub.token)
    view = lazyckpt.open("hf://org/secret")
    hub.token = "hf_" + "n" * 34
    hub.expire_links()
    with pytest.raises(lazyckpt.MissingFileError, match="refuses the token"):
        view["layers.0.weight"][...]
    (tmp_path / "token").write_text(hub.token)
    assert same(view, truth)


def test_a_token_is_a_text(hub: Hub) -> None:
    with pytest.raises(lazyckpt.FormatError, match="token"):
        lazyckpt.open("hf://org/model", storage_options={"token": b"hf_x"})


def test_a_repository_that_was_renamed(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    def moved(asked: Asked) -> Answer | None:
        if "/old/name" not in asked.path:
            return None
        return Answer(307, {"Location": asked.path.replace("/old/name", "/org/model")})

    hub.faults = moved
    assert same(lazyckpt.open("hf://old/name"), truth)


def test_links_and_tokens_are_not_logged(
    hub: Hub, truth: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for name in ("httpx", "urllib3", "huggingface_hub"):
        caplog.set_level("DEBUG", name)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    assert same(lazyckpt.open("hf://org/model"), truth)
    assert "model-00001" in caplog.text and "Amz" not in caplog.text and hub.token not in caplog.text


# -- faults


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("where", ["/revision/", "/tree/", "/resolve/", "X-Amz"])
def test_a_busy_server_is_asked_again(hub: Hub, truth: dict[str, torch.Tensor], status: int, where: str) -> None:
    failed: list[str] = []
    lock = threading.Lock()  # the server has a thread for each connection

    def busy(asked: Asked) -> Answer | None:
        with lock:
            if where not in asked.path or asked.path in failed:
                return None
            failed.append(asked.path)
        return Answer(status, {"Retry-After": "0"}, b"busy")

    hub.faults = busy
    view = lazyckpt.open("hf://org/model")
    assert same(view, truth)
    assert len(failed) == {"/resolve/": SHARDS + 2, "X-Amz": SHARDS}.get(where, 1)
    assert view.io.retries == len(failed) and view.io.requests == len(hub.asked)


def test_the_hub_says_when_to_ask_again(
    hub: Hub, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = lazyckpt.open("hf://org/model")
    connection = view._store._shared.connection  # type: ignore[attr-defined]
    monkeypatch.setattr(time, "time", lambda: 1_500_000_000.0)
    date = formatdate(1_500_000_007, usegmt=True)
    for headers in ({"Retry-After": "7"}, {"Retry-After": date}, {"RateLimit": '"api";r=0;t=7'}):
        hub.faults = lambda asked, headers=headers: Answer(429, headers, b"")
        with pytest.raises(Transient) as caught:
            connection.commit("main")
        assert caught.value.after == 7


def test_a_server_that_stays_busy_is_an_error(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model", storage_options={"requests": {"deadline": 0.3}})
    hub.faults = lambda asked: Answer(503, {}, b"")
    with pytest.raises(OSError, match="503") as caught:
        view["layers.0.weight"][...]
    assert "X-Amz" not in str(caught.value) and "secret" not in str(caught.value)


def test_bodies_that_are_too_short_are_read_on(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    cut: list[Asked] = []

    def half(asked: Asked) -> Answer | None:
        if asked.server == "hub" or cut:
            return None
        cut.append(asked)
        answer = hub._from_cdn(asked)
        return answer._replace(
            headers={**answer.headers, "Content-Length": str(len(answer.body))}, body=answer.body[:99]
        )

    hub.faults = half
    assert torch.equal(view["layers.0.weight"][...], truth["layers.0.weight"])
    assert len(cut) == 1 and view.io.retries == 1


def test_connections_that_drop_are_made_again(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    dropped: list[Asked] = []

    def drop(asked: Asked) -> Answer | None:
        if len(dropped) < 3:
            dropped.append(asked)
            raise ConnectionError
        return None

    hub.faults = drop
    view = lazyckpt.open("hf://org/model")
    assert same(view, truth) and view.io.retries == 3


def test_a_client_that_another_thread_closes_is_replaced(
    hub: Hub, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = lazyckpt.open("hf://org/model")
    get_session = huggingface_hub.utils.get_session
    closed: list[int] = []

    def session() -> Any:
        found = get_session()
        if not closed:
            closed.append(1)
            close_sessions()
        return found

    monkeypatch.setattr("huggingface_hub.utils.get_session", session)
    assert same(view, truth) and closed


def test_other_bytes_than_the_range_are_refused(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")

    def shifted(asked: Asked) -> Answer | None:
        start, stop = map(int, asked.range.removeprefix("bytes=").split("-"))
        return hub._from_cdn(asked._replace(range=f"bytes={start - 4}-{stop - 4}")) if asked.server == "cdn" else None

    hub.faults = shifted
    with pytest.raises(lazyckpt.CorruptError, match="another range"):
        view["layers.0.weight"][...]


def test_small_files_are_read_whole_from_a_server_without_ranges(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    hub.ranges = False
    assert same(lazyckpt.open("hf://org/model"), truth)


def test_large_files_of_a_server_without_ranges_are_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    monkeypatch.setattr("lazyckpt.io.storage.hub_requests._WHOLE", 10_000)
    hub.ranges = False
    with pytest.raises(lazyckpt.CorruptError, match="does not serve ranges"):
        view = lazyckpt.open("hf://org/model/model-00001-of-00004.safetensors")  # may ask for all of a small file
        next(iter(view.values()))[...]


def test_a_storage_that_refuses_new_links_is_an_error(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    hub.faults = lambda asked: Answer(403, {}, b"no") if asked.server == "cdn" else None
    with pytest.raises(OSError, match="refuses the link") as caught:
        view["layers.0.weight"][...]
    assert "X-Amz" not in str(caught.value)


# -- the cache of huggingface_hub


def test_cached_files_are_read_without_a_request(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    download(hub, "org/model")
    hub.clear()
    view = lazyckpt.open("hf://org/model", cache=False)
    assert same(view, truth)
    assert torch.equal(view["layers.1.weight"][::7, 3], truth["layers.1.weight"][::7, 3])
    for _ in range(40):
        assert torch.equal(view["layers.1.weight"][5], truth["layers.1.weight"][5])
    whole = view.to()
    assert all(torch.equal(whole[name], tensor) for name, tensor in truth.items())
    assert "request" not in view["layers.1.weight"].explain()
    assert hub.counts() == {"revision": 1, "tree": 1}


def test_some_files_are_cached(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    download(hub, "org/model", filename="model-00001-of-00004.safetensors")
    view = lazyckpt.open("hf://org/model")
    hub.clear()
    assert same(view, truth)
    paths = "".join(asked.path for asked in hub.asked)
    assert "model-00001" not in paths and "model-00002" in paths


def test_nothing_outside_of_the_cached_commit_is_read(
    hub: Hub, truth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = download(hub, "org/model")
    (folder.parent / "secret.txt").write_text("secret")
    stores = [lazyckpt.open("hf://org/model")._store]
    offline(monkeypatch)
    stores.append(lazyckpt.open("hf://org/model")._store)
    for store in stores:
        for path in ("../secret.txt", "a/../../secret.txt", str(folder.parent / "secret.txt")):
            with pytest.raises(lazyckpt.MissingFileError):
                store.stat(path)
            with pytest.raises(lazyckpt.MissingFileError):
                store.read(path, 0, 6)


def test_files_of_another_commit_in_the_cache_are_not_read(hub: Hub, truth: Any, tmp_path: Path) -> None:
    download(hub, "org/model")
    changed = sharded(tmp_path / "new", seed=1)
    hub.push("org/model", tmp_path / "new")
    assert same(lazyckpt.open("hf://org/model"), changed)


def test_a_damaged_cache_is_not_read(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    folder = download(hub, "org/model")
    path = os.path.realpath(folder / "model-00001-of-00004.safetensors")
    os.truncate(path, os.path.getsize(path) - 10)
    assert same(lazyckpt.open("hf://org/model"), truth)


def test_a_cached_file_that_changes_is_an_error(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    folder = download(hub, "org/model")
    view = lazyckpt.open("hf://org/model")
    path = Path(os.path.realpath(folder / "model-00001-of-00004.safetensors"))
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\1\1\1")
    with pytest.raises(lazyckpt.ChangedFileError):
        view["layers.0.weight"][...]


def test_a_cache_that_is_emptied_meanwhile(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    import shutil

    folder = download(hub, "org/model")
    view = lazyckpt.open("hf://org/model")
    view._store._local._forget()  # type: ignore[attr-defined]
    shutil.rmtree(folder.parents[1])
    assert same(view, truth)


def test_offline_the_cache_is_enough(hub: Hub, truth: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    download(hub, "org/model")
    offline(monkeypatch)
    hub.clear()
    view = lazyckpt.open("hf://org/model")
    assert same(view, truth) and not hub.asked
    assert all(info.version for info in view.files.values())
    with pytest.raises(lazyckpt.MissingFileError, match="HF_HUB_OFFLINE"):
        lazyckpt.open("hf://org/other")
    with pytest.raises(lazyckpt.MissingFileError, match="HF_HUB_OFFLINE"):
        lazyckpt.open("hf://org/model/other.bin")


def test_offline_what_is_not_cached_is_missing(hub: Hub, truth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.safetensors.index.json", "model-00001-of-00004.safetensors"):
        download(hub, "org/model", filename=name)
    offline(monkeypatch)
    view = lazyckpt.open("hf://org/model")
    assert torch.equal(view["layers.0.weight"][...], truth["layers.0.weight"])
    with pytest.raises(lazyckpt.LazyckptError, match="HF_HUB_OFFLINE"):
        view["layers.7.weight"][...]


def test_without_a_connection_the_cache_is_read_with_a_warning(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    download(hub, "org/model")
    hub.faults = lambda asked: Answer(503, {}, b"")
    with pytest.warns(UserWarning, match="from the cache"):
        view = lazyckpt.open("hf://org/model")
    assert same(view, truth)


# -- the block cache


def test_blocks_that_were_read_are_not_requested_again(
    hub: Hub, truth: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert same(lazyckpt.open("hf://org/model", cache=tmp_path / "blocks"), truth)
    hub.clear()
    view = lazyckpt.open("hf://org/model", cache=tmp_path / "blocks")
    assert same(view, truth) and same(pickle.loads(pickle.dumps(view)), truth)
    assert "cdn" not in hub.counts() and view.io.cache_hits


def test_blocks_of_files_that_a_push_leaves_stay_cached(
    hub: Hub, truth: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert same(lazyckpt.open("hf://org/model", cache=tmp_path / "blocks"), truth)
    changed = sharded(tmp_path / "new", seed=1)
    name = "model-00002-of-00004.safetensors"
    hub.push("org/model", {name: (tmp_path / "new" / name).read_bytes()})
    hub.clear()
    own = {name: changed[name] for name in ("layers.2.weight", "layers.3.weight")}
    assert same(lazyckpt.open("hf://org/model", cache=tmp_path / "blocks"), truth | own)
    assert {asked.path.partition("?")[0].rpartition("/")[2] for asked in hub.asked if asked.server == "cdn"} == {name}


def test_downloaded_files_are_not_cached_again(hub: Hub, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    download(hub, "org/model")
    assert same(lazyckpt.open("hf://org/model", cache=tmp_path / "blocks"), truth)
    kept = [path.stat().st_size for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
    assert sum(kept) < 1000


# -- processes


def test_a_pickle_keeps_the_commit_and_no_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: Any
) -> None:
    hub.push("org/model", {}, private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    view = lazyckpt.open("hf://org/model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = pickle.dumps((view, view["layers.2.weight"]))
    assert hub.token.encode() not in data
    sharded(tmp_path / "new", seed=1)
    hub.push("org/model", tmp_path / "new")
    hub.clear()
    again, tensor = pickle.loads(data)
    assert not hub.asked and again.root == view.root
    assert torch.equal(tensor[...], truth["layers.2.weight"]) and same(again, truth)


def test_a_token_that_was_passed_is_left_out_of_the_pickle(
    hub: Hub, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("org/model", {}, private=True)
    view = lazyckpt.open("hf://org/model", storage_options={"token": hub.token})
    with pytest.warns(CredentialsWarning, match="token"):
        data = pickle.dumps(view)
    assert hub.token.encode() not in data and same(pickle.loads(data), truth)
    assert hub.token not in repr(view._store) + view.root + str(view)
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    with pytest.raises(lazyckpt.LazyckptError, match="org/model"):
        pickle.loads(data)["layers.2.weight"][...]
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert same(pickle.loads(data), truth)


def _compare(view: Any, truth: Any, queue: Any) -> None:
    try:
        queue.put(same(view, truth))
    except BaseException as e:
        queue.put(repr(e))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_reads(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    assert same(view, truth)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_compare, args=(view, truth, queue))
    child.start()
    assert queue.get(timeout=60) is True
    child.join()
    assert same(view, truth)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, n: int) -> torch.Tensor:
        return self.tensor[n]


@pytest.mark.slow
def test_a_data_loader_reads(hub: Hub, truth: dict[str, torch.Tensor]) -> None:
    view = lazyckpt.open("hf://org/model")
    view["layers.0.weight"][0]
    loader = torch.utils.data.DataLoader(Rows(view["layers.1.weight"]), batch_size=16, num_workers=2)
    assert torch.equal(torch.cat(list(loader)), truth["layers.1.weight"])


# -- storage buckets


def test_a_bucket_of_the_hub_is_read_by_its_own_file_system(hub: Hub, tmp_path: Path) -> None:
    """As far as the installed huggingface_hub knows buckets; files are pinned by the hashes of their contents."""
    pytest.importorskip("huggingface_hub._buckets")
    found = sharded(tmp_path / "model")
    files = {f"run/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def answer(asked: Asked) -> Answer | None:
        path = unquote(urlsplit(asked.path).path)
        start = "/buckets/org/states/resolve/"
        if path.startswith("/api/buckets/org/states/tree"):
            if path.endswith("/tree"):
                entries: list[dict[str, Any]] = [{"type": "directory", "path": "run"}]
            else:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "xetHash": sha256(data).hexdigest()}
                    for name, data in files.items()
                ]
            return Answer(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())
        if path == "/api/buckets/org/states":
            about = {"id": "org/states", "private": False, "size": 0, "totalFiles": 0}
            about["createdAt"] = "2026-01-01T00:00:00.000Z"
            return Answer(200, {"Content-Type": "application/json"}, json.dumps(about).encode())
        if not path.startswith(start):
            return None
        data = files[path.removeprefix(start)]
        first, last = asked.range.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1]
        return Answer(206, {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}, part)

    hub.faults = answer
    url, options = "hf://buckets/org/states/run", {"endpoint": hub.endpoint}
    with lazyckpt.open(url, storage_options=options) as view:
        assert same(view, found) and not view.problems
        name = "model-00001-of-00004.safetensors"
        files[f"run/{name}"] = files[f"run/{name}"][:-1] + b"\1"
        with pytest.raises(lazyckpt.ChangedFileError):
            same(view, found)


# -- commands and runs


def test_commands(hub: Hub, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(cli.app, [*words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "layers" in run("ls", "hf://org/model")
    assert "layers" in run("stats", "hf://org/model", "layers.0.weight")
    run("verify", "hf://org/model")
    run("diff", "hf://org/model", str(tmp_path / "model"))
    run("convert", "hf://org/model", str(tmp_path / "out"), "--to", "safetensors")
    assert same(lazyckpt.open(tmp_path / "out"), truth)


def test_a_run(hub: Hub, tmp_path: Path) -> None:
    steps = {step: sharded(tmp_path / "run" / f"checkpoint-{step}", seed=step) for step in (10, 20, 30)}
    hub.push("org/run", tmp_path / "run")
    run = lazyckpt.open_run("hf://org/run")
    assert run.steps == (10, 20, 30)
    name = "layers.0.weight"
    assert torch.equal(run[name][:, 5], torch.stack([truth[name][5] for truth in steps.values()]))
    assert same(lazyckpt.open("hf://org/run"), steps[30])
    assert same(lazyckpt.open("hf://org/run", tag="checkpoint-10"), steps[10])
    assert hub.counts()["tree"] == 1


def test_the_store_says_what_it_reads(hub: Hub, truth: Any) -> None:
    view = lazyckpt.open("hf://org/model")
    assert isinstance(view._store, HubStore)
    assert repr(view._store) == f"HubStore({view.root!r})"
