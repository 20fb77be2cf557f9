"""Kernels decode the sequences of a step from vLLM's pages, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from tiers import slow

from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import model_shape
from kvq_cli.vllm import rope
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.paged_layer import Batch, PagedLayer, Sequence
from kvq_cli.vllm.pages import shifts
from kvq_cli.vllm.shard import WHOLE, Shard

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, DIM = 2, 32
#: Tokens of each sequence before the step, and its new tokens: before, at and after the first flush, several pages.
LENGTHS, NEW = (3, 0, 41, 150, 64), (1, 1, 1, 1, 9)


@pytest.fixture(scope="module")
def model():
    """A random Llama of 1 layer, 2 kv heads of 32."""
    return tiny_model(head_dim=DIM, hidden_size=64, num_hidden_layers=1)


class Pages:
    """A layer and pages for `LENGTHS` in shuffled blocks; those that are not in use have bits of NaN."""

    def __init__(self, model, method: str, kernels: PagedKernels | None, shard: Shard = WHOLE) -> None:
        whole, built = model_shape(model), build_parsed(method, bits=2)
        self.shape = shape = shard.shape(whole)
        tensors = {}
        if built.calibrates:
            _, drawn = random_parts(built, model)
            tensors = {name.removeprefix("layers.0."): x.to(DEVICE) for name, x in drawn.items()}
        self.plan = shard.plan(built, 0, whole, tensors)
        self.layout = cache_layout([self.plan], shape)
        rotation = rope.unrotated(DIM)
        if self.plan.keys.source == "pre_rope":
            rotation = rope.layer_rotations(model.config, DIM)[0]
        assert isinstance(rotation, Rotation)
        self.layer = PagedLayer(0, self.plan, shape, self.layout, rotation, kernels)
        size = self.layout.exact.block_size if self.layout.exact else 0
        noise = torch.Generator().manual_seed(0)
        longest = max(LENGTHS) + max(NEW)
        blocks = -(-longest // self.layout.block_size) + 1
        exact = -(-longest // size) + 1 if size else 0
        rows, count = len(LENGTHS), len(LENGTHS) * (blocks + exact)
        pool = torch.full((count, self.layout.page_bytes), 255, dtype=torch.uint8, device=DEVICE)
        order = torch.randperm(count, generator=noise).to(DEVICE)
        self.blocks, self.exact_blocks = order[: rows * blocks].view(rows, -1), order[rows * blocks :].view(rows, -1)
        self.layer.bind(pool, pool if size else None)
        self.size = size

    def attend(self, begin: int, end: int, pasts, query, key, value, form=PLAIN):
        """A step in which row i of begin..end has the next tokens of `query[i]`."""
        sequences, at = [], 0
        for row in range(begin, end):
            new = len(query[row])
            exact = self.exact_blocks[row] if self.size else None
            sequences.append(Sequence(at, at + new, pasts[row], self.blocks[row], exact))
            at += new
        q, k, v = (torch.cat(x[begin:end]) for x in (query, key, value))
        return self.layer.attend(q, k, v, Batch(sequences), DIM**-0.5, form)


def steps(pages: Pages, form=PLAIN):
    """The attention of the last step, in which rows have `NEW` tokens."""
    noise, shape = torch.Generator().manual_seed(1), pages.shape

    def drawn(heads: int, lengths) -> list[torch.Tensor]:
        return [torch.randn(n, heads, DIM, generator=noise).to(DEVICE) for n in lengths]

    heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
    before, last = ([drawn(n, lengths) for n in heads] for lengths in (LENGTHS, NEW))
    for row, length in enumerate(LENGTHS):
        if length:
            pages.attend(row, row + 1, [0] * len(LENGTHS), *before)
    return pages.attend(0, len(LENGTHS), LENGTHS, *last, form=form)


def compare(model, method: str, form=PLAIN, shard: Shard = WHOLE) -> PagedLayer:
    expected = steps(Pages(model, method, None, shard), form)
    pages = Pages(model, method, PagedKernels(1024), shard)
    actual = steps(pages, form)
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() < 2e-4 * expected.abs().max()
    return pages.layer


@pytest.mark.parametrize(
    "method",
    [
        "kivi:residual=32",
        "temporalkv:outliers=0.01:hybrid=head",
        *slow(
            "fp16",
            "kivi:sinks=5:recent=31",
            "kivi:pre_rope=on:residual=32",
            "innerq:norm=off",
            "innerq:norm=off:mode=symmetric:sinks=3:recent=29",
            "kvquant",
            "kvquant:outliers=0",
            "channelkv:outliers=0.01:sinks=0",
            "temporalkv",
        ),
    ],
)
def test_kernels_and_the_reference_agree(model, method):
    """Rows of different lengths, some without packed tokens, one with several new tokens, which the reference takes."""
    layer = compare(model, method)
    assert layer.kernels is not None


@pytest.mark.parametrize("method", ["kvquant:outliers=0.05"])
def test_kernels_read_the_outliers_of_a_rank(model, method):
    """The second of two ranks, whose outliers are behind those of the first; the first has larger values."""
    ranks = Shard(1, 2, lambda own: torch.cat([own.flip(3) * 1.2, own], dim=1))
    assert compare(model, method, shard=ranks).kernels is not None


def test_layers_that_kernels_cannot_read_are_computed_by_the_reference(model):
    """TurboQuant rotates channels; keys and values of this KIVI begin at different places; capped scores."""
    assert compare(model, "turboquant").kernels is None
    layer = compare(model, "kivi:sinks=5:recent=7")
    assert layer.kernels is None and layer.key_shift == 32 and layer.value_shift == 5
    compare(model, "kivi:residual=32", ScoreForm.of(3.0, None))


def test_one_place_for_both_needs_no_more_blocks(model):
    """The tokens that are packed end within the blocks of the tokens that there are."""
    for method in ("kivi:sinks=5:recent=31", "kivi:sinks=5:recent=7", "temporalkv:sinks=3", "innerq:norm=off:sinks=1"):
        plan = Pages(model, method, None).plan
        size = cache_layout([plan], model_shape(model)).block_size
        for stream, shift in zip((plan.keys, plan.values), shifts(plan.keys, plan.values), strict=True):
            for tokens in range(1, 3 * size):
                packed = stream.window.packed(tokens)
                assert not packed or shift + packed <= -(-tokens // size) * size, (method, tokens)
