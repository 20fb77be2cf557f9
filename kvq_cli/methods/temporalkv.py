"""TemporalKV (thesis): 256 centroids for the chunks of adjacent tokens of a channel."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape, option
from kvq_cli.methods.codebooks import ChunkMethod
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import BlockShape, CalibrationSpec


@register
@dataclass(frozen=True)
class TemporalKV(ChunkMethod):
    """Chunks of 8 / bits adjacent tokens of one channel as 8-bit codes; a layer or head may use chunks of adjacent
    channels (ChannelKV's) instead, where these have the lower Fisher-weighted error on held-out calibration data."""

    name = "temporalkv"
    paper = "thesis: TemporalKV"
    summary = "codebooks over chunks of adjacent tokens, calibrated with Fisher weights; pre-RoPE keys"
    calibration_result = "codebooks (Fisher k-means), mean, std, thresholds, rotations (OPQ)"

    hybrid: str = option(
        "layer", "choose the block shape per layer, per head, or not at all", choices=("layer", "head", "off")
    )
    shapes: str = option(
        "thesis",
        "candidate block shapes: the thesis's two, or all of the bit budget",
        choices=("thesis", "all"),
    )
    share: int | None = option(
        None, "adjacent channels that share a codebook; none: the chunk's length (of 65536 entries, all)", at_least=1
    )
    normalize_keys: bool = option(True, "cluster keys as (k - mean) / std per channel")
    normalize_values: bool = option(False, "cluster values as (v - mean) / std per channel")

    def block_shapes(self) -> tuple[BlockShape, ...]:
        """The candidate shapes of this bit budget; `choice` tensors hold indices into them."""
        shapes = [BlockShape("temporal", self.chunk, 1)]
        if self.hybrid != "off":
            shapes.append(BlockShape("channel", 1, self.chunk))
            if self.shapes == "all":
                shapes += [BlockShape(f"{t}x{self.chunk // t}", t, self.chunk // t) for t in (2, 4) if t < self.chunk]
        return tuple(shapes)

    def calibration(self, shape: ModelShape) -> CalibrationSpec:
        share = self._share(shape)
        keys, values = (
            self.stream_spec(self.block_shapes(), share, normalize, shape)
            for normalize in (self.normalize_keys, self.normalize_values)
        )
        return CalibrationSpec(keys, values, skip=self.sinks, fisher=self.fisher, hybrid=self.hybrid)

    def _share(self, shape: ModelShape) -> int:
        share = self.share or (shape.head_dim if self.common else self.chunk)
        if shape.head_dim % share:
            fitting = ", ".join(str(s) for s in range(1, shape.head_dim + 1) if shape.head_dim % s == 0)
            raise UsageError(f"temporalkv: share={share} does not divide head_dim={shape.head_dim}; use {fitting}")
        widest = max(block.channels for block in self.block_shapes())
        if share % widest:
            raise UsageError(f"temporalkv: share={share} cannot hold chunks of {widest} channels; use a multiple of it")
        return share
