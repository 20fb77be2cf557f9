"""Block sizes, bytes and numbers of blocks, counted by hand."""

import pytest

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm.layout import cache_layout

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
