"""Codecs are fit to the tokens of each row's first pass; the state is stored and reordered with the row."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.prompt_stream import PromptStream
from kvq_cli.cache.rows import Rows
from kvq_cli.codecs.base import Codec, Packed, Part, Prompt, PromptCodec, State
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.methods.base import LayerPlan, ModelShape, StreamPlan
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window

QUERY_HEADS, HEADS, DIM, COLUMNS = 4, 2, 16, 60
SHAPE = ModelShape(1, QUERY_HEADS, HEADS, DIM, 64, "float32")
METHODS = {
    "innerq": ("innerq", {"group": 16, "sinks": 3, "recent": 5, "mode": "hybrid_prefill"}),
    "squat": ("squat", {"group": 4, "residual": 8, "strength": 0.05, "rank": 3, "block": 8}),
    "squat windows": ("squat", {"group": 4, "sinks": 2, "recent": 3, "strength": 0.05}),
}


class Spy(PromptCodec):
    """Subtracts the mean of the prompt's keys; its state is the whole prompt."""

    nominal_bits = 16.0

    def __init__(self, shared: bool = False) -> None:
        self.shares_state = shared

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        return LessMean(torch.empty(0), later=False).layout(heads, dim, dtype)

    def fit(self, prompt: Prompt) -> State:
        rows = slice(0, 1) if self.shares_state else slice(None)
        return {
            "mean": prompt.keys[rows].mean(dim=2, keepdim=True),
            "queries": prompt.queries[rows].clone(),
            "values": prompt.values[rows].clone(),
        }

    def encode_prompt(self, x: torch.Tensor, prompt: Prompt, first: int) -> tuple[Packed, State]:
        state = self.fit(prompt)
        return LessMean(state["mean"], later=False).encode(x), state

    def with_state(self, state: State, saliency: torch.Tensor | None = None) -> Codec:
        return LessMean(state["mean"], later=True)


