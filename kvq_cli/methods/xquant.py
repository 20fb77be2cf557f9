"""XQuant (https://arxiv.org/abs/2508.10395): cache the layer input, and rematerialize keys and values from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.first_channel import FirstChannelCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import TensorLike, TensorSpec
from kvq_cli.codecs.uniform import Axis, UniformCodec
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import FactorSpec
from kvq_cli.methods.window import Window

if TYPE_CHECKING:
    from torch import Tensor

#: Bits that mean no quantization.
EXACT = 16
BITS = (1, 2, 3, 4, 8, EXACT)


@dataclass(frozen=True)
class LayerInputMethod(Method):
    """The base of XQuant and XQuant-CL: groups, windows, and weight factors where X is larger than keys and values."""

    paper = "https://arxiv.org/abs/2508.10395"
    calibrates = True

    bits: int = option(
        2, "bits per number; 16: not quantized", choices=BITS, why="others cannot be packed", runtime=True
    )
    # A group is decoded at once, and rotated by tables of at most this many tokens.
    group: int = option(128, "numbers that share a scale and a zero-point", at_least=4, at_most=4096, runtime=True)
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(0, "newest tokens kept in full precision, beside incomplete groups", at_least=0, runtime=True)

    @property
    def window(self) -> Window:
        """The window of all streams: whole groups are packed."""
        return Window(self.sinks, self.recent, self.group)

    def needs_artifact(self, shape: ModelShape) -> bool:
        return not keeps_input(shape)


@register
@dataclass(frozen=True)
class XQuant(LayerInputMethod):
    """Caches X, the input of a layer's attention after its norm.

    Where X is smaller than keys and values together (MHA), X is quantized per token, once for both (section 3.1). Under
    GQA and MQA, X U_k is quantized per channel and X U_v per token, with W_k = U_k S_k B_k^T (section 3.3.1); S B^T
    turns them into keys and values. Groups of channels have `group` channels, or the largest divisor of the width below
    that.
    """

    name = "xquant"
    summary = "the layer input instead of keys and values, quantized uniformly; under GQA its latents by an SVD"
    caches = "layer input X, or X U_k, X U_v"
    calibration_result = "SVD of W_k, W_v (GQA)"

    base_layers: int = option(0, "first layers with `base_bits` (Table 4: 3)", at_least=0, runtime=True)
    base_bits: int = option(4, "bits of these layers", choices=BITS, why="others cannot be packed", runtime=True)
    first_channel: bool = option(False, "keep channel 0 of X U_k in 16 bits (appendix B)", runtime=True)

    def calibration(self, shape: ModelShape) -> FactorSpec:
        return FactorSpec((latent_names(shape),) * shape.layers)

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        bits = self.base_bits if layer in shape.cached_layers[: self.base_layers] else self.bits
        return layer_plan(bits, self.group, self.window, shape, tensors, layer, self.first_channel)


def keeps_input(shape: ModelShape) -> bool:
    """Whether X is smaller than keys and values together, as it always is under MHA."""
    return shape.hidden_size < 2 * shape.kv_heads * shape.head_dim


def latent_names(shape: ModelShape) -> tuple[str, ...]:
    """The projections that are factorized for a layer of XQuant; see `FactorSpec`."""
    return () if keeps_input(shape) else ("k", "v")


def layer_plan(
    bits: int,
    group: int,
    window: Window,
    shape: ModelShape,
    tensors: Mapping[str, TensorLike],
    layer: int,
    first_channel: bool = False,
) -> LayerPlan:
    """The plan of a layer of XQuant: X itself or latents, depending on the shape."""
    if keeps_input(shape):
        return whole_input(bits, group, window, shape)
    streams = {}
    axes: dict[str, Axis] = {"k": "channel", "v": "token"}
    for name, axis in axes.items():
        down, up = (factor(tensors, f"{name}.{side}", layer, shape) for side in ("down", "up"))
        width = down.shape[1]
        codec = quantizer(bits, axis, group, width, shape)
        if first_channel and name == "k":
            codec = FirstChannelCodec(quantizer(bits, axis, group, width - 1, shape), shape.dtype)
        streams[name] = StreamPlan("input", codec, window, down, up)
    return LayerPlan(streams["k"], streams["v"])


def whole_input(bits: int, group: int, window: Window, shape: ModelShape) -> LayerPlan:
    """X itself, per token, one store for keys and values."""
    stream = StreamPlan("input", quantizer(bits, "token", group, shape.hidden_size, shape), window)
    return LayerPlan(stream, stream, shared=True)


def quantizer(bits: int, axis: Axis, group: int, width: int, shape: ModelShape) -> Codec:
    """Asymmetric uniform quantization of numbers `[batch, 1, tokens, width]`, or none for 16 bits."""
    if bits == EXACT:
        return IdentityCodec()
    if axis == "token":
        group = next(g for g in range(min(group, width), 0, -1) if width % g == 0)
    return UniformCodec(bits, axis, group, width, shape.dtype)


def factor(tensors: Mapping[str, TensorLike], name: str, layer: int, shape: ModelShape) -> Tensor:
    """A tensor of the artifact, in the model's dtype, or its spec; KvqError where it has none."""
    if name not in tensors:
        raise KvqError(f"the artifact has no tensor layers.{layer}.{name}; calibrate again with these options")
    tensor = tensors[name]
    if isinstance(tensor, TensorSpec):  # a plan that is never run
        return cast("Tensor", tensor.to(shape.dtype))
    return tensor.to(shape.torch_dtype)
