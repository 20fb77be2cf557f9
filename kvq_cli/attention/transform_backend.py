"""Attention of one query per row over codes of a transform's components (KLT) by the kernel `transform_attention` of
kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvq_kernels import transform_attention
from kvq_kernels.decode_attention import Dense
from kvq_kernels.transform_attention import Transform, Transformed, make_steps
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import MIN_HEAD_DIM
from kvq_cli.attention.span_backend import SpanBackend, side_of_stream
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


class TransformBackend(SpanBackend):
    """The backend of layers that keep codes of a transform's components; see `Backend`."""

    def __init__(self, engine: TritonBackend, layers: Sequence[tuple[AttentionLayer, LayerPlan]]) -> None:
        super().__init__(engine, transform_attention)
        self._transforms = {
            layer.index: tuple(_transform(stream.codec) for stream in (plan.keys, plan.values))
            for layer, plan in layers
        }

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads.

        Not used for layers with soft-capping or attention sinks.
        """
        layer, q = context.layer, query[:, :, 0]
        streams = layer.streams[0], layer.streams[-1]
        if not streams[0].ring.shape[3] == streams[1].ring.shape[3] == query.shape[3]:
            raise UsageError(f"layer {layer.index}: keys and values of different head_dim need --backend torch")
        lengths, packed, rope = self._rows(query, context)
        keys, values = (
            _side(stream, transform, packed)
            for stream, transform in zip(streams, self._transforms[layer.index], strict=True)
        )
        options = {"rope": rope, "window": layer.sliding_window, "workspace": self._workspace(q, values)}
        attend = transform_attention.transform_attention
        return attend(q, keys, values, lengths, context.scaling, **options, backend="triton").unsqueeze(2)


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
    exact = side_of_stream(stream, Dense(stream.ring), count)
    return Transformed(None if packed is None else packed.parts["codes"].tensor, transform, exact)
