"""Documents that users pass or that stand beside tensors: JSON of metadata, rules, tables of names, manifests."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import numpy as np
import torch
import yaml

import lazyckpt
from lazyckpt.cli.options import read_rules
from lazyckpt.errors import LazyckptError
from lazyckpt.inspect.manifest import Digest
from lazyckpt.io.plain_json import decode, encode
from lazyckpt.io.plain_yaml import parse_yaml
from lazyckpt.layouts.rename.table import read_table

from ..contract import DifferenceError, Target
from .sources import settled, write


def plain_json(data: bytes) -> None:
    """Decode JSON of `encode`; what is decoded can be encoded again, with the same result."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    value = decode(document)
    text = json.dumps(encode(value))
    again = json.dumps(encode(decode(json.loads(text))))
    if text != again:
        raise DifferenceError(f"{text:.300} and {again:.300}")


def _values() -> list[bytes]:
    value: Any = {
        "int": 1 << 70, "float": float("nan"), "tuple": (1, "a"), "bytes": b"x", "array": np.eye(2), "range": range(3),
        "keys": {1: 2, (3,): 4}, "set": {1}, "path": pathlib.PurePosixPath("a"), "dtype": np.dtype("<f4"),
        "complex": 1j, "slice": slice(1), "tensor": torch.arange(3), "torch": torch.float16, "size": torch.Size([1]),
    }  # fmt: skip
    return [json.dumps(encode(value)).encode(), *(json.dumps(encode(v)).encode() for v in value.values())]


def rules(data: bytes) -> None:
    read_rules(write("rules.toml", data))


_RULES = (
    b'[rules]\n"*.qkv" = {cat = 0, parts = 3}\n"*.norm" = "replicated"\n"a.*" = {cat = 1, widths = [[2, 2], [1, 1]]}\n',
    b'[rules]\n"*embed*" = {cat = 0, rows = 32000}\n"*" = {flat = {a = [2, 3], b = [4]}}\n',
)


def names(data: bytes) -> None:
    read_table(str(write("names.toml", data)))


def names_json(data: bytes) -> None:
    read_table(str(write("names.json", data)))


_NAMES_JSON = b'{"layers.{l}.{p}": {"into": ["x.{l}.{p}"]}, "a": "b"}'
_NAMES = b'"layers.{l}.qkv.{p}" = {into = ["l.{l}.q.{p}", "l.{l}.k.{p}", "l.{l}.v.{p}"], cut = "qkv"}\n"a" = "b"\n'


def manifest(data: bytes) -> None:
    """Read a manifest; what is written of it reads as the same."""
    found = Digest.from_json(data.decode("utf-8", "replace"))
    repr(found)
    if Digest.from_json(found.to_json()) != found:
        raise DifferenceError("a manifest that is written again is another")


def _manifest() -> list[bytes]:
    path = write("digest.pt", b"")
    torch.save({"a": torch.arange(3), "b": torch.ones(2, 2)}, path)
    with lazyckpt.open(settled(path), cache=False) as view:
        return [view.digest().to_json().encode()]


def yaml_document(data: bytes) -> None:
    """Parse YAML; libyaml, PyYAML's own parser and its safe loader agree where all read a document without tags.
    (They do not agree where a tag ends in ``[!, 2]``.)"""
    found = parse_yaml(data, "x.yaml")
    if b"!" in data:
        return
    try:
        other, safe = parse_yaml(data, "x.yaml", libyaml=False), yaml.safe_load(data)
    except (LazyckptError, yaml.YAMLError, ValueError, TypeError, RecursionError):
        return
    if not repr(found) == repr(other) == repr(safe):
        raise DifferenceError(f"{found!r:.300}, {other!r:.300} and {safe!r:.300}")


def _yaml() -> list[bytes]:
    value = {
        "trainer": {"devices": 8, "precision": "bf16-mixed", "max_time": None}, "lr": 1e-4, "betas": [0.9, 0.98],
        "texts": ["", "yes", "1", "a: b", "two\nlines", "ä", "'", "- x", "0x1f", "1:30"],
        "date": datetime.date(2024, 2, 3),
        "nan": float("nan"), "data": b"x", "empty": [{}, []], 3: {4: 5},
    }  # fmt: skip
    by_hand = b"""# a comment
a: &one {b: [1, 2.5, yes, ~], c: !!python/object:x.Y {z: 1}}
d: *one
? e
: |
  two
   lines
f: >-
  folded
  text
g: "\\u00e4 \\x41"
h: [*one, 'it''s', 0o17, 0b11, 1_000, 12e03, .inf, 2001-12-14t21:59:43.10-05:00]
"""
    styles = [yaml.safe_dump(value, default_flow_style=flow) for flow in (True, False, None)]
    return [by_hand, *(text.encode() for text in styles), yaml.safe_dump(value, explicit_start=True, width=20).encode()]


TARGETS = (
    Target("documents.plain-json", plain_json, _values, "json"),
    Target("documents.rules", rules, lambda: list(_RULES), "text"),
    Target("documents.names-toml", names, lambda: [_NAMES], "text"),
    Target("documents.names-json", names_json, lambda: [_NAMES_JSON], "json"),
    Target("documents.yaml", yaml_document, _yaml, "text"),
    Target("documents.manifest", manifest, _manifest, "json"),
)  # fmt: skip
