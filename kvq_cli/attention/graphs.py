"""Decode steps captured once and replayed: on a GPU as CUDA graphs, launched by one call instead of hundreds.

A captured step is the same work on the same tensors. So in such a step the cache's streams find the place of the new
token by a count on the device (`Forward.cache_position`), and only the decisions of the host make steps differ: which
windows pack tokens. There is one graph for each such pattern: a few, since windows pack every so many tokens. The first
step of a pattern runs as it is, which compiles kernels and fills tables; the second is captured. Where tensors have
been replaced since (a store grew, beams were reordered), graphs are thrown away. Graphs do not keep a cache's tensors:
the next prompt has their memory.

A replayed step does not run the model's forward at all. No hook can skip a forward, and transformers' generation calls
the model, so that `model.forward` is replaced on the one object that is attached, until the block ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvq_cli.attention.attention_hooks import AttentionHooks
from kvq_cli.attention.backend import ChosenBackend
from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.modes import changes_stored_tensors
from kvq_cli.cache_argument import cache_argument, passed_cache, without_cache
from kvq_cli.errors import reason

if TYPE_CHECKING:
    from kvq_cli.attention.triton_backend import TritonBackend

#: Patterns that are captured for one cache; steps of others run as they are.
MAX_GRAPHS = 16
#: Held while a step is captured: beginning a capture waits for the device, which another capture forbids.
_capturing = threading.Lock()
#: kwargs that keep a captured graph valid, beside ids, cache and positions.
_SAME_STEP = {"attention_mask", "use_cache", "return_dict", "logits_to_keep", "cache_position", "position_ids"}


class _NotCaptured(Exception):
    """Why a step could not be captured. Nothing has been computed or counted."""


class Graph(Protocol):
    """A captured computation. `capture` calls `work` and returns its result, whose numbers may be those of the first
    `replay` only."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor: ...

    def replay(self) -> None: ...


class CudaGraph:
    """torch's; the graphs of one cache share their memory, since one step runs at a time.

    By default torch captures all graphs of a process in one stream, which is of the device that was current first.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._stream, self._pool, self._graph = stream, pool, torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        with (
            torch.cuda.device(self._stream.device),
            torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            return work()

    def replay(self) -> None:
        with torch.cuda.device(self._stream.device):
            self._graph.replay()


def cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    """A factory of graphs on a GPU that share a stream, as they must, and one memory pool."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(stream, pool)


@contextmanager
def captured_steps(
    model: PreTrainedModel,
    hooks: AttentionHooks,
    backend: ChosenBackend,
    graphs: Callable[[torch.device], Callable[[], Graph]] = cuda_graphs,
) -> Iterator[None]:
    """Inside the block, `model` replays the decode steps of compressed caches that it has captured.

    graphs: called with the model's device once for each cache, gives the factory of its graphs.
    """
    if backend.engine is None:
        raise ValueError("steps can be captured only where kernels compute the attention of all layers")
    engine, plain, summary = backend.engine, model.forward, backend.summary
    thread = _Thread()
    capturing, backend.summary = True, f"{summary}, steps as CUDA graphs"

    @wraps(plain)
    def forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal capturing
        if thread.steps is not None and not thread.steps.discard_stale():
            thread.steps = None
        cache = passed_cache(kwargs)
        if capturing and input_ids is not None and hooks.owns(cache) and _is_step(input_ids, cache, args, kwargs):
            hooks.check_adapters(cache)
            steps = thread.steps
            merged = hooks.adapters.merged()
            known = steps is not None and steps.cache() is cache and steps.ids.shape == input_ids.shape
            if steps is None or not known or steps.merged != merged:
                steps = thread.steps = _Steps(cache, hooks, engine, plain, input_ids, graphs(model.device), merged)
            try:
                logits = steps.take(cache, input_ids)
            except _NotCaptured as error:
                capturing, thread.steps, logits = False, None, None
                cache.backend = backend.summary = f"{summary}, steps not captured ({error})"
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, **cache_argument(cache))
        return plain(input_ids, *args, **kwargs)

    with replaced_attribute(model, "forward", forward):
        yield


