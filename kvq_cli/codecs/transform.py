"""Karhunen-Loeve transform codes: a token's channels are transformed, and chunks of the components kept as codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq_cli.codecs.base import Codec, Packed, Part
from kvq_cli.codecs.codebook import CodebookCodec, wide
from kvq_cli.codecs.exact_product import ExactProduct

#: Components of a chunk, which is one 8-bit code: 8, 4, 2 or 1 bits per component.
CHUNKS = (1, 2, 4, 8)


class TransformCodec(Codec):
    """z = A (x - mean); chunks of z are kept as the index of their nearest centroid; x' = S z' + mean, with A S = 1.

    A group of channels has one transform: the head_dim channels of a head, or those of all kv heads together. With G
    groups of W channels, of whose components at most K are kept, the tensors are:

    mean, std:   `[G, W]`, mean and deviation of each channel.
    analysis:    A, `[G, K, W]`; synthesis: S, `[G, W, K]`. A group that keeps fewer components than K has zeros there.
    allocation:  `[G, 4]`: how many chunks have 1, 2, 4 and 8 components, in the order of the components.
    centroids.n: of chunks of n components, `[chunks of all groups, 256, n]`; absent where there are none.

    z is an `ExactProduct`: a token gets the same codes alone as among others.

    Part: `codes` uint8 `[B, 1, T, chunks]`, chunks of 1 component of all groups first, then those of 2, 4 and 8.
    """

    def __init__(self, heads: int, tensors: Mapping[str, Tensor]) -> None:
        allocation: list[list[int]] = tensors["allocation"].tolist()
        centroids = {size: tensors[f"centroids.{size}"] for size in CHUNKS if f"centroids.{size}" in tensors}
        groups, width = tensors["mean"].shape
        self._heads, self._per_group = heads, heads // groups
        self.head_dim = width // self._per_group
        self._mean, self._std, self._analysis = (tensors[name].float() for name in ("mean", "std", "analysis"))
        self._members = {
            size: CodebookCodec(books.unsqueeze(0), (1, size), books.shape[0] * size)
            for size, books in centroids.items()
        }
        self.codes = sum(books.shape[0] for books in centroids.values())
        self.nominal_bits = 8 * self.codes / (groups * width)
        self._product = ExactProduct(self._std, self._analysis)
        # By chunk length, entries as words and how many codes a token has. Entry number of each code's codebook.
        self._entries = [wide(member.centroids.view(-1, size)) for size, member in self._members.items()]
        self._counts = [books.shape[0] for books in centroids.values()]
        self._dtype = next(iter(self._members.values())).centroids.dtype
        self._offset = torch.cat([member.offset.flatten() for member in self._members.values()])
        # Of each chunk length, the components of each group: where they stand in its transform.
        starts = [[sum(n * s for n, s in zip(row[:i], CHUNKS, strict=False)) for i in range(4)] for row in allocation]
        self._spans = {
            size: [(starts[g][i], starts[g][i] + size * row[i]) for g, row in enumerate(allocation)]
            for i, size in enumerate(CHUNKS)
            if size in self._members
        }
        # S of each group, `[components, W]`, without those that it drops: views of one tensor.
        kept = [sum(last - first for first, last in spans) for spans in zip(*self._spans.values(), strict=True)]
        cuts = [synthesis[:, :n].T for n, synthesis in zip(kept, tensors["synthesis"].float(), strict=True)]
        self._columns = [[last - first for first, last in spans] for spans in self._spans.values()]
        self._synthesis = torch.cat([cut.flatten() for cut in cuts])
        pieces = self._synthesis.split([cut.numel() for cut in cuts])
        self._blocks = [piece.view(cut.shape) for piece, cut in zip(pieces, cuts, strict=True)]

    @property
    def joined(self) -> bool:
        """Whether all kv heads share one transform."""
        return self._mean.shape[0] == 1

    def constants(self) -> Mapping[str, Tensor]:
        named = {"mean": self._mean, "std": self._std, "analysis": self._analysis, "synthesis": self._synthesis}
        for size, member in self._members.items():
            named |= {f"{size}.{name}": tensor for name, tensor in member.constants().items()}
        return named | {"gain": self._product.integers, "offset": self._offset}

    def components(self, x: Tensor) -> Tensor:
        """z of `x` `[B, H, T, D]`: `[B, G, T, K]` float32, the same for a token alone and among others."""
        groups = self._mean.shape[0]
        x = x.float().unflatten(1, (groups, self._per_group)).transpose(2, 3).flatten(3)  # [B, G, T, W]
        return self._product(x - self._mean.unsqueeze(1))

    def _encode(self, x: Tensor) -> Packed:
        z = self.components(x)
        codes = []
        for size, member in self._members.items():
            spans = self._spans[size]
            chunks = torch.cat([z[:, g, :, first:last] for g, (first, last) in enumerate(spans)], dim=-1)
            codes.append(member.encode(chunks.unsqueeze(1)).parts["codes"].tensor)
        return Packed(x.shape[2], {"codes": Part(torch.cat(codes, dim=-1), 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        batch, tokens = packed.parts["codes"].tensor.shape[0], packed.tokens
        groups, width = self._mean.shape
        out = self._mean.new_empty(groups, batch * tokens, width)
        for group, z in enumerate(self._decoded_components(packed)):
            torch.addmm(self._mean[group], z, self._blocks[group], out=out[group])
        out = out.view(groups, batch, tokens, self._per_group, self.head_dim).permute(1, 0, 3, 2, 4)
        return out.reshape(batch, self._heads, tokens, self.head_dim).to(dtype)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        """As `Codec.weighted_sum`; a common transform of all heads is applied once, to the sums of components."""
        if not self.joined:
            return super().weighted_sum(weights, packed)
        (z,) = self._decoded_components(packed)
        sums = weights.flatten(1, 2) @ z.view(len(weights), packed.tokens, -1)  # [B, H * n, K]
        synthesis = self._blocks[0].unflatten(1, (self._heads, self.head_dim)).transpose(0, 1)  # [H, K, D]
        mean = self._mean.view(self._heads, 1, self.head_dim)
        return sums.view(*weights.shape[:3], -1) @ synthesis + weights.sum(dim=3, keepdim=True) * mean

    def _decoded_components(self, packed: Packed) -> list[Tensor]:
        """z' of each group, `[B * T, components]` float32."""
        index = packed.parts["codes"].tensor.reshape(-1, self.codes) + self._offset
        pieces = []  # by chunk length, components of all groups, in the dtype of the centroids
        for entries, part in zip(self._entries, torch.split_with_sizes_copy(index, self._counts, dim=1), strict=True):
            pieces.append(entries.index_select(0, part.view(-1)).view(self._dtype).view(len(index), -1))
        # Widening to 32 bits comes last: fewer bytes move before.
        if self.joined:
            return [torch.cat(pieces, dim=1).float()]
        groups = [piece.split(columns, dim=1) for piece, columns in zip(pieces, self._columns, strict=True)]
        return [torch.cat(group, dim=1).float() for group in zip(*groups, strict=True)]
