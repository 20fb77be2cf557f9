"""Global memory: this process's own, of tensors that were passed alone. Shared memory: of one block of threads."""

from __future__ import annotations

import ctypes

import numpy as np

_FIRST = 4096
_SEVERAL = 1 << 30
#: All addresses, as numbers of each size.
_ALL = {
    size: np.ctypeslib.as_array((kind * ((1 << 47) // size - _FIRST)).from_address(_FIRST))
    for size, kind in ((1, ctypes.c_uint8), (2, ctypes.c_uint16), (4, ctypes.c_uint32), (8, ctypes.c_uint64))
}


class Fault(Exception):
    """What a device, or its memory checker, would have stopped at."""


def _aligned(address: np.ndarray, size: int) -> None:
    if (address % size).any():
        wrong = int(address[address % size != 0][0])
        raise Fault(f"{size} bytes at {wrong:#x}, which is no multiple of {size}")


class Global:
    """ranges: (begin, end) of what may be read and written."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        joined: list[list[int]] = []
        for begin, end in sorted(ranges):
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(end, joined[-1][1])
            else:
                joined.append([begin, end])
        self.begins = np.array([begin for begin, _ in joined], np.int64)
        self.ends = np.array([end for _, end in joined], np.int64)

    def _check(self, address: np.ndarray, size: int) -> None:
        _aligned(address, size)
        which = np.searchsorted(self.begins, address, side="right") - 1
        inside = (which >= 0) & (address + size <= self.ends[which])
        if not inside.all():
            wrong = int(address[~inside][0])
            near = int(np.abs(self.ends - wrong).argmin())
            raise Fault(f"{size} bytes at {wrong:#x}; the nearest tensor ends {wrong - int(self.ends[near])} before")

    def load(self, address: np.ndarray, size: int, count: int) -> np.ndarray:
        """[n, count] numbers of `size` bytes at int64 addresses [n]."""
        self._check(address, size * count)
        return _ALL[size][((address - _FIRST) // size)[:, None] + np.arange(count)]

    def store(self, address: np.ndarray, numbers: np.ndarray) -> None:
        """numbers: unsigned [n, count]."""
        size = numbers.itemsize
        self._check(address, size * numbers.shape[1])
        _ALL[size][((address - _FIRST) // size)[:, None] + np.arange(numbers.shape[1])] = numbers


class Shared:
    """Bytes of several blocks, one's after the other's. Which warp has read or written each since its block's last
    barrier is kept where blocks have several.
    """

    def __init__(self, size: int, blocks: int, warps: int) -> None:
        self.own, self.size, self.blocks = size, -(-max(size, 1) // 16) * 16, blocks
        self.bytes = np.full(self.size * blocks, 0xFF, np.uint8)  # not a number, whatever it is read as
        self.checked = warps > 1
        self.readers, self.writers = (np.full(self.size * blocks if self.checked else 0, -1) for _ in range(2))

    def check(self, address: np.ndarray) -> None:
        """Of one block's own: whether it begins in its memory."""
        if len(address) and (address.min() < 0 or address.max() >= self.own):
            raise Fault(f"shared memory has {self.own} bytes, of which {int(address.max())} is asked for")

    def barrier(self, passed: np.ndarray) -> None:
        """What blocks `passed` (bool [blocks]) have read and written is settled."""
        if self.checked:
            for marks in (self.readers, self.writers):
                marks.reshape(self.blocks, -1)[passed] = -1

    def load(self, address: np.ndarray, size: int, count: int, warp: np.ndarray) -> np.ndarray:
        """[n, count] numbers of `size` bytes at int64 addresses [n], for threads of warps [n]."""
        _aligned(address, size * count)
        places, warp = address[:, None] + np.arange(size * count), warp[:, None]
        if self.checked:
            if ((self.writers[places] >= 0) & (self.writers[places] != warp)).any():
                raise Fault("shared memory is read that another warp has written since the last barrier")
            alone = (self.readers[places] < 0) | (self.readers[places] == warp)
            self.readers[places] = np.where(alone, warp, _SEVERAL)
            self.readers[places[self.readers[places] != warp]] = _SEVERAL  # warps that read in one instruction
        return self.bytes[places].view(f"u{size}")

    def store(self, address: np.ndarray, numbers: np.ndarray, warp: np.ndarray) -> None:
        """numbers: unsigned [n, count]."""
        _aligned(address, numbers.itemsize * numbers.shape[1])
        places, warp = address[:, None] + np.arange(numbers.itemsize * numbers.shape[1]), warp[:, None]
        if self.checked:
            for marks in (self.writers, self.readers):
                if ((marks[places] >= 0) & (marks[places] != warp)).any():
                    raise Fault("shared memory is written that another warp uses without a barrier between")
            self.writers[places] = warp
        self.bytes[places] = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(address), -1)
