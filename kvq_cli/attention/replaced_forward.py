"""Replace a module's forward pass for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `module.forward` is `forward`; afterwards what it was, also if that was a replacement already:
    of an attach around this one, or of a library that places models."""
    replaced = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced
