"""Kernels decode a cache in `torch.inference_mode`, and then outside it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from codec_methods import DEVICE
from counted_graphs import RecordedGraph, counted_graphs

from kvq_cli.attention.attach import attach
from kvq_cli.attention.graphs import captured_steps
from kvq_cli.methods.registry import build

pytestmark = pytest.mark.gpu

KIVI = build("kivi", group=4, recent=4)


@pytest.fixture(scope="module")
def model(one_layer):
    return one_layer((2, 1))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(3, 23, device=DEVICE).view(1, 20)


def test_store_that_grows_in_inference_mode_is_written_outside_it(model, ids, monkeypatch):
    """Kernels read a store that has grown as one segment, which is made at the step that reads it."""
    monkeypatch.setattr("kvq_cli.cache.store.MIN_GROWTH", 8)
    made = []
    for first in (torch.no_grad, torch.inference_mode):
        with attach(model, KIVI, backend="triton", graphs=False) as kv:
            cache, given = kv.new_cache(), {"do_sample": False, "eos_token_id": None}
            with first():
                out = model.generate(ids, past_key_values=cache, max_new_tokens=12, **given)
            stores = [stream.store for stream in cache.layers[0].streams]
            assert all(store.joined for store in stores)
            made.append(model.generate(out.clone(), past_key_values=cache, max_new_tokens=8, **given).tolist())
    assert made[0] == made[1]


def test_copies_made_in_inference_mode_are_written_outside_it(model, ids):
    with attach(model, KIVI, backend="triton", graphs=False) as kv:
        cache = kv.new_cache()
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            copy = cache.clone()
        with torch.no_grad():
            expected = model(ids[:, :1], past_key_values=cache).logits
            assert torch.equal(model(ids[:, :1], past_key_values=copy).logits, expected)


def test_steps_captured_outside_inference_mode_begin_in_it(model, ids, monkeypatch):
    """The inputs of graphs are made at the first step, and written at all of them."""
    for module in ("cache.rows", "cache.layer", "attention.attention_hooks") if DEVICE.type == "cpu" else ():
        monkeypatch.setattr(f"kvq_cli.{module}.would_sync", lambda _, columns: columns == 1)
    monkeypatch.setattr(RecordedGraph, "made", [])
    logits = []
    for replay in (False, True):
        with ExitStack() as stack:
            kv = stack.enter_context(attach(model, KIVI, backend="triton", graphs=False))
            if replay:
                stack.enter_context(captured_steps(kv.model, kv.hooks, kv.backend, counted_graphs))
            cache = kv.new_cache(40)
            with torch.inference_mode():
                model(ids, past_key_values=cache)
                model(input_ids=ids[:, :1], past_key_values=cache)
            with torch.no_grad():
                steps = [model(input_ids=ids[:, :1], past_key_values=cache).logits for _ in range(8)]
            logits.append(torch.cat(steps, dim=1))
    assert torch.equal(logits[0], logits[1])
    assert sum(graph.replays for graph in RecordedGraph.made) > 2
