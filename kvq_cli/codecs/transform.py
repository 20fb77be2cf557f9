"""Karhunen-Loeve transform codes: a token's channels are transformed, and chunks of the components kept as codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kvq_cli.codecs.base import Codec, Packed, Part
from kvq_cli.codecs.chunk_codebooks import CHUNKS, ChunkCodebooks, ComponentLookup
from kvq_cli.codecs.exact_product import ExactProduct, product_layout
from kvq_cli.codecs.layout import Layout, PartSpec, TensorLike, TensorSpec, spec_of
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


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

    def __init__(self, heads: int, tensors: Mapping[str, TensorLike]) -> None:
        allocation: list[list[int]] = tensors["allocation"].tolist()
        groups, width = tensors["mean"].shape
        self._groups, self._heads, self._per_group = groups, heads, heads // groups
        self.head_dim = width // self._per_group
        #: By chunk length, the chunks of each group.
        self.chunks = {
            size: chunks for size, chunks in zip(CHUNKS, zip(*allocation, strict=True), strict=True) if any(chunks)
        }
        self.codes = sum(map(sum, allocation))
        self.nominal_bits = 8 * self.codes / (groups * width)
        self._specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        if not isinstance(tensors["mean"], TensorSpec):
            self._make_tables(cast("Mapping[str, Tensor]", tensors))

    def _make_tables(self, tensors: Mapping[str, Tensor]) -> None:
        self._mean, self._std = tensors["mean"].float(), tensors["std"].float()
        self._product = ExactProduct(self._std, tensors["analysis"].float())
        # The only copy of the centroids, by component: codebooks are views of it.
        rows = torch.cat([tensors[f"centroids.{size}"].transpose(1, 2).flatten(0, 1) for size in self.chunks])
        self._lookup = ComponentLookup(rows, self.chunks)
        self._books: dict[int, ChunkCodebooks] = {}
        parts = rows.split([size * sum(chunks) for size, chunks in self.chunks.items()])
        for (size, chunks), part in zip(self.chunks.items(), parts, strict=True):
            self._books[size] = ChunkCodebooks(part.view(sum(chunks), size, MAX_ENTRIES).transpose(1, 2))
        # S of each group by head, `[heads, head_dim, components]`, without dropped components: views of one tensor.
        cuts = [s[:, :n] for n, s in zip(self._lookup.kept, tensors["synthesis"].float(), strict=True)]
        self._synthesis = torch.cat([cut.flatten() for cut in cuts])
        numbers = self._synthesis.split([cut.numel() for cut in cuts])
        self._blocks = [
            x.view(self._per_group, self.head_dim, n) for x, n in zip(numbers, self._lookup.kept, strict=True)
        ]

    @property
    def joined(self) -> bool:
        """Whether all kv heads share one transform."""
        return self._groups == 1

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        mean, analysis = self._specs["mean"], self._specs["analysis"].shape
        components = sum(size * sum(chunks) for size, chunks in self.chunks.items())
        integers, tables = product_layout(mean.shape, analysis)
        constants = {
            "mean": mean.to("float32"),
            "std": mean.to("float32"),
            "synthesis": TensorSpec((components * mean.shape[1],), "float32"),
            "analysis": integers,
            **tables,
            **ComponentLookup.layout(components, self._specs[f"centroids.{next(iter(self.chunks))}"].dtype),
        }
        for size, chunks in self.chunks.items():
            books = ChunkCodebooks.layout(sum(chunks), size)
            constants |= {f"{size}.{name}": spec for name, spec in books.items()}
        return Layout({"codes": PartSpec(1, 1, (self.codes,), "uint8")}, constants)

    def constants(self) -> Mapping[str, Tensor]:
        named = {"mean": self._mean, "std": self._std, "synthesis": self._synthesis}
        named |= {"analysis": self._product.integers, **self._product.tables(), **self._lookup.constants()}
        for size, books in self._books.items():
            named |= {f"{size}.{name}": tensor for name, tensor in books.constants().items()}
        return named

    def components(self, x: Tensor) -> Tensor:
        """z of `x` `[B, H, T, D]`: `[B, G, T, K]` float32, the same for a token alone and among others."""
        x = x.float().unflatten(1, (self._groups, self._per_group)).transpose(2, 3).flatten(3)  # [B, G, T, W]
        return self._product(x - self._mean.unsqueeze(1))

    def _encode(self, x: Tensor) -> Packed:
        batch, _, tokens, _ = x.shape
        z = self.components(x).transpose(0, 1).flatten(1, 2)  # [G, B * T, K]
        first, codes = [0] * len(z), []
        for size, chunks in self.chunks.items():
            last = [start + size * count for start, count in zip(first, chunks, strict=True)]
            spans = enumerate(zip(first, last, strict=True))
            codes.append(self._books[size].encode(torch.cat([z[group, :, a:b] for group, (a, b) in spans], dim=1)))
            first = last
        by_token = torch.cat(codes).T.contiguous()
        return Packed(tokens, {"codes": Part(by_token.view(batch, 1, tokens, self.codes), 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self.decode_by_channel(packed).mT.to(dtype).contiguous()

    def decode_by_channel(self, packed: Packed) -> Tensor:
        codes = packed.parts["codes"].tensor
        batch = len(codes)
        out = self._mean.new_empty(self._heads, self.head_dim, batch * packed.tokens)
        mean, heads = self._mean.view(self._heads, self.head_dim, 1), self._per_group
        for group, z in enumerate(self._lookup(codes.reshape(-1, self.codes))):
            part = slice(group * heads, (group + 1) * heads)
            torch.baddbmm(mean[part], self._blocks[group], z.expand(heads, -1, -1), out=out[part])
        return out.view(self._heads, self.head_dim, batch, packed.tokens).permute(2, 0, 1, 3)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        """As `Codec.weighted_sum`; a common transform of all heads is applied once, to the sums of components."""
        if not self.joined:
            return weights @ self.decode_by_channel(packed).mT
        (z,) = self._lookup(packed.parts["codes"].tensor.reshape(-1, self.codes))
        z = z.view(-1, len(weights), packed.tokens).permute(1, 2, 0)  # [B, T, K]
        sums = (weights.flatten(1, 2) @ z).view(*weights.shape[:3], -1)
        mean = self._mean.view(self._heads, 1, self.head_dim)
        return sums @ self._blocks[0].mT + weights.sum(dim=3, keepdim=True) * mean
