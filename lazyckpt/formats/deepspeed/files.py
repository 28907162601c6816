"""The files of a DeepSpeed checkpoint: tags, and the rank files in the folder of a tag."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ...core.names import natural
from ...errors import CorruptError, FormatError, LazyckptError, MissingFileError
from ...io.storage.base import Entry, Store
from ..reader import Source

# -- Names of the rank files of a tag, in both directions: ranks -> name, and name -> kind and ranks.

MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_" + ZERO_FILE_PREFIX
FP16_ZERO_FILE_PREFIX = "fp16_" + ZERO_FILE_PREFIX
LAYER_FILE_PREFIX = "layer_"
MODEL_FILE_SUFFIX = "_model_states.pt"
OPTIM_FILE_SUFFIX = "_optim_states.pt"

Kind = Literal["model", "zero_model", "optim", "layer", "expert", "expert_optim"]

_PREFIX = r"(?P<prefix>bf16_|fp16_)?"


def _rank(field: str) -> str:
    return f"(?P<{field}>[0-9]{{1,6}})"  # longer runs of digits are not ranks


_PATTERNS: dict[Kind, re.Pattern[str]] = {
    "model": re.compile(rf"mp_rank_{_rank('mp')}_model_states\.pt"),
    "zero_model": re.compile(rf"{_PREFIX}zero_pp_rank_{_rank('dp')}_mp_rank_{_rank('mp')}_model_states\.pt"),
    "optim": re.compile(rf"{_PREFIX}zero_pp_rank_{_rank('dp')}_mp_rank_{_rank('mp')}_optim_states\.pt"),
    "layer": re.compile(rf"layer_{_rank('layer')}-(?:model_{_rank('tp')}[-_])?model_states\.pt"),
    "expert": re.compile(
        rf"(?:layer_{_rank('layer')}_)?expert_{_rank('expert')}_mp_rank_{_rank('mp')}_model_states\.pt"
    ),
    "expert_optim": re.compile(rf"expp_rank_{_rank('ep')}_mp_rank_{_rank('mp')}_optim_states\.pt"),
}

# FastPersist (runtime/model_checkpointing/writer_factory.py `create_writer`) appends which of how many ranks wrote a
# file. What every rank holds (ZeRO-0 to 2: the model states) is written by all of them.
_WRITTEN_BY = re.compile(rf"(?P<name>.+\.pt)-{_rank('writer')}\.{_rank('writers')}")


@dataclass(frozen=True, slots=True)
class RankFile:
    """The kind and the ranks in the name of a rank file. Ranks that names of a kind do not have are None.

    Attributes
    ----------
    kind : {"model", "zero_model", "optim", "layer", "expert", "expert_optim"}
        Model states, of a model-parallel rank or ("zero_model") of a data-parallel rank; optimizer states; states of a
        pipeline layer; weights of an expert; optimizer states of an expert-parallel rank.
    mp, dp, ep : int or None
        Model-, data- and expert-parallel rank. The mp rank counts tensor-parallel ranks within pipeline stages.
    tp : int or None
        Tensor-parallel rank of a "layer"; None in the name of a layer without tensor parallelism.
    layer : int or None
        Of a "layer", its index in the pipeline; of an "expert", the number of its MoE module (None in the names of old
        versions).
    expert : int or None
        Global number of an expert.
    prefix : {"", "bf16_", "fp16_"}
        Prefix that 16-bit runs put before the name.
    """

    kind: Kind
    mp: int | None = None
    dp: int | None = None
    tp: int | None = None
    ep: int | None = None
    layer: int | None = None
    expert: int | None = None
    prefix: Literal["", "bf16_", "fp16_"] = ""

    @property
    def name(self) -> str:
        """The file's name without a folder, as the writer spells it; `parse_ckpt_name` is the inverse.

        >>> RankFile("optim", dp=10, mp=3, prefix="bf16_").name
        'bf16_zero_pp_rank_10_mp_rank_03_optim_states.pt'
        """
        if self.kind == "model":
            return get_model_ckpt_name_for_rank("", f"{self.mp:02d}")
        if self.kind == "optim":
            return self.prefix + get_zero_ckpt_name_for_rank("", self.dp, self.mp or 0)
        if self.kind == "zero_model":
            zero = get_zero_ckpt_name_for_rank("", self.dp, self.mp or 0)
            return self.prefix + zero.removesuffix(OPTIM_FILE_SUFFIX) + MODEL_FILE_SUFFIX
        if self.kind == "layer":
            of_rank = "" if self.tp is None else f"-model_{self.tp:02d}"
            return f"{LAYER_FILE_PREFIX}{self.layer:02d}{of_rank}-{MODEL_FILE_SUFFIX[1:]}"
        of_rank = f"_{MODEL_FILE_PREFIX}{self.mp:02d}"
        if self.kind == "expert":
            module = "" if self.layer is None else f"{LAYER_FILE_PREFIX}{self.layer}_"
            return f"{module}expert_{self.expert}{of_rank}{MODEL_FILE_SUFFIX}"
        return f"expp_rank_{self.ep}{of_rank}{OPTIM_FILE_SUFFIX}"


def parse_ckpt_name(path: str | os.PathLike[str]) -> RankFile | None:
    """Parse the name of a rank file. The end ``-WRITER.WRITERS`` of FastPersist's names is left out.

    Parameters
    ----------
    path : str or os.PathLike
        The name of a file, with or without a folder.

    Returns
    -------
    RankFile or None
        The kind and the ranks in the name; None if it is not the name of a rank file.

    Examples
    --------

    >>> parse_ckpt_name("global_step9/layer_03-model_01-model_states.pt")
    RankFile(kind='layer', mp=None, dp=None, tp=1, ep=None, layer=3, expert=None, prefix='')
    """
    name, _ = _written_by(os.path.basename(os.fspath(path)))
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(name)
        if match is not None:
            found = match.groupdict()
            prefix = found.pop("prefix", None)
            ranks = {field: None if text is None else int(text) for field, text in found.items()}
            return RankFile(kind, prefix="bf16_" if prefix == "bf16_" else "fp16_" if prefix else "", **ranks)
    return None


def _written_by(name: str) -> tuple[str, str]:
    """Return (the name without the end that FastPersist appends, that end)."""
    match = _WRITTEN_BY.fullmatch(name)
    return (match["name"], name[match.end("name") :]) if match else (name, "")


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Return the path of a model-parallel rank's model states.

    Parameters
    ----------
    base_folder : str or os.PathLike
        The folder of the tag.
    mp_rank_str : str
        The model-parallel rank as text: "00", or "*" in a pattern.

    Examples
    --------

    >>> get_model_ckpt_name_for_rank("global_step9", "01")
    'global_step9/mp_rank_01_model_states.pt'
    """
    return os.path.join(base_folder, MODEL_FILE_PREFIX + mp_rank_str + MODEL_FILE_SUFFIX)


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int | str | None, mp_rank: int) -> str:
    """Return the path of a rank's optimizer states, without the prefix that 16-bit runs put before the name.

    Parameters
    ----------
    base_folder : str or os.PathLike
        The folder of the tag.
    dp_rank : int, str or None
        The data-parallel rank, written to the name as it is.
    mp_rank : int
        The model-parallel rank.
    """
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """Return the path of a pipeline layer's states, as deepspeed/checkpoint/utils.py spells it.

    No writer of 0.19.8 uses that spelling: a pipeline writes ``-model_states.pt`` where this has ``_model_states.pt``.
    ``RankFile("layer", layer=1, tp=0).name`` is the name of the file; `parse_ckpt_name` accepts both.

    Parameters
    ----------
    base_folder : str or os.PathLike
        The folder of the tag.
    layer_id : str
        The key of the layer, as in ``layer_keys`` ("layer_01").
    tp_rank : int
        The tensor-parallel rank.
    """
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")


