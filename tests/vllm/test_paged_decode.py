"""Kernels decode the sequences of a step from vLLM's pages, in Triton's interpreter where there is no GPU."""

import copy
from dataclasses import dataclass
from weakref import ref

import pytest
import torch
from kvq_kernels.decode_attention import Workspace
from kvq_kernels.decode_attention.formats import transformed
from paged_layers import DEVICE, DIM, KERNEL_METHODS, Pages
from random_artifacts import tiny_model
from random_transforms import random_transform
from tiers import slow

from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.methods.base import LayerPlan, StreamPlan
from kvq_cli.methods.window import Window
from kvq_cli.models import model_shape
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.paged_layer import PagedLayer
from kvq_cli.vllm.pages import shifts
from kvq_cli.vllm.shard import WHOLE, Shard

#: Tokens of each sequence before the step, and its new tokens: before, at and after the first flush, several pages.
LENGTHS, NEW = (3, 0, 41, 150, 64), (1, 1, 1, 1, 9)


@pytest.fixture(scope="module")
def model():
    """A random Llama of 1 layer, 2 kv heads of 32."""
    return tiny_model(head_dim=DIM, hidden_size=64, num_hidden_layers=1)


def paged(model, method: str, kernels: PagedKernels | None, shard: Shard = WHOLE, **options) -> Pages:
    return Pages(model, method, kernels, len(LENGTHS), max(LENGTHS) + max(NEW), shard, **options)


def steps(pages: Pages, form=PLAIN):
    """The attention of the last step of the first layer, in which rows have `NEW` tokens."""
    return steps_of_layers(pages, [1], form)[0]


def steps_of_layers(pages: Pages, seeds, form=PLAIN):
    """The same of each layer, whose tokens are drawn by a seed of its own; prompts of all layers come first."""
    drawn = [_drawn(pages.shape, seed) for seed in seeds]
    for layer, (before, _) in enumerate(drawn):
        for row, length in enumerate(LENGTHS):
            if length:
                pages.attend(row, row + 1, [0] * len(LENGTHS), *before, layer=layer)
    lasts = [last for _, last in drawn]
    return [pages.attend(0, len(LENGTHS), LENGTHS, *last, form, layer) for layer, last in enumerate(lasts)]


def _drawn(shape, seed: int):
    """Random (queries, keys, values) of each row: of the prompts, and of the last step."""
    noise = torch.Generator().manual_seed(seed)

    def drawn(heads: int, lengths) -> list[torch.Tensor]:
        return [torch.randn(n, heads, DIM, generator=noise).to(DEVICE, shape.torch_dtype) for n in lengths]

    heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
    return [[drawn(n, lengths) for n in heads] for lengths in (LENGTHS, NEW)]


def compare(model, method: str, form=PLAIN, shard: Shard = WHOLE, tolerance: float = 2e-4) -> PagedLayer:
    expected = steps(paged(model, method, None, shard), form)
    pages = paged(model, method, PagedKernels(1024), shard)
    actual = steps(pages, form)
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
    return pages.layer


@pytest.mark.parametrize(
    "method",
    [
        "kivi:residual=32",
        "kivi:residual=32:rotation=hadamard",
        "turboquant",
        "temporalkv:outliers=0.01:hybrid=head",
        *slow(*KERNEL_METHODS, "channelkv:outliers=0.01:sinks=0"),
    ],
)
def test_kernels_and_the_reference_agree(model, method):
    """Rows of different lengths, some without packed tokens, one with several new tokens, which the reference takes."""
    layer = compare(model, method)
    assert layer.kernels is not None


class ByHead(Shard):
    """Codes of components with other widths for each of two heads, in place of the method's."""

    def plan(self, method, layer, shape, tensors) -> LayerPlan:
        device, streams = tensors["k.mean"].device, []
        for source, profiles in (("pre_rope", ((3, 2, 2, 1), (2, 2))), ("value", ((2, 1), (4, 3, 1)))):
            members = {}
            for head, widths in enumerate(profiles):
                drawn = random_transform(widths, 1, DIM, torch.Generator().manual_seed(head))
                own = {name: x.to(device) for name, x in drawn.items()}
                members[f"profile{head}"] = TransformCodec(1, own, source == "value"), [1 - head]
            streams.append(StreamPlan(source, PerHeadCodec(members, device), Window(8, 5, 16)))
        return LayerPlan(*streams)


@pytest.mark.parametrize("shard", [WHOLE, ByHead(0, 1)], ids=["alike", "by_head"])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)])
def test_kernels_read_codes_of_components(model, dtype, shard):
    """In pages of whole tiles. Codes of token 8, the first behind the sinks, are at place 16."""
    given = copy.deepcopy(model).to(dtype)
    layer = compare(given, "klt", shard=shard, tolerance=max(2e-4, 8 * torch.finfo(dtype).eps))
    assert layer.kernels is not None and layer.key_shift == 16 and layer.paged[0].block_size % 64 == 0


