"""The rules of what AutoTP cuts without saying so in universal_checkpoint_info.

What deepspeed's AutoTP says depends on the version:

* 0.16.4 to 0.18.8: nothing. Layers are cut by the names of their linear layers; embeddings and heads are whole.
* 0.18.9 to 0.19.3: rows, sub-parameters and cut vocabularies. Neither columns nor what is whole are in any list.
* 0.19.4 and 0.19.5: what is whole is listed as replicated, too. What is in no list is a column. An embedding that a
  partition_config cuts is listed as replicated, although each rank has some of its columns (`_slice_embedding`).
* from 0.19.6: a geometric map of every parameter, or the reason why there is none.

Until 0.19.5, fused query, key and value, and gate and up, are in no list, as if they were columns. They are cut part by
part in an order that the model's class decides, and no file names it (fusedqkv_utils.py `FUSED_QKV_TYPE_DICT`).

Sources: deepspeed/module_inject/auto_tp.py `_replace`, `_replace_with_config`, layers.py
`collect_autotp_universal_checkpoint_info`, `GateUpPack_LinearLayer`, `Yuan_LinearLayer`, at the tags of these versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.box import Shape
from .megatron import second_matrix
from .merge import Merge, Rule, Source, concatenated, in_parts, replicated
from .tables import pattern, patterns
from .universal import universal_rules

_OLD = "AutoTP of deepspeed before 0.19.6"
_SAY = "say how with rules={...}; each shard reads on its own in view.stored"
_LISTS = "universal_checkpoint_info (in none of its lists"


def uses_autotp(config: Any) -> bool:
    """Return whether a ``ds_config`` asks for AutoTP."""
    size = _section(config).get("autotp_size")
    return type(size) is int and size > 1


def autotp_rules(info: Mapping[str, Any], config: Any, shapes: Mapping[str, Shape], family: Source) -> Source:
    """Return the source of rules for names that no list of ``info`` has ({} if the checkpoint has no info).

    ``shapes`` holds the shapes of one rank's shards by name; they tell which family the model is of.
    """
    section = _section(config)
    custom = bool(section.get("partition_config"))
    by_preset = custom or bool(section.get("preset_model"))
    yuan = any(pattern("deepspeed.yuan").search(name) for name in shapes)
    lists_whole = _lists_whole(info)
    vocabulary = _named(info.get("vocabulary_parameter_patterns"))
    rows = {name.rsplit(".", 2)[0] for name in _named(info.get("parameter_with_row_parallelism_patterns"))}

    def find(name: str) -> tuple[Rule, str] | None:
        if "affine_map" in info:
            return _refused("universal_checkpoint_info describes other parameters, not this one"), "its affine map"
        if yuan and pattern("deepspeed.yuan_heads").search(name):
            return _refused(f"{_OLD} deals out heads of Yuan in pairs, and does not say which"), "its name"
        if not by_preset and (fused := _fused(name, shapes, bool(info))) is not None:
            return fused
        if lists_whole:
            return concatenated(0), f"{_LISTS}: a column of AutoTP)"
        if len(shapes.get(name, ())) > 2:
            return replicated, "AutoTP, which cuts matrices only"
        if name in vocabulary:
            return concatenated(0), "vocabulary_parameter_patterns"
        known = family.find(name)
        if known is not None and known[0] is replicated:
            return known
        if custom:
            return _refused(f"{_OLD} does not say what a partition_config of its own cuts"), "partition_config"
        if pattern("deepspeed.vocabulary").search(name):
            return replicated, f"{_LISTS}: not cut by AutoTP)" if info else "AutoTP, which cuts layers only"
        known = known or _of_experts(name)
        if info and known is not None and name.rsplit(".", 2)[0] not in rows:
            # a column needs a row after it: without one, a plan of the model leaves the module whole
            return _refused(f"{_OLD} lists no matrix of the same module that is cut along dimension 1"), known[1]
        return known

    return Source(find)


def described_rules(
    info: Mapping[str, Any], config: Any, shapes: Mapping[str, Shape], family: Source
) -> tuple[Source, ...]:
    """Return the sources of rules of a checkpoint with universal_checkpoint_info, in order of precedence."""
    if not uses_autotp(config):
        return (universal_rules(info, family),)
    return _sliced_rules(info, config, shapes), universal_rules(
        info, family, autotp_rules(info, config, shapes, family)
    )


def _sliced_rules(info: Mapping[str, Any], config: Any, shapes: Mapping[str, Shape]) -> Source:
    """Return the source of rules for embeddings that a partition_config may have cut, although the list says that they
    are whole. Norms tell how wide the model is."""
    wrong = bool(_section(config).get("partition_config")) and "affine_map" not in info and _lists_whole(info)
    whole = _named(info.get("tp_replicated_parameter_patterns")) if wrong else set()
    norms = {shape[0] for name, shape in shapes.items() if len(shape) == 1 and name.endswith(".weight")}

    def rule(shards: Sequence[Shape]) -> Merge:
        width, degree = shards[0][1], len(shards)
        if width not in norms and any(width * degree == norm for norm in norms):
            raise ValueError(
                f"{_OLD} lists it as whole, but a rank has {width} of the {width * degree} columns that norms have: a "
                f"partition_config has probably cut it: {_SAY}"
            )
        return replicated(shards)

    def find(name: str) -> tuple[Rule, str] | None:
        if name in whole and len(shapes.get(name, ())) == 2:
            return rule, "tp_replicated_parameter_patterns, and the width of norms"
        return None

    return Source(find)


def uncut_rules() -> Source:
    """Return the source of rules for a model of which all ranks hold the same bytes.

    Until deepspeed 0.18.5, a ``ds_config`` with AutoTP alone cuts nothing: `deepspeed.tp_model_init` does.
    """
    return Source(lambda name: (replicated, "the checksums of the module, which are the same on all ranks"))


def undescribed_rules(shapes: Mapping[str, Shape]) -> Source:
    """Return the source of rules for tensor parallelism of an unknown kind: AutoTP, or the model's own.

    It refuses what the two treat in different ways, and what is fused: shards of different widths do not show the order
    of the parts.
    """

    def find(name: str) -> tuple[Rule, str] | None:
        if pattern("deepspeed.vocabulary").search(name):
            return _refused("a vocabulary is cut by rows, or whole as with AutoTP"), "its name"
        return _fused(name, shapes, True)

    return Source(find)


def _fused(name: str, shapes: Mapping[str, Shape], other_ways: bool) -> tuple[Rule, str] | None:
    """Return the rule of a fused parameter; None for other names. ``other_ways``: whether gate and up may be cut as
    one, by a plan of the model."""
    if pattern("deepspeed.fused_qkv").search(name):
        why = "query, key and value in one are cut in an order that depends on the model's class, which no file names"
        return _refused(why), "its name"
    if pattern("deepspeed.gate_up").search(name):
        if other_ways:
            return _refused("gate and up in one are cut each, or together, and no file says which"), "its name"
        return in_parts(0, 2), "AutoTP, which cuts gate and up each"
    second = second_matrix(name)
    if second is None or not name.rpartition(".")[0].endswith("dense_h_to_4h"):
        return None
    first, after = shapes.get(f"{name.rpartition('.')[0]}.weight", ()), shapes.get(second, ())
    if len(first) != 2 or len(after) != 2 or first[0] not in (after[1], 2 * after[1]):
        return _refused("it may be gate and up in one, and the matrix after it does not tell"), "its name"
    if first[0] == after[1]:
        return concatenated(0), f"its {first[0]} rows on a rank, and as many columns of the matrix after it"
    return in_parts(0, 2), f"its {first[0]} rows on a rank, twice the columns of the matrix after it: gate and up"


def _of_experts(name: str) -> tuple[Rule, str] | None:
    """Return the rule of an expert's matrix, or of a router, of a transformers model."""
    for which, rule in (("column", concatenated(0)), ("row", concatenated(1)), ("replicated", replicated)):
        if any(one.search(name) for one in patterns(f"whole.{which}")):
            return rule, "AutoTP and its name"
    return None


def _section(config: Any) -> Mapping[str, Any]:
    section = config.get("tensor_parallel") if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _lists_whole(info: Mapping[str, Any]) -> bool:
    """Return whether the replicated ones are more than the biases of rows, which all versions list."""
    listed = info.get("tp_replicated_parameter_patterns")
    names = listed if isinstance(listed, list | tuple | set) else ()
    return any(isinstance(one, str) and not one.endswith("bias$") for one in names)


def _named(listed: Any) -> set[str]:
    """Return the names in a list of AutoTP's, which escapes names and matches them whole."""
    names = listed if isinstance(listed, list | tuple | set) else ()
    return {one.replace("\\", "")[1:-1] for one in names if isinstance(one, str)}


def _refused(reason: str) -> Rule:
    def rule(shapes: Sequence[Shape]) -> Merge:
        raise ValueError(f"{reason}: {_SAY}")

    return rule
