"""Which modules of a base model an adapter's modules are.

Names agree but for the modules around the model: ``model.layers.0`` or ``language_model.model.layers.0``. Only modules
that are known to wrap models are taken off or put in front, and only where that leads to one module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...errors import DataError
from .naming import Module

# Modules around models, in names of adapters and of bases
_WRAPPERS = {
    "base_model", "model", "module", "_orig_mod", "language_model", "text_model", "backbone", "transformer", "unet",
    "text_encoder", "text_encoder_2", "text_encoder_3", "diffusion_model", "cond_stage_model", "conditioner",
    "embedders", "0", "1", "prior", "policy", "actor", "pretrained_model", "student",
}  # fmt: skip
# kohya's names of models -> parts of names that modules of the other models have
_OTHERS = {
    "te1": ("text_encoder_2", "text_encoder_3", "embedders.1"),
    "te2": ("text_encoder.", "text_encoder_3", "embedders.0"),
    "te3": ("text_encoder.", "text_encoder_2"),
    "te": ("unet.", "diffusion_model.", "text_encoder_2", "text_encoder_3"),
    "unet": ("text_encoder", "cond_stage_model", "conditioner"),
    "transformer": ("text_encoder",),
}


class Matcher:
    """The modules of a base model.

    Parameters
    ----------
    modules
        Their dotted names.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = set(modules)
        self._tails: dict[str, set[str]] = defaultdict(set)  # a name without wrappers in front -> the modules
        self._flat: dict[str, set[str]] = defaultdict(set)
        for module in self._modules:
            for tail in _tails(module):
                self._tails[tail].add(module)
                self._flat[tail.replace(".", "_")].add(module)

    def match(self, module: Module) -> str | None:
        """Return the base's module, or None.

        Raises DataError if there are several that could be meant.
        """
        return self._by_flat(module, *module.flat) if module.flat is not None else self.by_name(module.name)

    def by_name(self, name: str) -> str | None:
        """Return the base's module for a dotted name, or None. Raises DataError if there are several."""
        if name in self._modules:
            return name
        for tail in _tails(name):
            found = self._tails.get(tail, set())
            if found:
                return self._only(name, found)
        return None

    def _by_flat(self, module: Module, model: str, rest: str) -> str | None:
        found = self._flat.get(rest, set())
        if len(found) > 1:
            found = {one for one in found if not any(other in one for other in _OTHERS.get(model, ()))}
        return self._only(module.name, found) if found else None

    def _only(self, name: str, found: set[str]) -> str:
        if len(found) > 1:
            raise DataError(
                f"the adapter's module {name!r} could be {' or '.join(sorted(found)[:4])} of the base: give the part "
                "of the base that it belongs to, by base.select(...)"
            )
        return next(iter(found))


def _tails(name: str) -> Sequence[str]:
    """Return a name and what is left of it without wrappers in front.

    >>> _tails("model.language_model.layers.0.q")
    ['model.language_model.layers.0.q', 'language_model.layers.0.q', 'layers.0.q']
    """
    parts = name.split(".")
    found = [name]
    for n, part in enumerate(parts[:-1], 1):
        if part not in _WRAPPERS:
            break
        found.append(".".join(parts[n:]))
    return found
