"""The model's parallel layout according to Megatron's arguments in a rank's file, as checked numbers.

Source: Megatron-LM megatron/training/arguments.py. The names are those of its command line; older versions lack some.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.box import Shape
from .families import family_rules
from .merge import Merge, Rule, Source, concatenated, in_parts, replicated, user_rules
from .tables import pattern

_MOST = 1 << 20
# attributes of the modules that hold the model: NeMo 1 (with Float16Module in half precision), NeMo 2
_MODULES = ("model.module.", "model.", "module.module.", "module.")


@dataclass(frozen=True, slots=True)
class Degrees:
    """The parallel degrees; ``etp`` is the expert-tensor-parallel one. ``chunks``: model chunks per pipeline rank."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1

    def place(self, numbers: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return the (tp, pp, ep) rank of a folder from the numbers in its name (``mp_rank_TT[_PPP][_EEE]``).

        Return None if the numbers do not fit the degrees.

        >>> Degrees(pp=2).place((0, 1)), Degrees(ep=2).place((0, 1)), Degrees().place((0, 1))
        ((0, 1, 0), (0, 0, 1), None)
        """
        if len(numbers) != 1 + (self.pp > 1) + (self.ep > 1):
            return None
        tp, pp, ep = numbers[0], numbers[1] if self.pp > 1 else 0, numbers[-1] if self.ep > 1 else 0
        return (tp, pp, ep) if tp < self.tp and pp < self.pp and ep < self.ep else None

    def expert_rank(self, tp: int) -> int | None:
        """Return the expert-tensor-parallel rank whose shards are in the file of tensor-parallel rank ``tp``.

        The writer of a file has both ranks, and tensor-parallel ranks are counted first (parallel_state.py
        `RankGenerator`). Return None if several ranks write the same file.
        """
        return tp % self.etp if self.tp % self.etp == 0 else None


def degrees(args: Any, counts: Sequence[int], chunks: int) -> Degrees:
    """Return the degrees from the arguments (None if there are none), else from the names of the folders.

    ``counts`` holds the number of ranks at each position in the folders' names, ``chunks`` is the number of model
    chunks in the file.
    """
    tp = number(args, "tensor_model_parallel_size", "model_parallel_size") or counts[0]
    ep = number(args, "expert_model_parallel_size") or (counts[2] if len(counts) > 2 else 1)
    pp = number(args, "pipeline_model_parallel_size")
    if pp is None:
        pp = counts[1] if len(counts) > 1 + (len(counts) == 2 and ep > 1) else 1
    return Degrees(tp, pp, ep, number(args, "expert_tensor_parallel_size") or tp, max(chunks, 1))


def number(args: Any, *names: str) -> int | None:
    """Return the first of the arguments that is a positive integer; None if there is none."""
    for name in names:
        value = getattr(args, name, None)
        if type(value) is int and 0 < value < _MOST:
            return value
    return None


def flag(args: Any, *names: str) -> bool | None:
    """Return whether one of the boolean arguments is True; None if all are missing."""
    values = [value for name in names if isinstance(value := getattr(args, name, None), bool)]
    return any(values) if values else None


def version(root: dict[Any, Any]) -> float:
    """Return the checkpoint's version (checkpointing.py `set_checkpoint_version`); 0 for files without one."""
    value = root.get("checkpoint_version", 0)
    return float(value) if type(value) in (int, float) else 3.0


def data_parallel(args: Any, degrees: Degrees) -> int:
    """Return the data-parallel degree."""
    known = number(args, "data_parallel_size")
    if known is not None:
        return known
    world = number(args, "world_size") or 1
    return max(1, world // (degrees.tp * degrees.pp * (number(args, "context_parallel_size") or 1)))


# -- Names in the rank files of Megatron, and the names in the whole model.


class Place(NamedTuple):
    """The parts of a tensor's name in a rank file.

    ``layer`` is the number of the layer on the rank, None outside layers. ``expert`` says whether the tensor belongs to
    experts; ``number`` is the expert's number on the rank, None for a stack of all experts of the rank.
    """

    head: str
    layer: int | None
    tail: str
    expert: bool
    number: int | None

    def named(self, first_layer: int, first_expert: int) -> str:
        """Return the name in the whole model, given the numbers of the rank's first layer and first expert."""
        name = self.tail
        if self.number is not None:
            match = pattern("megatron.expert").search(name)
            if match is not None:
                name = f"{name[: match.start(2)]}{self.number + first_expert}{name[match.end(2) :]}"
        return name if self.layer is None else f"{self.head}{self.layer + first_layer}{name}"


def place(name: str) -> Place:
    """Split a name of a rank file into its parts.

    >>> place("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight").named(4, 8)
    'decoder.layers.5.mlp.experts.local_experts.8.linear_fc1.weight'
    >>> place("mtp.layers.0.eh_proj.weight").named(4, 8)
    'mtp.layers.0.eh_proj.weight'
    """
    match = pattern("megatron.layer").search(name)
    head, layer, tail = (
        ("", None, name) if match is None else (name[: match.end(1)], int(match[2][:9]), name[match.end() :])
    )
    number = pattern("megatron.expert").search(tail)
    return Place(head, layer, tail, is_expert(name), int(number[2][:9]) if number else None)


def is_expert(name: str) -> bool:
    """Return whether expert parallelism distributes a parameter (it does not distribute shared experts and routers)."""
    return ".experts." in name


def stack_of(name: str) -> int | None:
    """Return 1 or 2 for the stacked first or second matrices of a rank's experts (GroupedMLP), else None."""
    match = pattern("megatron.expert_stack").fullmatch(name)
    return int(match[2]) if match else None


def second_matrix(name: str) -> str | None:
    """Return the name of an MLP's second matrix from that of a parameter of the first; None for other parameters.

    >>> second_matrix("mlp.experts.linear_fc1.bias3"), second_matrix("mlp.dense_h_to_4h.weight")
    ('mlp.experts.linear_fc2.weight3', 'mlp.dense_4h_to_h.weight')
    """
    match = pattern("megatron.fc1").fullmatch(name)
    if match is None:
        return None
    number = match[3].removeprefix(".weight").removeprefix(".bias")
    return f"{match[1]}{_SECOND[match[2]]}.weight{number}"


def is_head(name: str) -> bool:
    """Return whether a parameter is the output layer's matrix, which copies the embedding's if the two are tied."""
    return pattern("megatron.head").search(name) is not None


def tied_to(name: str) -> str:
    """Return the name of the embedding's matrix from that of the tied output layer's (or its name in old models).

    >>> tied_to("output_layer.weight"), tied_to("word_embeddings_for_head.weight")
    ('embedding.word_embeddings.weight', 'language_model.embedding.word_embeddings.weight')
    """
    if name.startswith(("word_embeddings_for_head.", "word_embeddings.")):
        return "language_model.embedding.word_embeddings.weight"
    return f"{name.removesuffix('output_layer.weight')}embedding.word_embeddings.weight"


def without_module(names: Collection[str]) -> dict[str, str]:
    """Return the names in Megatron's model for those in a module of NeMo or of Megatron-Bridge around it. Names that
    are not of such a model stay.

    >>> without_module(["model.decoder.layers.0.mlp.linear_fc1.weight", "model.embedding.word_embeddings.weight"])
    {'model.decoder.layers.0.mlp.linear_fc1.weight': 'decoder.layers.0.mlp.linear_fc1.weight', \
'model.embedding.word_embeddings.weight': 'embedding.word_embeddings.weight'}
    """
    for prefix in _MODULES:
        if names and all(name.startswith(prefix) for name in names):
            bare = {name: name.removeprefix(prefix) for name in names}
            if any(pattern("megatron.own").search(name) for name in bare.values()):
                return bare
    return {name: name for name in names}


def is_buffer(name: str) -> bool:
    """Return whether a name of the model's state is a buffer, which has no optimizer state."""
    return pattern("megatron.buffer").search(name) is not None


# -- Layers that mix tokens without softmax (Mamba, gated delta nets): the parts fused in their matrices.

# The parts that a distributed checkpoint stores as separate tensors, in their order in the fused matrix.
PARTS = (
    ("in_proj", ("z", "x", "B", "C", "dt")),
    ("in_proj", ("query", "key", "value", "z", "beta", "alpha")),
    ("in_proj", ("query", "key", "value", "g", "gate")),
    ("conv1d", ("x", "B", "C")),
    ("conv1d", ("query", "key", "value")),
)


def mixer_rule(name: str, args: Any, source: str = "args") -> tuple[Rule, str] | None:
    """Return the rule for a parameter of such a layer, and the evidence for it; None for other parameters.

    ``source`` says where the arguments are from."""
    if pattern("megatron.mixer_by_head").search(name):
        return concatenated(0), "its name: one entry for each head, or each group of heads"
    row = pattern("megatron.mixer_row").search(name)
    if row is not None:
        return (concatenated(1) if row[2] == "weight" else replicated), "its name"
    match = pattern("megatron.mixer").search(name)
    if match is None:
        return None
    sizes = _mamba(args) if _is_mamba(match) else _delta_net(args)
    kind = "mamba" if _is_mamba(match) else "linear"
    return _fused(
        sizes, match[3] == "conv1d", _counts(args, kind)
    ), f"{source}.{kind}_*" if source == "args" else source


def fused_parts(name: str, args: Any) -> list[tuple[str, int]] | None:
    """Return the parts of a fused matrix of such a layer that distributed checkpoints store as separate tensors, with
    their numbers of rows; None for other parameters. Raises ValueError if the arguments do not tell these."""
    match = pattern("megatron.mixer").search(name)
    if match is None:
        return None
    mamba = _is_mamba(match)
    sizes = _mamba(args) if mamba else _delta_net(args)
    if sizes is None:
        raise ValueError(f"the arguments do not tell how wide the fused parts of {name!r} are")
    if match[3] == "conv1d":
        sizes = sizes[1:4] if mamba else sizes[:3]
    kinds = (parts for module, parts in PARTS if module == match[3] and (parts[-1] in ("dt", "C")) == mamba)
    return list(zip(next(kinds), sizes, strict=True))


def _mamba(args: Any) -> list[int] | None:
    """Return the numbers of rows of z, x, B, C and dt; None if the arguments do not say."""
    hidden, heads = number(args, "hidden_size"), number(args, "mamba_num_heads")
    state, dim, groups = (number(args, f"mamba_{key}") for key in ("state_dim", "head_dim", "num_groups"))
    if state is None or dim is None or groups is None or (heads is None and hidden is None):
        return None
    inner = heads * dim if heads is not None else 2 * (hidden or 0)
    return [inner, inner, groups * state, groups * state, inner // dim]


def _delta_net(args: Any) -> list[int] | None:
    """Return the numbers of rows of q, k, v, z, beta and alpha; None if the arguments do not say."""
    keys = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads")
    key, keys_, value, values = (number(args, f"linear_{name}") for name in keys)
    if key is None or keys_ is None or value is None or values is None:
        return None
    return [key * keys_, key * keys_, value * values, value * values, values, values]


def _is_mamba(match: re.Match[str]) -> bool:
    return match[2].endswith("mixer")


def _counts(args: Any, kind: str) -> dict[str, int]:
    """Return what the ranks share out as a whole: heads, and groups of heads with the same B and C, or q and k."""
    names = ("mamba_num_heads", "mamba_num_groups", "linear_num_value_heads", "linear_num_key_heads")
    return {name: count for name in names if name.startswith(kind) and (count := number(args, name)) is not None}


def _fused(sizes: list[int] | None, convolution: bool, counts: Mapping[str, int]) -> Rule:
    def rule(shapes: Sequence[Shape]) -> Merge:
        if sizes is None:
            raise ValueError("the arguments do not tell how wide its fused parts are")
        # (ssm/mamba_mixer.py `MambaMixer.__init__`: "ngroups must be evenly divisible by tp_size")
        uneven = [f"{name} = {count}" for name, count in counts.items() if count % len(shapes)]
        if uneven:
            raise ValueError(f"{len(shapes)} ranks cannot share out {', '.join(uneven)} evenly")
        wanted = sizes if not convolution else sizes[1:4] if len(sizes) == 5 else sizes[:3]
        return in_parts(0, wanted)(shapes)

    return rule


# -- How the tensor-parallel shards of Megatron's parameters form the whole, and the evidence for it.

_SECOND = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_GATED = ("swiglu", "quick_geglu", "geglu", "gated_linear_unit")
# name -> the attributes of the parameter on the ranks
Attributes = Mapping[str, Mapping[str, Any]]


def megatron_rules(args: Any, user: Mapping[str, Any], attributes: Attributes) -> tuple[Source, ...]:
    """Return the sources of rules, in order of precedence."""
    gated = flag(args, *_GATED)
    family = family_rules(gated)
    return (
        user_rules(user),
        Source(lambda name: _by_arguments(name, args, gated, attributes.get(name))),
        Source(lambda name: _by_name(family.find(name), attributes.get(name)), "names"),
        Source(lambda name: _by_attributes(name, args, attributes.get(name))),
    )


def is_gated(args: Any) -> bool | None:
    """Return whether the first matrix of an MLP is a fused gate and up; None if the arguments do not say."""
    return flag(args, *_GATED)


def gated_by(args: Any) -> str:
    """Return the argument that `is_gated` relies on, as evidence."""
    name = next((n for n in _GATED if flag(args, n)), "swiglu")
    return f"args.{name} = {flag(args, name)}"


def _by_arguments(
    name: str, args: Any, gated: bool | None, attributes: Mapping[str, Any] | None
) -> tuple[Rule, str] | None:
    if pattern("megatron.fc1").fullmatch(name) and gated is not None:
        rule = in_parts(0, 2) if gated else concatenated(0)
        return rule, gated_by(args) + _second_opinion(attributes, 0)
    if pattern("megatron.qkv").search(name):
        groups = number(args, "num_query_groups") if flag(args, "group_query_attention") else None
        heads = number(args, "num_attention_heads")
        how = f"{groups or heads or 'all'} query groups, whole ones on every rank"
        return concatenated(0), f"its name: {how}" + _second_opinion(attributes, 0)
    if pattern("megatron.softmax_offset").search(name):
        return concatenated(0), "its name: one of each head"
    mixer = mixer_rule(name, args)
    if mixer is not None:
        return mixer
    down = pattern("megatron.down").search(name)
    if down is not None:
        width = number(args, "q_lora_rank" if down[1] == "q" else "kv_lora_rank")
        extra = (number(args, "qk_pos_emb_head_dim") or 0) if down[1] == "kv" else 0
        return _down(None if width is None else width + extra), "args.q_lora_rank, args.kv_lora_rank and its shape"
    return None


def _down(width: int | None) -> Rule:
    """Return the rule of MLA's down projections: Megatron's own layers cut them, Transformer Engine's do not."""

    def rule(shapes: Sequence[Shape]) -> Merge:
        if width is None:
            raise ValueError("the arguments do not tell how wide it is: it may be cut, or replicated")
        return replicated(shapes) if shapes[0][0] == width else concatenated(0)(shapes)

    return rule


def _by_name(found: tuple[Rule, str] | None, attributes: Mapping[str, Any] | None) -> tuple[Rule, str] | None:
    if found is None or attributes is None:
        return found
    return found[0], f"{found[1]} ({_said(attributes)})"


def _by_attributes(name: str, args: Any, attributes: Mapping[str, Any] | None) -> tuple[Rule, str] | None:
    if attributes is None or pattern("megatron.fc1").fullmatch(name):  # attributes do not describe fused parts
        return None
    if attributes.get("tensor_model_parallel") is not True:
        return replicated, _said(attributes)
    dim = _cut(attributes)
    if dim is None or (dim == 0 and getattr(args, "transformer_impl", None) == "transformer_engine"):
        return None
    return concatenated(dim), _said(attributes)


def _said(attributes: Mapping[str, Any]) -> str:
    parallel = attributes.get("tensor_model_parallel") is True
    what = f"partition_dim = {_cut(attributes)}" if parallel else "tensor_model_parallel = False"
    return f"the attributes of its fp32 copy in the file: {what}"


def _second_opinion(attributes: Mapping[str, Any] | None, dim: int) -> str:
    if attributes is None:
        return ""
    agrees = _cut(attributes) == dim
    return f" (the attributes of its fp32 copy in the file {'agree' if agrees else 'differ'})"


def _cut(attributes: Mapping[str, Any]) -> int | None:
    """Return the dimension that a parameter is cut along, by its attributes; None if it is not cut."""
    dim = attributes.get("partition_dim")
    return dim if attributes.get("tensor_model_parallel") is True and type(dim) is int and dim >= 0 else None


def vocabulary_note(name: str, args: Any, rows: int) -> str:
    """Return a note on the rows of a vocabulary, with what the arguments say about them; "" for other tensors."""
    if not pattern("model.vocabulary").search(name):
        return ""
    said = [f"args.{key} = {n}" for key in ("padded_vocab_size", "vocab_size") if (n := number(args, key)) is not None]
    return f"{rows:,} rows as stored, padding included" + (f" ({', '.join(said)})" if said else "")
