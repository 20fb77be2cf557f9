"""Attention over a compressed layer against a loop over queries and tokens, without tiles and row spans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_transforms import random_transform

from kvq_cli.attention import torch_backend, torch_prefill, whole_prefill
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Rows
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan, StreamPlan
from kvq_cli.methods.window import Window

HEADS, GROUP, DIM = 2, 3, 16
SCALING = 0.3
#: Tokens that the codecs of keys and of values pack at a time.
BLOCKS = {"uniform": (4, 1), "transform": (16, 16)}


def rotation(style: str, width: int = 8, scale: float = 1.25) -> Rotation:
    return Rotation(style, 0.7 ** torch.arange(width // 2), DIM, scale)


def turned(turn: Rotation, x: torch.Tensor, position: int) -> torch.Tensor:
    """R(position) x of `[..., dim]`, pair by pair, from the definition."""
    out = x.clone().double()
    for pair, frequency in enumerate(turn.frequencies.tolist()):
        i, j = (pair, pair + turn.width // 2) if turn.style == "half" else (2 * pair, 2 * pair + 1)
        if turn.style == "none":
            break
        angle = torch.tensor(position * frequency, dtype=torch.float64)
        a, b = x[..., i].double(), x[..., j].double()
        out[..., i] = turn.scale * (a * angle.cos() - b * angle.sin())
        out[..., j] = turn.scale * (b * angle.cos() + a * angle.sin())
    return out


def seen(stream, x: torch.Tensor, known: int) -> torch.Tensor:
    """Tokens [0, known) of `x` `[heads, tokens, dim]` as decoded when the row holds `known` tokens."""
    window, out = stream.plan.window, x[:, :known].clone()
    count = window.packed(known)
    if count:
        part = slice(window.sinks, window.sinks + count)
        packed = stream.codec.encode(x[None, :, part])
        out[:, part] = stream.codec.decode(packed, x.dtype)[0]
    return out


def simulate(layer, turn, q, k, v, starts: list[int], exact: bool) -> torch.Tensor:
    """The outputs `[query_heads, tokens, dim]` of one row fed in passes that begin at `starts`, float64."""
    tokens, out = k.shape[1], torch.zeros_like(q, dtype=torch.float64)
    for t in range(tokens):
        begin = max(s for s in starts if s <= t)
        single = t + 1 in [*starts, tokens] and begin == t
        known = begin if exact and not (single and begin) else t + 1
        first = 0 if layer.sliding_window is None else max(0, t + 1 - layer.sliding_window)
        keys, values = (
            torch.cat([seen(s, x, known), x[:, known : t + 1]], dim=1)
            for s, x in ((layer.key_stream, k), (layer.value_stream, v))
        )
        rotated = torch.stack([turned(turn, keys[:, i], i) for i in range(t + 1)], dim=1)
        query = turned(turn, q[:, t], t)
        for head in range(q.shape[0]):
            scores = SCALING * rotated[head // GROUP, first:] @ query[head]
            out[head, t] = scores.softmax(-1) @ values[head // GROUP, first:].double()
    return out


def run(layer, turn, q, k, v, starts, exact, mask=None, form=PLAIN) -> torch.Tensor:
    """The same by the backend, for a batch `[batch, heads, columns, dim]`."""
    rows, outs, columns = Rows(), [], k.shape[2]
    pre = layer.plan.keys.source == "pre_rope"
    pads = [0] * k.shape[0] if mask is None else (mask == 0).sum(1).tolist()

    def rotate(x: torch.Tensor, begin: int) -> torch.Tensor:
        rows = [turn.at(x[b : b + 1], begin - n) if turn.style != "none" else x[b : b + 1] for b, n in enumerate(pads)]
        return torch.cat(rows)

    for begin, end in zip(starts, [*starts[1:], columns], strict=True):
        positions = None if mask is None else mask[:, :end].cumsum(1)[:, begin:] - 1
        if positions is not None:
            positions = positions.clamp(min=0)
        forward = rows.begin(begin, end - begin, k.shape[0], None if mask is None else mask[:, :end], positions)
        key, value, query = (x[:, :, begin:end] for x in (k, v, q))
        layer.begin(forward)
        layer.capture_key(key)
        post = rotate(key, begin)
        layer.update(post if pre else key, value)
        query = rotate(query, begin)
        layer.absorb(query)
        context = ForwardContext(
            layer, layer.forward, torch_backend, compressed=not exact, scaling=SCALING, score_form=form
        )
        if forward.columns == 1 and not (exact and begin == 0):
            outs.append(torch_backend.decode_attention(query, context))
        else:
            outs.append(torch_backend.prefill_attention(query, post if pre else key, value, context))
        layer.release()
    return torch.cat(outs, dim=2)


def transform(heads: int, dim: int, values: bool) -> TransformCodec:
    """One transform of all heads."""
    return TransformCodec(heads, random_transform((3, 2, 1), 1, heads * dim, noise(int(values))), values)


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(source, key_window, value_window, sliding=None, style="half", codec="uniform") -> tuple:
    turn = rotation(style if source == "pre_rope" else "none")
    codecs = {
        "uniform": (UniformCodec(2, "channel", 4, DIM), UniformCodec(2, "token", 4, DIM)),
        "identity": (IdentityCodec(), IdentityCodec()),
        "transform": tuple(transform(HEADS, DIM, values) for values in (False, True)),
        "rotated": tuple(RotatedCodec(IdentityCodec(), HadamardRotation(DIM, flip)) for flip in (False, True)),
    }
    keys, values = codecs[codec]
    plan = LayerPlan(StreamPlan(source, keys, key_window), StreamPlan("value", values, value_window))
    return CompressedLayer(0, plan, turn, sliding), turn


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=noise(seed))


windows = st.builds(lambda s, r, f: (s, r, f), st.integers(0, 7), st.integers(0, 12), st.integers(1, 3))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("source", ["post_rope", "pre_rope"])
@settings(max_examples=15)
@given(
    keys=windows,
    values=windows,
    chunks=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    sliding=st.sampled_from([None, 1, 6]),
    style=st.sampled_from(["half", "interleaved", "none"]),
    tile=st.sampled_from([5, 16, 2048]),
    queries=st.sampled_from([(3, 2), (16, 4), (512, 128)]),
)
def test_backend_equals_the_definition(exact, source, keys, values, chunks, sliding, style, tile, queries):
    windows = Window(keys[0], keys[1], 4 * keys[2]), Window(*values)
    layer, turn = make(source, *windows, sliding, style)
    tokens, starts = sum(chunks), [sum(chunks[:i]) for i in range(len(chunks))]
    q, k, v = (numbers(1, h, tokens, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    expected = simulate(layer, turn, q[0], k[0], v[0], starts, exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_prefill, "TILE", tile)
        patch.setattr(torch_prefill, "QUERIES", queries[0])
        patch.setattr(torch_prefill, "MASKED_QUERIES", queries[1])
        actual = run(layer, turn, q, k, v, starts, exact)
    torch.testing.assert_close(actual[0].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("source", ["post_rope", "pre_rope"])
@settings(max_examples=10)
@given(
    keys=windows,
    values=windows,
    chunks=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    sliding=st.sampled_from([None, 1, 6]),
    mask_numbers=st.sampled_from([1, 200, 1 << 20]),
)
def test_whole_prefixes_equal_the_definition(exact, source, keys, values, chunks, sliding, mask_numbers):
    """As on a GPU: one fused attention for a block of queries."""
    windows = Window(keys[0], keys[1], 4 * keys[2]), Window(*values)
    layer, turn = make(source, *windows, sliding)
    tokens, starts = sum(chunks), [sum(chunks[:i]) for i in range(len(chunks))]
    q, k, v = (numbers(1, h, tokens, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    expected = simulate(layer, turn, q[0], k[0], v[0], starts, exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_prefill, "TILED_DEVICES", ())
        patch.setattr(torch_prefill, "_attend", None)
        patch.setattr(whole_prefill, "MASK_NUMBERS", mask_numbers)
        actual = run(layer, turn, q, k, v, starts, exact)
    torch.testing.assert_close(actual[0].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("limit", "calls"), [(1 << 20, (1, 1)), (2 * 60 * HEADS * DIM, (1, 2)), (60 * HEADS * DIM - 1, (3, 0))]
)
def test_whole_prefixes_take_bounded_memory(limit, calls, monkeypatch):
    """Rows that are too many are computed one part after another, a row that is too long in tiles. calls: in passes
    that lead to 40 and to 60 tokens."""
    made, whole = [], torch_prefill.whole_attention
    monkeypatch.setattr(torch_prefill, "TILED_DEVICES", ())
    monkeypatch.setattr(torch_prefill, "whole_attention", lambda *given: made.append(1) or whole(*given))
    q, k, v = (numbers(3, h, 60, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    outs = []
    for numbers_at_once in (1 << 20, limit):
        made.clear()
        monkeypatch.setattr(whole_prefill, "NUMBERS", numbers_at_once)
        layer, turn = make("pre_rope", Window(3, 10, 4), Window(2, 5, 1))
        outs.append(run(layer, turn, q, k, v, [0, 40], exact=True))
    assert len(made) == sum(calls)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "form", [ScoreForm(softcap=5.0), ScoreForm(sinks=torch.zeros(HEADS * GROUP)), PLAIN], ids=["cap", "sinks", "plain"]
)
def test_only_plain_attention_of_whole_prefixes_is_fused(form, monkeypatch):
    made, whole = [], torch_prefill.whole_attention
    monkeypatch.setattr(torch_prefill, "whole_attention", lambda *given: made.append(1) or whole(*given))
    q, k, v = (numbers(1, h, 60, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    outs = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(torch_prefill, "TILED_DEVICES", devices)
        layer, turn = make("post_rope", Window(3, 10, 4), Window(2, 5, 1))
        outs.append(run(layer, turn, q, k, v, [0, 40], exact=False, form=form))
    assert len(made) == 2 * (form is PLAIN)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)


def test_whole_prefixes_in_16_bits():
    """Within the rounding of keys, values and weights."""
    q, k, v = (numbers(2, h, 90, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    outs = []
    for dtype, devices in ((torch.float32, ("cpu",)), (torch.bfloat16, ())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_prefill, "TILED_DEVICES", devices)
            layer, turn = make("post_rope", Window(3, 10, 4), Window(2, 5, 1), codec="identity")
            outs.append(run(layer, turn, *(x.bfloat16().to(dtype) for x in (q, k, v)), [0, 30, 60], exact=False))
    assert outs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outs[1].float(), outs[0], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 31])
@pytest.mark.parametrize("pads", [[9, 0, 0, 17], [9, 2, 2, 17]])
def test_left_padded_batch_equals_single_rows(exact, chunk, pads):
    columns = 31
    mask = torch.tensor([[0] * n + [1] * (columns - n) for n in pads])
    q, k, v = (numbers(4, h, columns, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    starts = list(range(0, columns, chunk))
    layer, turn = make("pre_rope", Window(3, 0, 4), Window(2, 5, 1))
    batch = run(layer, turn, q, k, v, starts, exact, mask)
    for row, count in enumerate(pads):
        alone, turn = make("pre_rope", Window(3, 0, 4), Window(2, 5, 1))
        own = [s - count for s in starts if s > count]
        single = run(alone, turn, *(x[row : row + 1, :, count:] for x in (q, k, v)), [0, *own], exact)
        torch.testing.assert_close(batch[row : row + 1, :, count:], single, atol=1e-5, rtol=1e-4)
        assert not batch[row, :, :count].any()


@pytest.mark.parametrize("codec", ["uniform", "transform"])
@pytest.mark.parametrize("source", ["post_rope", "pre_rope"])
@settings(max_examples=10)
@given(
    keys=windows,
    values=windows,
    pads=st.lists(st.integers(0, 40), min_size=2, max_size=4),
    sliding=st.sampled_from([None, 6, 30]),
    more=st.sampled_from([0, 4, 128]),
    size=st.sampled_from([7, 1 << 10]),
)
def test_steps_of_rows_of_different_lengths_equal_single_rows(source, codec, keys, values, pads, sliding, more, size):
    windows = [Window(s, r, block * f) for (s, r, f), block in zip((keys, values), BLOCKS[codec], strict=True)]
    prompt = max(pads) + 3 * BLOCKS[codec][1]
    columns = prompt + 20
    mask = torch.tensor([[0] * n + [1] * (columns - n) for n in pads])
    q, k, v = (numbers(len(pads), h, columns, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "JOINED_MORE", more)
        patch.setattr(torch_backend, "DECODE_NUMBERS", size * HEADS * DIM)
        layer, turn = make(source, *windows, sliding, codec=codec)
        batch = run(layer, turn, q, k, v, [0, *range(prompt, columns)], True, mask)
        for row, count in enumerate(pads):
            alone, turn = make(source, *windows, sliding, codec=codec)
            own = [x[row : row + 1, :, count:] for x in (q, k, v)]
            single = run(alone, turn, *own, [0, *range(prompt - count, columns - count)], True)
            torch.testing.assert_close(batch[row : row + 1, :, count:], single, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more, pieces", [(0, 3), (128, 1)])
def test_rows_of_about_the_same_length_are_decoded_together(more, pieces, monkeypatch):
    monkeypatch.setattr(torch_backend, "JOINED_MORE", more)
    layer, turn = make("pre_rope", Window(3, 10, 4), Window(2, 5, 1))
    q, k, v = (numbers(3, h, 60, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    mask = torch.tensor([[0] * n + [1] * (60 - n) for n in (0, 2, 5)])
    run(layer, turn, q, k, v, [0, 59], True, mask)
    read = torch_backend._pieces(layer.value_stream, layer.forward.row_spans, 0)
    packed = [piece for piece in read if not isinstance(piece.stored, torch.Tensor)]
    assert len(packed) == pieces and packed[0].rows == slice(0, 3)


@pytest.mark.parametrize("codec", ["uniform", "transform"])
@pytest.mark.parametrize("exact", [True, False])
def test_tile_size_does_not_change_the_result(exact, codec, monkeypatch):
    """A context in several tiles equals the context in one tile."""
    q, k, v = (numbers(1, h, 150, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    outs = []
    for size in (7, 1000):
        monkeypatch.setattr(torch_prefill, "TILE", size)
        monkeypatch.setattr(torch_prefill, "MASKED_QUERIES", min(size, 128))
        monkeypatch.setattr(torch_backend, "DECODE_NUMBERS", size * HEADS * DIM)
        keys, values = BLOCKS[codec]
        layer, turn = make("pre_rope", Window(3, 10, 2 * keys), Window(5, 21, values), codec=codec)
        outs.append(run(layer, turn, q, k, v, [0, 60, 130, *range(140, 150)], exact))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)


def test_a_gpu_decodes_larger_tiles(monkeypatch):
    """A tile takes as many launches whatever its size."""
    monkeypatch.setattr(torch_backend, "DECODE_NUMBERS", 16 * HEADS * DIM)
    monkeypatch.setattr(torch_backend, "DECODE_NUMBERS_GPU", 64 * HEADS * DIM)
    layer, turn = make("pre_rope", Window(3, 10, 4), Window(2, 5, 1))
    q, k, v = (numbers(1, h, 150, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    run(layer, turn, q, k, v, [0, 149], True)
    spans, stream = layer.forward.row_spans, layer.value_stream
    on_a_cpu = torch_backend._pieces(stream, spans, 0)
    stream.ring = stream.ring.to("meta")
    on_a_gpu = torch_backend._pieces(stream, spans, 0)
    assert max(piece.last - piece.first for piece in on_a_cpu) == 16
    assert max(piece.last - piece.first for piece in on_a_gpu) == 64


@pytest.mark.parametrize(
    ("codec", "source"), [("identity", "pre_rope"), ("rotated", "pre_rope"), ("rotated", "post_rope")]
)
def test_identity_codec_equals_plain_attention(codec, source):
    """Rotating keys, queries and values by a Hadamard matrix changes nothing where nothing is quantized."""
    layer, turn = make(source, Window(2, 3, 4), Window(1, 0, 2), codec=codec)
    q, k, v = (numbers(2, h, 40, DIM, seed=i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    actual = run(layer, turn, q, k, v, [0, 20, *range(30, 40)], False)
    queries, keys = (turn.at(q, 0), turn.at(k, 0)) if turn.style != "none" else (q, k)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, v, is_causal=True, scale=SCALING, enable_gqa=True
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
