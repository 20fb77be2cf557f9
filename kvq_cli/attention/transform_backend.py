"""Attention of one query per row over codes of a transform's components (KLT) by the kernel `transform_attention` of
kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvq_kernels.decode_attention import Dense, Side
from kvq_kernels.transform_attention import (
    Transform,
    Transformed,
    Workspace,
    make_steps,
    new_workspace,
    plan_splits,
    transform_attention,
)
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import MIN_HEAD_DIM
from kvq_cli.attention.triton_backend import TritonBackend
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan


def stores_components(plan: LayerPlan) -> bool:
    """Whether keys and values are both kept as codes of a transform's components."""
    return isinstance(plan.keys.codec, TransformCodec) and isinstance(plan.values.codec, TransformCodec)


def unsupported(layer: AttentionLayer, plan: LayerPlan) -> str | None:
    """Why the kernel cannot compute the attention of a layer whose streams are such codes; None: it can."""
    dim = layer.rotation.head_dim
    if dim < MIN_HEAD_DIM or dim % 2:
        return f"head_dim={dim} is below {MIN_HEAD_DIM}, or odd"
    if plan.keys.window != plan.values.window:
        return "keys and values have different windows"
    return None


class TransformBackend:
    """The backend of layers that keep codes of a transform's components; see `Backend`. engine: the backend of other
    layers, which holds lengths and tables of cosines for all. Layers share their workspace."""

    prefill_attention = staticmethod(torch_backend.prefill_attention)

    def __init__(self, engine: TritonBackend, layers: Sequence[tuple[AttentionLayer, LayerPlan]]) -> None:
        self._engine = engine
        self._transforms = {
            layer.index: tuple(_transform(stream.codec) for stream in (plan.keys, plan.values))
            for layer, plan in layers
        }
        self._workspaces: dict[tuple, Workspace] = {}

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads.

        Not used for layers with soft-capping or attention sinks.
        """
        layer, forward, engine, device = context.layer, context.forward, self._engine, query.device
        streams = layer.streams[0], layer.streams[-1]
        if not streams[0].ring.shape[3] == streams[1].ring.shape[3] == query.shape[3]:
            raise UsageError(f"layer {layer.index}: keys and values of different head_dim need --backend torch")
        lengths = engine.lengths(forward, device)
        packed = engine.packed_lengths(forward, streams[0].window, device)
        rope = None if layer.rotation.style == "none" else engine.rope(layer.rotation, forward, device)
        keys, values = (
            _side(stream, transform, packed)
            for stream, transform in zip(streams, self._transforms[layer.index], strict=True)
        )
        q = query[:, :, 0]
        return transform_attention(
            q,
            keys,
            values,
            lengths,
            context.scaling,
            rope=rope,
            window=layer.sliding_window,
            workspace=self._workspace(q, values),
            backend="triton",
        ).unsqueeze(2)

    def _workspace(self, query: Tensor, values: Transformed) -> Workspace:
        shape = (*query.shape, values.transform.steps.components, plan_splits(query, values))
        if shape not in self._workspaces:
            self._workspaces[shape] = new_workspace(query, values)
        return self._workspaces[shape]


def _transform(codec: object) -> Transform:
    """The constants of a codec as the kernel takes them."""
    assert isinstance(codec, TransformCodec)
    tensors = codec.constants()
    mean = tensors["mean"]
    steps = make_steps(codec.chunks, mean.shape[1], mean.device)
    return Transform(tensors["centroids"], tensors["synthesis"], mean.view(-1, codec.head_dim), steps)


def _side(stream: Stream, transform: Transform, count: Tensor) -> Transformed:
    """The tensors of a stream; `count`: packed tokens of each row."""
    packed = stream.store.whole()
    exact = Side(Dense(stream.ring), count, stream.sinks if stream.window.sinks else None, stream.ring)
    return Transformed(None if packed is None else packed.parts["codes"].tensor, transform, exact)
