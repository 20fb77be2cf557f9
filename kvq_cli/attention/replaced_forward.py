"""Replace a model's forward pass for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


@contextmanager
def replaced_forward(model: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `model.forward` is `forward`; afterwards what it was, also if that was a replacement already:
    of an attach around this one, or of a library that places models."""
    replaced = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del model.forward
        else:
            model.forward = replaced
