"""Codebooks over blocks of (tokens, channels): KVQuant (1, 1), ChannelKV (1, c), TemporalKV (l, 1) and between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part
from kvq_cli.codecs.layout import Layout, PartSpec, TensorLike, TensorSpec, spec_of
from kvq_cli.codecs.nearest import (
    KEEPS_TABLES,
    LARGE_ENTRIES,
    MAX_ENTRIES,
    code_type,
    grid_max,
    grid_scale,
    nearest_ignoring,
    nearest_of,
    ranked,
    ranked_layout,
)
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


#: Tokens of a block that kernels read: a tile is at most as long as the tables of cosines, 16 codes of 8 tokens.
MAX_KERNEL_TOKENS = 8


class CodebookCodec(Codec):
    """A block of `l` adjacent tokens by `c` adjacent channels is kept as the index of its nearest centroid.

    centroids: `[kv_heads, head_dim / share, entries, l * c]`, 16 or 32 bits; `share` adjacent channels use one.
               An entry lists a block token by token: number `j * c + i` is token j, channel i. Where there is one
               kv head of them, all heads use it.
    block:     (l, c).
    mean, std: `[kv_heads, head_dim]` or None; blocks are assigned as (x - mean) / std and decoded as c std + mean.

    Part: `codes` `[B, H, T / l, head_dim / c]` uint8, unit l; with fewer than 256 entries int32 words, planar; with
    65,536 entries int16, whose 16 bits are the index.
    Raises UsageError where the block does not fit the codebooks.
    """

    def __init__(
        self,
        centroids: TensorLike,
        block: tuple[int, int],
        head_dim: int,
        mean: TensorLike | None = None,
        std: TensorLike | None = None,
    ) -> None:
        heads, groups, entries, size = centroids.shape
        tokens, channels = block
        if size != tokens * channels or head_dim % groups or head_dim // groups % channels:
            raise UsageError(
                f"codebooks of shape {tuple(centroids.shape)} do not fit blocks of {tokens} tokens by {channels} "
                f"channels at head_dim={head_dim}"
            )
        packed = (*(2**bits for bits in bitpack.SPLIT), LARGE_ENTRIES)
        if entries not in packed:
            raise UsageError(f"codebooks of {entries} entries: use one of {', '.join(map(str, packed))}")
        self._code_bits = int(math.log2(entries))
        self.block, self.head_dim = block, head_dim
        self.block_tokens, self.nominal_bits, self.kernel_tile = tokens, self._code_bits / size, 16 * tokens
        self._book = spec_of(centroids)
        #: Heads of the statistics that there are.
        self._statistic_heads = {name: x.shape[0] for name, x in (("mean", mean), ("std", std)) if x is not None}
        if not isinstance(centroids, TensorSpec):
            self._make_tables(centroids, cast("Tensor | None", mean), cast("Tensor | None", std))

    def _make_tables(self, centroids: Tensor, mean: Tensor | None, std: Tensor | None) -> None:
        (heads, groups, entries, _), channels = centroids.shape, self.block[1]
        half = centroids.is_cuda and centroids.dtype == torch.bfloat16
        self.centroids = _aligned(in_half(centroids) if half else centroids)
        self._mean, self._std = (None if x is None else self._statistic(x) for x in (mean, std))
        self._scale = grid_scale(self.centroids.flatten(0, 1)).view(heads, groups)
        self._gain = self._grid_gain()
        self._ranked: Tensor | None = None
        self._decoded: Tensor | None = None
        # Entry number of each code column's codebook in the flat table of all entries.
        columns = self.head_dim // channels
        column = torch.arange(columns, device=centroids.device) // (columns // groups)
        book = torch.arange(heads, device=centroids.device).unsqueeze(1) * groups + column
        self._offset = (book * entries).to(torch.int32).unsqueeze(1)  # [H, 1, D / c]

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        tokens, columns = self.block_tokens, dim // self.block[1]
        words = bitpack.words_per_row(self._code_bits, columns) if self._code_bits < 8 else columns
        kind = "int32" if self._code_bits < 8 else code_type(1 << self._code_bits)
        return Layout({"codes": PartSpec(heads, tokens, (words,), kind)}, self._constants_layout())

    def _constants_layout(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of `constants`, with the tables that a CPU makes."""
        books, groups, entries, size = self._book.shape
        served = {name: (heads, 1, self.head_dim) for name, heads in self._statistic_heads.items()}
        rows = max([books, *self._statistic_heads.values()]) if "std" in served else books
        specs = {
            "centroids": self._book,
            **{name: TensorSpec(shape, "float32") for name, shape in served.items()},
            "scale": TensorSpec((books, groups), "float32"),
            "gain": TensorSpec((rows, 1, self.head_dim), "float32"),
            "offset": TensorSpec((books, 1, self.head_dim // self.block[1]), "int32"),
            "ranked": ranked_layout(books * groups, entries, size),
        }
        if self._keeps_decoded:
            specs["decoded"] = TensorSpec(self._book.shape, "float32")
        return specs

    @property
    def _keeps_decoded(self) -> bool:
        """Whether a CPU keeps all decoded entries; see `_decoded_entries`."""
        books, groups, _, size = self._book.shape
        one_token = self.block_tokens == 1 and groups * size == self.head_dim
        return one_token and self._statistic_heads.get("std", books) == books

    def constants(self) -> Mapping[str, Tensor]:
        derived: dict[str, Tensor | None] = {"scale": self._scale, "gain": self._gain, "offset": self._offset}
        derived |= {"ranked": self._ranked, "decoded": self._decoded}
        named: dict[str, Tensor | None] = {"centroids": self.centroids, "mean": self._mean, "std": self._std, **derived}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def unread_by_kernels(self) -> str | None:
        tokens = self.block_tokens
        if self._book.shape[2] > MAX_ENTRIES:
            return "codes have 16 bits"
        if tokens & (tokens - 1) or tokens > MAX_KERNEL_TOKENS:
            return f"codes are of {tokens} tokens, not 1, 2, 4 or {MAX_KERNEL_TOKENS}"
        return "a mean is kept without a deviation" if len(self._statistic_heads) == 1 else None

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import Codebook

        mean, std = (None if x is None else x.squeeze(1) for x in (self._mean, self._std))
        return Codebook(parts["codes"].tensor, self.centroids, self.block, mean, std)

    def _encode(self, x: Tensor) -> Packed:
        return self._pack(x, self._codes(self._book_blocks(self._on_grid(x))))

    def _codes(self, blocks: Tensor) -> Tensor:
        return nearest_of(blocks, self.centroids.flatten(0, 1), self._scale.flatten(), self._table)

    @property
    def ignoring_capturable(self) -> bool:
        return self.block == (1, 1)  # else blocks with ignored numbers are looked for

    def encode_ignoring(self, x: Tensor, ignored: Tensor) -> Packed:
        blocks = self._book_blocks(self._on_grid(x))
        codes = self._codes(blocks)
        if blocks.shape[2] > 1:  # a block of one ignored number has nothing to choose by
            mask = self._book_blocks(ignored)
            books, places = mask.any(dim=2).nonzero(as_tuple=True)
            codes[books, places] = nearest_ignoring(blocks[books, places], mask[books, places], books, self._table())
        return self._pack(x, codes)

    def _pack(self, x: Tensor, codes: Tensor) -> Packed:
        """codes: `[H * G, n]`, in the order of `_book_blocks`."""
        tokens, channels = self.block
        heads, groups = self.centroids.shape[:2]
        columns = x.shape[3] // channels // groups
        codes = codes.view(heads, groups, -1, x.shape[2] // tokens, columns).permute(2, 0, 3, 1, 4)
        codes = codes.reshape(*x.shape[:2], x.shape[2] // tokens, x.shape[3] // channels)
        if self._code_bits < 8:
            codes = bitpack.pack(codes, self._code_bits)
        return Packed(x.shape[2], {"codes": Part(codes, self.block_tokens)})

    def _on_grid(self, x: Tensor) -> Tensor:
        """`x` normalized, on the integer grid of its codebooks, float32."""
        x = x.float()
        if self._mean is not None:
            x = x - self._mean
        most = grid_max(self.centroids.shape[2])
        return (x * self._gain).round_().clamp_(-most, most)

    def _book_blocks(self, x: Tensor) -> Tensor:
        """`[B, H, T, D]` -> the blocks of each codebook, `[H * G, n, l * c]`."""
        tokens, channels = self.block
        heads, groups, _, size = self.centroids.shape
        # One head's codebooks for all: heads are so many more rows.
        x = x.reshape(-1, heads, *x.shape[2:])
        x = x.unflatten(3, (groups, -1, channels)).unflatten(2, (-1, tokens))  # [B, H, N, l, G, K, c]
        return x.permute(1, 4, 0, 2, 5, 3, 6).reshape(heads * groups, -1, size)  # [H, G, B, N, K, l, c]

    def _statistic(self, x: Tensor) -> Tensor:
        """`[H, D]` -> `[H, 1, D]`, float32, or float16 beside a GPU's float16 centroids: kernels multiply them."""
        x = x.float().unsqueeze(1)
        half = x.is_cuda and self.centroids.dtype == torch.float16
        return in_half(x) if half else x

    def _table(self) -> Tensor:
        """The centroids as `nearest` takes them. A CPU keeps them: making them costs more than a chunk's search."""
        if self._ranked is not None:
            return self._ranked
        table = ranked(self.centroids.flatten(0, 1), self._scale.flatten())
        if table.device.type in KEEPS_TABLES:
            self._ranked = table
        return table

    def _grid_gain(self) -> Tensor:
        """Grid scale / std, `[H, 1, D]`, which takes a channel (less its mean) to the integer grid of its codebook."""
        gain = self._scale.repeat_interleave(self.head_dim // self._scale.shape[1], dim=1).unsqueeze(1)
        return gain if self._std is None else gain / self._std.masked_fill(self._std == 0, 1)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes = packed.parts["codes"].tensor
        if self._code_bits < 8:
            codes = bitpack.unpack(codes, self._code_bits, self.head_dim // self.block[1])
        if (decoded := self._decoded_entries()) is not None:
            return self._lookup(codes, decoded).to(dtype)
        x = self._lookup(codes, self.centroids)
        if self._std is not None:
            x = x.float().mul_(self._std)
        if self._mean is not None:
            x = x.float().add_(self._mean)
        return x.to(dtype)

    def decode_by_channel(self, packed: Packed) -> Tensor:
        """As `Codec.decode_by_channel`; blocks of tokens of one channel are fetched where they stand, without the
        transposition that `decode` needs."""
        if self.block_tokens == 1 or self.block[1] > 1:
            return super().decode_by_channel(packed)
        codes = packed.parts["codes"].tensor
        if self._code_bits < 8:
            codes = bitpack.unpack(codes, self._code_bits, self.head_dim)
        index = _unsigned(codes.mT.contiguous()) + self._offset.mT  # [B, H, D, T / l]
        fetched = self._fetch(self.centroids, index.view(-1)).view(self.centroids.dtype)
        x = fetched.view(*index.shape[:3], packed.tokens).float()
        if self._std is not None:
            x = x.mul_(self._std.float().mT)
        if self._mean is not None:
            x = x.add_(self._mean.float().mT)
        return x

    def _decoded_entries(self) -> Tensor | None:
        """c std + mean of all centroids, float32, where all blocks of a codebook stand on the same channels of one
        token. A CPU keeps them: an entry is then fetched as the numbers that it stands for."""
        heads, groups, _, size = self.centroids.shape
        if self.centroids.device.type not in KEEPS_TABLES or not self._keeps_decoded:
            return None
        if self._decoded is None:
            entries = self.centroids.float()
            if self._std is not None:
                entries = entries * self._std.view(heads, groups, 1, size)
            if self._mean is not None:
                entries = entries + self._mean.view(heads, groups, 1, size)
            self._decoded = _aligned(entries)
        return self._decoded

    def _lookup(self, codes: Tensor, entries: Tensor) -> Tensor:
        """`[B, H, N, D / c]` -> `entries` `[.., l * c]` in place, `[B, H, N * l, D]` in their dtype."""
        tokens, channels = self.block
        number = entries.element_size()
        fetched = self._fetch(entries, (_unsigned(codes) + self._offset).reshape(-1))
        if tokens == 1:
            return fetched.view(entries.dtype).view(*codes.shape[:3], self.head_dim)
        # Numbers of an entry that stay together, the channels of one token, move as one.
        fetched = fetched.view(bitpack.wide(channels * number)).view(*codes.shape, tokens)
        return fetched.transpose(3, 4).contiguous().view(entries.dtype).flatten(2, 3)

    def _fetch(self, entries: Tensor, index: Tensor) -> Tensor:
        """Entries `[.., l * c]` of the flat table by number, each as one wide number (8 numbers of 32 bits: two)."""
        size = self.block[0] * self.block[1]
        table = entries.view(-1, size).view(bitpack.wide(min(16, size * entries.element_size())))
        return (table.view(-1) if table.shape[1] == 1 else table).index_select(0, index)


def _unsigned(codes: Tensor) -> Tensor:
    """Codes as numbers from 0 on: those of 16 bits as int32."""
    return codes.int().bitwise_and_(LARGE_ENTRIES - 1) if codes.dtype == torch.int16 else codes


def in_half(x: Tensor) -> Tensor:
    """`x` as float16, in which a GPU's kernels multiply entries of codebooks; as it is where it is too large for that.
    bfloat16 is exact but for numbers below 2^-14, which move by at most 2^-25."""
    return x if x.abs().max() > torch.finfo(torch.float16).max else x.half()


def _aligned(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and at a 16-byte boundary, as fetching wide numbers needs it; one from a file may not be."""
    tensor = tensor.contiguous()
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.clone() if tensor.data_ptr() % 16 or offset % 16 else tensor
