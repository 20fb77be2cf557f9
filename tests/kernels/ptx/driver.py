"""Triton driver of an emulated GPU: `block.Blocks` executes launches on tensors in ordinary memory."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ptx.block import Blocks
from ptx.execute import prepare
from ptx.memory import Global
from ptx.program import parse

#: Blocks executed at once.
_TOGETHER = 64
_FORMATS = {"fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}


class Driver(DriverBase):
    """The driver interface that Triton calls."""

    def __init__(self, gpu: str) -> None:
        self.target = GPUTarget("cuda", int(gpu.removeprefix("sm_")), 32)
        self.utils = self
        self.launcher_cls = Launcher
        knobs.runtime.kernel_load_start_hook.add(self._loading)

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, type):
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def _loading(self, module, function, name, group, hash):
        self.text = Path(next(path for file, path in group.items() if file.endswith(".ptx"))).read_text()

    def load_binary(self, name, binary, shared, device):
        program = parse(self.text)
        return None, (program.parameters, prepare(program)), 0, 0, 1024


class Launcher:
    """Executes launches of one kernel."""

    def __init__(self, source, metadata) -> None:
        self.metadata = metadata
        self.signature = list(source.signature.values())

    def __call__(self, x, y, z, stream, function, packed, launch, enter, exit, *arguments):
        flat = list(_flat(self.signature, arguments))
        ranges, values = [], []
        for kind, argument in flat:
            if kind.startswith("*"):
                storage = argument.untyped_storage()
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
                values.append(argument.data_ptr())
            else:
                values.append(_bits(kind, argument))
        names, code = function
        parameters = dict(zip(names, [*values, *[0] * (len(names) - len(values))], strict=True))
        memory = Global(ranges)
        threads = 32 * self.metadata.num_warps
        grid = [place[::-1] for place in itertools.product(range(z), range(y), range(x))]
        with np.errstate(all="ignore"):
            for i in range(0, len(grid), _TOGETHER):
                some = grid[i : i + _TOGETHER]
                Blocks(threads, some, (x, y, z), parameters, memory, self.metadata.shared).run(code)


def _flat(signature, arguments):
    """(type, argument) of each run-time argument, tuples flattened; constants are compiled in."""
    for kind, argument in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, argument)
        elif kind != "constexpr":
            yield kind, argument


def _bits(kind: str, number: int | float) -> int:
    if kind in _FORMATS:
        code = "f" if kind == "f32" else _FORMATS[kind]
        return int.from_bytes(struct.pack("<" + code, number), "little")
    return int(number) & ((1 << int(kind.lstrip("iu"))) - 1)


def activate(gpu: str) -> Driver:
    """Make the emulated GPU ("sm_90") the process's device; its memory is the CPU's."""
    from kvq_kernels import tuning

    driver = Driver(gpu)
    triton.runtime.driver.set_active(driver)
    tuning.family = lambda device: gpu
    return driver
