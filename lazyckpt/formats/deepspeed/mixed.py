"""Two saves under one tag whose rank files have different names, so that the later one did not replace the earlier.

ZeRO-3 names its model states otherwise than ZeRO-0 to 2 do, and 16-bit optimizer files have a prefix (`names.py`). What
belongs together is told by the files: ds_config in the model states has the dtype, an optimizer file its stage. If that
leaves both saves whole, the later one is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import LazyckptError
from .building import Building, table
from .files import RankFiles


class _Save(NamedTuple):
    sharded: bool  # ZeRO-3
    prefix: str | None  # of its optimizer files; None if it has none
    written: int  # nanoseconds


def settle(b: Building, files: RankFiles) -> None:
    """Keep the files of one save, and tell of the others."""
    if not (files.model and files.zero_model) and len(files.by_prefix) < 2:
        return
    saves = [s for sharded in (False, True) if (s := _save(b, files, sharded)) is not None]
    if not saves:
        return  # nothing can be read: the reader tells why
    kept = max(saves, key=lambda s: (s.prefix is not None or not files.optim, s.written))
    dropped: list[str] = []
    if kept.sharded:
        dropped += files.model.values()
        files.model = {}
    else:
        dropped += files.zero_model.values()
        files.zero_model = {}
    if kept.prefix is not None:
        dropped += [p for prefix, paths in files.by_prefix.items() if prefix != kept.prefix for p in paths.values()]
        files.optim = files.by_prefix[kept.prefix]
    for path in dropped:
        b.tell(f"{path} belongs to another save under the same tag (another dtype or ZeRO stage): left over, not used")


def _save(b: Building, files: RankFiles, sharded: bool) -> _Save | None:
    """The save that has model states of this kind, and which optimizer files are its."""
    path = files.zero_model.get((0, 0)) if sharded else files.model.get(0)
    if path is None:
        return None
    try:
        file = b.file(path)
        config = table(file, file.root).get("ds_config")
    except LazyckptError:
        return None
    bf16 = config.get("bf16", config.get("bfloat16")) if isinstance(config, dict) else None
    wanted = "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") is True else ""
    order = sorted(files.by_prefix, key=lambda prefix: prefix != wanted)
    prefix = next((p for p in order if _sharded(b, next(iter(files.by_prefix[p].values()))) is sharded), None)
    return _Save(sharded, prefix, file.info.mtime_ns)


def _sharded(b: Building, path: str) -> bool | None:
    """Whether an optimizer file is one of ZeRO-3 (stage3.py `_rigid_state_dict`); None if it cannot be read."""
    try:
        file = b.file(path)
        state: dict[Any, Any] = table(file, table(file, file.root).get("optimizer_state_dict"))
    except LazyckptError:
        return None
    return "fp32_flat_groups" in state
