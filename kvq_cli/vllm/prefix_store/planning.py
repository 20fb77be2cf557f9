"""The scheduler's half: which blocks of a prompt have files, and which to load and to store in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.vllm.prefix_store.store import PrefixStore


@dataclass(frozen=True)
class PromptStep:
    """A prompt in a step of the engine.

    blocks:   vLLM's blocks of its first tokens, up to the last that the step computes. keys: hashes of full blocks.
    computed: tokens that are not computed in this step. load, store: which of the full blocks to load before it, and
              to store after it.
    """

    blocks: list[int]
    keys: list[bytes]
    computed: int
    load: range
    store: list[int]


class Planner:
    """stores: of all ranks. Requests are vLLM's: `request_id`, `num_tokens`, `num_prompt_tokens` and `block_hashes`."""

    def __init__(self, stores: Sequence[PrefixStore], block_size: int) -> None:
        self._stores, self._size = stores, block_size
        self._requests: dict[str, Any] = {}  # that run, or were preempted
        self._loads: dict[str, int] = {}  # tokens to load in the next step, of requests that begin with it

    def matched(self, request: Any, computed: int) -> int:
        """Count tokens after the first `computed` whose blocks have files; at least one token is left to compute."""
        first = index = computed // self._size
        while index < (request.num_tokens - 1) // self._size and self._is_stored(request.block_hashes[index]):
            index += 1
        return (index - first) * self._size

    def begin(self, request: Any, tokens: int) -> None:
        """Say that a request begins in the next step, also after a preemption, and loads so many tokens."""
        self._requests[request.request_id] = request
        self._loads[request.request_id] = tokens

    def end(self, name: str) -> None:
        """Forget a request."""
        self._requests.pop(name, None)

    def steps(
        self, computed: Mapping[str, int], scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]
    ) -> list[PromptStep]:
        """Return the prompts of a step.

        computed: tokens of each request of the step before it, those that it loads among them. scheduled: tokens that
        it computes. blocks_of: vLLM's blocks of a request.
        """
        prompts = [
            self._step(name, tokens, tokens + scheduled[name], blocks_of(name))
            for name, tokens in computed.items()
            if tokens < self._requests[name].num_prompt_tokens or self._loads.get(name)
        ]
        self._loads.clear()
        return prompts

    def _step(self, name: str, computed: int, end: int, blocks: Sequence[int]) -> PromptStep:
        request, begins = self._requests[name], name in self._loads
        full, done = min(end, request.num_prompt_tokens) // self._size, computed // self._size
        load = range(done - self._loads.get(name, 0) // self._size, done)
        # Blocks that were in vLLM's cache when the request began may have left the store, or be of an answer.
        wanted = range(0 if begins else done, full)
        keys = [bytes(key) for key in request.block_hashes[: max(full, done)]]  # a resumed request may load its answer
        store = [index for index in wanted if index not in load and not self._is_stored(keys[index])]
        return PromptStep(list(blocks[: -(-end // self._size)]), keys, computed, load, store)

    def _is_stored(self, key: bytes) -> bool:
        """Return whether all ranks' parts of a block have files."""
        return all(bytes(key) in store for store in self._stores)
