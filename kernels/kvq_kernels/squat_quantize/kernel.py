"""Quantization with error correction: one program per group of tokens and kv head, block after block of channels.

`launch.py` passes the arguments; packing is in `kvq_kernels/planar.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.planar import (
    column_channels,
    columns,
    high_words,
    low_words,
    pack_high,
    pack_low,
    padded_words,
)
from kvq_kernels.quantize_pack.kernel import to_bits

#: 2^23: adding it to a float32 of at least 0 rounds to the nearest whole number, ties to even.
ROUND_POSITIVE = tl.constexpr(8388608.0)


@triton.jit
def squat_kernel(
    keys,  # [B, H, T, D]
    key_strides,  # of row, head, token
    subspace,  # float32 [B or 1, H, RANK, D]
    move,  # float64 [B or 1, H, blocks - 1, RANK, D]: gain times the subspace after the block, 0 up to it
    codes,  # int32 [B, H, T, words]
    scale,  # [B, H, T / GROUP, D]
    zero,
    rank,
    shared,  # 1: one subspace for all rows
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,  # GROUP, padded to a power of two
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    LEVELS: tl.constexpr = (1 << BITS) - 1
    member = tl.arange(0, N)
    channel = column_channels(BITS, D)
    channel_mask, token_mask = channel < D, member < GROUP
    offset = row.to(tl.int64) * key_strides[0] + head.to(tl.int64) * key_strides[1]
    token = group.to(tl.int64) * GROUP + member
    mask = token_mask[:, None] & channel_mask[None, :]
    x = tl.load(keys + offset + token[:, None] * key_strides[2] + channel[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    state = head.to(tl.int64) if shared else row.to(tl.int64) * heads + head

    words = tl.zeros([N, padded_words(BITS, D)], tl.int32)
    quantized = tl.zeros([N, columns(BITS, D)], tl.int32)
    scales = tl.zeros([columns(BITS, D)], tl.float32)
    zeros = tl.zeros([columns(BITS, D)], tl.float32)
    for block in tl.range(0, BLOCKS):
        in_block = (channel >= block * BLOCK) & (channel < (block + 1) * BLOCK) & channel_mask
        low = tl.min(tl.where(token_mask[:, None], x, float("inf")), axis=0)
        high = tl.max(tl.where(token_mask[:, None], x, float("-inf")), axis=0)
        _, z = to_bits(low + 0.0, zero.dtype.element_ty)  # minus zero becomes zero
        _, s = to_bits(tl.div_rn(high - low, LEVELS * 1.0), scale.dtype.element_ty)
        step = tl.where(s == 0, float("inf"), s)
        distance = tl.div_rn(x - z[None, :], tl.broadcast_to(step[None, :], x.shape))
        whole = tl.minimum(tl.maximum(distance, 0.0), LEVELS * 1.0) + ROUND_POSITIVE
        code = tl.where(in_block[None, :], whole.to(tl.int32, bitcast=True) & LEVELS, 0)
        words += pack_low(code, N, BITS, D)
        if BITS == 3:
            quantized += code
        scales, zeros = tl.where(in_block, s, scales), tl.where(in_block, z, zeros)
        if block < BLOCKS - 1:
            # Columns of the block now hold its errors, others still their numbers.
            x = tl.where(in_block[None, :], (whole - ROUND_POSITIVE) * s[None, :] + z[None, :] - x, x)
            block_move = move + (state * (BLOCKS - 1) + block) * rank * D
            moved = tl.zeros([N, columns(BITS, D)], tl.float64)
            for i in tl.range(0, rank):
                direction = tl.load(subspace + (state * rank + i) * D + channel, mask=in_block, other=0.0)
                along = tl.sum(x.to(tl.float64) * direction.to(tl.float64)[None, :], axis=1)
                moved += along[:, None] * tl.load(block_move + i * D + channel, mask=channel_mask, other=0.0)[None, :]
            x -= moved.to(tl.float32)

    line = (row.to(tl.int64) * heads + head) * tl.num_programs(0)
    W: tl.constexpr = low_words(BITS, D)
    ROW: tl.constexpr = W + high_words(BITS, D)
    first = codes + (line * GROUP + token) * ROW
    word = tl.arange(0, padded_words(BITS, D))
    tl.store(first[:, None] + word[None, :], words, mask=token_mask[:, None] & (word < W)[None, :])
    for high_word in tl.static_range(ROW - W):
        tl.store(first + W + high_word, pack_high(quantized, channel, high_word, D), mask=token_mask)
    per_group = (line + group) * D + channel
    tl.store(scale + per_group, scales.to(scale.dtype.element_ty), mask=channel_mask)
    tl.store(zero + per_group, zeros.to(zero.dtype.element_ty), mask=channel_mask)
