"""The tables of parameter patterns: each pattern is in them once, and nowhere else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from lazyckpt.layouts.tables import pattern, patterns

PACKAGE = Path(__file__).parents[1] / "lazyckpt"
TABLES = tomllib.loads((PACKAGE / "layouts/tables.toml").read_text("utf-8"))
ENTRIES = {f"{family}.{name}": entry for family, table in TABLES.items() for name, entry in table.items()}
MODULES = sorted(path for room in ("layouts", "formats") for path in (PACKAGE / room).rglob("*.py"))
# words of parameter names that are words of file names or of prose as well
_ORDINARY = {
    "d",
    "w",
    "head",
    "layer",
    "layers",
    "model",
    "module",
    "output",
    "tail",
    "out",
    "weight",
    "bias",
    "shard",
    "expert",
}


def words(expression: str) -> set[str]:
    """The parts of parameter names in a regular expression."""
    found = re.findall(r"[a-z][a-z0-9_]*", re.sub(r"\\.|\?P<\w+>|\?i", " ", expression))
    return {word.strip("_") for word in found} - _ORDINARY


def listed(entry: str | list[str]) -> list[str]:
    return [entry] if isinstance(entry, str) else entry


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_compiles(name: str) -> None:
    entry = ENTRIES[name]
    found = [pattern(name)] if isinstance(entry, str) else [*patterns(name)]
    assert [one.pattern for one in found] == listed(entry)


def test_each_pattern_is_in_the_tables_once() -> None:
    counts = Counter(one for entry in ENTRIES.values() for one in listed(entry))
    assert [one for one, count in counts.items() if count > 1] == []


def test_each_entry_is_used() -> None:
    text = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    written = {"whole.": 'f"whole.{which}"', "attention.": 'f"attention.{which}"'}
    unused = [
        name
        for name in ENTRIES
        if f'"{name}"' not in text and not any(name.startswith(k) and v in text for k, v in written.items())
    ]
    assert unused == []


def expressions(path: Path) -> list[str]:
    """The strings of a module that look like regular expressions, docstrings left out."""
    tree = ast.parse(path.read_text("utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    found = (node.value for node in strings if isinstance(node.value, str))
    return [text for text in found if re.search(r"\\[.dwb]|\(\?|\(\^|\.\*", text)]


def test_no_module_has_a_pattern_of_its_own() -> None:
    known = set().union(*(words(one) for entry in ENTRIES.values() for one in listed(entry)))
    own = {(path.relative_to(PACKAGE).as_posix(), text) for path in MODULES for text in expressions(path)}
    assert {one: found for one in own if (found := words(one[1]) & known)} == {}


def test_the_rule_sees_patterns(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Docstring: (.*\\\\.)linear_fc1"""\n_FC1 = (r"\\.linear_fc1\\.", "rank_0")\n')
    assert expressions(module) == [r"\.linear_fc1\."]
    assert words(expressions(module)[0]) == {"linear_fc1"}


@pytest.mark.slow
def test_the_tables_are_read_when_they_are_needed() -> None:
    rooms = (
        "layouts.megatron",
        "layouts.families",
        "layouts.shard",
        "formats.megatron.reader",
        "formats.deepspeed.reader",
    )
    code = f"""
import sys, importlib
for room in {rooms}:
    importlib.import_module("lazyckpt." + room)
assert "tomllib" not in sys.modules
from lazyckpt.layouts.megatron import is_head
assert is_head("output_layer.weight")
assert "tomllib" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, timeout=60)
