"""A decode step works in tiles: its allocations, scores excepted, do not grow with the context."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvq_cli.attention import torch_backend, torch_prefill
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Rows
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan, StreamPlan
from kvq_cli.methods.window import Window


class Allocations(TorchDispatchMode):
    """Bytes of every new tensor, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.sizes.append(t.untyped_storage().nbytes())
        return out


def largest(context: int, columns: int) -> int:
    """The largest tensor allocated by a pass of `columns` tokens after `context`, store growth excluded."""
    turn = Rotation("half", 0.7 ** torch.arange(8), 16)
    keys = StreamPlan("pre_rope", UniformCodec(2, "channel", 8, 16), Window(8, 0, 8))
    values = StreamPlan("value", UniformCodec(2, "token", 8, 16), Window(8, 0, 1))
    layer, rows = CompressedLayer(0, LayerPlan(keys, values), turn), Rows()

    def step(tokens: int) -> list[int]:
        x = torch.randn(1, 2, tokens, 16)
        q = torch.randn(1, 4, tokens, 16)
        layer.begin(rows.begin(layer.columns, tokens, 1))
        layer.capture_key(x)
        layer.update(x, x)
        layer.absorb(x)
        with Allocations() as allocations:
            context = ForwardContext(layer, layer.forward, torch_backend, scaling=0.25)
            if tokens == 1:
                torch_backend.decode_attention(q, context)
            elif layer.columns > tokens:
                torch_backend.prefill_attention(q, x, x, context)
        return allocations.sizes

    step(context)
    step(1)  # makes the tables that are kept
    return max(step(columns))


def test_decode_step_memory_is_bounded():
    scores = 4 * 4  # bytes per token: four query heads in float32
    small, large = (largest(context, 1) for context in (5_000, 40_000))
    assert large <= max(small, scores * (40_000 + 2))
    assert large < 40_000 * 2 * 16 * 4 / 2  # far below the keys in float32


def test_chunked_prefill_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(torch_prefill, "TILE", 128)
    assert largest(2_000, 200) == largest(9_000, 200)


@pytest.mark.parametrize("columns", [1, 40])
def test_cache_holds_no_tensors_of_a_finished_pass(tiny, probe, prompt, columns):
    """No activations, no masks and no copies for the attention."""
    from kvq_cli.attention.attach import attach

    model, (ids, mask) = tiny("llama"), prompt(80, pads=(0, 5))
    with attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        model(ids[:, 40 : 40 + columns], attention_mask=mask[:, : 40 + columns], past_key_values=cache)
        for layer in cache.layers:
            assert not layer.tails and layer.expected is None and layer._key is None
            held = [v for v in vars(layer).values() if isinstance(v, torch.Tensor)]
            assert held == []