def _is_step(ids: Tensor, cache: CompressedCache, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call adds one token to every row and asks for no more than logits."""
    others = [value for name, value in without_cache(kwargs).items() if name not in _SAME_STEP]
    asks_more = bool(args) or any(value is not None and value is not False for value in others)
    asks_more |= kwargs.get("return_dict") is False
    return ids.shape[1] == 1 and not asks_more and not torch.is_grad_enabled() and cache.can_capture()


class _Thread(threading.local):
    """What a thread has captured: of the cache that it added to last."""

    steps: _Steps | None = None


class _Steps:
    """The captured steps of one cache. ids: `[batch, 1]`, the tokens of the step that runs. merged: see
    `AdapterWatch.merged`: what was captured adds the other adapters."""

    @changes_stored_tensors  # the inputs of the graphs are written in every mode
    def __init__(
        self,
        cache: CompressedCache,
        hooks: AttentionHooks,
        engine: TritonBackend,
        plain: Callable[..., CausalLMOutputWithPast],
        like: Tensor,
        new_graph: Callable[[], Graph],
        merged: frozenset[str],
    ) -> None:
        self.cache, self.merged = ref(cache), merged
        self.ids = torch.empty_like(like)
        self._hooks, self._engine, self._plain, self._new_graph = hooks, engine, plain, new_graph
        self._cache_position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._positions = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        self._graphs: dict[tuple[bool, ...], tuple[Graph, Tensor]] = {}
        self._warm: set[tuple[bool, ...]] = set()  # patterns that have run once
        #: What the graphs read and write. Weak: a cache that is reset, reordered or dropped must free its memory.
        self._tensors: list[ref[Tensor]] = []
        self.discard_stale()

    def discard_stale(self) -> bool:
        """Throw the graphs away where tensors have been replaced. Returns whether the cache still exists."""
        cache = self.cache()
        if cache is None:
            return False
        tensors, known = [*cache.tensors(), *self._engine.tensors()], self._tensors
        if len(tensors) != len(known) or any(a is not b() for a, b in zip(tensors, known, strict=True)):
            self._graphs, self._warm, self._tensors = {}, set(), list(map(ref, tensors))
        return True

    def take(self, cache: CompressedCache, ids: Tensor) -> Tensor | None:
        """Logits `[batch, 1, vocabulary]` of one more token in every row; None: this step must run as it is."""
        engine, past = self._engine, cache.get_seq_length()
        position = past + cache.rows.offsets[0]
        if not engine.can_capture(past, cache.rows.offsets, cache.dropped()):
            return None
        self.ids.copy_(ids)
        self._cache_position.fill_(past)
        self._positions.fill_(position)
        pattern = cache.packing_pattern()
        if pattern in self._graphs:
            graph, logits = self._graphs[pattern]
            graph.replay()
            self._hooks.check_context(past + 1)
            engine.advance(cache.advance(self._positions), cache.dropped())
        elif pattern not in self._warm or len(self._graphs) == MAX_GRAPHS:
            self._warm.add(pattern)
            logits = self._run(cache)
        else:
            graph = self._new_graph()
            try:
                with _capturing:
                    logits = graph.capture(lambda: self._run(cache))
            except RuntimeError as error:  # an operation of the model or the method that a graph cannot hold
                self._hooks.forget_pass()
                cache.rewind(past)
                engine.forget()
                raise _NotCaptured(reason(error)) from error
            graph.replay()
            self._graphs[pattern] = graph, logits
        cache.drop_unseen()  # not in the step: it would at every replay
        return logits.clone()

    def _run(self, cache: CompressedCache) -> Tensor:
        """The logits of the step by the model's own forward."""
        cache.cache_position = self._cache_position
        try:
            logits = self._plain(
                input_ids=self.ids,
                position_ids=self._positions,
                **cache_argument(cache),
                use_cache=True,
                logits_to_keep=1,
            ).logits
        finally:
            cache.cache_position = None
        if logits is None:
            raise RuntimeError("the model returned no logits")
        return logits
