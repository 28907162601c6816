"""Errors for what goes wrong with requests to the Hub.

A message names the file, never a link, because a signed link is a credential.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from ...errors import ChangedFileError, CorruptError, MissingFileError
from .hub_url import Place, parse
from .repeating import Transient, UnreachableError
from .traffic import PASSING, retry_after

_LIMIT = re.compile(r"r=0\s*;\s*t=(\d{1,6})")
_PERMANENT = ("InvalidURL", "UnsupportedProtocol", "MissingSchema", "InvalidSchema", "TooManyRedirects")


def failed(e: Exception, where: str, place: Place, endpoint: str) -> Exception:
    """Return the error to raise for one of huggingface_hub, of its HTTP library, or of `hub_requests`.

    Parameters
    ----------
    e
        The error.
    where
        The URL of what was requested.
    place, endpoint
        The repository, and the URL of the Hub.
    """
    from huggingface_hub import errors

    repo, page = place.repo, f"{endpoint}/{place._replace(revision='', path='').url[5:]}"
    status = getattr(getattr(e, "response", None), "status_code", 0)
    if isinstance(e, MissingFileError | ChangedFileError | CorruptError | Transient):
        return e
    if isinstance(e, errors.OfflineModeIsEnabled):
        return missing(f"{where}: huggingface_hub is offline (HF_HUB_OFFLINE), and its cache does not have the file")
    if isinstance(e, errors.LocalTokenNotFoundError):
        return _refused(f"{where}: no token was found: log in with 'hf auth login', or set HF_TOKEN")
    if isinstance(e, errors.GatedRepoError):
        return _refused(
            f"{where}: {repo} is gated: ask for access at {page}, and log in with 'hf auth login' (or set HF_TOKEN)"
        )
    if isinstance(e, errors.RepositoryNotFoundError):
        return missing(
            f"{where}: the Hub has no repository {repo}, or it is private: check the name, and log in with "
            "'hf auth login' (or set HF_TOKEN)"
        )
    if isinstance(e, errors.RevisionNotFoundError):
        revision = parse(where).revision or "main"
        return missing(f"{where}: {repo} has no revision {revision!r}: {page} lists its branches and tags")
    if isinstance(e, errors.EntryNotFoundError):
        return missing(f"{where}: no such file or folder in this commit", NoEntryError)
    if status in (401, 403):
        whom = "the token" if status == 401 else "this account, or the token,"
        return _refused(f"{where}: the Hub refuses {whom} (status {status}): log in again with 'hf auth login'")
    if status in PASSING:
        error = Transient(f"{where}: the server answers with status {status}")
        error.after = _after(e.response.headers)  # type: ignore[attr-defined]  # it has a status
        return error
    if status:
        return OSError(f"{where}: the server answers with status {status}")
    # another thread that cannot connect makes huggingface_hub close the client that all threads use
    closed = type(e) is RuntimeError and "closed" in str(e)
    library = type(e).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "urllib3", "http")
    if closed or library or isinstance(e, ConnectionError | TimeoutError):
        what = _cause(e)
        passing = type(e).__name__ not in _PERMANENT and "CERTIFICATE" not in what
        kind = UnreachableError if _no_server(e) else Transient
        return (kind if passing else OSError)(f"{where}: {urlsplit(endpoint).netloc}: {what}")
    return e if isinstance(e, OSError) else OSError(f"{where}: {type(e).__name__}")


class NoEntryError(MissingFileError):
    """A commit does not have a file or folder."""


def missing(message: str, kind: type[MissingFileError] = MissingFileError) -> MissingFileError:
    """Return the error for what is not there."""
    error = kind(message)
    error.errno = errno.ENOENT
    return error


def _refused(message: str) -> MissingFileError:
    error = MissingFileError(message)
    error.errno = errno.EACCES
    return error


def _no_server(e: BaseException) -> bool:
    """Return whether a connection failed because there is no server: an unknown name, or a refused connection."""
    at: BaseException | None = e
    while at is not None and not isinstance(at, socket.gaierror | ConnectionRefusedError):
        at = at.__cause__ or at.__context__
    return at is not None


def _cause(e: BaseException) -> str:
    """Return the reason of a failed connection, without what the HTTP library adds: its text may contain a link."""
    found = type(e).__name__
    at: BaseException | None = e
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            found = str(at.strerror)
        at = at.__cause__ or at.__context__
    return found


def _after(headers: Mapping[str, str]) -> float:
    """Return after how many seconds the Hub asks to be asked again; 0 if it does not say."""
    limit = _LIMIT.search(headers.get("RateLimit", ""))  # "api";r=0;t=55: no request is left for 55 seconds
    return retry_after(headers) or float(limit[1] if limit else 0)
