"""Where keys and values lie in vLLM's caches, of its own attention backends and of kvq's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_cli.errors import UsageError
from kvq_cli.vllm.layout import CacheLayout

#: Keys and values of a layer, `[pages, kv_heads, tokens, head_dim]`, views of its cache.
Sides = tuple[Tensor, Tensor]


class ExactPages:
    """Pages of keys and values in the model's dtype, of all layers.

    layers: views of the caches. block_size: tokens of vLLM's blocks, each of which may be several pages in a row: a
    kernel's pages can be smaller.
    """

    def __init__(self, layers: Sequence[Sides], block_size: int) -> None:
        self._layers = layers
        keys = layers[0][0]
        self.device, self._tokens = keys.device, keys.shape[2]
        if block_size % self._tokens:
            raise UsageError(
                f"--block-size {block_size}: use a multiple of {self._tokens}, the tokens of a kernel's page"
            )
        self._pages = torch.arange(block_size // self._tokens, device=self.device)

    def read(self, layer: int, blocks: Tensor) -> Sides:
        """Copy the keys and values of vLLM's `blocks`, int64: `[blocks, kv_heads, block_size, head_dim]`."""
        keys, values = (side[self._of(blocks)].transpose(1, 2).flatten(2, 3) for side in self._layers[layer])
        return keys, values

    def write(self, layer: int, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Undo `read`."""
        for side, x in zip(self._layers[layer], (keys, values), strict=True):
            side[self._of(blocks)] = x.unflatten(2, (-1, self._tokens)).transpose(1, 2)

    def _of(self, blocks: Tensor) -> Tensor:
        """Return the pages of each block, `[blocks, pages]`."""
        return blocks[:, None] * len(self._pages) + self._pages


#: vLLM's attention backends whose caches have a token's key and value side by side. vLLM 0.33 gives connectors each
#: layer's cache as `[pages, kv_heads, tokens, 2 * head_dim]`, whatever its order in memory. CPU_ATTN is none of them:
#: its kernels order numbers by the instructions of the processor, within the same shape.
_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")


def stock_sides(cache: Tensor, backend: str, heads: int, head_dim: int, dtype: torch.dtype) -> Sides:
    """Return the keys and values of a layer's cache of vLLM's own attention.

    backend: its name. heads, head_dim: of this rank's keys and values. Raises UsageError for a backend, a shape or a
    dtype with other pages.
    """
    if backend not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise UsageError(f"--attention-backend {backend}: its pages are not known to the prefix store; use {known}")
    if cache.ndim != 4 or (cache.shape[1], cache.shape[3]) != (heads, 2 * head_dim) or cache.dtype != dtype:
        raise UsageError(
            f"the prefix store needs caches [pages, {heads}, tokens, {2 * head_dim}] of {dtype}, not "
            f"{list(cache.shape)} of {cache.dtype}: serve without --kv-cache-dtype"
        )
    keys, values = cache.chunk(2, dim=-1)
    return keys, values


def packed_pages(caches: Sequence[Tensor]) -> list[Tensor]:
    """Return the pages of kvq's caches, uint8 `[pages, bytes]` each."""
    return [cache.view(torch.uint8)[:, 0, 0] for cache in caches]


def kvq_sides(caches: Sequence[Tensor], layout: CacheLayout) -> list[Sides]:
    """Return the keys and values in kvq's pages of `fp16`, layer by layer."""
    pages, tokens = packed_pages(caches), layout.block_size
    return [(own.keys["raw"].view(pages, tokens), own.values["raw"].view(pages, tokens)) for own in layout.layers]
