"""A thread that writes blocks, so that no step of an engine waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from kvq_cli.errors import reason
from kvq_cli.vllm.prefix_store.store import PrefixStore

#: Blocks are not stored while as many bytes wait to be written.
MAX_WAITING = 1 << 30

# A name below "vllm" has vLLM's handlers, and its level.
_log = logging.getLogger("vllm.kvq")


class Writer:
    """Writes to `store` in a thread until `close`."""

    def __init__(self, store: PrefixStore, max_waiting: int = MAX_WAITING) -> None:
        self._store, self._max_waiting = store, max_waiting
        self._jobs: deque[tuple[tuple[bytes, ...], dict[bytes, Tensor]]] = deque()
        self._waiting: set[bytes] = set()
        self._nbytes, self._closed, self._warned = 0, False, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvq-prefix-writer", daemon=True)
        self._thread.start()

    def wants(self, key: bytes) -> bool:
        """Return whether a block is neither stored nor waiting, and there is room to wait."""
        with self._changed:
            free = self._nbytes < self._max_waiting and key not in self._waiting
        return free and key not in self._store

    def put(self, prefix: Sequence[bytes], blocks: dict[bytes, Tensor]) -> None:
        """Write `blocks`, uint8 on the CPU, some of those of `prefix`, the hashes of a prompt's first blocks in their
        order; then mark these as used."""
        with self._changed:
            self._jobs.append((tuple(prefix), blocks))
            self._waiting |= set(blocks)
            self._nbytes += sum(block.nbytes for block in blocks.values())
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that was put is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def close(self) -> None:
        """Write what waits, and end the thread. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        self._store.evict()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                prefix, blocks = self._jobs[0]
            for key, block in blocks.items():
                self._write(key, block)
            self._store.touch(prefix)
            with self._changed:
                self._jobs.popleft()
                self._waiting -= set(blocks)
                self._nbytes -= sum(block.nbytes for block in blocks.values())
                self._changed.notify_all()

    def _write(self, key: bytes, block: Tensor) -> None:
        try:
            self._store.save(key, block)
        except Exception as error:  # a thread that ended would leave the engine without a store, and `flush` waiting
            if not self._warned:
                _log.warning("blocks are missing in the prefix store: %s", reason(error))
            self._warned = True
