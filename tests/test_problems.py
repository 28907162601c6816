"""Problems: strings with a code and a path, and the table of codes."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt import Problem
from lazyckpt.core.index import Index
from lazyckpt.errors import PROBLEM_CODES, CorruptError, MissingFileError, and_more, cannot_read, only_one, some
from lazyckpt.inspect.codes import FINDING_CODES

ROOT = Path(__file__).parents[1]
LOST = Problem("missing-file", "rank 1: b.pt is missing", "b.pt")


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), lambda p: p])
def test_a_problem_is_its_sentence_with_a_code_and_a_path(make: object) -> None:
    problem = make(LOST)  # type: ignore[operator]
    assert type(problem) is Problem
    assert (problem.code, problem.message, problem.path) == ("missing-file", "rank 1: b.pt is missing", "b.pt")
    assert repr(problem) == "Problem('missing-file', 'rank 1: b.pt is missing', path='b.pt')"


def test_code_that_takes_problems_for_strings_works() -> None:
    assert LOST == "rank 1: b.pt is missing" and "missing" in LOST and LOST.startswith("rank 1")
    assert f"{LOST}; {LOST!s}" == "; ".join([LOST, LOST])
    assert json.loads(json.dumps([LOST])) == ["rank 1: b.pt is missing"]
    assert {LOST, str(LOST)} == {"rank 1: b.pt is missing"}


def test_a_problem_has_no_control_characters() -> None:
    assert Problem("missing-file", "a\x1b[31m\nb") == "a\\x1b[31m\\nb"
    assert Problem("missing-file", "a", "a\nb").path == "a\nb"


def test_a_prefix_keeps_code_and_path() -> None:
    late = LOST.prefixed("at step 7", "checkpoint-7")
    assert (late.code, late, late.path) == ("missing-file", "at step 7: rank 1: b.pt is missing", "b.pt")
    assert Problem("missing-file", "lost").prefixed("x.pt", "x.pt").path == "x.pt"


def test_the_problem_of_an_error() -> None:
    assert cannot_read("a.pt", CorruptError("cut off")).code == "unreadable-file"
    lost = cannot_read("a.pt", MissingFileError("gone"), ", its tensors are lost")
    assert (lost.code, lost) == ("missing-file", "a.pt cannot be read, its tensors are lost: gone")


def test_readers_of_other_packages_may_give_plain_sentences() -> None:
    index = Index("theirs", {"weights": {}}, {}, problems=("it is odd", LOST))  # type: ignore[arg-type]
    assert [(p.code, p) for p in index.problems] == [("reader-note", "it is odd"), ("missing-file", LOST)]


def test_a_view_has_problems(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "x.pt")
    (problem,) = lazyckpt.open(tmp_path / "x.pt", rules={"y": "row"}).problems
    assert type(problem) is Problem and problem.code == "unused-rule"


def test_lists_are_shortened_in_one_way() -> None:
    assert some(["a"]) == "a" and some([]) == ""
    assert some((f"n{i}" for i in range(1234)), 2) == "n0, n1 and 1,232 more"
    assert some(["x" * 90, "y"]) == "x" * 80 + "..., y"
    assert and_more(0) == "" and and_more(1, "files") == "... and 1 more files"
    assert only_one(["a"]) == "a" and only_one(["a", "b"]) is None


# -- the table of codes


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """All that the package's modules say, by file, as far as they make problems or look at codes."""
    paths = sorted((ROOT / "lazyckpt").rglob("*.py"))
    texts = {path: path.read_text("utf-8") for path in paths}
    makers = re.compile(r"\b(Problem|grouped|code)\b")  # modules without these words are not parsed, which takes long
    return {path: list(ast.walk(ast.parse(text))) for path, text in texts.items() if makers.search(text)}


def in_the_package() -> Iterator[tuple[str, str | None]]:
    """(place, code) of every problem that the package makes; None for a code that is no literal."""
    for path, said in nodes().items():
        makers = {"Problem", "grouped"} if path.name == "errors.py" else {"Problem"}
        for node in said:  # core/expr.py has another function `grouped`
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("errors"):
                makers |= {"grouped"} & {one.name for one in node.names}
        for node in said:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
                code, where = node.args[0], f"{path.relative_to(ROOT)}:{node.lineno}"
                passed_on = isinstance(code, ast.Attribute) and code.attr == "code"
                if not passed_on:
                    yield where, code.value if isinstance(code, ast.Constant) else None


def compared() -> Iterator[str]:
    """The texts with which the package compares the code of a problem."""
    for said in nodes().values():
        for node in said:
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "code":
                yield from (c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str))


@pytest.mark.slow
def test_every_code_is_in_the_table_and_in_use() -> None:
    used = dict(in_the_package())
    unknown = {where: code for where, code in used.items() if code is not None and code not in PROBLEM_CODES}
    assert unknown == {}
    computed = {where.split(":")[0] for where, code in used.items() if code is None}
    assert computed == {"lazyckpt/errors.py", "lazyckpt/formats/shared/paths.py"}  # `cannot_read` and `grouped`
    assert set(PROBLEM_CODES) == {code for code in used.values() if code}
    assert set(compared()) <= set(PROBLEM_CODES) | set(FINDING_CODES)


def test_codes_are_words_with_hyphens() -> None:
    assert [code for code in PROBLEM_CODES if not re.fullmatch(r"[a-z]+(-[a-z]+)+", code)] == []
    assert 20 <= len(PROBLEM_CODES) <= 60


def test_the_page_has_every_code_with_its_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "problems.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert {code: meaning.replace("`", "") for code, meaning, _ in rows} == PROBLEM_CODES
    assert [code for code, _, _ in rows] == list(PROBLEM_CODES)
