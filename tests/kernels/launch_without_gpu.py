"""Launches kernels as on a GPU, up to the launch itself: what is passed is bound, specialized and compiled for sm_90.

Compiling what is shipped does without this part: which arguments Triton takes at all, and as what. Run as a program, by
`test_oldest_triton.py`: a process has one driver. Arguments: names of launches or operations; prints what it bound.
"""

from __future__ import annotations

import sys

import triton
from kvq_kernels.shipped import launches, operations
from kvq_kernels.static import TARGETS
from triton.backends.driver import DriverBase


class NoGpu(DriverBase):
    """What Triton asks a driver for before a launch."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return TARGETS["sm_90"]

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        raise NotImplementedError

    def map_python_to_cpp_type(self, type):
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoGpu())
    for operation in operations():
        for name, one in launches(operation, "sm_90").items():
            if {operation, name} & set(sys.argv[1:]):
                one.kernel.warmup(*one.arguments, **one.constants, **one.options, grid=(1, 1, 1))
                print(name)
