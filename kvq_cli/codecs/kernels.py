"""What codecs leave to the kernels of kvq_kernels where their tensors are on a GPU; on a CPU these are not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from kvq_kernels.quantize_pack import Uniform


def on_gpu(x: Tensor) -> bool:
    """CUDA's or ROCm's."""
    return x.device.type == "cuda"


def quantize_pack(x: Tensor, **layout: Any) -> Uniform | None:
    """`x` `[B, H, T, D]` packed by the kernel, in a `kvq_kernels.quantize_pack.Layout` of these fields: the codec's
    own bits. None: not on a GPU, or a layout that the kernel does not know."""
    if not on_gpu(x):
        return None
    from kvq_kernels.quantize_pack import Layout, quantize_pack, unsupported

    asked = Layout(**layout)
    return None if unsupported(asked) else quantize_pack(x, asked, backend="triton")
