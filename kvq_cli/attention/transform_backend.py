"""Attention of one query per row over codes of a transform's components (KLT) by the kernel `transform_attention` of
kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvq_kernels import fields
from kvq_kernels.decode_attention import Dense, PerHead
from kvq_kernels.transform_attention import Transform, Transformed, new_workspace, plan_splits
from kvq_kernels.transform_attention import transform_attention as attend
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import MIN_HEAD_DIM, parts_of_member
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.span_backend import SpanBackend, side_of_stream
from kvq_cli.attention.triton_backend import TritonBackend
from kvq_cli.codecs.base import AnyCodec, Part
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan


def stores_components(plan: LayerPlan) -> bool:
    """Whether keys and values of all heads are kept as codes of a transform's components."""
    members = [codec for stream in (plan.keys, plan.values) for codec in _members(stream.codec)]
    return all(isinstance(codec, TransformCodec) for codec in members)


def _members(codec: AnyCodec) -> list[AnyCodec]:
    """The codecs of all heads."""
    return [member for member, _ in codec.members.values()] if isinstance(codec, PerHeadCodec) else [codec]


def unsupported(plan: LayerPlan, rotation: Rotation) -> str | None:
    """Why the kernel cannot compute the attention of a layer whose streams are such codes; None: it can."""
    dim = rotation.head_dim
    if dim < MIN_HEAD_DIM or dim % 2:
        return f"head_dim={dim} is below {MIN_HEAD_DIM}, or odd"
    if plan.keys.window != plan.values.window:
        return "keys and values have different windows"
    return None


class TransformBackend(SpanBackend):
    """The backend of layers that keep codes of a transform's components; see `Backend`."""

    def __init__(self, engine: TritonBackend, layers: Sequence[tuple[AttentionLayer, LayerPlan]]) -> None:
        super().__init__(engine)
        self._formats = {layer.index: formats(layer.rotation, plan) for layer, plan in layers}

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads.

        Not used for layers with soft-capping or attention sinks.
        """
        layer, q = context.layer, query[:, :, 0]
        streams = layer.streams[0], layer.streams[-1]
        if not streams[0].ring.shape[3] == streams[1].ring.shape[3] == query.shape[3]:
            raise UsageError(f"layer {layer.index}: keys and values of different head_dim need --backend torch")
        lengths, count, rope = self._rows(query, context)
        stored = [
            Dense(stream.ring) if (packed := stream.store.whole()) is None else stored_as.packed(packed.parts)
            for stream, stored_as in zip(streams, self._formats[layer.index], strict=True)
        ]  # before the first flush there are no codes: `count` is 0, and the tensor is not read
        keys, values = (side_of_stream(*side, count) for side in zip(streams, stored, strict=True))
        shape = q.shape, plan_splits(q, keys, values)
        workspace = self._workspace(shape, lambda: new_workspace(q, keys, values))
        options = {"rope": rope, "window": layer.sliding_window, "workspace": workspace}
        return attend(q, keys, values, lengths, context.scaling, **options, backend="triton").unsqueeze(2)


@dataclass(frozen=True)
class ComponentFormat:
    """How a stream keeps codes of components: transforms by the names of a `PerHeadCodec`'s members, and their kv heads
    in the same order; heads is empty where all heads are kept alike, under the name ""."""

    transforms: Mapping[str, Transform]
    heads: tuple[tuple[int, ...], ...]

    def packed(self, parts: Mapping[str, Part]) -> Transformed | PerHead:
        """A stream's packed parts as the kernel takes them."""
        tensors = {name: part.tensor for name, part in parts.items()}
        if not self.heads:
            return _transformed(self.transforms[""], tensors)
        members = (_transformed(each, parts_of_member(tensors, name)) for name, each in self.transforms.items())
        return PerHead(tuple(members), self.heads)


def _transformed(transform: Transform, parts: Mapping[str, Tensor]) -> Transformed:
    codes = (parts[part.name] for part in fields.parts(fields.rate(transform.widths)))
    return Transformed(tuple(codes), parts.get("gain"), transform)


def formats(rotation: Rotation, plan: LayerPlan) -> tuple[ComponentFormat, ComponentFormat]:
    """The formats of a layer's keys and values, with the constants of their codecs as the kernel takes them."""
    rotated = None if rotation.style == "none" else (rotation.style, rotation.width)

    def of_keys(codec: TransformCodec) -> Transform:
        return Transform.of_keys(codec.widths, *_numbers(codec), codec.head_dim, rotated)

    def of_values(codec: TransformCodec) -> Transform:
        return Transform.of_values(codec.widths, *_numbers(codec), codec.head_dim)

    return _format(plan.keys.codec, of_keys), _format(plan.values.codec, of_values)


def _format(codec: AnyCodec, make: Callable[[TransformCodec], Transform]) -> ComponentFormat:
    members = codec.members if isinstance(codec, PerHeadCodec) else {"": (codec, ())}
    transforms = {}
    for name, (member, _) in members.items():
        assert isinstance(member, TransformCodec)
        transforms[name] = make(member)
    heads = tuple(heads for _, heads in members.values()) if isinstance(codec, PerHeadCodec) else ()
    return ComponentFormat(transforms, heads)


def _numbers(codec: TransformCodec) -> tuple[Tensor, Tensor, Tensor]:
    """(synthesis, mean, center) of a codec."""
    constants = codec.constants()
    return codec.synthesis, constants["mean"], constants["center"]
