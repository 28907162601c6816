"""Writes lazyckpt/formats/hf_ties.json: which weights each architecture of transformers ties, so leaves out on disk.

Run it with the transformers of tests/constraints.txt after an update of that: python tools/make_hf_ties.py
Source of the fact: `_tied_weights_keys` of the classes in transformers/models/*/modeling_*.py, and the default of
`tie_word_embeddings` in their configuration classes. Patterns (regular expressions) are left out: what they tie has to
be known from the names of a built model.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "lazyckpt" / "formats" / "hf_ties.json"


def collect() -> dict[str, Any]:
    """{"maps": [{alias: owner}], "architectures": {class name: [index of its map, tied by default]}}"""
    import transformers
    import transformers.models as models

    maps: list[dict[str, str]] = []
    architectures: dict[str, list[Any]] = {}
    for package in pkgutil.iter_modules(models.__path__):
        for part in pkgutil.iter_modules([f"{models.__path__[0]}/{package.name}"]):
            if not part.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{part.name}")
            except Exception as e:  # a model whose own requirements are not installed
                print(f"left out {part.name}: {e}")
                continue
            for name, cls in vars(module).items():
                if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
                    continue
                tied = getattr(cls, "_tied_weights_keys", None)
                if not isinstance(tied, dict):
                    continue
                plain = {a: o for a, o in tied.items() if _is_name(a) and _is_name(o)}
                if plain:
                    if plain not in maps:
                        maps.append(plain)
                    architectures[name] = [maps.index(plain), _default(cls)]
    return {
        "transformers": transformers.__version__,
        "maps": maps,
        "architectures": dict(sorted(architectures.items())),
    }


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.]+\.(weight|bias)", text) is not None


def _default(cls: Any) -> bool:
    config = getattr(cls, "config_class", None)
    try:
        return bool(getattr(config(), "tie_word_embeddings", False))
    except Exception:  # a configuration that has no default
        return False


if __name__ == "__main__":
    TARGET.write_text(json.dumps(collect(), indent=0) + "\n")
