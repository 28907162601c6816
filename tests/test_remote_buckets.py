"""Buckets as users have them: odd names, many objects, few permissions, credentials that expire and stay secret."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.errors import CredentialsWarning, LazyckptError, MissingFileError
from lazyckpt.io.storage.object import ObjectStore
from lazyckpt.io.storage.uploads import uploads_of

from .servers.fixtures import Cloud, cloud_of, need_obstore

pytestmark = pytest.mark.slow

TENSOR = torch.arange(5000, dtype=torch.float32).reshape(50, 100)
NAMES = (
    "with space",
    "hash#1",
    "question?x=1&y",
    "percent%20",
    "percent%",
    "plus+",
    "ünï-cöde",
    "a&b=c;d,e",
    "br[0]{1}",
)
AWS = {"AWS_ACCESS_KEY_ID": "the-environments-user", "AWS_SECRET_ACCESS_KEY": "the-environments-secret"}


def opened(cloud: Cloud, name: str, **more: Any) -> lazyckpt.CheckpointView:
    return lazyckpt.open(cloud.at(name), storage_options=cloud.options, cache=False, **more)


# -- names


@pytest.mark.filterwarnings("ignore::lazyckpt.errors.CredentialsWarning")
@pytest.mark.parametrize("name", NAMES)
def test_names_of_files_and_folders(cloud: Cloud, name: str) -> None:
    cloud.put(f"{name}/model.safetensors", save({"a": TENSOR}))
    cloud.put(f"{name}.safetensors", save({"a": TENSOR + 1}))
    cloud.put("decoy/model.safetensors", save({"a": TENSOR + 2}))
    assert torch.equal(opened(cloud, f"{name}.safetensors")["a"][:], TENSOR + 1)
    assert torch.equal(opened(cloud, f"{name}/model.safetensors")["a"][:], TENSOR)
    folder = opened(cloud, name)
    assert torch.equal(folder["a"][3:5], TENSOR[3:5])
    again = pickle.loads(pickle.dumps(folder["a"]))
    assert torch.equal(again[7], TENSOR[7])


@pytest.mark.parametrize("name", NAMES)
def test_names_of_shards(cloud: Cloud, name: str) -> None:
    cloud.put(f"run/{name}.safetensors", save({"a": TENSOR}))
    index = {"metadata": {}, "weight_map": {"a": f"{name}.safetensors"}}
    cloud.put("run/model.safetensors.index.json", json.dumps(index).encode())
    view = opened(cloud, "run")
    assert not view.problems
    assert torch.equal(view["a"][:], TENSOR)


# -- listings


def test_ten_thousand_objects_are_listed_by_pages(s3: Cloud) -> None:
    import obstore

    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(lambda n: obstore.put(s3.store, f"run/part-{n:05}.tmp", b"x", use_multipart=False), range(10_000))
        )
    s3.put("run/model.safetensors", save({"a": TENSOR}))
    s3.server.reset()
    view = opened(s3, "run")
    assert torch.equal(view["a"][:], TENSOR)
    lists = [entry for entry in s3.server.log() if "list-type=2" in entry.target]
    assert len({entry.target for entry in lists}) == 11  # 1,000 objects an answer
    assert len(lists) <= 22  # the store and the reader list the folder
    assert s3.server.counts().requests <= len(lists) + 6


def test_a_listing_that_lags_behind(s3: Cloud) -> None:
    """A shard that the listing does not have yet is found, or its tensors are holes: they are never read as others."""
    for name in ("a", "b"):
        s3.put(f"run/{name}.safetensors", save({name: TENSOR}))
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    s3.put("run/model.safetensors.index.json", json.dumps(index).encode())
    s3.server.set_fault("hide", what="list", objects="run/b.safetensors")
    view = opened(s3, "run")
    assert torch.equal(view["a"][:], TENSOR)
    if view.problems:
        with pytest.raises(MissingFileError, match=r"b\.safetensors"):
            view["b"][:]
    else:
        assert torch.equal(view["b"][:], TENSOR)


@pytest.fixture(scope="module")
def many() -> Iterator[Cloud]:
    """A bucket with a folder of more files than an answer to a listing has, and one of as many, with a folder's marker
    as the last one."""
    import obstore

    with cloud_of("s3") as cloud:

        def put(name: str) -> None:
            obstore.put(cloud.store, name, b"x", use_multipart=False)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(put, [*(f"more/{n:05}.tmp" for n in range(1050)), *(f"full/{n:05}.tmp" for n in range(998))]))
        marker = urllib.request.Request(f"{cloud.server.endpoint}/bucket/full/zz/", b"", method="PUT")
        urllib.request.urlopen(marker).close()
        for folder in ("more", "full"):
            cloud.put(f"{folder}/model.safetensors", save({"a": TENSOR}))
        yield cloud


@pytest.mark.parametrize("way", ["list", "tree", "writing"])
def test_a_listing_that_is_cut_short_is_an_error(many: Cloud, way: str) -> None:
    """A server of version 1 of the protocol says that there are more names, but not what comes next."""
    many.server.set_fault("no_token", what="list")
    ways: dict[str, Callable[[str], int]] = {
        "list": lambda folder: len(ObjectStore(many.at(folder), many.options).list()),
        "tree": lambda folder: len(ObjectStore(many.url, many.options).tree(folder, 10_000) or ()),
        "writing": lambda folder: len(uploads_of(many.at(folder), many.options).list()),
    }
    try:
        with pytest.raises(OSError, match="version 2 of S3's listings"):
            ways[way]("more")
        assert ways[way]("full") == 1000
    finally:
        many.server.clear_faults()
    assert ways[way]("more") == 1051


@pytest.mark.parametrize("times", [1, None], ids=["once", "for ever"])
def test_the_second_page_of_a_listing_fails(many: Cloud, times: int | None) -> None:
    options = {**many.options, "requests": {"deadline": 5 if times else 0.3}}
    many.server.set_fault("status", what="list", skip=1, times=times, status=500)
    try:
        if times:
            assert torch.equal(lazyckpt.open(many.at("more"), storage_options=options, cache=False)["a"][:], TENSOR)
            return
        with pytest.raises(MissingFileError, match="500 Internal Server Error"):
            lazyckpt.open(many.at("more"), storage_options=options, cache=False)
    finally:
        many.server.clear_faults()


def test_a_folder_of_a_run_that_cannot_be_listed(s3: Cloud) -> None:
    """It is no reason to open an older checkpoint in place of it."""
    for step in (1, 2):
        s3.put(f"run/checkpoint-{step}/model.safetensors", save({"a": TENSOR + step}))
    s3.server.set_fault("status", what="list", skip=1, status=500)
    options = {**s3.options, "requests": {"deadline": 0.3}}
    with pytest.raises(LazyckptError, match="500 Internal Server Error"):
        lazyckpt.open(s3.at("run"), storage_options=options, cache=False)


@pytest.mark.parametrize("megatron", [False, True], ids=["zarr", "megatron"])
def test_arrays_whose_page_hides_names_with_dots(tmp_path: Path, megatron: bool) -> None:
    """An array of Zarr 2 is known by its .zarray, which web servers leave out of the pages of folders."""
    need_obstore()
    about = {"zarr_format": 2, "shape": [3], "chunks": [3], "dtype": "<f4", "compressor": None, "filters": None}
    run = tmp_path / "run"
    (run / "layer.weight").mkdir(parents=True)
    (run / "layer.weight" / ".zarray").write_text(json.dumps({**about, "order": "C", "fill_value": 0}))
    (run / "layer.weight" / "0").write_bytes(TENSOR[0, :3].numpy().tobytes())
    if megatron:
        (run / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
        torch.save({"iteration": 3}, run / "common.pt")
    else:
        (run / ".zgroup").write_text('{"zarr_format": 2}')
    with cloud_of("http", pages=True) as cloud:
        view = lazyckpt.open(cloud.put_folder(run, "run"))
        assert list(view) == list(lazyckpt.open(run)) == ["layer.weight"]
        assert torch.equal(view["layer.weight"][:], TENSOR[0, :3])


# -- permissions


def test_a_bucket_without_the_permission_to_list(s3: Cloud) -> None:
    s3.put("run/model.safetensors", save({"a": TENSOR}))
    s3.put("other/strange-name.safetensors", save({"a": TENSOR}))
    s3.server.set_fault("status", what="list", status=403, error="AccessDenied")
    assert torch.equal(opened(s3, "run/model.safetensors")["a"][:], TENSOR)
    assert torch.equal(opened(s3, "run")["a"][:], TENSOR)  # by the names that checkpoints have
    assert torch.equal(opened(s3, "other/strange-name.safetensors")["a"][:], TENSOR)
    with pytest.raises(MissingFileError, match="access is denied") as caught:
        opened(s3, "other")
    assert len(str(caught.value).splitlines()) <= 3


def test_no_bucket(cloud: Cloud) -> None:
    root = cloud.url.rpartition("/")[0]
    says = "no such (file|bucket)" if cloud.kind == "http" else "no such bucket"
    for name in ("run", "run/model.safetensors"):
        with pytest.raises(LazyckptError, match=says):
            lazyckpt.open(f"{root}/not-there/{name}", storage_options=cloud.options)
    if cloud.kind != "http":
        with pytest.raises(LazyckptError, match=says):
            lazyckpt.open(f"{root}/not-there", storage_options=cloud.options)


def test_no_file_and_no_folder(cloud: Cloud) -> None:
    cloud.put("run/model.safetensors", save({"a": TENSOR}))
    for name in ("ru", "run/model", "run/other.safetensors", "other"):
        with pytest.raises(MissingFileError, match="no such file or folder"):
            opened(cloud, name)


def test_an_object_that_was_deleted(cloud: Cloud) -> None:
    import obstore

    cloud.put("run/model.safetensors", save({"a": TENSOR}))
    view = opened(cloud, "run")
    obstore.delete(cloud.store, "run/model.safetensors")
    with pytest.raises((MissingFileError, lazyckpt.ChangedFileError), match=r"run/model\.safetensors"):
        view["a"][:]


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_versions_of_objects(kind: str) -> None:
    """A view never reads a later version, also where the bucket keeps the one that it was opened with."""
    need_obstore()
    with cloud_of(kind, versioned=True) as cloud:
        cloud.put("run/model.safetensors", save({"a": TENSOR}))
        view = opened(cloud, "run")
        cloud.put("run/model.safetensors", save({"a": TENSOR + 1}))
        with suppress(lazyckpt.ChangedFileError):
            assert torch.equal(view["a"][:], TENSOR)
        assert torch.equal(opened(cloud, "run")["a"][:], TENSOR + 1)


def test_no_bucket_of_moto(moto: str) -> None:
    need_obstore()
    options = {"endpoint": moto, "skip_signature": True, "region": "us-east-1"}
    with pytest.raises(LazyckptError, match="no such bucket"):
        lazyckpt.open("s3://not-there/run", storage_options=options)


def test_a_checkpoint_in_moto(moto: str) -> None:
    """S3 as another project understands it."""
    need_obstore()
    import obstore
    from obstore.store import S3Store

    options = {"endpoint": moto, "access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}
    store = S3Store("bucket", config=options, client_options={"allow_http": True})  # type: ignore[arg-type]
    obstore.put(store, "mo to/model.safetensors", save({"a": TENSOR}))
    view = lazyckpt.open("s3://bucket/mo to", storage_options=options, cache=False)
    assert torch.equal(view["a"][10:20, 5], TENSOR[10:20, 5])
    obstore.put(store, "mo to/model.safetensors", save({"a": TENSOR + 1}))
    with pytest.raises(lazyckpt.ChangedFileError):
        view["a"][:]


# -- credentials


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No credentials but those that a test writes to this folder."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def test_credentials_that_expire_are_renewed(s3: Cloud, aws: Path, caplog: pytest.LogCaptureFixture) -> None:
    """boto3 runs the profile's process again when its credentials are about to expire."""
    pytest.importorskip("boto3")
    caplog.set_level(logging.DEBUG)
    process = aws / "process.py"
    process.write_text(
        "import datetime, json, pathlib\n"
        f"count = pathlib.Path({str(aws / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'user', 'SecretAccessKey': 'the-secret-key',\n"
        "    'SessionToken': f'token-{number}', 'Expiration': end.isoformat()}))\n"
    )
    (aws / "config").write_text(
        f"[profile work]\nregion = us-east-1\ncredential_process = {sys.executable} {process}\n"
    )
    url = s3.put("run/model.safetensors", save({"a": TENSOR}))
    options = {"endpoint": s3.server.endpoint, "profile": "work"}
    view = lazyckpt.open(url, storage_options=options, cache=False)
    assert torch.equal(view["a"][0], TENSOR[0])
    first = int((aws / "count").read_text())
    s3.server.set_fault("token", good=f"token-{first + 1}")  # the old one has expired
    time.sleep(0.2)  # obstore asks boto3 at most every 0.1 s
    assert torch.equal(view["a"][1], TENSOR[1])
    assert int((aws / "count").read_text()) > first
    s3.server.clear_faults()
    s3.server.set_fault("token", good="none")
    with pytest.raises(MissingFileError, match="ExpiredToken") as caught:
        view["a"][2]
    assert "the-secret-key" not in caplog.text + repr(caught.value) and "token-" not in caplog.text + repr(caught.value)


