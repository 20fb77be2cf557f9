"""Specs: what the calibration of a method computes, and the names, shapes and dtypes of the tensors that it stores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from kvq_kernels import fields

from kvq_cli.codecs.layout import TensorLike, TensorSpec
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from kvq_cli.methods.base import ModelShape

#: The tensors of a layer or stream by name.
Tensors: TypeAlias = dict[str, TensorSpec]


class Spec(ABC):
    """The calibration of a method for all layers of a model."""

    #: Whether keys, values and gradients are captured on text; else projection weights are factorized.
    captures: ClassVar[bool] = True
    #: Whether weights are factorized at full rank, so that the product of the factors is the weight.
    full_rank: ClassVar[bool] = False

    @property
    def reads_text(self) -> bool:
        """Whether the model runs on text."""
        return self.captures

    def factors(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's factorized weights, see `FactorSpec`."""
        return ()

    @abstractmethod
    def parts(self, layer: int) -> dict[str, StreamSpec]:
        """The calibrations of a layer's keys ("k") and values ("v"); empty where weights are factorized."""

    def layout(self, shape: ModelShape, layer: int, choices: Mapping[str, Sequence[Any]]) -> Tensors:
        """The tensors of a layer, named without their prefix `layers.<i>.`. choices: by stream, see
        `StreamSpec.tensors`."""
        return {
            f"{kind}.{name}": form
            for kind, part in self.parts(layer).items()
            for name, form in part.tensors(kind, shape, choices[kind]).items()
        }

    def first_choices(self, shape: ModelShape, layer: int) -> dict[str, Sequence[Any]]:
        """The `choices` of `layout` before anything is measured."""
        return {kind: part.first_choice(kind, shape) for kind, part in self.parts(layer).items()}

    def byte_budget(self, shape: ModelShape) -> int | None:
        """Maximum bytes of a packed token in all layers together; None: bits are not allocated over layers."""
        return None

    def check(self, shape: ModelShape) -> None:  # noqa: B027  # most specs fit all shapes
        """Raise UsageError for a model of this shape that the calibration does not fit."""


@dataclass(frozen=True)
class FactorSpec(Spec):
    """Calibration by factorizing projection weights; no text is read.

    layers: for each layer, the factorized weights: "k" for W_k = U S B^T, "v" for W_v, "x" for both, [W_k W_v]. The
    artifact stores U as `<name>.down` `[hidden_size, rank]`, and S B^T as `k.up`, `v.up` `[rank, kv_heads * head_dim]`.
    """

    captures = False
    full_rank = True

    layers: tuple[tuple[str, ...], ...]

    def factors(self, layer: int) -> tuple[str, ...]:
        return self.layers[layer]

    def parts(self, layer: int) -> dict[str, StreamSpec]:
        return {}

    def layout(self, shape: ModelShape, layer: int, choices: Mapping[str, Sequence[Any]]) -> Tensors:
        size = shape.kv_heads * shape.head_dim
        layout: Tensors = {}
        for name in self.layers[layer]:
            rank = self.rank(name, shape)
            layout[f"{name}.down"] = TensorSpec((shape.hidden_size, rank), shape.dtype)
            up = TensorSpec((rank, size), shape.dtype)
            layout |= {f"{kind}.up": up for kind in (("k", "v") if name == "x" else (name,))}
        return layout

    def rank(self, name: str, shape: ModelShape) -> int:
        """Number of latents of a factorized weight: all of W_k's and W_v's."""
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

    full_rank = False

    heads: int
    latents: int
    whiten: bool
    hadamard: bool

    @property
    def reads_text(self) -> bool:
        return self.whiten

    def rank(self, name: str, shape: ModelShape) -> int:
        return shape.kv_heads // self.heads * self.latents


class CaptureSpec(Spec):
    """Calibration from captured keys, values and gradients.

    skip: first tokens of each sample to leave out (attention sinks).
    near: how many predictions from a token on read it in full precision, about: its gradients leave these out. 0: all
          predictions count.
    """

    skip: int
    near: int = 0

    @property
    @abstractmethod
    def unit(self) -> int:
        """Adjacent tokens that are captured together where the disk budget keeps a part of them."""

    @property
    @abstractmethod
    def entries(self) -> AbstractSet[int]:
        """Centroids of each codebook, without repetition."""

    @property
    def weighted(self) -> bool:
        """Whether numbers are weighted with gradients."""
        return False

    @abstractmethod
    def needed_tokens(self, shape: ModelShape) -> Iterator[tuple[int, str]]:
        """Minimum numbers of training tokens, each with what needs them."""


