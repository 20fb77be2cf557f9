"""KV cache formats of llama.cpp (https://github.com/ggml-org/llama.cpp), vLLM (https://docs.vllm.ai) and transformers
(https://huggingface.co/docs/transformers/kv_cache), exactly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.served_formats import Q4_0, Q8_0, Fp8PerTokenHead, Int4PerTokenHead, QuantoCodec
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window

#: The least width of llama.cpp's rotation, and that of values.
_LEAST_ROTATION = 64


@dataclass(frozen=True)
class ServedFormat(Method):
    """The base of formats of other engines, which keep no token in full precision unless asked to here."""

    caches = "K post-RoPE, V"

    bits: int = option(4, "bits of a code", choices=(4, 8), why="the engine has these formats")
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0)
    buffer: int = option(1, "pack tokens in multiples of this many", at_least=1)

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        window = Window(self.sinks, self.recent, self.buffer)
        keys, values = (self.codec(kind, shape) for kind in "kv")
        return LayerPlan(StreamPlan("post_rope", keys, window), StreamPlan("value", values, window))

    @abstractmethod
    def codec(self, kind: str, shape: ModelShape) -> Codec:
        """Return the format of keys ("k") or values ("v")."""


@register
@dataclass(frozen=True)
class LlamaCpp(ServedFormat):
    """`--cache-type-k` and `-v` `q4_0` (`bits=4`) or `q8_0` (`bits=8`): blocks of 32 channels of a token with a 16-bit
    scale, 4.5 or 8.5 bits per number.

    As llama.cpp does where head_dim is a multiple of 64, keys and values are rotated by Hadamard matrices first: keys
    in runs of the largest power of two that divides head_dim, values in runs of 64 (`rotation=off`: its environment
    variable LLAMA_ATTN_ROT_DISABLE). Keys are cached after RoPE. Attention is computed in full precision from decoded
    numbers, where llama.cpp's CPU path rounds queries to 8 bits. A head_dim that is no multiple of 32, which llama.cpp
    refuses, has smaller blocks here.
    """

    name = "llama-cpp"
    paper = "https://github.com/ggml-org/llama.cpp"
    summary = "llama.cpp's q4_0 and q8_0: blocks of 32 channels with a scale, Hadamard-rotated"

    rotation: bool = option(True, "rotate channels by Hadamard matrices where head_dim is a multiple of 64")

    def codec(self, kind: str, shape: ModelShape) -> Codec:
        head_dim = shape.head_dim
        codec = (Q4_0 if self.bits == 4 else Q8_0)(head_dim)
        if not self.rotation or head_dim % _LEAST_ROTATION:
            return codec
        block = _power_of_two(head_dim) if kind == "k" else _LEAST_ROTATION
        return RotatedCodec(codec, HadamardRotation(head_dim, block=block))


@register
@dataclass(frozen=True)
class PerTokenHead(ServedFormat):
    """`--kv-cache-dtype int4_per_token_head` (`bits=4`) or `fp8_per_token_head` (`bits=8`): one 32-bit scale per token
    and head, 4.25 or 8.25 bits per number at head_dim 128.

    As in vLLM, int4 is of keys and values that are rotated by Hadamard matrices with random signs, in runs of the
    largest power of two that divides head_dim, and its zero-point lies in the scale's lowest bits. Differences: the
    rotation is orthonormal and its signs are kvq's (vLLM leaves out the factor and has its own signs), rotated numbers
    are not rounded to the model's dtype, and queries stay in full precision.
    """

    name = "per-token-head"
    paper = "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache"
    summary = "vLLM's int4 (Hadamard-rotated) and fp8 with one scale per token and head"

    def codec(self, kind: str, shape: ModelShape) -> Codec:
        head_dim = shape.head_dim
        if self.bits == 8:
            return Fp8PerTokenHead(head_dim)
        rotation = HadamardRotation(head_dim, flip=True, block=_power_of_two(head_dim))
        return RotatedCodec(Int4PerTokenHead(head_dim), rotation)


@register
@dataclass(frozen=True)
class Quanto(ServedFormat):
    """transformers' `QuantizedCache("quanto", ...)` with its defaults, `axis_key=0` and `axis_value=0`: uniform codes
    with a 16-bit scale and zero-point per `group` adjacent channels of a token, 2.5 or 4.5 bits per number.

    These groups are per token, of keys as of values, although transformers' documentation says per channel: the first
    axis of `[batch, kv_heads, tokens, head_dim]` is cut into runs of numbers that are adjacent in memory. A head_dim
    that the group does not divide has smaller groups here. As `residual_length` does, `buffer` says how many tokens
    wait in full precision. Differences: transformers packs the whole prompt at once, kvq all multiples of `buffer`;
    whenever the buffer is full, transformers quantizes all tokens again from decoded numbers, each at its new rounding,
    kvq each token once; decoded numbers are rounded once, not twice; scales of a 32-bit model have 16 bits.
    """

    name = "quanto"
    paper = "https://huggingface.co/docs/transformers/kv_cache"
    summary = "transformers' QuantizedCache (quanto): uniform codes in groups of channels of a token"

    bits: int = option(4, "bits of a code", choices=(2, 4), why="quanto has these formats")
    group: int = option(64, "numbers that share a scale and a zero-point (q_group_size)", at_least=1)
    buffer: int = option(128, "pack tokens in multiples of this many (residual_length)", at_least=1)

    def codec(self, kind: str, shape: ModelShape) -> Codec:
        return QuantoCodec(self.bits, self.group, shape.head_dim, shape.dtype)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number
