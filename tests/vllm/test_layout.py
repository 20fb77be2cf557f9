"""Block sizes, bytes and numbers of blocks, counted by hand."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, ModelShape, StreamPlan
from kvq_cli.methods.registry import build_parsed
from kvq_cli.methods.transform_specs import Profile, transform_layout
from kvq_cli.methods.window import Window
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.local_layers import local_blocks
from kvq_cli.vllm.placing import least_page

SMOLLM2 = ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=64, hidden_size=576, dtype="bfloat16")
MIB = 1 << 20


def layout(method, block_size=None, bits=2):
    plan = build_parsed(method, bits=bits).plan(0, SMOLLM2, {})
    return cache_layout([plan] * SMOLLM2.layers, SMOLLM2, block_size)


def test_bytes_of_kivi_and_of_16_bits():
    # 2 bits, and a scale and a zero-point of 16 bits for 32 numbers: 3 bits a number.
    assert layout("kivi", 192).page_bytes == 192 * 2 * 3 * 64 * 3 // 8
    assert layout("fp16", 16).page_bytes == 16 * 2 * 3 * 64 * 2


def test_two_bits_hold_five_times_the_tokens_of_16_bits():
    plain, packed = layout("fp16"), layout("kivi")
    tokens = [one.blocks(256 * MIB) * one.block_size for one in (plain, packed)]
    assert tokens[0] == 256 * MIB // (30 * 768) // 16 * 16
    assert tokens[1] >= 5 * tokens[0]


def test_exact_tokens_have_blocks_that_fill_a_page():
    exact = layout("kivi:sinks=32:recent=96").exact
    assert (exact.sinks, exact.recent) == (32, 127)
    assert exact.block_size * 768 <= layout("kivi:sinks=32:recent=96").page_bytes
    assert exact.blocks * exact.block_size >= 32 + 127


def test_a_method_that_packs_every_token_at_once_has_no_exact_blocks():
    assert layout("turboquant").exact is None


@pytest.mark.parametrize(("size", "message"), [(16, "cuts blocks of 32 tokens"), (100, "use a multiple, such as")])
def test_block_sizes_that_cut_what_is_packed_together(size, message):
    with pytest.raises(UsageError, match=message):
        layout("kivi", size)


def test_blocks_of_a_sequence():
    one = layout("kivi")
    assert one.blocks_of(one.block_size) == 1 + min(one.exact.blocks, -(-one.block_size // one.exact.block_size))
    assert one.blocks_of(10 * one.block_size + 1) == 11 + one.exact.blocks


@pytest.mark.parametrize(("fitting", "tokens"), [(15, 0), (16, 16), (31, 16), (48, 32), (63, 32), (64, 64), (500, 64)])
def test_tokens_of_blocks_of_local_layers(fitting, tokens):
    shape = replace(SMOLLM2, windows=(None, 48) * 15, attention=tuple(range(0, 30, 2)))
    assert local_blocks(shape, 768 * fitting + 100, 768).block_size == tokens


def components(keys, values):
    """A plan of klt's codes, per head, of fields of these bits."""
    streams = []
    for source, widths in (("pre_rope", keys), ("value", values)):
        tensors = transform_layout(Profile((widths,) * SMOLLM2.kv_heads, True), SMOLLM2.head_dim)
        streams.append(
            StreamPlan(source, TransformCodec(SMOLLM2.kv_heads, tensors, source == "value"), Window(8, 32, 16))
        )
    return LayerPlan(*streams)


def uneven(seed=0, layers=SMOLLM2.layers):
    """Layers of 1 to 6 bytes a lane, as an allocation of bits over a model gives them out."""
    noise = random.Random(seed)
    drawn = [[noise.choice([(1,), (2, 1), (3, 3), (4, 4, 2), (4, 4, 4, 4, 3, 3)]) for _ in "kv"] for _ in range(layers)]
    return [components(*widths) for widths in drawn]


