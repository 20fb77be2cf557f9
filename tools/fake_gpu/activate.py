"""Put the fake device in the place of the real one, for the whole process."""

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
    """memory: "host" (kernels are emulated), "skip" (kernels are not run) or "none" (shapes only)."""
    replace_torch_cuda()
    FakeDevice.memory = torch.device(MEMORIES[memory])
    FakeDevice().__enter__()
    _cover_threads()
    import triton

    if memory == "host":
        sys.path.insert(0, str(ROOT / "tests/kernels"))
        from fake_gpu.emulated import Driver
    else:
        from fake_gpu.driver import Driver

    if memory == "none":
        torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True  # sizes that depend on numbers
    triton.runtime.driver.set_active(Driver())


def _cover_threads() -> None:
    """PyTorch's modes are of one thread: enter one in each that begins."""
    run = threading.Thread.run

    def covered(thread: threading.Thread) -> None:
        with FakeDevice():
            run(thread)

    threading.Thread.run = covered


def forbid_compilation() -> None:
    """Let Triton load kernels from its cache only."""
    from triton.compiler import ASTSource

    def refuse(source: ASTSource, *_: object, **__: object) -> None:
        raise RuntimeError(f"{source.name} is not in Triton's cache, and KVQ_COMPILE=forbid")

    ASTSource.make_ir = refuse


def record_cache_entries(file: Path) -> None:
    """Append the folder of every entry of Triton's cache that is looked up, one per line."""
    from triton.runtime.cache import FileCacheManager

    start = FileCacheManager.__init__

    def recorded(manager: FileCacheManager, key: str, *args: object, **options: object) -> None:
        start(manager, key, *args, **options)
        with file.open("a") as lines:
            lines.write(f"{manager.cache_dir}\n")

    FileCacheManager.__init__ = recorded
