"""YAML documents: what is read equals PyYAML's safe loader, with libyaml and without; limits."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import yaml

from lazyckpt.errors import CorruptError
from lazyckpt.io.plain_yaml import parse_yaml

from .lanes import rounds

KINDS = [True, False]
TEXTS = [
    "",
    "a",
    "yes",
    "No",
    "~",
    "1",
    "1.5",
    "1e5",
    "0x1f",
    "0o7",
    "010",
    "1:30",
    ".inf",
    "2024-02-03",
    "a: b",
    "- x",
]
TEXTS += [
    "# c",
    "'",
    '"',
    "ä",
    "\u2028",
    "two\nlines",
    " lead",
    "trail ",
    "<<",
    "=",
    "[",
    "{",
    "&a",
    "*a",
    "!t",
    "%",
    "@",
]


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return chance.choice([None, True, False])
    if kind == 1:
        return chance.choice([0, -3, 1 << 70, 10**20])
    if kind == 2:
        return chance.choice([0.5, -1e300, math.inf, 1e-7])
    if kind in (3, 4):
        return chance.choice(TEXTS)
    if kind == 5:
        return chance.choice([b"", b"\0\xff", "x" * 200])
    if kind == 6:
        return [_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice([*TEXTS, 3, 2.5, None]): _value(chance, depth + 1) for _ in range(chance.randrange(5))}


@pytest.mark.parametrize("libyaml", KINDS)
def test_random_documents(libyaml: bool) -> None:
    chance = random.Random(5)
    for _ in range(rounds(60)):
        value, shared = _value(chance), _value(chance)
        value = [value, shared, {"again": shared}]  # the dumper writes anchors and aliases
        options: dict[str, Any] = {
            "default_flow_style": chance.choice([True, False, None]), "allow_unicode": chance.random() < 0.5,
            "width": chance.choice([5, 20, 80]), "indent": chance.choice([2, 4]),
            "explicit_start": chance.random() < 0.5,
            "default_style": chance.choice([None, None, '"', "'", "|", ">"]),
        }  # fmt: skip
        text = yaml.safe_dump(value, **options)
        if options["default_style"] is None and "<<" not in text:
            assert yaml.safe_load(text) == value
        if options["default_style"] in ("'", "|", ">") and "!!" in text:
            continue  # the dumper tags numbers, which is tried in the fuzz target
        assert repr(parse_yaml(text.encode(), "x.yaml", libyaml)) == repr(yaml.safe_load(text))


@pytest.mark.parametrize("libyaml", KINDS)
@pytest.mark.parametrize(
    "text",
    ["[" * 102 + "]" * 102, "- &a " + "[" * 60 + "]" * 60 + "\n- " + "[" * 60 + "*a" + "]" * 60, "&a {b: [*a]}",
     "{1: a, 0x1: b}", "{a: 1, 'a': 2}", "{[1]: 2}", "<<", "[<<]", "*a", "- &a 1\n- &a 2", "--- 1\n--- 2\n",
     "!!int " + "9" * 5000, "!!float x", "2024-99-99", "\x01", "a: b: c", "{a", "!!foo 1"],
)  # fmt: skip
def test_what_is_refused(text: str, libyaml: bool) -> None:
    with pytest.raises(CorruptError):
        parse_yaml(text.encode(), "x.yaml", libyaml)


@pytest.mark.parametrize("libyaml", KINDS)
def test_what_is_read(libyaml: bool) -> None:
    def read(text: str) -> Any:
        return parse_yaml(text.encode(), "x.yaml", libyaml)

    assert read("") is None and read("# only a comment\n") is None and read("--- \n") is None
    assert read("[" * 101 + "]" * 101) == json.loads("[" * 101 + "]" * 101)
    assert read("a: &x b\n*x : 1") == {"a": "b", "b": 1}
    assert read("!own {a: !!python/name:os.system ''}") == {
        "_tag_": "!own", "_value_": {"a": {"_tag_": "python/name:os.system", "_value_": ""}},
    }  # fmt: skip
    assert read("{'<<': 1, <<x: 2}") == {"<<": 1, "<<x": 2}
