"""Launch kernels on the GPU of their tensors: Triton takes the current device and its stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_its_device(launch: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """Make the GPU of the first argument the current device while `launch`, which launches kernels, runs."""

    @wraps(launch)
    def launched(tensor: Tensor, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        device = tensor.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launch(tensor, *arguments, **options)
        with torch.cuda.device(device):
            return launch(tensor, *arguments, **options)

    return launched
