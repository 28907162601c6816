"""A table of names in a TOML or JSON file, for the command line: what `CheckpointView.rename` takes.

extends = "llama"
"decoder.layers.{l}.mlp.linear_fc2.{p}" = "model.layers.{l}.mlp.down_proj.{p}"
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from ...errors import FormatError, MissingFileError
from .table import table

ENDINGS = (".toml", ".json")


def read_table(path: str) -> dict[str, Any]:
    """The table in a file. Raises MissingFileError; FormatError for what is no table of names."""
    kind = "JSON" if path.endswith(".json") else "TOML"
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file (it should hold a table of names)") from None
    except (ValueError, RecursionError) as e:  # no such syntax, or no UTF-8
        raise FormatError(f"{path} is no {kind}: {e}") from None
    if not isinstance(found, dict) or not found:
        raise FormatError(f'{path} holds no table of names: NAME = "OTHER NAME"')
    try:
        table(found)
    except FormatError as e:
        raise FormatError(f"{path}: {e}") from None
    return found
