"""Different codecs for the prompt and for later tokens, with the same parts (InnerQ's hybrid_prefill)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed, Prompt, PromptCodec, State
from kvq_cli.codecs.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class PhasedCodec(PromptCodec):
    """`base` encodes the prompt, `later` the later tokens, into the same parts, which both decode. No state."""

    def __init__(self, base: Codec, later: Codec) -> None:
        self.stored_as = self.base = base
        self._later = later
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        return self.base.layout(heads, dim, dtype)

    def encode_prompt(self, x: Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        return self.base.encode(x), {}

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return self._later

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()
