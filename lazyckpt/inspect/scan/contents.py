"""What one file holds that a program could unpickle or run: every pickle in it, by content, however deep.

Nothing is trusted to be what its name says. A pickle, an archive or a compressed file is recognised by its bytes, in
files, in members of archives, and in the constants of pickles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import printable
from ...io.containers.datastates import is_datastates, pickle_in
from ...io.containers.pickle.audit import Verdict, judge
from ...io.containers.pickle.techniques import EXTENSION
from ...io.containers.pickle.trace import Bytes, Held, Named, Trace, trace
from ...io.limits import Budget
from ..codes import Severity
from ..report import Finding
from . import code
from .archives import Member, is_archive, is_tar, is_zip, part, stream_of, tar_members, zip_members, zips

_HEAD = 512
_DEEPEST = 8  # archives and pickles in each other
_PARTS = 1 << 16  # members and constants of one file that are looked at
_PROBE = 64 << 10  # bytes of a file that is not known to be a pickle that are tried as one
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle of a legacy torch file: its magic number
_LEGACY_PICKLES = 5
_NAMES = re.compile(
    r"\.(pkl|pickle|pt|pth|bin|ckpt|distcp|joblib|dill|metadata|p|pck|dat|data|sav)$|(^|/)pickle$", re.I
)
_OTHERS = re.compile(
    r"\.(safetensors|json|txt|md|gguf|ya?ml|csv|tsv|png|jpe?g|gif|svg|html?|toml|ini|cfg|model|onnx|log|xml|parquet|arrow)$",
    re.I,
)
_WORD = re.compile(r"[A-Za-z_][\w.<>]*")


@dataclass
class Contents:
    """What a file holds.

    Attributes
    ----------
    file
        Its name.
    findings
        What was found, but for the names that are not dangerous.
    names
        (Module and name) -> their grade, and whether a pickle calls them.
    pickles
        The number of pickles.
    """

    file: str
    findings: list[Finding] = field(default_factory=list)
    names: dict[Named, tuple[Verdict, bool]] = field(default_factory=dict)
    pickles: int = 0

    def add(self, kind: str, place: str, what: str, severity: Severity | None = None, **details: Any) -> None:
        self.findings.append(
            Finding(kind, f"{_place(self.file, place)} {what}", self.file, severity=severity, details=details)
        )


def _place(file: str, inner: str) -> str:
    return printable(file) + (f" ({printable(inner)})" if inner else "")


def examine_file(file: Bytes, name: str) -> Contents:
    """Return what a file holds.

    Parameters
    ----------
    file
        Its bytes.
    name
        Its name, for the findings.

    Raises
    ------
    LazyckptError
        What reading the file raises.
    """
    examiner = _Examiner(name, file.size)
    examiner.look(file, "", 0)
    return examiner.contents


class _Examiner:
    """The examination of one file: what was found, and what it may still cost."""

    def __init__(self, name: str, size: int) -> None:
        self.contents = Contents(name)
        self._budget = Budget(name, size)
        self._parts = _PARTS

    def look(self, file: Bytes, inner: str, depth: int, unpickled: bool = False) -> None:
        """Look at bytes that are a file, a member of an archive or a constant of a pickle; ``inner`` is its name.
        ``unpickled`` says that a pickle has them unpickled, so that they are one whatever they look like."""
        contents = self.contents
        self._parts -= 1
        if not file.size or self._parts < 0 or depth > _DEEPEST:
            if file.size:
                contents.add("not-examined", inner, "holds more, or deeper, parts than are examined", "warning")
            return
        head = file.at(0, min(_HEAD, file.size))
        name = inner or contents.file
        kind = ""
        if unpickled and not head.startswith(b"PK\x03\x04"):
            self._row(file, inner, depth)
            kind = "a pickle"
        elif not is_archive(head) and self._pickles(file, head, inner, name, depth):
            kind = "a pickle"
        if is_datastates(file, head):
            begin = pickle_in(file, head, name)
            self._row(part(file, begin, file.size - begin), inner, depth)
            kind = "a file with a pickle"
        if head.startswith(b"\x93NUMPY"):
            kind = "an array"
            self._array(file, head, inner)
        elif head.startswith(b"\x89HDF"):
            if (found := code.in_hdf5(file.at(0, min(1 << 20, file.size)))) is not None:
                contents.add("shipped-code", inner, found.what, found.severity)
        elif (found := code.program(name, head, file.size)) is not None:
            kind = kind or "a program"
            contents.add("shipped-code", inner, found.what, found.severity)
        if is_tar(head):
            self._members(tar_members(file), inner, depth, "tar")
        elif is_zip(file, head) or (name.endswith(".distcp") and not is_archive(head)):
            if kind:
                contents.add("unusual-pickle", inner, f"is {kind} and a zip at the same time")
            for one in zips(file):
                self._members(zip_members(one, self._budget), inner, depth, "zip")
        elif (stream := stream_of(file, head, self._budget)) is not None:
            self._members(iter([stream]), inner, depth, "compressed file")
        if name.lower().endswith((".json", ".jinja", ".jsonl")) and file.size <= code.LARGEST:
            for found in code.in_json(name, file.at(0, file.size)):
                contents.add("shipped-code", inner, found.what, found.severity)

    def _members(self, members: Iterator[Member], inner: str, depth: int, kind: str) -> None:
        names: list[str] = []
        for member in members:
            full = f"{inner}/{member.name}" if inner and member.name else member.name or inner
            if len(names) < 1 << 16:
                names.append(member.name)
            if ".." in member.name.split("/") or member.name.startswith("/"):
                self.contents.add("outside-link", full, f"is a member of a {kind} whose name leads out of the folder")
            if member.why:
                other = kind == "zip" and member.data is None and "compressed" not in member.why
                self.contents.add("unusual-pickle" if other else "not-examined", full, member.why, "warning")
            if member.data is not None:
                self.look(member.data, full or kind, depth + 1)
        ends = [name.split("/", 1)[-1] for name in names]
        if "constants.pkl" in ends and any(end.startswith("code/") for end in ends):
            self.contents.add("shipped-code", inner, "is a TorchScript archive: torch.jit.load runs the code in it")
        elif any(end.startswith(".data/extern_modules") for end in ends):
            self.contents.add("shipped-code", inner, "is a torch.package: its importer runs the code in it")
        elif "archive_format" in ends or "serialized_exported_program.json" in ends:
            self.contents.add(
                "shipped-code", inner, "is a program of torch.export: loaders may run compiled code in it"
            )

    def _array(self, file: Bytes, head: bytes, inner: str) -> None:
        """Look at the pickle in an array of objects (numpy/lib/format.py)."""
        width = 2 if head[6:7] == b"\x01" else 4
        begin = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
        if begin < file.size and _has_objects(file.at(8 + width, max(0, min(begin, file.size) - 8 - width))):
            self._row(part(file, begin, file.size - begin), inner, 0)

    def _pickles(self, file: Bytes, head: bytes, inner: str, name: str, depth: int) -> bool:
        """Look at the pickles that a file begins with; return whether there are any."""
        if head[0] != 0x80 or (len(head) > 1 and head[1] > 5):
            probe = trace(Held(file.at(0, min(_PROBE, file.size))), search=False)
            goes_on = probe.error.endswith(("opcode", "than there are")) and file.size > _PROBE
            if goes_on and not probe.named:  # a long text or row of numbers, perhaps
                probe = trace(file)
                if probe.bombs and not _any_danger(probe):
                    text = "looks like a pickle of more values than are examined; other programs may find names in it"
                    self.contents.add("not-examined", inner, text, "warning")
            if probe.error and not (goes_on and probe.named) and not _any_danger(probe):
                return False
            if not probe.named and not probe.constants and not probe.bombs and not _NAMES.search(name):
                return False
            if not probe.error and probe.end < 4:
                return False
            if not all(_WORD.fullmatch(part) for one in probe.named for part in one) and not _any_danger(probe):
                return False
        elif file.size < 3:
            return False
        first = trace(Held(head), search=False)
        if first.error.startswith("byte 0x") and first.end < 8 and not first.named:
            return False  # bytes that begin like a pickle by chance
        if _OTHERS.search(name) and depth == 0:
            self.contents.add("unusual-pickle", inner, "is a pickle, which its name does not say")
        self._row(file, inner, depth)
        return True

    def _row(self, file: Bytes, inner: str, depth: int) -> None:
        """Look at pickles that follow each other."""
        legacy = file.at(0, min(len(_LEGACY), file.size)) == _LEGACY
        at = 0
        for n in range(_PARTS):
            self._parts -= 1
            if self._parts < 0:
                self.contents.add("not-examined", inner, "holds more pickles than are examined", "warning")
                break
            found = trace(file, at)
            if n and found.error and not _any_danger(found):
                break
            self._judge(found, file, inner, depth, n)
            if n == 1 and not legacy and _any_danger(found):
                self.contents.add("unusual-pickle", inner, "has a pickle behind the end of the first")
            at = found.end
            if found.error or at >= file.size or (legacy and n == _LEGACY_PICKLES - 1):
                break
            if inner.endswith("data.pkl"):
                self.contents.add("unusual-pickle", inner, f"has {file.size - at:,} bytes behind the end of its pickle")

    def _judge(self, found: Trace, file: Bytes, inner: str, depth: int, number: int) -> None:
        """Report the names and the oddities of a pickle, and look at its constants."""
        contents = self.contents
        contents.pickles += 1
        for named, called in found.named.items():
            verdict = Verdict("plain") if named in found.allowed else judge(*named)
            self._name(named, verdict, called, inner)
        for named in found.hidden:
            verdict = judge(*named)
            if verdict.grade == "dangerous":
                self._name(named, verdict, True, inner)
        for text in dict.fromkeys(found.odd):
            severity: Severity = "warning" if text.startswith("declares") else "error"
            contents.add("dangerous-pickle" if severity == "error" else "unusual-pickle", inner, text, severity)
        for text in found.bombs:
            contents.add("pickle-bomb", inner, text)
        if found.error and (number == 0 or found.named):
            contents.add(
                "not-examined", inner, f"breaks off at byte {found.end:,}: {found.error}. The names until there, and "
                "those found behind it, are judged", "warning",
            )  # fmt: skip
        for constant in found.constants:
            data = Held(constant.data) if constant.data is not None else part(file, constant.offset, constant.size)
            place = f"{inner}: bytes at {constant.offset:,}" if inner else f"bytes at {constant.offset:,}"
            self.look(data, place, depth + 1, constant.unpickled)

    def _name(self, named: Named, verdict: Verdict, called: bool, inner: str) -> None:
        names = self.contents.names
        before = names.get(named)
        names[named] = (verdict, called or (before is not None and before[1]))
        if verdict.grade == "dangerous":
            text = printable(f"{named.module}.{named.name}"[:300])
            self.contents.add(
                "dangerous-pickle", inner, f"{'calls' if called else 'names'} {text}: {verdict.why}", "error",
                module=named.module, name=named.name, called=called, technique=verdict.why,
            )  # fmt: skip


def _has_objects(header: bytes) -> bool:
    """Return whether the header of an array may say that its elements are objects, in any way that numpy understands:
    texts in Python's notation, also in pieces."""
    header = header.replace(b"fortran_order", b"")
    letters = re.sub(rb"[^A-Za-z]", b"", header)
    return b"O" in letters or b"object" in letters.lower() or b"\\" in header or b"#" in header


def _any_danger(found: Trace) -> bool:
    """Return whether a pickle names something dangerous; extension codes and persistent ids do not count, since bytes
    that are no pickle seem to have them."""
    names = (one for one in (*found.named, *found.hidden) if _WORD.fullmatch(one.module) and one.module != EXTENSION)
    return any(judge(*one).grade == "dangerous" for one in names)
