"""What a decode step of the cache asks of the host in one layer: operations, launches, and waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from step_counts import StepCounts, as_on_a_gpu, counted

from kvq_cli.artifact import Artifact
from kvq_cli.attention.attach import attach
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.methods.registry import build

#: Most operations and launches of a layer: in a step that packs nothing, and in one that does.
PLAIN = {
    "kivi": (0, 12),
    "kivi:rotation=hadamard": (0, 56),
    "kvquant": (4, 132),
    "temporalkv": (4, 32),
    "klt": (4, 10),
}
#: The same where a step is captured in a CUDA graph, and of the work that the first layer does for all.
CAPTURED = {
    "kivi": (0, 14),
    "kivi:rotation=hadamard": (0, 58),
    "kvquant": (4, 134),
    "temporalkv": (4, 34),
    "klt": (4, 12),
}
SHARED = 30
DIM, PROMPT, ROOM = 32, 200, 600


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


@pytest.fixture(scope="module")
def model():
    """A random Llama of 2 layers, 2 kv heads of 32, in 16 bits."""
    return tiny_model(head_dim=DIM, hidden_size=64, num_hidden_layers=2).half()


class Decoding:
    """A cache with a prompt of `PROMPT` tokens in each of `rows` rows, which are decoded without a model."""

    def __init__(self, attached, rows: int) -> None:
        self._attached, self._rows, self.cache = attached, rows, attached.new_cache(ROOM)
        self.step(PROMPT)

    def step(self, columns: int = 1, captured: bool = False) -> list[StepCounts]:
        """Counts of each layer in a pass of `columns` columns; the first has the work that all layers share."""
        counts = []
        if captured:
            self.cache.cache_position = torch.tensor([self.cache.get_seq_length()])
        forward = self.cache.begin(columns, self._rows, None, None)
        for index, layer in enumerate(self.cache.layers):
            query, key, value = (torch.randn(self._rows, n, columns, DIM).half() for n in (4, 2, 2))
            backend = self._attached.backend.of(index)
            with counted() as each:
                layer.begin(forward)
                layer.capture_key(key)
                layer.update(key, value)
                layer.absorb(query)
                if columns == 1:
                    context = ForwardContext(layer, forward, backend, scaling=DIM**-0.5)
                    backend.decode_attention(query, context)
                layer.release()
            counts.append(each)
        self.cache.cache_position = None
        return counts


@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("method", PLAIN)
def test_decode_steps(model, method, captured):
    name, *options = method.split(":")
    built = build(name, bits=2, **dict(option.split("=") for option in options))
    given = Artifact(*random_parts(built, model), Path("mine")) if built.calibrates else built
    plain, packing, shared = [], [], []
    with attach(model, given, backend="triton") as attached:
        decoding = Decoding(attached, 2)
        decoding.step(captured=captured)
        for _ in range(130):
            packs = any(decoding.cache.packing_pattern())
            first, second = decoding.step(captured=captured)
            assert not second.waits
            (packing if packs else plain).append(second)
            shared.append(first.total - second.total)
    found = [max(counts, key=lambda each: each.total, default=None) for counts in (plain, packing)]
    print(f"{method}: step {found[0]}; packing {found[1]}; for all layers {max(shared)}")
    for counts, most in zip((plain, packing), (CAPTURED if captured else PLAIN)[method], strict=True):
        assert all(each.total <= most for each in counts)
    assert max(shared) <= SHARED
