"""The servers that the tests of remote checkpoints use: they do what real ones do, and misbehave as told."""

from __future__ import annotations

import http.client
import importlib.util
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .servers.fixtures import Cloud, cloud_of
from .servers.proxy import serve_proxy
from .servers.s3 import serve_s3
from .servers.server import Handle

pytestmark = pytest.mark.slow

NAMES = ("plain", "with space/a b", "hash#", "question?x=1&y", "percent%20", "plus+", "ünï/cöde", "brackets[0]")
DATA = bytes(range(256)) * 40


@pytest.fixture
def server() -> Iterator[Handle]:
    with serve_s3(delay=0) as handle:
        yield handle


@pytest.fixture(params=["ours", "moto"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """boto3's client of our server, and of moto: the same tests hold for both."""
    boto3 = pytest.importorskip("boto3")
    with serve_s3(delay=0) as handle:
        endpoint = handle.endpoint if request.param == "ours" else request.getfixturevalue("moto")
        made = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id="x", aws_secret_access_key="y", region_name="us-east-1"
        )
        for entry in made.list_objects_v2(Bucket="bucket").get("Contents", ()):
            made.delete_object(Bucket="bucket", Key=entry["Key"])
        yield made


def code(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """The status and the code of the error that a call of boto3 raises."""
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as caught:
        call(Bucket="bucket", **arguments)
    response: Any = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


# -- what S3 does, ours and moto's


def test_objects_are_what_was_put(client: Any) -> None:
    for name in NAMES:
        client.put_object(Bucket="bucket", Key=name, Body=DATA + name.encode())
    for name in NAMES:
        found = client.get_object(Bucket="bucket", Key=name)
        assert found["Body"].read() == DATA + name.encode()
        head = client.head_object(Bucket="bucket", Key=name)
        assert head["ContentLength"] == len(DATA) + len(name.encode())
        assert head["ETag"] == found["ETag"]
        assert head["LastModified"] == found["LastModified"]


@pytest.mark.parametrize("text", ["bytes=0-0", "bytes=10-19", "bytes=10000-", "bytes=-7", "bytes=10-999999"])
def test_ranges(client: Any, text: str) -> None:
    client.put_object(Bucket="bucket", Key="x", Body=DATA)
    found = client.get_object(Bucket="bucket", Key="x", Range=text)
    first, last = text.removeprefix("bytes=").split("-")
    start = int(first) if first else len(DATA) - int(last)
    stop = min(int(last) + 1, len(DATA)) if first and last else len(DATA)
    assert found["Body"].read() == DATA[start:stop]
    assert found["ContentRange"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    assert found["ResponseMetadata"]["HTTPStatusCode"] == 206


def test_conditions(client: Any) -> None:
    tag = client.put_object(Bucket="bucket", Key="x", Body=b"one")["ETag"]
    assert client.get_object(Bucket="bucket", Key="x", IfMatch=tag)["Body"].read() == b"one"
    client.put_object(Bucket="bucket", Key="x", Body=b"two")
    assert code(client.get_object, Key="x", IfMatch=tag) == (412, "PreconditionFailed")
    assert code(client.put_object, Key="x", Body=b"", IfNoneMatch="*") == (412, "PreconditionFailed")
    assert client.get_object(Bucket="bucket", Key="x")["Body"].read() == b"two"


def test_errors(client: Any) -> None:
    client.put_object(Bucket="bucket", Key="x", Body=b"one")
    assert code(client.get_object, Key="y") == (404, "NoSuchKey")
    assert code(client.head_object, Key="y") == (404, "404")
    assert code(client.get_object, Key="x", Range="bytes=3-4") == (416, "InvalidRange")
    assert code(client.list_parts, Key="x", UploadId="none") == (404, "NoSuchUpload")
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError, match="NoSuchBucket"):
        client.get_object(Bucket="no-such-bucket", Key="x")


def test_listings_by_pages_and_by_folders(client: Any) -> None:
    for name in [f"many/{n:02}" for n in range(25)] + ["many/in/a", "many/in/b", "other", *NAMES]:
        client.put_object(Bucket="bucket", Key=name, Body=name.encode())
    pages = list(client.get_paginator("list_objects_v2").paginate(Bucket="bucket", PaginationConfig={"PageSize": 7}))
    found = [(entry["Key"], entry["Size"]) for page in pages for entry in page["Contents"]]
    wanted = [f"many/{n:02}" for n in range(25)] + ["many/in/a", "many/in/b", "other", *NAMES]
    assert found == [(name, len(name.encode())) for name in sorted(wanted, key=str.encode)]
    assert len(pages) == -(-len(wanted) // 7)
    folder = client.list_objects_v2(Bucket="bucket", Prefix="many/", Delimiter="/")
    assert [entry["Key"] for entry in folder["Contents"]] == [f"many/{n:02}" for n in range(25)]
    assert [entry["Prefix"] for entry in folder["CommonPrefixes"]] == ["many/in/"]
    top = client.list_objects_v2(Bucket="bucket", Delimiter="/")
    assert [entry["Prefix"] for entry in top["CommonPrefixes"]] == ["many/", "with space/", "ünï/"]
    last = client.list_objects_v2(Bucket="bucket", StartAfter="plus+")
    assert [entry["Key"] for entry in last["Contents"]] == ["question?x=1&y", "with space/a b", "ünï/cöde"]


def test_uploads_in_parts(client: Any) -> None:
    number = client.create_multipart_upload(Bucket="bucket", Key="x")["UploadId"]
    first, second = b"a" * (5 << 20), b"b" * 100

    def part(n: int, body: bytes) -> Any:
        found = client.upload_part(Bucket="bucket", Key="x", UploadId=number, PartNumber=n, Body=body)
        return {"PartNumber": n, "ETag": found["ETag"]}

    parts = [part(1, first), part(2, second)]
    listed = client.list_parts(Bucket="bucket", Key="x", UploadId=number)["Parts"]
    assert [(p["PartNumber"], p["Size"], p["ETag"]) for p in listed] == [
        (1, len(first), parts[0]["ETag"]),
        (2, len(second), parts[1]["ETag"]),
    ]
    assert code(client.head_object, Key="x") == (404, "404")  # nothing is there before the upload is complete
    assert number in [u["UploadId"] for u in client.list_multipart_uploads(Bucket="bucket")["Uploads"]]
    wrong = {"Parts": [parts[0], {"PartNumber": 2, "ETag": '"0"'}]}
    assert code(client.complete_multipart_upload, Key="x", UploadId=number, MultipartUpload=wrong)[1] == "InvalidPart"
    client.complete_multipart_upload(Bucket="bucket", Key="x", UploadId=number, MultipartUpload={"Parts": parts})
    found = client.get_object(Bucket="bucket", Key="x", Range=f"bytes={len(first) - 2}-{len(first) + 1}")
    assert found["Body"].read() == b"aabb"
    assert found["ETag"].endswith('-2"')
    assert not client.list_multipart_uploads(Bucket="bucket").get("Uploads")


def test_small_parts_are_refused_and_aborted_uploads_are_gone(client: Any) -> None:
    number = client.create_multipart_upload(Bucket="bucket", Key="x")["UploadId"]
    parts = []
    for n in (1, 2):
        found = client.upload_part(Bucket="bucket", Key="x", UploadId=number, PartNumber=n, Body=b"small")
        parts.append({"PartNumber": n, "ETag": found["ETag"]})
    told = {"Parts": parts}
    assert code(client.complete_multipart_upload, Key="x", UploadId=number, MultipartUpload=told)[1] == "EntityTooSmall"
    client.abort_multipart_upload(Bucket="bucket", Key="x", UploadId=number)
    assert code(client.list_parts, Key="x", UploadId=number) == (404, "NoSuchUpload")


def test_deleting_and_copying(client: Any) -> None:
    for name in NAMES:
        client.put_object(Bucket="bucket", Key=name, Body=name.encode())
    client.copy_object(Bucket="bucket", Key="copy", CopySource={"Bucket": "bucket", "Key": "ünï/cöde"})
    assert client.get_object(Bucket="bucket", Key="copy")["Body"].read() == "ünï/cöde".encode()
    client.delete_object(Bucket="bucket", Key="plain")
    client.delete_object(Bucket="bucket", Key="plain")  # what is not there is deleted without an error
    answer = client.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": name} for name in NAMES]})
    assert not answer.get("Errors")
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]] == ["copy"]


# -- ours alone


def test_versions() -> None:
    boto3 = pytest.importorskip("boto3")
    with serve_s3(delay=0, versioned=True) as server:
        client = boto3.client(
            "s3", endpoint_url=server.endpoint, aws_access_key_id="x", aws_secret_access_key="y", region_name="x"
        )
        old = client.put_object(Bucket="bucket", Key="x", Body=b"old")["VersionId"]
        new = client.put_object(Bucket="bucket", Key="x", Body=b"new")["VersionId"]
        client.delete_object(Bucket="bucket", Key="x")
        assert code(client.get_object, Key="x") == (404, "NoSuchKey")
        assert client.get_object(Bucket="bucket", Key="x", VersionId=old)["Body"].read() == b"old"
        assert client.get_object(Bucket="bucket", Key="x", VersionId=new)["Body"].read() == b"new"
        assert code(client.get_object, Key="x", VersionId="1") == (404, "NoSuchVersion")
        assert len(client.list_object_versions(Bucket="bucket")["Versions"]) == 2


def test_a_folder_is_a_bucket_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b#?%.bin").write_bytes(DATA)
    (tmp_path / "top").write_bytes(b"top")
    with serve_s3(tmp_path, delay=0) as server:
        import obstore
        from obstore.store import S3Store

        store = S3Store("bucket", endpoint=server.endpoint, skip_signature=True, client_options={"allow_http": True})
        assert bytes(obstore.get_range(store, "in/a b#?%.bin", start=5, length=10)) == DATA[5:15]
        assert obstore.list_with_delimiter(store)["common_prefixes"] == ["in"]
        obstore.put(store, "top", b"new")
        obstore.put(store, "in/more", b"more")
        obstore.delete(store, "in/a b#?%.bin")
        assert bytes(obstore.get(store, "top").bytes()) == b"new"
        assert [meta["path"] for page in obstore.list(store) for meta in page] == ["in/more", "top"]
    assert (tmp_path / "top").read_bytes() == b"top"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a b#?%.bin", "top"]


def test_names_on_every_kind_of_store(cloud: Cloud) -> None:
    import obstore

    for name in NAMES:
        cloud.put(name, name.encode())
    for name in NAMES:
        assert bytes(obstore.get(cloud.store, name).bytes()) == name.encode()
        if cloud.kind == "http":
            with urllib.request.urlopen(cloud.at(name)) as answer:
                assert answer.read() == name.encode()


def test_counts(server: Handle) -> None:
    put(server, "/bucket/x", DATA)
    server.reset()
    server.set_delay(0.05)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: get(server, "/bucket/x", f"bytes={n}-{n + 9}")[1], range(24)))
    assert found == [DATA[n : n + 10] for n in range(24)]
    counts = server.counts()
    assert (counts.requests, counts.methods, counts.sent, counts.received) == (24, {"GET": 24}, 240, 0)
    assert 1 < counts.concurrency <= 8
    assert sorted(entry.range for entry in server.log()) == sorted(f"bytes={n}-{n + 9}" for n in range(24))
    assert {(e.method, e.target, e.status, e.nbytes) for e in server.log()} == {("GET", "/bucket/x", 206, 10)}
    server.reset()
    assert server.counts().requests == 0


