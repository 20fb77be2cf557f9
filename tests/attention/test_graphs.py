"""Captured and replayed decode steps equal steps without graphs, bit for bit."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from codec_methods import DEVICE, WINDOWS, CodecMethod, codebook, outliers, per_head, per_token, transform
from counted_graphs import RecordedGraph, counted_graphs
from tiers import slow, slow_cases

from kvq_cli.attention.attach import Attached, attach
from kvq_cli.attention.graphs import captured_steps, cuda_graphs
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window

pytestmark = pytest.mark.gpu

PROMPT, STEPS = 22, 13


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Nothing is read back at a step, as it must be in a captured one."""
    for module in ("cache.rows", "cache.layer", "attention.attention_hooks") if DEVICE.type == "cpu" else ():
        monkeypatch.setattr(f"kvq_cli.{module}.would_sync", lambda _, columns: columns == 1)
    monkeypatch.setattr(RecordedGraph, "made", [])


@pytest.fixture(scope="module")
def small(tiny):
    """`small(kv_heads=1)`: two query heads of 32 channels."""

    def make(layers: int = 1, kv_heads: int = 1, **options):
        heads = {"num_attention_heads": 2, "num_key_value_heads": kv_heads, "head_dim": 32}
        return tiny("llama", num_hidden_layers=layers, **heads, **options).to(DEVICE)

    return make


def captured(kv: Attached) -> AbstractContextManager[None]:
    """Steps are captured by graphs that count themselves."""
    return captured_steps(kv.model, kv.hooks, kv.backend, counted_graphs)


def decoded(model, method, ids, replay: bool, room: int = 0, between=None):
    """(logits of single tokens after a prompt, all tokens of every row as the cache then gives them, backend)."""
    outs = []
    with torch.no_grad(), ExitStack() as stack:
        kv = stack.enter_context(attach(model, method, backend="triton", graphs=False))
        if replay:
            stack.enter_context(captured(kv))
        cache = kv.new_cache(room)
        model(ids[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, ids.shape[1]):
            outs.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits)
            if between is not None:
                between(at, cache)
        tokens_held = [
            stream.read(row) for layer in cache.layers for stream in layer.streams for row in range(len(ids))
        ]
        return torch.cat(outs, dim=1), tokens_held, kv.report().backend


def same(model, method, ids, replays: int, room: int = PROMPT + STEPS, says: str = "", between=None) -> None:
    """replays: how many steps must have been replayed at least."""
    expected, expected_tokens, _ = decoded(model, method, ids, False, room, between)
    actual, actual_tokens, backend = decoded(model, method, ids, True, room, between)
    kernels = "triton" if DEVICE.type == "cuda" else "triton, interpreted"
    assert backend.startswith(f"{kernels}, steps {says or 'as CUDA graphs'}")
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(expected_tokens, actual_tokens, strict=True))
    assert sum(graph.replays for graph in RecordedGraph.made) >= replays


def tokens(batch: int = 2) -> torch.Tensor:
    noise = torch.Generator().manual_seed(0)
    return torch.randint(3, 97, (batch, PROMPT + STEPS), generator=noise).to(DEVICE)


