"""Global memory (tensors of this process that were passed) and shared memory of blocks, with checks."""

from __future__ import annotations

import ctypes

import numpy as np

_FIRST = 4096
_SEVERAL = np.uint8(255)
#: The address space as an array of each integer size.
_ALL = {
    size: np.ctypeslib.as_array((kind * ((1 << 47) // size - _FIRST)).from_address(_FIRST))
    for size, kind in ((1, ctypes.c_uint8), (2, ctypes.c_uint16), (4, ctypes.c_uint32), (8, ctypes.c_uint64))
}


class Fault(Exception):
    """An access that a device or its memory checker would report."""


def _aligned(address: np.ndarray, size: int) -> None:
    if (address % size).any():
        wrong = int(address[address % size != 0][0])
        raise Fault(f"{size} bytes at {wrong:#x}, which is no multiple of {size}")


class Global:
    """Global memory. ranges: (begin, end) that may be read and written."""

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
    """Shared memory of several blocks, one after the other.

    With several warps per block, the warp that has read or written a byte since the last barrier is recorded: its
    number plus 1, 0 for none.
    """

    def __init__(self, size: int, blocks: int, warps: int) -> None:
        self.own, self.size, self.blocks, self.warps = size, -(-max(size, 1) // 16) * 16, blocks, warps
        self.bytes = np.full(self.size * blocks, 0xFF, np.uint8)  # NaN in every float type
        self.checked = warps > 1
        self.readers, self.writers = (np.zeros(self.size * blocks if self.checked else 0, np.uint8) for _ in range(2))

    def check(self, address: np.ndarray) -> None:
        """Check that a shared access begins in its block's memory."""
        if len(address) and (address.min() < 0 or address.max() >= self.own):
            raise Fault(f"shared memory has {self.own} bytes, of which {int(address.max())} is asked for")

    def barrier(self, passed: np.ndarray) -> None:
        """Forget the accesses of blocks `passed` (bool [blocks]): a barrier has ordered them."""
        if self.checked:
            for marks in (self.readers, self.writers):
                marks.reshape(self.blocks, -1)[passed] = 0

    def load(self, address: np.ndarray, size: int, count: int, warp: np.ndarray) -> np.ndarray:
        """[n, count] numbers of `size` bytes at int64 addresses [n], for threads of warps [n]."""
        places, whole, mine = self._reached(address, size * count, warp)
        if self.checked:
            writers = self.writers.view(whole)[places].view(np.uint8)
            if ((writers != 0) & (writers != mine)).any():
                raise Fault("shared memory is read that another warp has written since the last barrier")
            readers = self.readers.view(whole)[places].view(np.uint8)
            alone = (readers == 0) | (readers == mine)
            self.readers.view(whole)[places] = np.where(alone, mine, _SEVERAL).view(whole)
            readers = self.readers.view(whole)[places].view(np.uint8)
            others = (readers != mine) & (readers != _SEVERAL)  # several warps read in one instruction
            if others.any():
                self.readers[(address[:, None] + np.arange(size * count))[others]] = _SEVERAL
        return self.bytes.view(whole)[places].view(f"u{size}")

    def store(self, address: np.ndarray, numbers: np.ndarray, warp: np.ndarray) -> None:
        """numbers: unsigned [n, count]."""
        places, whole, mine = self._reached(address, numbers.itemsize * numbers.shape[1], warp)
        if self.checked:
            for marks in (self.writers, self.readers):
                found = marks.view(whole)[places].view(np.uint8)
                if ((found != 0) & (found != mine)).any():
                    raise Fault("shared memory is written that another warp uses without a barrier between")
            self.writers.view(whole)[places] = np.broadcast_to(mine, found.shape).copy().view(whole)
        self.bytes.view(whole)[places] = np.ascontiguousarray(numbers).view(whole)

    def _reached(self, address: np.ndarray, size: int, warp: np.ndarray) -> tuple[np.ndarray, str, np.ndarray]:
        """(indices [n, pieces] of the aligned numbers that accesses of `size` bytes at addresses [n] consist of, their
        type, the threads' marks [n, 1])."""
        _aligned(address, size)
        piece = min(size, 8)
        places = (address // piece)[:, None] + np.arange(size // piece)
        return places, f"u{piece}", (warp % self.warps + 1).astype(np.uint8)[:, None]
