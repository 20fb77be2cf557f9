"""KV caches to benchmark: those of kvq's methods, and transformers' DynamicCache and QuantizedCache."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvq_cli.attention.attach import attach
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.extras import install_command

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

QUANTO_BITS = (2, 4)


@dataclass(frozen=True)
class StepKind:
    """Decode steps that do the same work: they pack tokens of the same streams.

    past: tokens in the cache before such a step. share: of all decode steps.
    """

    past: int
    share: float


class BenchmarkedCache(ABC):
    """A KV cache implementation to measure.

    name: label of its rows. bits: nominal bits per number, None for an uncompressed cache. backend: the attention
    backend, known inside `on`; None for the model's own attention. can_rewind: whether `rewind` is implemented.
    """

    can_rewind = False

    def __init__(self, name: str, bits: float | None = None) -> None:
        self.name, self.bits = name, bits
        self.backend: str | None = None

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[Callable[[int], Cache]]:
        """Prepare the model within the `with` block; yields a function that maps the final sequence length in tokens to
        an empty cache."""
        yield lambda _tokens: self.new_cache(model)

    def new_cache(self, model: PreTrainedModel) -> Cache:
        raise NotImplementedError

    def step_kinds(self, context: int, limit: int) -> list[StepKind]:
        """Return the kinds of decode steps after `context` tokens, inside `on`; the first one begins there. limit: the
        longest sequence."""
        return [StepKind(context, 1.0)]

    def rewind(self, cache: Cache, tokens: int) -> None:
        """Set the length of `cache` back to `tokens`. Numbers may be wrong afterwards; steps take the same time."""
        raise NotImplementedError

    @abstractmethod
    def nbytes(self, cache: Cache) -> int:
        """Return the bytes of the tensors that `cache` holds."""


class DynamicCacheBaseline(BenchmarkedCache):
    """transformers' DynamicCache in the model's dtype, with the model's own attention."""

    def __init__(self) -> None:
        super().__init__("transformers DynamicCache")

    def new_cache(self, model: PreTrainedModel) -> Cache:
        return DynamicCache(config=model.config)

    def nbytes(self, cache: Cache) -> int:
        return _layers_nbytes(cache, "keys", "values")


class QuantoBaseline(BenchmarkedCache):
    """transformers' QuantizedCache on the quanto backend, with its default group size and residual length."""

    def __init__(self, bits: int) -> None:
        super().__init__(f"transformers QuantizedCache (quanto, {bits} bit)", bits)
        self._bits = bits

    def new_cache(self, model: PreTrainedModel) -> Cache:
        return QuantizedCache("quanto", model.config, nbits=self._bits)

    def nbytes(self, cache: Cache) -> int:
        return _layers_nbytes(cache, "keys", "values", "_quantized_keys", "_quantized_values")


class KvqCache(BenchmarkedCache):
    """kvq's cache, for a method without calibration or an artifact. prefill, backend: as in `attach`."""

    can_rewind = True

    def __init__(self, method: Method | Artifact, label: str, bits: float, prefill: str, backend: str = "auto") -> None:
        super().__init__(f"kvq {label}", bits)
        self._method, self._prefill, self._wanted_backend = method, prefill, backend

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[Callable[[int], Cache]]:
        with attach(model, self._method, prefill=self._prefill, backend=self._wanted_backend) as attached:
            self._attached, self.backend = attached, attached.backend.summary
            self.can_rewind = not attached.has_states
            try:
                yield attached.new_cache
            finally:
                del self._attached  # a batch that failed must leave its memory to the next
            self.backend = attached.backend.summary  # names the decode steps that were not captured in CUDA graphs

    def step_kinds(self, context: int, limit: int) -> list[StepKind]:
        """A kind for each pattern of windows that pack, first positions first. A share counts the steps until the
        pattern repeats: KIVI packs its keys in one step of 128."""
        windows = {stream.window for layer in self._attached.new_cache().compressed for stream in layer.streams}
        end = min(context + math.lcm(*(window.flush for window in windows)), limit)
        positions: dict[tuple[bool, ...], list[int]] = {}
        for past in range(context, end):
            pattern = tuple(window.packed(past + 1) > window.packed(past) for window in windows)
            positions.setdefault(pattern, []).append(past)
        return [StepKind(steps[0], len(steps) / (end - context)) for steps in positions.values()]

    def rewind(self, cache: Cache, tokens: int) -> None:
        _compressed(cache).rewind(tokens)

    def nbytes(self, cache: Cache) -> int:
        return self._attached.report(_compressed(cache)).bytes


def _compressed(cache: Cache) -> CompressedCache:
    if not isinstance(cache, CompressedCache):
        raise TypeError(f"not a cache of kvq: {type(cache).__name__}")
    return cache


def quanto_baseline(bits: float | None) -> QuantoBaseline | str:
    """Return transformers' quantized cache at these bits, or the reason why it cannot be measured.

    quanto compiles its CPU extension at first use: it is compiled here, outside of all measurements.
    """
    if bits not in QUANTO_BITS:
        return f"transformers' quanto cache has {' and '.join(map(str, QUANTO_BITS))} bits, not {bits}"
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        return f"transformers' quanto cache is not measured: it needs optimum-quanto: {install_command('bench')}"
    try:
        _compile_quanto()
    except Exception as error:  # a missing or failing compiler raises errors of many types
        return f"transformers' quanto cache is not measured: its code does not compile here ({type(error).__name__})"
    return QuantoBaseline(int(bits))


def _compile_quanto() -> None:
    import optimum.quanto  # noqa: F401  (defines the operator)

    torch.ops.quanto.unpack(torch.zeros(4, dtype=torch.uint8), 2)


def _layers_nbytes(cache: Cache, *attributes: str) -> int:
    """Return the bytes of these attributes of all layers."""
    return sum(_nbytes(getattr(layer, name)) for layer in cache.layers for name in attributes if hasattr(layer, name))


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of the tensors inside a wrapper such as quanto's (codes, scale, shift)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
