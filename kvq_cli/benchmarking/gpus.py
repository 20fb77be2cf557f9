"""Peak arithmetic and memory bandwidth of GPUs, from their data sheets: for estimates, never for a measured figure."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """flops: dense 16-bit operations with 32-bit accumulation per second. bandwidth: bytes of memory per second."""

    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """The ridge point of the roofline: operations per byte above which a kernel is compute-bound."""
        return self.flops / self.bandwidth


GPUS = {
    "a100-40gb": Gpu(312e12, 1.555e12),
    "a100-80gb": Gpu(312e12, 2.039e12),
    "b200": Gpu(2250e12, 8e12),
    "h100-pcie": Gpu(756e12, 2e12),
    "h100-sxm": Gpu(989e12, 3.35e12),
    "h200": Gpu(989e12, 4.8e12),
    "l40s": Gpu(362e12, 0.864e12),
    "mi300x": Gpu(1307e12, 5.3e12),
    "rtx-3090": Gpu(71e12, 0.936e12),
    "rtx-4090": Gpu(165e12, 1.008e12),
}


def known_gpu(name: str) -> Gpu:
    """Return the GPU with this name; UsageError lists the known ones."""
    if name not in GPUS:
        raise UsageError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}; or give flops and bandwidth")
    return GPUS[name]
