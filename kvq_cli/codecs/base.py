"""The two kinds of codec: `Codec` packs blocks of numbers, `PromptCodec` does so with a state fit to each row's prompt.

Shapes are written here once. Everything a codec sees is `[batch, kv_heads, tokens, head_dim]` ("BHTD").
A codec is a pure function of its input, of constants that never change (codebooks, channel statistics) and, for a
`PromptCodec`, of the state (norms, a subspace); it knows no model, no window and no position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvq_cli.codecs.layout import Layout, dtype_name
from kvq_cli.errors import KvqError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from kvq_kernels.decode_attention import PerHead
    from kvq_kernels.decode_attention.parts import Packed as StoredAlike
    from torch import Tensor

    from kvq_cli.codecs.rotated import ChannelRotation
    from kvq_cli.codecs.transform import TransformCodec


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
    """A packed run of `tokens` tokens: named, bit-packed parts. Nothing else is stored."""

    tokens: int
    parts: Mapping[str, Part]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(p.tensor.numel() * p.tensor.element_size() for p in self.parts.values())

    def of_rows(self, start: int, stop: int) -> Packed:
        """Rows [start, stop) of the batch, without a copy."""
        return Packed(self.tokens, {name: Part(p.tensor[start:stop], p.unit) for name, p in self.parts.items()})


@dataclass(frozen=True)
class Prompt:
    """The prompts of some rows in full precision, which a `PromptCodec` is fit to.

    keys, values: `[rows, kv_heads, tokens, head_dim]`, keys as they are cached (before or after RoPE). queries:
    `[rows, query_heads, tokens, head_dim]`, before or after RoPE as the keys are. No pads; rows of the same length.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor


#: State of a `PromptCodec`, fit to each row's prompt: named tensors `[rows, ...]`, stored and counted with the rows.
State: TypeAlias = "Mapping[str, Tensor]"

#: Numbers encoded at a time, which bounds the scratch memory of long prompts. Blocks are independent, so that tiling
#: does not change the result.
TILE = 1 << 22


def side_dtype(dtype: torch.dtype | str | None) -> str:
    """The name of the 16-bit dtype of scales, zero-points and outliers for a model of `dtype`.

    The model's dtype, or float16 for a 32-bit model or none, since 32-bit scales and zero-points cost too much memory.
    """
    return "bfloat16" if dtype is not None and dtype_name(dtype) == "bfloat16" else "float16"


def to_side(x: Tensor, dtype: str) -> Tensor:
    """`x` in the 16 bits of scales, zero-points and exact numbers. Numbers out of their range become its largest or
    least: an infinite scale or zero-point would lose its group, an infinite key or value its whole row of attention."""
    side = getattr(torch, dtype)
    most = min(torch.finfo(side).max, torch.finfo(x.dtype).max)
    return x.clamp(-most, most).to(side)


#: Names of `constants` that a codec computes from the others, to encode and decode fast: no part of its format.
TABLES = frozenset({"scale", "gain", "offset", "ranked", "decoded"})

#: How RoPE rotates keys that are cached before it: (style, rotated channels). None: it does not.
KeyRotation: TypeAlias = "tuple[str, int] | None"
#: Packed parts as the kernels of kvq_kernels take them.
KernelStorage: TypeAlias = "StoredAlike | PerHead"


class BlockFormat:
    """Block length, bits and constants: common to both kinds of codec."""

    #: Tokens that are encoded together; encoded runs are multiples of it.
    block_tokens: int = 1
    #: Bits of the codes per number, as the papers count them: without scales and outliers.
    nominal_bits: float
    #: The codec that describes the packed parts to kernels: its parts are the same, but for outliers. None: this one.
    stored_as: Codec | None = None
    #: The rotation of channels before `base` packs them, in which attention may be computed. None: it has none.
    rotation: ChannelRotation | None = None
    #: Whether the codes are of all layers together: see `cache.joined`.
    joins_layers: bool = False
    #: Whether files hold packed parts compressed by DEFLATE.
    deflates: bool = False
    #: Bytes that a packed token holds, while a pass runs, until all layers have it.
    waiting_bytes: int = 0
    #: Whether packed numbers were divided by the `norm` of the state.
    has_norm: bool = False
    #: Tokens of a tile of the kernels that read the parts.
    kernel_tile: int = 16
    #: Streams, keys ("k") and values ("v"), of whose latents `rematerialize` reads the parts.
    read_as_latents: str = ""

    @property
    def unread_by_kernels(self) -> str | None:
        """Why `decode_attention` cannot read the parts; None: it can."""
        return f"the storage of {type(self).__name__} is not read by a kernel"

    @property
    def transforms(self) -> tuple[TransformCodec, ...]:
        """The transforms of all heads, of whose components the parts are codes; empty: they are others."""
        return ()

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> StoredAlike | PerHead:
        """The parts as kernels take them, without a copy. rotation: of keys. Imports Triton."""
        raise TypeError(self.unread_by_kernels)

    def constants(self) -> Mapping[str, Tensor]:
        """Tensors held for all sequences (centroids, mean, std, thresholds, `TABLES`): counted once, not per token."""
        return {}


