"""Triton's driver of the fake device without execution: kernels are compiled and bound, launches do nothing."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia

from fake_gpu.device import CUDA, on_device

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 232448


class Driver(DriverBase):
    """The interface that Triton expects of a driver."""

    launcher_cls: type

    def __init__(self) -> None:
        self.utils, self.launcher_cls = self, Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        return None, None, 0, 0, 1024


class Launcher:
    """A kernel's launcher, which only checks its arguments. With KVQ_FAKE_LIBCUDA, a folder for a `libcuda.so.1` to
    link with, Triton's launcher (a C extension per signature) is compiled into the cache as on a GPU."""

    def __init__(self, source: Any, metadata: Any) -> None:
        if "KVQ_FAKE_LIBCUDA" in os.environ:
            load_libcuda(Path(os.environ["KVQ_FAKE_LIBCUDA"]))
            nvidia.CudaLauncher(source, metadata)

    def __call__(self, x: int, y: int, z: int, *given: Any) -> None:
        check_on_device(given)


@cache
def load_libcuda(folder: Path) -> None:
    """Compile and load a `libcuda.so.1` whose functions fail, then compile Triton's C extension for the driver."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        sources = Path(nvidia.dirname, "driver.c").read_text() + Path(nvidia.__file__).read_text()
        names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\s*\()", sources)))
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{os.getpid()}.so"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(part)]
        functions = "".join(f"int {name}() {{ return 1; }}\n" for name in names)
        subprocess.run(command, input=functions, text=True, check=True)
        part.replace(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    knobs.nvidia.libcuda_path = str(folder)
    nvidia.CudaUtils()


def check_on_device(arguments: Any) -> None:
    """Raise the CUDA launcher's ValueError for a pointer to host memory."""
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            check_on_device(argument)
        elif isinstance(argument, Tensor) and not on_device(argument):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
