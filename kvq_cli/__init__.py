"""kvq: compressed key-value caches for transformer language models.

Library use::

    from kvq_cli import attach

    with attach(model, "kivi-2bit") as kv:
        out = kv.generate(**inputs, max_new_tokens=100)
        print(kv.report())

Importing this package is fast: torch and transformers are imported with the first name that needs them.
What `__all__` names is stable, and what docs/API.md lists of its classes; all else may change with any version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.api import calibrate, evaluate, recommend
    from kvq_cli.artifact import Artifact, load_artifact
    from kvq_cli.attention.attach import Attached, attach
    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.methods.base import Method
    from kvq_cli.methods.registry import build
    from kvq_cli.models import LoadedModel, load_model

__version__ = "0.4.0"
#: Raise it with every change of what a finished sample or captured activations hold: older ones are then made again.
RESULTS = 2
__all__ = [
    "Artifact",
    "Attached",
    "CacheReport",
    "CompressedCache",
    "KvqError",
    "LoadedModel",
    "Method",
    "UsageError",
    "__version__",
    "attach",
    "build",
    "calibrate",
    "evaluate",
    "load_artifact",
    "load_model",
    "recommend",
]

_LAZY = {
    "Artifact": "kvq_cli.artifact",
    "Attached": "kvq_cli.attention.attach",
    "CacheReport": "kvq_cli.cache.report",
    "CompressedCache": "kvq_cli.cache.cache",
    "LoadedModel": "kvq_cli.models",
    "Method": "kvq_cli.methods.base",
    "attach": "kvq_cli.attention.attach",
    "build": "kvq_cli.methods.registry",
    "calibrate": "kvq_cli.api",
    "evaluate": "kvq_cli.api",
    "load_artifact": "kvq_cli.artifact",
    "load_model": "kvq_cli.models",
    "recommend": "kvq_cli.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
