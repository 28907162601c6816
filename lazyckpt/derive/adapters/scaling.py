"""By how much the product of an adapter's matrices is multiplied: alpha and rank, per module."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite, sqrt
from typing import Any

from ...errors import DataError, FormatError

_METHODS = ("LORA", "LOHA", "LOKR")
# Settings that change what the adapter's tensors mean -> what to say
_REFUSED = {
    "layer_replication": "repeats layers of the base: apply the adapter to base.layers(...), with the setting removed",
    "trainable_token_indices": "trains single rows of the embedding, which is not supported",
    "use_qalora": "pools the inputs (QA-LoRA), which is not supported",
    "kasa_config": "changes the base by a singular value decomposition, which is not supported",
    "velora_config": "is not supported",
    "monteclora_config": "is not supported",
    "use_bdlora": "makes block-diagonal matrices, which is not supported",
    "alora_invocation_tokens": "adds the adapter only after certain tokens (aLoRA), so that it cannot be merged",
    "arrow_config": "routes between adapters, which cannot be merged",
}
_CHANGED = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initialisations that subtract the adapter from the base


class Settings:
    """The settings of an adapter: PEFT's adapter_config.json, or what diffusers keeps of it in the metadata.

    Parameters
    ----------
    config
        The content of adapter_config.json. None: there is none.
    meta
        The metadata of the adapter's checkpoint.
    where
        Where the adapter is, for errors.

    Raises
    ------
    DataError
        The adapter is of another method, or has settings that are not supported.
    FormatError
        The configuration is no table, or has no numbers where they are due.
    """

    def __init__(self, config: Mapping[str, Any] | None, meta: Mapping[str, Any], where: str) -> None:
        self.where = where
        if config is not None and not isinstance(config, Mapping):
            raise FormatError(f"{where}: the adapter's configuration is {config!r:.60}, not a table")
        self._tables: Mapping[str, Mapping[str, Any]] = {} if config is None else {"": config}
        if config is None and "lora_adapter_metadata" in meta:
            self._tables = _of_diffusers(meta["lora_adapter_metadata"], where)
        for table in self._tables.values():
            _check(table, where)

    def of(self, name: str) -> Mapping[str, Any]:
        """Return the settings for a module; empty if there are none."""
        for prefix, table in self._tables.items():
            if not prefix or name.startswith(f"{prefix}."):
                return table
        return {}

    def rank(self, name: str) -> int | None:
        """Return the rank that the settings give a module."""
        table = self.of(name)
        found = _by_pattern(table.get("rank_pattern"), name, table.get("r"))
        return int(self._number(found, "rank", name)) if found else None

    def alpha(self, name: str) -> float | None:
        """Return the alpha that the settings give a module."""
        table = self.of(name)
        found = _by_pattern(table.get("alpha_pattern"), name, table.get("lora_alpha", table.get("alpha")))
        return None if found is None else self._number(found, "alpha", name)

    def _number(self, value: Any, what: str, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise FormatError(
                f"{self.where}: adapter_config.json gives {name!r} the {what} {value!r:.40}: no finite number"
            )
        return float(value)

    def scale(self, name: str, alpha: float | None, rank: int) -> float:
        """Return the scale of a module: ``alpha / rank``, with rsLoRA ``alpha / sqrt(rank)``, 1 without an alpha.

        ``alpha`` is the number that the adapter's tensors give.
        """
        alpha = self.alpha(name) if alpha is None else alpha
        if alpha is None:
            return 1.0
        return alpha / (sqrt(rank) if self.of(name).get("use_rslora") else rank)


def _by_pattern(patterns: Any, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module (peft/utils/other.py `get_pattern_key`)."""
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            if _matches(str(pattern), name):
                return value
    return default


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error as e:
        raise FormatError(f"adapter_config.json has an invalid pattern {pattern!r}: {e}") from None


def _check(table: Mapping[str, Any], where: str) -> None:
    method = str(table.get("peft_type") or "LORA")
    if method not in _METHODS:
        raise DataError(f"{where} is an adapter of the method {method}: supported are {', '.join(_METHODS)}")
    for key, why in _REFUSED.items():
        if table.get(key):
            raise DataError(f"{where}: the setting {key!r} {why}")
    start = str(table.get("init_lora_weights")).lower()
    if start.startswith(_CHANGED):
        raise DataError(
            f"{where} began with {start!r}, which changes the base's weights before training: let PEFT convert it, by "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def _of_diffusers(text: Any, where: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings for each model of a pipeline from diffusers' ``unet.r``, ``unet.lora_alpha``, ..."""
    try:
        flat = json.loads(text)
        tables: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            prefix, _, setting = key.partition(".")
            tables.setdefault(prefix, {})[setting] = value
    except (TypeError, ValueError, AttributeError) as e:
        raise FormatError(f"{where}: the metadata 'lora_adapter_metadata' is no JSON object: {e}") from None
    return tables
