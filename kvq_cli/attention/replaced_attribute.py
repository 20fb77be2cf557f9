"""Replace an attribute of a module for a while: a method, or a mark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside the block, `module.name` is `value`; afterwards what it was, also if that was a replacement already: of an
    attach around this one, or of a library that places models."""
    replaced = module.__dict__.get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if replaced is None:
            delattr(module, name)
        else:
            setattr(module, name, replaced)
