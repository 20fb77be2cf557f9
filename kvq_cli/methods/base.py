"""`Method`, the base of all compression methods: hyperparameters in, one plan per layer out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kvq_cli.codecs.base import AnyCodec, Codec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch
from kvq_cli.methods.window import Window

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ModelShape:
    """The architecture sizes of a model."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StreamPlan:
    """How the keys or the values of a layer are cached.

    source: "post_rope" or "pre_rope" for keys, "value" for values; "input" for both: the layer input X `[batch, tokens,
            hidden_size]` or its latents are cached, and keys (before RoPE) or values are rematerialized when read.
    down:   `[hidden_size, rank]`: the latents X down are cached; None: X itself.
    up:     `[rank, kv_heads * head_dim]` turns latents into the output of the model's projection, without its bias;
            None: the model's projection is used.
    """

    source: str
    codec: AnyCodec
    window: Window
    down: Tensor | None = None
    up: Tensor | None = None

    def latents(self, x: Tensor) -> Tensor:
        """The cached latents of the layer input `[batch, tokens, hidden_size]`: `[batch, 1, tokens, rank]`."""
        return (x if self.down is None else x @ self.down).unsqueeze(1)


#: What methods that keep keys before RoPE cache of each stream.
SOURCES = {"k": "pre_rope", "v": "value"}


@dataclass(frozen=True)
class CrossLayer:
    """A layer's part in the cross-layer sum X^_i = X^_{i-1} + d_i over packed tokens, of which only d_i is stored.

    first:       the sum starts here: this layer stores X itself, and X^ is the decoded X.
    last:        no later layer needs X^.
    accumulator: packs X^ from layer to layer while a pass runs; None: X^ stays in the model's dtype.
    """

    first: bool
    last: bool
    accumulator: Codec | None = None


@dataclass(frozen=True)
class LayerPlan:
    """The plans of a layer's keys and values. shared: one store, planned as `keys`, serves both (source "input")."""

    keys: StreamPlan
    values: StreamPlan
    shared: bool = False
    cross_layer: CrossLayer | None = None

    @property
    def kept(self) -> tuple[StreamPlan, ...]:
        """The plans of the streams that exist."""
        return (self.keys,) if self.shared else (self.keys, self.values)


@dataclass(frozen=True)
class BlockShape:
    """A codebook's block: `tokens` adjacent tokens of `channels` adjacent channels. `name` labels its tensors."""

    name: str
    tokens: int
    channels: int

    @property
    def size(self) -> int:
        """Numbers of a block."""
        return self.tokens * self.channels


@dataclass(frozen=True)
class CodebookSpec:
    """Calibration of the codebooks of one stream: keys or values.

    shapes:    candidates, chosen by held-out Fisher-weighted error; the tensor `choice` (int8) holds indices into them.
    entries:   centroids per codebook.
    share:     adjacent channels that use one codebook: `head_dim / share` codebooks per kv head.
    normalize: cluster (x - mean) / std, per channel; else x.
    outliers:  fraction of numbers kept in 16 bits, half of them below `lower`, half above `upper`. 0: none.
    by_range:  use the midpoint and half the distance of the outlier thresholds as mean and std (KVQuant).
    per_token: scale by the range of each token instead, computed online with its outliers (KVQuant's values).
    across_heads: the kv heads share their codebooks, which are stored once (KVQuant).
    rotation:  rotate the channels of each head first: "none", by a "hadamard" matrix, or by a calibrated matrix
               ("opq"), the tensor `rotation`.
    """

    shapes: tuple[BlockShape, ...]
    entries: int
    share: int
    normalize: bool
    outliers: float = 0.0
    by_range: bool = False
    per_token: bool = False
    across_heads: bool = False
    rotation: str = "none"


