"""What other libraries' options for the same thing say, in obstore's words: gcsfs's ``token``, adlfs's
``connection_string`` and ``credential``, the endpoint of an AWS profile; and URLs that are mistyped.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ...errors import FormatError

PROTOCOLS = ("s3", "gs", "az", "https", "http", "hf", "ssh", "ftp", "file", "memory")
_MISTYPED = re.compile(r"(s3a?|gs|gcs|az|abfss?|hf|https?|ssh|sftp|ftp)(?::/?|//)(?!/)(.+)", re.IGNORECASE)
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!(?:api|blog|collections|docs|papers)/)"
    r"((?:datasets/|spaces/)?[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|commit|commits)/([^/?#]+)(/[^?#]*)?|/(?:discussions|commits|tree)(?:/[^?#]*)?)?/?(?:[?#].*)?",
    re.IGNORECASE,
)
_CONNECTION = {"accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key",
               "blobendpoint": "endpoint"}  # fmt: skip


def mistyped(path: str) -> str | None:
    """Return the URL that a path that does not exist may be meant as; None if it looks like none.

    >>> mistyped("s3:/bucket/run"), mistyped("hf:org/model"), mistyped("https//server/run"), mistyped("runs/s3")
    ('s3://bucket/run', 'hf://org/model', 'https://server/run', None)
    >>> mistyped("file:/run")
    'file:///run'
    """
    path = path.replace("\\", "/")
    if path.startswith("file:/"):
        return f"file:///{path.removeprefix('file:').lstrip('/')}"
    found = _MISTYPED.fullmatch(path)
    return f"{found[1].lower()}://{found[2]}" if found else of_page(path)


def of_page(url: str) -> str | None:
    """Return the hf:// URL of what a page of the Hub shows; None if a URL is no such page.

    >>> of_page("https://huggingface.co/org/model/tree/main/step%2010"), of_page("https://hf.co/org/model?library=x")
    ('hf://org/model@main/step 10', 'hf://org/model')
    """
    found = _PAGE.fullmatch(url)
    if found is None:
        return None
    revision = f"@{found[2]}" if found[2] else ""
    return f"hf://{found[1]}{revision}{unquote(found[3] or '')}".rstrip("/")


def unknown_protocol(url: str) -> str:
    """Return the message for a URL that nothing reads.

    >>> print(unknown_protocol("htps://server/run"))
    htps://server/run: there is no protocol 'htps'. Did you mean https://? Others are s3, gs, az, http, hf, ssh, ftp, file, memory
    """  # noqa: E501
    name = url.partition("://")[0]
    near = difflib.get_close_matches(name.lower(), (*PROTOCOLS, "abfs"), 1, 0.5)
    hint = f"Did you mean {near[0]}://? Others are" if near else "Known are"
    return f"{url}: there is no protocol {name!r}. {hint} {', '.join(p for p in PROTOCOLS if p not in near)}"


def google_key(token: Any) -> dict[str, Any]:
    """Return obstore's configuration for gcsfs's ``token``: "anon", a key file or its content. The other words of gcsfs
    name what obstore does by itself. Raises FormatError for a token of another kind."""
    if isinstance(token, Mapping):
        return {"service_account_key": json.dumps(dict(token))}
    if not isinstance(token, str):
        raise FormatError(
            f"storage_options: token of type {type(token).__name__}: the path of a key file, its content as a "
            "dictionary, or 'anon' is due"
        )
    if token == "anon":
        return {"skip_signature": True}
    if token in ("google_default", "cloud", "browser", "cache"):
        return {}
    return {"service_account": token}


def without_account(endpoint: str) -> str:
    """Return obstore's key of a service account for an emulator of Google's storage, which knows no accounts. (With
    ``skip_signature``, obstore looks for credentials before it writes.)"""
    nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
    return json.dumps({"gcs_base_url": endpoint, "disable_oauth": True, **nobody})


def of_connection_string(text: str) -> dict[str, Any]:
    """Return obstore's configuration for the connection string of an Azure storage account.

    >>> of_connection_string("AccountName=me;AccountKey=bm9uZQ==;EndpointSuffix=core.windows.net")
    {'account_name': 'me', 'account_key': 'bm9uZQ=='}
    """
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
    found = {_CONNECTION[name.lower()]: value for name, value in parts.items() if name.lower() in _CONNECTION}
    suffix = next((value for name, value in parts.items() if name.lower() == "endpointsuffix"), "core.windows.net")
    if suffix != "core.windows.net" and "account_name" in found:
        found.setdefault("endpoint", f"https://{found['account_name']}.blob.{suffix}")
    return found


def configured_endpoint(session: Any) -> str | None:
    """Return the ``endpoint_url`` of the profile of a session of botocore, for S3 or for all services."""
    providers = importlib.import_module("botocore.configprovider")
    found = providers.ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
    return None if found is None else str(found)


def with_protocol(shown: str, endpoint: str) -> None:
    """Raise FormatError for the address of a server without a protocol, at which obstore panics."""
    if not re.match(r"https?://[^/]", endpoint, re.IGNORECASE):
        server = endpoint.rpartition("@")[2].rpartition("://")[2]
        raise FormatError(
            f"{shown}: the endpoint {server!r} is not a web address: write https://{server}, or http://{server}"
        )