def taken(layout):
    """Layer of the page -> (first byte, end) of each part in it, in order."""
    found = defaultdict(list)
    for layer in layout.layers:
        for part in (*layer.keys.values(), *layer.values.values()):
            found[part.layer].append((part.offset, part.offset + part.nbytes(layout.block_size)))
    return {layer: sorted(parts) for layer, parts in found.items()}


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_different_layers_share_pages(seed):
    """A page has the mean of the layers' bytes, and less than two of the smallest parts more (each part is a multiple
    of these); parts are within pages and do not overlap."""
    plans = uneven(seed)
    one = cache_layout(plans, SMOLLM2)
    mean = sum(layer.nbytes for layer in one.layers) / SMOLLM2.layers
    gain = SMOLLM2.kv_heads * one.block_size
    assert mean <= one.page_bytes < mean + 2 * gain < max(layer.nbytes for layer in one.layers) / 1.4
    assert one.unused == pytest.approx(1 - mean / one.page_bytes) and one.unused < 0.06
    for parts in taken(one).values():
        assert all(first % 16 == 0 for first, _ in parts) and parts[-1][1] <= one.page_bytes
        assert all(end <= first for (_, end), (first, _) in zip(parts, parts[1:], strict=False))
    assert sum(map(len, taken(one).values())) == sum(len(x.keys) + len(x.values) for x in one.layers)
    assert one == cache_layout(plans, SMOLLM2) == cache_layout(uneven(seed), SMOLLM2)
    assert one.blocks(256 * MIB) == 256 * MIB // (SMOLLM2.layers * one.page_bytes)
    assert one.bits(SMOLLM2) == pytest.approx(8 * one.page_bytes / one.block_size / 384)


@pytest.mark.parametrize("method", ["fp16", "kivi:residual=32", "turboquant", "innerq:norm=off"])
def test_layers_that_are_alike_have_pages_of_their_own(method):
    one = layout(method)
    for number, layer in enumerate(one.layers):
        parts = [*layer.keys.values(), *layer.values.values()]
        assert {part.layer for part in parts} == {number} and layer.nbytes == one.page_bytes
        assert [part.offset for part in parts] == sorted(part.offset for part in parts)


def test_ranks_with_different_layers_have_pages_of_one_size():
    """That of the rank with more bytes; each rank's parts are in its own layers."""
    shape = replace(SMOLLM2, layers=4)
    ranks = [[components((1,), (1,))] * 2 + [components((2,), (3,))] * 2, uneven(5, 4)]
    both = cache_layout([plan for rank in ranks for plan in rank], shape, 64)
    alone = [cache_layout(rank, shape, 64) for rank in ranks]
    assert both.page_bytes == max(one.page_bytes for one in alone) > alone[0].page_bytes
    assert both.of_rank(1, 4).layers == alone[1].layers
    for rank in range(2):
        mine = both.of_rank(rank, 4)
        assert set(taken(mine)) <= set(range(4)) and [x.nbytes for x in mine.layers] == [
            x.nbytes for x in alone[rank].layers
        ]


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=12))
def test_pages_have_room_for_all_parts(layers):
    sizes = [[16 * size for size in parts] for parts in layers]
    page, (numbers,) = least_page([sizes], 16)
    held = [0] * len(sizes)
    for parts, pages in zip(sizes, numbers, strict=True):
        for size, number in zip(parts, pages, strict=True):
            held[number] += size
    assert max(held) <= page <= max(map(sum, sizes)) and page % 16 == 0


def test_a_page_has_room_for_the_largest_part():
    """A part is not divided: of one layer with 4 bits among many with few, the page holds its keys' codes."""
    one = cache_layout([components((4,) * 8, (1,)), *[components((1,), (1,))] * 29], SMOLLM2, 64)
    assert one.page_bytes == one.layers[0].keys["codes8"].nbytes(64) == 64 * 3 * 32
