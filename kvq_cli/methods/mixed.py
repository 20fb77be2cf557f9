"""Mixed: another method, or other bits, for the keys and the values of each layer (docs/TUNE.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, option
from kvq_cli.methods.registry import build, has_option, parse, register
from kvq_cli.methods.specs import StreamSpec, Uncalibrated
from kvq_cli.methods.transform_specs import MixedSpec

#: Methods that pack the keys of a layer without its values, token blocks alone, without a state of each prompt.
PARTS = ("fp16", "kivi", "kvquant", "channelkv", "temporalkv", "klt")
#: Options that all streams share.
_SHARED = ("sinks", "recent", "buffer", "local")


@register
@dataclass(frozen=True)
class Mixed(Method):
    """The keys and the values of each layer, each served by a method of its own, as `kvq tune` chooses them.

    `keys` and `values` name a method per layer, first layer first, separated by spaces; one name alone is that of all
    layers. Names are those of `--compare`: `klt-1.75bit`, `kivi-4bit:group=64`; without bits, `bits` applies. All
    streams have the same windows. Bits of `klt` are those of the stream, allocated over its heads where each has a
    transform of its own.
    """

    name = "mixed"
    paper = "docs/TUNE.md"
    summary = "another method or other bits for the keys and values of each layer, chosen by kvq tune"
    caches = "as the methods do, K and V apart"
    calibration_result = "the tensors of each stream's method"
    calibrates = True

    bits: float = option(2.0, "bits per number that the codes take at most, on average", at_least=0.001, at_most=16.0)
    keys: str = option("klt", "method of each layer's keys, separated by spaces")
    values: str = option("klt", "method of each layer's values, separated by spaces")
    sinks: int = option(8, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(32, "newest tokens kept in full precision", at_least=0, runtime=True)
    buffer: int = option(16, "pack tokens in multiples of this many", at_least=1, runtime=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._names("k") or not self._names("v"):
            raise UsageError("mixed: keys and values each name one method at least, like keys=klt-2bit")
        if self.nominal_bits > self.bits + 1e-3:  # names of methods round their bits
            raise UsageError(
                f"mixed: its methods take {self.nominal_bits:.6g} bits on average, more than bits={self.bits:g}"
            )

    @property
    def nominal_bits(self) -> float:
        names = map(self._names, "kv")
        return sum(sum(self._method(name).nominal_bits for name in each) / len(each) for each in names) / 2

    def component(self, layer: int, kind: str, shape: ModelShape | None = None) -> Method:
        """The method of a layer's keys ("k") or values ("v"), with the windows of all. shape: of a model that also has
        layers without a method."""
        names = self._names(kind)
        place = layer if shape is None else shape.cached_layers.index(layer)
        return self._method(names[0] if len(names) == 1 else names[place])

    def calibration(self, shape: ModelShape) -> MixedSpec:
        self._check_layers(shape)
        layers = shape.cached_layers
        parts = ([part_spec(self.component(layer, kind, shape), shape) for kind in "kv"] for layer in layers)
        streams = [(keys, values) for keys, values in parts]
        return MixedSpec(self.sinks, shape.by_layer(streams), near=self.recent + self.buffer // 2)

    def needs_artifact(self, shape: ModelShape) -> bool:
        return any(not isinstance(part, Uncalibrated) for part in self.calibration(shape).different)

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        self._check_layers(shape)
        keys, values = (self.component(layer, kind, shape).stream_plan(kind, layer, shape, tensors) for kind in "kv")
        return LayerPlan(keys, values)

    def _names(self, kind: str) -> tuple[str, ...]:
        return _words(self.keys if kind == "k" else self.values)

    def _method(self, name: str) -> Method:
        return _component(name, self.bits, tuple((option, getattr(self, option)) for option in _SHARED))

    def _check_layers(self, shape: ModelShape) -> None:
        for option_, names in (("keys", self._names("k")), ("values", self._names("v"))):
            if len(names) not in (1, len(shape.cached_layers)):
                raise UsageError(f"mixed: {option_} names {len(names)} methods: give one, or one for each layer")


def part_spec(method: Method, shape: ModelShape) -> StreamSpec:
    """The calibration of a stream that `method`, one of `PARTS`, serves."""
    return cast("StreamSpec", method.calibration(shape)) if method.calibrates else Uncalibrated()


@lru_cache(maxsize=64)
def _words(text: str) -> tuple[str, ...]:
    """The words of a text, split once for all layers."""
    return tuple(text.split())


@lru_cache(maxsize=1024)
def _component(text: str, bits: float, windows: tuple[tuple[str, int], ...]) -> Method:
    """The method that `text` names, with the windows' options that it has, and `bits` where the text gives none;
    UsageError where it cannot be a part."""
    name, options = parse(text)
    if taken := [option for option, _ in windows if option in options]:
        raise UsageError(f"mixed: {text}: set {taken[0]} once for all streams, with --set {taken[0]}=...")
    if name not in PARTS:
        raise UsageError(f"mixed: {name or text!r} cannot serve a single stream; valid: {', '.join(PARTS)}")
    shared = {"bits": int(bits) if bits == int(bits) else bits, **dict(windows)}
    return build(name, **{option: value for option, value in shared.items() if has_option(name, option)} | options)
