"""Tell whether a kernel computes an operation, and launch it on its tensors' GPU: Triton takes the current device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from triton import knobs

from kvq_kernels.cache_keys import hash_callees_first

#: What computes an operation; "auto": Triton on a GPU and under TRITON_INTERPRET=1, else PyTorch.
Backend: TypeAlias = Literal["auto", "triton", "torch"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uses_triton(tensor: Tensor, backend: Backend) -> bool:
    """Whether a tensor's device and `backend` select the kernel."""
    return backend == "triton" or (backend == "auto" and (tensor.device.type == "cuda" or knobs.runtime.interpret))


def on_its_device(launch: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """Run `launch`, which launches kernels of its module, with the first argument's GPU as the current device."""

    @wraps(launch)
    def launched(tensor: Tensor, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        hash_callees_first(launch.__module__)
        device = tensor.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launch(tensor, *arguments, **options)
        with torch.cuda.device(device):
            return launch(tensor, *arguments, **options)

    return launched
