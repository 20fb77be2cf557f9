"""Launch decode attention over a shipped store three times, for a profiler.

    ncu --clock-control none --kernel-name split_kernel --launch-skip 2 --launch-count 1 --metrics ... \\
        python tools/gpu/launch.py temporal-2bit [BATCH CONTEXT]
"""

from __future__ import annotations

import sys

import torch

from kvq_cli.benchmarking.kernels.decode import DecodeShape, aot_cases, random_decode_step


def main(name: str, batch: int = 1, context: int = 131072) -> None:
    shape = DecodeShape(batch, aot_cases.HEADS, context, torch.device("cuda"))
    step = random_decode_step(name, shape, 0)
    for _ in range(3):
        step.run()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
