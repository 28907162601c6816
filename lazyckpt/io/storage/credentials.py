"""Credentials in storage options and URLs, and how they stay out of messages and pickles.

A pickle of a store has its credentials only encrypted, with the key that a process shares with those that it starts by
multiprocessing (``multiprocessing.current_process().authkey``). So that process and its workers can use them: those of
a DataLoader, a ProcessPoolExecutor, a Dask cluster on the same machine. In every other process they are left out, and
the store uses what the environment there provides; a request that is then refused says what was left out.

Jobs that send tasks to the workers of any cluster send the credentials along (`passing`), and so does the option
``pickle_credentials``.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import current_process
from typing import Any, NamedTuple

from ...errors import CredentialsWarning

OPT_IN = "pickle_credentials"
LEFT_OUT = "left_out"  # the option that names what the pickle of a store left out
OWN = frozenset(("requests", OPT_IN, LEFT_OUT))  # options that no file system gets

_SECRET = re.compile(
    r"(?i)key|secret|token|passw|credential|auth|cookie|header|sas|signature|account|connection_string"
)
_OPEN = re.compile(r"(?i)(.*_)?account(_name)?|.*(path|file|filename|application_credentials)")  # names, and places
_KINDS = ("anon", "cloud", "google_default", "browser", "cache")  # values of gcsfs's ``token`` that are no token
_URL = re.compile(r"(\w+://)(?:[^/@\s]*@)?([^\s?\"')]*)(\?[^\s\"')]*)?")
_QUERY = re.compile(r"(/[^\s?\"'()]*)\?[\w.%~-]+=[^\s\"')]*")  # of a URL without its protocol and server
_PASSWORD = re.compile(r"(://[^/:@]*):[^/]*@")
_own = threading.local()


class Sealed(NamedTuple):
    """The URL and the options of a store in its pickle.

    Attributes
    ----------
    url, options
        Those without credentials.
    names
        What is left out; () if the pickle has all.
    data
        The whole URL and options, encrypted.
    """

    url: str
    options: dict[str, Any]
    names: tuple[str, ...] = ()
    data: bytes = b""


def seal(url: str, options: Mapping[str, Any], shown: str) -> Sealed:
    """Return what the pickle of a store has of its URL and options. Warns if credentials among them can be used only by
    this process and its workers. ``shown`` is the URL without credentials."""
    names = secret_names(options)
    if url != shown:
        names.append("the user or query of the URL")
    if not names or options.get(OPT_IN) or getattr(_own, "passing", False):
        return Sealed(url, dict(options))
    warnings.warn(
        f"only this process and the workers that it starts can use the credentials in a pickle of tensors of {shown} "
        f"({', '.join(names)}): elsewhere set them in the environment, or pass storage_options={{'{OPT_IN}': True}}",
        CredentialsWarning,
        stacklevel=3,
    )
    data = _encrypted(pickle.dumps((url, dict(options))))
    return Sealed(shown, _without_secrets(options), tuple(names), data)


def unseal(sealed: Sealed) -> tuple[str, dict[str, Any]]:
    """Return the URL and the options; without credentials, but with their names, if another process sealed them."""
    if not sealed.names:
        return sealed.url, sealed.options
    data = _decrypted(sealed.data)
    if data is None:
        return sealed.url, {**sealed.options, LEFT_OUT: sealed.names}
    url, options = pickle.loads(data)
    return url, options


def hint(options: Mapping[str, Any]) -> str:
    """Return what to add to the error of a refused request; "" if nothing was left out."""
    names = options.get(LEFT_OUT)
    if not names:
        return ""
    return f". It came in a pickle, which leaves out credentials ({', '.join(names)}): set them in the environment"


@contextmanager
def passing() -> Iterator[None]:
    """Let pickles that this thread makes within the context have credentials, because they go to workers only."""
    before = getattr(_own, "passing", False)
    _own.passing = True
    try:
        yield
    finally:
        _own.passing = before


def without_secrets(text: str, options: Mapping[str, Any]) -> str:
    """Return a message without what may be a credential: the values of options, and the user and query of URLs."""
    for value in sorted(_values(options), key=len, reverse=True):
        text = text.replace(value, "***")
    return _QUERY.sub(r"\1", _URL.sub(lambda m: f"{m[1]}{m[2]}", text))


def is_without_secrets(error: BaseException, options: Mapping[str, Any]) -> bool:
    """Return whether neither an exception nor those that led to it, which tracebacks show, may have a credential."""
    found: BaseException | None = error
    while found is not None:
        text = str(found)
        if without_secrets(text, options) != text:
            return False
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return True


def without_password(url: str) -> str:
    """Return a URL without the password in it.

    >>> without_password("ssh://user:pass@host/run")
    'ssh://user@host/run'
    """
    return _PASSWORD.sub(r"\1@", url)


def secret_names(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that may hold credentials.

    >>> secret_names({"key": "a", "anon": True, "skip_signature": True, "client_kwargs": {"headers": {"a": "b"}}})
    ['client_kwargs', 'key']
    """
    return sorted(name for name, value in options.items() if _is_secret(name, value) or _hides(value))


def _is_secret(name: str, value: Any) -> bool:
    """Return whether an option may hold a credential: not if it is a switch, a number, a name or a place."""
    if name in OWN or value is None or isinstance(value, bool | int | float) or value in ("", *_KINDS):
        return False
    return bool(_SECRET.search(name)) and not _OPEN.fullmatch(name)


def _hides(value: Any) -> bool:
    """Return whether a nested option may hold credentials."""
    return isinstance(value, Mapping) and any(_is_secret(str(k), v) or _hides(v) for k, v in value.items())


def _without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_secrets(value) if _hides(value) else value
        for name, value in options.items()
        if not _is_secret(str(name), value)
    }


def _values(options: Mapping[str, Any], within: bool = False) -> Iterator[str]:
    """Yield the texts that may be credentials. ``within``: the options are those of a secret one, such as headers."""
    for name, value in options.items():
        secret = within or _is_secret(str(name), value)
        if isinstance(value, Mapping):
            yield from _values(value, secret)
        elif secret and isinstance(value, str | bytes) and len(value) > 3:
            yield value if isinstance(value, str) else value.decode("utf-8", "replace")


# -- encryption: a text is combined with a stream of SHAKE-256, keyed with a MAC of the text, which also proves it


def _keys() -> tuple[bytes, bytes]:
    own = bytes(current_process().authkey)
    return (
        hmac.digest(own, b"lazyckpt: authenticity of credentials", "sha256"),
        hmac.digest(own, b"lazyckpt: secrecy of credentials", "sha256"),
    )


def _stream(key: bytes, mac: bytes, data: bytes) -> bytes:
    stream = hashlib.shake_256(key + mac).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))


def _encrypted(data: bytes) -> bytes:
    proof, key = _keys()
    mac = hmac.digest(proof, data, "sha256")
    return mac + _stream(key, mac, data)


def _decrypted(sealed: bytes) -> bytes | None:
    """Return the text; None if another process, and none that started this one, encrypted it."""
    proof, key = _keys()
    mac = sealed[:32]
    data = _stream(key, mac, sealed[32:])
    return data if hmac.compare_digest(mac, hmac.digest(proof, data, "sha256")) else None
