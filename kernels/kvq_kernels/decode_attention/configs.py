"""Choice of the tile and of the number of splits: `tuning.json`'s shape classes, and wave efficiency."""

from __future__ import annotations

import torch

from kvq_kernels.decode_attention.spec import SideSpec, Tile
from kvq_kernels.tuning import configuration

OPERATION = "decode_attention"


def choose_tile(device: torch.device | str, keys: SideSpec, values: SideSpec) -> Tile:
    """Tuned tile for two sides. device: where it runs, or the name of a GPU family."""
    return Tile(**configuration(OPERATION, shape_class(keys, values), device))


def shape_class(keys: SideSpec, values: SideSpec) -> str:
    """Key of the tuning table, by the kind that takes most work: "dense", "uniform/2bit" (bits of a code),
    "codebook/4" (numbers of a code's block) or, with outliers, "codebook/4/outliers"."""
    kinds = {keys.kind, values.kind}
    if "codebook" in kinds:
        suffix = "/outliers" if keys.outliers + values.outliers else ""
        return f"codebook/{max(side.tokens * side.channels for side in (keys, values))}{suffix}"
    return f"uniform/{max(keys.bits, values.bits)}bit" if "uniform" in kinds else "dense"


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
