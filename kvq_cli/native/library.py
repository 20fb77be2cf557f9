"""Builds `kernels.c` with the machine's own C compiler, once, and opens it.

Nothing depends on it: where there is no compiler, the same results come, more slowly, from PyTorch's operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("kernels.c")
#: Sums may be reordered, nothing else; -ffast-math would also change how the whole process rounds tiny numbers.
FLAGS = [
    *("-O3", "-march=native", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
]
#: The constants of the C file.
TURNS, LANES, CHANNELS, HEADS = 64, 2048, 256, 8
EXACT, CODEBOOK, UNIFORM = range(3)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Piece(ctypes.Structure):
    """`Piece` of the C file: some tokens of a stream, exact or packed."""

    _fields_ = (
        *(("kind", c_int32), ("dtype", c_int32), ("first", c_int64), ("tokens", c_int64)),
        *(("data", c_void_p), ("stride_b", c_int64), ("stride_h", c_int64), ("stride_t", c_int64)),
        *(("scale", c_void_p), ("zero", c_void_p), ("side_b", c_int64), ("side_h", c_int64), ("side_t", c_int64)),
    )


class Codec(ctypes.Structure):
    """`Codec` of the C file: how packed pieces are read."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "channels", "columns", "bits", "words", "group")),
        *((name, c_void_p) for name in ("table", "book", "std", "mean", "lane_channel")),
    )


class Turn(ctypes.Structure):
    """`Turn` of the C file: RoPE."""

    _fields_ = (
        *(("pairs", c_int32), ("interleaved", c_int32), ("offset", c_int64)),
        *((name, c_void_p) for name in ("frequency", "cos", "sin", "lane_cos", "lane_sin")),
        ("lane_pairs", c_int32),
    )


class Shape(ctypes.Structure):
    """`Shape` of the C file."""

    _fields_ = tuple((name, c_int32) for name in ("rows", "first_row", "heads", "group", "dim"))


_ARGUMENTS = {
    "key_scores": [c_void_p, *[c_int] * 3, *[c_void_p] * 5, c_int64],
    "value_sums": [c_void_p, *[c_int] * 3, *[c_void_p] * 3, c_int64, c_void_p],
    "nearest_entries": [c_int] * 5 + [c_void_p] * 4,
}
#: Numbers in a call below which a second thread costs more than it saves.
SPLIT = 1 << 20


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no C compiler, or none that understands them."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        return _build(compiler, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvq")
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None  # no home, not writable, full, no program may be loaded from there, or the compiler refused


def share(call: Callable[[int, int], None], count: int, numbers: int) -> None:
    """`call(begin, end)` over [0, count), shared among threads where `numbers`, the work, is large.

    The threads are Python's: compiled calls do not hold its lock, and threads of OpenMP would compete with PyTorch's.
    """
    threads = min(torch.get_num_threads(), count)
    if threads == 1 or numbers < SPLIT:
        call(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    for done in [_pool(threads).submit(call, *edge) for edge in zip(edges[:-1], edges[1:], strict=True)]:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kvq")


def _build(compiler: str, folder: Path) -> ctypes.CDLL:
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([compiler, *FLAGS, _processor()]).encode()).hexdigest()[:16]
    target = folder / f"kernels-{key}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernels.so"
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(target)  # in one step: another process may be doing the same
    opened = ctypes.CDLL(str(target))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, None
    return opened


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
