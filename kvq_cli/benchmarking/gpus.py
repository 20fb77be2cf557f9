"""Peak arithmetic, memory bandwidth and memory of GPUs, from their data sheets: for estimates, never for a measured
figure."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """flops: dense 16-bit operations with 32-bit accumulation per second. bandwidth: bytes of memory per second.
    memory: bytes; data sheets call 2^30 bytes a GB, of which drivers and error correction take some: 10^9 are left."""

    flops: float
    bandwidth: float
    memory: float = 0.0

    @property
    def ridge(self) -> float:
        """The ridge point of the roofline: operations per byte above which a kernel is compute-bound."""
        return self.flops / self.bandwidth


GPUS = {
    "a10": Gpu(125e12, 0.6e12, 24e9),
    "a100-40gb": Gpu(312e12, 1.555e12, 40e9),
    "a100-80gb": Gpu(312e12, 2.039e12, 80e9),
    "b200": Gpu(2250e12, 8e12, 180e9),
    "h100-pcie": Gpu(756e12, 2e12, 80e9),
    "h100-sxm": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "l4": Gpu(121e12, 0.3e12, 24e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9),
    "mi300x": Gpu(1307e12, 5.3e12, 192e9),
    "rtx-3090": Gpu(71e12, 0.936e12, 24e9),
    "rtx-4090": Gpu(165e12, 1.008e12, 24e9),
    "rtx-5090": Gpu(210e12, 1.792e12, 32e9),
}
#: Short names of the usual variant.
_VARIANTS = {"a100": "a100-80gb", "h100": "h100-sxm"}


def known_gpu(name: str, instead: str = "give flops and bandwidth") -> Gpu:
    """Return the GPU with this name, with or without hyphens (`rtx4090`), `a100` and `h100` the usual variant.

    UsageError lists the known ones, and says what to do `instead`.
    """
    names = {known.replace("-", ""): known for known in GPUS} | _VARIANTS
    known = names.get(name.lower().replace("-", "").replace(" ", ""))
    if known is None:
        raise UsageError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}; or {instead}")
    return GPUS[known]
