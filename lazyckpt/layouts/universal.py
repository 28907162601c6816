"""The merge rules in a checkpoint's universal_checkpoint_info.

Source: deepspeed/checkpoint/ds_to_universal.py `merge_tp_slices` (the order of precedence, the meaning of each list),
deepspeed/module_inject/layers.py `collect_autotp_universal_checkpoint_info` (AutoTP's affine map). Patterns are matched
with `re.match`: at the start of a name, not to its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

from .merge import Merge, Rule, Source, averaged, concatenated, in_parts, pieces, replicated, rows

_REPETITIONS = 3  # the most repetitions in a pattern: matching time grows with each
_LONGEST_NAME = 256  # longer names are only matched with patterns of at most one repetition
_UNCUT = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"


def universal_rules(info: Mapping[str, Any], family: Source, autotp: Source | None = None) -> Source:
    """Return the source of the rules in universal_checkpoint_info.

    ``autotp`` is the source for names that no list matches (see `autotp`), if AutoTP wrote the info. Otherwise these
    are concatenated along dimension 0, as in ds_to_universal, unless their family says that they are replicated:
    Megatron lists the position embeddings of an untied model under a wrong name, and ds_to_universal then concatenates
    replicas.
    """

    def known(name: str) -> tuple[Rule, str] | None:
        found = _explicit(info, name)
        if found is None and autotp is not None:
            found = autotp.find(name)
            if found is None:
                return None
        elif found is None:
            likely = family.find(name)
            if likely is not None and likely[0] is replicated:
                found = likely
            else:
                found = concatenated(0), "universal_checkpoint_info (in none of its lists: the default)"
        rule, evidence = found
        size = info.get("original_vocab_size")
        if _match(info.get("vocabulary_parameter_patterns"), name) and type(size) is int:
            return rows(rule, size), f"{evidence} and original_vocab_size {size:,}"
        return rule, evidence

    @cache  # called once for each state of a parameter
    def find(name: str) -> tuple[Rule, str] | None:
        try:
            found = known(name)
        except (ValueError, TypeError, LookupError) as e:
            return _refused(f"universal_checkpoint_info is not understood: {e}"), "universal_checkpoint_info"
        return None if found is None else (_guarded(found[0]), found[1])

    return Source(find)


def joined(infos: Sequence[Any]) -> dict[str, Any]:
    """Return the universal_checkpoint_info of all ranks as one: AutoTP's pipeline stages each list their own names.

    >>> joined([{"v": 1, "rows": ["^0.w$"]}, {"v": 1, "rows": ["^1.w$"]}])
    {'v': 1, 'rows': ['^0.w$', '^1.w$']}
    """
    known: list[dict[str, Any]] = []
    for info in infos:
        if isinstance(info, dict) and info not in known[-1:]:
            known.append(info)
    if len(known) < 2:
        return known[0] if known else {}
    both = {key: _join([info[key] for info in known if key in info]) for info in known for key in info}
    maps = [info["affine_map"] for info in known if isinstance(info.get("affine_map"), dict)]
    if maps:
        both["affine_map"] = {**maps[0], "params": _join([one.get("params", {}) for one in maps])}
    return both


def _join(values: Sequence[Any]) -> Any:
    """Join lists, and tables by name; of other values, and of entries with one name, the first counts."""
    if all(isinstance(value, dict) for value in values):
        return {key: entry for value in reversed(values) for key, entry in value.items()}
    if all(isinstance(value, list) for value in values):
        texts = dict.fromkeys(entry for value in values for entry in value if isinstance(entry, str))
        return [*texts, *(entry for value in values for entry in value if not isinstance(entry, str))]
    return values[0]


def cut_of(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a universal checkpoint records with a whole tensor about its tensor-parallel cut.

    The keys are those of `merge_tp_slices`. The result is {} if every rank has the whole tensor, or if an affine map
    describes the cut.

    >>> cut_of({"parameter_with_row_parallelism_patterns": [r".*down.weight"]}, "0.down.weight")
    {'cat_dim': 1}
    """
    try:
        affine = info.get("affine_map")
        params = affine.get("params") if isinstance(affine, dict) else None
        about: dict[str, Any] = {}
        if any(_match(patterns, name) is not None for patterns in (params, *(info.get(key) for key in _UNCUT))):
            pass
        elif _match(info.get(_HALVES), name) is not None:
            about = {"cat_dim": 0, "param_n_sub_params": 2}
        else:
            about = {"cat_dim": int(_match(info.get("parameter_with_row_parallelism_patterns"), name) is not None)}
        if _match(info.get("vocabulary_parameter_patterns"), name) is not None:
            about["vocab_tensor"] = True
        return about
    except ValueError:  # invalid patterns: nothing else says how the tensor was cut
        return {"cat_dim": 0}


