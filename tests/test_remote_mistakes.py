"""What a user may get wrong with URLs and options: each has one message that says what to write instead."""

from __future__ import annotations

import re
import socket
import sys
import traceback
import urllib.request
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save

import lazyckpt
from lazyckpt.core.requests import Policy
from lazyckpt.errors import DestinationError, FormatError, LazyckptError, MissingFileError
from lazyckpt.io.storage.connecting import address, configuration
from lazyckpt.io.storage.credentials import is_without_secrets, without_secrets
from lazyckpt.io.storage.repeating import UnreachableError
from lazyckpt.testing.remote import Served

from .servers.fixtures import Cloud, need_obstore

TENSOR = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def refused(path: str, options: dict[str, Any] | None = None) -> str:
    """Return the message of the error for opening a path."""
    with pytest.raises(LazyckptError) as caught:
        lazyckpt.open(path, storage_options=options)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def config(url: str, **options: Any) -> dict[str, Any]:
    return configuration(address(url), options, Policy())[0]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("s3:/bucket/run", "s3://bucket/run"),
        ("s3:bucket/run", "s3://bucket/run"),
        ("gs//bucket/run", "gs://bucket/run"),
        ("hf:/org/model", "hf://org/model"),
        ("S3:/bucket", "s3://bucket"),
        ("https:/server/run", "https://server/run"),
        ("s3:\\bucket\\run", "s3://bucket/run"),
        ("huggingface.co/org/model", "hf://org/model"),
    ],
)
def test_a_url_with_a_slash_too_few(path: str, meant: str) -> None:
    assert refused(path).endswith(meant)


def test_a_path_object_of_a_url() -> None:
    with pytest.raises(MissingFileError, match=re.escape("s3://bucket/run")):
        lazyckpt.open(Path("s3://bucket/run"))


def test_a_folder_that_is_called_like_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s3").mkdir()
    (tmp_path / "s3" / "model.safetensors").write_bytes(save({"a": TENSOR}))
    monkeypatch.chdir(tmp_path)
    assert torch.equal(lazyckpt.open("s3//model.safetensors")["a"][:], TENSOR)


@pytest.mark.parametrize(
    ("url", "meant"), [("s4://bucket/run", "s3://"), ("htps://server/run", "https://"), ("wasbs://c/run", "abfs://")]
)
def test_a_mistyped_protocol(url: str, meant: str) -> None:
    assert f"Did you mean {meant}?" in refused(url)


@pytest.mark.parametrize(
    ("page", "meant"),
    [
        ("https://huggingface.co/org/model", "hf://org/model"),
        ("https://huggingface.co/org/model/tree/main/checkpoint-5", "hf://org/model@main/checkpoint-5"),
        ("https://huggingface.co/org/model/tree/main/step%2010", "hf://org/model@main/step 10"),
        ("https://hf.co/org/model?library=transformers#readme", "hf://org/model"),
        ("https://huggingface.co/org/model/discussions/5", "hf://org/model"),
        ("https://huggingface.co/org/model/commit/0123456", "hf://org/model@0123456"),
        (
            "https://huggingface.co/datasets/org/states/blob/v1/a.safetensors",
            "hf://datasets/org/states@v1/a.safetensors",
        ),
    ],
)
def test_a_page_of_the_hub(page: str, meant: str) -> None:
    assert refused(page).endswith(f"write {meant}")


def test_a_place_on_the_hub_without_a_repository() -> None:
    assert "hf://owner/name" in refused("hf://org")


def test_options_that_are_no_dictionary() -> None:
    assert "dictionary" in refused("s3://bucket/run", "anon")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "minio", "user:the-password@minio:9000", "ftp://minio"])
def test_an_endpoint_without_a_protocol(kind: str, endpoint: str) -> None:
    need_obstore()
    says = refused(
        f"{kind}://bucket/run", {"endpoint": endpoint, "account_name": "me"} if kind == "az" else {"endpoint": endpoint}
    )
    assert "http://" in says and "the-password" not in says


def test_an_azure_container_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    need_obstore()
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert "account_name" in refused("az://container/run")


def test_names_with_two_slashes_are_refused(s3: Cloud) -> None:
    s3.put("run/model.safetensors", save({"a": TENSOR}))
    s3.server.reset()
    for url in (f"{s3.url}//run", f"{s3.url}/run//model.safetensors"):  # not the object with one slash
        assert "slash" in refused(url, s3.options)
    assert s3.server.counts().requests == 0