def test_a_proxy_passes_on_what_it_counts(server: Handle) -> None:
    with serve_proxy(server.endpoint, delay=0) as proxy:
        put(proxy, "/bucket/x", DATA)
        assert get(proxy, "/bucket/x", "bytes=3-5") == (206, DATA[3:6])
        assert get(proxy, "/bucket/none")[0] == 404
        assert proxy.counts().methods == server.counts().methods == {"PUT": 1, "GET": 2}
        proxy.set_fault("status", status=503, times=1)
        assert get(proxy, "/bucket/x")[0] == 503
        assert get(proxy, "/bucket/x") == (200, DATA)
        assert server.counts().methods == {"PUT": 1, "GET": 3}


def test_servers_end_with_whoever_started_them(server: Handle) -> None:
    with serve_s3(delay=0) as other:
        port = other.port
    with pytest.raises(OSError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/")


# -- faults


def put(server: Handle, path: str, body: bytes) -> None:
    request = urllib.request.Request(server.endpoint + path, body, method="PUT")
    urllib.request.urlopen(request).close()


def get(server: Handle, path: str, range: str | None = None, **headers: str) -> tuple[int, bytes]:
    return ask(server, path, range, **headers)[:2]


def ask(server: Handle, path: str, range: str | None = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {name.replace("_", "-"): value for name, value in headers.items()} | ({"Range": range} if range else {})
    connection.request("GET", path, headers=sent)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


@pytest.fixture
def faulty(server: Handle) -> Handle:
    put(server, "/bucket/x", DATA)
    put(server, "/bucket/y", b"other")
    return server


def test_faults_concern_the_requests_that_they_name(faulty: Handle) -> None:
    faulty.set_fault(
        "status", path="/bucket/x", what="object", skip=1, times=2, status=429, headers={"Retry-After": "7"}
    )
    faulty.set_fault("status", what="list", status=403, error="AccessDenied")
    assert [get(faulty, "/bucket/x")[0] for _ in range(5)] == [200, 429, 429, 200, 200]
    assert get(faulty, "/bucket/y") == (200, b"other")
    status, body, _ = ask(faulty, "/bucket?list-type=2")
    assert status == 403 and b"AccessDenied" in body
    faulty.clear_faults()
    assert get(faulty, "/bucket?list-type=2")[0] == 200


def test_dropped_connections(faulty: Handle) -> None:
    faulty.set_fault("drop", times=1)
    with pytest.raises(ConnectionError):
        get(faulty, "/bucket/x")
    assert get(faulty, "/bucket/x") == (200, DATA)
    faulty.set_fault("cut", after=100)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        get(faulty, "/bucket/x")


def test_wrong_ranges(faulty: Handle) -> None:
    faulty.set_fault("ignore_range", times=1)
    assert get(faulty, "/bucket/x", "bytes=3-5") == (200, DATA)
    faulty.clear_faults()
    faulty.set_fault("other_range", times=1, by=2)
    status, body, headers = ask(faulty, "/bucket/x", "bytes=3-5")
    assert (status, body, headers["Content-Range"]) == (206, DATA[5:8], f"bytes 5-7/{len(DATA)}")
    faulty.clear_faults()
    faulty.set_fault("wrong_content_range", times=1, by=1)
    status, body, headers = ask(faulty, "/bucket/x", "bytes=3-5")
    assert (status, body, headers["Content-Range"]) == (206, DATA[3:6], f"bytes 4-6/{len(DATA)}")
    faulty.clear_faults()
    faulty.set_fault("short", times=1, by=2)
    status, body, headers = ask(faulty, "/bucket/x", "bytes=0-9")
    assert (status, body, headers["Content-Length"]) == (206, DATA[:8], "8")
    assert headers["Content-Range"] == f"bytes 0-9/{len(DATA)}"


def test_tags_and_encodings(faulty: Handle) -> None:
    tag = ask(faulty, "/bucket/x")[2]["ETag"]
    faulty.set_fault("new_etag", times=2)
    assert len({tag, ask(faulty, "/bucket/x")[2]["ETag"], ask(faulty, "/bucket/x")[2]["ETag"]}) == 3
    faulty.clear_faults()
    faulty.set_fault("no_etag", times=1)
    assert "ETag" not in ask(faulty, "/bucket/x")[2]
    faulty.clear_faults()
    faulty.set_fault("gzip", times=1)
    assert ask(faulty, "/bucket/x")[2]["Content-Encoding"] == "gzip"
    faulty.clear_faults()
    faulty.set_fault("html", times=1)
    assert get(faulty, "/bucket/x")[1].startswith(b"<!DOCTYPE html>")
    faulty.clear_faults()
    faulty.set_fault("redirect", times=1, to="http://elsewhere:1")
    assert ask(faulty, "/bucket/x?a")[2]["Location"] == "http://elsewhere:1/bucket/x?a"


def test_an_object_is_replaced_between_two_requests(faulty: Handle) -> None:
    before = ask(faulty, "/bucket/x")
    faulty.set_fault("replace", path="/bucket/x", skip=1, times=1)
    assert get(faulty, "/bucket/x") == (200, DATA)
    status, body, headers = ask(faulty, "/bucket/x")
    assert (status, body) == (200, bytes(255 - b for b in DATA))
    assert headers["ETag"] != before[2]["ETag"]
    assert get(faulty, "/bucket/x", None, If_Match=before[2]["ETag"])[0] == 412


def test_tokens_expire_and_are_renewed(faulty: Handle) -> None:
    faulty.set_fault("token", good="fresh-token")
    status, body, _ = ask(faulty, "/bucket/x", None, X_Amz_Security_Token="old-token")
    assert status == 403 and b"ExpiredToken" in body
    assert get(faulty, "/bucket/x", None, X_Amz_Security_Token="fresh-token") == (200, DATA)


def test_listings_lag_behind(faulty: Handle) -> None:
    faulty.set_fault("hide", what="list", objects="x", times=1)
    listing = get(faulty, "/bucket?list-type=2")[1]
    assert b"<Key>y</Key>" in listing and b"<Key>x</Key>" not in listing
    assert get(faulty, "/bucket/x") == (200, DATA)
    assert b"<Key>x</Key>" in get(faulty, "/bucket?list-type=2")[1]


def test_slow_answers(faulty: Handle) -> None:
    """A slow answer comes after that to a later request."""
    done: list[str] = []
    faulty.set_fault("slow", path="/bucket/x", times=1, seconds=0.5)
    started = threading.Event()

    def slow() -> None:
        started.set()
        get(faulty, "/bucket/x")
        done.append("x")

    thread = threading.Thread(target=slow)
    thread.start()
    started.wait()
    while not faulty.log():
        pass
    get(faulty, "/bucket/y")
    done.append("y")
    thread.join()
    assert done == ["y", "x"]
    faulty.set_fault("trickle", times=1, seconds=0.001, size=4000)
    assert get(faulty, "/bucket/x") == (200, DATA)


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="obstore is not installed")
def test_many_objects_are_listed_by_pages() -> None:
    import obstore

    with cloud_of("s3") as cloud:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: cloud.put(f"many/{n:05}", b"x"), range(2500)))
        cloud.server.reset()
        assert len(obstore.list_with_delimiter(cloud.store, "many")["objects"]) == 2500
        assert cloud.server.counts().requests == 3
