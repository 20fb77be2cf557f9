"""Specs of transforms: how the components of a stream are stored, their calibration, and that of mixed methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvq_kernels import fields

from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.errors import UsageError
from kvq_cli.methods.specs import CaptureSpec, StreamSpec, Tensors

if TYPE_CHECKING:
    from kvq_cli.methods.base import ModelShape


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
        return self._bytes(len(shape.cached_layers) * 2 * shape.kv_heads * shape.head_dim)

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
        layers = len(shape.cached_layers)
        needed = layers * (2 * max(least) if self.allocate == "stream" else sum(least))
        if self.byte_budget(shape) < needed:
            bits = 8 * needed / (layers * 2 * shape.kv_heads * shape.head_dim)
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
