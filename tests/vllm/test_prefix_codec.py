"""Blocks of a prefix store as bytes: codes, pages of vLLM's caches and of kvq's."""

from dataclasses import replace

import pytest
import torch
from prefix_blocks import ROTATION, SHAPE, SIZE, coded_blocks, plans, stock_caches, stock_pages
from random_transforms import random_transform

from kvq_cli.codecs.transform import same_widths
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.prefix_store.pages import kvq_sides, packed_pages, stock_sides
from kvq_cli.vllm.prefix_store.records import PackedBlocks, coded_records
from kvq_cli.vllm.rope import unrotate


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("text", ["klt", "klt:join_keys=on:join_values=on"])
def test_codes_are_those_of_the_codec_and_the_first_block_is_exact(text, bits):
    layer_plans, source, target = plans(text, bits), stock_caches(), stock_caches(seed=2)
    ids, indices, into = [4, 1, 7, 2], [0, 1, 2, 40], [3, 8, 0, 5]
    blocks = coded_blocks(stock_pages(source), layer_plans)
    stored = blocks.read(ids, indices)
    assert [len(row) for row in stored] == [blocks.nbytes(index) for index in indices]
    others = [cache.clone() for cache in target]
    coded_blocks(stock_pages(target), layer_plans).write(into, indices, stored)
    for layer, plan in enumerate(layer_plans):
        keys, values = source[layer].chunk(2, dim=-1)
        new_keys, new_values = target[layer].chunk(2, dim=-1)
        assert torch.equal(target[layer][into[0]], source[layer][ids[0]])  # bit for bit
        for old, new, index in list(zip(ids, into, indices, strict=True))[1:]:
            positions = torch.arange(SIZE) + index * SIZE
            before = unrotate(ROTATION, keys[old].float(), positions)[None]
            expected = plan.keys.codec.decode(plan.keys.codec.encode(before), torch.float32)
            assert torch.equal(new_keys[new], ROTATION.at(expected, index * SIZE)[0].to(torch.bfloat16))
            packed = plan.values.codec.encode(values[old][None])
            assert torch.equal(new_values[new], plan.values.codec.decode(packed, torch.bfloat16)[0])
        untouched = [i for i in range(9) if i not in into]
        assert torch.equal(target[layer][untouched], others[layer][untouched])


def test_bytes_of_a_block():
    """The codecs' own, each part aligned to 16 bytes."""
    numbers = SHAPE.kv_heads * SIZE * SHAPE.head_dim  # of the keys of a layer, or of its values
    for bits in (2, 4):
        layer_plans = plans(bits=bits)
        blocks = coded_blocks(stock_pages(stock_caches()), layer_plans)
        assert blocks.nbytes(0) == SHAPE.layers * 2 * numbers * 2
        streams = [stream.codec for plan in layer_plans for stream in plan.kept]
        parts = sum(len(codec.layout(2, 64, "bfloat16").parts) for codec in streams)
        codes = sum(codec.nominal_bits for codec in streams) * numbers / 8
        assert codes <= blocks.nbytes(1) < codes + 16 * parts


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("tokens", [SIZE, SIZE // 2])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"])
def test_pages_of_any_order_in_memory_and_of_part_of_a_block(backend, tokens, order):
    """vLLM's layouts: head by head, token by token, and heads of all pages."""
    source, target = (stock_caches(12, tokens, order, seed) for seed in (1, 2))
    stored = coded_blocks(stock_pages(source, backend), None).read([1, 4], [0, 1])
    coded_blocks(stock_pages(target, backend), None).write([2, 5], [0, 1], stored)
    ratio = SIZE // tokens
    for a, b in zip(source, target, strict=True):
        for old, new in ((1, 2), (4, 5)):
            assert torch.equal(a[old * ratio : (old + 1) * ratio], b[new * ratio : (new + 1) * ratio])
    keys, _ = stock_pages(source, backend).read(0, torch.tensor([1]))
    of_token = source[0][ratio + (SIZE - 1) // tokens, 1, -1, :64]
    assert torch.equal(keys[0, 1, SIZE - 1], of_token)


@pytest.mark.parametrize(
    ("backend", "heads", "dtype", "message"),
    [
        ("ROCM_ATTN", 2, torch.bfloat16, "--attention-backend ROCM_ATTN: its pages are not known"),
        ("CPU_ATTN", 2, torch.bfloat16, "--attention-backend CPU_ATTN: its pages are not known"),
        ("FLASH_ATTN", 3, torch.bfloat16, "needs caches"),
        ("FLASH_ATTN", 2, torch.float16, "needs caches"),
    ],
)
def test_unknown_pages_are_refused(backend, heads, dtype, message):
    with pytest.raises(UsageError, match=message):
        stock_sides(stock_caches()[0], backend, heads, 64, dtype)


def test_block_sizes_that_cut_codes_are_refused():
    with pytest.raises(UsageError, match="packs 16 tokens together"):
        coded_records(plans(), SHAPE, 24, [ROTATION] * 2)


@pytest.mark.parametrize("method", ["fp16", "turboquant"])
def test_kvqs_own_pages(method):
    """Those of fp16 hold keys and values; others are stored byte for byte."""
    shape = replace(SHAPE, dtype="float32")
    layout = cache_layout([build_parsed(method, bits=2).plan(0, shape, {})] * 2, shape, SIZE)
    source, target = (
        [torch.randint(256, (6, 1, 1, layout.page_bytes), dtype=torch.uint8) for _ in range(2)] for _ in range(2)
    )
    whole = [cache.clone() for cache in target]
    PackedBlocks(packed_pages(target)).write([2, 5], [0, 7], PackedBlocks(packed_pages(source)).read([1, 4], [0, 7]))
    for a, b, before in zip(source, target, whole, strict=True):
        assert torch.equal(a[[1, 4]], b[[2, 5]]) and torch.equal(before[[0, 1, 3, 4]], b[[0, 1, 3, 4]])
    if method == "fp16":
        keys, values = kvq_sides(source, layout)[1]
        numbers = torch.cat([keys[3].flatten(), values[3].flatten()])
        assert torch.equal(numbers.view(torch.uint8), source[1][3, 0, 0])


def test_heads_with_widths_of_their_own():
    """Parts of codecs with a member for each list of heads."""
    method, generator = build_parsed("klt", bits=3), torch.Generator().manual_seed(5)
    rows = [[8, 8, 4, 4, 2, 2, 1, 1], [4, 4, 4, 4, 4, 2, 2, 2]]
    drawn = {kind: random_transform(rows, 2, 64, generator) for kind in "kv"}
    tensors = {f"{kind}.{name}": tensor for kind in "kv" for name, tensor in drawn[kind].items()}
    assert len(same_widths(drawn["k"])) == 2
    layer_plans = [method.plan(0, SHAPE, tensors)] * 2
    source, target = stock_caches(), stock_caches(seed=2)
    stored = coded_blocks(stock_pages(source), layer_plans, 0).read([1], [3])
    coded_blocks(stock_pages(target), layer_plans, 0).write([1], [3], stored)
    codec = layer_plans[0].values.codec
    values = source[0][1].chunk(2, dim=-1)[1][None]
    assert torch.equal(target[0][1].chunk(2, dim=-1)[1], codec.decode(codec.encode(values), torch.bfloat16)[0])
