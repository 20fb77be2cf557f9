"""Description of the machine that a measurement ran on, and peak memory of a block of code."""

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
from kvq_kernels.tuning import family
from torch.profiler import ProfilerActivity, profile


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device, threads, package versions and date: the header of every benchmark result."""
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
    """Return a hash of the kernels' sources and tuning tables; --resume keeps no results of another hash."""
    folder = Path(kvq_kernels.__file__).parent
    files = sorted(path for ending in ("*.py", "*.json") for path in folder.rglob(ending))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


_PACKAGES = ("kvq-cli", "torch", "transformers", "optimum-quanto", "triton")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


#: Queried from nvidia-smi: the driver version, and current and maximum clocks in MHz.
_NVIDIA_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")


def _gpu(device: torch.device) -> dict[str, Any]:
    """Return a GPU's properties; driver and clocks too if nvidia-smi is there."""
    properties = torch.cuda.get_device_properties(device)
    description = {
        "architecture": family(device),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    command = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    # nvidia-smi counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES: only the uuid is the same.
    uuid = getattr(properties, "uuid", None)
    index = torch.cuda.current_device() if device.index is None else device.index
    command += [f"--id={index if uuid is None else f'GPU-{uuid}'}"]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        description |= dict(zip(_NVIDIA_SMI_FIELDS, (part.strip() for part in output.split(",")), strict=True))
    return description


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory:
    """Peak bytes of tensors inside a `with` block, above those allocated at its start; `bytes` is set at its end.

    Counted by torch: on a GPU by the allocator, on a CPU by the profiler, which sees this thread only and slows it.
    """

    bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler = (
            None if device.type == "cuda" else profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        )

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
            self.bytes = _peak_allocated(self._profiler)


def _peak_allocated(profiler: profile) -> int | None:
    """Return the peak bytes allocated while `profiler` was on, above those before, from its trace.

    None if the temporary folder has no room for the trace: the profiler reports no error then.
    """
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        try:
            events = json.loads(path.read_bytes())["traceEvents"]
        except (OSError, ValueError):
            return None
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in changes]
    return max(totals) - (totals[0] - changes[0]["args"]["Bytes"]) if changes else 0


class PeakResident:
    """Peak resident memory of the process inside a `with` block, in bytes above that at its start; `bytes` is set at
    its end, None if the system cannot reset its high-water mark (Linux can).

    Memory that was freed before but not returned to the system hides allocations: measure early in a process.
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
    """Return `VmRSS` (current) or `VmHWM` (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(mark + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {mark} in /proc/self/status")
