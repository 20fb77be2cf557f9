"""ChannelKV (https://arxiv.org/abs/2405.03917, "coupled quantization"): 256 centroids for the chunks of adjacent
channels of a token."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import BlockShape, CalibrationSpec, CodebookSpec, ModelShape
from kvq_cli.methods.codebooks import ENTRIES, CodebookMethod, check_outliers, check_rotation, rotation_option
from kvq_cli.methods.registry import register


@register
@dataclass(frozen=True)
class ChannelKV(CodebookMethod):
    """Chunks of c = 8 / bits adjacent channels of one token as 8-bit codes. Every group of c channels of a kv head has
    its own codebook, for keys and for values, in every layer: nothing is normalized and nothing shared."""

    name = "channelkv"
    paper = "https://arxiv.org/abs/2405.03917"
    summary = "codebooks over chunks of adjacent channels, calibrated with Fisher weights; pre-RoPE keys"
    calibration_result = "codebooks (Fisher k-means), rotations (OPQ)"

    rotation: str = rotation_option()

    @property
    def chunk(self) -> int:
        """c: adjacent channels that one code stands for."""
        return 8 // self.bits

    def calibration(self, shape: ModelShape) -> CalibrationSpec:
        if shape.head_dim % self.chunk:
            fitting = [str(bits) for bits in (1, 2, 4) if shape.head_dim % (8 // bits) == 0]
            mend = f"use bits={' or '.join(fitting)}" if fitting else "no chunk of channels does"
            raise UsageError(
                f"channelkv: bits={self.bits} are chunks of {self.chunk} channels, which do not divide "
                f"head_dim={shape.head_dim}; {mend}"
            )
        check_outliers(self.outliers, shape)
        check_rotation(self.rotation, shape)
        block = BlockShape("channel", 1, self.chunk)
        stream = CodebookSpec((block,), ENTRIES, self.chunk, False, self.outliers, rotation=self.rotation)
        return CalibrationSpec(stream, stream, skip=self.sinks, fisher=self.fisher, hybrid="off")