class LessMean(Codec):
    """Subtracts a mean, and stores whether tokens came after the prompt."""

    nominal_bits = 16.0

    def __init__(self, mean: torch.Tensor, later: bool) -> None:
        self.mean, self.later = mean, later

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return Layout({"x": PartSpec(heads, 1, (dim,), dtype), "late": PartSpec(1, 1, (), "bool")})

    def _encode(self, x: torch.Tensor) -> Packed:
        late = torch.full((x.shape[0], 1, x.shape[2]), self.later)
        return Packed(x.shape[2], {"rest": Part(x - self.mean, 1), "late": Part(late, 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
        return (packed.parts["rest"].tensor + self.mean).to(dtype)


def numbers(rows: int = 3, heads: int = HEADS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, heads, COLUMNS, DIM, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int = 3) -> tuple[torch.Tensor, ...]:
    """(keys, values, queries)."""
    return numbers(rows, seed=1), numbers(rows, seed=2), numbers(rows, QUERY_HEADS, seed=3)


def spying(source: str = "post_rope", rotation=None, shared: bool = False) -> CompressedLayer:
    window = Window(2, 3, 1)
    plan = LayerPlan(StreamPlan(source, Spy(shared=shared), window), StreamPlan("value", IdentityCodec(), window))
    return CompressedLayer(0, plan, rotation)


def feed(layer, keys, values, queries, starts, mask=None, turn=None) -> CompressedLayer:
    """Passes that begin at `starts`. turn(x, pads of each row, first column): applies RoPE to keys and queries."""
    rows, columns = Rows(), keys.shape[2]
    pads = [0] * keys.shape[0] if mask is None else (mask == 0).sum(1).tolist()
    for begin, end in zip(starts, [*starts[1:], columns], strict=True):
        key, value, query = (x[:, :, begin:end] for x in (keys, values, queries))
        own = None if mask is None else mask[:, :end]
        positions = None if mask is None else (own.cumsum(1) - 1).clamp(min=0)[:, begin:]
        layer.begin(rows.begin(begin, end - begin, keys.shape[0], own, positions))
        layer.capture_key(key)
        if turn is not None:
            key, query = (turn(x, pads, begin) for x in (key, query))
        layer.update(key, value)
        layer.absorb(query)
    return layer


def padded(pads: list[int], *tensors: torch.Tensor) -> torch.Tensor:
    """The mask; pads of `tensors` become NaN, so that reading them would be noticed."""
    mask = torch.ones(len(pads), COLUMNS, dtype=torch.int64)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
        for x in tensors:
            x[row, :, :count] = torch.nan
    return mask


@pytest.mark.parametrize("starts", [[0], [0, 25], [0, 7, 30], [0, 1, 2, 50]])
def test_prompt_is_the_first_pass_of_a_row_without_pads(starts):
    pads, (keys, values, queries) = [0, 13, 40], inputs()
    layer = feed(spying(), keys, values, queries, starts, padded(pads, keys, values, queries))
    ends = [*starts[1:], COLUMNS]
    for row, count in enumerate(pads):
        end = next(e for e in ends if e > count)
        state = layer.key_stream.state
        assert torch.equal(state["queries"][row, :, : end - count], queries[row, :, count:end])
        assert torch.equal(state["values"][row, :, : end - count], values[row, :, count:end])
        assert not state["queries"][row, :, end - count :].any()  # shorter prompts than the longest are filled up
        torch.testing.assert_close(layer.key_stream.read(row)[0], keys[row, :, count:], rtol=0, atol=1e-5)
        late = torch.cat([p.parts["late"].tensor for _, _, p in layer.key_stream.packed(*_all(layer, row))], dim=2)
        packed_first = layer.key_stream.window.packed(end - count)
        assert late[0, 0].tolist() == [False] * packed_first + [True] * (late.shape[2] - packed_first)


def _all(layer: CompressedLayer, row: int) -> tuple:
    tokens = layer.key_stream.lengths[row]
    return slice(row, row + 1), tokens, 0, tokens, tokens


@pytest.mark.parametrize("style", ["half", "interleaved", "none"])
def test_queries_are_rotated_back_for_pre_rope_keys(style):
    pads, (keys, values, queries) = [0, 9, 0], inputs()
    mask = padded(pads, keys, values, queries)
    rotation = Rotation(style, 0.7 ** torch.arange(0 if style == "none" else 6), DIM, 1.25)

    def turn(x: torch.Tensor, pads: list[int], begin: int) -> torch.Tensor:
        rows = (rotation.at(x[b : b + 1], begin - n) for b, n in enumerate(pads))
        return x if style == "none" else torch.cat(list(rows))

    layer = feed(spying("pre_rope", rotation), keys, values, queries, [0, 30], mask, turn)
    for row, count in enumerate(pads):
        own = layer.key_stream.state["queries"][row, :, : 30 - count]
        torch.testing.assert_close(own, queries[row, :, count:30], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("starts", [[0], [0, 33], [0, 20, *range(40, COLUMNS)]])
def test_left_padded_batch_equals_single_rows(name, starts):
    method, options = METHODS[name]
    plan, pads = build(method, **options).plan(0, SHAPE, {}), [0, 17, 0, 30]
    x = inputs(4)
    batch = feed(CompressedLayer(0, plan), *x, starts, padded(pads, *x))
    for row, count in enumerate(pads):
        own = [0, *(s - count for s in starts if s > count)]
        alone = feed(CompressedLayer(0, plan), *(t[row : row + 1, :, count:] for t in x), own)
        for one, other in ((batch.key_stream, alone.key_stream), (batch.value_stream, alone.value_stream)):
            torch.testing.assert_close(one.read(row), other.read(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("prompt", [1, 40])
def test_token_by_token_equals_one_pass_after_the_same_prompt(name, prompt):
    method, options = METHODS[name]
    plan, x = build(method, **options).plan(0, SHAPE, {}), inputs(2)
    layers = [
        feed(CompressedLayer(0, plan), *x, starts)
        for starts in ([0, prompt], [0, *range(prompt, COLUMNS)], [0, prompt, 50])
    ]
    for stream in ("key_stream", "value_stream"):
        whole, *others = (getattr(layer, stream) for layer in layers)
        for other in others:
            assert torch.equal(other.read(0), whole.read(0))
            used = [s.store.bytes_used(s.packed_tokens) for s in (whole, other)]
            assert used[0] == used[1]


def test_select_reorders_the_state():
    x = inputs()
    layer = feed(spying(), *x, [0, 20], padded([0, 13, 2], *x))
    before = [(layer.key_stream.read(row), layer.key_stream.state["mean"][row].clone()) for row in range(3)]
    layer.select(torch.tensor([2, 2, 0, 1]))
    for row, old in enumerate([2, 2, 0, 1]):
        assert torch.equal(layer.key_stream.state["mean"][row], before[old][1])
        assert torch.equal(layer.key_stream.read(row), before[old][0])


def test_shared_state_is_stored_once_for_the_first_row():
    keys, values, queries = inputs()
    layer = feed(spying(shared=True), keys, values, queries, [0, 20], padded([5, 0, 13], keys, values, queries))
    mean = layer.key_stream.state["mean"]
    torch.testing.assert_close(mean, keys[:1, :, 5:20].mean(dim=2, keepdim=True))
    layer.select(torch.tensor([2, 1]))
    assert torch.equal(layer.key_stream.state["mean"], mean)
    torch.testing.assert_close(layer.key_stream.read(0)[0], keys[2, :, 13:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_report_counts_the_bytes_of_the_tensors_held(name):
    method, options = METHODS[name]
    layer = feed(CompressedLayer(0, build(method, **options).plan(0, SHAPE, {})), *inputs(2), [0, 40])
    for stream in (layer.key_stream, layer.value_stream):
        held = [*(stream.state.values() if isinstance(stream, PromptStream) else ()), stream.sinks, stream.ring]
        held += [part.tensor for segment in stream.store.segments for part in segment.parts.values()]
        assert sum(stream.bytes_by_part().values()) == sum(t.untyped_storage().nbytes() for t in held)


def test_reset_cache_is_fit_to_a_new_prompt():
    keys, values, queries = inputs(1)
    layer = feed(spying(), keys[:, :, :4], values[:, :, :4], queries[:, :, :4], [0])
    layer.reset()
    assert not layer.key_stream.state
    layer = feed(layer, keys, values, queries, [0])
    torch.testing.assert_close(layer.key_stream.state["mean"], keys.mean(dim=2, keepdim=True))