def test_an_object_with_an_empty_part_in_its_name_is_named(s3: Cloud) -> None:
    """A server lists it, and obstore lists nothing of the folder then: that does not pass."""
    s3.put("run/model.safetensors", save({"a": TENSOR}))
    request = urllib.request.Request(f"{s3.server.endpoint}/bucket/run//x", b"x", method="PUT")
    urllib.request.urlopen(request).close()
    s3.server.reset()
    assert "run//" in refused(f"{s3.url}/run", s3.options)
    assert s3.server.counts().requests == 1


@pytest.mark.parametrize("name", ["../run", "run/..", "./run", "run/../other"])
def test_names_of_dots_are_refused(s3: Cloud, tmp_path: Path, name: str) -> None:
    """Nothing could list the folder with such an object afterwards."""
    (tmp_path / "a.safetensors").write_bytes(save({"a": TENSOR}))
    assert "'..'" in refused(f"{s3.url}/{name}", s3.options)
    with lazyckpt.open(tmp_path / "a.safetensors") as view, pytest.raises(FormatError, match=r"'\.\.'"):
        view.to_safetensors(f"{s3.url}/{name}/a.safetensors", storage_options=s3.options)
    assert s3.server.counts().requests == 0


@pytest.mark.parametrize(
    "url", ["s3://my bucket/run", "s3://bucket?x/run", "s3://bucket#x/run", "gs://b\u00fccket/run"]
)
def test_names_that_no_bucket_has(url: str) -> None:
    need_obstore()
    assert "not the name of a bucket" in refused(url)


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
@pytest.mark.parametrize("secret", ["the-password", "the-pass/word", "the-pass@word"])
def test_credentials_in_the_url_of_a_bucket_are_not_shown(tmp_path: Path, kind: str, secret: str) -> None:
    need_obstore()
    url = f"{kind}://user:{secret}@bucket/run"
    (tmp_path / "a.safetensors").write_bytes(save({"a": TENSOR}))
    with lazyckpt.open(tmp_path / "a.safetensors") as view, pytest.raises(FormatError) as caught:
        view.to_safetensors(f"{url}/a.safetensors")
    for says in (refused(url), str(caught.value)):
        assert "storage_options" in says and "user" not in says.replace("without a user", "") and "the-pass" not in says


@pytest.mark.parametrize("name", ["key", "secret", "token", "session_token"])
def test_a_credential_with_a_line_break(name: str) -> None:
    """As a file is read: obstore panics at it."""
    need_obstore()
    says = refused("s3://bucket/run", {"key": "user", "secret": "the-secret", name: "the-secret\n"})
    assert "line break" in says and "the-secret" not in says


def test_what_obstore_panics_at_is_an_error(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token\n")
    options = {name: value for name, value in s3.options.items() if name != "skip_signature"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "user")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
        says = refused("s3://bucket/run", options)
    assert "Check the endpoint and the credentials" in says and "a-token" not in says


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        (5, "dictionary"),
        ({"concurrency": 2.5}, "whole number"),
        ({"largest": float("inf")}, "whole number"),
        ({"deadline": float("inf")}, "at most"),
        ({"timeout": 1e30}, "at most"),
    ],
)
def test_options_of_requests(requests: Any, says: str) -> None:
    assert says in refused("s3://bucket/run", {"requests": requests})
    assert Policy.of({"gap": 1e6}).gap == 1_000_000


def test_the_page_of_a_web_server_as_endpoint(s3: Cloud) -> None:
    s3.server.set_fault("status", status=404, error="")
    assert "endpoint" in refused("s3://bucket/run", s3.options)


