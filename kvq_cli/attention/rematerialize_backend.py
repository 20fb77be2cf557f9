"""Attention of one query per row over kept layer inputs (XQuant) by the kernel `rematerialize` of kvq_kernels.

Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvq_kernels.decode_attention import Dense, Side, Uniform
from kvq_kernels.rematerialize import Latents, Norm, Workspace, new_workspace, plan_splits, rematerialize
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.projections import Projection, projections
from kvq_cli.attention.triton_backend import TritonBackend
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.first_channel import FirstChannelCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan


def unsupported(site: AttentionLayer, plan: LayerPlan) -> str | None:
    """Why the kernel cannot compute the attention of a layer that keeps its input; None: it can."""
    if plan.cross_layer is not None:
        return "packed layer inputs are sums over layers, which PyTorch adds up"
    if plan.keys.window != plan.values.window:
        return "keys and values have different windows"
    keys, values = projections(site)
    if values.norm is not None:
        return "values are normalized after their projection"
    if isinstance(norm := key_norm(keys), str):
        return norm
    for codec in (plan.keys.codec, plan.values.codec):
        if not _is_read(codec, codec is plan.keys.codec):
            return f"the storage of {type(codec).__name__} is not read by a kernel"
    return None


def _is_read(codec: Codec, keys: bool) -> bool:
    if keys and isinstance(codec, FirstChannelCodec):
        codec = codec.base
    return type(codec) in (IdentityCodec, UniformCodec)


def key_norm(keys: Projection) -> Norm | str | None:
    """The norm of each head's keys as the kernel takes it; None: there is none; in words: why the kernel cannot.

    What the module computes is found by trying it: of alternating signs, whose mean is 0 and whose mean square 1, every
    norm of one head gives back its weight. Whether it is such a norm is then seen on random numbers.
    """
    if keys.norm is None:
        return None
    if keys.layout == "flat":
        return "keys are normalized over all heads at once"
    heads, dim, device = keys.point.heads, keys.point.head_dim, keys.weight.device
    epsilon = next((getattr(keys.norm, name) for name in ("variance_epsilon", "eps") if hasattr(keys.norm, name)), 0.0)

    def normed(x: Tensor) -> Tensor:
        own = x[:, None] if keys.layout == "heads" else x  # [tokens = 1, heads, dim] or heads first
        return keys.norm.forward(own.unsqueeze(0)).view(heads, dim).float()

    def by(kind: str, x: Tensor) -> Tensor:
        x = x - x.mean(dim=-1, keepdim=True) if kind == "layer" else x
        return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()

    with torch.no_grad():
        signs = torch.ones(heads, dim, device=device)
        signs[:, 1::2] = -1
        noise = 1 + torch.randn(heads, dim, generator=torch.Generator().manual_seed(0)).to(device)
        weight, expected = normed(signs) / by("rms", signs), normed(noise)
        for kind in ("rms", "layer"):
            if torch.allclose(by(kind, noise) * weight, expected, rtol=1e-4, atol=1e-4):
                return Norm(kind, weight, epsilon)
    return f"keys are normalized by {type(keys.norm).__name__}, which the kernel does not compute"


class RematerializeBackend:
    """For the layers of an attached model that keep their input; see `Backend`. engine: the backend of the others,
    which keeps lengths and tables of cosines for all of them. Layers share their workspace."""

    prefill_attention = staticmethod(torch_backend.prefill_attention)

    def __init__(self, engine: TritonBackend, sites: Sequence[AttentionLayer]) -> None:
        self._engine = engine
        self._made: dict[int, tuple[Projection, Projection, Norm | None]] = {}
        for site in sites:
            keys, values = projections(site)
            self._made[site.index] = (keys, values, key_norm(keys))
        self._workspaces: dict[tuple, Workspace] = {}

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads. Layers whose
        scores are of another form are not given to kernels."""
        layer, forward, engine, device = context.layer, context.forward, self._engine, query.device
        lengths = engine._on_device(forward, None, device)
        count = engine._on_device(forward, layer.streams[0].window, device)
        rope = None if layer.rotation.style == "none" else engine._rope(layer.rotation, forward, device)
        keys, values, norm = self._made[layer.index]
        own_keys = _latents(layer.streams[0], keys, layer.plan.keys.up, count, norm)
        own_values = _latents(layer.streams[-1], values, layer.plan.values.up, count)
        q = query[:, :, 0]
        given = {"rope": rope, "window": layer.sliding_window, "workspace": self._workspace(q, own_values)}
        out = rematerialize(q, own_keys, own_values, lengths, context.scaling, **given, backend="triton")
        return out.unsqueeze(2)

    def _workspace(self, query: Tensor, values: Latents) -> Workspace:
        shape = (*query.shape, values.rank, plan_splits(query, values))
        if shape not in self._workspaces:
            self._workspaces[shape] = new_workspace(query, values)
        return self._workspaces[shape]


def _latents(stream: Stream, made: Projection, up: Tensor | None, count: Tensor, norm: Norm | None = None) -> Latents:
    packed, codec, first = stream.store.whole(), stream.codec, None
    if packed is None:
        tensors = Dense(stream.ring)  # nothing of it is read: `count` is 0
    else:
        parts = {name: part.tensor for name, part in packed.parts.items()}
        if isinstance(codec, FirstChannelCodec):
            first, codec = parts["first"], codec.base
        tensors = Dense(parts["raw"]) if isinstance(codec, IdentityCodec) else _uniform(codec, parts)
    held = Side(tensors, count, stream.sinks if stream.window.sinks else None, stream.ring)
    bias = None if made.linear.bias is None else made.linear.bias[made.part]
    return Latents(held, made.weight.T if up is None else up, bias, norm, first)


def _uniform(codec: UniformCodec, parts: dict[str, Tensor]) -> Uniform:
    return Uniform(parts["codes"], parts["scale"], codec.bits, codec.axis, codec.group, parts["zero"])
