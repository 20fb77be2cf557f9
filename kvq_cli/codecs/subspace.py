"""Uniform quantization whose errors are kept off the subspace of the prompt's queries (SQuat's keys)."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from kvq_cli.codecs import kernels
from kvq_cli.codecs.base import Prompt, State
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError


class SubspaceCodec(UniformCodec):
    """Per channel in groups of tokens as `UniformCodec`, one block of channels after the other: the error d of block b
    moves to the channels after it, the rest, so as to minimize |e|^2 + strength |Q e|^2 over all channels' errors e:

        k_rest += -(P_rest,rest)^-1 P_rest,b d,  P = I + strength Q^T Q  (Eq. 2, 6; the inverse form of B_t H_t)
                = -strength Q_rest^T (I + strength Q_rest Q_rest^T)^-1 Q_b d

    Q = diag(S[:rank]) V[:rank]^T of the prompt's queries of all query heads that share a kv head. The second form needs
    no matrix larger than [rank, rank], one for each block but the last.

    State: `subspace`, Q as `[rows, kv_heads, rank, D]`, `gain`, strength (I + strength Q_rest Q_rest^T)^-1 as
    `[rows, kv_heads, blocks - 1, rank, rank]`, float32. Storage is `UniformCodec`'s; decoding needs no state.
    """

    freezes = True

    def __init__(
        self,
        bits: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        *,
        rank: int,
        strength: float,
        block: int,
        shared: bool = False,
    ) -> None:
        super().__init__(bits, "channel", group, head_dim, dtype)
        if not 0 < block < head_dim:
            raise UsageError(
                f"block={block}: at head_dim={head_dim} no channels are left for the error of the first block; "
                f"use fewer than {head_dim} channels"
            )
        self.rank, self.strength, self.shares_state = min(rank, head_dim), strength, shared
        self._block, self._cuts = block, range(block, head_dim, block)
        self._subspace: Tensor | None = None
        self._gain: Tensor | None = None

    def freeze(self, prompt: Prompt) -> State:
        queries = prompt.queries.unflatten(1, (prompt.keys.shape[1], -1)).flatten(2, 3).double()
        # Singular values and vectors from Q^T Q in 64 bits: as exact as an SVD of Q in 32, and hundreds of times
        # smaller for a long prompt.
        squares, vectors = torch.linalg.eigh(queries.mT @ queries)
        scales = squares[..., -self.rank :].clamp_min_(0).sqrt_()
        subspace = (vectors[..., -self.rank :] * scales.unsqueeze(-2)).mT.float()
        gains = []
        for cut in self._cuts:
            rest = subspace[..., cut:].double()
            whole = torch.eye(self.rank, dtype=rest.dtype, device=rest.device) + self.strength * (rest @ rest.mT)
            gains.append(torch.linalg.inv(whole).mul_(self.strength).float())
        return {"subspace": subspace.contiguous(), "gain": torch.stack(gains, dim=2)}

    def bound(self, state: State) -> SubspaceCodec:
        codec = copy(self)
        codec._subspace, codec._gain = state["subspace"], state["gain"]
        return codec

    def _encode_on_gpu(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        own = {"bits": self.bits, "group": self.group, "block": self._block, "dtype": self.dtype}
        packed = kernels.squat_quantize(x, self._subspace, self._gain, **own)
        return None if packed is None else (packed[0], {"scale": packed[1], "zero": packed[2]})

    def quantize(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # 64 bits, so that rounding does not depend on how many tokens are multiplied at once.
        subspace, gain = self._subspace.double(), self._gain.double()
        rest, done = x.float(), []
        for number, cut in enumerate(self._cuts):
            start, size = self.head_dim - rest.shape[3], cut - (self.head_dim - rest.shape[3])
            block, rest = rest[..., :size], rest[..., size:]
            codes, sides = super().quantize(block)
            done.append((codes, sides))
            error = super().dequantize(codes.float(), sides) - block
            moved = error.double() @ subspace[..., start:cut].mT @ gain[:, :, number]
            rest = rest - (moved @ subspace[..., cut:]).float()
        done.append(super().quantize(rest))
        sides = {name: torch.cat([own[name] for _, own in done], dim=3) for name in ("scale", "zero")}
        return torch.cat([codes for codes, _ in done], dim=3), sides
