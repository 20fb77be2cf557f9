"""Choice of the tile and of the number of splits: `tuning.json`'s shape classes, and wave efficiency."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from kvq_kernels.decode_attention.formats.format import SideSpec
from kvq_kernels.decode_attention.tiles import Tile
from kvq_kernels.tuning import configuration

OPERATION = "decode_attention"
#: Bytes of a dense token that tiles are tuned for: keys and values of 128 numbers of 16 bits.
TUNED_TOKEN_BYTES = 512
#: Least tokens of a tile: the inner size of a product.
MIN_TOKENS = 16


def choose_tile(device: torch.device | str, keys: SideSpec, values: SideSpec) -> Tile:
    """Tuned tile for two sides. device: where it runs, or the name of a GPU family."""
    tile = Tile(**configuration(OPERATION, shape_class(keys, values), device))
    return _within_shared_memory(tile, keys, values)


def _within_shared_memory(tile: Tile, keys: SideSpec, values: SideSpec) -> Tile:
    """The tile with fewer tokens, then stages, where a token is larger than those that it was tuned for.

    Dense tiles are loaded stages - 1 tiles ahead into shared memory, of which some GPUs have 99 KB: the tuned 64 tokens
    in 3 stages take 64 KB, and would take 128 KB with head_dim 256 or float32.
    """
    size = keys.bytes_ahead + values.bytes_ahead
    room = (tile.stages - 1) * tile.tokens * TUNED_TOKEN_BYTES
    while tile.tokens > MIN_TOKENS and (tile.stages - 1) * tile.tokens * size > room:
        tile = replace(tile, tokens=tile.tokens // 2)
    while tile.stages > 1 and (tile.stages - 1) * tile.tokens * size > room:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def shape_class(keys: SideSpec, values: SideSpec) -> str:
    """Key of the tuning table, by the side that takes most work, of equal ones the keys: "dense", "uniform/2bit" (bits
    of a code), "directions/4bit", "codebook/4" (numbers of a code's block) or, with outliers, "codebook/4/outliers"."""
    other, side = sorted((values, keys), key=lambda spec: spec.work)
    return side.shape_class(other)


@lru_cache(maxsize=4096)  # asked for by each layer at each step
def choose_splits(programs: int, tiles: int, sm_count: int, waves: int) -> int:
    """Splits for each of `programs` (row, kv head) pairs: the fewest within 85% of the best wave efficiency.

    sm_count: multiprocessors, each with room for `waves` programs. A split has at least one tile.
    """
    room = sm_count * waves
    limit = max(1, min(tiles, -(-2 * room // programs)))

    def efficiency(splits: int) -> float:
        """Tiles per slot of all rounds of programs."""
        per_split = -(-tiles // splits)
        rounds = -(-programs * splits // room)
        return programs * tiles / (rounds * room * per_split)

    best = max(efficiency(splits) for splits in range(1, limit + 1))
    return next(splits for splits in range(1, limit + 1) if efficiency(splits) >= 0.85 * best)
