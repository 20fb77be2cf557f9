"""PyTorch, imported when one of its attributes is first read.

Importing it takes seconds and hundreds of megabytes, which commands that compute nothing need not spend: modules that
describe methods, formats and files write `from kvq_cli.lazy import torch`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _LazyModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)  # later reads do not come here
            return value

    torch = _LazyModule("torch")
