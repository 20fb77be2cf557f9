"""Attention of one query per row over codes of a transform's components (KLT) by the kernel `transform_attention` of
kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvq_kernels.transform_attention import new_workspace, plan_splits
from kvq_kernels.transform_attention import transform_attention as attend
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import MIN_HEAD_DIM, side
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.span_backend import SpanBackend
from kvq_cli.attention.triton_backend import TritonBackend
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan


def stores_components(plan: LayerPlan) -> bool:
    """Whether keys and values of all heads are kept as codes of a transform's components."""
    return bool(plan.keys.codec.transforms and plan.values.codec.transforms)


def unsupported(plan: LayerPlan, rotation: Rotation) -> str | None:
    """Why the kernel cannot compute the attention of a layer whose streams are such codes; None: it can."""
    dim = rotation.head_dim
    if dim < MIN_HEAD_DIM or dim % 2:
        return f"head_dim={dim} is below {MIN_HEAD_DIM}, or odd"
    if plan.keys.window != plan.values.window:
        return "keys and values have different windows"
    return None


def unfused(plan: LayerPlan, dtype: torch.dtype) -> str | None:
    """Why the kernel does not read the codes of such a layer, but unpacks the room that there is for them, to numbers
    of `dtype`; None: it reads them."""
    if dtype == torch.float32:
        return "the kernel of klt computes in 16 bits, not in float32"
    if any(codec.joined for stream in plan.kept for codec in stream.codec.transforms):
        return "a transform serves several kv heads"
    return None


def prepare(plan: LayerPlan, rotation: Rotation) -> None:
    """Make the constants of such a layer's kernels now: a step that is being captured cannot."""
    for stream, rotated in ((plan.keys, rotation.of_keys), (plan.values, None)):
        for codec in stream.codec.transforms:
            codec.kernel_transform(rotated)


class TransformBackend(SpanBackend):
    """The backend of layers that keep codes of a transform's components; see `Backend`."""

    def __init__(self, engine: TritonBackend, layers: Sequence[tuple[AttentionLayer, LayerPlan]]) -> None:
        super().__init__(engine)
        for layer, plan in layers:
            prepare(plan, layer.rotation)

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads.

        Not used for layers with soft-capping or attention sinks.
        """
        layer, q = context.layer, query[:, :, 0]
        streams = layer.streams[0], layer.streams[-1]
        if not streams[0].ring.shape[3] == streams[1].ring.shape[3] == query.shape[3]:
            raise UsageError(f"layer {layer.index}: keys and values of different head_dim need --backend torch")
        lengths, count, rope = self._rows(query, context)
        keys, values = side(streams[0], count, layer.rotation.of_keys), side(streams[1], count)
        shape = q.shape, plan_splits(q, keys, values)
        workspace = self._workspace(shape, lambda: new_workspace(q, keys, values))
        options = {"rope": rope, "window": layer.sliding_window, "workspace": workspace}
        return attend(q, keys, values, lengths, context.scaling, **options, backend="triton").unsqueeze(2)
