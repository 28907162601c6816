"""Which files a DeepSpeed checkpoint consists of: tags, and the rank files in the folder of one (names: `names.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...core.names import natural
from ...errors import CorruptError, FormatError, MissingFileError
from ...io.store import Entry, Store
from ..reader import Source
from .names import RankFile, parse_ckpt_name

K = TypeVar("K")


@dataclass(slots=True)
class RankFiles:
    """The rank files of one tag, as paths. Keys: mp rank; (dp rank, mp rank); (layer, tp rank); (moe layer, expert, mp
    rank); (ep rank, mp rank). The mp rank counts tensor-parallel ranks within pipeline stages. ``by_prefix``: what is
    in ``optim``, and what other files of the same ranks there are."""

    folder: str
    model: dict[int, str] = field(default_factory=dict)
    zero_model: dict[tuple[int, int], str] = field(default_factory=dict)
    optim: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optim: dict[tuple[int, int], str] = field(default_factory=dict)
    by_prefix: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict)
    universal: bool = False
    left_over: list[str] = field(default_factory=list)
    """Files of an older save under the same tag, in whose place a newer one put files that are named otherwise. Which
    is newer, only the times of the files tell. (Of other kinds of file `mixed` finds out more.)"""

    def __bool__(self) -> bool:
        return bool(self.model or self.zero_model or self.optim or self.layers or self.universal)


def rank_files(folder: str, names: Mapping[str, Entry]) -> RankFiles:
    """Sort the names in a folder by what they are; anything else is passed over."""
    files = RankFiles(folder)

    def put(group: dict[K, str], key: K, name: str) -> None:
        path, known = f"{folder}/{name}" if folder else name, group.get(key)
        newer = known is None or names[name].info.mtime_ns >= names[known.rpartition("/")[2]].info.mtime_ns
        if newer:
            group[key] = path
        if known is not None:
            files.left_over.append(known if newer else path)

    for name in sorted(names, key=natural):
        match parse_ckpt_name(name):
            case RankFile("model", mp=int(mp)):
                put(files.model, mp, name)
            case RankFile("zero_model", dp=int(dp), mp=int(mp)):
                put(files.zero_model, (dp, mp), name)
            case RankFile("optim", dp=int(dp), mp=int(mp), prefix=prefix):
                files.by_prefix.setdefault(prefix, {})[dp, mp] = f"{folder}/{name}" if folder else name
            case RankFile("layer", layer=int(layer), tp=tp):
                put(files.layers, (layer, tp or 0), name)
            case RankFile("expert", layer=layer, expert=int(expert), mp=int(mp)):
                put(files.experts, (layer or 0, expert, mp), name)
            case RankFile("expert_optim", ep=int(ep), mp=int(mp)):
                put(files.expert_optim, (ep, mp), name)
    for table in files.by_prefix.values():
        files.optim.update(table)
    return files


def find_folder(source: Source, strict: bool = True) -> RankFiles | None:
    """The rank files of the tag to read: the folder itself if it holds them, else the tag that was asked for, else what
    ``latest`` names, else the only one there is. A universal checkpoint (a folder with ``zero/`` in it) counts.

    None if this is no DeepSpeed folder. With ``strict``, raises MissingFileError or FormatError where there is no such
    tag, or several and no word which; without, None means just that it is not DeepSpeed's.
    """
    store = source.store
    here = _look(source, "")
    if here and source.tag is None:
        return here
    latest = _latest(store, source, strict)
    tag = source.tag or latest
    if tag is not None and _is_folder(source, tag):
        found = _look(source, tag)
        if found:
            return found
    tags = [n for n, e in source.entries.items() if e.is_dir and _look(source, n)]
    if tag is None and len(tags) == 1:
        return _look(source, tags[0])
    if not tags and latest is None and source.tag is None:
        return None
    if not strict:
        return here or (RankFiles("") if tags or latest else None)
    listed = ", ".join(sorted(tags, key=natural)) or "none"
    if tag is None:
        raise FormatError(
            f"{source.where} holds several checkpoints and no file `latest`: say which with tag=..., of {listed}"
        )
    raise MissingFileError(
        f"{source.where}: the tag {tag!r} ({'as asked' if source.tag else 'from the file latest'}) has no rank files "
        f"here; there are: {listed}. Say which with tag=..."
    )


def _is_folder(source: Source, tag: str) -> bool:
    """Whether a tag is a folder in here: of one name, or of several (``runs/step5``: nothing forbids a slash)."""
    inside, path = source.entries, ""
    for part in tag.split("/"):
        if part in (".", "..") or part not in inside or not inside[part].is_dir:
            return False
        path = f"{path}/{part}" if path else part
        inside = source.inside(path)
    return True


def _look(source: Source, folder: str) -> RankFiles:
    key = rank_files, folder
    if key not in source.known:
        names = source.inside(folder)
        files = source.known[key] = rank_files(folder, names)
        if "zero" in names and not files.optim:
            inside = source.inside(f"{folder}/zero" if folder else "zero")
            files.universal = any(e.is_dir for e in inside.values())
    found: RankFiles = source.known[key]
    return found


def _latest(store: Store, source: Source, strict: bool) -> str | None:
    """The tag that the file ``latest`` names (engine.py `save_checkpoint`: text, no newline); for a folder that only
    ds_to_universal wrote, ``latest_universal``."""
    name = next((n for n in ("latest", "latest_universal") if n in source.entries), None)
    if name is None:
        return None
    size = source.entries[name].info.size
    tag = bytes(store.read(name, 0, size)).decode("utf-8", "replace").strip() if 0 < size < 4096 else ""
    if "\\" in tag or not {"", ".", ".."}.isdisjoint(tag.split("/")):
        if strict and source.tag is None:
            raise CorruptError(
                f"{store.root}/{name} names {tag[:80]!r}, which is no folder inside this one: say which with tag=..."
            )
        return None
    return tag


def name_of_rank(path: str, dp: int, mp: int) -> str:
    """The path of another rank's file of the same kind."""
    known = parse_ckpt_name(path)
    assert known is not None  # it is a path of a RankFiles
    head, _, _ = path.rpartition("/")
    name = replace(known, dp=dp, mp=mp).name
    return f"{head}/{name}" if head else name