def _guarded(rule: Rule) -> Rule:
    """Return a rule that raises ValueError also for numbers of a wrong type in the file."""

    def guarded(shapes: Any) -> Merge:
        try:
            return rule(shapes)
        except (TypeError, LookupError, ArithmeticError) as e:
            raise ValueError(f"universal_checkpoint_info is not understood: {e}") from None

    return guarded


def _explicit(info: Mapping[str, Any], name: str) -> tuple[Rule, str] | None:
    affine = info.get("affine_map")
    params = affine.get("params") if isinstance(affine, dict) else None
    pattern = _match(params, name)
    if pattern is not None and isinstance(params, dict):
        return _affine(affine, params[pattern], name), "the affine map in universal_checkpoint_info"
    why = info.get(_UNSUPPORTED)
    pattern = _match(why, name)
    if pattern is not None:
        reason = why.get(pattern) if isinstance(why, dict) else "the list gives no reason"
        return _refused(f"{_UNSUPPORTED}: {str(reason)[:300]}"), _UNSUPPORTED
    for key, rule in (
        ("tp_replicated_parameter_patterns", replicated),
        ("parameter_to_average_patterns", averaged),
        (_HALVES, _halves),
    ):
        pattern = _match(info.get(key), name)
        if pattern is not None:
            return rule, f"{key} {pattern!r}"
    fused = _sub_params(info, name)
    if fused is not None:
        return fused
    pattern = _match(info.get("parameter_with_row_parallelism_patterns"), name)
    if pattern is not None:
        return concatenated(1), f"parameter_with_row_parallelism_patterns {pattern!r}"
    return None


def _match(patterns: Any, name: str) -> str | None:
    """Return the first pattern that matches.

    Raises ValueError for an invalid pattern, where ds_to_universal stops too: the tensors that the pattern was meant
    for would otherwise get another rule.
    """
    for pattern in patterns if isinstance(patterns, list | tuple | dict | set) else ():
        if isinstance(pattern, str) and _compiled(pattern, len(name) <= _LONGEST_NAME).match(name):
            return pattern
    return None


@lru_cache(maxsize=1 << 14)  # AutoTP lists a pattern for every parameter; the cache of `re` holds 512
def _compiled(pattern: str, short: bool) -> re.Pattern[str]:
    """Compile a pattern.

    Raises ValueError for an invalid pattern, and for one whose matching may take forever (nested or many repetitions),
    which a hostile file may contain.
    """
    bare = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    if re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+?{]", bare)) > (_REPETITIONS if short else 1):
        raise ValueError(f"the pattern {pattern[:80]!r} has more repetitions in it than writers of checkpoints use")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(f"the pattern {pattern[:80]!r} is invalid: {e}") from None


