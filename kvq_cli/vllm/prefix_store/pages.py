"""Where keys and values lie in vLLM's caches, of its own attention backends and of kvq's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        """Copies of the keys and values of vLLM's `blocks`, int64: `[blocks, kv_heads, block_size, head_dim]`."""
        keys, values = (side[self._of(blocks)].transpose(1, 2).flatten(2, 3) for side in self._layers[layer])
        return keys, values

    def write(self, layer: int, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """The inverse of `read`."""
        for side, x in zip(self._layers[layer], (keys, values), strict=True):
            side[self._of(blocks)] = x.unflatten(2, (-1, self._tokens)).transpose(1, 2)

    def _of(self, blocks: Tensor) -> Tensor:
        """The pages of each block, `[blocks, pages]`."""
        return blocks[:, None] * len(self._pages) + self._pages


def _side_by_side(cache: Tensor) -> Sides:
    """`[pages, kv_heads, tokens, key and value]`, in any order in memory."""
    keys, values = cache.chunk(2, dim=-1)
    return keys, values


def _keys_first(cache: Tensor) -> Sides:
    """A head's keys of all tokens, then its values."""
    pages, heads, tokens, width = cache.shape
    keys, values = cache.view(pages, heads, 2 * tokens, width // 2).chunk(2, dim=2)
    return keys, values


#: vLLM's attention backends -> their pages. vLLM 0.33 gives connectors each layer's cache as `[pages, kv_heads, tokens,
#: 2 * head_dim]`, whatever its order in memory; the backend says what the last dimension holds.
_BACKENDS: dict[str, Callable[[Tensor], Sides]] = {
    "FLASH_ATTN": _side_by_side,
    "FLASHINFER": _side_by_side,
    "TRITON_ATTN": _side_by_side,
    "FLEX_ATTENTION": _side_by_side,
    "CPU_ATTN": _keys_first,
}


def stock_sides(cache: Tensor, backend: str, heads: int, head_dim: int, dtype: torch.dtype) -> Sides:
    """Keys and values of a layer's cache of vLLM's own attention.

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
    return _BACKENDS[backend](cache)


def packed_pages(caches: Sequence[Tensor]) -> list[Tensor]:
    """The pages of kvq's caches, uint8 `[pages, bytes]` each."""
    return [cache.view(torch.uint8)[:, 0, 0] for cache in caches]


def kvq_sides(caches: Sequence[Tensor], layout: CacheLayout) -> list[Sides]:
    """Keys and values in kvq's pages of `fp16`, layer by layer."""
    pages, tokens = packed_pages(caches), layout.block_size
    return [(own.keys["raw"].view(pages, tokens), own.values["raw"].view(pages, tokens)) for own in layout.layers]
