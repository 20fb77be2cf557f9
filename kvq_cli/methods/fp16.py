"""No compression: uncompressed keys and values in the same cache. The baseline of every comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, uncompressed
from kvq_cli.methods.registry import register


@register
@dataclass(frozen=True)
class Fp16(Method):
    name = "fp16"
    paper = ""
    summary = "uncompressed: keys after RoPE and values in the model's dtype"
    caches = "K post-RoPE, V"
    local: ClassVar[str] = "packed"  # type: ignore[misc]  # no option: all layers are in 16 bits

    @property
    def nominal_bits(self) -> float:
        return 16.0

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        return uncompressed()
