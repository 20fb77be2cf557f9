"""Which layers the kernels of kvq_kernels support, and the conversion of a stream's tensors to kernel arguments.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvq_kernels.decode_attention import Dense, Outliers, Pages, Side
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.prompt_stream import PromptStream
from kvq_cli.cache.stream import Stream, StreamReader
from kvq_cli.codecs.base import AnyCodec, KeyRotation, Part
from kvq_cli.codecs.rotated import RotatedCodec
from kvq_cli.methods.base import LayerPlan

#: The narrowest head that kernels are tested for; they pad it to twice as many channels.
MIN_HEAD_DIM = 16


def unsupported(plan: LayerPlan, rotation: Rotation) -> str | None:
    """Why the kernels cannot read a layer whose keys and values are kept by `plan`; None: they can."""
    if rotation.head_dim < MIN_HEAD_DIM:
        return f"head_dim={rotation.head_dim} is below {MIN_HEAD_DIM}"
    sinks = plan.keys.window.sinks, plan.values.window.sinks
    if sinks[0] != sinks[1]:
        return f"keys have {sinks[0]} sinks and values {sinks[1]}"
    if plan.keys.codec.has_norm and plan.keys.source == "pre_rope" and rotation.style != "none":
        return "keys are divided by a norm before RoPE"  # which a query after RoPE cannot take in
    if plan.values.codec.has_norm:
        return "values are divided by a norm"
    if plan.keys.codec.rotation is not None and plan.keys.source == "pre_rope" and rotation.style != "none":
        return "channels of the keys are rotated before RoPE"  # which would turn other pairs of channels
    for name, codec in (("keys", plan.keys.codec), ("values", plan.values.codec)):
        if why := _stored_as(_rotated(codec)).unread_by_kernels:
            return f"of the {name} {why}"
    return None


def _stored_as(codec: AnyCodec) -> AnyCodec:
    """The codec that says how kernels take what `codec` stores."""
    return codec if codec.stored_as is None else _stored_as(codec.stored_as)


def _rotated(codec: AnyCodec) -> AnyCodec:
    """The codec that packs what `codec` may have rotated: of all heads, and before any other change of numbers."""
    return codec.base if isinstance(codec, RotatedCodec) else codec


def norm_of(stream: StreamReader) -> Tensor | None:
    """The norm by which the stream's packed numbers are divided, `[rows, kv_heads, head_dim]` float32."""
    return stream.state.get("norm") if isinstance(stream, PromptStream) else None


def side(stream: StreamReader, count: Tensor, rotation: KeyRotation = None) -> Side:
    """The kernel arguments of a stream. count: packed tokens of each row, int32 `[rows]`. rotation: of keys.

    Nothing is copied unless the store has grown beyond its reserved room.
    """
    if not isinstance(stream, Stream):
        raise TypeError("keys or values rematerialized from layer inputs are not stored")
    sinks, ring = stream.sinks if stream.window.sinks else None, stream.ring
    packed = stream.store.whole()
    if packed is None:  # before the first flush there are no codes: `count` is 0, and the tensor is not read
        return Side(Dense(ring), count, sinks, ring, norm=norm_of(stream))
    return side_of(stream.codec, packed.parts, count, sinks, ring, norm=norm_of(stream), rotation=rotation)


def side_of(
    codec: AnyCodec,
    stored: Mapping[str, Part],
    count: Tensor,
    sinks: Tensor | None,
    ring: Tensor | None,
    *,
    norm: Tensor | None = None,
    pages: Pages | None = None,
    rotation: KeyRotation = None,
) -> Side:
    """The kernel arguments of tensors that `codec` packs into; the others are fields of `Side`."""
    outliers = None
    if "outlier_index" in stored:
        index, value = (stored[name] for name in ("outlier_index", "outlier_value"))
        start = stored.get("outlier_start")
        outliers = Outliers(index.tensor, value.tensor, index.unit, None if start is None else start.tensor)
    return Side(_stored_as(_rotated(codec)).kernel_storage(stored, rotation), count, sinks, ring, outliers, norm, pages)
