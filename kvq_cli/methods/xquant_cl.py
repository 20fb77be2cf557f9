"""XQuant-CL (https://arxiv.org/abs/2508.10395, sections 3.2 and 3.3.2): cache the differences of layer inputs between
layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.uniform import Axis
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import CrossLayer, LayerPlan, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import FactorSpec
from kvq_cli.methods.xquant import (
    BITS,
    EXACT,
    LayerInputMethod,
    factor,
    keeps_input,
    latent_names,
    layer_plan,
    quantizer,
    whole_input,
)


@register
@dataclass(frozen=True)
class XQuantCL(LayerInputMethod):
    """The first `base_layers` layers are XQuant's at `base_bits`; the last of them keeps its X whole, since X^ starts
    from it. Every layer after them keeps d_i = Q(X_i - X^_{i-1}) and X^_i = X^_{i-1} + d_i: each layer's X is compared
    with the decoded sum of the layers below, so that their errors do not add up. Where X is larger than keys and
    values (GQA), d_i = Q((X_i - X^_{i-1}) U) U^T with [W_k W_v] = U S B^T.

    X^ of all packed tokens goes from layer to layer while a pass runs, as numbers of the model's dtype or, as the paper
    counts memory, with 4 bits: then it is quantized again in each layer (which the next difference makes up for). It
    is not kept between passes; reports list it separately, as working memory.
    """

    name = "xquant-cl"
    summary = "differences of layer inputs between layers, quantized uniformly; decoded layer by layer"
    caches = "X's change by layer, or its latents"
    calibration_result = "SVD of W_k, W_v, [W_k W_v] (GQA)"

    base_bits: int = option(4, "bits of the first layers", choices=BITS, why="others cannot be packed", runtime=True)
    base_layers: int = option(3, "first layers cached without differences", at_least=1)
    axis: str = option("token", "direction of the groups of a difference", choices=("token", "channel"), runtime=True)
    accumulator_bits: int = option(
        EXACT, "bits of X^ between layers; 16: the model's dtype", choices=(4, 8, EXACT), runtime=True
    )

    def calibration(self, shape: ModelShape) -> FactorSpec:
        delta = () if keeps_input(shape) else ("x",)
        layers = len(shape.cached_layers)
        below, above = min(self.base_layers - 1, layers), max(0, layers - self.base_layers)
        between = layers - below - above
        return FactorSpec(shape.by_layer([*[latent_names(shape)] * below, *[()] * between, *[delta] * above]))

    def keeps_local(self, shape: ModelShape) -> bool:
        if self.local == "16bit":
            raise UsageError(
                f"{self.name}: local=16bit takes layers out of the sum over layers, which needs the inputs of all; set "
                "local=packed"
            )
        return False

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        place, layers = shape.cached_layers.index(layer), len(shape.cached_layers)
        if place < self.base_layers - 1:
            return layer_plan(self.base_bits, self.group, self.window, shape, tensors, layer)
        accumulator = None
        if self.accumulator_bits != EXACT:
            accumulator = quantizer(self.accumulator_bits, "token", self.group, shape.hidden_size, shape)
        part = CrossLayer(place == self.base_layers - 1, place == layers - 1, accumulator)
        if part.first:
            return replace(whole_input(self.base_bits, self.group, self.window, shape), cross_layer=part)
        down = None if keeps_input(shape) else factor(tensors, "x.down", layer, shape)
        width = shape.hidden_size if down is None else down.shape[1]
        codec = quantizer(self.bits, cast(Axis, self.axis), self.group, width, shape)
        ups = [None if down is None else factor(tensors, f"{name}.up", layer, shape) for name in ("k", "v")]
        keys, values = (StreamPlan("input", codec, self.window, down, up) for up in ups)
        return LayerPlan(keys, values, shared=True, cross_layer=part)
