"""kvq: compressed key-value caches for transformer language models.

Library use::

    from kvq_cli import attach, load_artifact

    with attach(model, load_artifact("artifacts/reference/temporalkv-2bit")) as kv:
        out = model.generate(**inputs, past_key_values=kv.new_cache())
        print(kv.report())

Importing this package is fast: torch and transformers are imported with the first name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.artifact import load_artifact
    from kvq_cli.attention.attach import attach
    from kvq_cli.methods.registry import build

__version__ = "0.3.0"
#: Raise it with every change of what a finished sample or captured activations hold: older ones are then made again.
RESULTS = 2
__all__ = ["KvqError", "UsageError", "__version__", "attach", "build", "load_artifact"]

_LAZY = {
    "attach": "kvq_cli.attention.attach",
    "build": "kvq_cli.methods.registry",
    "load_artifact": "kvq_cli.artifact",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