@pytest.mark.parametrize(
    ("name", "options", "replays"),
    [
        ("fp16", {}, STEPS - 2),
        *slow_cases(
            ("kivi", {"bits": 2, "group": 8, "residual": 8}, STEPS - 3),  # keys pack at every eighth token
            ("kivi", {"bits": 3, "group": 4, "pre_rope": True, **WINDOWS}, STEPS - 4),
            ("innerq", {"bits": 2, "sinks": 2, "recent": 3}, STEPS - 3),
            ("squat", {"bits": 2, "group": 4, **WINDOWS}, STEPS - 4),
            ("xquant", {"bits": 4, "group": 16, "recent": 4}, STEPS - 3),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_replayed_steps_of_methods(small, name, options, replays):
    same(small(kv_heads=2 if name == "xquant" else 1), build(name, **options), tokens(1), replays)


@pytest.mark.slow
def test_replayed_steps_of_several_layers_and_rows(small):
    same(small(layers=2), build("kivi", group=4, **WINDOWS), tokens(2), STEPS - 4)


@pytest.mark.slow
def test_store_growth_discards_graphs(small, monkeypatch):
    """New tensors: steps are captured again."""
    monkeypatch.setattr("kvq_cli.cache.store.MIN_GROWTH", 8)
    same(small(), build("kivi", group=4, recent=4), tokens(1), 4, room=0)
    assert len(RecordedGraph.made) == 2


@pytest.mark.slow
def test_replayed_steps_of_a_cache_with_a_rollback(small):
    """Tokens are taken back, some of which have packed others; the larger ring discards graphs once."""

    def between(at, cache) -> None:
        if at == PROMPT + 2:
            cache.allow_rollback(5)
        if at == PROMPT + 8:
            cache.crop(-5)

    same(small(), build("kivi", group=4, **WINDOWS), tokens(1), 3, between=between)


@pytest.mark.parametrize("name", ["fp16", *slow("kivi")])
def test_dropped_tokens_discard_graphs(tiny, name):
    """Of a layer with a sliding window; the other one keeps all tokens."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    model, dropped = tiny("gemma3", **heads, sliding_window=12, layer_types=kinds).to(DEVICE), set()
    options = {"group": 4, "sinks": 2, "recent": 3} if name == "kivi" else {}
    same(model, build(name, **options), tokens(1), 4, between=lambda _, cache: dropped.update(cache.dropped()))
    assert len(dropped) > 2


@pytest.mark.slow
def test_reordered_beams_discard_graphs(small):
    def swap(at: int, cache) -> None:
        if at == PROMPT + 5:
            cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))

    same(small(), build("kivi", group=4, **WINDOWS), tokens(2), 4, between=swap)


@pytest.mark.slow
def test_steps_that_cannot_be_captured_are_reported(small):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    method = build("kivi", group=4, pre_rope=True, **WINDOWS)
    says = "not captured ("
    if DEVICE.type == "cpu":
        says += "_local_scalar_dense synchronizes with the host during capture)"
    same(small(rope_parameters=rope), method, tokens(1), 0, says=says)


def test_padded_batches_and_steps_with_more_outputs_are_not_captured(small, prompt):
    model, method = small(), build("kivi", group=4, **WINDOWS)
    ids, mask = (x.to(DEVICE) for x in prompt(PROMPT + 4, pads=(5, 0)))
    with torch.no_grad(), attach(model, method, backend="triton") as kv, captured(kv):
        cache = kv.new_cache()
        for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + 4))):
            model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
        cache = kv.new_cache(PROMPT + 4)
        model(ids[1:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + 4):
            out = model(ids[1:, at : at + 1], past_key_values=cache, output_hidden_states=True)
            assert len(out.hidden_states) == 2
    assert not RecordedGraph.made


def test_generate_replays_steps_before_and_after_a_second_prompt(small):
    """The second prompt to the same cache is not captured."""
    model, method, texts = small(), build("kivi", group=4, **WINDOWS), []
    for replay in (False, True):
        with ExitStack() as stack:
            kv = stack.enter_context(attach(model, method, backend="triton", graphs=False))
            if replay:
                stack.enter_context(captured(kv))
            cache, ids = kv.new_cache(64), tokens(1)[:, :PROMPT]
            for _ in range(2):
                ids = model.generate(ids, past_key_values=cache, max_new_tokens=7, do_sample=False, eos_token_id=None)
                texts.append(ids.tolist())
                ids = torch.cat([ids, tokens(1)[:, :4]], dim=1)
    assert texts[:2] == texts[2:]
    assert sum(graph.replays for graph in RecordedGraph.made) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [
        (codebook(), codebook((1, 4), normal=False), {}),
        (codebook((1, 1), 16, 32), per_token(0.05), {"window": Window(1, 0, 32)}),
        (outliers, per_token(0.0), {"window": Window(1, 1, 32)}),
        (per_head, per_head, {}),
        (transform(False), transform(True), {"window": Window(1, 1, 16)}),
    ],
    ids=["temporal", "scalars", "outliers", "per_head", "transform"],
)
def test_replayed_steps_of_codebooks(small, keys, values, options):
    same(small(kv_heads=2), CodecMethod(keys, values, **options), tokens(1), STEPS - 4)


@pytest.mark.parametrize("change", ["drop", "reset", "reorder"])
@torch.no_grad()
def test_graphs_do_not_keep_the_memory_of_a_cache(small, change):
    """A prompt after captured steps has the memory of the cache before it, and of its graphs."""
    model, ids, alive = small(), tokens(2), []

    def count(*_) -> None:
        alive.append(sum(tensor() is not None for tensor in held))

    with attach(model, build("kivi", group=4, **WINDOWS), backend="triton", graphs=False) as kv, captured(kv):
        cache = kv.new_cache(ids.shape[1])
        model(ids[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + 5):
            model(input_ids=ids[:, at : at + 1], past_key_values=cache)
        held = [ref(tensor) for tensor in cache.tensors()]
        assert any(graph.replays for graph in RecordedGraph.made)
        RecordedGraph.made.clear()
        count()
        if change == "reset":
            cache.reset()
        elif change == "reorder":
            cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        else:
            del cache
            cache = kv.new_cache()
        with model.model.layers[0].register_forward_pre_hook(count):
            model(ids[:, :PROMPT], past_key_values=cache)
    assert alive == [len(held), 0]


@torch.no_grad()
def test_reset_frees_the_memory_of_a_cache(small):
    """At once, not when the next pass begins. No step is captured: on a CPU, recorded operations hold tensors."""
    model, ids = small(), tokens(1)
    with attach(model, build("kivi", group=4, **WINDOWS), backend="triton", graphs=False) as kv, captured(kv):
        cache = kv.new_cache(ids.shape[1])
        model(ids[:, :PROMPT], past_key_values=cache)
        for at in (PROMPT, PROMPT + 1):
            model(input_ids=ids[:, at : at + 1], past_key_values=cache)
        held = [ref(tensor) for tensor in cache.tensors()]
        cache.reset()
        assert not RecordedGraph.made and not any(tensor() is not None for tensor in held)


@torch.no_grad()
def test_adapters_that_change_are_seen_between_replayed_steps(small):
    """A replay runs no hook of the model, and computes what was captured."""
    model, ids = small(), tokens(1)
    with attach(model, build("kivi", group=4, residual=64), backend="triton", graphs=False) as kv, captured(kv):
        cache = kv.new_cache(ids.shape[1])
        model(ids[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + 3):
            model(input_ids=ids[:, at : at + 1], past_key_values=cache)
        assert RecordedGraph.made
        mlp = model.model.layers[0].mlp
        mlp.down_proj = Adapted(mlp.down_proj)
        with pytest.raises(UsageError, match="adapters have changed"):
            model(input_ids=ids[:, at : at + 1], past_key_values=cache)


@torch.no_grad()
def test_steps_are_captured_anew_where_an_adapter_is_merged(small):
    """What was captured before adds the adapter's output to that of the merged weights."""
    model, ids = small(), tokens(1)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    with attach(model, build("kivi", group=4, residual=64), backend="triton", graphs=False) as kv, captured(kv):
        cache = kv.new_cache(ids.shape[1])
        model(ids[:, :PROMPT], past_key_values=cache)
        made = []
        for at in range(PROMPT, PROMPT + 6):
            if at == PROMPT + 3:
                mlp.down_proj.merged_adapters = ["default"]
            model(input_ids=ids[:, at : at + 1], past_key_values=cache)
            made.append(len(RecordedGraph.made))
    assert made[2] > 0 and made[5] == 2 * made[2]


class Adapted(torch.nn.Module):
    """A module with an adapter that doubles its output."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters = base, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


@torch.no_grad()
@pytest.mark.slow
def test_steps_of_another_cache_at_other_positions(small):
    """A step that is not captured leaves its counts and positions on the device: a replay would read them."""
    model, ids, outs = small(), tokens(1), []
    for replay in (False, True):
        with ExitStack() as stack:
            method = build("kivi", group=4, pre_rope=True, **WINDOWS)
            kv = stack.enter_context(attach(model, method, backend="triton", graphs=False))
            if replay:
                stack.enter_context(captured(kv))

            def passed(cache, begin: int, end: int, offset: int, **options):
                positions = torch.arange(begin, end, device=DEVICE)[None] + offset
                return model(
                    input_ids=ids[:, begin:end], position_ids=positions, past_key_values=cache, **options
                ).logits[:, -1:]

            cache, other = kv.new_cache(ids.shape[1]), kv.new_cache(ids.shape[1])
            passed(cache, 0, PROMPT, 2)
            steps = [passed(cache, at, at + 1, 2) for at in range(PROMPT, PROMPT + 6)]
            passed(other, 0, PROMPT + 5, 40)
            steps.append(passed(other, PROMPT + 5, PROMPT + 6, 40, output_hidden_states=True))
            steps += [passed(cache, at, at + 1, 2) for at in range(PROMPT + 6, PROMPT + STEPS)]
            outs.append(torch.cat(steps, dim=1))
    assert torch.equal(outs[0], outs[1])
    assert sum(graph.replays for graph in RecordedGraph.made) > 4


@pytest.mark.slow
def test_nested_blocks_restore_the_forward_of_the_model(small):
    model, ids = small(), tokens(1)
    outer, inner = build("kivi", group=4, **WINDOWS), build("kivi", bits=4, group=4, **WINDOWS)
    expected = decoded(model, outer, ids, False)[0]
    with torch.no_grad(), ExitStack() as stack:
        kv = stack.enter_context(attach(model, outer, backend="triton", graphs=False))
        stack.enter_context(captured(kv))
        cache, outs = kv.new_cache(ids.shape[1]), []
        model(ids[:, :PROMPT], past_key_values=cache)
        with attach(model, inner, backend="triton", graphs=False) as other, captured(other):
            model(ids[:, :PROMPT], past_key_values=other.new_cache())
        for at in range(PROMPT, ids.shape[1]):
            outs.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits)
    assert torch.equal(torch.cat(outs, dim=1), expected)
    assert sum(graph.replays for graph in RecordedGraph.made) > 4 and "forward" not in model.__dict__


def test_graphs_are_captured_and_replayed_on_the_models_gpu(monkeypatch):
    """Not on the current one of several GPUs, and not in torch's stream, which is of one GPU."""
    current, seen = ["cuda:0"], []

    @contextmanager
    def selected(device):
        current.append(str(device))
        yield
        current.pop()

    @contextmanager
    def capturing(graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads may allocate meanwhile
        seen.append((current[-1], str(stream.device)))
        yield

    def new_graph():
        return SimpleNamespace(replay=lambda: seen.append(current[-1]))

    monkeypatch.setattr(torch.cuda, "device", selected)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    graph = cuda_graphs(torch.device("cuda:1"))()
    assert graph.capture(lambda: current[-1]) == "cuda:1"
    graph.replay()
    assert seen == [("cuda:1", "cuda:1"), "cuda:1"]
