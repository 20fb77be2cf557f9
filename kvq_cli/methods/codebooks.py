"""The base of methods with calibrated codebooks: one spec defines both the calibration and the codec."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.hadamard import factors
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.nearest import LARGE_ENTRIES, MAX_ENTRIES
from kvq_cli.codecs.outliers import OutlierCodec, block_capacity
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.codecs.rotated import HadamardRotation, MatrixRotation, RotatedCodec
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import SOURCES, LayerPlan, Method, ModelShape, StreamPlan, of_stream, option
from kvq_cli.methods.specs import BlockShape, CalibrationSpec, CodebookSpec
from kvq_cli.methods.window import Window

#: Entries of a codebook with 8-bit codes.
ENTRIES = MAX_ENTRIES
#: The longest chunk whose distances to centroids are computed exactly; see `codecs.nearest`.
_LONGEST = 8


@dataclass(frozen=True)
class CodebookMethod(Method):
    """Keys before RoPE and values as codes of calibrated codebooks, specified by the `calibration` of a subclass."""

    calibrates = True
    caches = "K pre-RoPE, V"

    bits: int = option(2, "bits per number", choices=(1, 2, 4), why="an 8-bit code stands for 8, 4 or 2 numbers")
    outliers: float = option(0.0, "fraction of the numbers kept in 16 bits (thesis: 0.01)", at_least=0.0, at_most=1.0)
    sinks: int = option(8, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0, runtime=True)
    buffer: int | None = option(
        None,
        "pack tokens in multiples of this many; none: in chunks, with outliers in outlier blocks",
        at_least=1,
        runtime=True,
    )
    fisher: bool = option(True, "weight k-means by squared gradients")

    @abstractmethod
    def calibration(self, shape: ModelShape) -> CalibrationSpec: ...

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        keys, values = (self.stream_plan(kind, layer, shape, tensors) for kind in "kv")
        return LayerPlan(keys, values)

    def stream_plan(self, kind: str, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> StreamPlan:
        self.refuse_without_artifact(tensors)
        spec = self.calibration(shape).stream(kind)
        codec = codec_of(spec, of_stream(tensors, kind), shape, f"layers.{layer}.{kind}")
        # All layers of a hybrid pack the longest candidate chunk at a time: packing token by token would cost a
        # tenth of a decode step on a CPU, and all layers then keep the same tokens in full precision.
        flush = math.lcm(codec.block_tokens, self.buffer or 1, *(block.tokens for block in spec.shapes))
        return StreamPlan(SOURCES[kind], codec, Window(self.sinks, self.recent, flush))


@dataclass(frozen=True)
class ChunkMethod(CodebookMethod):
    """Chunks of adjacent numbers as 8-bit codes, or as 16-bit codes of one codebook for a layer's keys or values (the
    thesis's section 7.1)."""

    rotation: str = option(
        "none",
        "rotate the channels of each head first: by a Hadamard matrix, or by a calibrated one (OPQ)",
        choices=("none", "hadamard", "opq"),
    )
    entries: int = option(
        ENTRIES,
        "centroids of a codebook; 65536: 16-bit codes of chunks twice as long, one codebook for all channels and heads "
        "of a layer's keys or values, which are normalized",
        choices=(ENTRIES, LARGE_ENTRIES),
    )

    @property
    def chunk(self) -> int:
        """Numbers that one code stands for. UsageError for more than 8."""
        length = int(math.log2(self.entries)) // self.bits
        if length > _LONGEST:
            raise UsageError(
                f"{self.name}: bits={self.bits} with entries={self.entries} are chunks of {length} numbers, "
                f"{_LONGEST} at most: use bits=2 or 4"
            )
        return length

    @property
    def common(self) -> bool:
        """Whether all channels and heads of a layer's keys, or values, share a codebook."""
        return self.entries > ENTRIES

    def stream_spec(
        self, shapes: tuple[BlockShape, ...], share: int, normalize: bool, shape: ModelShape
    ) -> CodebookSpec:
        """The calibration of keys or values. share, normalize: of codebooks that are not common. UsageError for a
        head_dim without the rotation asked for, outliers too few for one per block, and outliers or a calibrated
        rotation of 16-bit codes."""
        check_outliers(self.outliers, shape)
        if self.rotation == "hadamard":
            factors(shape.head_dim)
        if self.common and self.outliers:
            raise UsageError(
                f"{self.name}: entries={self.entries} leaves no outliers: set outliers=0, or entries={ENTRIES}"
            )
        if self.common and self.rotation == "opq":  # its codebooks are clustered from far fewer points
            raise UsageError(
                f"{self.name}: rotation=opq has no codebooks of entries={self.entries}: set rotation=hadamard or none, "
                f"or entries={ENTRIES}"
            )
        return CodebookSpec(
            shapes,
            self.entries,
            share,
            normalize=normalize or self.common,
            outliers=self.outliers,
            across_heads=self.common,
            rotation=self.rotation,
        )


def check_outliers(outliers: float, shape: ModelShape) -> None:
    """Raise UsageError for a fraction that is too small for one outlier per block."""
    if outliers:
        block_capacity(outliers, shape.head_dim)


def codec_of(spec: CodebookSpec, tensors: Mapping[str, TensorLike], shape: ModelShape, where: str) -> Codec:
    """The codec of one stream: `choice` gives each head's block shape, `centroids.<shape>` the codebooks.

    tensors: named as by `calibrate_stream`. where: their prefix in the artifact, for messages. Raises KvqError naming a
    tensor that is missing or has the wrong shape.
    """

    def get(name: str) -> TensorLike:
        if name not in tensors:
            raise KvqError(f"the artifact has no tensor {where}.{name}; calibrate again with these options")
        return tensors[name]

    choice = get("choice").tolist()
    if len(choice) != shape.kv_heads or not set(choice) <= set(range(len(spec.shapes))):
        raise KvqError(f"{where}.choice={choice} does not name a block shape for each of {shape.kv_heads} kv heads")
    members = {}
    for i in sorted(set(choice)):
        block, heads = spec.shapes[i], [head for head, chosen in enumerate(choice) if chosen == i]
        statistics = [get(name)[heads] for name in ("mean", "std")] if spec.normalize else []
        centroids = get(f"centroids.{block.name}")
        member = CodebookCodec(centroids, (block.tokens, block.channels), shape.head_dim, *statistics)
        members[block.name] = (member, heads)
    codec: Codec = (
        next(iter(members.values()))[0]
        if len(members) == 1
        else PerHeadCodec(members, getattr(centroids, "device", None))
    )
    if spec.per_token:
        return PerTokenCodec(codec, shape.kv_heads, shape.head_dim, spec.outliers, shape.dtype)
    if spec.outliers:
        codec = OutlierCodec(codec, get("lower"), get("upper"), spec.outliers, shape.dtype)
    if spec.rotation == "hadamard":
        return RotatedCodec(codec, HadamardRotation(shape.head_dim))
    if spec.rotation == "opq":
        return RotatedCodec(codec, MatrixRotation(get("rotation"), get("spread")))
    return codec
