"""KVQuant (https://arxiv.org/abs/2401.18079): a non-uniform 1-D codebook per layer, outliers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq_cli.methods.base import ModelShape, option
from kvq_cli.methods.codebooks import CodebookMethod, check_outliers
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import BlockShape, CalibrationSpec, CodebookSpec


@register
@dataclass(frozen=True)
class KVQuant(CodebookMethod):
    """Each number as the nearest of 2^bits points in [-1, 1]: one codebook for a layer's keys and one for its values,
    clustered with Fisher weights, outliers excluded.

    Keys (before RoPE) are scaled per channel: the outlier thresholds, quantiles of the calibration text, become -1 and
    1. Values are scaled per token, by the range of its numbers without outliers. Outliers are kept in 16 bits, a fixed
    number per head and block of tokens for keys, per token (one at least) for values; without outliers the extremes of
    a channel or token become -1 and 1.
    """

    name = "kvquant"
    paper = "https://arxiv.org/abs/2401.18079"
    summary = "one non-uniform codebook of single numbers per layer, outliers in 16 bits; pre-RoPE keys"
    calibration_result = "codebooks (Fisher k-means), thresholds"

    bits: int = option(2, "bits per number", choices=(1, 2, 3, 4, 8), why="others cannot be packed")
    outliers: float = option(0.01, "fraction of the numbers kept in 16 bits; 0: none", at_least=0.0, at_most=1.0)

    def calibration(self, shape: ModelShape) -> CalibrationSpec:
        check_outliers(self.outliers, shape)

        scalar = (BlockShape("scalar", 1, 1),)
        base = CodebookSpec(
            scalar, 2**self.bits, shape.head_dim, normalize=False, outliers=self.outliers, across_heads=True
        )
        return CalibrationSpec(
            keys=replace(base, normalize=True, by_range=True),
            values=replace(base, per_token=True),
            skip=self.sinks,
            fisher=self.fisher,
            hybrid="off",
        )
