"""The layout of pages: where the packed parts of a block of tokens lie, and how many tokens fit.

A page is the memory of one vLLM block in one layer's tensor. It holds parts of the codecs' `Packed` for `block_size`
tokens, each part contiguous `[heads, block_size // unit, ...]`: pages viewed part by part are what `Codec.decode`
takes, with the pages as rows of a batch. All pages have the same bytes; where layers need more or fewer, parts lie in
pages of other layers (`placing.py`), at the same number of the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.layout import ITEMSIZE, PartSpec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch
from kvq_cli.methods.base import LayerPlan, ModelShape, StreamPlan
from kvq_cli.vllm.local_layers import LOCAL_SIZES, LocalBlocks, local_blocks
from kvq_cli.vllm.placing import least_page

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes to which the parts of a page are aligned: the widest load of a GPU.
ALIGNMENT = 16
#: The block size chosen is the least up to `MAX_BLOCK` with which blocks of exact tokens hold `MIN_EXACT`, those of
#: local layers divide it, so that a prefix hit can end at any block, and both leave at most the share `FEW_UNUSED` of a
#: page unused.
MAX_BLOCK, MIN_EXACT, FEW_UNUSED = 1024, 8, 0.25


@dataclass(frozen=True)
class PagePart(PartSpec):
    """One packed tensor in pages: `[heads, tokens // unit, *entry]` of `dtype` from byte `offset` on of the pages in
    the tensor of layer `layer`."""

    layer: int
    offset: int

    def view(self, pages: Sequence[Tensor], tokens: int) -> Tensor:
        """The part in all pages, `[pages, heads, tokens // unit, *entry]`, without a copy.

        pages: those of all layers, uint8 `[pages, bytes]` each.
        """
        own = pages[self.layer][:, self.offset : self.offset + self.nbytes(tokens)]
        return own.view(getattr(torch, self.dtype)).unflatten(1, (self.heads, tokens // self.unit, *self.entry))


@dataclass(frozen=True)
class PageLayout:
    """The parts of a layer's keys and values for a block of `block_size` tokens, and the bytes that they take."""

    block_size: int
    keys: dict[str, PagePart]
    values: dict[str, PagePart]
    nbytes: int


def page_layouts(plans: Sequence[LayerPlan], shape: ModelShape, block_size: int) -> tuple[int, tuple[PageLayout, ...]]:
    """Return (bytes of a page, the parts of each layer). plans: of one rank or of all, `shape.cached_layers` of
    each."""
    specs = {id(plan): _parts(plan, shape) for plan in plans}
    sizes = {key: [_aligned(part.nbytes(block_size)) for _, _, part in parts] for key, parts in specs.items()}
    layers = len(shape.cached_layers)
    ranks = [plans[first : first + layers] for first in range(0, len(plans), layers)]
    page, placed = least_page([[sizes[id(plan)] for plan in rank] for rank in ranks], ALIGNMENT)
    layouts = []
    for rank, numbers in zip(ranks, placed, strict=True):
        used = [0] * len(rank)
        for plan, own in zip(rank, numbers, strict=True):
            sides: tuple[dict[str, PagePart], dict[str, PagePart]] = ({}, {})
            for (side, name, part), layer, size in zip(specs[id(plan)], own, sizes[id(plan)], strict=True):
                sides[side][name] = PagePart(part.heads, part.unit, part.entry, part.dtype, layer, used[layer])
                used[layer] += size
            layouts.append(PageLayout(block_size, sides[0], sides[1], sum(sizes[id(plan)])))
    return page, tuple(layouts)


def _parts(plan: LayerPlan, shape: ModelShape) -> list[tuple[int, str, PartSpec]]:
    """(0 for keys, 1 for values; name; part) of all that a layer packs."""
    layouts = [codec_of(stream).layout(shape.kv_heads, shape.head_dim, shape.dtype) for stream in plan.kept]
    return [(side, name, part) for side, layout in enumerate(layouts) for name, part in layout.parts.items()]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def codec_of(stream: StreamPlan) -> Codec:
    """The codec of a stream that can be paged; see `checks.check_plans`."""
    if not isinstance(stream.codec, Codec):
        raise TypeError(f"{type(stream.codec).__name__} depends on a prompt")
    return stream.codec


