"""Steps with drafted tokens, of which later steps overwrite the rejected ones, equal decoding one token at a time."""

from __future__ import annotations

import pytest
import torch
from counted_graphs import RecordedGraph, counted_graphs
from paged_layers import DEVICE, DIM, KERNEL_METHODS, Pages
from tiers import slow, slow_cases

from kvq_cli.vllm.batch import Sequence
from kvq_cli.vllm.metadata import KvqMetadata
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.step import Step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unread_page_ids")]

#: Tokens of sequences before the first step, the tokens decoded, and those drafted in a step at most.
LENGTHS, NEW, DRAFTED = (61, 3, 0, 157), 8, 3
#: By the number of the step and the sequence: drafted tokens, of which the first ones are right.
DRAFTS = (((0, 0), (3, 0), (2, 2), (3, 0)), ((3, 0), (3, 2), (3, 0), (1, 1)), ((3, 3), (3, 1), (3, 3), (3, 1)))


class Texts:
    """Pages of sequences, and the random tokens of each: (queries, keys, values), those of its prompt first."""

    def __init__(self, model, method: str, kernels: PagedKernels | None) -> None:
        self.pages = Pages(model, method, kernels, len(LENGTHS), max(LENGTHS) + NEW + 1 + DRAFTED)
        shape, noise = self.pages.shape, torch.Generator().manual_seed(1)
        heads = shape.query_heads, shape.kv_heads, shape.kv_heads

        def drawn(lengths) -> list[list[torch.Tensor]]:
            return [[torch.randn(n, h, DIM, generator=noise).to(DEVICE) for n in lengths] for h in heads]

        self.right, self.wrong = (drawn([n + NEW + 1 + DRAFTED for n in LENGTHS]) for _ in range(2))
        self.past = list(LENGTHS)
        for row, length in enumerate(LENGTHS):
            if length:
                self.pages.attend(row, row + 1, [0] * len(LENGTHS), *[[x[:length] for x in xs] for xs in self.right])

    def tokens(self, row: int, right: int, wrong: int) -> list[torch.Tensor]:
        """The next `right` tokens of a sequence, then others in place of the `wrong` next ones."""
        at = self.past[row]
        middle, stop = at + right, at + right + wrong
        pairs = zip(self.right, self.wrong, strict=True)
        return [torch.cat([good[row][at:middle], bad[row][middle:stop]]) for good, bad in pairs]

    def codes(self) -> list[torch.Tensor]:
        """What is packed of each sequence."""
        found = []
        for row, past in enumerate(self.past):
            exact = self.pages.exact_blocks[row] if self.pages.size else None
            sequence = Sequence(0, 1, past, self.pages.blocks[row], exact)
            for stream in self.pages.layer.paged:
                stream.open(past, sequence.table, sequence.exact_table)
                for _, _, packed in stream.packed(slice(0, 1), past, 0, past, past):
                    found += [part.tensor.view(torch.uint8) for part in packed.parts.values()]
        return found


def decoded(texts: Texts) -> list[torch.Tensor]:
    """The attention of `NEW` tokens of each sequence, decoded one at a time, `[tokens, query_heads, head_dim]` each."""
    outs = []
    for _ in range(NEW):
        tokens = [texts.tokens(row, 1, 0) for row in range(len(LENGTHS))]
        outs.append(texts.pages.attend(0, len(LENGTHS), texts.past, *zip(*tokens, strict=True)))
        texts.past = [past + 1 for past in texts.past]
    return list(torch.stack(outs, dim=1))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() < 2e-4 * expected.abs().max())


METHODS = ("turboquant", "kivi:sinks=5:recent=7", "temporalkv:outliers=0.01", "klt", "channelkv")


