"""TemporalKV (thesis): 256 centroids for the chunks of adjacent tokens of a channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import (
    BlockShape,
    CalibrationSpec,
    CodebookSpec,
    LayerPlan,
    Method,
    ModelShape,
    StreamPlan,
    option,
)
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window

ENTRIES = 256


@register
@dataclass(frozen=True)
class TemporalKV(Method):
    """Chunks of 8 / bits adjacent tokens of one channel as 8-bit codes; a layer or head may use chunks of adjacent
    channels (ChannelKV's) instead, where these have the lower Fisher-weighted error on held-out calibration data."""

    name = "temporalkv"
    paper = "thesis: TemporalKV"
    summary = "codebooks over chunks of adjacent tokens, calibrated with Fisher weights; pre-RoPE keys"
    calibrates = True

    bits: int = option(2, "bits per number", choices=(1, 2, 4), why="an 8-bit code stands for 8, 4 or 2 numbers")
    hybrid: str = option(
        "layer", "choose the chunk's shape per layer, per head, or not at all", choices=("layer", "head", "off")
    )
    shapes: str = option(
        "thesis",
        "what hybrid chooses among: the thesis's two shapes, or all of the bit budget",
        choices=("thesis", "all"),
    )
    share: int | None = option(None, "adjacent channels that share a codebook; none: the chunk's length", at_least=1)
    normalize_keys: bool = option(True, "cluster keys as (k - mean) / std per channel")
    normalize_values: bool = option(False, "the same for values")
    outliers: float = option(0.0, "fraction of the numbers kept in 16 bits (thesis: 0.01)", at_least=0.0, at_most=1.0)
    sinks: int = option(8, "first tokens that stay exact", at_least=0)
    recent: int = option(0, "newest tokens that always stay exact", at_least=0)
    fisher: bool = option(True, "weight k-means by squared gradients")

    @property
    def nominal_bits(self) -> float:
        return float(self.bits)

    @property
    def chunk(self) -> int:
        return 8 // self.bits

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
            CodebookSpec(self.block_shapes(), ENTRIES, share, normalize, self.outliers)
            for normalize in (self.normalize_keys, self.normalize_values)
        )
        return CalibrationSpec(keys, values, skip=self.sinks, fisher=self.fisher, hybrid=self.hybrid)

    def _share(self, shape: ModelShape) -> int:
        share = self.share or self.chunk
        if shape.head_dim % share:
            fitting = ", ".join(str(s) for s in range(1, shape.head_dim + 1) if shape.head_dim % s == 0)
            raise UsageError(f"temporalkv: share={share} does not divide head_dim={shape.head_dim}; use {fitting}")
        widest = max(block.channels for block in self.block_shapes())
        if share % widest:
            raise UsageError(f"temporalkv: share={share} cannot hold chunks of {widest} channels; use a multiple of it")
        return share

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        if not tensors:
            raise UsageError(
                "temporalkv needs an artifact: run `kvq calibrate --method temporalkv`, then give --artifact"
            )
        self._share(shape)

        def stream(source: str, kind: str, normalize: bool) -> StreamPlan:
            own = {key.removeprefix(f"{kind}."): t for key, t in tensors.items() if key.startswith(f"{kind}.")}
            codec = self._codec(own, shape, normalize, f"layers.{layer}.{kind}")
            return StreamPlan(source, codec, Window(self.sinks, self.recent, codec.block_tokens))

        return LayerPlan(
            keys=stream("pre_rope", "k", self.normalize_keys),
            values=stream("value", "v", self.normalize_values),
        )

    def _codec(self, tensors: Mapping[str, Tensor], shape: ModelShape, normalize: bool, where: str) -> Codec:
        """One stream's codec: each head's blocks have the shape that `choice` says, codebooks `centroids.<shape>`."""

        def get(name: str) -> Tensor:
            if name not in tensors:
                raise KvqError(f"the artifact has no tensor {where}.{name}; calibrate again with these options")
            return tensors[name]

        choice, candidates = get("choice").tolist(), self.block_shapes()
        if len(choice) != shape.kv_heads or not set(choice) <= set(range(len(candidates))):
            raise KvqError(f"{where}.choice={choice} does not name a block shape for each of {shape.kv_heads} kv heads")
        members = {}
        for i in sorted(set(choice)):
            block, heads = candidates[i], [head for head, chosen in enumerate(choice) if chosen == i]
            statistics = [get(name)[heads] for name in ("mean", "std")] if normalize else []
            centroids = get(f"centroids.{block.name}")
            codec = CodebookCodec(centroids, (block.tokens, block.channels), shape.head_dim, *statistics)
            members[block.name] = (codec, heads)
        codec = next(iter(members.values()))[0] if len(members) == 1 else PerHeadCodec(members, centroids.device)
        if self.outliers:
            codec = OutlierCodec(codec, get("lower"), get("upper"), self.outliers, shape.dtype)
        return codec
