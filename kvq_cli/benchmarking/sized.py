"""Codecs that encode tensors without memory: to the parts of one encoded block of zeros, repeated.

Parts have one entry per `unit` tokens, so that a block says how large those of any number of tokens are. Encoding one
real block costs a millisecond; encoding long meta tensors runs, and first imports, PyTorch's Python shape functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq_cli.codecs.base import AnyCodec, Codec, Packed, Part, Prompt, PromptCodec, State

META = torch.device("meta")
#: Most numbers of a block that is encoded for real; a larger one, of an extreme group, is encoded without memory.
MAX_NUMBERS = 1 << 22


def sized(codec: AnyCodec, heads: int, dim: int, query_heads: int, dtype: torch.dtype) -> AnyCodec:
    """The codec with the same parts, state and constants that encodes meta tensors `[batch, heads, tokens, dim]`."""
    tokens = codec.block_tokens
    device = torch.device("cpu") if heads * tokens * dim <= MAX_NUMBERS else META
    x = torch.zeros(1, heads, tokens, dim, dtype=dtype, device=device)
    if isinstance(codec, Codec):
        return SizedCodec(codec, x)
    queries = x[:, :1].expand(1, query_heads, tokens, dim)
    return SizedPromptCodec(codec, x, Prompt(x, x, queries))


class SizedCodec(Codec):
    """`codec`, encoding by the shape of its block `x` alone."""

    def __init__(self, codec: Codec, x: Tensor) -> None:
        self._codec, self.block_tokens, self.nominal_bits = codec, codec.block_tokens, codec.nominal_bits
        self._block = codec.encode(x)
        codec.decode(self._block, torch.float32)  # the tables of decoding are made when it is first needed

    def constants(self) -> Mapping[str, Tensor]:
        return self._codec.constants()

    def _encode(self, x: Tensor) -> Packed:
        return _repeated(self._block, x)

    encode = _encode

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("parts without memory cannot be decoded")


class SizedPromptCodec(PromptCodec):
    """`codec`, encoding prompts by the shape of one block `x` of its `prompt` alone."""

    def __init__(self, codec: PromptCodec, x: Tensor, prompt: Prompt) -> None:
        self._codec, self.block_tokens, self.nominal_bits = codec, codec.block_tokens, codec.nominal_bits
        self.stores_prompt_apart, self.shares_state = codec.stores_prompt_apart, codec.shares_state
        self.needs_saliency = codec.needs_saliency
        self._block, self._state = codec.encode_prompt(x, prompt, 0)
        self._fitted = codec.fit(prompt)
        codec.with_state(self._state).decode(self._block, torch.float32)

    def constants(self) -> Mapping[str, Tensor]:
        return self._codec.constants()

    def fit(self, prompt: Prompt) -> State:
        return self._for_rows(self._fitted, len(prompt.keys))

    def encode_prompt(self, x: Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        return _repeated(self._block, x), self._for_rows(self._codec.state_like(self._state, x.shape[2]), len(x))

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        raise NotImplementedError("tokens after the prompt are not counted")

    def _for_rows(self, state: State, rows: int) -> State:
        batch = 1 if self.shares_state else rows
        return {name: x.new_empty(batch, *x.shape[1:], device=META) for name, x in state.items()}


def _repeated(block: Packed, x: Tensor) -> Packed:
    """The parts of as many blocks as `x` has, of all of its rows."""
    batch, _, tokens, _ = x.shape
    parts = {}
    for name, part in block.parts.items():
        shape = (batch, part.tensor.shape[1], tokens // part.unit, *part.tensor.shape[3:])
        parts[name] = Part(torch.empty(shape, dtype=part.tensor.dtype, device=META), part.unit)
    return Packed(tokens, parts)
