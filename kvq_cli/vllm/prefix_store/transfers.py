"""A worker's half: blocks from files into vLLM's cache, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvq_cli.vllm.prefix_store.planning import PromptStep
from kvq_cli.vllm.prefix_store.records import ExactBlocks, PackedBlocks
from kvq_cli.vllm.prefix_store.store import PrefixStore
from kvq_cli.vllm.prefix_store.writer import Writer


class Transfers:
    """store: of this rank. blocks: of its cache, of `block_size` tokens.

    least: the least of all ranks' numbers, place by place. A block that one rank lacks is lost to all: each layer sums
    over the heads of all ranks.
    """

    def __init__(
        self,
        store: PrefixStore,
        blocks: ExactBlocks | PackedBlocks,
        block_size: int,
        least: Callable[[list[int]], list[int]] = list,
    ) -> None:
        self._store, self._blocks, self._size, self._least = store, blocks, block_size, least
        self.writer = Writer(store)
        #: vLLM's blocks that were not loaded, since the last `take_failed`.
        self._failed: set[int] = set()
        self._wrong = WrongBlocks()

    def load(self, prompts: Sequence[PromptStep]) -> None:
        """Load, before a step, what its prompts ask for."""
        into: list[int] = []
        indices: list[int] = []
        found: list[Tensor] = []
        loading = [prompt for prompt in prompts if prompt.load]
        held = [self._held(prompt) for prompt in loading]
        counts = self._least([len(blocks) for blocks in held]) if loading else []
        for prompt, blocks, count in zip(loading, held, counts, strict=True):
            loaded, lost = prompt.load[:count], prompt.load[count:]  # vLLM computes from the first lost block on
            into += [prompt.blocks[index] for index in loaded]
            indices += loaded
            found += blocks[:count]
            self._failed.update(prompt.blocks[index] for index in lost)
            self._wrong.add([prompt.blocks[index] for index in lost])
            self.writer.put(prompt.keys[: prompt.load.stop], {})
        if found:
            self._blocks.write(into, indices, found)

    def _held(self, prompt: PromptStep) -> list[Tensor]:
        """Read the blocks to load, up to the first that the store does not have."""
        blocks = []
        for index in prompt.load:
            if (block := self._store.load(prompt.keys[index], self._blocks.nbytes(index))) is None:
                break
            blocks.append(block)
        return blocks

    def store(self, prompts: Sequence[PromptStep]) -> None:
        """Store, after a step, what its prompts ask for: the bytes are on the host when this returns."""
        chosen: dict[bytes, tuple[int, int]] = {}
        prefixes = []
        for prompt in prompts:
            before, first = -(-prompt.computed // self._size), prompt.computed // self._size
            right = self._wrong.computed(prompt.blocks[:before], prompt.blocks[first:])
            new = [index for index in prompt.store if right and self.writer.wants(prompt.keys[index])]
            chosen |= {prompt.keys[index]: (prompt.blocks[index], index) for index in new}
            prefixes += [prompt.keys] if new else []
        if chosen:
            blocks, indices = zip(*chosen.values(), strict=True)
            stored = dict(zip(chosen, self._blocks.read(blocks, indices), strict=True))
            for keys in prefixes:
                self.writer.put(keys, {key: stored.pop(key) for key in keys if key in stored})

    def take_failed(self) -> set[int]:
        """Return vLLM's blocks that were not loaded since the last call."""
        failed, self._failed = self._failed, set()
        return failed


class WrongBlocks:
    """Blocks of vLLM's cache with wrong keys and values, because a load failed, until they are computed again.

    vLLM computes a step with blocks that could not be loaded, throws its tokens away, and computes the blocks again;
    with asynchronous scheduling, a step later. Nothing that was computed from them until then may be stored.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def add(self, blocks: Sequence[int]) -> None:
        """Say that blocks were not loaded."""
        self._blocks.update(blocks)

    def computed(self, prefix: Sequence[int], written: Sequence[int]) -> bool:
        """Say that a step computed the rest of `written` from `prefix`, blocks of one sequence; returns whether what it
        wrote is right."""
        if self._blocks.isdisjoint(prefix):
            self._blocks.difference_update(written)
            return True
        self._blocks.update(written)
        return False
