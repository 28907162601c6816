"""What `lazyckpt verify` and `lazyckpt scan` report: findings with a code, a severity and advice, and a report of them.

A finding is a `Problem`, and those of `view.problems` are findings as well. `codes.py` says how severe each is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import quote

from ..core.units import human_bytes, plural
from ..errors import Problem, and_more
from ..markup import cell, page, table, tag
from .codes import SEVERITIES, Severity, kind_of

FailOn: TypeAlias = Literal["error", "warning", "note", "never"]

VERSION = 1  # of the JSON document
_LINES = 40  # of a text that is not verbose
_EXAMPLES = 3  # findings of one code that are shown first
# Codes of problems whose path is a file or a folder, unless it is the name of a tensor.
_OF_FILES = {
    "missing-file", "unreadable-file", "left-over-file", "unread-program", "ignored-file", "misnamed-file",
    "oversized-file", "unsafe-pickle", "unpinned-file", "part-of-checkpoint", "unfinished-save", "other-checkpoint",
    "skipped-checkpoint", "step-mismatch", "missing-index", "index-mismatch", "missing-metadata", "unreadable-object",
}  # fmt: skip


class Finding(Problem):
    """A problem with a severity, and with what is known about its place.

    Parameters
    ----------
    code
        A code of docs/reference/problems.md or docs/reference/findings.md.
    message
        What is wrong and where, as one sentence.
    file, tensor
        The affected file, as named in `CheckpointView.files`, and the affected tensor.
    severity
        "error", "warning" or "note". By default that of the code.
    todo
        What to do. By default the advice for the code.
    details
        Further facts for programs, as plain objects for JSON: ranks, rows, names of globals.
    """

    __slots__ = ("details", "file", "severity", "tensor", "todo")

    severity: Severity
    file: str | None
    tensor: str | None
    todo: str
    details: dict[str, Any]

    def __new__(
        cls,
        code: str,
        message: str,
        file: str | None = None,
        tensor: str | None = None,
        severity: Severity | None = None,
        todo: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Finding:
        kind = kind_of(code)
        found = cast("Finding", super().__new__(cls, code, message, file if file is not None else tensor))
        found.file, found.tensor = file, tensor
        found.severity = kind.severity if severity is None else severity
        found.todo = kind.todo if todo is None else todo
        found.details = dict(details or {})
        return found

    @staticmethod
    def of(problem: Problem, files: Container[str], tensors: Container[str] = ()) -> Finding:
        """Return a problem of a view as a finding.

        Parameters
        ----------
        problem
            One of `CheckpointView.problems`.
        files, tensors
            The files and the names of the view. A path that is neither is a file, such as a missing one, if the code
            is about files; otherwise it is a tensor.

        Returns
        -------
        Finding
            With the severity of the problem's code.
        """
        if isinstance(problem, Finding):
            return problem
        path = problem.path
        named = path is not None and path not in tensors and (path in files or problem.code in _OF_FILES)
        return Finding(problem.code, str(problem), *((path, None) if named else (None, path)))

    def prefixed(self, prefix: str, path: str | None = None) -> Finding:
        text = str(self) if self.startswith(f"{prefix}: ") else f"{prefix}: {self}"
        return Finding(self.code, text, self.file or path, self.tensor, self.severity, self.todo, self.details)

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain objects for JSON."""
        return {
            "code": self.code, "severity": self.severity, "message": str(self), "file": self.file,
            "tensor": self.tensor, "todo": self.todo, "details": self.details,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Finding({self.code!r}, {self.severity!r}, {str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Finding, (self.code, str(self), self.file, self.tensor, self.severity, self.todo, self.details)


@dataclass(frozen=True, slots=True, repr=False)
class Report(Sequence[Finding]):
    """The findings of `lazyckpt.verify` or `lazyckpt.scan`: a sequence of `Finding`s, the worst first.

    A report is true if there are findings. ``pandas.DataFrame(report.as_dicts())`` is a table of them.

    Attributes
    ----------
    path
        What was examined.
    tool
        "verify" or "scan".
    findings
        The findings, the worst first.
    facts
        What was examined, as numbers: "files", "tensors", "bytes", "seconds"; and what the tool adds.
    """

    path: str
    tool: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(path: str, tool: str, findings: Iterable[Finding], facts: Mapping[str, Any]) -> Report:
        """Return a report of findings.

        Parameters
        ----------
        path, tool, facts
            The attributes of the report.
        findings
            In any order; equal ones are reported once.

        Returns
        -------
        Report
            The worst findings come first.
        """
        once: dict[Any, Finding] = {}
        for f in findings:
            once.setdefault((f.code, str(f), f.file, f.tensor), f)
        return Report(path, tool, tuple(sorted(once.values(), key=lambda f: SEVERITIES.index(f.severity))), facts)

    @staticmethod
    def joined(path: str, reports: Mapping[str, Report]) -> Report:
        """Return the report of several checkpoints, such as those of a run.

        Parameters
        ----------
        path
            What was examined.
        reports
            Name of the checkpoint -> its report.

        Returns
        -------
        Report
            Findings begin with the name of their checkpoint. Their files are relative to ``path``.
        """
        findings = []
        for name, report in reports.items():
            inner = report.path.removeprefix(path).strip("/") if report.path.startswith(path) else ""
            for f in report.findings:
                file = f"{inner}/{f.file}" if inner and f.file is not None else f.file
                findings.append(Finding(f.code, f"{name}: {f}", file, f.tensor, f.severity, f.todo, f.details))
        facts: Counter[str] = Counter()
        for report in reports.values():
            facts.update({key: value for key, value in report.facts.items() if isinstance(value, int | float)})
        parts = {name: report.summary for name, report in reports.items()}
        tool = next((report.tool for report in reports.values()), "verify")
        return Report.of(path, tool, findings, {**facts, "checkpoints": parts})

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return self.worst in (None, "note")

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding; None if there is none."""
        return self.findings[0].severity if self.findings else None

    @property
    def counts(self) -> dict[str, int]:
        """The number of errors, warnings and notes."""
        found = Counter(f.severity for f in self.findings)
        return {severity: found[severity] for severity in SEVERITIES}

    def exit_code(self, fail_on: FailOn = "error") -> int:
        """Return the exit code of the command.

        Parameters
        ----------
        fail_on
            "error", "warning", "note", or "never".

        Returns
        -------
        int
            1 if a finding is at least as severe as ``fail_on``, else 0.
        """
        if fail_on == "never" or self.worst is None:
            return 0
        return int(SEVERITIES.index(self.worst) <= SEVERITIES.index(fail_on))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the findings as plain objects."""
        return [f.as_dict() for f in self.findings]

    def to_json(self) -> str:
        """Return the report as JSON: version, tool, path, facts, counts, and the findings."""
        about = {
            "lazyckpt_report": VERSION, "tool": self.tool, "path": self.path, "ok": self.ok, "counts": self.counts,
            "facts": dict(self.facts), "findings": self.as_dicts(),
        }  # fmt: skip
        return json.dumps(about, indent=1) + "\n"

    def to_sarif(self) -> str:
        """Return the report in SARIF 2.1.0, for code scanning services. Source: OASIS SARIF 2.1.0, section 3."""
        from importlib.metadata import version

        codes = list(dict.fromkeys(f.code for f in self.findings))
        rules = [
            {
                "id": code,
                "shortDescription": {"text": kind_of(code).meaning or code},
                "help": {"text": kind_of(code).todo or "See the message."},
                "defaultConfiguration": {"level": kind_of(code).severity},
            }
            for code in codes
        ]
        results = [_result(f, codes.index(f.code)) for f in self.findings]
        driver = {"name": f"lazyckpt {self.tool}", "version": version("lazyckpt"), "rules": rules}
        run = {
            "tool": {"driver": driver}, "results": results, "properties": {"path": self.path},
            "originalUriBaseIds": {_BASE: {"uri": _base_of(self.path)}}, "columnKind": "unicodeCodePoints",
        }  # fmt: skip
        about = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
        return json.dumps(about, indent=1) + "\n"

    @property
    def summary(self) -> str:
        """One line: how many findings, and what was examined."""
        counted = [plural(count, severity) for severity, count in self.counts.items() if count]
        found = ", ".join(counted) if counted else "no problems found"
        facts = self.facts
        parts = ("files", "pickles", "tensors")
        seen = [plural(facts[what], what.removesuffix("s")) for what in parts if what in facts]
        seen += [f"{human_bytes(facts['bytes'])} read"] if "bytes" in facts else []
        seen += [f"{facts['seconds']:.1f} s"] if "seconds" in facts else []
        return f"{found} ({', '.join(seen)})" if seen else found

    def to_text(self, verbose: bool = False) -> str:
        """Return the findings as text, grouped by code, the worst first.

        Parameters
        ----------
        verbose
            Show every finding. By default at most 40 lines.

        Returns
        -------
        str
            Several lines of text.
        """
        return "\n".join("".join(text for text, _ in line) for line in self.lines(verbose))

    def lines(self, verbose: bool = False) -> list[list[tuple[str, str]]]:
        """Return the lines of `to_text` with styles.

        Parameters
        ----------
        verbose
            Show every finding.

        Returns
        -------
        list
            For each line the pieces of (text, style of rich).
        """
        path = self.path.rstrip("/") or self.path
        found: list[list[tuple[str, str]]] = [[(f"{path}: ", "bold"), (self.summary, _STYLES[self.worst])]]
        for name, line in (self.facts.get("checkpoints") or {}).items():
            found.append([(f"  {name}: {line}", "")])
        groups: dict[tuple[Severity, str], list[Finding]] = {}
        for one in self.findings:
            groups.setdefault((one.severity, one.code), []).append(one)
        room = _LINES - len(found)
        for n, ((severity, code), group) in enumerate(groups.items()):
            left = len(groups) - n - 1  # every code gets a line at least, while there is room
            most = len(group) if verbose else max(1, min(_EXAMPLES, room - 2 - 2 * left))
            block = [[(f"{severity} ", _STYLES[severity]), (code, "bold")]]
            block[0] += [(f" ({len(group):,})", "")] if len(group) > 1 else []
            block += [[("  " + str(one), "")] for one in group[:most]]
            more = and_more(len(group) - most, "(--verbose shows them)", "  and ")
            block += [[(more, "dim")]] if more else []
            todo = list(dict.fromkeys(one.todo for one in group if one.todo))
            block += [[(f"  -> {todo[0]}", "dim")]] if todo else []
            if not verbose and len(block) > room:
                rest = sum(len(g) for g in list(groups.values())[n:])
                found.append([(and_more(rest, "findings (--verbose shows them)"), "dim")])
                break
            found += block
            room -= len(block)
        return found

    def __getitem__(self, n: Any) -> Any:
        return self.findings[n]

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Report of {self.tool}: {self.summary}>\n{self.to_text()}"

    def _repr_html_(self) -> str:
        """Return the report as HTML for Jupyter: a table of the findings."""
        rows = [
            [
                cell(
                    tag(
                        "b",
                        f.severity,
                        "bad" if f.severity == "error" else "warning" if f.severity == "warning" else "dim",
                    ),
                    "l",
                ),
                cell(tag("code", escape(f.code)), "l"),
                cell(f"{escape(str(f))}<br>{tag('span', escape(f.todo), 'dim')}", "w"),
            ]
            for f in self.findings[:_SHOWN]
        ]
        more = tag("div", and_more(len(self.findings) - _SHOWN, "findings"), "note") if len(self) > _SHOWN else ""
        head = tag("div", f"{tag('b', escape(self.path))}: {escape(self.summary)}", "head")
        titles = [("severity", "l"), ("code", "l"), ("finding, and what to do", "l")]
        return page([head, table(titles, rows) if rows else "", more])


_SHOWN = 200  # findings in the HTML output
_STYLES: dict[Severity | None, str] = {"error": "bold red", "warning": "yellow", "note": "cyan", None: "green"}


_BASE = "CHECKPOINT"  # what URIs of files are relative to
_PLACES = 10  # files of a finding that SARIF lists


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    """Return a finding as a result of SARIF. Its fingerprint stays while its sentence changes."""
    properties = {"todo": finding.todo, **({"tensor": finding.tensor} if finding.tensor else {}), **finding.details}
    named = "\0".join((finding.code, finding.file or "", finding.tensor or ""))
    files = [finding.file] if finding.file is not None else finding.details.get("files") or ["."]
    places: list[dict[str, Any]] = [
        {"physicalLocation": {"artifactLocation": {"uri": quote(str(file)), "uriBaseId": _BASE}}}
        for file in files[:_PLACES]
    ]
    if finding.tensor is not None:
        places[0]["logicalLocations"] = [{"fullyQualifiedName": finding.tensor, "kind": "member"}]
    return {
        "ruleId": finding.code, "ruleIndex": rule, "level": finding.severity, "message": {"text": str(finding)},
        "locations": places, "partialFingerprints": {"lazyckpt/v1": hashlib.sha256(named.encode()).hexdigest()},
        "properties": properties,
    }  # fmt: skip


def _base_of(path: str) -> str:
    """Return the URI of the folder that the names of files are relative to."""
    if "://" in path:
        return quote(path.rstrip("/"), safe=":/?&=") + "/"
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return PurePath(os.path.abspath(folder)).as_uri() + "/"
