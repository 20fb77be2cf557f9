"""Per-channel normalization fit to a row's prompt, around any codec (InnerQ's keys)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed, Prompt, PromptCodec, State, refuse_unless
from kvq_cli.codecs.layout import Layout, TensorSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class NormalizedCodec(PromptCodec):
    """`base` encodes K / norm with norm_i = sqrt(max_t |K_ti|) over the prompt's tokens; decoding multiplies by norm.

    q . K = (q norm) . (K / norm): attention may fold the norm into its query. A channel that is 0 in the whole prompt
    has norm 1. State: `norm` `[rows, kv_heads, head_dim]` float32.

    later: encodes tokens after the prompt, into the same parts; None: `base`.
    """

    has_norm = True

    def __init__(self, base: Codec, later: Codec | None = None) -> None:
        self.stored_as = self.base = base
        self._later = later or base
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        state = {"norm": TensorSpec((1, heads, dim), "float32")}
        return replace(self.base.layout(heads, dim, dtype), state=state, fitted=tuple(state))

    def fit(self, prompt: Prompt) -> State:
        norm = prompt.keys.float().abs().amax(dim=2).sqrt_()
        return {"norm": norm.masked_fill_(norm == 0, 1)}

    def check_state(self, state: State) -> None:
        refuse_unless(state["norm"] > 0, "norm")

    def encode_prompt(self, x: Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        state = self.fit(prompt)
        return _DividedCodec(self.base, state["norm"]).encode(x), state

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return _DividedCodec(self._later, state["norm"])

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()


class _DividedCodec(Codec):
    """`base` of numbers divided by `norm` `[rows, kv_heads, head_dim]`."""

    def __init__(self, base: Codec, norm: Tensor) -> None:
        self._base, self._norm = base, norm.unsqueeze(2)
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self._base.layout(heads, dim, dtype)

    def check(self, packed: Packed) -> None:
        self._base.check(packed)

    def _encode(self, x: Tensor) -> Packed:
        return self._base.encode(x / self._norm)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._base.decode(packed, torch.float32).mul_(self._norm).to(dtype)
