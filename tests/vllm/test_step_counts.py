"""What a step of vLLM asks of the host in one layer: operations, launches, and reads that wait for the device."""

from __future__ import annotations

import pytest
import torch
from paged_layers import DIM, Pages
from random_artifacts import tiny_model
from step_counts import StepCounts, as_on_a_gpu, counted

from kvq_cli.attention.score_form import PLAIN
from kvq_cli.vllm.batch import Batch, Sequence
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.step import Step

#: Most operations and launches of a layer; it never waits.
PREFILL = {"kivi": 200, "kvquant": 910, "temporalkv": 310, "klt": 375}
#: In a mixed step of 8 rows; and for each further row, of which some pack tokens and others do not.
MIXED, FURTHER_ROW = {"kivi": 58, "kvquant": 250, "temporalkv": 120, "klt": 115}, 1
DECODE = {"kivi": 16, "kvquant": 142, "temporalkv": 42, "klt": 22}
PROMPT, CHUNK = 2048, 512


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


@pytest.fixture(scope="module")
def model():
    """A random Llama of 1 layer, 2 kv heads of 32, in 16 bits."""
    return tiny_model(head_dim=DIM, hidden_size=64, num_hidden_layers=1).half()


def drawn(pages: Pages, tokens: int) -> list[torch.Tensor]:
    """Random queries, keys and values."""
    heads = (pages.shape.query_heads, pages.shape.kv_heads, pages.shape.kv_heads)
    return [torch.randn(tokens, n, DIM).to(pages.shape.torch_dtype) for n in heads]


def step(pages: Pages, pasts: list[int], new: list[int]) -> StepCounts:
    """Counts of the second of two layers, in a step in which row i has new[i] tokens after pasts[i]."""
    sequences, at = [], 0
    for row, (past, count) in enumerate(zip(pasts, new, strict=True)):
        exact = pages.exact_blocks[row] if pages.size else None
        sequences.append(Sequence(at, at + count, past, pages.blocks[row], exact))
        at += count
    batch, tokens = Batch(sequences), drawn(pages, at)
    for layer in pages.layers:
        with counted() as counts:
            layer.attend(*tokens, batch, DIM**-0.5, PLAIN)
    return counts


@pytest.mark.parametrize(("method", "most"), PREFILL.items())
def test_prefill_in_chunks(model, method, most):
    pages, total, waits = Pages(model, method, PagedKernels(PROMPT), 1, PROMPT, layers=2), 0, 0
    for past in range(0, PROMPT, CHUNK):
        counts = step(pages, [past], [CHUNK])
        total, waits = total + counts.total, waits + counts.waits
    print(f"{method}: prefill of {PROMPT} tokens in chunks of {CHUNK}: {total} operations and launches, {waits} waits")
    assert total <= most and not waits


@pytest.mark.parametrize(("method", "most"), MIXED.items())
def test_mixed_step(model, method, most):
    """Decoding rows and a chunk of 64 tokens of one prompt."""
    found = []
    for rows in (2, 8):
        pages = Pages(model, method, PagedKernels(1024), rows + 1, 400, layers=2)
        pasts = [203 + row for row in range(rows)] + [128]  # the first row packs tokens, if any does
        step(pages, [0] * (rows + 1), pasts)
        found.append(step(pages, pasts, [1] * rows + [64]))
    more = (found[1].total - found[0].total) / 6
    print(f"{method}: mixed step of 8 rows: {found[1]}; for each further row: {more:.1f}")
    assert found[1].total <= most and more <= FURTHER_ROW and not found[1].waits


@pytest.mark.parametrize(("method", "most"), DECODE.items())
def test_decode_step(model, method, most):
    rows = 8
    pages = Pages(model, method, PagedKernels(1024), rows, 400, layers=2)
    for row in range(rows):
        step(pages, [0] * (row + 1), [0] * row + [200 + row])
    lengths = torch.arange(201, 201 + rows, dtype=torch.int32)
    given = Step(lengths, pages.blocks.int(), pages.exact_blocks.int() if pages.size else None)
    tokens = drawn(pages, rows)
    for layer in pages.layers:
        assert layer.capturable
        with counted() as counts:
            layer.attend_each(*tokens, given, DIM**-0.5)
    print(f"{method}: decode step: {counts}")
    assert counts.total <= most and not counts.waits