@dataclass(frozen=True)
class FactorSpec:
    """Calibration by factorizing projection weights; no text is read.

    layers: for each layer, the factorized weights: "k" for W_k = U S B^T, "v" for W_v, "x" for both, [W_k W_v]. The
    artifact stores U as `<name>.down` `[hidden_size, rank]`, and S B^T as `k.up`, `v.up` `[rank, kv_heads * head_dim]`.
    """

    layers: tuple[tuple[str, ...], ...]

    @property
    def reads_text(self) -> bool:
        """Whether the factors depend on activations on text, beside the weights."""
        return False

    def rank(self, name: str, shape: ModelShape) -> int:
        """The latents of a factorized weight: of W_k and W_v all."""
        size = shape.kv_heads * shape.head_dim
        return min(shape.hidden_size, 2 * size if name == "x" else size)


@dataclass(frozen=True)
class LowRankSpec(FactorSpec):
    """Calibration by low-rank factors of W_k and W_v, for groups of heads (PALU).

    heads:    kv heads of a group.
    latents:  of a group, together.
    whiten:   minimize the error of W x on text; else of W itself.
    hadamard: rotate the latents of each group by a Hadamard matrix, which is multiplied into the factors.
    """

    heads: int
    latents: int
    whiten: bool
    hadamard: bool

    @property
    def reads_text(self) -> bool:
        return self.whiten

    def rank(self, name: str, shape: ModelShape) -> int:
        return shape.kv_heads // self.heads * self.latents


def captures_activations(spec: AnySpec) -> bool:
    """Whether a calibration captures keys, values and gradients on text; else it factorizes weights."""
    return not isinstance(spec, FactorSpec)


def reads_text(spec: AnySpec) -> bool:
    """Whether a calibration runs the model on text; else it factorizes weights alone."""
    return not isinstance(spec, FactorSpec) or spec.reads_text


@dataclass(frozen=True)
class TransformSpec:
    """Calibration of Karhunen-Loeve transforms, and of codebooks for chunks of their components.

    bits:      bits per number of the codes of all layers' keys and values together, at most.
    join_keys, join_values: one transform for all kv heads of a layer; else one per head.
    skip:      first tokens of each sample to leave out (attention sinks).
    fisher:    weight k-means by squared gradients.
    metric:    the quadratic form in which errors count: "full", the matrix E[g g^T] of the gradients, "diagonal" (of
               that matrix) or "none" (squared errors).
    allocate:  codes are allocated over the whole "model", or to each "stream" by its share of the numbers.
    """

    bits: float
    join_keys: bool
    join_values: bool
    skip: int
    fisher: bool
    metric: str
    allocate: str

    def groups(self, kind: str, shape: ModelShape) -> tuple[int, int]:
        """(groups, channels of a group) of a layer's keys ("k") or values ("v")."""
        joined = self.join_keys if kind == "k" else self.join_values
        return (1, shape.kv_heads * shape.head_dim) if joined else (shape.kv_heads, shape.head_dim)


@dataclass(frozen=True)
class CalibrationSpec:
    """Calibration by clustering captured keys and values into codebooks.

    skip:   first tokens of each sample to leave out (attention sinks).
    fisher: weight k-means by squared gradients.
    hybrid: choose among a stream's shapes per "layer", per "head", or not at all ("off": the first shape).
    """

    keys: CodebookSpec
    values: CodebookSpec
    skip: int
    fisher: bool
    hybrid: str

    @property
    def streams(self) -> tuple[CodebookSpec, CodebookSpec]:
        """Keys, values."""
        return self.keys, self.values

    def stream(self, kind: str) -> CodebookSpec:
        """Keys ("k") or values ("v")."""
        return self.streams["kv".index(kind)]


#: The calibration of one stream; None: it needs none.
StreamSpec: TypeAlias = CalibrationSpec | TransformSpec | None


@dataclass(frozen=True)
class MixedSpec:
    """Calibration of each stream by the method that serves it.

    layers: for each layer, the calibrations of its keys and of its values. A `TransformSpec` allocates its bits inside
            the stream.
    skip:   first tokens of each sample to leave out (attention sinks).
    """

    skip: int
    layers: tuple[tuple[StreamSpec, StreamSpec], ...]


#: The calibration of a method.
AnySpec: TypeAlias = CalibrationSpec | TransformSpec | FactorSpec | MixedSpec


