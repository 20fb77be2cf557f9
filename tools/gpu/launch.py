"""Launch decode attention over one shipped store a few times, for a profiler.

    ncu --clock-control none --kernel-name split_kernel --launch-skip 2 --launch-count 1 --metrics ... \\
        python tools/gpu/launch.py temporal-2bit [BATCH CONTEXT]
"""

from __future__ import annotations

import sys

import torch
from kvq_kernels.decode_attention import decode_attention

from kvq_cli.benchmarking.kernels.decode import Shape, aot_cases, store


def main(name: str, batch: int = 1, context: int = 131072) -> None:
    shape = Shape(batch, aot_cases.HEADS, context, torch.device("cuda"))
    query, keys, values, lengths, rope = store(name, shape, 0)
    for _ in range(3):
        decode_attention(query, keys, values, lengths, query.shape[2] ** -0.5, rope=rope, backend="triton")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
