"""Requirements of methods that are fit to the prompt, for any bits, number of kv heads and head_dim.

All runs of a test share the first pass, whatever follows it; see `test_matrix.py` for methods without a first pass.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from pairwise import parametrize_pairwise
from tiers import first_of_each
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_cli import attach
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Rows
from kvq_cli.cache.stream import Stream
from kvq_cli.methods.registry import build

METHODS = [
    *(("gear", {"bits": bits, "group": 16, "residual": 16, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    ("gear", {"group": 16, "residual": 16, "outliers": 0.0}),
    ("gear", {"group": 16, "residual": 16, "rank": 0, "chunk_rank": 3}),
    ("gear", {"group": 16, "residual": 16, "chunk_rank": 0}),
    *(("zipcache", {"bits": bits, "residual": 15, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4)),
    ("zipcache", {"ratio": 0.0, "residual": 10}),
    ("zipcache", {"ratio": 1.0, "residual": 10}),
]
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
HEAD_DIMS = (64, 80, 96, 128)
FIRST, TOKENS = 49, 93
PADS = (11, 0, 0)

each_method = pytest.mark.parametrize(
    ("name", "options"), METHODS, ids=["-".join([n, *(f"{k}={v}" for k, v in o.items())]) for n, o in METHODS]
)


def feed(layer: CompressedLayer, numbers: list[torch.Tensor], passes: list[int], pads=None) -> CompressedLayer:
    """The columns of queries, keys and values in passes; `pads` of each row are padding on the left."""
    rows, past, mask = Rows(), 0, None
    if pads is not None:
        mask = torch.tensor([[0] * count + [1] * (TOKENS - count) for count in pads])
    for columns in passes:
        queries, keys, values = (x[:, :, past : past + columns] for x in numbers)
        seen = None if mask is None else mask[:, : past + columns]
        layer.begin(rows.begin(past, columns, keys.shape[0], seen))
        layer.update(keys, values)
        layer.absorb(queries)
        past += columns
    layer.tails = []
    return layer


def held(stream: Stream, row: int) -> list[torch.Tensor]:
    """The tensors of a row: full-precision tokens, then packed parts, then the state fit to its prompt."""
    rows, tokens = slice(row, row + 1), stream.lengths[row]
    actual = [x for _, _, x in stream.exact(rows, tokens, 0, tokens, size=1)]
    for _, _, packed in stream.packed(rows, tokens, 0, tokens, 1 << 30):
        actual += [packed.parts[name].tensor for name in sorted(packed.parts)]
    return actual + [stream.state[name][rows] for name in sorted(stream.state)]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape:  # state beside a longer row's: zeros after its own
            cut = tuple(slice(0, n) for n in y.shape)
            assert x.count_nonzero() == x[cut].count_nonzero()
            x = x[cut]
        assert x.dtype == y.dtype and torch.equal(x, y)


def tensor_bytes(stream: Stream) -> int:
    parts = [
        part.tensor
        for store in (stream.prompt_store, stream.store)
        for s in store.segments
        for part in s.parts.values()
    ]
    tensors = [stream.sinks, stream.ring, *parts, *stream.state.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


@parametrize_pairwise({"head_dim": HEAD_DIMS, "heads": HEADS, "name, options": METHODS})
def test_stored_bits_depend_only_on_the_tokens_and_first_pass_of_a_row(name, options, heads, head_dim, shape_of):
    shape, (query_heads, kv_heads) = shape_of(kv_heads=HEADS[heads][1], head_dim=head_dim), HEADS[heads]
    noise = torch.Generator().manual_seed(0)
    numbers = [torch.randn(3, h, TOKENS, head_dim, generator=noise).half() for h in (query_heads, kv_heads, kv_heads)]
    plan = build(name, **options).plan(0, shape, {})
    whole = feed(CompressedLayer(0, plan), numbers, [FIRST, TOKENS - FIRST], PADS)
    streamed = feed(CompressedLayer(0, plan), numbers, [FIRST, 1, 20, 1, 1, TOKENS - FIRST - 23], PADS)
    own = [x[:1, :, PADS[0] :] for x in numbers]
    alone = feed(CompressedLayer(0, plan), own, [FIRST - PADS[0], *[1] * (TOKENS - FIRST)])
    for a, b, c in zip(whole.streams, streamed.streams, alone.streams, strict=True):
        apart = [a.prompt_tokens(slice(row, row + 1)) for row in range(3)]
        assert apart == [a.window.packed(FIRST - count) for count in PADS] and min(apart) > 0
        assert a.packed_tokens > sum(apart)
        for row in range(3):
            assert_same(held(a, row), held(b, row))
        assert_same(held(a, 0), held(c, 0))
        for stream in (a, b, c):
            parts = stream.bytes_by_part()
            assert sum(parts.values()) == tensor_bytes(stream) and min(parts.values()) >= 0
        for row, count in enumerate(PADS):
            read = a.read(row)
            assert read.shape == (1, kv_heads, TOKENS - count, head_dim) and read.isfinite().all()
        before = held(a, 2)
        a.select(torch.tensor([2, 0]))
        assert_same(held(a, 0), before)


def model_of(heads: str, head_dim: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    query_heads, kv_heads = HEADS[heads]
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": head_dim}
    config = LlamaConfig(**sizes, num_attention_heads=query_heads, num_key_value_heads=kv_heads, pad_token_id=0)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


CASES = list(zip(METHODS, itertools.cycle(itertools.product(HEADS, HEAD_DIMS)), strict=False))


def logits(model, ids, mask, cache, passes: list[int]) -> torch.Tensor:
    outs, past = [], 0
    for columns in passes:
        seen, new = mask[:, : past + columns], slice(past, past + columns)
        # Keys are cached after RoPE: what is stored of a row depends on its positions.
        own = {"attention_mask": seen, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, new]}
        outs.append(model(ids[:, new], past_key_values=cache, **own).logits)
        past += columns
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("prefill", ["exact", "compressed"])
@pytest.mark.parametrize(
    ("method", "kind"),
    # At model level one case of each method; codecs and streams have them all.
    first_of_each(CASES, [f"{m[0]}-{i}-{k[0]}-{k[1]}" for i, (m, k) in enumerate(CASES)]),
)
def test_padded_batch_equals_single_rows(method, kind, prefill):
    model, built = model_of(*kind), build(method[0], **method[1])
    ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    passes = [FIRST, 30, *[1] * (TOKENS - FIRST - 30)]
    with attach(model, built, prefill=prefill) as kv:
        batch = logits(model, ids, mask, kv.new_cache(), passes)
        cache = kv.new_cache()
        single = logits(model, ids[:1, 11:], mask[:1, 11:], cache, [FIRST - 11, *passes[1:]])
        assert cache.report().compressed > 0
    error = (batch[:1, 11:] - single).abs()
    # Where rounding of the activations flips a code, one number moves: rare, and small.
    assert error.quantile(0.9) < 1e-3 and error.max() < 0.1 * batch.abs().max()
    lossless = logits(model, ids, mask, None, [TOKENS])
    assert (batch - lossless)[mask.bool()].abs().max() > 0.01 or built.nominal_bits == 8


@pytest.mark.parametrize(("name", "options"), [METHODS[0], METHODS[9]], ids=["gear", "zipcache"])
def test_compressed_prefill_after_the_first_pass_equals_token_by_token(name, options):
    model = model_of("GQA", 64)
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with attach(model, build(name, **options), prefill="compressed") as kv:
        rest = TOKENS - FIRST
        at_once, single = (
            logits(model, ids, torch.ones_like(ids), kv.new_cache(), [FIRST, *after]) for after in ([rest], [1] * rest)
        )
    error = (at_once - single).abs()
    assert error.quantile(0.9) < 1e-3 and error.max() < 0.1 * single.abs().max()


@parametrize_pairwise({"name": ["gear", "zipcache"], "prompt": [1, 5, 40], "dtype": [torch.float32, torch.bfloat16]})
def test_generation_from_prompts_of_any_length(name, prompt, dtype):
    """With beams and a padded row; `dtype` is the model's."""
    options = {"gear": {"group": 16, "residual": 16}, "zipcache": {"residual": 10}}[name]
    model = model_of("GQA", 64).to(dtype)
    ids = torch.randint(3, 97, (2, prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : prompt // 2] = 0
    with attach(model, build(name, bits=4, **options)) as kv:
        for beams in (1, 2):
            cache = kv.new_cache()
            sizes = {"max_new_tokens": 40, "min_new_tokens": 40, "num_beams": beams, "do_sample": False}
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **sizes)
            assert out.shape == (2, prompt + 40)
            report = cache.report()
            assert report.compressed > 0 and sum(report.parts.values()) == report.bytes


@pytest.mark.parametrize(("name", "options"), [METHODS[0], METHODS[9]], ids=["gear", "zipcache"])
def test_tiles_of_any_range_do_not_cross_the_end_of_the_prompt(name, options, shape):
    numbers = [torch.randn(1, heads, TOKENS, 64).half() for heads in (4, 2, 2)]
    layer = feed(CompressedLayer(0, build(name, **options).plan(0, shape, {})), numbers, [FIRST, TOKENS - FIRST])
    rows = slice(0, 1)
    for stream in layer.streams:
        whole, border = stream.read(0), stream.window.sinks + stream.prompt_tokens(rows)
        for start, size in itertools.product((0, 3, 20, 36, 70), (1, 17, 40, 1000)):
            seen = [token for a, b, _ in stream.exact(rows, TOKENS, start, TOKENS) for token in range(a, b)]
            for first, last, packed in stream.packed(rows, TOKENS, start, TOKENS, size):
                assert not first < border < last
                decoded = stream.coder(rows).decode(packed, torch.float32)
                torch.testing.assert_close(decoded, whole[:, :, first:last], rtol=1e-6, atol=1e-6)
                seen += range(max(first, start), last)
            assert sorted(seen) == list(range(start, TOKENS))
