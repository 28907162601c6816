"""The patterns of parameter names of all model families, from tables.toml.

The file is parsed on first use, and each pattern is compiled on its first use.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from typing import Any


@functools.cache
def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern with a name in the tables.

    >>> pattern("megatron.down").search("decoder.layers.0.self_attention.linear_q_down_proj.weight")[1]
    'q'
    """
    found = _entry(name)
    if not isinstance(found, str):
        raise KeyError(f"{name} is a list of patterns in tables.toml")
    return re.compile(found)


@functools.cache
def patterns(name: str) -> tuple[re.Pattern[str], ...]:
    """Return the list of patterns with a name in the tables.

    >>> [one.pattern for one in patterns("whole.row")]
    ['\\\\.experts\\\\.\\\\d+\\\\.(down_proj|w2)\\\\.weight$|\\\\.shared_experts?\\\\.down_proj\\\\.weight$']
    """
    found = _entry(name)
    if not isinstance(found, list):
        raise KeyError(f"{name} is one pattern in tables.toml")
    return tuple(map(re.compile, found))


def _entry(name: str) -> Any:
    family, _, which = name.partition(".")
    return read_toml(__package__, "tables.toml")[family][which]


@functools.cache
def read_toml(package: str, name: str) -> dict[str, Any]:
    """Parse a TOML file of package data. The result is cached."""
    import tomllib  # a slow import, and not every checkpoint needs a table

    data = pkgutil.get_data(package, name)  # importlib.resources is a slow import
    assert data is not None
    return tomllib.loads(data.decode())