class Codec(BlockFormat, ABC):
    """Encodes runs of whole blocks. Blocks are independent: runs may be split or joined between any two blocks without
    changing a bit of the result."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold `encode`: on a GPU it reads nothing back and talks to no other process."""
        return True

    @property
    def ignoring_capturable(self) -> bool:
        """The same of `encode_ignoring`."""
        return self.capturable

    def encode(self, x: Tensor) -> Packed:
        """Pack `x` `[batch, kv_heads, tokens, head_dim]` (floating point), tokens a multiple of `block_tokens`."""
        batch, heads, tokens, dim = x.shape
        if tokens % self.block_tokens:
            raise ValueError(f"{tokens} tokens are not a whole number of blocks of {self.block_tokens}")
        step = max(1, TILE // (batch * heads * dim * self.block_tokens)) * self.block_tokens
        if tokens <= step:
            return self._encode(x)
        return concatenate([self._encode(x[:, :, start : start + step]) for start in range(0, tokens, step)])

    def encode_ignoring(self, x: Tensor, ignored: Tensor) -> Packed:
        """As `encode`, where the numbers that are `ignored` (bool, of the shape of `x`) may decode to anything."""
        return self.encode(x)

    @abstractmethod
    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        """The tensors that the codec holds, and those that it makes of `[batch, heads, tokens, dim]` of the model's
        dtype."""

    def check(self, packed: Packed) -> None:
        """Raise KvqError for parts that `encode` cannot have written, such as indices out of range, which `decode` does
        not check. Their shapes and dtypes are right, and floating-point numbers finite."""
        return None

    @abstractmethod
    def _encode(self, x: Tensor) -> Packed:
        """`encode` for a run of at most about `TILE` numbers."""

    @abstractmethod
    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Unpack to `[batch, kv_heads, tokens, head_dim]` in `dtype`.

        Blocks that were never written, whose parts are zeros, decode to any finite numbers: attention reads rows of
        different lengths together.
        """

    def decode_by_channel(self, packed: Packed) -> Tensor:
        """`decode` to `[batch, kv_heads, head_dim, tokens]` float32, contiguous where a codec computes it so."""
        return self.decode(packed, torch.float32).mT

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        """Products of queries with all tokens, `[batch, kv_heads, queries, tokens]` float32.

        queries: `[batch, kv_heads, queries, head_dim]` float32.
        """
        return queries @ self.decode_by_channel(packed)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        """Sums over tokens of weight times number, `[batch, kv_heads, queries, head_dim]` float32.

        weights: `[batch, kv_heads, queries, tokens]` float32.
        """
        return weights @ self.decode_by_channel(packed).mT


class PromptCodec(BlockFormat, ABC):
    """Encodes with a state that is fit to the prompt of each row and fixed from then on.

    The cache calls `encode_prompt` once per row, on its first pass, and stores the state with the row. The codec that
    `with_state` returns encodes later tokens and decodes all tokens.
    """

    #: Whether the prompt has other parts than later tokens and is stored separately; decoding tells them by name.
    stores_prompt_apart: bool = False
    #: Whether all rows use the state of the first row, which is stored once (dimension 0 of its tensors is 1); prompts
    #: of other rows are encoded like later tokens.
    shares_state: bool = False
    #: Whether `with_state` needs the attention that later tokens receive, to encode them.
    needs_saliency: bool = False

    def fit(self, prompt: Prompt) -> State:
        """The state of rows with this prompt, as far as it does not depend on which tokens are packed.

        Rows of different lengths are fit separately; tensors that depend on the length are padded with zeros to the
        longest row.
        """
        return {}

    def check_state(self, state: State) -> None:
        """Raise KvqError for a finite state that no prompt leads to; see `Codec.check`."""
        return None

    def encode_prompt(self, x: Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        """Fit to `prompt` and pack `x` `[rows, kv_heads, tokens, head_dim]`, its keys or values from `first` on."""
        state = self.fit(prompt)
        return self.with_state(state).encode(x), state

    @abstractmethod
    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        """As `Codec.layout`, of a prompt of which `tokens` tokens are packed: its parts and its state."""

    @abstractmethod
    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        """The codec of later tokens for the rows of `state`; it also decodes their prompt.

        saliency: `[rows, kv_heads, tokens]` of the tokens to encode, for a codec that `needs_saliency`.
        """


def refuse_unless(valid: Tensor, part: str) -> None:
    """Raise KvqError, naming the part of a packed block, unless all of `valid` is true."""
    if not valid.all():
        raise KvqError(f"{part} holds numbers that cannot have been packed")


#: The codec of a stream.
AnyCodec = Codec | PromptCodec


def concatenate(runs: Sequence[Packed]) -> Packed:
    """Concatenate packed runs along their tokens."""
    parts = {
        name: Part(torch.cat([run.parts[name].tensor for run in runs], dim=2), part.unit)
        for name, part in runs[0].parts.items()
    }
    return Packed(sum(run.tokens for run in runs), parts)
