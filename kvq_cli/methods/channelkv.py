"""ChannelKV (https://arxiv.org/abs/2405.03917, "coupled quantization"): 256 centroids for the chunks of adjacent
channels of a token."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.codebooks import ChunkMethod
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import BlockShape, CalibrationSpec


@register
@dataclass(frozen=True)
class ChannelKV(ChunkMethod):
    """Chunks of c = 8 / bits adjacent channels of one token as 8-bit codes. Every group of c channels of a kv head has
    its own codebook, for keys and for values, in every layer: nothing is normalized and nothing shared. With
    entries=65536, chunks of 16 / bits channels are 16-bit codes of one codebook for a layer's keys, and one for its
    values, normalized per channel (the thesis's section 7.1)."""

    name = "channelkv"
    paper = "https://arxiv.org/abs/2405.03917"
    summary = "codebooks over chunks of adjacent channels, calibrated with Fisher weights; pre-RoPE keys"
    calibration_result = "codebooks (Fisher k-means), rotations (OPQ)"

    def calibration(self, shape: ModelShape) -> CalibrationSpec:
        if shape.head_dim % self.chunk:
            longest = self.chunk * self.bits
            fitting = [str(bits) for bits in (1, 2, 4) if shape.head_dim % (longest // bits) == 0]
            mend = f"use bits={' or '.join(fitting)}" if fitting else "no chunk of channels does"
            raise UsageError(
                f"channelkv: bits={self.bits} are chunks of {self.chunk} channels, which do not divide "
                f"head_dim={shape.head_dim}; {mend}"
            )
        share = shape.head_dim if self.common else self.chunk
        stream = self.stream_spec((BlockShape("channel", 1, self.chunk),), share, False, shape)
        return CalibrationSpec(stream, stream, skip=self.sinks, fisher=self.fisher, hybrid="off")
