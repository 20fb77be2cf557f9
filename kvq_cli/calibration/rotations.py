"""Rotate the channels of a captured stream before it is clustered: by a Hadamard matrix, or by OPQ's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvq_cli.calibration.blocks import draw_coreset, to_blocks
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.kmeans import nearest, weighted_kmeans
from kvq_cli.codecs.hadamard import hadamard
from kvq_cli.methods.specs import BlockShape, CodebookSpec

#: Alternations of codebooks and rotation, Lloyd iterations of each, and the points and tokens they are computed from.
_ROUNDS, _ITERATIONS, _POINTS, _TOKENS = 8, 5, 4096, 16384


def rotate_stream(
    captured: CapturedStream, spec: CodebookSpec, settings: ClusterSettings
) -> tuple[CapturedStream, dict[str, Tensor]]:
    """(the stream with rotated activations and gradients, the tensors that the artifact stores of the rotation)."""
    if spec.rotation == "none":
        return captured, {}
    if spec.rotation == "hadamard":
        x, g = (hadamard(each).bfloat16() for each in (captured.x, captured.g))
        return replace(captured, x=x, g=g), {}
    seen = captured.not_held_out
    spread = torch.stack([sample.float().square().mean(0) for sample in seen]).mean(0).sqrt()
    matrix = fit_rotation(seen, spec, settings)
    x, g = (torch.einsum("sthd,hed->sthe", each.float(), matrix).bfloat16() for each in (captured.x, captured.g))
    return replace(captured, x=x, g=g), {"rotation": matrix, "spread": spread}


def fit_rotation(x: Tensor, spec: CodebookSpec, settings: ClusterSettings) -> Tensor:
    """Optimized product quantization (Ge et al., 2013, https://doi.org/10.1109/TPAMI.2013.240, the non-parametric
    solution): the rotation of each kv head, `[kv_heads, head_dim, head_dim]` float32, for blocks of the first shape.

    x: `[samples, tokens, kv_heads, head_dim]`. Alternates between codebooks of R x and the rotation with the least
    squared error of their centroids y, R = V U^T with the singular value decomposition sum x y^T = U S V^T. The first
    rotation is the identity; errors are not weighted.
    """
    shape = spec.shapes[0]
    x = _sample(x, shape, settings.seed)
    samples, tokens, heads, dim = x.shape
    matrix = torch.eye(dim, dtype=torch.float32, device=x.device).expand(heads, dim, dim)
    for _ in range(_ROUNDS):
        blocks = to_blocks(torch.einsum("sthd,hed->sthe", x, matrix), shape, spec.share)
        points, weights = draw_coreset(blocks, blocks.new_ones(blocks.shape[:2]), _POINTS, settings.seed)
        centroids = weighted_kmeans(
            points, weights, spec.entries, iterations=_ITERATIONS, seed=settings.seed, engine=settings.engine
        )
        codes = nearest(blocks, centroids)
        decoded = centroids.gather(1, codes[..., None].expand_as(blocks))
        y = _from_blocks(decoded, shape, (samples, tokens, heads, dim), spec.share)
        u, _, v = torch.linalg.svd(torch.einsum("sthd,sthe->hde", x.double(), y.double()))
        matrix = (u @ v).mT.float()
    return matrix.contiguous()


def _sample(x: Tensor, shape: BlockShape, seed: int) -> Tensor:
    """At most `_TOKENS` tokens in whole chunks, drawn at random: `[1, tokens, kv_heads, head_dim]` float32."""
    chunks = x.unflatten(1, (-1, shape.tokens)).flatten(0, 1)  # [chunks, l, kv_heads, head_dim]
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed))[: _TOKENS // shape.tokens]
    return chunks[order.sort().values.to(x.device)].float().flatten(0, 1).unsqueeze(0)


def _from_blocks(blocks: Tensor, shape: BlockShape, size: tuple[int, ...], share: int) -> Tensor:
    """The inverse of `to_blocks`: `[codebooks, blocks, shape.size]` -> `[samples, tokens, kv_heads, head_dim]`."""
    samples, tokens, heads, dim = size
    split = blocks.view(
        heads, dim // share, samples, tokens // shape.tokens, share // shape.channels, shape.tokens, shape.channels
    )
    return split.permute(2, 3, 5, 0, 1, 4, 6).reshape(size)
