"""The file systems of fsspec, by URL: what each of them needs that is not installed, or that the URL does not say."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from ...errors import FormatError, MissingFileError
from .credentials import OWN, hint, without_secrets
from .spellings import unknown_protocol

# what to install for a protocol, by the names that fsspec and the packages themselves give (fsspec/registry.py)
_PACKAGES = {
    "ssh": "paramiko", "sftp": "paramiko", "smb": "smbprotocol", "webdav": "webdav4", "hdfs": "pyarrow",
    "arrow_hdfs": "pyarrow", "webhdfs": "requests", "github": "requests", "gist": "requests", "git": "pygit2",
    "jupyter": "requests", "jlab": "requests", "dbfs": "requests", "oss": "ossfs", "oci": "ocifs", "ocilake": "ocifs",
    "tos": "tosfs", "tosfs": "tosfs", "box": "boxfs", "dropbox": "dropboxdrivefs dropbox requests", "dvc": "dvc",
    "lakefs": "lakefs-spec", "wandb": "wandbfs", "root": "fsspec-xrootd", "dask": "distributed",
    "libarchive": "libarchive-c", "asynclocal": "'morefs[asynclocalfs]'",
}  # fmt: skip
_FORMS = {"github": "github://ORG:REPO@REF/folder"}  # how a URL says what the options say otherwise
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
_NO_HADOOP = "Hadoop and Java: set HADOOP_HOME, JAVA_HOME and CLASSPATH, or use webhdfs://, which needs none of them"


def file_system(url: str, shown: str, passed: Mapping[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. ``shown`` is the URL without credentials.

    Raises FormatError for an unknown protocol, a missing package, and a URL or options that say too little, and
    MissingFileError if there is no connection."""
    import fsspec  # caches its file systems

    options = {name: value for name, value in passed.items() if name not in OWN}
    scheme = url.partition("://")[0].lower()
    try:
        fs, base = fsspec.core.url_to_fs(url, **options)
    except ImportError as e:
        raise FormatError(f"{shown}: {_lacking(scheme, e, options)}{hint(passed)}") from None
    except ValueError as e:
        if "Protocol not known" in str(e):
            raise FormatError(unknown_protocol(shown)) from None
        raise FormatError(f"{shown}: {without_secrets(str(e), options)}{hint(passed)}") from None
    except Exception as e:  # each package has its own exceptions
        text = without_secrets(" ".join(str(e).split()), options) or type(e).__name__
        if isinstance(e, TypeError) and (lacking := _MISSING.search(text)):
            names = re.findall(r"'(\w+)'", lacking[1])
            form = f"write {_FORMS[scheme]}, or " if scheme in _FORMS else ""
            wanted = ", ".join(f"{name!r}: ..." for name in names)
            advice = f"{form}pass storage_options={{{wanted}}}{hint(passed)}"
            raise FormatError(f"{shown}: {scheme}:// needs {' and '.join(names)}: {advice}") from None
        if "libhdfs" in text or "libjvm" in text:
            raise FormatError(f"{shown}: {scheme}:// needs {_NO_HADOOP}") from None
        error = MissingFileError(f"{shown}: {text}{hint(passed)}")
        error.errno = errno.EACCES if isinstance(e, PermissionError) else errno.EIO
        raise error from None
    return fs, str(base)


def _lacking(scheme: str, e: ImportError, options: Mapping[str, Any]) -> str:
    """Return what an ImportError means."""
    known = _PACKAGES.get(scheme)
    if known is None:
        return without_secrets(str(e), options)
    names = known.replace("'", "").split()
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{scheme}:// needs {listed}: pip install {known}"
