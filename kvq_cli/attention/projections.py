"""The projection of a layer input to keys (before RoPE) or values, to rematerialize them later.

norm(X W + b), with references to the module's weights and norm: nothing of the model is copied or changed. Checked
against the keys and values of a short forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvq_cli import upcast
from kvq_cli.attention.capture_points import AttentionLayer, CapturePoint
from kvq_cli.errors import UsageError
from kvq_cli.offload import fetched_weight


@dataclass(frozen=True)
class Projection:
    """linear: the module with W and b; keys or values are its outputs `part`. norm: the module applied after it, to
    `[batch, tokens, channels]` ("flat"), `[batch, tokens, kv_heads, head_dim]` ("split") or
    `[batch, kv_heads, tokens, head_dim]` ("heads")."""

    linear: nn.Linear
    part: slice
    point: CapturePoint
    norm: nn.Module | None
    layout: str

    @property
    def weight(self) -> Tensor:
        """W^T, a view: `[kv_heads * head_dim, hidden_size]`."""
        return fetched_weight(self.linear, "weight")[self.part]

    @property
    def bias(self) -> Tensor | None:
        """b, a view: `[kv_heads * head_dim]`; None: there is none."""
        bias = fetched_weight(self.linear, "bias")
        return None if bias is None else bias[self.part]

    def rematerialize(self, x: Tensor, up: Tensor | None) -> Tensor:
        """Keys before RoPE or values, `[rows, kv_heads, tokens, head_dim]`, of the layer inputs `[rows, 1, tokens,
        hidden_size]`, or of latents `[rows, 1, tokens, rank]` where `up` `[rank, kv_heads * head_dim]` is given."""
        weight = self.weight if up is None else up.T
        return self._finish(upcast.linear(x[:, 0].to(self.linear.weight.dtype), weight, self.bias))

    def rematerialize_sums(self, sums: Tensor, up: Tensor | None) -> Tensor:
        """Weighted sums of keys or values, `[rows, kv_heads, queries, head_dim]`, of the sums of layer inputs with the
        same weights, `[rows, kv_heads, queries, rank]`. The weights add up to 1, and there is no norm."""
        weight = (self.weight if up is None else up.T).unflatten(0, (self.point.heads, self.point.head_dim))
        out = sums.to(weight.dtype) @ weight.transpose(1, 2)
        if (bias := self.bias) is None:
            return out.float()
        return out.float() + bias.view(self.point.heads, 1, self.point.head_dim)

    def _finish(self, flat: Tensor) -> Tensor:
        split = flat.unflatten(-1, (self.point.heads, self.point.head_dim))
        if self.norm is None:
            return split.transpose(1, 2)
        # forward, not a call: hooks on the module are for the model's own passes.
        if self.layout == "heads":
            return self.norm.forward(split.transpose(1, 2))
        normed = self.norm.forward(flat if self.layout == "flat" else split)
        return normed.view_as(split).transpose(1, 2)


def projections(layer: AttentionLayer) -> tuple[Projection, Projection]:
    """The projections of `layer` to keys and values; UsageError where they are of an unsupported form."""
    if getattr(getattr(layer.module, "config", None), "clip_qkv", None) is not None:
        # Not left to the probe, whose numbers may all be within the limits.
        raise UsageError(
            f"{layer.name}: its keys and values are clipped, which methods that keep the layer input do not"
        )
    return _projection(layer, layer.key, "k_proj", 1), _projection(layer, layer.value, "v_proj", 2)


def _projection(layer: AttentionLayer, point: CapturePoint | None, name: str, place: int) -> Projection:
    if point is None:
        raise ValueError(f"{layer.name}: its capture points were not requested")
    linear, size, part = getattr(layer.module, name, None), point.heads * point.head_dim, slice(None)
    if linear is None:
        linear = getattr(layer.module, "qkv_proj", None)
        before = getattr(linear, "out_features", 0) - 2 * size
        part = slice(before + (place - 1) * size, before + place * size)
    plain = isinstance(linear, nn.Linear) and not is_traceable_wrapper_subclass(linear.weight)
    if linear is None or not plain or not linear.weight.is_floating_point():
        raise UsageError(f"{layer.name}: {name} has no plain weights, which methods that keep the layer input need")
    probe, norm = layer.probe, None if point.module is linear else point.module
    layout = "" if norm is None else _layout(probe.inputs[id(norm)], point)
    projection = Projection(linear, part, point, norm, layout)
    expected = point.view(probe.outputs[id(point.module)]).float()
    with torch.no_grad():
        error = (projection.rematerialize(probe.input.unsqueeze(1), None).float() - expected).abs().max()
    if not error <= 8 * torch.finfo(linear.weight.dtype).eps * expected.abs().max():
        raise UsageError(
            f"{layer.name}: its keys or values are not computed from the layer input by {name} and a norm alone"
        )
    return projection


def _layout(x: Tensor, point: CapturePoint) -> str:
    if x.ndim == 3:
        return "flat"
    return "heads" if point.heads_first else "split"
