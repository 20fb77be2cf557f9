"""Ahead-of-time cases of attention over transform codes: Llama-3.1-8B's shape at 2 bits, other head_dims and profiles,
float16 sums, lists of heads, pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.aot_cases import Launch, stored_bytes
from kvq_kernels.decode_attention.formats.transformed import Operands, Transform, Transformed, operand_components
from kvq_kernels.decode_attention.launch import HeadGroup, Workspace
from kvq_kernels.decode_attention.pages import cell_views, changed, stored_tensors
from kvq_kernels.decode_attention.parts import Pages, Rope, Side
from kvq_kernels.transform_attention.arguments import arguments, constants
from kvq_kernels.transform_attention.configs import Config
from kvq_kernels.transform_attention.kernel import split_kernel

ROWS, TOKENS, SINKS, RING, PROGRAMS = 1, 32768, 8, 24, 17
META = torch.device("meta")
#: Profiles of a head of 128 channels in lanes of 8 bytes: 2 bits, or 2.06 with the gain.
MIXED = (4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1)
EVEN = (2,) * 16
#: Bytes per thread that spill with head_dim 256: cos and sin of a tile, means and sums, of 256 channels, need more than
#: 255 registers, and some of these constants are read again for each tile.
SPILLS_OF_256 = {"sm_80": 160, "sm_89": 176, "sm_90": 352, "sm_100": 344}
#: Likewise with smaller heads.
SPILLS = {"sm_100": 8}


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def empty_side(
    widths: tuple[int, ...], keys: bool, rows: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, gain: bool
) -> Side:
    """Keys or values of the given shapes, without memory."""
    types = {32: torch.int32, 16: torch.int16, 8: torch.uint8}
    shape = (tokens, fields.KEY_LANES) if keys else (tokens // fields.BLOCK, 8, fields.VALUE_LANES)
    parts = fields.parts(fields.rate(widths))
    codes = tuple(_empty(rows, heads, *shape, part.words, dtype=types[part.bits]) for part in parts)
    kept, f32, exact = fields.FIELD * len(widths), torch.float32, torch.float16 if keys else torch.float32
    operands = Operands(
        _empty(heads, operand_components(widths), dim, dtype=exact),
        _empty(heads, dim, dtype=exact),
        _empty(heads, dim, dtype=f32) if keys else None,
    )
    synthesis, mean, center = (_empty(*shape, dtype=f32) for shape in ((heads, dim, kept), (heads, dim), (heads, kept)))
    transform = Transform(widths, synthesis, mean, center, operands)
    sinks, ring = (_empty(rows, heads, count, dim, dtype=dtype) for count in (SINKS, RING))
    gains = _empty(rows, heads, tokens, dtype=torch.uint8) if gain else None
    return Side(Transformed(codes, gains, transform), _empty(rows, dtype=torch.int32), sinks, ring)


def paged(side: Side, page: int) -> Side:
    """The side in pages of so many tokens, and its first packed token a block behind the first place."""
    count, stored = ROWS * TOKENS // page, list(stored_tensors(side))
    pool = _empty(count, stored[0][1].shape[1], 1, 1 << 16, dtype=torch.uint8)
    views = cell_views(pool, [((page // unit, tensor.shape[3]), tensor.dtype) for _, tensor, unit in stored])
    pages = Pages(_empty(ROWS, TOKENS // page, dtype=torch.int32), page, _empty(ROWS, dtype=torch.int32), fields.BLOCK)
    by_page = iter(views)
    return replace(changed(side, lambda _: next(by_page).squeeze(2)), pages=pages)


@dataclass(frozen=True)
class Shape:
    """A model's shape and a profile of each side. listed: heads are those of a list. page: tokens of a page; 0: packed
    tokens are in rows."""

    keys: tuple[int, ...] = MIXED
    values: tuple[int, ...] = EVEN
    dim: int = 128
    kv_heads: int = 8
    group: int = 4
    dtype: torch.dtype = torch.float16
    gain: bool = True
    style: str | None = "half"
    half_sums: bool = False
    listed: bool = False
    page: int = 0

    def launch(self, gpu: str) -> Launch:
        """Launch of `split_kernel`."""
        query = _empty(ROWS, self.kv_heads * self.group, self.dim, dtype=self.dtype)
        keys, values = (
            empty_side(widths, side, ROWS, self.kv_heads, TOKENS, self.dim, self.dtype, self.gain)
            for widths, side in ((self.keys, True), (self.values, False))
        )
        if self.page:
            keys, values = (paged(side, self.page) for side in (keys, values))
        frequencies = _empty(self.dim // 2, dtype=torch.float32)
        rope = None if self.style is None else Rope.tables(self.style, frequencies, TOKENS)  # type: ignore[arg-type]
        config = Config.of(gpu, self.dim, keys.pages)
        if self.half_sums:
            config = replace(config, half_sums=1)
        index = _empty(self.kv_heads, dtype=torch.int32)
        group = HeadGroup(keys, values, (index, index, index) if self.listed else None, self.kv_heads)
        given = arguments(query, group, _empty(ROWS, dtype=torch.int32), self.dim**-0.5, rope, None,
                          Workspace.like(query, PROGRAMS - 1), 1)  # fmt: skip
        numbers = 2 * config.tokens * self.dim
        stored = [tensor for side in (keys, values) for _, tensor, _ in stored_tensors(side)]
        bits = 8 * stored_bytes(*stored) / (2 * ROWS * self.kv_heads * TOKENS * self.dim)
        fixed = constants(query, group, rope, config, gpu)
        products = fixed["KF"].components // 16 * max(1, self.dim // (2 * fixed["E"]))
        spills = (SPILLS_OF_256 if self.dim == 256 else SPILLS).get(gpu, 0)
        options = {"warpgroup_products": products, "spills": spills}
        return Launch(split_kernel, given, fixed, config.options(), "transform", numbers, bits, **options)


SHAPES = {
    "2bit": Shape(),
    "2bit-half-sums": Shape(half_sums=True),
    "2bit-no-gain": Shape(EVEN, gain=False),
    "4bit": Shape((8, 8, 6, 6, 5, 5, 4, 4, 3, 3, 3, 3, 2, 2, 2, 1), (4,) * 16),
    "small-pieces": Shape((8, 5, 5, 4, 3, 3), (4, 3, 3, 2, 2, 2, 2, 1, 1)),
    "head-dim-64": Shape((4, 3, 2, 2, 2, 1, 1), (2,) * 8, dim=64),
    "head-dim-96": Shape((4, 4, 3, 3, 2, 2, 2, 2, 1, 1), (2,) * 12, dim=96),
    "head-dim-256": Shape((4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1), (2,) * 24, 256, 1),
    "no-rope": Shape(style=None),
    "2bit-paged": Shape(page=64),
    "head-dim-64-paged": Shape((4, 3, 2, 2, 2, 1, 1), (2,) * 8, dim=64, listed=True, page=128),
    "2bit-heads": Shape(listed=True),
    "head-dim-64-heads": Shape((4, 3, 2, 2, 2, 1, 1), (2,) * 8, dim=64, listed=True),
    "mha-bf16": Shape(group=1, kv_heads=32, dtype=torch.bfloat16),
}


def launches(gpu: str) -> dict[str, Launch]:
    """`split_kernel` at all shapes."""
    return {name: shape.launch(gpu) for name, shape in SHAPES.items()}