# -- The tags of a DeepSpeed checkpoint, and the rank files in the folder of a tag.

K = TypeVar("K")


@dataclass(slots=True)
class RankFiles:
    """The paths of the rank files of one tag. Keys: mp rank; (dp rank, mp rank); (layer, tp rank); (MoE layer, expert,
    mp rank); (ep rank, mp rank). The mp rank counts tensor-parallel ranks within pipeline stages. ``by_prefix``: the
    files in ``optim`` and other files of the same ranks, by the prefix of their names."""

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
    """Files of an older save under the same tag that a newer save did not overwrite because it names them differently.
    Only the modification times show which is newer. (`keep_one_save` sorts out other kinds of files.)"""
    copies: dict[str, list[str]] = field(default_factory=dict)
    """Files of FastPersist that several ranks wrote: path of the lowest writer's -> those of the others."""

    def __bool__(self) -> bool:
        return bool(self.model or self.zero_model or self.optim or self.layers or self.universal)


def rank_files(folder: str, names: Mapping[str, Entry]) -> RankFiles:
    """Sort the names in a folder by kind of rank file; ignore other names."""
    files = RankFiles(folder)

    def put(group: dict[K, str], key: K, name: str) -> None:
        path, known = f"{folder}/{name}" if folder else name, group.get(key)
        if known is None:
            group[key] = path
        elif _same_writers(known, path):  # names are sorted: the lowest rank that wrote it is known
            files.copies.setdefault(known, []).append(path)
        else:
            newer = names[name].info.mtime_ns >= names[known.rpartition("/")[2]].info.mtime_ns
            if newer:
                group[key] = path
                files.left_over += [known, *files.copies.pop(known, ())]
            else:
                files.left_over.append(path)

    for name in sorted(names, key=natural):
        match parse_ckpt_name(name):
            case RankFile("model", mp=int(mp)):
                put(files.model, mp, name)
            case RankFile("zero_model", dp=int(dp), mp=int(mp)):
                put(files.zero_model, (dp, mp), name)
            case RankFile("optim", dp=int(dp), mp=int(mp), prefix=prefix):
                put(files.by_prefix.setdefault(prefix, {}), (dp, mp), name)
            case RankFile("layer", layer=int(layer), tp=tp):
                put(files.layers, (layer, tp or 0), name)
            case RankFile("expert", layer=layer, expert=int(expert), mp=int(mp)):
                put(files.experts, (layer or 0, expert, mp), name)
            case RankFile("expert_optim", ep=int(ep), mp=int(mp)):
                put(files.expert_optim, (ep, mp), name)
    for table in files.by_prefix.values():
        files.optim.update(table)
    return files


