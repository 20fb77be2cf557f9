"""A sequence can share blocks that another one computes in the same step: vLLM publishes them when it schedules it."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from paged_layers import DEVICE, DIM, Pages
from random_artifacts import tiny_model
from tiers import slow

from kvq_cli.attention.score_form import PLAIN
from kvq_cli.vllm.batch import Batch, Sequence
from kvq_cli.vllm.paged_decode import PagedKernels

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model():
    """A random Llama of 1 layer, 2 kv heads of 32."""
    return tiny_model(head_dim=DIM, hidden_size=64, num_hidden_layers=1)


def attended(
    model, method: str, kernels: bool, new: int, shared_first: bool
) -> tuple[torch.Tensor, torch.Tensor, Pages]:
    """(outputs of the sequence whose blocks are shared, of the sequence with a prefix hit on its first block, pages).

    new: tokens of the second sequence behind the prefix hit. shared_first: the order of the two in the batch.
    """
    pages = Pages(model, method, PagedKernels(1024) if kernels else None, 2, 300)
    hit = pages.layout.block_size
    blocks, exact = pages.blocks.clone(), pages.exact_blocks.clone()
    blocks[1, 0] = blocks[0, 0]
    if pages.size:
        exact[1, : hit // pages.size] = exact[0, : hit // pages.size]
    noise, shape = torch.Generator().manual_seed(1), pages.shape
    counts, pasts, order = (hit + 3, new), (0, hit), (0, 1) if shared_first else (1, 0)
    tokens = [
        [torch.randn(n, heads, DIM, generator=noise).to(DEVICE) for n in counts]
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    ]
    sequences, start = [], 0
    for row in order:
        stop = start + counts[row]
        sequences.append(Sequence(start, stop, pasts[row], blocks[row], exact[row] if pages.size else None))
        start = stop
    query, key, value = (torch.cat([x[row] for row in order]) for x in tokens)
    out = pages.layer.attend(query, key, value, Batch(sequences), DIM**-0.5, PLAIN)
    parts = dict(zip(order, out.split([counts[row] for row in order]), strict=True))
    return parts[0], parts[1], pages


@pytest.mark.parametrize("new", [1, 150])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
@pytest.mark.parametrize("method", ["kivi:residual=32", *slow("fp16", "temporalkv", "turboquant")])
def test_prefix_hit_on_a_block_of_the_same_step(model, method, kernels, new):
    """The order of requests in the batch changes no output and no byte; pages that are read too early hold NaN."""
    *expected, pages = attended(model, method, kernels, new, shared_first=True)
    *actual, other = attended(model, method, kernels, new, shared_first=False)
    assert torch.isfinite(torch.cat(actual)).all()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(other.pool, pages.pool)


@pytest.mark.parametrize("method", ["kivi:residual=32", *slow("temporalkv")])
def test_decoded_and_prompt_tokens_of_one_step_share_blocks(model, method):
    """A decoded token completes a block, on which a prompt and a last prompt token have prefix hits."""
    found = []
    for order in permutations(range(3)):
        pages = Pages(model, method, PagedKernels(1024), 3, 300)
        hit = pages.layout.block_size
        counts, pasts, blocks, exact = (1, 150, 1), (hit - 1, hit, hit), pages.blocks, pages.exact_blocks
        blocks[1:, 0] = blocks[0, 0]
        exact[1:, : hit // pages.size] = exact[0, : hit // pages.size]
        noise, heads = torch.Generator().manual_seed(1), (pages.shape.query_heads, *[pages.shape.kv_heads] * 2)
        before, *new = [
            [torch.randn(n, count, DIM, generator=noise).to(DEVICE) for count in heads] for n in (hit - 1, *counts)
        ]
        pages.attend(0, 1, [0], *([x] for x in before))
        sequences, start = [], 0
        for row in order:
            sequences.append(Sequence(start, start + counts[row], pasts[row], blocks[row], exact[row]))
            start += counts[row]
        tokens = (torch.cat([new[row][side] for row in order]) for side in range(3))
        out = pages.layer.attend(*tokens, Batch(sequences), DIM**-0.5, PLAIN)
        parts = dict(zip(order, out.split([counts[row] for row in order]), strict=True))
        found.append((torch.cat([parts[row] for row in range(3)]), pages.pool))
    for out, pool in found:
        assert torch.isfinite(out).all()
        assert torch.equal(out, found[0][0]) and torch.equal(pool, found[0][1])


def test_ranks_append_in_one_order():
    """Codecs exchange tokens between ranks: sequences of equal length keep the order of the batch."""
    empty, pasts = torch.empty(0), (64, 0, 5, 64, 0)
    batch = Batch([Sequence(i, i + 1, past, empty, None) for i, past in enumerate(pasts)])
    assert [sequence.start for sequence in batch.writers_first] == [1, 4, 2, 0, 3]