def test_the_right_region_is_named(s3: Cloud) -> None:
    text = "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'"
    s3.server.set_fault("status", status=400, error="AuthorizationHeaderMalformed", message=text)
    assert "{'region': 'eu-west-1'}" in refused("s3://bucket/run", s3.options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_a_server_that_refuses_connections_is_named() -> None:
    need_obstore()
    server = f"127.0.0.1:{free_port()}"
    options = {"endpoint": f"http://{server}", "skip_signature": True, "requests": {"deadline": 0.5}}
    assert f"connection to {server} was refused" in refused("s3://bucket/run", options)


def test_a_server_that_has_never_answered_is_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.io.storage.repeating._UNREACHED", 0.0)
    store = Served({})
    asked = []

    def ask() -> None:
        asked.append(1)
        raise UnreachableError("there is nobody")

    with pytest.raises(OSError, match="there is nobody"):
        store._repeated(ask)
    assert len(asked) == 1
    assert store._repeated(lambda: 5) == 5
    store.policy = Policy(deadline=1.0)
    with pytest.raises(OSError, match="there is nobody"):
        store._repeated(ask)
    assert len(asked) > 2, "a server that has answered may be down for a moment"


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    options = {"endpoint": f"http://127.0.0.1:{free_port()}", "requests": {"deadline": 0.2}}
    assert refused("hf://org/model", options).startswith("hf://org/model: ")


def test_a_bucket_to_write_to_that_does_not_exist(s3: Cloud, tmp_path: Path) -> None:
    """Nothing was sent, so nothing is kept there."""
    (tmp_path / "a.safetensors").write_bytes(save({"a": TENSOR}))
    options = {**s3.options, "key": "user", "secret": "the-secret"}
    with lazyckpt.open(tmp_path / "a.safetensors") as view, pytest.raises(DestinationError) as caught:
        view.to_safetensors("s3://buckt/run/a.safetensors", storage_options=options)
    assert str(caught.value) == (
        "s3://buckt/run/a.safetensors: there is no such bucket. Is its name right, and the endpoint?"
    )


# -- the names of other libraries


def test_names_of_s3() -> None:
    for options in (
        {"key": "user", "secret": "hidden", "endpoint_url": "http://minio"},
        {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_ENDPOINT_URL": "http://minio"},
        {
            "aws_access_key_id": "user",
            "aws_secret_access_key": "hidden",
            "client_kwargs": {"endpoint_url": "http://minio"},
        },
    ):
        found = config("s3://bucket", **options)
        assert found == {"access_key_id": "user", "secret_access_key": "hidden", "endpoint": "http://minio"}


def test_tokens_of_gcsfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert config("gs://bucket", token="anon") == {"skip_signature": True}
    assert config("gs://bucket", token="google_default", project="mine") == {}
    assert config("gs://bucket", token="/keys/mine.json") == {"service_account": "/keys/mine.json"}
    assert config("gs://bucket", token={"client_email": "me"}) == {"service_account_key": '{"client_email": "me"}'}
    with pytest.raises(FormatError, match="token of type object"):
        config("gs://bucket", token=object())


def test_an_emulator_of_google_needs_no_credentials(monkeypatch: pytest.MonkeyPatch, s3: Cloud) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", s3.server.endpoint)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    s3.put("run/model.safetensors", save({"a": TENSOR}))
    assert torch.equal(lazyckpt.open("gs://bucket/run", cache=False)["a"][:], TENSOR)


def test_names_of_adlfs() -> None:
    text = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=bm9uZQ==;EndpointSuffix=core.windows.net"
    assert config("az://box", connection_string=text) == {"account_name": "me", "account_key": "bm9uZQ=="}
    local = "AccountName=me;AccountKey=bm9uZQ==;BlobEndpoint=http://127.0.0.1:10000/me"
    assert config("az://box", connection_string=local)["endpoint"] == "http://127.0.0.1:10000/me"
    assert config("az://box", credential="sv=1&sig=abc", account_name="me")["sas_key"] == "sv=1&sig=abc"
    assert config("az://box", credential="bm9uZQ==")["account_key"] == "bm9uZQ=="


def test_the_endpoint_of_a_profile(s3: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = user\naws_secret_access_key = hidden\n")
    (tmp_path / "config").write_text(
        f"[profile team]\nregion = eu-central-1\nendpoint_url = {s3.server.endpoint}\n"
        "[profile bad]\nendpoint_url = minio\n"
    )
    s3.put("run/model.safetensors", save({"a": TENSOR}))
    view = lazyckpt.open("s3://bucket/run", storage_options={"profile": "team"}, cache=False)
    assert torch.equal(view["a"][:], TENSOR)
    assert "http://minio" in refused("s3://bucket/run", {"profile": "bad"})
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "AWS_PROFILE" in refused("s3://bucket/run")


def raised(depth: list[str], hidden: bool = False) -> BaseException:
    """Return an exception with these messages, the first one that of the innermost cause."""
    error: BaseException | None = None
    for text in depth:
        new = RuntimeError(text)
        new.__cause__, new.__context__ = (None if hidden else error), error
        new.__suppress_context__ = hidden
        error = new
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://me:pass@host/a?sig=hidden failed", "GET https://host/a failed"),
        ("HTTPSConnectionPool: Max retries exceeded with url: /a/b?op=OPEN&delegation=hidden (Caused by X)",
         "HTTPSConnectionPool: Max retries exceeded with url: /a/b (Caused by X)"),
        ("is there a file s3://bucket/a b? or c/d? yes", "is there a file s3://bucket/a b? or c/d? yes"),
        ("the value is hidden-value", "the value is ***"),
    ],
)  # fmt: skip
def test_messages_without_credentials(text: str, shown: str) -> None:
    assert without_secrets(text, {"secret": "hidden-value"}) == shown


def test_the_causes_of_an_error_are_looked_at_too() -> None:
    assert is_without_secrets(raised(["the connection broke", "cannot read"]), {})
    assert not is_without_secrets(raised(["GET https://host/a?sig=hidden", "cannot read"]), {})
    assert is_without_secrets(raised(["GET https://host/a?sig=hidden", "cannot read"], hidden=True), {})


def test_a_file_system_whose_cause_has_a_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a traceback shows is looked at, not only the message of the error itself."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe("/mistakes/model.safetensors", save({"a": TENSOR}))
    view = lazyckpt.open("memory://mistakes", cache=False)

    def refuse(*args: Any, **kwargs: Any) -> bytes:
        raise RuntimeError("cannot read") from RuntimeError("GET https://host/a?sig=hidden")

    monkeypatch.setattr(type(files), "cat_file", refuse)
    with pytest.raises(LazyckptError, match="cannot read") as caught:
        view["a"][:]
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


# -- protocols of fsspec


@pytest.mark.parametrize(
    "scheme, package, module",
    [
        ("ssh", "paramiko", "fsspec.implementations.sftp"),
        ("smb", "smbprotocol", "fsspec.implementations.smb"),
        ("github", "requests", "fsspec.implementations.github"),
        ("hdfs", "pyarrow", "fsspec.implementations.arrow"),
        ("webdav", "webdav4", "webdav4.fsspec"),
        ("oss", "ossfs", "ossfs"),
        ("lakefs", "lakefs-spec", "lakefs_spec"),
    ],
)
def test_a_package_that_is_missing_is_named(
    scheme: str, package: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    url = f"{scheme}://server/run/model.safetensors"
    text = f"{scheme}:// needs {package}: pip install {package}"
    assert refused(url, {}) == f"{url}: {text}"
    (tmp_path / "a.safetensors").write_bytes(save({"a": TENSOR}))
    with lazyckpt.open(tmp_path / "a.safetensors") as view, pytest.raises(DestinationError, match=re.escape(text)):
        view.to_safetensors(url)


def test_what_a_url_does_not_say_is_named(tmp_path: Path) -> None:
    pytest.importorskip("requests")
    wanted = "github:// needs org and repo: write github://ORG:REPO@REF/folder, or pass storage_options={'org': ..., "
    assert wanted in refused("github://org/repo", {})
    (tmp_path / "a.safetensors").write_bytes(save({"a": TENSOR}))
    with lazyckpt.open(tmp_path / "a.safetensors") as view, pytest.raises(DestinationError, match="ORG:REPO"):
        view.to_safetensors("github://org/repo/a.safetensors")


def test_hadoop_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise OSError("Prior attempt to load libhdfs failed")

    monkeypatch.setattr(fsspec.core, "url_to_fs", load)
    assert "needs Hadoop and Java: set HADOOP_HOME" in refused("hdfs://server/run", {})


def test_urls_of_local_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(save({"a": TENSOR}))
    for url in (f"file://{path}", f"file://localhost{path}"):
        view = lazyckpt.open(url)
        assert torch.equal(view["a"][:], TENSOR) and view.root == str(tmp_path)
    view.to_safetensors(f"file://localhost{tmp_path}/b.safetensors")
    assert torch.equal(lazyckpt.open(tmp_path / "b.safetensors")["a"][:], TENSOR)
    assert "files of the machine 'elsewhere'" in refused(f"file://elsewhere{path}", {})
    assert f"file://{path}" in refused(f"file:{path}", {})
    assert refused(f"file://localhost{path}x", {}) == f"{path}x: no such file or folder"
