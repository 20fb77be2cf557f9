"""OScaR (https://arxiv.org/abs/2605.19660), Omni-Scaled Canalized Rotation: KIVI of rotated keys with equal norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.token_norm import TokenNormCodec
from kvq_cli.methods.base import LayerPlan, ModelShape
from kvq_cli.methods.kivi import KiviGroups
from kvq_cli.methods.registry import register


@register
@dataclass(frozen=True)
class OscarOmni(KiviGroups):
    """KIVI's groups of keys and values whose channels are rotated by a Hadamard matrix (canalized rotation), where each
    key is divided by its norm over all kv heads first (omni-token scaling): a group of tokens shares one range, and the
    norms of attention sinks are far from those of others. No calibration. Another method than `oscar`.

    Keys and values are packed `residual` tokens at a time, or one group at a time behind `recent` tokens. As in the
    authors' code (https://github.com/ZunhaiSu/OScaR-KV-Quant), norms are 32-bit numbers, one per token and layer.
    Differences: zero-points are not rounded to whole steps, as the authors' simulation does; scales and zero-points
    have 16 bits. head_dim must be a power of two, or 12 or 20 times one.
    """

    name = "oscar-omni"
    paper = "https://arxiv.org/abs/2605.19660"
    summary = "kivi of Hadamard-rotated keys and values, each key divided by its norm over all heads"
    caches = "K post- or pre-RoPE, V"

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        rotation = HadamardRotation(shape.head_dim)
        keys = RotatedCodec(TokenNormCodec(self.quantizer("channel", shape)), rotation)
        plan = self.plan_of(keys, RotatedCodec(self.quantizer("token", shape), rotation))
        return replace(plan, values=replace(plan.values, window=plan.keys.window))
