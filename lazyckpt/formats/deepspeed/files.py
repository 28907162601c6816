"""Which files a DeepSpeed checkpoint consists of: tags, and what rank a file name speaks of.

Names: deepspeed/runtime/engine.py `_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`. The "pp_rank" in a
ZeRO file's name is the data-parallel rank (a historic name); the prefix bf16_ or fp16_ says nothing about the layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...core.names import natural
from ...errors import CorruptError, FormatError, MissingFileError
from ...io.store import Store
from ..reader import Source

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(slots=True)
class RankFiles:
    """The rank files of one tag, as paths. Keys: mp rank; (dp rank, mp rank)."""

    folder: str
    model: dict[int, str] = field(default_factory=dict)
    zero_model: dict[tuple[int, int], str] = field(default_factory=dict)
    optim: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.model or self.zero_model or self.optim or self.layers)


def rank_files(folder: str, names: Iterable[str]) -> RankFiles:
    """Sort the names in a folder by what they are; anything else is passed over."""
    files = RankFiles(folder)
    for name in sorted(names, key=natural):
        path = f"{folder}/{name}" if folder else name
        if m := _MODEL.fullmatch(name):
            files.model[int(m[1])] = path
        elif m := _ZERO_MODEL.fullmatch(name):
            files.zero_model[int(m[1]), int(m[2])] = path
        elif m := _OPTIM.fullmatch(name):
            files.optim[int(m[1]), int(m[2])] = path
        elif _LAYER.fullmatch(name):
            files.layers.append(path)
        elif _EXPERT.fullmatch(name) or _EXPERT_OPTIM.fullmatch(name):
            files.experts.append(path)
    return files


def find_folder(source: Source, strict: bool = True) -> RankFiles | None:
    """The rank files of the tag to read: the folder itself if it holds them, else the tag that was asked for, else what
    ``latest`` names, else the only one there is.

    None if this is no DeepSpeed folder. With ``strict``, raises MissingFileError or FormatError where there is no such
    tag, or several and no word which; without, None means just that it is not DeepSpeed's.
    """
    store = source.store
    here = rank_files("", source.entries)
    if here and source.tag is None:
        return here
    latest = _latest(store, strict) if "latest" in source.entries else None
    tag = source.tag or latest
    if tag is not None and tag in source.entries:
        found = rank_files(tag, store.list(tag))
        if found:
            return found
    if tag is not None and not strict and latest is None:
        return here or None
    tags = [n for n, e in source.entries.items() if e.is_dir and rank_files(n, store.list(n))]
    if tag is None and len(tags) == 1:
        return rank_files(tags[0], store.list(tags[0]))
    if not tags and latest is None and source.tag is None:
        return None
    if not strict:
        return here or RankFiles("?")
    listed = ", ".join(sorted(tags, key=natural)) or "none"
    if tag is None:
        raise FormatError(
            f"{source.where} holds several checkpoints and no file `latest`: say which with tag=..., of {listed}"
        )
    raise MissingFileError(
        f"{source.where}: the tag {tag!r} ({'as asked' if source.tag else 'from the file latest'}) has no rank files "
        f"here; there are: {listed}. Say which with tag=..."
    )


def _latest(store: Store, strict: bool) -> str | None:
    """The tag that the file ``latest`` names (engine.py `save_checkpoint`: text, no newline)."""
    size = store.stat("latest").size
    if not 0 < size < 4096:
        if strict:
            raise CorruptError(f"{store.root}/latest has {size:,} bytes, no name of a tag: say which with tag=...")
        return None
    tag = bytes(store.read("latest", 0, size)).decode("utf-8", "replace").strip()
    if "/" in tag or "\\" in tag or tag in ("", ".", ".."):
        if strict:
            raise CorruptError(
                f"{store.root}/latest names {tag[:80]!r}, which is no folder inside this one: say tag=..."
            )
        return None
    return tag
