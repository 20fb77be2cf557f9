"""What a measurement was made on, and how much memory it needed."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvq_kernels
import torch
from torch.profiler import ProfilerActivity, profile


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
    """Bytes of tensors needed at a time, above what was held at the start of the `with` block; known after it.

    As torch counts them: on a GPU in its allocator, on a CPU in the profiler, which sees this thread and slows it down.
    """

    bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cpu = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
        self._profiler = None if device.type == "cuda" else profile(**on_cpu)

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._profiler is None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is None:
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self._profiler.__exit__(*error)
            self.bytes = _most_allocated(self._profiler)


def _most_allocated(profiler: profile) -> int | None:
    """Return the most bytes that were allocated at a time while `profiler` was on, above those before, from its trace.

    None where the folder for temporary files has no room for the trace: the profiler does not say so.
    """
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        try:
            events = json.loads(path.read_bytes())["traceEvents"]
        except (OSError, ValueError):
            return None
    found = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in found]
    return max(totals) - (totals[0] - found[0]["args"]["Bytes"]) if found else 0


class PeakResident:
    """Bytes of memory that the process needed above what it held at the start of the `with` block, all threads and
    libraries included; None where the system has no high-water mark that can be started anew (Linux has).

    Memory that was freed before, but not given back to the system, counts as held: measure early in a process.
    """

    bytes: int | None = None

    def __enter__(self) -> PeakResident:
        gc.collect()
        self._before = _resident("VmRSS") if _reset_high_water_mark() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
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
