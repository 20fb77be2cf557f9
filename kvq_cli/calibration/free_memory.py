"""Memory that this process may still take, on a GPU or on the machine, and memory that it gives back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

#: Of control groups, version 2 and 1: the limit, the memory in use, and the entry of `memory.stat` that counts files
#: read long ago, which the kernel drops when memory is needed.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes of memory that are free, or hold files that the system drops when memory is needed; on a CPU at most what
    the limit of the container leaves. 8 GiB where the system does not say.

    root: the folder that has `proc` and `sys`.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        available = _entry(root / "proc/meminfo", "MemAvailable:")
    except OSError:
        available = None
    machine = 8 << 30 if available is None else available << 10
    return max(0, min([machine, *_left_by_groups(root / "sys/fs/cgroup")]))


def release_freed() -> None:
    """Give the system what glibc keeps of freed memory, which other threads than the one that used it hardly reuse."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _left_by_groups(root: Path) -> list[int]:
    """What each limit leaves; empty without a limit."""
    left = []
    for limit, used, dropped in _GROUPS:
        try:
            free = int((root / limit).read_text()) - int((root / used).read_text())
            left.append(free + (_entry((root / limit).with_name("memory.stat"), dropped) or 0))
        except (ValueError, OSError):  # no such group, or "max": no limit
            continue
    return left


def _entry(file: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)
