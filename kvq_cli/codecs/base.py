"""What a codec is: how a block of numbers becomes packed tensors and back.

Shapes are written here once. Everything a codec sees is `[batch, kv_heads, tokens, head_dim]` ("BHTD").
A codec is a pure function of its input, of constants that never change (codebooks, channel statistics) and, where it
freezes something of a row's prompt (norms, a subspace), of that; it knows no model, no window and no position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One stored tensor of a packed block.

    tensor: `[batch, kv_heads, tokens // unit, ...]`, any dtype. Dimension 1 holds fewer heads where a codec keeps
            different parts for different heads. Views (a slice of a store) are welcome in `decode`.
    unit:   how many tokens share one entry along dimension 2 (1: an entry per token; G: one per group of G).
    """

    tensor: Tensor
    unit: int


@dataclass(frozen=True)
class Packed:
    """A packed run of `tokens` tokens: named parts, truly bit-packed. Nothing else is kept of the numbers."""

    tokens: int
    parts: Mapping[str, Part]

    @property
    def nbytes(self) -> int:
        return sum(p.tensor.numel() * p.tensor.element_size() for p in self.parts.values())


@dataclass(frozen=True)
class Prompt:
    """The first tokens of some rows, in full precision: what a codec may look at once, before anything is packed.

    keys, values: `[rows, kv_heads, tokens, head_dim]`, keys as they are cached (before or after RoPE). queries:
    `[rows, query_heads, tokens, head_dim]`, turned or not as the keys are. No pads; all rows have the same length.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor


#: What a codec froze of the prompt of each row: named tensors `[rows, ...]`, kept and counted with the rows.
State = Mapping[str, Tensor]

#: Numbers that are encoded in one go: bounds the scratch memory of a long prompt. Blocks are independent, so that
#: cutting changes nothing.
TILE = 1 << 22


def side_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type in which scales, zeros and outliers are kept beside the codes of a `dtype` model.

    The model's own, or float16 for a model that computes in 32 bits: a 32-bit scale and zero cost too much.
    """
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


class Codec(ABC):
    """Encodes runs of whole blocks; independent blocks, so that a run may be cut, joined or appended anywhere
    between two blocks without changing a bit of the result."""

    #: Tokens that must be encoded together; `encode` takes multiples of it.
    block_tokens: int = 1
    #: Bits of the code per number, as the papers count them (no scales, no outliers).
    nominal_bits: float
    #: True: `freeze` must see the prompt before anything is encoded, and only `bound` codecs encode and decode.
    freezes: bool = False
    #: True: what a row's first pass packs is one whole, encoded by `open`; `encode` takes what comes later. Such codecs
    #: freeze. The two kinds of packed runs are stored apart, and `decode` tells them by their parts.
    opens: bool = False
    #: True: after the first pass `encode` is given, beside the numbers, what `weigh` said of their tokens.
    weighs: bool = False
    #: True: what is frozen of the batch's first row serves all rows; kept once, dimension 0 of its tensors is 1.
    shares_state: bool = False

    def encode(self, x: Tensor) -> Packed:
        """Pack `x` `[batch, kv_heads, tokens, head_dim]` (floating point), tokens a multiple of `block_tokens`."""
        batch, heads, tokens, dim = x.shape
        if tokens % self.block_tokens:
            raise ValueError(f"{tokens} tokens are no whole blocks of {self.block_tokens}")
        step = max(1, TILE // (batch * heads * dim * self.block_tokens)) * self.block_tokens
        if tokens <= step or x.is_meta:  # numbers without memory need no tiles
            return self._encode(x)
        runs = [self._encode(x[:, :, start : start + step]) for start in range(0, tokens, step)]
        parts = {
            name: Part(torch.cat([run.parts[name].tensor for run in runs], dim=2), part.unit)
            for name, part in runs[0].parts.items()
        }
        return Packed(tokens, parts)

    @abstractmethod
    def _encode(self, x: Tensor) -> Packed:
        """`encode` for a run of at most about `TILE` numbers."""

    @abstractmethod
    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Unpack to `[batch, kv_heads, tokens, head_dim]` in `dtype`."""

    def freeze(self, prompt: Prompt) -> State:
        """What must be remembered of rows whose first tokens are `prompt`; called once per row, on its first pass.

        Rows of different lengths are frozen apart; tensors that depend on the length are padded with zeros to the
        longest row's.
        """
        return {}

    def open(self, prompt: Prompt, first: int, last: int) -> tuple[Packed, State]:
        """Tokens [first, last) of rows whose first tokens are `prompt`, packed, and what `freeze` would return."""
        raise NotImplementedError(f"{type(self).__name__} encodes all tokens alike")

    def bound(self, state: State) -> Codec:
        """This codec for the rows whose `state` `freeze` gave (views of it)."""
        return self

    def weigh(self, query: Tensor, keys: Tensor) -> Tensor:
        """How much the tokens of a flush count, `[rows, kv_heads, tokens]`.

        keys: theirs, `[rows, kv_heads, tokens, head_dim]`, as cached. query: that of the token with which they are
        packed, `[rows, query_heads, 1, head_dim]`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes all tokens alike")

    def after_prompt(self) -> Codec:
        """This codec for what is packed after a row's first pass; of the same parts, read by the same `decode`."""
        return self

    def constants(self) -> Mapping[str, Tensor]:
        """Tensors shared by all sequences (centroids, mean, std, thresholds): counted once, not per token."""
        return {}
