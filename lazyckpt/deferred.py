"""torch, imported at the first access to one of its attributes.

Importing torch takes a second or more, and opening, listing and describing a checkpoint do not need it. Modules on that
path that also make tensors import it from here; type checkers see torch itself.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


torch = _Deferred("torch")
