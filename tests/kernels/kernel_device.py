"""Tensors of a test on a device that it does not name."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

_NAMES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"
_MAKERS = {getattr(torch, name) for name in _NAMES.split(" ")}


class OnDevice(TorchFunctionMode):
    """New tensors are made on a device unless their maker is told another; random ones of a CPU's generator are moved
    there, so that every device sees the same numbers."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _MAKERS or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs).to(self.device)
        return func(*args, **kwargs | {"device": self.device})
