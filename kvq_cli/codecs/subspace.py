"""Uniform quantization with errors moved off the subspace of the prompt's queries (SQuat's keys)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs import kernels
from kvq_cli.codecs.base import Codec, Prompt, PromptCodec, State
from kvq_cli.codecs.gram import gram_matrix
from kvq_cli.codecs.layout import Layout, TensorSpec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class SubspaceCodec(PromptCodec):
    """Per channel in groups of tokens as `UniformCodec`, one block of channels after the other: the error d of block b
    moves to the channels after it, the later ones, so as to minimize |e|^2 + strength |Q e|^2 over the errors e of all
    channels:

        k_later += -(P_later,later)^-1 P_later,b d,  P = I + strength Q^T Q  (Eq. 2, 6; the inverse form of B_t H_t)
                 = -strength Q_later^T (I + strength Q_later Q_later^T)^-1 Q_b d

    Q = diag(S[:rank]) V[:rank]^T of the prompt's queries of all query heads that share a kv head. The second form needs
    no matrix larger than [rank, rank], one for each block but the last.

    State: `subspace`, Q as `[rows, kv_heads, rank, D]`, `gain`, strength (I + strength Q_later Q_later^T)^-1 as
    `[rows, kv_heads, blocks - 1, rank, rank]`, float32. Parts are `UniformCodec`'s; decoding needs no state.
    shared: the state of the first row serves all.
    """

    def __init__(
        self,
        bits: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype | str = "float16",
        *,
        rank: int,
        strength: float,
        block: int,
        shared: bool = False,
    ) -> None:
        if not 0 < block < head_dim:
            raise UsageError(
                f"block={block}: at head_dim={head_dim} no channels are left for the error of the first block; "
                f"use fewer than {head_dim} channels"
            )
        self.stored_as = self.base = UniformCodec(bits, "channel", group, head_dim, dtype)
        self.block_tokens, self.nominal_bits = self.base.block_tokens, self.base.nominal_bits
        self.rank, self.strength, self.shares_state = min(rank, head_dim), strength, shared
        self.block, self._cuts = block, range(block, head_dim, block)

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        state = {
            "subspace": TensorSpec((1, heads, self.rank, dim), "float32"),
            "gain": TensorSpec((1, heads, len(self._cuts), self.rank, self.rank), "float32"),
        }
        return replace(self.base.layout(heads, dim, dtype), state=state, fitted=tuple(state))

    def fit(self, prompt: Prompt) -> State:
        queries = prompt.queries[:1] if self.shares_state else prompt.queries
        queries = queries.unflatten(1, (prompt.keys.shape[1], -1)).flatten(2, 3)
        # Singular values and vectors from Q^T Q in 64 bits: as exact as an SVD of Q in 32, and hundreds of times
        # smaller for a long prompt.
        squares, vectors = torch.linalg.eigh(gram_matrix(queries))
        scales = squares[..., -self.rank :].clamp_min_(0).sqrt_()
        subspace = (vectors[..., -self.rank :] * scales.unsqueeze(-2)).mT.float()
        gains = []
        for cut in self._cuts:
            later = subspace[..., cut:].double()
            matrix = torch.eye(self.rank, dtype=later.dtype, device=later.device) + self.strength * (later @ later.mT)
            gains.append(torch.linalg.inv(matrix).mul_(self.strength).float())
        return {"subspace": subspace.contiguous(), "gain": torch.stack(gains, dim=2)}

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return _CorrectedCodec(self.base, self.block, state["subspace"], state["gain"])


class _CorrectedCodec(UniformCodec):
    """`base` whose errors are moved off the subspace, a block of channels after the other."""

    def __init__(self, base: UniformCodec, block: int, subspace: Tensor, gain: Tensor) -> None:
        super().__init__(base.bits, base.axis, base.group, base.head_dim, base.dtype)
        self._block, self._cuts = block, range(block, base.head_dim, block)
        self._subspace, self._gain = subspace, gain

    def _encode_on_gpu(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        layout = {"bits": self.bits, "group": self.group, "block": self._block, "dtype": getattr(torch, self.dtype)}
        packed = kernels.squat_quantize(x, self._subspace, self._gain, **layout)
        return None if packed is None else (packed[0], {"scale": packed[1], "zero": packed[2]})

    def quantize(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # 64 bits, so that rounding does not depend on how many tokens are multiplied at once.
        subspace, gain = self._subspace.double(), self._gain.double()
        later, done = x.float(), []
        for number, cut in enumerate(self._cuts):
            start = self.head_dim - later.shape[3]
            block, later = later[..., : cut - start], later[..., cut - start :]
            codes, sides = super().quantize(block)
            done.append((codes, sides))
            error = super().dequantize(codes.float(), sides) - block
            moved = error.double() @ subspace[..., start:cut].mT @ gain[:, :, number]
            later = later - (moved @ subspace[..., cut:]).float()
        done.append(super().quantize(later))
        sides = {name: torch.cat([part[name] for _, part in done], dim=3) for name in ("scale", "zero")}
        return torch.cat([codes for codes, _ in done], dim=3), sides
