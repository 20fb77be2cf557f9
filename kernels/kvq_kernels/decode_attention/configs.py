"""Which tile of the committed table a call takes, and into how many splits a text is cut."""

from __future__ import annotations

import torch

from kvq_kernels.decode_attention.spec import SideSpec, Tile
from kvq_kernels.tuning import configuration

OPERATION = "decode_attention"


def choose_tile(device: torch.device | str, keys: SideSpec, values: SideSpec) -> Tile:
    """device: where it runs, or the name of a GPU family."""
    return Tile(**configuration(OPERATION, shape_class(keys, values), device))


def shape_class(keys: SideSpec, values: SideSpec) -> str:
    """ "dense", "uniform/2bit", "codebook/4": the kind that takes most work, and the bits or the numbers of a code; of
    codebooks with outliers beside them "codebook/4/outliers"."""
    kinds = {keys.kind, values.kind}
    if "codebook" in kinds:
        beside = "/outliers" if keys.slots + values.slots else ""
        return f"codebook/{max(side.tokens * side.channels for side in (keys, values))}{beside}"
    return f"uniform/{max(keys.bits, values.bits)}bit" if "uniform" in kinds else "dense"


def choose_splits(programs: int, tiles: int, processors: int, waves: int) -> int:
    """Splits of each of `programs` (row, kv head) pairs: the fewest that keep `processors` multiprocessors, with room
    for `waves` programs each, 85% as busy as the best number of splits would; at most one tile per split."""
    room = processors * waves
    most = max(1, min(tiles, -(-2 * room // programs)))

    def busy(splits: int) -> float:
        per_split = -(-tiles // splits)
        rounds = -(-programs * splits // room)
        return programs * tiles / (rounds * room * per_split)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= 0.85 * best)