@pytest.mark.parametrize(
    ("method", "by_kernels"),
    [
        ("kivi:residual=32", False),
        ("innerq:norm=off", False),
        ("kvquant", False),
        *((method, False) for method in METHODS),
        *slow_cases(*((method, True) for method in ("kivi:residual=32", *KERNEL_METHODS))),
    ],
)
def test_sequences_with_different_drafts_equal_decoding_one_by_one(one_layer, method, by_kernels):
    """Outputs of right tokens, and codes. Tokens of the last step are right: it packs what it could have in one."""
    plain = Texts(one_layer, method, None)
    expected = decoded(plain)
    texts, number = Texts(one_layer, method, PagedKernels(1024) if by_kernels else None), 0
    assert (texts.pages.layer.kernels is not None) == by_kernels
    while any(past < length + NEW for past, length in zip(texts.past, LENGTHS, strict=True)):
        drafts, tokens, right = DRAFTS[number % len(DRAFTS)], [], []
        for row, (count, good) in enumerate(drafts):
            left = max(0, LENGTHS[row] + NEW - texts.past[row])
            right.append(min(1 + good, left))
            tokens.append(texts.tokens(row, right[-1], 1 + count - right[-1]))
        outs = texts.pages.attend(0, len(LENGTHS), texts.past, *zip(*tokens, strict=True), queries=1 + DRAFTED)
        assert torch.isfinite(outs).all()
        at = 0
        for row, good in enumerate(right):
            done = texts.past[row] - LENGTHS[row]
            assert not good or same(outs[at : at + good], expected[row][done : done + good]), (number, row)
            at += len(tokens[row][0])
            texts.past[row] += good
        number += 1
    assert number > NEW / (1 + DRAFTED)
    codes, same_codes = texts.codes(), plain.codes()
    assert len(codes) > 0 and all(torch.equal(*pair) for pair in zip(codes, same_codes, strict=True))


@pytest.mark.parametrize("method", ["kivi:residual=32", *slow("kvquant", "temporalkv", "fp16")])
def test_a_captured_step_with_drafts_equals_decoding_one_by_one(one_layer, method):
    """Captured once and replayed, with as many drafted tokens in each sequence. One row is no sequence."""
    plain, texts = Texts(one_layer, method, None), Texts(one_layer, method, PagedKernels(1024))
    expected, pages, queries = decoded(plain), texts.pages, DRAFTED
    rows = 2  # the interpreter is slow
    lengths = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)

    def table(blocks: torch.Tensor) -> torch.Tensor:
        return torch.cat([blocks[:rows], torch.zeros_like(blocks[:1])]).int()

    step = Step(lengths, table(pages.blocks), table(pages.exact_blocks) if pages.size else None, None, queries=queries)
    shapes = [x.shape[1:] for x in texts.tokens(0, 1, 0)]
    inputs = [torch.zeros((rows + 1) * queries, *shape, device=DEVICE) for shape in shapes]
    graph, number = None, 0
    while min(past - length for past, length in zip(texts.past[:rows], LENGTHS, strict=False)) < NEW - queries:
        right = [1 + (number + row) % queries for row in range(rows)]
        right = [min(n, LENGTHS[row] + NEW - texts.past[row]) for row, n in enumerate(right)]
        tokens = [texts.tokens(row, n, queries - n) for row, n in enumerate(right)]
        for held, x in zip(inputs, zip(*tokens, strict=True), strict=True):
            held[: rows * queries] = torch.cat(x)
        lengths[:rows] = torch.tensor(texts.past[:rows], dtype=torch.int32) + queries
        if not number:  # compiles kernels, fills tables
            out = pages.layer.attend_each(*inputs, step, DIM**-0.5)
        else:
            if graph is None:
                graph = counted_graphs(DEVICE)()
                out = graph.capture(lambda: pages.layer.attend_each(*inputs, step, DIM**-0.5))
            graph.replay()
        for row, n in enumerate(right):
            done = texts.past[row] - LENGTHS[row]
            at = row * queries
            assert not n or same(out[at : at + n], expected[row][done : done + n]), (number, row)
            texts.past[row] += n
        assert not out[rows * queries :].any()
        number += 1
    assert isinstance(graph, RecordedGraph) or DEVICE.type == "cuda"


def test_rows_of_a_step_with_as_many_drafts_in_each_request():
    """Those of a batch of sequences. The host knows them where vLLM does, and no graph holds the step."""
    blocks, exact = torch.arange(6).view(2, 3).int(), torch.arange(8).view(2, 4).int()
    starts, lengths = torch.tensor([0, 3, 6]), torch.tensor([5, 3], dtype=torch.int32)
    for known, captured in (([5, 3], False), ([5, 3], True), (None, False)):
        metadata = KvqMetadata(starts, lengths, blocks, 3, known, captured, queries=4)
        step, rows = metadata.step(exact), metadata.batch(exact).decoded
        assert rows is not None and rows.places == slice(0, 6)
        assert step.known == (rows.step.known if known and not captured else None)
        for x, same in ((step.lengths, rows.step.lengths), (step.blocks, rows.step.blocks)):
            assert torch.equal(x, same)
        assert step.exact_blocks is not None and torch.equal(step.exact_blocks, rows.step.exact_blocks)
    assert rows.step.lengths.tolist() == [3, 4, 5, 1, 2, 3]
    assert KvqMetadata(starts, lengths, blocks, 0, queries=2).batch(exact).decoded is None
