"""SQuat (https://arxiv.org/abs/2503.24358): KIVI whose key errors are kept orthogonal to the prompt's queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.subspace import SubspaceCodec
from kvq_cli.methods.base import LayerPlan, ModelShape, option
from kvq_cli.methods.kivi import KiviGroups
from kvq_cli.methods.registry import register

#: Channels of a block in the paper: two blocks of a head of 128.
BLOCK = 64


@register
@dataclass(frozen=True)
class Squat(KiviGroups):
    """KIVI's windows, storage and values. Keys are quantized a block of channels at a time; each block's error is
    compensated in later channels to preserve inner products with the prompt's queries (Algorithm 1, Eq. 6).

    The subspace is that of the first pass's queries; keys before RoPE (SQuat-pre) go with queries before RoPE.
    `strength` = 0 is KIVI bit for bit. Appendix E.2: rank 5 to 60, strength 0.0005 or 0.001, block 32 or 64.
    """

    name = "squat"
    paper = "https://arxiv.org/abs/2503.24358"
    summary = "kivi with key errors moved off the subspace of the prompt's queries"
    caches = "K post- or pre-RoPE, V"

    residual: int = option(32, "length of KIVI's residual windows; a multiple of the group", at_least=1)
    pre_rope: bool = option(False, "cache keys before RoPE, with a subspace of queries before RoPE (SQuat-pre)")
    rank: int = option(5, "dimensions of the queries' subspace (r)", at_least=1)
    strength: float = option(0.001, "weight of errors inside the subspace (lambda)", at_least=0.0)
    block: int | None = option(None, "channels quantized at a time; none: 64, or half of a smaller head", at_least=1)
    shared_svd: bool = option(False, "use the first row's subspace for the whole batch, as the paper does")

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        plan = super().plan(layer, shape, tensors)
        codec = SubspaceCodec(
            self.bits,
            self.group,
            shape.head_dim,
            shape.dtype,
            rank=self.rank,
            strength=self.strength,
            block=self.block or min(BLOCK, shape.head_dim // 2),
            shared=self.shared_svd,
        )
        return replace(plan, keys=replace(plan.keys, codec=codec))
