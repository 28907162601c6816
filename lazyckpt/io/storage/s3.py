"""Objects of S3 in parts, through boto3: obstore streams an object, but does not say which parts of it are there.

The body of each request is signed with its SHA-256, which the server compares, unless ``storage_options`` say
``{"config_kwargs": {"s3": {"payload_signing_enabled": False}}}``. The newer checksums of boto3 are left out, because
many servers other than Amazon's reject them.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from ...core.requests import Policy
from ...errors import FormatError, LazyckptError
from ..system import after_fork
from .connecting import Address, address, configuration
from .credentials import without_secrets
from .repeating import Transient, UnreachableError, connect_timeout, repeated
from .traffic import PASSING, Traffic, retry_after
from .uploads import HELD, Bytes, PartUploads, Sent, UploadGoneError, collected

_STAMP = "lazyckpt-job"  # the name of an object's metadata
_TOGETHER = 1000  # objects that one request removes
_CONNECTIONS = 64
_BUSY = frozenset({"SlowDown", "RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException"})
_NEXT = {  # what a listing that goes on has for its next page
    "list_objects_v2": "NextContinuationToken", "list_parts": "NextPartNumberMarker",
    "list_multipart_uploads": "NextKeyMarker",
}  # fmt: skip
T = TypeVar("T")
_lock = threading.Lock()
# process and connection -> client, and what it has asked; a child does not use its parent's
_clients: dict[tuple[int, str], tuple[Any, Traffic]] = {}


def _forget() -> None:
    """Replace the lock after a fork, because a thread of the parent may hold it."""
    global _lock
    _lock = threading.Lock()


after_fork(_forget)


class S3Uploads(PartUploads):
    """A prefix of a bucket of S3, or of a server that speaks its language."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(url, options)
        self._address = address(url)
        self._bucket = self._address.bucket
        self._policy = Policy.of(self.options.get("requests"))

    def _connection(self) -> tuple[Any, Traffic]:
        key = os.getpid(), repr((self._bucket, sorted(self.options.items())))
        with _lock:
            found = _clients.get(key)
            if found is None:
                for old in [known for known in _clients if known[0] != key[0]]:
                    del _clients[old]
                found = _clients[key] = _connected(self._address, self.options, self._policy), Traffic()
        return found

    def _full(self, key: str) -> str:
        return f"{self._address.key}/{key}" if self._address.key else key

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._full(key)}

    # -- objects

    def list(self, below: str = "") -> dict[str, int]:
        base = self._full("")

        def ask(client: Any) -> dict[str, int]:
            pages = _pages(client, "list_objects_v2", Bucket=self._bucket, Prefix=base + below)
            return {o["Key"].removeprefix(base): o["Size"] for page in pages for o in page.get("Contents", ())}

        return self._asked(below, ask)

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        wanted = {} if length is None else {"Range": f"bytes={offset}-{offset + length - 1}"}
        return self._asked(key, lambda client: bytes(client.get_object(**self._where(key), **wanted)["Body"].read()))

    def put(self, key: str, content: Iterable[Bytes]) -> int:
        first, rest = collected(content)
        if rest is None:
            self._asked(key, lambda client: client.put_object(**self._where(key), Body=first))
            return len(first)
        stamp = uuid4().hex
        upload, etags, size = self.begin(key, stamp), dict[int, str](), 0
        try:
            while first:
                etags[len(etags) + 1] = self.send(key, upload, len(etags) + 1, first)
                size += len(first)
                first = bytearray()
                for piece in rest:
                    first += piece
                    if len(first) >= HELD:
                        break
            self.complete(key, upload, etags, stamp)
        except BaseException:
            self.abort(key, upload)
            raise
        return size

    def remove(self, keys: Sequence[str]) -> None:
        for n in range(0, len(keys), _TOGETHER):
            some = keys[n : n + _TOGETHER]
            wanted = {"Objects": [{"Key": self._full(key)} for key in some], "Quiet": True}
            about = {"Bucket": self._bucket, "Delete": wanted}
            answer = self._asked(some[0], partial(_deleted, about))
            for error in answer.get("Errors", ()):
                key = str(error.get("Key", "")).removeprefix(self._full(""))
                raise PermissionError(f"{self.at(key)}: cannot be removed ({error.get('Code')})")

    # -- parts

    def begin(self, key: str, stamp: str) -> str:
        about = {"Metadata": {_STAMP: stamp}} if stamp else {}
        times = 0

        def ask(client: Any) -> str:
            nonlocal times
            times += 1
            return str(client.create_multipart_upload(**self._where(key), **about)["UploadId"])

        upload = self._asked(key, ask)
        if times > 1:  # an answer that got lost may have begun another one
            for other, old in self.begun(key):
                if other == key and old != upload:
                    self.abort(key, old)
        return upload

    def send(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        about = {**self._where(key), "UploadId": upload, "PartNumber": number}
        return self._asked(key, lambda client: str(client.upload_part(**about, Body=data)["ETag"]))

    def sent(self, key: str, upload: str) -> dict[int, Sent]:
        def ask(client: Any) -> dict[int, Sent]:
            pages = _pages(client, "list_parts", **self._where(key), UploadId=upload)
            return {p["PartNumber"]: Sent(p["Size"], p["ETag"]) for page in pages for p in page.get("Parts", ())}

        return self._asked(key, ask)

    def complete(self, key: str, upload: str, etags: Mapping[int, str], stamp: str) -> None:
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        about = {**self._where(key), "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._asked(key, lambda client: client.complete_multipart_upload(**about))
        except UploadGoneError:
            if self.stamp(key) != stamp:
                raise

    def abort(self, key: str, upload: str) -> None:
        with suppress(UploadGoneError):
            self._asked(key, lambda client: client.abort_multipart_upload(**self._where(key), UploadId=upload))

    def begun(self, below: str = "") -> Iterator[tuple[str, str]]:
        base = self._full("")

        def ask(client: Any) -> list[tuple[str, str]]:
            return [
                (str(upload["Key"]).removeprefix(base), str(upload["UploadId"]))
                for page in _pages(client, "list_multipart_uploads", Bucket=self._bucket, Prefix=base + below)
                for upload in page.get("Uploads", ())
            ]

        yield from self._asked(below, ask)

    def stamp(self, key: str) -> str | None:
        try:
            about = self._asked(key, lambda client: client.head_object(**self._where(key)).get("Metadata", {}))
        except FileNotFoundError:
            return None
        found: str | None = about.get(_STAMP)
        return found

    def _asked(self, key: str, ask: Callable[[Any], T]) -> T:
        """Make a request with the client, again if it fails for a passing reason. Raises FileNotFoundError,
        UploadGoneError, PermissionError or OSError."""
        client, io = self._connection()

        def once() -> T:
            try:
                return ask(client)
            except (LazyckptError, Transient):
                raise
            except Exception as e:  # some of botocore's are OSErrors, too
                raise _error(e, self.at(key), self.options) from None

        return repeated(once, self._policy, io)


def _pages(client: Any, listing: str, **about: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of a listing. Raises OSError if one says that there are more, but not which."""
    for page in client.get_paginator(listing).paginate(**about):
        if page.get("IsTruncated") and not page.get(_NEXT[listing]):
            raise OSError(
                f"s3://{about['Bucket']}: the server's listing is cut short, and does not say how it goes on: the "
                "server does not speak version 2 of S3's listings"
            )
        yield page


def _deleted(about: Mapping[str, Any], client: Any) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = client.delete_objects(**about)
    return answer


def _error(e: Exception, url: str, options: Mapping[str, Any]) -> Exception:
    answer: Any = getattr(e, "response", None)
    about = answer.get("Error", {}) if isinstance(answer, Mapping) else {}
    text = str(e).replace(" (reached max retries: 0)", "")
    code, line = str(about.get("Code", "")), " ".join(without_secrets(text, options).split()).rstrip(".")[:300]
    if code == "NoSuchUpload":
        return UploadGoneError(f"{url}: the upload does not exist any more")
    if code == "NoSuchBucket":
        return OSError(f"{url}: there is no such bucket. Is its name right, and the endpoint?")
    if code in ("NoSuchKey", "404", "NotFound"):
        return FileNotFoundError(2, "no such object", url)
    if code in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
        return PermissionError(
            f"{url}: access is denied ({code}). Check the credentials (environment, profile, storage_options)"
        )
    if type(e).__name__ == "NoCredentialsError":
        return PermissionError(f"{url}: there are no credentials: set them in the environment, or in storage_options")
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return OSError(f"{url}: the bucket is in another region: pass storage_options={{'region': ...}}")
    error = _kind(e, code, answer)(f"{url}: {line or type(e).__name__}")
    if isinstance(error, Transient) and isinstance(answer, Mapping):
        error.after = retry_after(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
    return error


def _kind(e: Exception, code: str, answer: Any) -> type[OSError]:
    """Return whether an error passes: that of an answer by its status, another by botocore's class for it."""
    if isinstance(answer, Mapping):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return Transient if status in PASSING or code in _BUSY else OSError
    known: Any = importlib.import_module("botocore.exceptions")
    if isinstance(e, known.EndpointConnectionError):
        return UnreachableError
    if isinstance(e, known.SSLError | known.ProxyConnectionError):
        return OSError
    below: Any = importlib.import_module("urllib3.exceptions")  # botocore passes on what ends the body of an answer
    passing = known.ConnectionError | known.HTTPClientError | known.IncompleteReadError | below.HTTPError
    return Transient if isinstance(e, passing | ConnectionError | TimeoutError) else OSError


def _connected(where: Address, options: Mapping[str, Any], policy: Policy) -> Any:
    """Return boto3's client for ``storage_options``, which makes each request once. Raises FormatError for a missing
    package."""
    try:
        boto3: Any = importlib.import_module("boto3.session")
        botocore: Any = importlib.import_module("botocore.config")
        unsigned: Any = importlib.import_module("botocore").UNSIGNED
    except ImportError:
        raise FormatError(f"{where.shown}: writing there needs boto3: pip install 'lazyckpt[cloud]'") from None
    found, client = configuration(where, options, policy)
    endpoint = found.get("endpoint") or os.environ.get("AWS_ENDPOINT")
    theirs = dict(options.get("config_kwargs") or {})
    style = {} if not endpoint or found.get("virtual_hosted_style_request") else {"addressing_style": "path"}
    config = {
        "max_pool_connections": _CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": connect_timeout(policy),
        "read_timeout": policy.timeout,
        "user_agent": "lazyckpt",  # boto3 composes its own again for each request, for a tenth of the time
        **theirs,
        "s3": {**style, **theirs.get("s3", {})},
    }
    if _true(found.get("skip_signature")):
        config["signature_version"] = unsigned
    try:
        session = boto3.Session(profile_name=options.get("profile"))
        return session.client(
            "s3",
            region_name=found.get("region") or session.region_name or "us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id=found.get("access_key_id"),
            aws_secret_access_key=found.get("secret_access_key"),
            aws_session_token=found.get("session_token") or found.get("token"),
            verify=False if _true(client.get("allow_invalid_certificates")) else None,
            config=botocore.Config(**config),
        )
    except Exception as e:  # a profile or an endpoint that is none; botocore has no common class for that
        raise FormatError(f"{where.shown}: {without_secrets(str(e), options)}: see storage_options") from None


def _true(value: Any) -> bool:
    return value is True or str(value).lower() in ("1", "true", "yes")
