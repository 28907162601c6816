"""Writes lazyckpt/formats/trainers/hf_orders.json: in which order the modules of transformers have their parts.

Run it with the transformers of constraints.txt after an update of that: python tools/make_hf_orders.py

An optimizer numbers parameters in the order in which modules registered them; safetensors files list them by name. So
for each model type, every module of its classes is asked for its parameters and sub-modules, in their order: once with
the defaults of its configuration, once with all options that add parts (biases, norms). Models are built on the
meta device, two layers high.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import torch

TARGET = Path(__file__).parent.parent / "lazyckpt" / "formats" / "trainers" / "hf_orders.json"
_HIGH = ("layers", "depth", "block", "stages")
_MORE = ("bias", "norm", "qk_", "use_", "is_gated")


def collect() -> dict[str, Any]:
    """{"orders": [[part, ...]], "types": {model type: [index of an order]}}; orders of one part, or of numbers, are
    left out."""
    import transformers
    import transformers.models as models

    orders: dict[tuple[str, ...], int] = {}
    types: dict[str, set[int]] = {}
    for package in pkgutil.iter_modules(models.__path__):
        for part in pkgutil.iter_modules([f"{models.__path__[0]}/{package.name}"]):
            if not part.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{part.name}")
            except Exception as e:  # a model whose own requirements are not installed
                print(f"left out {part.name}: {e}", flush=True)
                continue
            for name, cls in list(vars(module).items()):
                if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
                    continue
                if cls.__module__ != module.__name__ or name.endswith("PreTrainedModel"):
                    continue
                for more in (False, True):
                    built = _build(cls, more)
                    if built is None:
                        continue
                    known = types.setdefault(built.config.model_type, set())
                    known.update(orders.setdefault(order, len(orders)) for order in _orders(built))
            print(package.name, len(orders), flush=True)
    return {
        "transformers": transformers.__version__,
        "orders": [list(order) for order in orders],
        "types": {name: sorted(known) for name, known in sorted(types.items())},
    }


def _build(cls: Any, more: bool) -> Any:
    try:
        config = cls.config_class()
        for one in (config, *(v for v in vars(config).values() if hasattr(v, "model_type"))):
            for key, value in list(vars(one).items()):
                if isinstance(value, int) and not isinstance(value, bool) and value > 2 and _high(key):
                    setattr(one, key, 2)
                if more and value is False and any(word in key for word in _MORE) and "cache" not in key:
                    setattr(one, key, True)
        with torch.device("meta"):
            return cls(config)
    except Exception:  # no defaults, or none that fit two layers: what its other classes tell has to do
        return None


def _high(key: str) -> bool:
    return key.startswith(("num_", "n_", "encoder_", "decoder_")) and key.endswith(_HIGH)


def _orders(model: torch.nn.Module) -> set[tuple[str, ...]]:
    found = set()
    for module in model.modules():
        parts = [name for name, p in module._parameters.items() if p is not None]
        parts += [name for name, m in module._modules.items() if m is not None and any(True for _ in m.parameters())]
        if len(parts) > 1 and not all(map(str.isdecimal, parts)):
            found.add(tuple(parts))
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    TARGET.write_text(json.dumps(collect(), separators=(",", ":")).replace("],[", "],\n[") + "\n")