@dataclass(frozen=True)
class ExactWindow:
    """The tokens of a sequence that are kept in full precision, in blocks of their own.

    sinks: first tokens. recent: newest tokens, those that wait to be packed included. block_size: tokens of a block.
    windows: (sinks, recent, flush) of all streams.
    """

    sinks: int
    recent: int
    block_size: int
    windows: tuple[tuple[int, int, int], ...]

    @property
    def blocks(self) -> int:
        """Blocks of a long sequence while it decodes, at most."""
        return -(-self.sinks // self.block_size) + -(-(self.recent + 1) // self.block_size) + 1


@dataclass(frozen=True)
class CacheLayout:
    """The pages of all layers. page_bytes: of one page, the same in all layers and on all ranks.

    layers: of a rank, or of all ranks one after another. exact: None where no token is kept in full precision. local:
    blocks of layers with a sliding window, which have the same bytes; None where there are none.
    """

    layers: tuple[PageLayout, ...]
    block_size: int
    page_bytes: int
    exact: ExactWindow | None
    local: LocalBlocks | None = None

    @property
    def slots(self) -> int:
        """Layers of which a block has a page, of one rank."""
        return len(self.layers) if self.local is None else self.local.slots

    @property
    def unused(self) -> float:
        """Share of the pages of all layers that no part takes."""
        return 1 - sum(layer.nbytes for layer in self.layers) / len(self.layers) / self.page_bytes

    def bits(self, shape: ModelShape) -> float:
        """Bits of the pages for each number of a rank, whose sizes are `shape`, that is packed in them."""
        return 8 * self.page_bytes / (self.block_size * 2 * shape.kv_heads * shape.head_dim)

    def of_rank(self, rank: int, layers: int) -> CacheLayout:
        """The pages of a rank's `layers` layers; all ranks have pages of the same size."""
        if len(self.layers) == layers:  # those of all ranks are alike
            return self
        return replace(self, layers=self.layers[rank * layers : (rank + 1) * layers])

    def blocks(self, memory: int) -> int:
        """vLLM's blocks in `memory` bytes of a rank."""
        return memory // (self.page_bytes * self.slots)

    def blocks_of(self, tokens: int) -> int:
        """Blocks of a sequence of `tokens` tokens while it decodes."""
        exact = 0 if self.exact is None else min(self.exact.blocks, -(-tokens // self.exact.block_size))
        local = 0 if self.local is None else self.local.blocks(tokens)
        return -(-tokens // self.block_size) + exact + local


def block_unit(plans: Sequence[LayerPlan]) -> int:
    """Tokens of which every block must hold a whole number: the codecs' blocks, and the kernels' tiles."""
    streams = [stream for plan in plans for stream in plan.kept]
    tile = max(stream.codec.kernel_tile for stream in streams)
    return math.lcm(tile, *(stream.codec.block_tokens for stream in streams))


def cache_layout(plans: Sequence[LayerPlan], shape: ModelShape, block_size: int | None = None) -> CacheLayout:
    """The pages of blocks of `block_size` tokens; None: of the smallest blocks of which little is unused.

    Raises UsageError for a block size that cuts a `block_unit` or has no room for a token in full precision.
    """
    unit = block_unit(plans)
    if block_size is None:
        return _best(plans, shape, unit)
    if block_size % unit:
        raise UsageError(
            f"--block-size {block_size} cuts blocks of {unit} tokens, which are packed or read together; "
            f"use a multiple, such as {_best(plans, shape, unit).block_size}"
        )
    layout = _layout(plans, shape, block_size)
    if layout is None:
        raise UsageError(
            f"--block-size {block_size}: a page of so few packed tokens has no room for {_least(shape)} in full "
            f"precision; use {_best(plans, shape, unit).block_size}"
        )
    return layout


def _best(plans: Sequence[LayerPlan], shape: ModelShape, step: int) -> CacheLayout:
    fitting = []
    for size in range(step, max(MAX_BLOCK, step) + 1, step):
        layout = _layout(plans, shape, size)
        if layout is not None and _suits(layout, shape):
            return layout
        fitting += [] if layout is None else [layout]
    if not fitting:
        raise UsageError(
            f"no block of up to {MAX_BLOCK} tokens has room for {_least(shape)} in full precision: use more bits"
        )
    return min(fitting, key=lambda layout: _unused(layout, shape))


def _least(shape: ModelShape) -> str:
    """Say what a page must have room for, in words."""
    return f"{min(LOCAL_SIZES)} tokens of a layer with a sliding window" if shape.windows else "a token"


def _suits(layout: CacheLayout, shape: ModelShape) -> bool:
    exact, local = layout.exact, layout.local
    if exact is not None and exact.block_size < min(MIN_EXACT, exact.sinks + exact.recent):
        return False
    if local is not None and layout.block_size % local.block_size:
        return False
    return _unused(layout, shape) <= FEW_UNUSED


def _layout(plans: Sequence[LayerPlan], shape: ModelShape, block_size: int) -> CacheLayout | None:
    page, layers = page_layouts(plans, shape, block_size)
    windows = tuple(sorted({stream.window for plan in plans for stream in plan.kept}, key=str))
    sinks = max(window.sinks for window in windows)
    recent = max(window.recent + window.flush - 1 for window in windows)
    token = token_bytes(shape)
    local = local_blocks(shape, page, token)
    if local is not None and not local.block_size:
        return None
    if not sinks and not recent:
        return CacheLayout(layers, block_size, page, None, local)
    fitting = [size for size in range(1, block_size + 1) if block_size % size == 0 and size * token <= page]
    if not fitting:
        return None
    exact = ExactWindow(sinks, recent, max(fitting), tuple((w.sinks, w.recent, w.flush) for w in windows))
    return CacheLayout(layers, block_size, page, exact, local)


def _unused(layout: CacheLayout, shape: ModelShape) -> float:
    """Return the share of a page of tokens in full precision that is unused, at most."""
    sizes = [blocks.block_size for blocks in (layout.exact, layout.local) if blocks is not None]
    return max((1 - size * token_bytes(shape) / layout.page_bytes for size in sizes), default=0.0)


def token_bytes(shape: ModelShape) -> int:
    """Bytes of the keys and values of one token in one layer, in the model's dtype."""
    return 2 * shape.kv_heads * shape.head_dim * ITEMSIZE[shape.dtype]
