"""Connections to object stores: from a URL and ``storage_options`` to a store of obstore, and its errors to ours.

``storage_options`` are obstore's configuration keys (``access_key_id``, ``endpoint``, ``region``, ...), the names that
s3fs, gcsfs, adlfs and fsspec's http use for the same things, ``client_options`` (obstore's `ClientConfig`), and
``requests`` (`core.requests.Policy`).

Credentials are those that obstore finds (environment, instance, service account). For S3, boto3, if it is installed,
finds them: also in profiles and single sign-on, and it renews them. If it finds none, requests are not signed, as
public buckets need it. obstore makes each request once; `Requesting` repeats it.
"""

from __future__ import annotations

import base64
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ...core.requests import Policy
from ...errors import FormatError, LazyckptError
from .credentials import OWN, without_secrets
from .repeating import Transient, UnreachableError, connect_timeout
from .spellings import configured_endpoint, google_key, of_connection_string, with_protocol, without_account
from .traffic import PASSING

PROTOCOLS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "azure": "az",
    "http": "http", "https": "http",
}  # fmt: skip
_INSTALL = "pip install 'lazyckpt[cloud]'"
_OTHER_NAMES = {
    "s3": {
        "key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "username": "access_key_id",
        "password": "secret_access_key", "endpoint_url": "endpoint", "anon": "skip_signature",
        "region_name": "region", "requester_pays": "request_payer",
    },
    "gs": {"anon": "skip_signature", "endpoint_url": "base_url", "endpoint": "base_url"},
    "az": {"anon": "skip_signature", "sas_token": "sas_key"},
    "http": {},
}  # fmt: skip
_IGNORED = frozenset(  # options of fsspec that change nothing here, and those that are read elsewhere
    ("use_listings_cache", "listings_expiry_time", "skip_instance_cache", "asynchronous", "loop", "use_ssl",
     "default_block_size", "default_cache_type", "default_fill_cache", "version_aware", "block_size", "cache_type",
     "project", "profile", *OWN)
)  # fmt: skip
_ENDPOINTS = {  # variables of the environment with the address of another server, the first one counts
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_STATUS = re.compile(r"(?:status code:?|HTTP status \w+ error \(|status:) ?(\d{3})")
_PREFIX = re.compile(
    r"^(?:Generic \w+ error: )?(?:.*?Error performing \w+ \S+ in \S+(?:, after .*?)? - )?(?:.*?\bstatus code: (?=\d))?"
)
_BUCKET = {"s3": r"[\w.-]+", "gs": r"[\w.-]+", "az": r"[\w$-]+(@[\w.-]+)?"}  # other characters would change the request
_ANONYMOUS = ("anon", "skip_signature", "aws_skip_signature")  # options that say to send no credentials
_CAUSES = {
    "dns error": "the name of the server {server} is unknown here",
    "certificate": "the certificate of {server} is not trusted",
    "ConnectionRefused": "the connection to {server} was refused",
    "TimedOut": "no answer came in time",
}


class Address(NamedTuple):
    """What a URL names: the store's kind, the bucket (container, or server), and the key in it.

    ``shown`` is the URL of the bucket without credentials; ``query`` and ``user`` are the parts of a web address that
    may be credentials."""

    kind: str
    bucket: str
    key: str
    shown: str
    query: str = ""
    user: str = ""

    def at(self, key: str) -> str:
        """Return the URL of another key."""
        if self.kind != "http":
            return f"{self.shown}/{key}".rstrip("/")
        scheme, _, server = self.shown.partition("://")
        user = f"{self.user}@" if self.user else ""
        query = f"?{self.query}" if self.query else ""
        return f"{scheme}://{user}{server}/{quote(key)}{query}"


def is_object_url(url: str) -> bool:
    """Return whether obstore reads a URL."""
    return url.partition("://")[0].lower() in PROTOCOLS


def address(url: str) -> Address:
    """Parse a URL. Raises FormatError if it names no bucket, or has a name with an empty part, "." or ".."."""
    scheme, _, rest = url.partition("://")
    kind = PROTOCOLS[scheme.lower()]
    if kind == "http":
        parts = urlsplit(url)
        user, _, server = parts.netloc.rpartition("@")
        if not server:
            raise FormatError(f"{without_secrets(url, {})}: names no server: write {scheme}://server/folder")
        key = unquote(parts.path).strip("/")
        return Address(kind, f"{scheme}://{server}", key, f"{scheme}://{server}", parts.query, user)
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise FormatError(f"{url}: names no bucket: write {scheme}://bucket/folder")
    if not re.fullmatch(_BUCKET[kind], bucket, re.ASCII):
        if "@" in rest:  # perhaps of a user and a password, which has slashes
            raise FormatError(
                f"{scheme}://...@{rest.rpartition('@')[2]}: write the URL without a user, and pass credentials in the "
                "environment or in storage_options"
            )
        raise FormatError(
            f"{url}: {bucket!r} is not the name of a bucket, which has only letters, digits, '-', '.' and '_'"
        )
    if key.startswith("/") or "//" in key.rstrip("/"):  # a key of its own in S3, which obstore cannot read
        raise FormatError(f"{url}: a name has an empty part, which obstore cannot read: write one slash, not two")
    if {".", ".."} & set(key.split("/")):  # names of their own, too; they do not lead to other folders
        raise FormatError(f"{url}: '.' and '..' are names that obstore cannot read: write the URL without them")
    return Address(kind, bucket, key.rstrip("/"), f"{scheme}://{bucket}")


def with_defaults(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, with those of fsspec's configuration for the protocol (files and ``FSSPEC_...`` variables)."""
    from fsspec.config import conf

    return {**conf.get(url.partition("://")[0].lower(), {}), **options}


def connect(where: Address, options: Mapping[str, Any], policy: Policy, retries: int = 0) -> Any:
    """Return obstore's store for a bucket, which repeats a request up to ``retries`` times (reads are repeated by
    `Requesting`). Raises FormatError for a missing package and for unknown options."""
    try:
        store: Any = importlib.import_module("obstore.store")
    except ImportError:
        raise FormatError(f"{where.shown}: reading there needs obstore: {_INSTALL}") from None
    config, client = configuration(where, options, policy)
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=policy.deadline)}
    shared: dict[str, Any] = {"client_options": client, "retry_config": retry}
    try:
        if where.kind == "http":
            query = f"?{where.query}" if where.query else ""
            return store.HTTPStore.from_url(f"{where.bucket}/{query}", **shared)
        if where.kind == "gs":
            return store.GCSStore(where.bucket, config=config, **shared)
        if where.kind == "az":
            container, _, account = where.bucket.partition("@")
            if account:
                config.setdefault("account_name", account.partition(".")[0])
            return store.AzureStore(container, config=config, **shared)
        provider = None
        if not {"access_key_id", "skip_signature"} & set(config):
            provider, region, endpoint = _boto_credentials(options.get("profile"))
            if region:
                config.setdefault("region", region)
            if endpoint and "endpoint" not in config:
                with_protocol(where.shown, endpoint)
                config["endpoint"] = endpoint
                client["allow_http"] = endpoint.startswith("http://")
            if provider is None:
                config["skip_signature"] = True
        return store.S3Store(where.bucket, config=config, credential_provider=provider or None, **shared)
    except Exception as e:
        if isinstance(e, LazyckptError):
            raise
        text = re.sub(r"^Generic \w+ error: ", "", without_secrets(str(e), options).partition("\n")[0]).rstrip(".")
        if "Account must be specified" in text:
            raise FormatError(
                f"{where.shown}: the storage account is missing: pass storage_options={{'account_name': ...}}, or set "
                "AZURE_STORAGE_ACCOUNT_NAME"
            ) from None
        raise FormatError(
            f"{where.shown}: {text}. Check storage_options; the guide to buckets says which there are"
        ) from None