class StreamSpec(CaptureSpec):
    """Calibration of one stream: keys ("k") or values ("v") of a layer; or of all streams, alike."""

    def parts(self, layer: int) -> dict[str, StreamSpec]:
        return {"k": self, "v": self}

    @abstractmethod
    def tensors(self, kind: str, shape: ModelShape, choice: Sequence[Any]) -> Tensors:
        """The tensors of a stream, named without `layers.<i>.<kind>.`. choice: for codebooks, the index of each kv
        head's block shape; for transforms, their `Profile`."""

    @abstractmethod
    def first_choice(self, kind: str, shape: ModelShape) -> Sequence[Any]:
        """The `choice` of `tensors` before anything is measured: the first block shape, or even widths."""

    def groups(self, kind: str, shape: ModelShape) -> tuple[int, int]:
        """(transforms, channels of each) of a stream; no transforms: (0, 0)."""
        return 0, 0

    def of_heads(self, kind: str, tensors: Mapping[str, TensorLike], heads: Sequence[int]) -> dict[str, TensorLike]:
        """A stream's tensors for these kv heads, in ascending order; a transform serves one head."""
        return {name: tensor[heads] for name, tensor in tensors.items() if not name.startswith("centroids.")}


@dataclass(frozen=True)
class Uncalibrated(StreamSpec):
    """A stream that needs no calibration: its errors alone are measured."""

    skip = 0
    unit = 1
    entries: ClassVar[AbstractSet[int]] = frozenset()

    def needed_tokens(self, shape: ModelShape) -> Iterator[tuple[int, str]]:
        return iter(())

    def tensors(self, kind: str, shape: ModelShape, choice: Sequence[Any]) -> Tensors:
        return {}

    def first_choice(self, kind: str, shape: ModelShape) -> list[Any]:
        return []


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

    def layout(self, shape: ModelShape, choice: Sequence[int]) -> Tensors:
        """The tensors of the stream. choice: index of each kv head's block shape."""
        channels = (shape.kv_heads, shape.head_dim)
        layout: Tensors = {}
        for index in sorted(set(choice)):
            block = self.shapes[index]
            books = (1 if self.across_heads else choice.count(index), shape.head_dim // self.share)
            layout[f"centroids.{block.name}"] = TensorSpec((*books, self.entries, block.size), shape.dtype)
        layout["choice"] = TensorSpec((shape.kv_heads,), "int8", list(choice))
        for name in ("mean", "std") if self.normalize else ():
            layout[name] = TensorSpec(channels, "float32")
        if self.rotation == "opq":
            layout["rotation"] = TensorSpec((*channels, shape.head_dim), "float32")
            layout["spread"] = TensorSpec(channels, "float32")
        for name in ("lower", "upper") if self.outliers and not self.per_token else ():
            layout[name] = TensorSpec(channels, "float32")
        return layout


@dataclass(frozen=True)
class CalibrationSpec(StreamSpec):
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

    @property
    def unit(self) -> int:
        return math.lcm(2, *(shape.tokens for stream in self.streams for shape in stream.shapes))

    @property
    def entries(self) -> AbstractSet[int]:
        return {stream.entries for stream in self.streams}

    @property
    def weighted(self) -> bool:
        return self.fisher

    def needed_tokens(self, shape: ModelShape) -> Iterator[tuple[int, str]]:
        for stream in self.streams:
            least = -(-stream.entries * max(block.size for block in stream.shapes) // stream.share)
            yield least, f"codebooks of {stream.entries} entries"

    def tensors(self, kind: str, shape: ModelShape, choice: Sequence[int]) -> Tensors:
        return self.stream(kind).layout(shape, choice)

    def first_choice(self, kind: str, shape: ModelShape) -> list[int]:
        return [0] * shape.kv_heads

    def of_heads(self, kind: str, tensors: Mapping[str, TensorLike], heads: Sequence[int]) -> dict[str, TensorLike]:
        cut = super().of_heads(kind, tensors, heads)
        choice = tensors["choice"].tolist()
        for index, block in enumerate(self.stream(kind).shapes):  # a block shape that no head has is left out
            books = tensors.get(f"centroids.{block.name}")
            of_shape = [head for head, chosen in enumerate(choice) if chosen == index]
            kept = [place for place, head in enumerate(of_shape) if head in heads]
            if books is not None and kept:
                shared = books.shape[0] == 1 < len(of_shape)
                cut[f"centroids.{block.name}"] = books if shared else books[kept]
        return cut


class Profile(NamedTuple):
    """How the components of a stream are stored. widths: of each group, the bits of its fields, descending; see
    `kvq_kernels.fields`. gain: whether each token and group has a gain, of 8 bits."""

    widths: tuple[tuple[int, ...], ...]
    gain: bool

    @property
    def components(self) -> int:
        """Of the group that has most."""
        return fields.FIELD * max(map(len, self.widths))

    @property
    def rows(self) -> list[list[int]]:
        """The widths with zeros for fields that a group does not have, `[G, fields]`."""
        most = max(map(len, self.widths))
        return [[*widths, *[0] * (most - len(widths))] for widths in self.widths]

    @property
    def nbytes(self) -> int:
        """Bytes of a token of all groups."""
        return sum(fields.KEY_LANES * fields.rate(widths) + self.gain for widths in self.widths)


def even_widths(lane_bytes: int, width: int) -> tuple[int, ...]:
    """Widths of this rate, or of the greatest, that give all components of a group of `width` channels about the same
    bits; where rooms do not allow this, as many components as possible have 8 bits."""
    most, widest = width // fields.FIELD, fields.MAX_WIDTH
    bits = 4 * min(lane_bytes, most * widest // 4)
    for total in range(bits, bits - 4, -1):
        each, more = divmod(total, min(total, most))
        widths = (each + 1,) * more + (each,) * (min(total, most) - more)
        if fields.fits(widths):
            return widths
    return (widest,) * (bits // widest) + (bits % widest,) * (bits % widest > 0)


@dataclass(frozen=True)
class TransformSpec(StreamSpec):
    """Calibration of Karhunen-Loeve transforms, and of the bits and steps of their components.

    bits:      bits per number of all that packed keys and values of all layers hold, at most.
    join_keys, join_values: one transform for all kv heads of a layer; else one per head.
    skip, near: see `CaptureSpec`.
    fisher:    weight errors of components by squared gradients.
    metric:    the quadratic form in which errors count: "full", the matrix E[g g^T] of the gradients, "diagonal" (of
               that matrix) or "none" (squared errors).
    allocate:  bits are allocated over the whole "model", or to each "stream" by its share of the numbers.
    """

    unit = 2
    entries: ClassVar[AbstractSet[int]] = frozenset()
    #: Streams whose tokens have a gain.
    gains: ClassVar[AbstractSet[str]] = frozenset("kv")

    bits: float
    join_keys: bool
    join_values: bool
    skip: int
    fisher: bool
    metric: str
    allocate: str
    near: int = 0

    @property
    def weighted(self) -> bool:
        return self.fisher or self.metric != "none"

    def groups(self, kind: str, shape: ModelShape) -> tuple[int, int]:
        joined = self.join_keys if kind == "k" else self.join_values
        return (1, shape.kv_heads * shape.head_dim) if joined else (shape.kv_heads, shape.head_dim)

    def needed_tokens(self, shape: ModelShape) -> Iterator[tuple[int, str]]:
        widest = max(self.groups(kind, shape)[1] for kind in "kv")  # a covariance needs as many tokens as channels
        yield widest, f"{widest} channels"

    def tensors(self, kind: str, shape: ModelShape, choice: Sequence[Any]) -> Tensors:
        return transform_layout(Profile(*choice), self.groups(kind, shape)[1])

    def first_choice(self, kind: str, shape: ModelShape) -> Profile:
        """Even widths, of at most `bits`."""
        return self._even(kind, shape, math.floor(self._lane_bytes(kind, shape)))

    def first_choices(self, shape: ModelShape, layer: int) -> dict[str, Sequence[Any]]:
        """Even widths, of at most `bits` over the whole model: rates are whole bytes, and some layers have one more."""
        rates = {kind: self._lane_bytes(kind, shape) for kind in "kv"}
        return {
            kind: self._even(kind, shape, math.floor((layer + 1) * rate) - math.floor(layer * rate))
            for kind, rate in rates.items()
        }

    def _lane_bytes(self, kind: str, shape: ModelShape) -> float:
        """The rate at which a stream takes `bits` per number."""
        width = self.groups(kind, shape)[1]
        return (self.bits * width / 8 - (kind in self.gains)) / fields.KEY_LANES + 1e-9

    def _even(self, kind: str, shape: ModelShape, lane_bytes: int) -> Profile:
        groups, width = self.groups(kind, shape)
        return Profile((even_widths(max(1, lane_bytes), width),) * groups, kind in self.gains)

    def byte_budget(self, shape: ModelShape) -> int:
        return self._bytes(shape.layers * 2 * shape.kv_heads * shape.head_dim)

    def stream_bytes(self, kind: str, shape: ModelShape) -> int:
        """Maximum bytes of a packed token of one stream that has `bits` of its own; at least those of one byte a
        lane."""
        groups, width = self.groups(kind, shape)
        return max(self.least_bytes(kind, shape), self._bytes(groups * width))

    def least_bytes(self, kind: str, shape: ModelShape) -> int:
        """Bytes of a packed token of one stream with one byte a lane."""
        return self.groups(kind, shape)[0] * (fields.KEY_LANES + (kind in self.gains))

    def check(self, shape: ModelShape) -> None:
        """Raise UsageError for heads of less than a field, and unless the budget has a byte a lane for each stream."""
        if shape.head_dim < fields.FIELD:
            raise UsageError(f"klt: head_dim={shape.head_dim} is below {fields.FIELD}: choose another method")
        least = [self.least_bytes(kind, shape) for kind in "kv"]
        needed = shape.layers * (2 * max(least) if self.allocate == "stream" else sum(least))
        if self.byte_budget(shape) < needed:
            bits = 8 * needed / (shape.layers * 2 * shape.kv_heads * shape.head_dim)
            raise UsageError(
                f"klt: bits={self.bits:g} are {self.byte_budget(shape)} bytes for a token of all layers, and the "
                f"transforms need {needed}: set bits={math.ceil(bits * 1e4) / 1e4:g} or more, or have fewer transforms "
                "with join_keys=on and join_values=on"
            )

    def _bytes(self, numbers: int) -> int:
        """Whole bytes; a product that rounding has put just below a whole number counts as this number."""
        return math.floor(self.bits * numbers / 8 + 1e-9)


@dataclass(frozen=True)
class MixedSpec(CaptureSpec):
    """Calibration of each stream by the method that serves it.

    layers: for each layer, the calibrations of its keys and of its values. A `TransformSpec` has its bits for the
            stream.
    skip, near: see `CaptureSpec`.
    """

    #: A multiple of all codebooks' chunks, so that all methods share the captured tokens. KIVI's groups of keys and
    #: blocks of outliers (32 tokens) span several units, which raises the squared errors of KIVI's keys by 1 %
    #: (built-in model): another draw of the tokens changes their loss more. Units of 32 would be drawn from a quarter
    #: as many places; if units depended on the candidates of `kvq tune`, its artifacts would have other tensors than
    #: `kvq calibrate --method mixed` computes.
    unit = 8

    skip: int
    layers: tuple[tuple[StreamSpec, StreamSpec], ...]
    near: int = 0

    def parts(self, layer: int) -> dict[str, StreamSpec]:
        return dict(zip("kv", self.layers[layer], strict=True))

    @property
    def different(self) -> list[StreamSpec]:
        """The calibrations of all streams, without repetition."""
        return list(dict.fromkeys(part for layer in self.layers for part in layer))

    @property
    def entries(self) -> AbstractSet[int]:
        return {size for part in self.different for size in part.entries} or {MAX_ENTRIES}

    @property
    def weighted(self) -> bool:
        return any(part.weighted for part in self.different)

    def needed_tokens(self, shape: ModelShape) -> Iterator[tuple[int, str]]:
        for part in self.different:
            yield from part.needed_tokens(shape)


def transform_layout(profile: Profile, width: int) -> Tensors:
    """The tensors of one stream of transform codes, of groups of `width` channels; see `TransformCodec`."""
    groups = len(profile.widths)
    kept = (groups, profile.components)
    layout: Tensors = {"widths": TensorSpec((groups, len(profile.rows[0])), "uint8", profile.rows)}
    layout |= {name: TensorSpec((groups, width), "float32") for name in ("mean", "std")}
    layout["analysis"] = TensorSpec((*kept, width), "float32")
    layout["synthesis"] = TensorSpec((groups, width, profile.components), "float32")
    for name in ("center", "deviation") if profile.gain else ("center",):
        layout[name] = TensorSpec(kept, "float32")
    return layout
