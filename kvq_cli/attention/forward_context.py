"""The state of an attention module during a forward pass, and the interface of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Forward


class Backend(Protocol):
    """Attention over a compressed layer, which holds the keys and values of the pass already."""

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """One query per row: `query` `[batch, query_heads, 1, head_dim]` -> the same shape; zeros for pads."""

    def prefill_attention(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
        """Several queries per row: `[batch, query_heads, columns, head_dim]` -> the same shape; zeros for pads.

        key, value: those of the pass, `[batch, kv_heads, columns, head_dim]`, keys after RoPE, in full precision.
        """


@dataclass(frozen=True)
class ForwardContext:
    """The state of one layer in one forward pass: made before the decoder runs, read by hooks and backends.

    layer:      the cached keys and values.
    forward:    the rows and columns of the pass.
    backend:    computes the attention of this layer.
    compressed: every query sees the tokens as in token-by-token decoding; else it sees tokens of the pass in full
                precision.
    owner:      the hooks that started the pass; nested `attach` blocks put several on the same module.
    scaling, score_form: arguments of the module's call of its attention function.
    computed:   the module has called its attention function.
    """

    layer: CompressedLayer
    forward: Forward
    backend: Backend
    compressed: bool = False
    owner: object = None
    scaling: float = 1.0
    score_form: ScoreForm = PLAIN
    computed: bool = False
