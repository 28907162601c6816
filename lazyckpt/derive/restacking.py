"""Views of models with other layers or experts: the same tensors under other names, and cuts of them. Reads nothing.

Names are those that layouts/tables.toml knows: the stack of layers, and experts one by one (Mixtral, Qwen, DeepSeek,
Megatron) or stacked in one tensor (gpt-oss, transformers 5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.box import Box
from ..core.expr import computed, make, operand
from ..core.index import Index
from ..core.placement import Part, Placement
from ..core.specs import TensorSpec, renamed
from ..errors import DataError, some
from ..layouts.tables import pattern
from ..namespace import Namespace
from . import model_config

# new name -> the name of the tensor that it shows, and the rows that are taken of it (None: all)
Plan = Mapping[str, tuple[str, Sequence[int] | None]]
# what `reshaping.shown_of` returns: the index of a view, and the tensors that the view shows of each state
Shown = tuple[Index, Mapping[str, Mapping[str, TensorSpec]]]


def restated(
    view: Shown, what: str, plan: Callable[[Mapping[str, TensorSpec]], Plan], config: Mapping[str, Any] | None
) -> Index:
    """Return the index of a view with the tensors that a plan names, in every state.

    Parameters
    ----------
    view
        The index of the view and what it shows.
    what
        The method, for errors.
    plan
        Returns the plan for the tensors of a state.
    config
        The content of config.json that the new model has. None: that of the view.

    Raises
    ------
    DataError
        The view is a rank's shard.
    """
    index, shown = view
    if index.layout is not None:
        raise DataError(f"this view is a rank's shard: {what} the whole view, then shard it")
    # tied names have no tensors of their own: they follow the plan, too
    tied = {alias: owner for alias, owner in index.aliases.items() if any(owner in specs for specs in shown.values())}
    states: dict[str, dict[str, TensorSpec]] = {}
    aliases: dict[str, str] = {}
    for state, specs in shown.items():
        named = {**specs, **{alias: specs[owner] for alias, owner in tied.items() if owner in specs}}
        found: dict[str, TensorSpec] = {}
        owners: dict[str, str] = {}  # the first new name of a tensor that others are tied to
        for new, (old, rows) in plan(named).items():
            owner = tied.get(old, old)
            if old in tied and owner in owners and rows is None:
                aliases[new] = owners[owner]
                continue
            owners.setdefault(owner, new)
            found[new] = _whole(new, named[old]) if rows is None else _rows(new, named[old], rows)
        states[state] = found
    stored = next(iter(states.values()))  # the names of the files would be those of other layers
    meta = index.meta if config is None else {**index.meta, "config": config}
    return replace(index, states=states, aliases=aliases, meta=meta, stored=stored, unreadable={}, ruled=())


def _whole(name: str, spec: TensorSpec) -> TensorSpec:
    """Return a tensor under another name. It forgets the name in the files, which may be that of another layer now."""
    return spec if spec.name == name else replace(renamed(spec, name), stored_as="")


def _rows(name: str, spec: TensorSpec, rows: Sequence[int]) -> TensorSpec:
    """Return a tensor of some rows of another, in their order."""
    rest = spec.shape[1:]
    parts, at = [], 0
    while at < len(rows):
        stop = at + 1
        while stop < len(rows) and rows[stop] == rows[stop - 1] + 1:
            stop += 1
        box = Box((rows[at], *(0 for _ in rest)), (rows[at] + stop - at, *rest))
        parts.append(Part(box, (at, *(0 for _ in rest))))
        at = stop
    placement = Placement(spec.shape, tuple(parts))
    expr = make("place", operand(spec), shape=(len(rows), *rest), placements=(placement,))
    return computed(name, expr, rule=spec.rule)


# -- layers


def with_layers(view: Namespace[Any], shown: Shown, parts: Sequence[int | Iterable[int]], stack: str | None) -> Index:
    """See `lazyckpt.CheckpointView.layers`."""
    chosen = [n for part in parts for n in ([part] if isinstance(part, int) else part)]
    numbers = _stacks(view)
    if stack is None:
        if len(numbers) != 1:
            raise DataError(
                f"the view has {len(numbers) or 'no'} stacks of layers"
                + (f" ({some(numbers, 4)}): say which, as in stack={next(iter(numbers))!r}" if numbers else "")
            )
        stack = next(iter(numbers))
    prefix = stack if not stack or stack.endswith(".") else f"{stack}."
    known = numbers.get(prefix.rstrip("."), set())
    if not known:
        raise DataError(f"{stack!r} is no stack of layers; there are: {some(numbers, 4) if numbers else 'none'}")
    if not chosen:
        raise DataError("no layers are named: give their numbers, as in view.layers(range(24), range(8, 32))")
    lost = [n for n in chosen if n not in known]
    if lost:
        raise DataError(f"{stack or 'the view'} has no layer {lost[0]}: there are {len(known)}, up to {max(known)}")
    config = view.meta.get("config")
    count = model_config.layers_of(config) if isinstance(config, Mapping) else None
    # layers behind those that config.json counts (multi-token prediction) stay behind the last one
    behind = [] if count is None else sorted(n for n in known if n >= count)
    order = [*chosen, *(n for n in behind if n not in chosen)]

    def plan(specs: Mapping[str, TensorSpec]) -> Plan:
        inner: dict[int, list[tuple[str, str]]] = defaultdict(list)
        found: dict[str, tuple[str, None]] = {}
        done = False
        for name in specs:
            number, tail = _split(name, prefix)
            if number is not None:
                inner[number].append((name, tail))
        for name in specs:
            if _split(name, prefix)[0] is None:
                found[name] = (name, None)
            elif not done:
                done = True
                for new, old in enumerate(order):
                    found |= {f"{prefix}{new}{tail}": (full, None) for full, tail in inner[old]}
        return found

    changed = None if not isinstance(config, Mapping) else model_config.with_layers(config, chosen)
    return restated(shown, "layers", plan, changed)


def _stacks(view: Namespace[Any]) -> dict[str, set[int]]:
    """Return the stacks of layers: prefix -> the numbers of the layers."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in view:
        match = pattern("model.layer").match(name)
        if match is not None:
            found[match[1].rstrip(".")].add(int(match[2]))
    return dict(found)