def test_a_profile_that_does_not_exist(s3: Cloud, aws: Path) -> None:
    pytest.importorskip("boto3")
    with pytest.raises(LazyckptError, match="profile"):
        lazyckpt.open("s3://bucket/run", storage_options={"endpoint": s3.server.endpoint, "profile": "nobody"})


def test_pickles_hold_no_credentials_of_the_environment(s3: Cloud, aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    url = s3.put("run/model.safetensors", save({"a": TENSOR}))
    view = lazyckpt.open(url, storage_options={"endpoint": s3.server.endpoint, "region": "us-east-1"}, cache=False)
    assert torch.equal(view["a"][0], TENSOR[0])
    signed = [entry for entry in s3.server.log() if entry.method == "GET"]
    assert signed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickled = pickle.dumps(view["a"])
    assert not [value for value in AWS.values() if value.encode() in pickled]
    assert torch.equal(pickle.loads(pickled)[3], TENSOR[3])


def test_pickles_leave_out_passed_credentials(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**s3.options, "access_key_id": "the-secret-user", "secret_access_key": "the-secret-key"}
    del options["skip_signature"]
    url = s3.put("run/model.safetensors", save({"a": TENSOR}))
    view = lazyckpt.open(url, storage_options=options, cache=False)
    with pytest.warns(CredentialsWarning) as warned:
        pickles = pickle.dumps(view["a"]), pickle.dumps(view)
    assert not [w for w in warned if "the-secret" in str(w.message)]
    assert not [data for data in pickles if b"the-secret" in data]
    assert torch.equal(pickle.loads(pickles[0])[3], TENSOR[3])
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    there = pickle.loads(pickles[0])
    assert torch.equal(there[3], TENSOR[3]), "this server wants no credentials"
    s3.server.set_fault("status", status=403)
    with pytest.raises(LazyckptError, match=r"leaves out credentials.*access_key_id, secret_access_key.*environment"):
        there[4]


@pytest.fixture
def secret_url() -> Iterator[tuple[Cloud, str]]:
    """A web server, and the URL of a file there with a user, a password and a signature."""
    need_obstore()
    with cloud_of("http") as cloud:
        url = cloud.put("run/model.safetensors", save({"a": TENSOR}))
        yield cloud, url.replace("://", "://the-secret-user:the-secret-password@") + "?sig=the-secret-signature"


def test_credentials_in_a_url_are_never_shown(
    secret_url: tuple[Cloud, str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    cloud, url = secret_url
    view = lazyckpt.open(url, cache=False)
    assert torch.equal(view["a"][:], TENSOR)
    assert all("sig=the-secret-signature" in entry.target for entry in cloud.server.log() if entry.method == "GET")
    texts = [repr(view), str(view), view.root, repr(view["a"]), view["a"].explain(), str(view.io), view._repr_html_()]
    view.to_safetensors(tmp_path / "out.safetensors")
    texts.append((tmp_path / "out.safetensors").read_bytes().decode("latin-1"))
    for command in ("ls", "stats", "verify"):
        result = CliRunner().invoke(cli.app, [command, url])
        texts.append(result.output)
        assert result.exit_code == 0, result.output
    options = {"requests": {"deadline": 2}}
    view = lazyckpt.open(url, storage_options=options, cache=False)
    for kind, more in (("status", {"status": 503}), ("status", {"status": 403}), ("drop", {}), ("html", {})):
        cloud.server.clear_faults()
        cloud.server.set_fault(kind, **more)
        for read in (lambda: view["a"][:], lambda: lazyckpt.open(url, storage_options=options, cache=False)):
            with pytest.raises(LazyckptError) as caught:
                read()
            texts += [str(caught.value), repr(caught.value), str(caught.value.__cause__), str(caught.value.__context__)]
    assert not [text for text in [*texts, caplog.text] if "the-secret" in text]


def test_credentials_in_a_url_are_in_no_pickle(secret_url: tuple[Cloud, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cloud, url = secret_url
    view = lazyckpt.open(url, storage_options={"requests": {"deadline": 0.3}}, cache=False)
    with pytest.warns(CredentialsWarning):
        data = pickle.dumps(view["a"])
    assert b"the-secret" not in data
    assert torch.equal(pickle.loads(data)[3], TENSOR[3])
    assert "sig=the-secret-signature" in cloud.server.log()[-1].target
    monkeypatch.setattr(current_process(), "authkey", b"that of another process")
    cloud.server.set_fault("status", status=403)
    with pytest.raises(LazyckptError, match=r"leaves out credentials.*URL"):
        pickle.loads(data)[4]


def test_a_redirect_takes_no_credentials_to_another_server() -> None:
    need_obstore()
    with cloud_of("http") as first, cloud_of("http") as second:
        url = first.put("run/model.safetensors", save({"a": TENSOR}))
        second.put("run/model.safetensors", save({"a": TENSOR}))
        first.server.set_fault("redirect", path="/bucket/*", to=second.server.endpoint)
        options = {"headers": {"Authorization": "Bearer the-secret-token"}}
        assert torch.equal(lazyckpt.open(url, storage_options=options, cache=False)["a"][:], TENSOR)
        assert second.server.counts().methods["GET"]
        second.server.set_fault("token", good="the-secret-token")  # refuses all requests that do not have it
        with pytest.raises(MissingFileError, match="access is denied"):
            lazyckpt.open(url, storage_options=options, cache=False)
        second.server.clear_faults()
        second.server.set_fault("token", good=base64.b64encode(b"user:the-secret-token").decode())
        with pytest.raises(MissingFileError, match="access is denied"):
            lazyckpt.open(url.replace("://", "://user:the-secret-token@"), cache=False)


def test_a_refused_request_without_credentials_says_so(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = s3.put("run/model.safetensors", save({"a": TENSOR}))
    s3.server.set_fault("status", status=403, error="AccessDenied")
    found = {"endpoint": s3.server.endpoint, "region": "us-east-1"}
    says = {
        "No credentials were found: set them": found,
        r"No credentials were sent, as storage_options say \(anon\)": found | {"anon": True},
        r"No credentials were sent, as storage_options say \(skip_signature\)": found | {"skip_signature": True},
        "Check the credentials": found | {"key": "the-key", "secret": "the-secret"},
    }
    for text, options in says.items():
        with pytest.raises(MissingFileError, match=f"access is denied.*{text}") as caught:
            lazyckpt.open(url, storage_options=options, cache=False)
        assert "the-secret" not in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore::lazyckpt.errors.CredentialsWarning")
@pytest.mark.parametrize("at", ["user:the-secret@", ""])
def test_the_steps_of_a_run_are_opened_with_the_credentials_of_its_url(at: str) -> None:
    """Those in the URL: a signature in its query, or a user name and a password."""
    need_obstore()
    with cloud_of("http") as cloud:
        for step in (1, 2):
            cloud.put(f"run/step_{step}/model.safetensors", save({"a": TENSOR + step}))
        cloud.put("run/step_3/model.safetensors", b"damaged")
        names = "".join(f'<a href="step_{step}/">step_{step}/</a>' for step in (1, 2, 3))
        page = f"<title>Index of /run</title>{names}".encode()
        url = cloud.at("run").replace("://", f"://{at}") + ("" if at else "?sig=the-secret")
        good = base64.b64encode(b"user:the-secret").decode() if at else ""
        if at:
            cloud.server.set_fault("token", good=good)
        pages = ObjectStore._ask_page

        def ask_page(store: ObjectStore, path: str) -> bytes:
            full = store.full(path)
            return page if full.strip("/") == "bucket/run" else pages(store, path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ObjectStore, "_ask_page", ask_page)
            run = lazyckpt.open_run(url)
            assert list(run.steps) == [1, 2] and run.problems
            cloud.server.reset()
            assert torch.equal(run.at(2)["a"][:], TENSOR + 2)
            step = run.at(2)
            shown = (
                repr(run),
                run.root,
                run.paths,
                run.problems,
                step.root,
                step,
                step["a"].explain(),
                pickle.dumps(run),
            )
            with pytest.raises(LazyckptError) as caught:
                run.at(3)
        assert not any("the-secret" in str(text) for text in (*shown, caught.value))
        assert at or all("sig=the-secret" in one.target for one in cloud.server.log())
