"""A step of vLLM in which all sequences decode one token is captured once and replayed as sequences grow."""

from __future__ import annotations

import copy

import pytest
import torch
from counted_graphs import RecordedGraph, counted_graphs
from paged_layers import DEVICE, DIM, KERNEL_METHODS, Pages
from tiers import slow, slow_cases

from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.step import Step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unread_page_ids")]

#: Tokens of sequences before the first step; others pack tokens in a step that is replayed: see `lengths_of`.
LENGTHS, STEPS = (3, 0, 61, 155), 5


def lengths_of(model, method: str) -> list[int]:
    """`LENGTHS`, and one sequence per stream that packs tokens in step 3."""
    windows = [stream.window for stream in Pages(model, method, None, 1, 1).layer.paged]
    return [*LENGTHS, *(max(1, w.sinks + w.recent + 2 * w.flush - 4) for w in windows)]


def filled(model, method: str, kernels: PagedKernels | None, lengths: list[int]) -> Pages:
    """Pages with a prompt of so many tokens each."""
    pages = Pages(model, method, kernels, len(lengths), max(lengths) + STEPS)
    noise = torch.Generator().manual_seed(1)
    prompts = [drawn(pages, length, noise) for length in lengths]
    for row, length in enumerate(lengths):
        if length:
            pages.attend(row, row + 1, [0] * len(lengths), *zip(*prompts, strict=True))
    return pages


def drawn(pages: Pages, tokens: int, noise: torch.Generator) -> list[torch.Tensor]:
    """Random queries, keys and values."""
    heads = (pages.shape.query_heads, pages.shape.kv_heads, pages.shape.kv_heads)
    return [torch.randn(tokens, n, DIM, generator=noise).to(DEVICE, pages.shape.torch_dtype) for n in heads]


OTHERS = (*KERNEL_METHODS, "channelkv", "temporalkv:sinks=3:recent=20:hybrid=head")


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("kivi:residual=32", torch.float32),
        *slow_cases(*((method, torch.float32) for method in OTHERS), ("klt:sinks=8:recent=24", torch.float16)),
    ],
)
def test_replayed_steps_equal_the_reference(one_layer, method, dtype):
    """Outputs, and the bytes of all pages but page 0. Two rows have no sequence, as vLLM fills up a captured batch."""
    model, tolerance = copy.deepcopy(one_layer).to(dtype), max(2e-4, 8 * torch.finfo(dtype).eps)
    before = lengths_of(model, method)
    plain, pages = (filled(model, method, kernels, before) for kernels in (None, PagedKernels(1024)))
    assert pages.layer.capturable and not plain.layer.capturable
    rows, padded, noise = len(before), len(before) + 2, torch.Generator().manual_seed(2)
    inputs = [torch.zeros(padded, *x.shape[1:], dtype=dtype, device=DEVICE) for x in drawn(pages, 1, noise)]

    def table(blocks: torch.Tensor) -> torch.Tensor:
        return torch.cat([blocks, torch.zeros_like(blocks[:2])]).int()

    lengths = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
    step = Step(lengths, table(pages.blocks), table(pages.exact_blocks) if pages.size else None)
    graph = None
    for number in range(STEPS):
        tokens = drawn(pages, rows, noise)
        pasts = [length + number for length in before]
        expected = plain.attend(0, rows, pasts, *([one[None] for one in x] for x in tokens))
        for held, x in zip(inputs, tokens, strict=True):
            held[:rows] = x
        lengths[:rows] = torch.tensor(pasts, dtype=torch.int32) + 1
        if not number:  # compiles kernels, fills tables
            out = pages.layer.attend_each(*inputs, step, DIM**-0.5)
        else:
            if graph is None:
                graph = counted_graphs(DEVICE)()
                out = graph.capture(lambda: pages.layer.attend_each(*inputs, step, DIM**-0.5))
            graph.replay()
        assert (out[:rows] - expected).abs().max() < tolerance * expected.abs().max(), number
        assert not out[rows:].any()
    assert isinstance(graph, RecordedGraph) or DEVICE.type == "cuda"
    assert torch.equal(pages.pool[1:], plain.pool[1:])


@pytest.mark.parametrize("method", ["oscar-omni", "temporalkv:outliers=0.01", "kivi:sinks=5:recent=7"])
def test_what_a_graph_cannot_hold(one_layer, method):
    """No kernels; an encoder that looks for the blocks with outliers; keys and values at different places."""
    assert not Pages(one_layer, method, PagedKernels(1024), 1, 40).layer.capturable


@pytest.mark.parametrize("method", ["kivi:residual=32", *slow("kvquant", "temporalkv", "kivi:sinks=5:recent=31")])
def test_rows_that_pack_nothing_encode_nothing(one_layer, method, monkeypatch):
    """Where the host knows the lengths: the same outputs and bytes of all pages but page 0."""
    before, encoded = lengths_of(one_layer, method), [0, 0]
    known, unknown = (filled(one_layer, method, PagedKernels(1024), before) for _ in range(2))
    for side, stream in enumerate(known.layer.paged):
        encode = stream.codec.encode
        monkeypatch.setattr(
            stream.codec, "encode", lambda x, side=side, encode=encode: (count(encoded, side, x), encode(x))[1]
        )
    noise, due = torch.Generator().manual_seed(2), [0, 0]
    for number in range(STEPS):
        tokens, outs = drawn(known, len(before), noise), []
        after = [length + number + 1 for length in before]
        for pages, told in ((known, after), (unknown, None)):
            lengths = torch.tensor(after, dtype=torch.int32, device=DEVICE)
            step = Step(lengths, pages.blocks.int(), pages.exact_blocks.int() if pages.size else None, told)
            outs.append(pages.layer.attend_each(*tokens, step, DIM**-0.5))
        assert torch.equal(*outs)
        for side, stream in enumerate(known.layer.paged):
            packed = stream.window.packed
            due[side] += sum((packed(n) - packed(n - 1)) // stream.window.flush for n in after)
    assert torch.equal(known.pool[1:], unknown.pool[1:])
    assert encoded == due and due[0] > 0


def count(encoded: list[int], side: int, x: torch.Tensor) -> None:
    """Count the rows of `x`."""
    encoded[side] += len(x)
