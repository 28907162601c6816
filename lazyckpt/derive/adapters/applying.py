"""The view of a base model with adapters in its weights. Reads nothing but the alphas of kohya's and diffusers' files.

Tied names share a tensor: an adapter of one of them changes it for all, as `merge_and_unload` of PEFT does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

from ...core.expr import make
from ...core.index import Index
from ...core.specs import TensorSpec
from ...errors import DataError, some
from ...io.storage.base import Store
from ...namespace import Namespace
from ..sources import Sources
from . import deltas
from .deltas import Operand, Parts
from .matching import Matcher
from .naming import Module, modules_of
from .scaling import Settings

_SHOWN = 4  # names in a message
_CODED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "scales", "weight_format")
# The order in which transformers' modules of stacked experts define their parameters
_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def applied(
    base: Namespace[Any], adapters: Sequence[tuple[Namespace[Any], Mapping[str, Any] | None, float]]
) -> tuple[Store, Index]:
    """Return the store and the index of the view of a model with adapters.

    Parameters
    ----------
    base
        The base model, in the state that it shows.
    adapters
        Each adapter with its adapter_config.json, if it has one, and the factor of its own scale.

    Raises
    ------
    DataError
        A tensor of an adapter matches nothing in the base or does not fit it, or the base is quantized.
    """
    model = _Model(base, [view for view, _, _ in adapters])
    for number, (view, config, factor) in enumerate(adapters, 1):
        _Adapter(model, number, view, Settings(config, view.meta, view.root), factor).apply()
    return model.result()


class _Model:
    """The base model's tensors while adapters are applied."""

    def __init__(self, base: Namespace[Any], adapters: Sequence[Namespace[Any]]) -> None:
        self.base = base
        self.sources = Sources([base, *adapters])
        self.owners = {name: base.owner(name) for name in base}
        first: dict[str, str] = {}  # owner -> the first name of the view that it has
        for name, owner in self.owners.items():
            first.setdefault(owner, name)
        self.named = {name: first[owner] for name, owner in self.owners.items()}
        self.origins: dict[str, Operand] = {name: self.sources.operand(0, name) for name in first.values()}
        self.current = dict(self.origins)
        params: dict[str, list[str]] = defaultdict(list)
        for name in base:
            module, _, param = name.rpartition(".")
            params[module].append(param)
        self.params = params
        self.matcher = Matcher(params)

    def tensor(self, name: str) -> Operand | None:
        """Return a tensor of the base as it is now."""
        known = self.named.get(name)
        return None if known is None else self.current[known]

    def result(self) -> tuple[Store, Index]:
        tensors: dict[str, TensorSpec] = {}
        aliases = {name: owner for name, owner in self.named.items() if name != owner}
        for name, node in self.current.items():
            tensors[name] = self.sources.tensor(name, node)
        order = [name for name in self.named if name in tensors]
        order += [name for name in tensors if name not in self.named]
        return self.sources.store, self.sources.index(
            {name: tensors[name] for name in order}, "adapted", aliases=aliases
        )


