"""Planar bit packing against the definition of the layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_cli.codecs import bits as bitpack

BITS = (1, 2, 3, 4, 8)


def random_codes(seed: int, shape: tuple[int, ...], bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(BITS), st.one_of(st.sampled_from([64, 80, 96, 128, 256]), st.integers(1, 300)), st.integers(0, 99)
)
def test_round_trip(bits, count, seed):
    codes = random_codes(seed, (2, 3, 5, count), bits)
    words = bitpack.pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (2, 3, 5, bitpack.words_per_row(bits, count))
    assert torch.equal(bitpack.unpack(words, bits, count), codes)


@pytest.mark.parametrize("count", [1, 31, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", BITS)
def test_bit_positions_follow_the_layout(bits, count):
    codes = random_codes(count, (count,), bits)
    words = bitpack.pack(codes, bits).numpy().view(np.uint32).tolist()
    parts, at, low = ((2, 1) if bits == 3 else (bits,)), 0, 0
    read = [0] * count
    for part in parts:
        row = -(-count * part // 32)
        for c in range(count):
            read[c] |= ((words[at + c % row] >> (part * (c // row))) & (2**part - 1)) << low
        at, low = at + row, low + part
    assert at == len(words)
    assert read == codes.tolist()


@pytest.mark.parametrize(
    ("bits", "count", "words"), [(2, 64, 4), (1, 64, 2), (3, 64, 6), (4, 80, 10), (2, 80, 5), (1, 80, 3)]
)
def test_words_per_row_is_minimal(bits, count, words):
    assert bitpack.words_per_row(bits, count) == words


@pytest.mark.parametrize("bits", BITS)
def test_unpack_reads_slices_of_a_larger_tensor(bits):
    codes = random_codes(1, (2, 2, 20, 80), bits)
    words = bitpack.pack(codes, bits)
    assert torch.equal(bitpack.unpack(words[:, :, 3:11], bits, 80), codes[:, :, 3:11])
