"""Code that lies in or beside checkpoints outside of pickles: programs, scripts, and what configurations name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import printable, some
from ...io.containers.pickle.audit import judge
from ..codes import Severity

LARGEST = 16 << 20  # bytes of a JSON file that is looked into
_NODES = 1 << 20  # values of a JSON file that are looked at
_MAGIC = {
    b"\x7fELF": "an executable or shared library (ELF)",
    b"\xfe\xed\xfa\xce": "an executable or shared library (Mach-O)",
    b"\xfe\xed\xfa\xcf": "an executable or shared library (Mach-O)",
    b"\xce\xfa\xed\xfe": "an executable or shared library (Mach-O)",
    b"\xcf\xfa\xed\xfe": "an executable or shared library (Mach-O)",
    b"\xca\xfe\xba\xbe": "an executable or Java class (Mach-O, class)",
    b"\0asm": "a WebAssembly program",
    b"#!": "a script that a system runs",
}
_PROGRAM = re.compile(r"\.(py[cdw]?|so(\.\d+)*|dylib|dll|exe|sh|bash|bat|cmd|ps1|js|jar|ipynb|pth)$", re.IGNORECASE)
_TEMPLATE = re.compile(r"__\w+__|\battr\s*\(|\bpopen\b|\bsubprocess\b|\bimport\b|\bbuiltins\b|\blipsum\b|\bcycler\b")
_H5_LAMBDA = re.compile(rb'"class_name"\s*:\s*"Lambda"')


class Code(NamedTuple):
    """Code that was found: how bad it is, and a phrase about it."""

    severity: Severity
    what: str


def program(name: str, head: bytes, size: int) -> Code | None:
    """Return what a file is if it is a program, by its first bytes or its name."""
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            known = magic == b"#!" and name.rpartition("/")[2] == "zero_to_fp32.py"
            return Code("note" if known else "warning", "a script that DeepSpeed writes" if known else f"is {what}")
    if head.startswith(b"MZ") and len(head) >= 64:
        at = int.from_bytes(head[60:64], "little")
        if head[at : at + 2] in (b"PE", b"NE") or (at > len(head) and at < size):
            return Code("warning", "is an executable or library (Windows)")
    match = _PROGRAM.search(name)
    if match is None or not size:
        return None
    if match[1].lower() == "pth":  # also an ending of weights; Python runs such a file in a folder of packages
        text = re.match(rb"\s*import[ \t]", head) is not None
        return (
            Code("warning", "is a path file of Python, with an import that Python runs as it starts") if text else None
        )
    if name.rpartition("/")[2] == "zero_to_fp32.py":
        return Code("note", "is a script that DeepSpeed writes")
    kind = {"py": "Python code", "ipynb": "a notebook"}.get(match[1].lower(), "a program")
    return Code("note", f"is {kind}, which programs run only if they are told to")


def in_hdf5(data: bytes) -> Code | None:
    """Return a finding if the start of an HDF5 file describes a Keras model with a Lambda layer."""
    found = _H5_LAMBDA.search(data)
    return Code("warning", "holds a Lambda layer of Keras, whose code runs when the model is loaded") if found else None


def in_json(name: str, data: bytes) -> Iterator[Code]:
    """Yield the code that a configuration holds or names: Lambda layers and functions of Keras, ``auto_map`` of
    transformers, templates that reach Python's attributes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    left = [document]
    for _ in range(_NODES):
        if not left:
            return
        value = left.pop()
        if isinstance(value, dict):
            yield from _in_object(value)
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and value.startswith("{") and '"class_name"' in value:
            left += _decoded(value)  # Keras nests JSON in texts


def _decoded(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []


def _in_object(value: Mapping[str, Any]) -> Iterator[Code]:
    kind, module, config = value.get("class_name"), value.get("module"), value.get("config")
    if kind in ("Lambda", "__lambda__"):
        yield Code("warning", "holds a Lambda layer of Keras, whose code runs when the model is loaded")
    elif isinstance(kind, str) and isinstance(module, str) and not module.startswith("keras"):
        name = config if kind == "function" and isinstance(config, str) else kind
        verdict = judge(module, name)
        if verdict.grade == "dangerous":
            what = printable(f"{module}.{name}"[:200])
            yield Code("error", f"names {what} as an object of Keras ({verdict.why})")
    named = value.get("auto_map")
    if isinstance(named, dict) and named:
        texts = [str(one) for one in named.values()]
        yield Code("warning", f"names code that trust_remote_code=True runs: {some(map(printable, texts))}")
    template = value.get("chat_template")
    for one in template if isinstance(template, list) else [template]:
        text = one.get("template") if isinstance(one, dict) else one
        if isinstance(text, str) and (match := _TEMPLATE.search(text)) is not None:
            yield Code("warning", f"has a chat template with {match[0]!r}, which no template needs")
