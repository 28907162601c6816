"""Merge rules in a TOML file, for the command line: a table ``[rules]`` with what `open(rules={...})` takes.

[rules]
"*.o_proj.weight" = "row"
"*.qkv.weight" = { cat = 0, parts = [4096, 1024, 1024] }
"*.embed_tokens.weight" = { cat = 0, rows = 50257 }
"layers.*._flat_param" = { flat = { "up.weight" = [64, 32], "up.bias" = [64] } }
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ..errors import FormatError, MissingFileError
from ..layouts.merge import user_rules


def read_rules(path: str | Path) -> dict[str, Any]:
    """The rules in a TOML file: glob of the logical name -> rule (see `lazyckpt.layouts.merge.user_rules`).

    Raises MissingFileError; FormatError if it is no TOML, has no such table, or has a rule that is none.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file (it should hold merge rules: --rules)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise FormatError(f"{path} is no TOML: {e}") from None
    rules = table.get("rules")
    if not isinstance(rules, dict) or len(table) > 1:
        raise FormatError(
            f"{path} has {', '.join(f'[{k}]' for k in table) or 'nothing in it'}: it should have one table [rules], "
            "of pattern = rule"
        )
    try:
        user_rules(rules)
    except FormatError as e:
        raise FormatError(f"{path}: {e}") from None
    return rules
