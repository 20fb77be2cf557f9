"""Tuned configurations of attention over transform codes, and what they compile."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from kvq_kernels.decode_attention.parts import Pages
from kvq_kernels.tuning import configuration

OPERATION = "transform_attention"
#: Tiles that take as long as the start and end of a program, or as its exact tokens.
EDGE_COST, EXACT_COST = 7, 3
#: Splits that are tried even where pairs alone fill the GPU: the last round of smaller programs leaves less of it idle.
MAX_SPLITS_OF_MANY = 16


@dataclass(frozen=True)
class Config:
    """A row of `tuning.json`. warps: of 16 tokens of a tile each. pairs: of channels of a column tile, at most.

    chunks: of the keys' components at most, 0: any (`FieldSpec`). reload: 1: S' of the keys is loaded for each tile.
    half_sums: 1: keys are summed in float16. programs: of a multiprocessor. registers: of a thread at most, 0: any.
    """

    warps: int
    stages: int
    pairs: int
    chunks: int
    reload: int
    half_sums: int
    programs: int
    registers: int

    @classmethod
    def of(cls, gpu: str, dim: int, pages: Pages | None = None) -> Config:
        """The tuned configuration for a GPU family and head_dim; with tiles that divide pages, if there are pages."""
        config = cls(**configuration(OPERATION, f"split/{dim}", gpu))
        return config if pages is None else replace(config, warps=math.gcd(pages.block_size, config.tokens) // 16)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return 16 * self.warps

    def options(self) -> dict[str, int]:
        """Launch options for Triton. AMD's compiler takes no limit of registers."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers and torch.version.hip is None else {})


@lru_cache(maxsize=4096)  # asked for by each layer at each step
def choose_splits(pairs: int, tiles: int, exact: int, room: int) -> int:
    """Splits for each of `pairs` (row, kv head) of a launch: those with which its last program ends first.

    exact: programs of a pair for exact tokens, which start behind the others. room: programs that run at a time.
    """

    def tiles_in_turn(splits: int) -> int:
        rounds = -(-pairs * splits // room)
        each = -(-tiles // splits) + EDGE_COST
        left = (rounds * room - pairs * splits) * (
            each // EXACT_COST
        )  # exact programs that the last round has room for
        return rounds * each + EXACT_COST * (pairs * exact > left)

    most = min(tiles, max(MAX_SPLITS_OF_MANY, -(-2 * room // pairs)))
    return min(range(1, max(1, most) + 1), key=tiles_in_turn)
