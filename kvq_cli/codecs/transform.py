"""Karhunen-Loeve transform codes: a token's channels are transformed, and chunks of the components kept as codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvq_cli.codecs.base import Codec, Packed, Part
from kvq_cli.codecs.codebook import CodebookCodec

#: Components of a chunk, which is one 8-bit code: 8, 4, 2 or 1 bits per component.
CHUNKS = (1, 2, 4, 8)
#: Numbers are clamped to this many deviations (a power of two) from the mean of their channel.
_MAX_DEVIATIONS = 2.0**7


class TransformCodec(Codec):
    """z = A (x - mean); chunks of z are kept as the index of their nearest centroid; x' = S z' + mean, with A S = 1.

    A group of channels has one transform: the head_dim channels of a head, or those of all kv heads together. With G
    groups of W channels, of whose components at most K are kept:

    mean, std:  `[G, W]`, mean and deviation of each channel.
    analysis:   A, `[G, K, W]`; synthesis: S, `[G, W, K]`. A group that keeps fewer components than K has zeros there.
    allocation: for each group, how many chunks have 1, 2, 4 and 8 components, in the order of the components.
    centroids:  chunk length -> `[chunks of all groups, 256, length]`.

    z is exact: numbers and A are rounded to integers whose products and sums are below 2^53, so that a token gets the
    same codes alone as among others.

    Part: `codes` uint8 `[B, 1, T, chunks]`, chunks of 1 component of all groups first, then those of 2, 4 and 8.
    """

    def __init__(
        self,
        heads: int,
        allocation: Sequence[Sequence[int]],
        mean: Tensor,
        std: Tensor,
        analysis: Tensor,
        synthesis: Tensor,
        centroids: Mapping[int, Tensor],
    ) -> None:
        groups, width = mean.shape
        self._heads, self._per_group = heads, heads // groups
        self.head_dim = width // self._per_group
        self._allocation = [tuple(row) for row in allocation]
        self._mean, self._std = mean.float(), std.float()
        self._analysis = analysis.float()
        self._members = {
            size: CodebookCodec(books.unsqueeze(0), (1, size), books.shape[0] * size)
            for size, books in sorted(centroids.items())
        }
        self.codes = sum(books.shape[0] for books in centroids.values())
        self.nominal_bits = 8 * self.codes / (groups * width)
        self._to_grid, self._integers, self._step = _integer_transform(self._std, self._analysis)
        # Of each chunk length, the components of each group: where they stand in its transform.
        starts = [[sum(n * s for n, s in zip(row[:i], CHUNKS, strict=False)) for i in range(4)] for row in allocation]
        self._spans = {
            size: [(starts[g][i], starts[g][i] + size * row[i]) for g, row in enumerate(allocation)]
            for i, size in enumerate(CHUNKS)
            if size in self._members
        }
        self._synthesis, self._blocks = self._by_chunk_length(synthesis.float())
        self._head_mean = self._mean.view(heads, self.head_dim)

    @property
    def joined(self) -> bool:
        """Whether all kv heads share one transform."""
        return self._mean.shape[0] == 1

    def constants(self) -> Mapping[str, Tensor]:
        named = {"mean": self._mean, "std": self._std, "analysis": self._analysis, "synthesis": self._synthesis}
        for size, member in self._members.items():
            named |= {f"{size}.{name}": tensor for name, tensor in member.constants().items()}
        return named | {"gain": self._integers}

    def _by_chunk_length(self, synthesis: Tensor) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """S in one tensor, and its views by chunk length: of each head, `[components of its group, head_dim]`."""
        rows = synthesis.transpose(1, 2).unflatten(2, (self._per_group, self.head_dim))  # [G, K, heads of a group, D]
        shapes, cuts = [], []
        for size, spans in self._spans.items():
            for head in range(self._heads):
                group, member = divmod(head, self._per_group)
                cuts.append(rows[group, slice(*spans[group]), member])
                shapes.append((size, cuts[-1].shape))
        flat = torch.cat([cut.flatten() for cut in cuts])
        blocks: dict[int, list[Tensor]] = {size: [] for size in self._spans}
        for (size, shape), numbers in zip(shapes, flat.split([cut.numel() for cut in cuts]), strict=True):
            blocks[size].append(numbers.view(shape))
        return flat, blocks

    def components(self, x: Tensor) -> Tensor:
        """z of `x` `[B, H, T, D]`: `[B, G, T, K]` float32, the same for a token alone and among others."""
        groups = self._mean.shape[0]
        x = x.float().unflatten(1, (groups, self._per_group)).transpose(2, 3).flatten(3)  # [B, G, T, W]
        grid = (x - self._mean.unsqueeze(1)) * self._to_grid
        limit = float(self._to_grid_limit())
        grid = grid.round_().clamp_(-limit, limit).double()
        return (grid @ self._integers.transpose(1, 2)).mul_(self._step.unsqueeze(1)).float()

    def _to_grid_limit(self) -> float:
        return 2.0 ** _grid_bits(self._mean.shape[1])

    def _encode(self, x: Tensor) -> Packed:
        z = self.components(x)
        codes = []
        for size, member in self._members.items():
            spans = self._spans[size]
            chunks = torch.cat([z[:, g, :, first:last] for g, (first, last) in enumerate(spans)], dim=-1)
            codes.append(member.encode(chunks.unsqueeze(1)).parts["codes"].tensor)
        return Packed(x.shape[2], {"codes": Part(torch.cat(codes, dim=-1), 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        pieces = self._pieces(packed)
        batch, tokens = packed.parts["codes"].tensor.shape[0], packed.tokens
        out = self._mean.new_empty(batch, self._heads, tokens, self.head_dim)
        for head in range(self._heads):
            out[:, head] = self._synthesized(pieces, head)
        return out.to(dtype)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        """As `Codec.weighted_sum`; a common transform of all heads is applied once, to the sums of components."""
        if not self.joined:
            return super().weighted_sum(weights, packed)
        rows, heads, queries, tokens = weights.shape
        flat = weights.flatten(1, 2)
        sums = {size: (flat @ z).view(rows, heads, queries, -1) for size, z in self._pieces(packed).items()}
        out = weights.sum(dim=3, keepdim=True) * self._head_mean.unsqueeze(1)
        for size, components in sums.items():
            for head in range(heads):
                out[:, head] += components[:, head] @ self._blocks[size][head]
        return out

    def _synthesized(self, pieces: Mapping[int, Tensor], head: int) -> Tensor:
        """x' of one head from the components of all groups, `[B, T, head_dim]`."""
        group = head // self._per_group
        out = self._head_mean[head]
        for size, z in pieces.items():
            first, last = self._columns(size, group)
            if first < last:
                out = out + z[:, :, first:last] @ self._blocks[size][head]
        return out

    def _columns(self, size: int, group: int) -> tuple[int, int]:
        """Where the components of a group stand among the chunks of this length."""
        widths = [last - first for first, last in self._spans[size]]
        return sum(widths[:group]), sum(widths[: group + 1])

    def _pieces(self, packed: Packed) -> dict[int, Tensor]:
        """z' by chunk length, `[B, T, components of all groups]` float32."""
        codes, pieces, first = packed.parts["codes"].tensor, {}, 0
        for size, member in self._members.items():
            last = first + member.head_dim // size
            part = Packed(packed.tokens, {"codes": Part(codes[..., first:last], 1)})
            pieces[size], first = member.decode(part, torch.float32)[:, 0], last
        return pieces


def _grid_bits(width: int) -> int:
    """Bits of the integers whose products, summed over `width` channels, stay below 2^53."""
    return (53 - math.ceil(math.log2(max(2, width)))) // 2


def _integer_transform(std: Tensor, analysis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(factor of a channel to its integer grid `[G, 1, W]`, A in integers `[G, K, W]` float64, value of a unit of their
    product `[G, K]` float64, a power of two)."""
    bits = _grid_bits(std.shape[1])
    safe = std.masked_fill(std <= 0, 1)
    to_grid = (2.0**bits / _MAX_DEVIATIONS) / safe
    scaled = analysis.double() * safe.double().unsqueeze(1)
    exponent = torch.frexp(scaled.abs().amax(dim=2)).exponent  # the largest of a row is below 2^exponent
    one = torch.ones_like(scaled[:, :, 0])
    integers = (scaled * torch.ldexp(one, bits - exponent).unsqueeze(2)).round()
    step = torch.ldexp(one, exponent - bits) * (_MAX_DEVIATIONS / 2.0**bits)
    return to_grid.unsqueeze(1), integers, step
