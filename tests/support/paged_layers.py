"""A paged layer of vLLM and its pages, for sequences of given lengths."""

from __future__ import annotations

from dataclasses import replace

import torch
from random_artifacts import random_parts

from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import PLAIN
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import model_shape
from kvq_cli.vllm import rope
from kvq_cli.vllm.batch import Batch, Sequence
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.paged_layer import PagedLayer
from kvq_cli.vllm.shard import WHOLE, Shard

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, DIM = 2, 32
#: Methods of which kernels read all layers in float32, beside the first that each test runs.
KERNEL_METHODS = (
    "fp16",
    "kivi:sinks=5:recent=31",
    "kivi:pre_rope=on:residual=32",
    "innerq:norm=off",
    "innerq:norm=off:mode=symmetric:sinks=3:recent=29",
    "kvquant",
    "kvquant:outliers=0",
    "temporalkv",
    "turboquant:sinks=3:recent=5",
)


class Pages:
    """Layers of a model and pages for sequences of up to `longest` tokens, in shuffled blocks, but for page 0. Pages
    that are not in use have bits of NaN.

    layers: how many; all have the artifact tensors of the first. layer, plan, pool: of the first. block_size: tokens;
    None: as a server chooses it.
    """

    def __init__(
        self,
        model,
        method: str,
        kernels: PagedKernels | None,
        rows: int,
        longest: int,
        shard: Shard = WHOLE,
        layers: int = 1,
        block_size: int | None = None,
    ) -> None:
        whole, built = replace(model_shape(model), layers=layers), build_parsed(method, bits=2)
        self.shape = shape = shard.shape(whole)
        tensors = {}
        if built.calibrates:
            _, drawn = random_parts(built, model)
            tensors = {name.removeprefix("layers.0."): x for name, x in drawn.items()}
        # As in `kvq_cli.vllm.engine`: the layout of tensors on the CPU, then the plan of those on the device.
        self.layout = cache_layout([shard.plan(built, i, whole, tensors) for i in range(layers)], shape, block_size)
        held = {name: x.to(DEVICE) for name, x in tensors.items()}
        plans = [shard.plan(built, i, whole, held) for i in range(layers)]
        self.plan = plans[0]
        rotation = rope.unrotated(DIM)
        if self.plan.keys.source == "pre_rope":
            rotation = rope.layer_rotations(model.config, DIM)[0]
            rotation = replace(rotation, frequencies=rotation.frequencies.to(DEVICE))
        assert isinstance(rotation, Rotation)
        self.layers = [PagedLayer(i, plan, shape, self.layout, rotation, kernels) for i, plan in enumerate(plans)]
        self.layer = self.layers[0]
        size = self.layout.exact.block_size if self.layout.exact else 0
        noise = torch.Generator().manual_seed(0)
        blocks = -(-longest // self.layout.block_size) + 1
        exact = -(-longest // size) + 1 if size else 0
        count = rows * (blocks + exact)
        sizes = 1 + count, self.layout.page_bytes
        pools = [torch.full(sizes, 255, dtype=torch.uint8, device=DEVICE) for _ in range(layers)]
        self.pool = pools[0]
        order = torch.randperm(count, generator=noise).to(DEVICE) + 1
        self.blocks, self.exact_blocks = order[: rows * blocks].view(rows, -1), order[rows * blocks :].view(rows, -1)
        for layer, pool in zip(self.layers, pools, strict=True):
            layer.bind(pools, pool if size else None)
        self.size = size

    def attend(self, begin: int, end: int, pasts, query, key, value, form=PLAIN, layer: int = 0, queries: int = 1):
        """A step in which row i of begin..end has the next tokens of `query[i]`, in one layer. queries: most tokens of
        a row that decodes."""
        sequences, at = [], 0
        for row in range(begin, end):
            new = len(query[row])
            exact = self.exact_blocks[row] if self.size else None
            sequences.append(Sequence(at, at + new, pasts[row], self.blocks[row], exact))
            at += new
        q, k, v = (torch.cat(x[begin:end]) for x in (query, key, value))
        return self.layers[layer].attend(q, k, v, Batch(sequences, queries), DIM**-0.5, form)
