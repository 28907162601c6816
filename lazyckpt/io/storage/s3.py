"""Objects of S3 in parts, through boto3: obstore streams an object, but does not say which parts of it are there.

The body of each request is signed with its SHA-256, which the server compares, unless ``storage_options`` say
``{"config_kwargs": {"s3": {"payload_signing_enabled": False}}}``. The newer checksums of boto3 are left out, because
many servers other than Amazon's reject them.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from ...core.requests import Policy
from ...errors import FormatError, LazyckptError
from ..system import after_fork
from .connecting import Address, address, configuration
from .credentials import without_secrets
from .traffic import PASSING, retry_after
from .uploads import HELD, Bytes, PartUploads, Sent, UploadGoneError, collected

_STAMP = "lazyckpt-job"  # the name of an object's metadata
_TOGETHER = 1000  # objects that one request removes
_CONNECTIONS = 64
_ATTEMPTS = 8
_lock = threading.Lock()
_clients: dict[tuple[int, str], Any] = {}  # process and connection -> client; a child does not use its parent's


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

    @property
    def _client(self) -> Any:
        key = os.getpid(), repr((self._bucket, sorted(self.options.items())))
        with _lock:
            found = _clients.get(key)
            if found is None:
                for old in [known for known in _clients if known[0] != key[0]]:
                    del _clients[old]
                found = _clients[key] = _connected(self._address, self.options)
        return found

    def _full(self, key: str) -> str:
        return f"{self._address.key}/{key}" if self._address.key else key

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._full(key)}

    # -- objects

    def list(self, below: str = "") -> dict[str, int]:
        base = self._full("")
        with self._asking(below):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=base + below)
            return {o["Key"].removeprefix(base): o["Size"] for page in pages for o in page.get("Contents", ())}

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        wanted = {} if length is None else {"Range": f"bytes={offset}-{offset + length - 1}"}
        with self._asking(key):
            data: bytes = self._client.get_object(**self._where(key), **wanted)["Body"].read()
        return data

    def put(self, key: str, content: Iterable[Bytes]) -> int:
        first, rest = collected(content)
        if rest is None:
            with self._asking(key):
                self._client.put_object(**self._where(key), Body=first)
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
            with self._asking(some[0]):
                wanted = {"Objects": [{"Key": self._full(key)} for key in some], "Quiet": True}
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            for error in answer.get("Errors", ()):
                key = str(error.get("Key", "")).removeprefix(self._full(""))
                raise PermissionError(f"{self.at(key)}: cannot be removed ({error.get('Code')})")

    # -- parts

    def begin(self, key: str, stamp: str) -> str:
        about = {"Metadata": {_STAMP: stamp}} if stamp else {}
        with self._asking(key):
            answer = self._client.create_multipart_upload(**self._where(key), **about)
        upload = str(answer["UploadId"])
        if answer["ResponseMetadata"].get("RetryAttempts"):  # an answer that got lost may have begun another one
            for other, old in self.begun(key):
                if other == key and old != upload:
                    self.abort(key, old)
        return upload

    def send(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        with self._asking(key):
            answer = self._client.upload_part(**self._where(key), UploadId=upload, PartNumber=number, Body=data)
        return str(answer["ETag"])

    def sent(self, key: str, upload: str) -> dict[int, Sent]:
        with self._asking(key):
            pages = self._client.get_paginator("list_parts").paginate(**self._where(key), UploadId=upload)
            return {p["PartNumber"]: Sent(p["Size"], p["ETag"]) for page in pages for p in page.get("Parts", ())}

    def complete(self, key: str, upload: str, etags: Mapping[int, str], stamp: str) -> None:
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        try:
            with self._asking(key):
                self._client.complete_multipart_upload(
                    **self._where(key), UploadId=upload, MultipartUpload={"Parts": parts}
                )
        except UploadGoneError:
            if self.stamp(key) != stamp:
                raise

    def abort(self, key: str, upload: str) -> None:
        try:
            with self._asking(key):
                self._client.abort_multipart_upload(**self._where(key), UploadId=upload)
        except UploadGoneError:
            pass

    def begun(self, below: str = "") -> Iterator[tuple[str, str]]:
        base = self._full("")
        with self._asking(below):
            pages = self._client.get_paginator("list_multipart_uploads")
            found = [
                (str(upload["Key"]).removeprefix(base), str(upload["UploadId"]))
                for page in pages.paginate(Bucket=self._bucket, Prefix=base + below)
                for upload in page.get("Uploads", ())
            ]
        yield from found

    def stamp(self, key: str) -> str | None:
        try:
            with self._asking(key):
                about: Mapping[str, str] = self._client.head_object(**self._where(key)).get("Metadata", {})
        except FileNotFoundError:
            return None
        return about.get(_STAMP)

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Convert boto3's errors to FileNotFoundError, UploadGoneError, PermissionError or OSError."""
        try:
            yield
        except (LazyckptError, OSError):
            raise
        except Exception as e:
            raise _error(e, self.at(key), self.options) from None


