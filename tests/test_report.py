"""Reports of findings: their order, texts, JSON, SARIF and exit codes."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import pytest

from lazyckpt import Problem
from lazyckpt.errors import PROBLEM_CODES
from lazyckpt.inspect.codes import FINDING_CODES, SEVERITIES, kind_of
from lazyckpt.inspect.report import Finding, Report

ROOT = Path(__file__).parents[1]
LOST = Finding("missing-file", "b.pt is missing", "b.pt")
NAN = Finding("not-a-number", "w has 3 NaN", "a.pt", "layers.0/w", details={"ranks": [1], "rows": [[0, 3]]})
CLASS = Finding("framework-class", "c.pt names mine.Config", "dir with space/c.pt")


def report(*findings: Finding) -> Report:
    return Report.of("runs/1", "scan", findings, {"files": 3, "bytes": 5 << 20, "seconds": 0.25})


def test_a_finding_is_a_problem_with_a_severity_and_advice() -> None:
    assert isinstance(NAN, Problem) and NAN == "w has 3 NaN" and NAN.path == "a.pt"
    assert (NAN.severity, NAN.file, NAN.tensor) == ("error", "a.pt", "layers.0/w")
    assert NAN.todo == FINDING_CODES["not-a-number"].todo
    mild = Finding("not-a-number", "padding", severity="note", todo="Nothing.")
    assert (mild.severity, mild.todo, mild.file) == ("note", "Nothing.", None)
    for one in (copy.deepcopy(NAN), pickle.loads(pickle.dumps(NAN))):
        assert one.as_dict() == NAN.as_dict()
    assert "\x1b" not in Finding("not-examined", "red\x1b[31m")


def test_problems_of_views_are_findings() -> None:
    problem = Problem("missing-file", "b.pt is missing", "b.pt")
    assert Finding.of(problem, {"b.pt": None}).as_dict() == LOST.as_dict()
    assert Finding.of(Problem("all-zero", "w is zero", "w"), {}).tensor == "w"
    assert Finding.of(NAN, {}) is NAN
    assert kind_of("code-of-a-plug-in").severity == "warning"


def test_the_worst_findings_come_first_and_equal_ones_once() -> None:
    found = report(CLASS, LOST, LOST, NAN)
    assert [f.code for f in found] == ["missing-file", "not-a-number", "framework-class"]
    assert found.counts == {"error": 2, "warning": 0, "note": 1} and found.worst == "error" and not found.ok
    assert report(CLASS).ok and report().ok and report().worst is None and not report()


@pytest.mark.parametrize("level", [*SEVERITIES, "never"])
def test_exit_codes(level: str) -> None:
    codes = [report(f).exit_code(level) for f in (LOST, Finding("shipped-code", "x.py"), CLASS)]  # type: ignore[arg-type]
    assert codes == {"error": [1, 0, 0], "warning": [1, 1, 0], "note": [1, 1, 1], "never": [0, 0, 0]}[level]
    assert report().exit_code(level) == 0  # type: ignore[arg-type]


def test_text_fits_a_screen_and_verbose_shows_all() -> None:
    codes = list(FINDING_CODES)
    many = [Finding(code, f"{code} number {n}", f"{n}.pt") for code in codes for n in range(40)]
    found = report(*many)
    short, long = found.to_text().splitlines(), found.to_text(verbose=True).splitlines()
    assert len(short) <= 41 and len(long) >= len(many)
    assert "more" in found.to_text() and all(str(f) in found.to_text(verbose=True) for f in many[:: len(codes)])
    assert re.search(r"3 files, 5\.0? ?MiB read, 0\.[23] s", short[0]) and short[0].startswith("runs/1: ")
    assert str(found) == found.to_text() and repr(found).startswith("<Report of scan: ")
    assert report().to_text().splitlines() == [f"runs/1: {report().summary}"]


def test_json() -> None:
    document = json.loads(report(NAN, CLASS).to_json())
    assert document["lazyckpt_report"] == 1 and document["tool"] == "scan" and document["ok"] is False
    assert document["counts"] == {"error": 1, "warning": 0, "note": 1}
    assert document["facts"]["files"] == 3
    assert document["findings"][0] == NAN.as_dict()


def test_sarif() -> None:
    """OASIS SARIF 2.1.0: what its schema requires of a log, a run, a rule and a result."""
    log = json.loads(report(NAN, CLASS, LOST).to_sarif())
    assert log["version"] == "2.1.0" and len(log["runs"]) == 1
    run = log["runs"][0]
    driver = run["tool"]["driver"]
    assert driver["name"] == "lazyckpt scan" and driver["version"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids) == 3
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in SEVERITIES
    for result in run["results"]:
        assert result["level"] in SEVERITIES and result["message"]["text"]
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert len(result["partialFingerprints"]["lazyckpt/v1"]) == 64 and result["locations"]
        for place in result["locations"]:
            uri = place["physicalLocation"]["artifactLocation"]["uri"]
            assert " " not in uri and not uri.startswith("/")
            assert place["physicalLocation"]["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
    assert all(base["uri"].endswith("/") and "://" in base["uri"] for base in run["originalUriBaseIds"].values())
    (nan,) = [r for r in run["results"] if r["ruleId"] == "not-a-number"]
    assert nan["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "layers.0/w"
    assert nan["properties"]["ranks"] == [1]


def test_fingerprints_are_of_the_place() -> None:
    same = Finding("not-a-number", "another sentence", NAN.file, NAN.tensor)
    logs = [json.loads(report(f).to_sarif()) for f in (NAN, same, LOST)]
    prints = [log["runs"][0]["results"][0]["partialFingerprints"] for log in logs]
    assert prints[0] == prints[1] != prints[2]


def test_html_has_no_markup_of_files() -> None:
    html = report(Finding("framework-class", "<script>x</script>", "<b>.pt"))._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_reports_of_several_checkpoints_are_joined() -> None:
    both = Report.joined("runs", {"step1": report(NAN), "step2": report()})
    assert [str(f) for f in both] == ["step1: w has 3 NaN"] and both.facts["files"] == 6
    assert both.tool == "scan" and both.facts["checkpoints"]["step2"] == report().summary
    assert "step2" in both.to_text()


def test_the_page_lists_all_codes() -> None:
    page = (ROOT / "docs" / "reference" / "findings.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (error|warning|note) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert {code: (severity, meaning, todo) for code, severity, meaning, todo in rows} == dict(FINDING_CODES)
    assert [code for code, *_ in rows] == list(FINDING_CODES)
    assert not set(FINDING_CODES) & set(PROBLEM_CODES)