def stream_spec(spec: CalibrationSpec | TransformSpec | MixedSpec, layer: int, kind: str) -> StreamSpec:
    """The calibration of a layer's keys ("k") or values ("v")."""
    return spec.layers[layer]["kv".index(kind)] if isinstance(spec, MixedSpec) else spec


def of_stream(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of a layer's keys ("k") or values ("v"), without the prefix `<kind>.` of their names."""
    return {name.removeprefix(f"{kind}."): x for name, x in tensors.items() if name.startswith(f"{kind}.")}


def option(
    default: Any,
    help: str,
    *,
    choices: tuple | None = None,
    why: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    runtime: bool = False,
) -> Any:
    """A method's option: a dataclass field with help text and valid values.

    why: reason for `choices`, for messages. runtime: can be changed when an artifact is used.
    """
    meta = {"help": help, "choices": choices, "why": why, "at_least": at_least, "at_most": at_most, "runtime": runtime}
    return dataclasses.field(default=default, metadata=meta)


#: Largest whole number of an option without `at_most`: windows are allocated, whatever they hold.
MAX_OPTION = 2**20
#: Metadata of fields declared without `option`: any value is valid.
_ANYTHING = {"choices": None, "at_least": None, "at_most": None}


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods: a frozen dataclass of hyperparameters, registered with `registry.register`."""

    name: ClassVar[str]
    paper: ClassVar[str]  # link
    summary: ClassVar[str]  # one line for `kvq methods`
    caches: ClassVar[str]  # the tensors cached for each token
    calibration_result: ClassVar[str] = ""  # the tensors that its calibration computes
    calibrates: ClassVar[bool] = False  # True: needs an artifact

    def __post_init__(self) -> None:
        """Raise UsageError for invalid option values, naming the valid ones."""
        for field in dataclasses.fields(self):
            value, meta = getattr(self, field.name), {**_ANYTHING, **field.metadata}
            given = f"{self.name}: {field.name}={value}"
            if meta["choices"] is not None and value not in meta["choices"]:
                because = f" ({meta['why']})" if meta["why"] else ""
                raise UsageError(f"{given} is not one of {', '.join(map(str, meta['choices']))}{because}")
            if value is not None and meta["at_least"] is not None and value < meta["at_least"]:
                raise UsageError(f"{given} must be at least {meta['at_least']}")
            at_most = MAX_OPTION if meta["at_most"] is None and isinstance(value, int) else meta["at_most"]
            if value is not None and at_most is not None and value > at_most:
                raise UsageError(f"{given} must be at most {at_most}")

    @property
    def nominal_bits(self) -> float:
        """Bits of the codes per cached number, as the papers count them (no scales, outliers or windows)."""
        return float(self.bits)  # type: ignore[attr-defined]  # a field of all methods that do not override this

    @abstractmethod
    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        """The plan of one layer.

        tensors: the artifact's tensors of this layer without the `layers.<i>.` prefix ("k.centroids.temporal",
        "v.mean"); empty for methods that do not calibrate. Raises UsageError where the shape does not allow them.
        """

    def stream_plan(self, kind: str, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> StreamPlan:
        """The plan of a layer's keys ("k") or values ("v") alone.

        tensors: as for `plan`, those of this stream.
        """
        plan = self.plan(layer, shape, tensors)
        return plan.keys if kind == "k" else plan.values

    def refuse_without_artifact(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise UsageError where `plan` of a method that calibrates is given no tensors."""
        if not tensors:
            raise UsageError(
                f"{self.name} needs an artifact: run `kvq calibrate --method {self.name}`, then give --artifact"
            )

    def needs_artifact(self, shape: ModelShape) -> bool:
        """Whether `plan` needs calibrated tensors for a model of this shape."""
        return self.calibrates

    def calibration(self, shape: ModelShape) -> AnySpec:
        """The calibration for a model of this shape; UsageError if the method needs none."""
        raise UsageError(f"method {self.name} needs no calibration: use it directly with --method {self.name}")
