"""Who computes attention over a compressed layer: the seam between the model and the kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.errors import UsageError


class Backend(Protocol):
    """Two functions over the layer's streams, whose `forward` describes the pass and which hold its tokens already."""

    def decode_attention(self, query: Tensor, layer: CompressedLayer, scaling: float) -> Tensor:
        """One query per row: `query` `[batch, query_heads, 1, head_dim]` -> the same shape."""

    def prefill_attention(
        self, query: Tensor, key: Tensor, value: Tensor, layer: CompressedLayer, scaling: float, compressed: bool
    ) -> Tensor:
        """Several queries per row: `[batch, query_heads, columns, head_dim]` -> the same shape, zeros for pads.

        key, value: the pass's own, `[batch, kv_heads, columns, head_dim]`, keys after RoPE, in full precision.
        compressed: every query sees what it would see in one-by-one decoding; else the pass's own tokens are seen
        in full precision.
        """


_BACKENDS: dict[str, Backend] = {"torch": torch_backend}


def choose_backend(name: str, device: torch.device) -> Backend:
    """The backend `name`; "auto" is the best one for `device`. UsageError lists what there is."""
    if name == "auto":
        return torch_backend
    if name not in _BACKENDS:
        raise UsageError(f"unknown backend {name!r}; valid: auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[name]
