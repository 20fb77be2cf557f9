"""Decode steps recorded once and repeated: on a GPU as CUDA graphs, launched by one call instead of hundreds.

A recorded step is the same work on the same tensors. So in such a step the cache's streams find the new token's place
by a count on the device (`Forward.clock`), and only what the host settles makes steps differ: which windows pack
something. There is one graph for each such pattern: a few, since windows pack every so many tokens. A pattern's first
step runs as it is, which compiles kernels and fills tables; the second is recorded. Where tensors have been replaced
since (a store grew, beams were reordered), graphs are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvq_cli.cache.cache import CompressedCache

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached

#: Patterns that are recorded for one cache; steps of others run as they are.
MOST_GRAPHS = 16
#: What a step may be given beside ids, cache and positions without being another computation.
_SAME = {"attention_mask", "use_cache", "return_dict", "logits_to_keep", "cache_position", "position_ids"}


class _NotRecorded(Exception):
    """Why a step could not be recorded. Nothing has been computed or counted."""


class Graph(Protocol):
    """Work that was recorded. `record` runs `work` and gives what it gives, but nothing may have been computed yet."""

    def record(self, work: Callable[[], Tensor]) -> Tensor: ...

    def replay(self) -> None: ...


class CudaGraph:
    """torch's; the graphs of one cache share their memory, since one step runs at a time."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.graph(self._graph, pool=self._pool):
            return work()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs() -> Callable[[], Graph]:
    """What makes graphs of one shared memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


@contextmanager
def repeating_steps(attached: Attached, recorders: Callable[[], Callable[[], Graph]] = cuda_graphs) -> Iterator[None]:
    """Inside the block, `attached.model` repeats decode steps of the compressed cache that it has recorded.

    recorders: called for each cache, gives what makes its graphs.
    """
    model, backend = attached.model, attached.backend
    plain, steps, said = model.forward, None, backend.summary
    recording, backend.summary = True, f"{said}, steps as CUDA graphs"

    @wraps(plain)
    def forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any):
        nonlocal steps, recording
        cache = kwargs.get("past_key_values")
        if recording and _is_step(attached, input_ids, cache, args, kwargs):
            if steps is None or steps.cache() is not cache or steps.ids.shape != input_ids.shape:
                steps = _Steps(attached, cache, plain, input_ids, recorders())
            try:
                logits = steps.take(input_ids)
            except _NotRecorded as error:
                recording, logits = False, None
                cache.backend = backend.summary = f"{said}, steps not recorded ({error})"
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        return plain(input_ids, *args, **kwargs)

    own = model.__dict__.get("forward")  # of an attach around this one, or of a library that places models
    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def _is_step(attached: Attached, ids: Tensor | None, cache: object, args: tuple, kwargs: dict) -> bool:
    """One more token for every row of a cache of this model, and no more asked for than logits?"""
    if not (isinstance(cache, CompressedCache) and attached.owns(cache)) or ids is None or ids.shape[1] != 1:
        return False
    others = [name for name, value in kwargs.items() if name not in {*_SAME, "past_key_values"} and value is not None]
    asked = bool(args) or any(kwargs[name] is not False for name in others)
    return not (asked or torch.is_grad_enabled() or kwargs.get("return_dict") is False) and cache.keeps_time()


class _Steps:
    """The steps of one cache. ids: `[batch, 1]`, where a step's tokens are put."""

    def __init__(
        self,
        attached: Attached,
        cache: CompressedCache,
        plain: Callable[..., CausalLMOutputWithPast],
        like: Tensor,
        recorder: Callable[[], Graph],
    ) -> None:
        self.cache = ref(cache)
        self.ids = torch.empty_like(like)
        self._attached, self._plain, self._recorder = attached, plain, recorder
        self._clock = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._positions = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        self._graphs: dict[tuple[bool, ...], tuple[Graph, Tensor]] = {}
        self._seen: set[tuple[bool, ...]] = set()
        self._held: list[Tensor] = []

    def take(self, ids: Tensor) -> Tensor | None:
        """Logits `[batch, 1, vocabulary]` of one more token in every row; None: this step must run as it is."""
        cache, engine = self.cache(), self._attached.backend.engine
        past = cache.get_seq_length()
        position = past + cache.rows.offsets[0]
        if not engine.keeps_time(past, position):
            return None
        held = [*cache.held(), *engine.held()]
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            self._graphs, self._seen, self._held = {}, set(), held
        self.ids.copy_(ids)
        self._clock.fill_(past)
        self._positions.fill_(position)
        pattern = cache.packing()
        if pattern in self._graphs:
            graph, logits = self._graphs[pattern]
            graph.replay()
            engine.advance(cache.advance(self._positions))
        elif pattern not in self._seen or len(self._graphs) == MOST_GRAPHS:
            self._seen.add(pattern)
            logits = self._work(cache)
        else:
            graph = self._recorder()
            try:
                logits = graph.record(lambda: self._work(cache))
            except RuntimeError as error:  # a model, or a method, does what a graph cannot hold
                self._attached.forget_pass()
                cache.count_back(past)
                engine.forget()
                raise _NotRecorded(str(error).splitlines()[0]) from error
            graph.replay()
            self._graphs[pattern] = graph, logits
        return logits.clone()

    def _work(self, cache: CompressedCache) -> Tensor:
        cache.clock = self._clock
        try:
            return self._plain(
                input_ids=self.ids,
                position_ids=self._positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        finally:
            cache.clock = None