def is_unsigned(where: Address, store: Any) -> bool:
    """Return whether a store of obstore sends requests to a bucket without credentials."""
    found = getattr(store, "config", {})
    return where.kind != "http" and str(found.get("skip_signature", "")).lower() == "true"


def configuration(where: Address, options: Mapping[str, Any], policy: Policy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return obstore's configuration of the store and of its client."""
    names = _OTHER_NAMES[where.kind]
    own = "aws_" if where.kind == "s3" else "\0"
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=max(600.0, policy.timeout)),
        "read_timeout": timedelta(seconds=policy.timeout),
        "connect_timeout": timedelta(seconds=connect_timeout(policy)),
        "pool_max_idle_per_host": str(policy.concurrency),
    }
    config: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for name, value in options.items():
        if name in ("client_kwargs", "config_kwargs", "kwargs"):
            for inner, found in (value or {}).items():
                if inner == "headers":
                    headers.update(found)
                elif name == "client_kwargs":
                    config[names.get(inner, inner)] = found
        elif name == "headers":
            headers.update(value)
        elif name == "client_options":
            client.update(value)
        elif name not in _IGNORED and value is not None:
            name = name.lower().removeprefix(own)
            config[names.get(name, name)] = value
    for name, text in (*(config.items() if where.kind != "gs" else ()), *headers.items()):  # Google's keys have lines
        if isinstance(text, str) and any(c in text for c in "\r\n\0"):
            raise FormatError(f"{where.shown}: storage_options: {name} has a line break: pass it without (strip())")
    if where.user:
        token = base64.b64encode(unquote(where.user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    if headers:
        client["default_headers"] = {**client.get("default_headers", {}), **headers}
    for variable in _ENDPOINTS.get(where.kind, ()):
        name = "base_url" if where.kind == "gs" else "endpoint"
        if os.environ.get(variable) and name not in config:
            config[name] = os.environ[variable]
            if variable == "STORAGE_EMULATOR_HOST" and not any("account" in n or n == "token" for n in config):
                endpoint = config.pop("base_url")
                with_protocol(where.shown, endpoint)
                config["service_account_key"] = without_account(endpoint)
                client["allow_http"] = endpoint.startswith("http://")
    if where.kind == "gs" and "token" in config:
        config |= google_key(config.pop("token"))
    if where.kind == "az" and "connection_string" in config:
        config |= of_connection_string(str(config.pop("connection_string")))
    if where.kind == "az" and isinstance(config.get("credential"), str):
        text = config.pop("credential")
        config["sas_key" if "sig=" in text else "account_key"] = text
    if where.kind != "http":
        for name in {"endpoint", "base_url"} & set(config):
            with_protocol(where.shown, str(config[name]))
    if any(str(value).startswith("http://") for value in (where.bucket, *config.values())):
        client["allow_http"] = True
    if where.kind == "http" and config:
        raise FormatError(
            f"{where.shown}: storage_options of a web server may be headers, client_options and requests, not "
            f"{', '.join(sorted(config))}"
        )
    return config, client


def _boto_credentials(profile: str | None) -> tuple[Any, str | None, str | None]:
    """Return a provider of AWS credentials, "" to leave it to obstore (there is no boto3), None if there are none; and
    the region and the endpoint of the profile."""
    try:
        core = importlib.import_module("botocore.session").Session(profile=profile)
        session = importlib.import_module("boto3.session").Session(botocore_session=core)
        region, endpoint = session.region_name, configured_endpoint(core)
        credentials = session.get_credentials()
    except ImportError:
        if profile:
            raise FormatError(f"storage_options: profile={profile!r} needs boto3: {_INSTALL}") from None
        return "", None, None
    except Exception as e:  # a profile that does not exist; botocore has no common class for that
        source = f"storage_options: profile={profile!r}" if profile else "AWS_PROFILE or the files in ~/.aws"
        raise FormatError(f"{source}: {e}") from None
    if credentials is None:
        return None, region, endpoint
    # obstore asks again for what expires within five minutes: so each request asks boto3, which renews in time
    provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider(session, ttl=timedelta(minutes=4))
    return provider, region, endpoint


# -- errors


class NoRangesError(OSError):
    """A server answers a request for a range with the whole file."""


@contextmanager
def asking(url: str, options: Mapping[str, Any], unsigned: bool = False) -> Iterator[None]:
    """Convert obstore's errors: to FileNotFoundError, PermissionError, Transient or OSError, without credentials.
    ``unsigned``: see `is_unsigned`."""
    try:
        yield
    except (LazyckptError, Transient):
        raise
    except BaseException as e:
        kind = type(e).__name__
        text = without_secrets(str(e), options)
        if kind == "PanicException":  # no Exception: obstore was given what it does not check
            raise OSError(
                f"{url}: obstore cannot make this request ({text.rpartition(': ')[2].split('(')[0]}). Check the "
                "endpoint and the credentials (environment, profile, storage_options)"
            ) from None
        if not isinstance(e, Exception):
            raise
        if any(code in text for code in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")):
            raise OSError(f"{url}: there is no such bucket. Is its name right, and the endpoint?") from None
        if "169.254.169.254" in text:
            raise PermissionError(
                f"{url}: no credentials were found. Set them in the environment or in storage_options (profiles of AWS "
                "need boto3); for a public bucket pass storage_options={'anon': True}"
            ) from None
        if kind == "NotFoundError" or isinstance(e, FileNotFoundError):
            raise FileNotFoundError(2, "no such file", url) from None
        line = in_words(text)
        status = _STATUS.search(text)
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or (status and status[1] in ("401", "403")):
            advice = "Check the credentials (environment, profile, storage_options)"
            anonymous = [name for name in _ANONYMOUS if options.get(name)]
            if unsigned and anonymous:
                advice = (
                    f"No credentials were sent, as storage_options say ({anonymous[0]}): leave that out to send them"
                )
            elif unsigned:
                advice = (
                    "No credentials were found: set them in the environment or in storage_options (profiles of AWS "
                    "need boto3)"
                )
            raise PermissionError(f"{url}: access is denied ({line}). {advice}") from None
        if (kind == "NotSupportedError" and "ange" in text) or "non-partial response" in text:
            raise NoRangesError(
                f"{url}: the server does not serve parts of files (ranges), or answers with a page instead: download "
                "it, and open that"
            ) from None
        if "eader missing" in text or "header not present" in text:
            raise OSError(f"{url}: not the answer of an object store ({line}): is the endpoint right?") from None
        if "invalid path" in text and (named := re.search(r'\bPath "([^"]*)"', text)):
            raise OSError(
                f"{url}: there is an object with an empty part, '.' or '..' in its name, which obstore cannot list: "
                f"{named[1]}. Rename or remove it"
            ) from None
        if "Could not parse path" in text:
            raise OSError(f"{url}: obstore cannot read names with an empty part: write one slash, not two") from None
        if status and status[1] == "404":
            raise OSError(f"{url}: not an object store ({line}): is the endpoint right?") from None
        right = re.search(r"AuthorizationHeaderMalformed.*expecting '([\w-]+)'", text)
        if "LOCATION" in text or "PermanentRedirect" in text or right:
            raise OSError(
                f"{url}: the bucket is in another region: pass storage_options={{'region': "
                f"{repr(right[1]) if right else '...'}}}, or set AWS_REGION"
            ) from None
        unreachable = "dns error" in text or "ConnectionRefused" in text
        lasting = "builder error" in text or "certificate" in text
        passing = int(status[1]) in PASSING if status else not lasting
        if unreachable:
            raise UnreachableError(f"{url}: {line}") from None
        if passing or isinstance(e, ConnectionError | TimeoutError):
            raise Transient(f"{url}: {line}") from None
        raise OSError(f"{url}: {line}") from None


def in_words(text: str) -> str:
    """Return on one line what an error of obstore tells.

    >>> in_words("Generic S3 error: Error performing GET http://s/b/x in 2ms - Server returned non-2xx status code: "
    ...     "503 Service Unavailable: <Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>")
    '503 Service Unavailable: SlowDown: Reduce your rate'
    """
    text, _, source = text.partition("\n\nDebug source")
    server = re.search(r"https?://([^/\s]+)", text)
    text = _PREFIX.sub("", " ".join(text.split()))
    if "error sending request" in text or "response body error" in text:
        known = next((words for sign, words in _CAUSES.items() if sign in source), "")
        known = known.format(server=server[1] if server else "there")
        system = re.search(r'Os {[^}]*message: "([^"]*)"', source)
        text = known or (f"the connection broke: {system[1].lower()}" if system else "the connection broke")
    elif turned := re.fullmatch(r"Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)", text):
        first, stop, other, end = turned.groups()
        text = f"the answer has bytes {other} to {end}, not {first} to {stop}, the range that was asked for"
    described = re.search(r"<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?", text)
    if described:
        parts = (text[: text.index("<")].strip(" :"), described[1], " ".join((described[2] or "").split()))
        text = ": ".join(part for part in parts if part)
    elif "<" in text:  # a page
        text = text[: text.index("<")]
    text = text.rstrip(". :")
    return f"{text[:300]}..." if len(text) > 300 else text
