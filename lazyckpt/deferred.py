"""torch, imported when something of it is looked up for the first time.

Importing torch takes a second or more, and opening, listing and describing a checkpoint need nothing of it. Modules
that make tensors, and that these need too, import it from here; for type checkers it is torch itself.
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