def _split(name: str, prefix: str) -> tuple[int | None, str]:
    """Return the number of the layer that a name is in, and what follows it."""
    if name.startswith(prefix):
        number, dot, tail = name[len(prefix) :].partition(".")
        if number.isdigit() and dot:
            return int(number), f".{tail}"
    return None, ""


# -- experts

Chosen = Sequence[int] | Mapping[int, Sequence[int]]


class _Mixture:
    """The experts of one layer: their prefix ends with ``.experts``."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.numbers: set[int] = set()  # of experts that have tensors of their own
        self.stacked: dict[str, int] = {}  # tensors of all experts -> the length of the first dimension
        found = pattern("model.layer").match(f"{prefix}.")
        self.layer = int(found[2]) if found is not None else None

    @property
    def count(self) -> int:
        return max(self.numbers) + 1 if self.numbers else next(iter(self.stacked.values()))


def with_experts(view: Namespace[Any], shown: Shown, chosen: Chosen, drop: bool) -> Index:
    """See `lazyckpt.CheckpointView.keep_experts` and `drop_experts`."""
    what = "drop_experts" if drop else "keep_experts"
    mixtures = {one.prefix: one for one in _mixtures(view)}
    if not mixtures:
        raise DataError(f"{what}: the view has no experts: no name has '.experts.' in it")
    kept: dict[str, list[int]] = {}
    for prefix, one in mixtures.items():
        named = chosen.get(one.layer if one.layer is not None else -1) if isinstance(chosen, Mapping) else chosen
        listed = list(range(one.count)) if named is None and not drop else list(named or ())
        wrong = [n for n in listed if not 0 <= n < one.count]
        if wrong or len(set(listed)) < len(listed):
            raise DataError(f"{what}: {prefix} has the experts 0 to {one.count - 1}; {listed} are asked for")
        kept[prefix] = [n for n in range(one.count) if n not in listed] if drop else listed
    if isinstance(chosen, Mapping):
        unknown = set(chosen) - {one.layer for one in mixtures.values()}
        if unknown:
            raise DataError(f"{what}: layer {min(unknown)} has no experts")
    counts = {len(experts) for experts in kept.values()}
    if len(counts) > 1 or 0 in counts:
        raise DataError(f"{what} would leave {some(sorted(counts), 4)} experts in the layers: all need the same number")
    count = counts.pop()
    config = view.meta.get("config")
    changed = model_config.with_experts(config, count) if isinstance(config, Mapping) else None

    def plan(specs: Mapping[str, TensorSpec]) -> Plan:
        found: dict[str, tuple[str, Sequence[int] | None]] = {}
        for name, spec in specs.items():
            prefix, number, tail = _expert(name)
            if prefix in kept and number is not None:
                if number in kept[prefix]:
                    stem = name[: len(name) - len(tail) - len(str(number))]
                    found[f"{stem}{kept[prefix].index(number)}{tail}"] = (name, None)
                continue
            owner = prefix if prefix in kept else _routed(name, kept)
            if owner is None:
                found[name] = (name, None)
            elif spec.shape[:1] != (mixtures[owner].count,):
                if prefix in kept:
                    raise DataError(f"{what}: {name!r} has the shape {spec.shape}, which is not one of all experts")
                found[name] = (name, None)
            else:
                whole = kept[owner] == list(range(mixtures[owner].count))
                found[name] = (name, None if whole else kept[owner])
        return found

    return restated(shown, what, plan, changed)


def _mixtures(view: Namespace[Any]) -> Iterable[_Mixture]:
    found: dict[str, _Mixture] = {}
    for name in view:
        prefix, number, _ = _expert(name)
        if not prefix:
            continue
        one = found.setdefault(prefix, _Mixture(prefix))
        if number is not None:
            one.numbers.add(number)
        else:
            shape = view.tensor(name).shape
            one.stacked[name] = shape[0] if len(shape) else 0
    return found.values()


def _expert(name: str) -> tuple[str, int | None, str]:
    """Return the module of the experts that a name is in, the number of its expert, and what follows the number. The
    number is None for a tensor of all experts, the module empty for other tensors.

    >>> _expert("model.layers.1.mlp.experts.7.up_proj.weight")
    ('model.layers.1.mlp.experts', 7, '.up_proj.weight')
    >>> _expert("model.layers.1.mlp.experts.down_proj")
    ('model.layers.1.mlp.experts', None, '')
    """
    at = name.find(".experts.")
    if at < 0:
        return "", None, ""
    prefix = name[: at + len(".experts")]
    match = pattern("model.expert").search(name)
    return (prefix, None, "") if match is None else (prefix, int(match[2]), name[match.end(2) :])


def _routed(name: str, kept: Mapping[str, Any]) -> str | None:
    """Return the experts whose router a tensor belongs to."""
    for word in (".gate.", ".router."):
        prefix = f"{name.partition(word)[0]}.experts"
        if word in name and prefix in kept:
            return prefix
    return None


# -- experts of a dense model

# Model type -> what the mixture is: the type and the class in config.json, the MLP's name, the names of its matrices
_MIXTRAL = (
    "mixtral",
    "MixtralForCausalLM",
    "block_sparse_moe",
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
_QWEN = ("qwen3_moe", "Qwen3MoeForCausalLM", "mlp", {name: name for name in ("gate_proj", "up_proj", "down_proj")})
_UPCYCLED = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN}


def upcycled(view: Namespace[Any], shown: Shown, experts: int, top_k: int, router: str, std: float, seed: int) -> Index:
    """See `lazyckpt.CheckpointView.upcycle`."""
    config = view.meta.get("config")
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or kind not in _UPCYCLED:
        raise DataError(
            f"upcycle knows models of Hugging Face whose config.json says {', '.join(_UPCYCLED)}; it says {kind!r}"
        )
    if not 1 <= top_k <= experts:
        raise DataError(f"experts={experts}, top_k={top_k}: a token goes to at least one expert, at most to all")
    if router not in ("normal", "zeros"):
        raise DataError(f"router={router!r}: it is 'normal' or 'zeros'")
    model, architecture, module, names = _UPCYCLED[kind]
    routers: dict[str, TensorSpec] = {}

    def plan(specs: Mapping[str, TensorSpec]) -> Plan:
        found: dict[str, tuple[str, None]] = {}
        for name, spec in specs.items():
            start, dot, rest = name.partition(".mlp.")
            old, _, param = rest.partition(".")
            if not dot or old not in names:
                found[name] = (name, None)
                continue
            if param != "weight":
                raise DataError(f"upcycle: {name!r} has no place in {architecture}, whose experts have no biases")
            for n in range(experts):
                found[f"{start}.{module}.experts.{n}.{names[old]}.weight"] = (name, None)
            if old == "gate_proj":
                gate = f"{start}.{module}.gate.weight"
                shape, dtype = (experts, spec.shape[1]), spec.dtype
                if router == "zeros":
                    expr = make("fill", shape=shape, value=0.0, dtype=dtype)
                else:
                    expr = make("random.normal", shape=shape, std=std, seed=seed, name=gate, dtype=dtype)
                routers[gate] = computed(gate, expr)
        return found

    changed = model_config.as_mixture(config, model, architecture, experts, top_k)
    index = restated(shown, "upcycle", plan, changed)
    state = view.state
    # moments of a dense model's optimizer do not fit a mixture, so only the weights are left
    specs = dict(index.states[state])
    gates = iter(routers.items())
    merged: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        if f".{module}.experts.0.{names['gate_proj']}." in name:
            gate, router_spec = next(gates)
            merged[gate] = router_spec
        merged[name] = spec
    return replace(index, states={state: merged}, stored=merged)
