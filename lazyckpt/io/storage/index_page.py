"""Names of files in a folder of a web server: from its page of links, or from the files that checkpoints begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

INDEXES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors.index.json",
)
KNOWN = (
    *INDEXES, "model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_config.json",
    "config.json", "generation_config.json", "consolidated.00.pth", "params.json", ".metadata", "metadata.json",
    "common.pt", "zarr.json", ".zarray", ".zgroup", ".zmetadata", ".zattrs", "latest",
    "latest_checkpointed_iteration.txt",
)  # fmt: skip
HIDDEN = tuple(name for name in KNOWN if name.startswith("."))  # nginx and Apache leave them out of their pages
_MOST = 100_000  # links of a page, and shards of an index


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and len(self.found) < _MOST:
            self.found += [value for name, value in attrs if name == "href" and value]


def links(page: bytes) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the folders that a page links to, if it is the listing of a folder.

    >>> links(b'<title>Index of /run</title><a href="../">..</a><a href="a%20b.pt">a b.pt</a><a href="sub/">sub/</a>')
    (['a b.pt'], ['sub'])
    """
    text = page.decode("utf-8", "replace")
    start = text[:4096].lower()
    if "<html" not in start and "<title" not in start and "<a " not in start:
        return [], []
    if not any(title in start for title in ("index of", "directory listing", "listing of")):
        return [], []
    parser = _Links()
    parser.feed(text)
    files: dict[str, None] = {}
    folders: dict[str, None] = {}
    for link in parser.found:
        parts = urlsplit(link)
        name = unquote(parts.path.removeprefix("./"))
        is_folder = name.endswith("/")
        name = name.rstrip("/")
        if parts.scheme or parts.netloc or parts.query or "/" in name or name in ("", ".", ".."):
            continue
        (folders if is_folder else files)[name] = None
    return list(files), list(folders)


def candidates(read: Callable[[str], bytes]) -> list[str]:
    """Return names that the files of a checkpoint may have, of which there is no listing. ``read`` returns the content
    of a small file, b"" if there is none."""
    names = dict.fromkeys(KNOWN)
    for index in INDEXES:
        try:
            table = json.loads(read(index) or b"{}").get("weight_map", {})
            names.update(dict.fromkeys(name for name in list(table.values())[:_MOST] if isinstance(name, str)))
        except (ValueError, AttributeError, RecursionError):
            continue  # the reader of the index says what is wrong with it
    return [name for name in names if name and "/" not in name]
