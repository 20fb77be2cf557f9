"""KIVI (https://arxiv.org/abs/2402.02750): asymmetric uniform quantization, keys per channel, values per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.uniform import Axis, UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window


@dataclass(frozen=True)
class KiviGroups(Method):
    """The base of KIVI and SQuat. Keys: groups of `group` tokens of a channel. Values: groups of `group` channels of a
    token.

    KIVI's residual windows: keys are packed `residual` at a time; the newest `residual` values stay in full precision.
    With `recent` set (KIVI+sink), the newest `recent` keys and values do, and keys are packed one group at a time.
    Values are packed token by token, unless `buffer` makes them wait as keys do.
    """

    bits: int = option(2, "bits per number", choices=(1, 2, 3, 4, 8), why="others cannot be packed")
    group: int = option(32, "numbers that share a scale and a zero-point", at_least=1)
    residual: int = option(128, "length of KIVI's residual windows; a multiple of the group", at_least=1)
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int | None = option(None, "newest tokens kept in full precision, instead of `residual`", at_least=0)
    buffer: int | None = option(None, "pack tokens in multiples of this many; none: as the paper does", at_least=1)
    pre_rope: bool = option(False, "cache keys before RoPE (KIVI*)")

    def __post_init__(self) -> None:
        super().__post_init__()
        cost = self.bits + 32 / self.group
        if cost >= 16:
            raise UsageError(
                f"{self.name}: group={self.group} takes {cost:g} bits per number with its 16-bit scale and zero-point, "
                "which is no compression; choose a larger group"
            )
        if self.recent is None and self.residual % self.group:
            raise UsageError(f"{self.name}: residual={self.residual} is not a multiple of group={self.group}")

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        return self.plan_of(self.quantizer("channel", shape), self.quantizer("token", shape))

    def quantizer(self, axis: Axis, shape: ModelShape) -> UniformCodec:
        """The uniform quantizer with these options."""
        return UniformCodec(self.bits, axis, self.group, shape.head_dim, shape.dtype)

    def plan_of(self, keys: Codec, values: Codec) -> LayerPlan:
        """The plan of a layer packed by these codecs: keys in groups of tokens, or token by token as values are."""

        def window(recent: int, flush: int) -> Window:
            return Window(self.sinks, recent, math.lcm(flush, self.buffer or 1))

        value_window = window(self.residual if self.recent is None else self.recent, 1)
        key_window = value_window
        if keys.block_tokens > 1:
            key_window = window(0, self.residual) if self.recent is None else window(self.recent, self.group)
        return LayerPlan(
            keys=StreamPlan("pre_rope" if self.pre_rope else "post_rope", keys, key_window),
            values=StreamPlan("value", values, value_window),
        )


@register
@dataclass(frozen=True)
class Kivi(KiviGroups):
    """Asymmetric uniform quantization: keys in groups of tokens of a channel, values in groups of channels of a token.

    `rotation=hadamard` (QuaRot, https://arxiv.org/abs/2404.00456, section 4.2) rotates the channels of each head of
    keys (after RoPE, unless `pre_rope`) and of values by a Hadamard matrix before they are quantized, and queries and
    outputs with them: scores are unchanged but for rounding. QuaRot's own groups are those of `key_axis=token`, with
    `group` = head_dim; it also clips ranges (0.95), which is not done here. The full-precision windows are not rotated.
    head_dim must be a power of two, or 12 or 20 times one.
    """

    name = "kivi"
    paper = "https://arxiv.org/abs/2402.02750"
    summary = "uniform quantization: keys in groups of tokens per channel, values in groups of channels per token"
    caches = "K post- or pre-RoPE, V"

    rotation: str = option(
        "none", "rotate the channels of each head first: QuaRot's Hadamard transform", choices=("none", "hadamard")
    )
    key_axis: str = option(
        "channel",
        "keys in groups of tokens of a channel (KIVI), or of channels of a token (QuaRot)",
        choices=("channel", "token"),
    )

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        keys: Codec = self.quantizer("token" if self.key_axis == "token" else "channel", shape)
        values: Codec = self.quantizer("token", shape)
        if self.rotation == "hadamard":
            keys, values = (RotatedCodec(codec, HadamardRotation(shape.head_dim)) for codec in (keys, values))
        return self.plan_of(keys, values)
