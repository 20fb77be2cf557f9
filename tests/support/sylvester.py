"""Sylvester's Hadamard matrices, by their definition."""

import torch
from torch import Tensor


def sylvester(order: int) -> Tensor:
    """`[order, order]` of 1 and -1, float64, for a power of two: H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
