"""Parameters of a merge that differ by tensor: by parts of names, and by layer.

They are evaluated as mergekit does (mergekit 0.1.5: mergekit/config.py `evaluate_setting`, parameter_resolver.py,
plan.py `plan_slice`): of several conditions the first counts that fits the name; a list of numbers is a gradient that
begins at the first layer and ends at the last. Tensors outside of layers have the first value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ..core.names import matcher
from ..errors import DataError

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class Condition:
    """A value for the names that fit.

    Attributes
    ----------
    fits
        Return whether a name fits; None: every name.
    value
        A number, a bool, or a list of them.
    """

    fits: Callable[[str], bool] | None
    value: Any


def by_glob(setting: Any) -> Any:
    """Return a setting of Python, whose mappings have globs of names as keys, as conditions."""
    if isinstance(setting, Mapping):
        return [Condition(matcher(pattern), value) for pattern, value in setting.items()]
    return setting


def by_part(setting: Any, where: str) -> Any:
    """Return a setting of a merge file, ``[{filter: mlp, value: 0.5}, {value: 0.3}]``, as conditions.

    A filter is a part of the name. ``where``: the file, for errors.
    """
    entries = [setting] if isinstance(setting, Mapping) else setting
    if not isinstance(entries, list) or not any(isinstance(one, Mapping) for one in entries):
        return setting
    found = []
    for one in entries:
        if not isinstance(one, Mapping) or "value" not in one or one.keys() - {"value", "filter"}:
            raise DataError(f"{where}: a condition is a table with value and filter, not {one!r:.60}")
        part = one.get("filter")
        found.append(Condition(None if part in (None, "*") else _containing(str(part)), one["value"]))
    return found


def _containing(part: str) -> Callable[[str], bool]:
    return lambda name: part in name


def value_of(setting: Any, name: str, t: float, convert: Callable[[Any], Any]) -> Any:
    """Return the value of a setting for a tensor; None if no condition fits.

    Parameters
    ----------
    setting
        A value, a gradient, or conditions.
    name
        The tensor's name.
    t
        Where its layer is among the layers, from 0 to 1.
    convert
        Return a value of the parameter's type. Raises ValueError or TypeError.
    """
    if isinstance(setting, Condition):
        setting = [setting]
    if not isinstance(setting, list | tuple):
        return convert(setting)
    if not setting:
        return None
    if isinstance(setting[0], Condition):
        for one in setting:
            if one.fits is None or one.fits(name):
                return value_of(one.value, name, t, convert)
        return None
    values = [convert(one) for one in setting]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        return values[int(t * (len(values) - 1))]
    at = t * (len(values) - 1)
    low = int(at)
    part = at - low
    return convert((1 - part) * values[low] + part * values[min(len(values) - 1, low + 1)])


def number(value: Any) -> float:
    """Return a finite number, also of a text such as "1e-3", which YAML takes for a string."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r:.40} is not a number")
    found = float(value)
    if not isfinite(found):
        raise ValueError(f"{value!r:.40} is not finite")
    return found


def share(value: Any) -> float:
    """Return a number from 0 to 1."""
    found = number(value)
    if not 0 <= found <= 1:
        raise ValueError(f"{value!r:.40} is not between 0 and 1")
    return found


def whole_number(value: Any) -> int:
    """Return an integer."""
    found = number(value)
    if found != int(found):
        raise ValueError(f"{value!r:.40} is not a whole number")
    return int(found)


def yes_or_no(value: Any) -> bool:
    """Return a bool; mergekit takes 0 and 1, too."""
    if value in (0, 1):  # True and False are equal to these
        return bool(value)
    raise TypeError(f"{value!r:.40} is neither true nor false")


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the prefix and the number of the layer that a tensor is in: the first number in its name.

    >>> layer_of("model.layers.3.mlp.experts.5.up.weight"), layer_of("model.norm.weight")
    (('model.layers', 3), None)
    """
    found = _LAYER.search(name)
    return None if found is None else (name[: found.start()], int(found[1]))


def depths(names: Iterable[str]) -> Callable[[str], float]:
    """Return a function from a name to where its layer is among the layers of its stack, from 0 to 1."""
    counts: dict[str, int] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None:
            counts[layer[0]] = max(counts.get(layer[0], 0), layer[1] + 1)

    def depth(name: str) -> float:
        layer = layer_of(name)
        if layer is None:
            return 0.0
        count = counts[layer[0]]
        return layer[1] / (count - 1) if count > 1 else 1.0

    return depth


@dataclass(frozen=True)
class Scopes:
    """The settings of a merge, from the one that counts most.

    Attributes
    ----------
    shared
        Tables of parameters of all models together.
    each
        For each model, tables of its own parameters.
    """

    shared: Sequence[Mapping[str, Any]]
    each: Sequence[Sequence[Mapping[str, Any]]]

    def values(self, names: Sequence[str], parameter: str, t: float, convert: Callable[[Any], Any]) -> list[Any]:
        """Return a parameter's value for each model, None where there is none; ``names``: the tensor's name in each."""
        return [_first(tables, parameter, name, t, convert) for tables, name in zip(self.each, names, strict=True)]

    def value(self, name: str, parameter: str, t: float, convert: Callable[[Any], Any]) -> Any:
        """Return the value of a parameter of all models together; None if there is none."""
        return _first(self.shared, parameter, name, t, convert)


def _first(
    tables: Iterable[Mapping[str, Any]], parameter: str, name: str, t: float, convert: Callable[[Any], Any]
) -> Any:
    for table in tables:
        if parameter in table and table[parameter] is not None:
            try:
                found = value_of(table[parameter], name, t, convert)
            except (TypeError, ValueError) as e:
                raise DataError(f"the parameter {parameter!r} of {name!r}: {e}") from None
            if found is not None:
                return found
    return None
