"""What a measurement was made on, and how much memory the process needed."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvq_kernels
import torch


def machine(device: torch.device) -> dict:
    """CPU or GPU, threads, versions and the time: stands at the head of every benchmark's result."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        **({"gpu": _gpu(device)} if device.type == "cuda" else {}),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "kernels": kernels_digest(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def kernels_digest() -> str:
    """A hash of the kernels' sources and tables: results of others do not go on where these stopped."""
    folder = Path(kvq_kernels.__file__).parent
    files = sorted(path for ending in ("*.py", "*.json") for path in folder.rglob(ending))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


_PACKAGES = ("kvq-cli", "torch", "transformers", "optimum-quanto", "triton")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


#: What is asked of nvidia-smi: the driver, and megahertz now and at most.
_ASKED = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")


def _gpu(device: torch.device) -> dict:
    """Numbers of a GPU; its driver and clocks where nvidia-smi tells them."""
    properties = torch.cuda.get_device_properties(device)
    found = {
        "architecture": getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    words = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    words += [f"--id={torch.cuda.current_device() if device.index is None else device.index}"]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
        found |= dict(zip(_ASKED, (part.strip() for part in told.split(",")), strict=True))
    return found


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory:
    """Bytes needed above what was held at the start of the `with` block; `bytes` is None where it cannot be measured.

    On a GPU: torch's own count of allocated memory. On Linux: the process's resident memory, whose high-water mark the
    kernel starts anew on request. Elsewhere there is no such mark.
    """

    bytes: int | None = None

    def __init__(self, device: torch.device):
        self._device = device

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, so that it is not counted as held
            self._before = _resident("VmRSS") if _reset_high_water_mark() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif self._before is not None:
            self.bytes = max(0, _resident("VmHWM") - self._before)


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(mark: str) -> int:
    """`VmRSS` (now) or `VmHWM` (highest) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(mark + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {mark} in /proc/self/status")
