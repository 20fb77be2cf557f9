"""`Method`, the base of all compression methods: hyperparameters in, one plan per layer out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvq_cli.codecs.base import AnyCodec, Codec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch
from kvq_cli.methods.specs import Spec
from kvq_cli.methods.window import Window

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class ModelShape:
    """The architecture sizes of a model, and the dtype of its activations, by name: `bfloat16`.

    layers: all of the model. windows: per layer, the newest tokens that a query sees, itself included; None: all.
    Empty: all layers see all. attention: the layers whose keys and values are compressed, of a model that has others,
    too (linear attention, convolutions, chunked attention); empty: all.
    context: with windows, the longest text that the model takes, in tokens; 0: not known.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: str
    windows: tuple[int | None, ...] = ()
    context: int = 0
    attention: tuple[int, ...] = ()

    @property
    def cached_layers(self) -> Sequence[int]:
        """The indices of the layers whose keys and values are compressed."""
        return self.attention or range(self.layers)

    def by_layer(self, entries: Sequence[T]) -> tuple[T, ...]:
        """An entry for each layer of the model, from those of `cached_layers`; other layers repeat the first."""
        known = dict(zip(self.cached_layers, entries, strict=True))
        return tuple(known.get(layer, entries[0]) for layer in range(self.layers))

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, in tokens; None: its queries see all tokens."""
        return self.windows[layer] if self.windows else None

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, which is a name, as PyTorch's."""
        return getattr(torch, self.dtype)


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

    def __post_init__(self) -> None:
        if self.window.flush % self.codec.block_tokens:
            raise UsageError(
                f"packing {self.window.flush} tokens at a time cuts the codec's blocks of {self.codec.block_tokens}"
            )

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

    @property
    def joins_layers(self) -> bool:
        """Whether codes are of all layers together."""
        return any(stream.codec.joins_layers for stream in self.kept)

    @property
    def longest_pass(self) -> int | None:
        """The most columns of a pass whose tokens see what they would see decoded one by one; None: any number. Codes
        of all layers together are made when the last layer has the tokens: those that such a pass packs came before
        it."""
        return min(stream.window.recent for stream in self.kept) if self.joins_layers else None


def uncompressed() -> LayerPlan:
    """The plan of a layer whose keys, after RoPE, and values are kept in the model's dtype."""
    exact = IdentityCodec()
    return LayerPlan(StreamPlan("post_rope", exact, Window()), StreamPlan("value", exact, Window()))


def of_stream(tensors: Mapping[str, T], kind: str) -> dict[str, T]:
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
#: `local=auto` keeps sliding windows of at most so many tokens in 16 bits, where packing them would save less than this
#: share of the packed cache.
MAX_LOCAL_WINDOW, MIN_LOCAL_SAVING = 1024, 0.05
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

    _: KW_ONLY
    local: str = option(
        "auto",
        "layers with a sliding window: 16bit, packed, or auto: in 16 bits where packing them saves next to nothing",
        choices=("auto", "16bit", "packed"),
        runtime=True,
    )

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
    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        """The plan of one layer.

        tensors: the artifact's tensors of this layer without the `layers.<i>.` prefix ("k.centroids.temporal",
        "v.mean"), or their specs where nothing is run; empty for methods that do not calibrate. Raises UsageError where
        the shape does not allow them.
        """

    def layer_plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        """The plan by which a layer is cached: that of `plan`, or 16 bits for a layer with a sliding window where
        `local` says so."""
        local = shape.window(layer) is not None and self.keeps_local(shape)
        return uncompressed() if local else self.plan(layer, shape, tensors)

    def keeps_local(self, shape: ModelShape) -> bool:
        """Whether layers with a sliding window are kept in 16 bits.

        With `local=auto`: where no window is longer than 1,024 tokens, and packing them saves memory, but less than 5 %
        of the packed cache of a text as long as the model's context, in nominal bits of the tokens that queries see.
        UsageError where `local=16bit` leaves no layer to compress.
        """
        if self.local == "16bit" and all(shape.window(layer) is not None for layer in shape.cached_layers):
            raise UsageError(f"{self.name}: local=16bit compresses no layer, all have a window: set local=packed")
        if self.local != "auto":
            return self.local == "16bit"
        if max((window or 0 for window in shape.windows), default=0) > MAX_LOCAL_WINDOW:
            return False
        windows = [shape.window(layer) for layer in shape.cached_layers]
        seen = [min(window or shape.context, shape.context) for window in windows]
        local = sum(tokens for tokens, window in zip(seen, windows, strict=True) if window is not None)
        return 0 < local * (16 - self.nominal_bits) < MIN_LOCAL_SAVING * sum(seen) * self.nominal_bits

    def stream_plan(self, kind: str, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> StreamPlan:
        """The plan of a layer's keys ("k") or values ("v") alone.

        tensors: as for `plan`, those of this stream.
        """
        plan = self.plan(layer, shape, tensors)
        return plan.keys if kind == "k" else plan.values

    def refuse_without_artifact(self, tensors: Mapping[str, TensorLike]) -> None:
        """Raise UsageError where `plan` of a method that calibrates is given no tensors."""
        if not tensors:
            raise UsageError(
                f"{self.name} needs an artifact: run `kvq calibrate --method {self.name}`, then give --artifact"
            )

    def needs_artifact(self, shape: ModelShape) -> bool:
        """Whether `plan` needs calibrated tensors for a model of this shape."""
        return self.calibrates

    def check_calibrates(self) -> None:
        """Raise UsageError if the method needs no calibration."""
        if not self.calibrates:
            raise UsageError(f"method {self.name} needs no calibration: use it directly with --method {self.name}")

    def calibration(self, shape: ModelShape) -> Spec:
        """The calibration for a model of this shape; UsageError if the method needs none."""
        self.check_calibrates()
        raise NotImplementedError