class _Adapter:
    """An adapter that is applied to a model."""

    def __init__(self, model: _Model, number: int, view: Namespace[Any], settings: Settings, factor: float) -> None:
        self.model, self.number, self.view, self.settings, self.factor = model, number, view, settings, factor
        self.modules, self.whole = modules_of(view)
        self.lost: list[str] = []  # tensors that match nothing, and why
        if not self.modules:
            raise DataError(
                f"{view.root} holds no adapter that lazyckpt knows: no name is one of LoRA, LoHa or LoKr, as in "
                f"{some(map(repr, view), 2)}"
            )

    def apply(self) -> None:
        for name, inner in self.whole.items():
            self._replace(name, inner)
        places = self._places()
        turned = self._orientation(places)
        for module, place in places:
            self._change(module, place, turned)
        if self.lost:
            raise DataError(
                f"{self.view.root}: {len(self.lost)} tensors or modules of the adapter do not fit the base "
                f"({self.model.base.root}): {some(self.lost, _SHOWN)}. "
                "Give the right base, a base under the adapter's names (view.rename), or a part of the adapter "
                "(lazyckpt.open(adapter).select(...))"
            )

    # -- what is replaced as a whole

    def _replace(self, name: str, inner: str) -> None:
        model = self.model
        node = model.sources.operand(self.number, name)
        module, _, param = inner.rpartition(".")
        found = model.matcher.by_name(module)
        target = f"{found}.{param}"
        if found is not None and target in model.named:
            owner = model.named[target]
            old = model.current[owner]
            if node.dtype is not old.dtype and node.dtype.is_floating_point and old.dtype.is_floating_point:
                node = make("cast", node, dtype=old.dtype)
            model.current[owner] = model.origins[owner] = node
        elif self._is_saved(module):
            model.named[inner] = inner
            model.current[inner] = model.origins[inner] = node
        else:
            self.lost.append(repr(name))

    def _is_saved(self, module: str) -> bool:
        """Return whether a module is one of ``modules_to_save``: a head that the base need not have."""
        saved = self.settings.of(module).get("modules_to_save") or ()
        return any(module == one or module.endswith(f".{one}") for one in saved)

    # -- where the adapted modules are in the base

    def _places(self) -> list[tuple[Module, str]]:
        """Return the modules with the names of the base's tensors that they change."""
        found: list[tuple[Module, str]] = []
        stacked: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules:
            place = self.model.matcher.match(module)
            if place is None:
                self.lost += [repr(name) for name in module.parts.values()]
            elif f"{place}.weight" in self.model.named:
                found.append((module, f"{place}.weight"))
            elif any(param in _CODED for param in self.model.params[place]):
                raise self._quantized(place)
            else:
                stacked[place].append(module)
        for place, modules in stacked.items():
            found += self._parameters(place, modules)
        return found

    def _parameters(self, place: str, modules: list[Module]) -> Iterable[tuple[Module, str]]:
        """Return which parameters of a module the wrappers around it change, the innermost first; by their shapes, and
        if those do not decide by the order in which transformers defines them."""
        modules = sorted(modules, key=lambda one: -one.depth)
        wanted = self.settings.of(modules[0].name).get("target_parameters") or ()
        names = [f"{place}.{param}" for param in self.model.params[place]]
        names = [n for n in names if not wanted or any(n == w or n.endswith(f".{w}") for w in wanted)]
        fitting = (
            [chosen for chosen in permutations(names, len(modules)) if all(map(self._fits, modules, chosen))]
            if len(names) <= 6
            else []
        )
        if len(fitting) > 1:
            order = {f"{place}.{param}": n for n, param in enumerate(_EXPERTS)}
            fitting = [
                one for one in fitting if [order.get(n, -1) for n in one] == sorted(order.get(n, -2) for n in one)
            ]
        if len(fitting) == 1:
            return zip(modules, fitting[0], strict=True)
        self.lost += [repr(name) for module in modules for name in module.parts.values()]
        return ()

    def _fits(self, module: Module, name: str) -> bool:
        weight = self.model.tensor(name)
        if weight is None or set(module.parts) != {"A", "B"}:
            return False
        parts = self._operands(module)
        if len(weight.shape) == 3:
            return bool(deltas.expert_orientations(parts, weight.shape))
        return len(weight.shape) == 2 and False in deltas.orientations(parts, weight.shape)

    def _orientation(self, places: Sequence[tuple[Module, str]]) -> dict[str, bool]:
        """Return for weights whose shape does not tell whether they are transposed what the others of the adapter
        tell: weight -> transposed."""
        seen: dict[str, set[bool]] = defaultdict(set)
        open_: dict[str, str] = {}
        for module, name in places:
            weight = self.model.tensor(name)
            if weight is None or deltas.method_of(module.parts) != "lora" or "mid" in module.parts:  # type: ignore[arg-type]
                continue
            is_stack = len(weight.shape) == 3 and not name.endswith(".weight")
            kind = name.rpartition(".")[0] if is_stack else ""
            tell = deltas.expert_orientations if is_stack else deltas.orientations
            found = tell(self._operands(module), weight.shape)
            if len(found) == 1:
                seen[kind] |= found
            elif found:
                open_[name] = kind
        turned = {}
        for name, kind in open_.items():
            told = self.settings.of(name).get("fan_in_fan_out") if not kind else None
            votes = seen[kind]
            if kind and len(votes) != 1:
                raise DataError(
                    f"{self.view.root}: {name!r} of the base is square, and no other parameter of the module tells "
                    "whether its experts are stored as (out, in) or (in, out)"
                )
            turned[name] = next(iter(votes)) if len(votes) == 1 else bool(told)
        return turned

    # -- the changed weights

    def _change(self, module: Module, name: str, turned: Mapping[str, bool]) -> None:
        model, owner = self.model, self.model.named[name]
        weight, origin = model.current[owner], model.origins[owner]
        parts = self._operands(module)
        method = deltas.method_of(parts)
        if method is None:
            self.lost.append(f"{module.name} has only {', '.join(sorted(parts))}")
            return
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2 or not weight.dtype.is_number:
            raise self._quantized(name.rpartition(".")[0])
        is_parameter = not name.endswith(".weight")
        axis, delta = 0, None
        if method == "lora" and is_parameter and len(weight.shape) == 3:
            fits = deltas.expert_orientations(parts, weight.shape)
            delta = deltas.experts(parts, weight.shape, turned.get(name, True in fits)) if fits else None
        elif method == "lora":
            fits = deltas.orientations(parts, weight.shape)
            axis = int(turned.get(name, fits == {True}))
            delta = deltas.linear(parts, weight.shape, bool(axis))
        elif method == "embedding":
            axis, delta = 1, deltas.embedding(parts, weight.shape)
        else:
            delta = (deltas.loha if method == "loha" else deltas.lokr)(parts, weight.shape)
        if delta is None:
            shapes = ", ".join(f"{part} {one.shape}" for part, one in parts.items())
            self.lost.append(f"{module.name} ({shapes}) for {name} {weight.shape}")
            return
        scale = self._scale(module, parts, weight.shape if is_parameter else ()) * self.factor
        if "magnitude" in parts:
            new = deltas.dora(weight, origin, delta, scale, parts["magnitude"], axis)
        else:
            new = deltas.added(weight, delta, scale, rounded=is_parameter or method == "embedding")
        model.current[owner] = new
        if "B.bias" in parts:
            self._add_bias(module, name, parts["B.bias"], scale)

    def _add_bias(self, module: Module, name: str, bias: Operand, scale: float) -> None:
        owner = self.model.named.get(f"{name.removesuffix('weight')}bias")
        if owner is None or self.model.current[owner].shape != bias.shape:
            self.lost.append(repr(module.parts["B.bias"]))
            return
        old = self.model.current[owner]
        self.model.current[owner] = make("linear", old, bias, weights=(1.0, scale), dtype=old.dtype)

    def _operands(self, module: Module) -> Parts:
        return {part: self.model.sources.operand(self.number, n) for part, n in module.parts.items() if part != "alpha"}

    def _scale(self, module: Module, parts: Parts, stacked: Sequence[int]) -> float:
        alpha = None
        if "alpha" in module.parts:
            alpha = float(self.view.tensor(module.parts["alpha"])[...].reshape(()))
        elif not self.settings.of(module.name) and module.is_peft:
            raise DataError(
                f"{self.view.root} has no adapter_config.json, which says by how much its matrices count: "
                'apply_lora(..., config={"lora_alpha": ALPHA, "r": RANK}) says it'
            )
        rank = deltas.rank_of(parts)
        if len(stacked) == 3 and rank is not None:
            rank //= stacked[0]
        if rank is None or "lokr_w2" in parts or "lokr_w1" in parts:  # LoKr may have a larger rank than its matrices
            told = self.settings.rank(module.name)
            if told is None and "lokr_w1" in parts and "lokr_w2" in parts:
                return 1.0  # LyCORIS takes the rank as alpha if both matrices are whole
            rank = told if told is not None else rank
        if not rank:
            self.lost.append(f"{module.name}: its rank is not known")
            return 0.0
        return self.settings.scale(module.name, alpha, rank)

    def _quantized(self, module: str) -> DataError:
        return DataError(
            f"{module!r} of the base ({self.model.base.root}) is quantized: apply the adapter to the dequantized "
            "weights, lazyckpt.apply_lora(view.dequantize(), adapter)"
        )
