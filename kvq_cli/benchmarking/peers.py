"""What is measured side by side: kvq's methods, transformers' plain cache, and its quantized one."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

QUANTO_BITS = (2, 4)


class Peer(ABC):
    """One way to keep the cache. `name` labels its rows; `bits` is None for a cache that is not compressed; `backend`:
    who computes attention over it, once it was `on` a model; None: the model's own."""

    name: str
    bits: float | None = None
    backend: str | None = None

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[Callable[[int], Cache]]:
        """Prepare the model, give what makes an empty cache (of rows of so many tokens in the end), and undo it all."""
        yield lambda _tokens: self.new_cache(model)

    def new_cache(self, model: PreTrainedModel) -> Cache:
        raise NotImplementedError

    @abstractmethod
    def nbytes(self, cache: Cache) -> int:
        """Bytes of the tensors that the cache holds."""


class Plain(Peer):
    """transformers' DynamicCache in the model's dtype, with the model's own attention."""

    name = "transformers DynamicCache"

    def new_cache(self, model: PreTrainedModel) -> Cache:
        return DynamicCache(config=model.config)

    def nbytes(self, cache: Cache) -> int:
        return sum(_nbytes(layer.keys) + _nbytes(layer.values) for layer in cache.layers)


@dataclass(frozen=True)
class Quanto(Peer):
    """transformers' QuantizedCache on the quanto backend, with its default group size and residual length."""

    bits: int

    @property
    def name(self) -> str:
        return f"transformers QuantizedCache (quanto, {self.bits} bit)"

    def new_cache(self, model: PreTrainedModel) -> Cache:
        return QuantizedCache("quanto", model.config, nbits=self.bits)

    def nbytes(self, cache: Cache) -> int:
        held = ("keys", "values", "_quantized_keys", "_quantized_values")
        return sum(_nbytes(getattr(layer, name)) for layer in cache.layers for name in held)


class Kvq(Peer):
    """A method of kvq, or its artifact."""

    def __init__(self, chosen: Method | Artifact, name: str, bits: float, prefill: str, wanted: str = "auto"):
        self.chosen, self.bits, self.prefill, self.wanted = chosen, bits, prefill, wanted
        self.name = f"kvq {name}"

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[Callable[[int], Cache]]:
        with attach(model, self.chosen, prefill=self.prefill, backend=self.wanted) as attached:
            self._attached, self.backend = attached, attached.backend.summary
            yield attached.new_cache
            self.backend = attached.backend.summary  # steps that could not be captured are known now

    def nbytes(self, cache: Cache) -> int:
        return self._attached.report(cache).bytes


def quanto(bits: float | None) -> Quanto | str:
    """transformers' quantized cache at these bits, or the reason why it cannot be measured.

    quanto compiles its CPU code when it is first used: that happens here, before anything is measured.
    """
    if bits not in QUANTO_BITS:
        return f"transformers' quanto cache has {' and '.join(map(str, QUANTO_BITS))} bits, not {bits}"
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        return "transformers' quanto cache is not measured: pip install 'kvq-cli[bench]' brings optimum-quanto"
    try:
        _first_use()
    except Exception as error:  # a compiler that is missing or fails, in whatever way
        return f"transformers' quanto cache is not measured: its code does not compile here ({type(error).__name__})"
    return Quanto(int(bits))


def _first_use() -> None:
    import optimum.quanto  # noqa: F401  (defines the operator)

    torch.ops.quanto.unpack(torch.zeros(4, dtype=torch.uint8), 2)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the tensors inside a wrapper such as quanto's (codes, scale, shift)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
