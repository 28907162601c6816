"""Fixtures: servers of every kind, and `Cloud`, a bucket of one of them as a user names it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from .proxy import serve_proxy
from .s3 import serve_s3
from .server import Handle

ACCOUNT = "lazyckpttests"
SECRET = base64.b64encode(b"a key of the tests of lazyckpt, and of nothing else").decode()
KINDS = [
    "s3",
    "gs",
    pytest.param("az", marks=[pytest.mark.slow, pytest.mark.xdist_group("azurite")]),
    "http",
]


@dataclass
class Cloud:
    """A bucket behind a server that counts and can misbehave.

    ``url`` is the bucket's, and ``options`` are the ``storage_options`` that reach it. ``folder`` is its path at the
    server, for the patterns of faults.
    """

    kind: str
    url: str
    options: dict[str, Any]
    server: Handle
    folder: str
    store: Any = field(repr=False)  # obstore's

    def put(self, name: str, content: bytes) -> str:
        """Make an object; return its URL."""
        import obstore

        obstore.put(self.store, name, content)
        return self.at(name)

    def put_folder(self, folder: Path, prefix: str = "") -> str:
        """Make an object of each file of a folder; return the URL of their folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}".lstrip("/"), path.read_bytes())
        return self.at(prefix)

    def at(self, name: str) -> str:
        """The URL of an object, as users write it."""
        return f"{self.url}/{quote(name) if self.kind == 'http' else name}".rstrip("/")


def need_obstore() -> None:
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("obstore is not installed (pip install 'lazyckpt[cloud]')")


def google_key(endpoint: str) -> str:
    """The key file of a service account that needs no authentication, at this server."""
    account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
    return json.dumps(account | {"private_key_id": ""})


@contextmanager
def cloud_of(kind: str, delay: float = 0, azurite: str | None = None, **more: Any) -> Iterator[Cloud]:
    """A new server with an empty bucket. ``azurite`` is the URL of a running one; ``more`` goes to `serve_s3`."""
    from obstore.store import AzureStore, GCSStore, S3Store

    if kind == "az":
        assert azurite is not None
        name = f"tests{os.urandom(6).hex()}"
        _make_container(azurite, name)
        with serve_proxy(azurite, delay) as server:
            config = {"account_name": ACCOUNT, "account_key": SECRET, "endpoint": f"{server.endpoint}/{ACCOUNT}"}
            store: Any = AzureStore(name, config=config, client_options={"allow_http": True})  # type: ignore[arg-type]
            yield Cloud(kind, f"az://{name}", config, server, f"/{ACCOUNT}/{name}", store)
        return
    with serve_s3(delay=delay, **more) as server:
        config = {"endpoint": server.endpoint, "skip_signature": True, "region": "us-east-1"}
        store = S3Store("bucket", config=config, client_options={"allow_http": True})  # type: ignore[arg-type]
        url, options = "s3://bucket", dict(config)
        if kind == "gs":
            key = google_key(server.endpoint)
            url, options = "gs://bucket", {"service_account_key": key, "client_options": {"allow_http": True}}
            store = GCSStore("bucket", config={"service_account_key": key}, client_options={"allow_http": True})
        elif kind == "http":
            url, options = f"{server.endpoint}/bucket", {}
        yield Cloud(kind, url, options, server, "/bucket", store)


@pytest.fixture(params=KINDS)
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """An empty bucket of each kind of store."""
    need_obstore()
    azurite = request.getfixturevalue("azurite") if request.param == "az" else None
    with cloud_of(request.param, azurite=azurite) as found:
        yield found


@pytest.fixture
def s3() -> Iterator[Cloud]:
    """An empty bucket of our own server of S3's protocol."""
    need_obstore()
    with cloud_of("s3") as found:
        yield found


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of moto's S3, with the bucket "bucket": S3's semantics, as another project understands them."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("moto is not installed (pip install 'moto[s3,server]')")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """The URL of Azurite, Microsoft's emulator of Azure's blobs."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH (npm install azurite)")
    arguments = "--inMemoryPersistence --silent --blobPort 0 --skipApiVersionCheck --disableTelemetry"
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{SECRET}"}
    child = subprocess.Popen([program, *arguments.split()], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if found := re.search(r"listens on (http://[\w.:]+)", line):
                yield found[1]
                return
        pytest.skip(f"azurite-blob does not start: it ended with {child.wait()}")
    finally:
        child.kill()
        child.wait()


def _make_container(endpoint: str, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(SECRET), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{endpoint}/{ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
