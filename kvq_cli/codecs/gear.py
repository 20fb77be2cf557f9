"""GEAR: uniform quantization, a low-rank approximation of its error, and outliers in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed, Part, Prompt, PromptCodec, State, to_side
from kvq_cli.codecs.gram import gram_matrix, token_tiles
from kvq_cli.codecs.layout import Layout, PartSpec, TensorSpec
from kvq_cli.codecs.outliers import check_index, ranks
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class GearCodec(PromptCodec):
    """X ~ D + L R + S of a chunk of tokens of one head: D of the `base`, L R of low rank, S sparse.

    S: the largest and the smallest numbers of each `chunk` tokens, `fraction` / 2 each, rounded down, in 16 bits with
    their indices. The base encodes the smallest other number of their group in their place, so that they do not widen
    its range; decoding writes them last, so that they are exact.
    L R: E = X - D, 0 at outliers, projected on r directions P `[head_dim, r]`: from a seeded random start `loops` times
    P <- E^T E P (a power iteration), made orthonormal; R = P^T, L = E P. The paper ends half a step earlier, with an
    orthonormal L. The prompt is one chunk of rank `rank`, whose R is the state; later chunks have rank `chunk_rank`.

    Parts: the base's; `outlier_index` int16 and `outlier_value`, `[B, H, T / chunk, kept]`, unit `chunk`; `left`
    `[B, H, T, r]`, unit 1; after the prompt `right` `[B, H, T / chunk, r, D]`, unit `chunk`.
    State: `right` `[rows, H, r, D]`. Factors and outliers have 16 bits.
    """

    stores_prompt_apart = True
    unread_by_kernels = "a low-rank approximation and outliers are kept beside the codes"

    def __init__(
        self,
        base: UniformCodec,
        chunk: int,
        fraction: float,
        rank: int,
        chunk_rank: int,
        loops: int,
        seed: int,
    ) -> None:
        dim = base.head_dim
        if max(rank, chunk_rank) > dim:
            raise UsageError(f"rank={rank}, chunk_rank={chunk_rank}: a head_dim of {dim} has no higher rank")
        if chunk * dim > 2**15:
            raise UsageError(f"residual={chunk}: at head_dim={dim} a chunk may have at most {2**15 // dim} tokens")
        self._each = int(fraction / 2 * chunk * dim)
        if fraction and not self._each:
            raise UsageError(f"outliers={fraction} of {chunk} by {dim} numbers keeps none; use 0 or more of them")
        self.base, self.block_tokens, self.nominal_bits = base, chunk, base.nominal_bits
        self.rank, self.chunk_rank, self.loops = rank, chunk_rank, loops
        self._seed = seed

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        parts = self._common_parts(heads, dim, dtype)
        if not self.rank:
            return Layout(parts)
        left = PartSpec(heads, 1, (self.rank,), self.base.dtype)
        return Layout({**parts, "left": left}, state={"right": TensorSpec((1, heads, self.rank, dim), self.base.dtype)})

    def chunk_layout(self, heads: int, dim: int, dtype: str) -> Layout:
        """The parts of chunks after the prompt."""
        parts = self._common_parts(heads, dim, dtype)
        if self.chunk_rank:
            parts["left"] = PartSpec(heads, 1, (self.chunk_rank,), self.base.dtype)
            parts["right"] = PartSpec(heads, self.block_tokens, (self.chunk_rank, dim), self.base.dtype)
        return Layout(parts)

    def _common_parts(self, heads: int, dim: int, dtype: str) -> dict[str, PartSpec]:
        """D and S."""
        parts = dict(self.base.layout(heads, dim, dtype).parts)
        if self._each:
            kept = PartSpec(heads, self.block_tokens, (2 * self._each,), "int16")
            parts |= {"outlier_index": kept, "outlier_value": replace(kept, dtype=self.base.dtype)}
        return parts

    def encode_prompt(self, x: Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        parts, error = self._quantize(x)
        if not self.rank:
            return Packed(x.shape[2], parts), {}
        left, right = self._factors(error, self.rank)
        return Packed(x.shape[2], parts | {"left": Part(left, 1)}), {"right": right}

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return _ChunkCodec(self, state.get("right"))

    def encode_chunks(self, x: Tensor) -> Packed:
        """Pack chunks of tokens after the prompt."""
        parts, error = self._quantize(x)
        if self.chunk_rank:
            left, right = self._factors(self._chunks(error), self.chunk_rank)
            parts |= {"left": Part(left.flatten(2, 3), 1), "right": Part(right, self.block_tokens)}
        return Packed(x.shape[2], parts)

    def check_parts(self, packed: Packed) -> None:
        """`Codec.check` of the prompt or of later chunks."""
        self.base.check(packed)
        if self._each:
            check_index(packed.parts["outlier_index"].tensor, self.block_tokens * self.base.head_dim)

    def restore(self, packed: Packed, prompt_right: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Unpack the prompt, with the R of its state, or later chunks, which store theirs."""
        x, parts = self.base.decode(packed, torch.float32), packed.parts
        if "right" in parts:
            self._chunks(x).add_(self._chunks(parts["left"].tensor).float() @ parts["right"].tensor.float())
        elif "left" in parts:
            if prompt_right is None:
                raise ValueError("the factors of this prompt are in the state of its rows, which is not given")
            x += parts["left"].tensor.float() @ prompt_right.float()
        if self._each:
            index, value = parts["outlier_index"].tensor, parts["outlier_value"].tensor
            self._chunks(x).flatten(3).scatter_(3, index.long(), value.float())
        return x.to(dtype)

    def _quantize(self, x: Tensor) -> tuple[dict[str, Part], Tensor]:
        """`[B, H, T, D]` -> (D and S, E as float32 of the same shape)."""
        x = x.float().contiguous()
        if not self._each:
            packed = self.base.encode(x)
            return dict(packed.parts), x - self.base.decode(packed, torch.float32)
        numbers = self._chunks(x).flatten(3)
        order = ranks(numbers)
        index = torch.cat([order.topk(self._each, dim=3, largest=largest).indices for largest in (True, False)], dim=3)
        kept = torch.zeros_like(numbers, dtype=torch.bool).scatter_(3, index, True)
        packed = self.base.encode(self._without(x, kept.view(x.shape)))
        error = (x - self.base.decode(packed, torch.float32)).view(numbers.shape).scatter_(3, index, 0)
        sparse = {
            "outlier_index": Part(index.to(torch.int16), self.block_tokens),
            "outlier_value": Part(to_side(numbers.gather(3, index), self.base.dtype), self.block_tokens),
        }
        return {**packed.parts, **sparse}, error.view(x.shape)

    def _without(self, x: Tensor, kept: Tensor) -> Tensor:
        """`x` with the smallest other number of its group in place of every outlier; 0 where all of a group are."""
        groups = self.base.grouped(x)
        low = groups.masked_fill(kept := self.base.grouped(kept), torch.inf).amin(self.base.group_dim, keepdim=True)
        return torch.where(kept, low.masked_fill(low == torch.inf, 0), groups).view(x.shape)

    def _factors(self, error: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """`[..., T, D]` -> (L `[..., T, rank]`, R `[..., rank, D]`), 16 bits.

        E^T E is summed in 64 bits, so that neither tiles nor the batch beside a chunk show in its factors' 16.
        """
        dim, gram = error.shape[-1], gram_matrix(error)
        start = torch.randn(dim, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(self._seed))
        directions = start.to(error.device).expand(*gram.shape[:-2], dim, rank)
        for _ in range(self.loops):
            directions = torch.linalg.qr(gram @ directions).Q
        right = directions.mT.to(getattr(torch, self.base.dtype)).contiguous()
        left = [to_side(tile.double() @ right.mT.double(), self.base.dtype) for tile in token_tiles(error)]
        return torch.cat(left, dim=-2), right

    def _chunks(self, x: Tensor) -> Tensor:
        """A view of `[B, H, T, N]` as `[B, H, T / chunk, chunk, N]`."""
        return x.unflatten(2, (-1, self.block_tokens))


class _ChunkCodec(Codec):
    """`gear` after a prompt of factors `right` `[rows, H, r, D]`; None: without factors."""

    def __init__(self, gear: GearCodec, right: Tensor | None) -> None:
        self._gear, self._right = gear, right
        self.block_tokens, self.nominal_bits = gear.block_tokens, gear.nominal_bits

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self._gear.chunk_layout(heads, dim, dtype)

    def check(self, packed: Packed) -> None:
        self._gear.check_parts(packed)

    def _encode(self, x: Tensor) -> Packed:
        return self._gear.encode_chunks(x)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._gear.restore(packed, self._right, dtype)