def test_operands_of_a_transform_are_made_once(model, monkeypatch):
    """vLLM makes a layer twice: to ask whether a CUDA graph can hold it, and to use it."""
    operands, made = transformed.Operands, []
    monkeypatch.setattr(transformed, "Operands", lambda *args: made.append(1) or operands(*args))
    pages = paged(copy.deepcopy(model).half(), "klt", PagedKernels(1024))
    assert len(made) == 2
    layer = pages.layer
    PagedLayer(0, pages.plan, pages.shape, pages.layout, layer.rotation, layer.kernels)
    steps(pages)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("klt:join_keys=on", torch.float16), ("klt:join_values=on", torch.bfloat16), ("klt", torch.float32)],
)
def test_the_reference_reads_codes_that_the_kernel_would_unpack(model, method, dtype):
    """It reads the tokens that there are; the kernels' way is to unpack room for the longest sequence in every row."""
    layer = compare(copy.deepcopy(model).to(dtype), method, tolerance=max(2e-4, 8 * torch.finfo(dtype).eps))
    assert layer.kernels is None and not layer.capturable


@dataclass(frozen=True)
class ByLayer(Shard):
    """Codes of components with the `WIDTHS` of a layer, in place of the method's. only: those of one layer."""

    only: int | None = None

    def plan(self, method, layer, shape, tensors) -> LayerPlan:
        return _plan_of(WIDTHS[layer if self.only is None else self.only], tensors["k.mean"].device)


#: Of the keys and values of three layers.
WIDTHS = (((4, 4, 4, 4), (3, 2, 2, 1)), ((1,), (2,)), ((2, 2), (1, 1, 1, 1)))


def _plan_of(widths, device) -> LayerPlan:
    streams = []
    for source, own in zip(("pre_rope", "value"), widths, strict=True):
        drawn = random_transform(own, 2, DIM, torch.Generator().manual_seed(len(own)))
        codec = TransformCodec(2, {name: x.to(device) for name, x in drawn.items()}, source == "value")
        streams.append(StreamPlan(source, codec, Window(8, 5, 16)))
    return LayerPlan(*streams)


@pytest.mark.parametrize("kernels", [None, *slow(PagedKernels(1024))], ids=lambda kernels: "kernels" if kernels else "")
def test_parts_in_pages_of_other_layers(model, kernels):
    """All layers are written, then read: as each of them alone, with pages of its own."""
    model = copy.deepcopy(model).half()
    pages, count = paged(model, "klt", kernels, ByLayer(), layers=len(WIDTHS), block_size=64), len(WIDTHS)
    assert all(layer.kernels is kernels for layer in pages.layers)
    elsewhere = [part for i, one in enumerate(pages.layout.layers) for part in one.keys.values() if part.layer != i]
    assert elsewhere and pages.layout.page_bytes < pages.layout.layers[0].nbytes
    for layer, out in enumerate(steps_of_layers(pages, range(count))):
        alone = paged(model, "klt", kernels, ByLayer(only=layer), block_size=64)
        expected = steps_of_layers(alone, [layer])[0]
        assert torch.isfinite(out).all() and torch.equal(out, expected)
        for packed, own in zip(pages.layers[layer].paged, alone.layer.paged, strict=True):
            for name, part in packed.parts.items():
                assert torch.equal(part.tensor[pages.blocks], own.parts[name].tensor[alone.blocks])


@pytest.mark.parametrize("method", ["kvquant:outliers=0.05"])
def test_kernels_read_the_outliers_of_a_rank(model, method):
    """The second of two ranks, whose outliers are behind those of the first; the first has larger values."""
    ranks = Shard(1, 2, lambda own: torch.cat([own.flip(3) * 1.2, own], dim=1))
    assert compare(model, method, shard=ranks).kernels is not None


def test_batch_sizes_keep_no_workspace(model, monkeypatch):
    """vLLM's steps have hundreds of batch sizes; the largest workspaces have hundreds of MiB."""
    pages, made, like = paged(model, "fp16", PagedKernels(1024)), [], Workspace.like
    heads, noise = (pages.shape.query_heads, pages.shape.kv_heads, pages.shape.kv_heads), torch.Generator()

    def watched(*args):
        workspace = like(*args)
        made.append(ref(workspace.partial))
        return workspace

    monkeypatch.setattr(Workspace, "like", watched)
    for rows in (1, 2, 3):
        tokens = [[torch.randn(1, n, DIM, generator=noise).to(DEVICE)] * rows for n in heads]
        pages.attend(0, rows, [0] * rows, *tokens)
    assert len(made) == 3 and not any(alive() is not None for alive in made)


def test_layers_that_kernels_cannot_read_are_computed_by_the_reference(model):
    """No kernel has OSCAR-Omni's norms; keys and values of this KIVI begin at different places; capped scores."""
    assert compare(model, "oscar-omni").kernels is None
    layer = compare(model, "kivi:sinks=5:recent=7")
    assert layer.kernels is None and layer.key_shift == 32 and layer.value_shift == 5
    compare(model, "kivi:residual=32", ScoreForm.of(3.0, None))


def test_one_place_for_both_needs_no_more_blocks(model):
    """The tokens that are packed end within the blocks of the tokens that there are."""
    for method in ("kivi:sinks=5:recent=31", "kivi:sinks=5:recent=7", "temporalkv:sinks=3", "innerq:norm=off:sinks=1"):
        plan = paged(model, method, None).plan
        size = cache_layout([plan], model_shape(model)).block_size
        for stream, shift in zip((plan.keys, plan.values), shifts(plan.keys, plan.values), strict=True):
            for tokens in range(1, 3 * size):
                packed = stream.window.packed(tokens)
                assert not packed or shift + packed <= -(-tokens // size) * size, (method, tokens)
