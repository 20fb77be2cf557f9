"""What the backends of kernels that read packed tokens in spans have in common. Importing this imports Triton."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvq_kernels.decode_attention import Rope
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.triton_backend import TritonBackend


class SpanBackend:
    """The backend of layers whose attention `kvq_kernels.rematerialize` or `transform_attention` computes.

    engine: the backend of other layers, which holds lengths and tables of cosines for all. Layers share their
    workspace; each thread has its own.
    """

    prefill_attention = staticmethod(torch_backend.prefill_attention)

    def __init__(self, engine: TritonBackend) -> None:
        self._engine = engine
        self._workspaces = _Workspaces()

    def _rows(self, query: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Rope | None]:
        """(tokens, packed tokens, rotary embedding) of the rows of a layer whose streams have the same windows."""
        layer, forward, engine, device = context.layer, context.forward, self._engine, query.device
        rope = None if layer.rotation.style == "none" else engine.rope(layer.rotation, forward, device)
        packed = engine.packed_lengths(forward, layer.streams[0].window, device)
        return engine.lengths(forward, device), packed, rope

    def _workspace(self, shape: tuple, make: Callable[[], Any]) -> Any:
        """The workspace of all layers of the same shape."""
        found = self._workspaces.by_shape
        if shape not in found:
            found[shape] = make()
        return found[shape]


class _Workspaces(threading.local):
    """The workspaces of a thread."""

    def __init__(self) -> None:
        self.by_shape: dict[tuple, Any] = {}