def writer_of(path: str) -> tuple[int, int] | None:
    """Return (which of the writers of FastPersist wrote a file, how many there are); None for files of one writer."""
    match = _WRITTEN_BY.fullmatch(path.rpartition("/")[2])
    return (int(match["writer"]), int(match["writers"])) if match else None


def path_of_writer(path: str, writer: int) -> str:
    """Return the path of another writer's copy of a file of FastPersist."""
    name, end = _written_by(path)
    return f"{name}-{writer}{end[end.index('.') :]}"


def _same_writers(path: str, other: str) -> bool:
    """Return whether two paths of the same rank file are what several ranks wrote of it with FastPersist."""
    name, by = _written_by(path)
    same, by_other = _written_by(other)
    return name == same and bool(by) and by.rpartition(".")[2] == by_other.rpartition(".")[2]


def find_folder(source: Source, strict: bool = True) -> RankFiles | None:
    """Return the rank files of the tag to read: the requested tag, else the folder itself if it holds rank files, else
    the tag that ``latest`` names, else the only tag. A universal checkpoint (a folder with ``zero/`` in it) counts.

    Return None if this is not a DeepSpeed folder. With ``strict``, raise MissingFileError if there is no such tag, or
    FormatError if there are several and nothing selects one; without, return rank files, possibly none, in these cases.
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
    listed = ", ".join(sorted(tags, key=natural))
    if tag is None:
        raise FormatError(
            f"{source.where} holds several checkpoints and no file `latest`: say which with tag=..., of {listed}"
        )
    what = f"the tag {tag!r} ({'as asked' if source.tag else 'from the file latest'}) has no rank files here"
    if not listed:
        raise MissingFileError(
            f"{source.where}: {what}, and no other folder has. Are the files there, and may the folder be listed?"
        )
    raise MissingFileError(f"{source.where}: {what}; there are: {listed}. Say which with tag=...")


def _is_folder(source: Source, tag: str) -> bool:
    """Return whether a tag is a folder in here. A tag may contain slashes (``runs/step5``)."""
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
    """Return the tag that the file ``latest`` names (engine.py `save_checkpoint`: text, no newline), or
    ``latest_universal`` in a folder that only ds_to_universal wrote."""
    name = next((n for n in ("latest", "latest_universal") if n in source.entries), None)
    if name is None:
        return None
    if _latest not in source.known:
        size = source.entries[name].info.size
        text = bytes(store.read(name, 0, size)) if 0 < size < 4096 else b""
        source.known[_latest] = text.decode("utf-8", "replace").strip()
    tag: str = source.known[_latest]
    if "\\" in tag or not {"", ".", ".."}.isdisjoint(tag.split("/")):
        if strict and source.tag is None:
            raise CorruptError(
                f"{store.root}/{name} names {tag[:80]!r}, which is not a folder inside this one: say which with tag=..."
            )
        return None
    return tag


def of_writers(path: str, error: LazyckptError) -> LazyckptError:
    """Return the error of a file that cannot be read, which says more if the file may be a part of one.

    With ``checkpoint_serialization`` off and DeepSpeed's patched torch/serialization.py, FastPersist's writers share
    the bytes of the tensors (io/fast_file_writer.py `_partition_byte_tensors`), in the order of their addresses on each
    rank, which differ: nothing says how the parts belong together."""
    by = _written_by(path)[1]
    if not isinstance(error, CorruptError) or by.endswith(".1") or not by:
        return error
    return CorruptError(
        f"{error} ({by[1:].partition('.')[2]} writers of FastPersist may have shared it: such parts cannot be put "
        'together. Save again without "checkpoint_serialization": false)'
    )


def name_of_rank(path: str, dp: int, mp: int) -> str:
    """Return the path of another rank's file of the same kind."""
    known = parse_ckpt_name(path)
    assert known is not None  # every path in a RankFiles parses
    head, _, _ = path.rpartition("/")
    end = _written_by(path)[1]
    if end.startswith(f"-{known.dp}."):  # (every rank writes its own)
        end = f"-{dp}{end[end.index('.') :]}"
    name = replace(known, dp=dp, mp=mp).name + end
    return f"{head}/{name}" if head else name
