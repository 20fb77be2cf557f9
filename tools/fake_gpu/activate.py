"""Replace CUDA by the fake device for the whole process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
import torch.fx.experimental._config

from fake_gpu.cuda import replace_torch_cuda
from fake_gpu.device import FakeDevice

ROOT = Path(__file__).parents[2]
MEMORIES = {"host": "cpu", "skip": "cpu", "none": "meta"}


def activate(memory: str) -> None:
    """Activate the fake device. memory: "host" (kernels are emulated), "skip" (neither they nor large
    products are computed) or "none" (shapes only)."""
    replace_torch_cuda()
    FakeDevice.memory, FakeDevice.skip_products = torch.device(MEMORIES[memory]), memory == "skip"
    FakeDevice().__enter__()
    _enter_in_new_threads()
    import triton

    if memory == "host":
        sys.path.insert(0, str(ROOT / "tests/kernels"))
        from fake_gpu.emulated import Driver
    else:
        from fake_gpu.driver import Driver

    if memory == "none":
        torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True  # for sizes that depend on values
    triton.runtime.driver.set_active(Driver())


def _enter_in_new_threads() -> None:
    """Enter the mode in every new thread: PyTorch's modes are thread-local."""
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with FakeDevice():
            run(thread)

    threading.Thread.run = run_in_mode


def forbid_compilation() -> None:
    """Fail instead of compiling a kernel that is not in Triton's cache."""
    from triton.compiler import ASTSource

    def refuse(source: ASTSource, *_: object, **__: object) -> None:
        raise RuntimeError(f"{source.name} is not in Triton's cache, and KVQ_COMPILE=forbid")

    ASTSource.make_ir = refuse


def record_cache_entries(file: Path) -> None:
    """Append the folder of every cache entry that Triton looks up to `file`, one per line."""
    from triton.runtime.cache import FileCacheManager

    initialize = FileCacheManager.__init__

    def recorded(manager: FileCacheManager, key: str, *args: object, **options: object) -> None:
        initialize(manager, key, *args, **options)
        with file.open("a") as lines:
            lines.write(f"{manager.cache_dir}\n")

    FileCacheManager.__init__ = recorded
