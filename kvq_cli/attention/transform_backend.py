"""Attention of one query per row over codes of a transform's components (KLT) by the kernel `transform_attention` of
kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvq_kernels import fields
from kvq_kernels.decode_attention import Dense
from kvq_kernels.transform_attention import Transform, Transformed, new_workspace, plan_splits
from kvq_kernels.transform_attention import transform_attention as attend
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import MIN_HEAD_DIM
from kvq_cli.attention.rotary import Rotation
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
        super().__init__(engine)
        self._transforms = {layer.index: _transforms(layer.rotation, plan) for layer, plan in layers}

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
        workspace = self._workspace((q.shape, plan_splits(q, keys)), lambda: new_workspace(q, keys))
        options = {"rope": rope, "window": layer.sliding_window, "workspace": workspace}
        return attend(q, keys, values, lengths, context.scaling, **options, backend="triton").unsqueeze(2)


def _transforms(rotation: Rotation, plan: LayerPlan) -> tuple[Transform, Transform]:
    """The constants of a layer's codecs of keys and values as the kernel takes them."""
    keys, values = plan.keys.codec, plan.values.codec
    assert isinstance(keys, TransformCodec) and isinstance(values, TransformCodec)
    rotated = None if rotation.style == "none" else (rotation.style, rotation.width)
    return (
        Transform.of_keys(keys.widths, *_numbers(keys), keys.head_dim, rotated),
        Transform.of_values(values.widths, *_numbers(values), values.head_dim),
    )


def _numbers(codec: TransformCodec) -> tuple[Tensor, Tensor, Tensor]:
    """(synthesis, mean, center) of a codec."""
    constants = codec.constants()
    return codec.synthesis, constants["mean"], constants["center"]


def _side(stream: Stream, transform: Transform, count: Tensor) -> Transformed:
    """The tensors of a stream; `count`: packed tokens of each row."""
    packed, exact = stream.store.whole(), side_of_stream(stream, Dense(stream.ring), count)
    if packed is None:
        return Transformed((), None, transform, exact)
    parts = fields.parts(fields.rate(transform.widths))
    gain = packed.parts["gain"].tensor if "gain" in packed.parts else None
    return Transformed(tuple(packed.parts[part.name].tensor for part in parts), gain, transform, exact)
