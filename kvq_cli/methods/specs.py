"""Specs: what the calibration of a method computes, and the names, shapes and dtypes of the tensors that it stores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kvq_cli.codecs.layout import TensorLike, TensorSpec

if TYPE_CHECKING:
    from kvq_cli.methods.base import ModelShape

#: The tensors of a layer or stream by name.
Tensors: TypeAlias = dict[str, TensorSpec]


class Spec(ABC):
    """The calibration of a method for all layers of a model."""

    #: Whether keys, values and gradients are captured on text; else projection weights are factorized.
    captures: ClassVar[bool] = True
    #: Names of tensors that are the same in all layers.
    same_in_all_layers: ClassVar[tuple[str, ...]] = ()
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