def _halves(shapes: Any) -> Merge:
    """Merge shards of two tensors fused along dimension 0, cut as by torch.chunk: the first half may be larger."""
    widths = [[-(-s[0] // 2) for s in shapes], [s[0] // 2 for s in shapes]]
    return in_parts(0, 2, widths)(shapes)


def _sub_params(info: Mapping[str, Any], name: str) -> tuple[Rule, str] | None:
    """Return the rule from parameter_with_sub_params, and the evidence for it; None if no pattern matches.

    Format: [{patterns, shape, partition_dim}], since version 0.4 with widths on each rank. Until deepspeed 0.19.5,
    AutoTP lists the matrix alone, and its bias is cut as the rows of the matrix are (layers.py `SubParamLinearLayer`).
    """
    entries = info.get("parameter_with_sub_params")
    matrix = f"{name.removesuffix('.bias')}.weight" if name.endswith(".bias") else name
    for own in dict.fromkeys((name, matrix)):
        for entry in entries if isinstance(entries, list | tuple) else ():
            entry = entry if isinstance(entry, dict) else getattr(entry, "attributes", {})
            pattern = _match(entry.get("patterns"), own)
            dim, shape = entry.get("partition_dim"), entry.get("shape")
            if pattern is None or type(dim) is not int or not isinstance(shape, tuple | list):
                continue
            if not 0 <= dim < len(shape) or (own != name and dim == len(shape) - 1):
                continue
            widths = info.get("sub_param_shard_widths")
            known = widths.get(pattern) if isinstance(widths, dict) else None
            return _in_view(tuple(shape), dim, known), f"parameter_with_sub_params {pattern!r}"
    return None


def _in_view(view: tuple[Any, ...], dim: int, widths: Any) -> Rule:
    """Return the rule of sub-parameters along a dimension of a view of the matrix, which splits its rows.

    ``view`` has at ``dim`` the number of equal sub-parameters, or their sizes. The matrix's bias has its rows.
    """

    def rule(shapes: Any) -> Merge:
        own = len(shapes[0]) + (len(shapes[0]) == 1 < len(view))
        sizes = list(view[dim]) if isinstance(view[dim], tuple | list) else view[dim]
        if own == len(view):
            return in_parts(dim, sizes, widths if isinstance(widths, list | tuple) else None)(shapes)
        joined = view[: len(view) - own + 1]
        before, after = joined[:dim], joined[dim + 1 :]
        if own > len(view) or dim >= len(joined) or not all(type(n) is int and n > 0 for n in (*before, *after)):
            raise ValueError(f"it is described as a view of shape {view}, its shards have {len(shapes[0])} dimensions")
        times, each = prod(before), prod(after)
        if times > sum(s[0] for s in shapes):
            raise ValueError(f"it is described as a view of shape {view}, its shards are {list(shapes[:8])}")
        if isinstance(widths, list | tuple):
            return in_parts(0, 1, [[w * each for w in ranks] for ranks in widths] * times)(shapes)
        return in_parts(0, [n * each for n in sizes] * times if isinstance(sizes, list) else sizes * times)(shapes)

    return rule


def _affine(info: Any, entry: Any, name: str) -> Rule:
    """Return the rule of an affine map.

    Format: {logical_shape, ranks: {tp: {shard_shape, pieces: [{shape, source: [offset, strides], dest: ...}]}}}. The
    logical shape may be a view of the tensor, which splits its first dimension.
    """
    if info.get("version", 1) != 1:
        return _refused(f"the affine map of {name!r} has version {info.get('version')!r}, 1 is known")
    try:
        blocks = {
            int(rank): [
                (tuple(p["shape"]), p["source"][0], tuple(p["source"][1]), p["dest"][0], tuple(p["dest"][1]))
                for p in shard["pieces"]
                if p.get("scale", 1) in (1, None) or _raise(f"the affine map of {name!r} scales a piece")
            ]
            for rank, shard in entry["ranks"].items()
        }
        held = {int(rank): tuple(shard["shard_shape"]) for rank, shard in entry["ranks"].items()}
        logical = tuple(entry["logical_shape"])
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as e:
        return _refused(f"the affine map of {name!r} is not understood: {e}")

    def rule(shapes: Any) -> Merge:
        own = len(shapes[0])
        if sorted(held) != list(range(len(shapes))):
            raise ValueError(f"the affine map of {name!r} is of the ranks {sorted(held)}, there are {len(shapes)}")
        for rank, shape in enumerate(shapes):
            if held[rank] != shape and (len(held[rank]) == len(shape) or prod(held[rank]) != prod(shape)):
                raise ValueError(
                    f"the affine map of {name!r} is of shards of {held[rank]}, the shard of rank {rank} is {shape}"
                )
        split = len(logical) - own + 1
        return pieces((prod(logical[:split]), *logical[split:]) if split > 1 else logical, blocks)(shapes)

    return rule


def _raise(reason: str) -> bool:
    raise ValueError(reason)


def _refused(reason: str) -> Rule:
    def rule(shapes: Any) -> Merge:
        raise ValueError(reason)

    return rule