def _error(e: Exception, url: str, options: Mapping[str, Any]) -> Exception:
    answer: Any = getattr(e, "response", None)
    about = answer.get("Error", {}) if isinstance(answer, Mapping) else {}
    code, line = str(about.get("Code", "")), " ".join(without_secrets(str(e), options).split()).rstrip(".")[:300]
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
    return OSError(f"{url}: {line or type(e).__name__}")


def _connected(where: Address, options: Mapping[str, Any]) -> Any:
    """Return boto3's client for ``storage_options``. Raises FormatError for a missing package."""
    try:
        boto3: Any = importlib.import_module("boto3.session")
        botocore: Any = importlib.import_module("botocore.config")
        unsigned: Any = importlib.import_module("botocore").UNSIGNED
    except ImportError:
        raise FormatError(f"{where.shown}: writing there needs boto3: pip install 'lazyckpt[cloud]'") from None
    policy = Policy.of(options.get("requests"))
    found, client = configuration(where, options, policy)
    endpoint = found.get("endpoint") or os.environ.get("AWS_ENDPOINT")
    theirs = dict(options.get("config_kwargs") or {})
    style = {} if not endpoint or found.get("virtual_hosted_style_request") else {"addressing_style": "path"}
    config = {
        "max_pool_connections": _CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": _ATTEMPTS},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "connect_timeout": min(10.0, policy.timeout),
        "read_timeout": policy.timeout,
        "user_agent": "lazyckpt",  # boto3 composes its own again for each request, for a tenth of the time
        **theirs,
        "s3": {**style, **theirs.get("s3", {})},
    }
    if _true(found.get("skip_signature")):
        config["signature_version"] = unsigned
    try:
        session = boto3.Session(profile_name=options.get("profile"))
        made = session.client(
            "s3",
            region_name=found.get("region") or session.region_name or "us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id=found.get("access_key_id"),
            aws_secret_access_key=found.get("secret_access_key"),
            aws_session_token=found.get("session_token") or found.get("token"),
            verify=False if _true(client.get("allow_invalid_certificates")) else None,
            config=botocore.Config(**config),
        )
        made.meta.events.register_first("needs-retry.s3", partial(_wait, policy.deadline))
        return made
    except Exception as e:  # a profile or an endpoint that is none; botocore has no common class for that
        raise FormatError(f"{where.shown}: {without_secrets(str(e), options)}: see storage_options") from None


def _wait(deadline: float, response: Any = None, attempts: int = 0, **_: Any) -> None:
    """Wait as long as a busy server asks for (Retry-After), which boto3 does not. It repeats the request afterwards."""
    status, headers = (response[0].status_code, response[0].headers) if response is not None else (0, {})
    after = retry_after(headers) if status in PASSING and attempts < _ATTEMPTS else 0
    if 0 < after <= deadline:  # else its own pauses have to do
        time.sleep(after)


def _true(value: Any) -> bool:
    return value is True or str(value).lower() in ("1", "true", "yes")
