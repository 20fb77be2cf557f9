"""Attention of one query per row over cached layer inputs (XQuant) by the kernel `rematerialize` of kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvq_kernels import rematerialize
from kvq_kernels.rematerialize import Latents, Norm
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import side
from kvq_cli.attention.projections import Projection, projections
from kvq_cli.attention.span_backend import SpanBackend
from kvq_cli.attention.triton_backend import TritonBackend
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan


def unsupported(layer: AttentionLayer, plan: LayerPlan) -> str | None:
    """Why the kernel cannot compute the attention of a layer that caches its input; None: it can."""
    if plan.cross_layer is not None:
        return "packed layer inputs are sums over layers, which PyTorch adds up"
    if plan.keys.window != plan.values.window:
        return "keys and values have different windows"
    keys, values = projections(layer)
    if values.norm is not None:
        return "values are normalized after their projection"
    if isinstance(norm := key_norm(keys), str):
        return norm
    if not plan.shared and isinstance(plan.keys.codec, UniformCodec) and plan.keys.codec.axis == "token":
        return "latents of keys are in groups of a token's channels"
    for kind, stream in zip("kv", plan.kept, strict=False):
        if kind not in stream.codec.read_as_latents:
            return f"the storage of {type(stream.codec).__name__} is not read by a kernel"
    return None


def key_norm(keys: Projection) -> Norm | str | None:
    """The norm of each head's keys as the kernel takes it; None: there is none; in words: why the kernel cannot.

    Found by evaluating the module: for alternating signs, with mean 0 and mean square 1, every norm over one head
    returns its weight. Random numbers then verify the norm.
    """
    module = keys.norm
    if module is None:
        return None
    if keys.layout == "flat":
        return "keys are normalized over all heads at once"
    heads, dim, device = keys.point.heads, keys.point.head_dim, keys.weight.device
    epsilon = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), 0.0)

    def normed(x: Tensor) -> Tensor:
        token = x[:, None] if keys.layout == "heads" else x  # [tokens = 1, heads, dim] or heads first
        return module.forward(token.unsqueeze(0)).view(heads, dim).float()

    def by(kind: str, x: Tensor) -> Tensor:
        x = x - x.mean(dim=-1, keepdim=True) if kind == "layer" else x
        return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()

    with torch.no_grad():
        signs = torch.ones(heads, dim, dtype=torch.float32, device=device)
        signs[:, 1::2] = -1
        drawn = torch.randn(heads, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        noise = 1 + drawn.to(device)
        weight, expected = normed(signs) / by("rms", signs), normed(noise)
        for kind in ("rms", "layer"):
            if torch.allclose(by(kind, noise) * weight, expected, rtol=1e-4, atol=1e-4):
                return Norm(kind, weight, epsilon)
    return f"keys are normalized by {type(module).__name__}, which the kernel does not compute"


class RematerializeBackend(SpanBackend):
    """The backend of layers that cache their input; see `Backend`."""

    def __init__(self, engine: TritonBackend, layers: Sequence[AttentionLayer]) -> None:
        super().__init__(engine)
        self._projections: dict[int, tuple[Projection, Projection, Norm | None]] = {}
        for layer in layers:
            keys, values = projections(layer)
            norm = key_norm(keys)
            if isinstance(norm, str):
                raise ValueError(f"{layer.name}: {norm}")
            self._projections[layer.index] = (keys, values, norm)

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads.

        Not used for layers with soft-capping or attention sinks.
        """
        layer, q = context.layer, query[:, :, 0]
        lengths, packed, rope = self._rows(query, context)
        key_projection, value_projection, norm = self._projections[layer.index]
        keys = _latents(layer.streams[0], key_projection, layer.plan.keys.up, packed, norm)
        values = _latents(layer.streams[-1], value_projection, layer.plan.values.up, packed)
        shape = (*q.shape, values.rank, rematerialize.plan_splits(q, values))
        workspace = self._workspace(shape, lambda: rematerialize.new_workspace(q, values))
        options = {"rope": rope, "window": layer.sliding_window, "workspace": workspace}
        out = rematerialize.rematerialize(q, keys, values, lengths, context.scaling, **options, backend="triton")
        return out.unsqueeze(2)


def _latents(
    stream: Stream, projection: Projection, up: Tensor | None, count: Tensor, norm: Norm | None = None
) -> Latents:
    """The layer inputs or latents of a stream as the kernel takes them; `count`: packed tokens of each row."""
    packed, weight = stream.store.whole(), projection.weight.T if up is None else up
    first = None if packed is None else packed.parts.get("first")
    return Latents(side(stream, count), weight, projection.bias, norm, None if first is None else first.tensor)
