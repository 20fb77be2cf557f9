"""Tensors of a cache may be changed in every mode of autograd, whichever mode they were made in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def changes_stored_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without gradients and outside `torch.inference_mode`: tensors made inside that mode could not be
    changed outside it, as where a prompt is read inside it and `generate` continues."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run
