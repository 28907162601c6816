"""URLs of places on the Hub of Hugging Face: ``hf://[datasets/|spaces/]owner/name[@revision][/path]``."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from ...errors import FormatError

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}  # in URLs -> huggingface_hub's repo_type
_NAME = re.compile(r"[\w.-]+")
_REF = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)")  # huggingface_hub reads these without quoting, too
COMMIT = re.compile(r"[0-9a-f]{40}")


class Place(NamedTuple):
    """What a ``hf://`` URL names.

    Attributes
    ----------
    kind
        "models", "datasets" or "spaces".
    repo
        The repository: "owner/name".
    revision
        A branch, tag, ref or commit; empty for the default branch.
    path
        The file or folder in the repository; empty for the repository itself.
    """

    kind: str
    repo: str
    revision: str
    path: str

    @property
    def url(self) -> str:
        """The URL of the place."""
        kind = "" if self.kind == "models" else f"{self.kind}/"
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"hf://{kind}{self.repo}{revision}" + (f"/{self.path}" if self.path else "")


def parse(url: str) -> Place:
    """Take a URL ``hf://[datasets/|spaces/]owner/name[@revision][/path]`` apart. In a revision, "/" is written as
    "%2F", except in "refs/pr/1" and "refs/convert/parquet". Raises FormatError.

    >>> parse("hf://datasets/org/states@refs%2Fpr%2F1/step 1/model.bin")
    Place(kind='datasets', repo='org/states', revision='refs/pr/1', path='step 1/model.bin')
    """
    rest = url.removeprefix("hf://").strip("/")
    kind, _, inner = rest.partition("/")
    if kind in KINDS:
        rest = inner
    else:
        kind = "models"
    owner, _, rest = rest.partition("/")
    name, slash, path = rest.partition("/")
    name, at, revision = name.partition("@")
    if at:
        after = f"{revision}{slash}{path}"
        ref = _REF.match(after)
        if ref is not None:
            revision, path = ref[0], after[ref.end() + 1 :]
        revision = unquote(revision)
    if not (_NAME.fullmatch(owner) and _NAME.fullmatch(name)) or (at and not revision):
        raise FormatError(f"{url}: names no repository: write hf://owner/name, or hf://owner/name@revision/path")
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise FormatError(f"{url}: {path!r} is not a path in a repository")
    return Place(kind, f"{owner}/{name}", revision, path)
